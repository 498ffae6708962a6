"""Describe the target hardware: operator sets, quantization options, fusions, and the layers of a framework that they stand for."""

from __future__ import annotations

from chipfit.platform.filters import AttributeFilter
from chipfit.platform.modeling.capabilities import (
    Contains,
    DefaultDict,
    Eq,
    Greater,
    GreaterEq,
    LayerFilterParams,
    NotEq,
    OperationsSetToLayers,
    OperationsToLayers,
    Smaller,
    SmallerEq,
    TargetPlatformCapabilities,
)
from chipfit.platform.modeling.configs import (
    BIAS_ATTR,
    FLOAT_BITWIDTH,
    KERNEL_ATTR,
    POSITIONAL_ATTR,
    AttributeQuantizationConfig,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
)
from chipfit.platform.modeling.files import export_target_platform_capabilities, load_target_platform_capabilities
from chipfit.platform.modeling.model import (
    Fusing,
    OperatorSetConcat,
    OperatorsSet,
    TargetPlatformModel,
    get_default_quantization_config_options,
)
from chipfit.platform.modeling.targets import get_target_platform_capabilities

OperatorSetGroup = OperatorSetConcat  #: its later name

__all__ = [
    "BIAS_ATTR",
    "FLOAT_BITWIDTH",
    "KERNEL_ATTR",
    "POSITIONAL_ATTR",
    "AttributeFilter",
    "AttributeQuantizationConfig",
    "Contains",
    "DefaultDict",
    "Eq",
    "Fusing",
    "Greater",
    "GreaterEq",
    "LayerFilterParams",
    "NotEq",
    "OpQuantizationConfig",
    "OperationsSetToLayers",
    "OperationsToLayers",
    "OperatorSetConcat",
    "OperatorSetGroup",
    "OperatorsSet",
    "QuantizationConfigOptions",
    "QuantizationMethod",
    "Signedness",
    "Smaller",
    "SmallerEq",
    "TargetPlatformCapabilities",
    "TargetPlatformModel",
    "export_target_platform_capabilities",
    "get_default_quantization_config_options",
    "get_target_platform_capabilities",
    "load_target_platform_capabilities",
]
