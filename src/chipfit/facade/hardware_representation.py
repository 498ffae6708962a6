"""First-generation names of `chipfit.target_platform`: the same values under the signatures of that time.

A configuration says its weights in five arguments, which are those of the kernel; biases stay in float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from chipfit.facade.target_platform.capabilities import (
    Contains,
    Eq,
    Greater,
    GreaterEq,
    LayerFilterParams,
    NotEq,
    OperationsSetToLayers,
    Smaller,
    SmallerEq,
    TargetPlatformCapabilities,
)
from chipfit.facade.target_platform.configs import (
    KERNEL_ATTR,
    AttributeQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
)
from chipfit.facade.target_platform.configs import OpQuantizationConfig as _OpQuantizationConfig
from chipfit.facade.target_platform.model import (
    Fusing,
    OperatorSetConcat,
    OperatorsSet,
    TargetPlatformModel,
    get_default_quantization_config_options,
)
from chipfit.facade.target_platform.targets import get_target_platform_capabilities

#: argument of the first generation -> field of the kernel's configuration
_KERNEL = {
    "weights_quantization_method": "weights_quantization_method",
    "weights_n_bits": "weights_n_bits",
    "weights_per_channel_threshold": "weights_per_channel_threshold",
    "enable_weights_quantization": "enable_weights_quantization",
    "weights_multiplier_nbits": "lut_values_bitwidth",
}


@dataclass(frozen=True, init=False, repr=False)
class OpQuantizationConfig(_OpQuantizationConfig):
    """How an operator's weights and its result are quantized.

    Args:
        activation_quantization_method: of the result.
        weights_quantization_method: of the kernel.
        activation_n_bits: of the result.
        weights_n_bits: of the kernel.
        weights_per_channel_threshold: one threshold for each output channel.
        enable_weights_quantization: whether the kernel is quantized.
        enable_activation_quantization: whether the result is.
        quantization_preserving: the result has the scale and zero point of the input.
        fixed_scale, fixed_zero_point: dictated by the hardware for the result.
        weights_multiplier_nbits: width of the entries of a look-up table; 8 when omitted.
    """

    def __init__(
        self,
        activation_quantization_method: QuantizationMethod,
        weights_quantization_method: QuantizationMethod,
        activation_n_bits: int,
        weights_n_bits: int,
        weights_per_channel_threshold: bool,
        enable_weights_quantization: bool,
        enable_activation_quantization: bool,
        quantization_preserving: bool = False,
        fixed_scale: float | None = None,
        fixed_zero_point: int | None = None,
        weights_multiplier_nbits: int | None = None,
    ) -> None:
        kernel = AttributeQuantizationConfig(
            weights_quantization_method,
            weights_n_bits,
            weights_per_channel_threshold,
            enable_weights_quantization,
            weights_multiplier_nbits,
        )
        super().__init__(
            AttributeQuantizationConfig(),
            {KERNEL_ATTR: kernel},
            activation_quantization_method,
            activation_n_bits,
            64,
            enable_activation_quantization,
            quantization_preserving,
            fixed_scale,
            fixed_zero_point,
        )

    def __getattr__(self, name: str) -> Any:
        if name not in _KERNEL:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        return getattr(self.attr_weights_configs_mapping[KERNEL_ATTR], _KERNEL[name])

    def clone_and_edit(self, attr_to_edit: Any = None, **changes: Any) -> OpQuantizationConfig:
        """A copy with other arguments.

        Raises:
            ModelingError: an argument that does not exist.
        """
        kernel = {_KERNEL[k]: changes.pop(k) for k in list(changes) if k in _KERNEL}
        names = [
            "activation_quantization_method",
            "activation_n_bits",
            "enable_activation_quantization",
            "quantization_preserving",
            "fixed_scale",
            "fixed_zero_point",
        ]
        _OpQuantizationConfig.clone_and_edit(self.plain, attr_to_edit, **changes)  # names unknown fields
        weights = self.attr_weights_configs_mapping[KERNEL_ATTR].clone_and_edit(**kernel)
        now = {n: changes.get(n, getattr(self, n)) for n in names}
        return OpQuantizationConfig(**now, **{first: getattr(weights, then) for first, then in _KERNEL.items()})

    @property
    def plain(self) -> _OpQuantizationConfig:
        """The same values in today's class."""
        names = _OpQuantizationConfig.__dataclass_fields__
        return _OpQuantizationConfig(**{n: getattr(self, n) for n in names})


class HardwareModel(TargetPlatformModel):
    """First-generation name of `TargetPlatformModel`."""

    def __init__(self, default_qco: QuantizationConfigOptions, name: str = "default_hwm") -> None:
        super().__init__(default_qco, name=name)


class FrameworkHardwareModel(TargetPlatformCapabilities):
    """First-generation name of `TargetPlatformCapabilities`."""

    def __init__(self, hw_model: TargetPlatformModel, name: str = "base") -> None:
        super().__init__(hw_model, name)


def get_model(fw_name: str, hw_name: str) -> TargetPlatformCapabilities:
    """A built-in chip for a framework; first-generation name of `get_target_platform_capabilities`."""
    return get_target_platform_capabilities(fw_name, hw_name)


__all__ = [
    "Contains",
    "Eq",
    "FrameworkHardwareModel",
    "Fusing",
    "Greater",
    "GreaterEq",
    "HardwareModel",
    "LayerFilterParams",
    "NotEq",
    "OpQuantizationConfig",
    "OperationsSetToLayers",
    "OperatorSetConcat",
    "OperatorsSet",
    "QuantizationConfigOptions",
    "QuantizationMethod",
    "Smaller",
    "SmallerEq",
    "get_default_quantization_config_options",
    "get_model",
]
