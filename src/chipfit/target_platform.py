"""Describe the target hardware: operator sets, quantization options, fusions, and the layers of a framework that they stand for."""

from __future__ import annotations

from chipfit.facade.target_platform.capabilities import (
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
from chipfit.facade.target_platform.configs import (
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
from chipfit.facade.target_platform.files import export_target_platform_capabilities, load_target_platform_capabilities
from chipfit.facade.target_platform.model import (
    Fusing,
    OperatorSetConcat,
    OperatorsSet,
    TargetPlatformModel,
    get_default_quantization_config_options,
)
from chipfit.facade.target_platform.targets import get_target_platform_capabilities
from chipfit.platform.filters import AttributeFilter

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
