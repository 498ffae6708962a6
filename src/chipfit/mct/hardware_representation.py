"""First-generation names of `chipfit.target_platform`, with the signatures of that time.

A configuration has five arguments for weights, which describe the kernel; biases stay in float.
"""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Self

from chipfit.mct.target_platform import configs
from chipfit.mct.target_platform.capabilities import TargetPlatformCapabilities
from chipfit.mct.target_platform.model import TargetPlatformModel
from chipfit.mct.target_platform.targets import get_target_platform_capabilities

__all__ = ["FrameworkHardwareModel", "HardwareModel", "OpQuantizationConfig", "get_model"]

#: argument of the first generation -> field of the kernel's configuration
_KERNEL = {
    **{f.name: f.name for f in fields(configs.AttributeQuantizationConfig) if f.name != "lut_values_bitwidth"},
    "weights_multiplier_nbits": "lut_values_bitwidth",
}


class OpQuantizationConfig(configs.OpQuantizationConfig):
    """The quantization of an operator's weights and result.

    Args:
        activation_quantization_method: of the result.
        weights_quantization_method: of the kernel.
        activation_n_bits: of the result.
        weights_n_bits: of the kernel.
        weights_per_channel_threshold: one threshold for each output channel.
        enable_weights_quantization: quantize the kernel.
        enable_activation_quantization: quantize the result.
        quantization_preserving: the result has the scale and zero point of the input.
        fixed_scale, fixed_zero_point: of the result, given by the hardware.
        weights_multiplier_nbits: width of the entries of a look-up table; 8 when omitted.
    """

    def __init__(
        self,
        activation_quantization_method: configs.QuantizationMethod,
        weights_quantization_method: configs.QuantizationMethod,
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
        kernel = weights_quantization_method, weights_n_bits, weights_per_channel_threshold, enable_weights_quantization
        weights = {configs.KERNEL_ATTR: configs.AttributeQuantizationConfig(*kernel, weights_multiplier_nbits)}
        result = activation_quantization_method, activation_n_bits, 64, enable_activation_quantization
        dictated = quantization_preserving, fixed_scale, fixed_zero_point
        super().__init__(configs.AttributeQuantizationConfig(), weights, *result, *dictated)

    #: replaces the inherited signature
    __signature__ = inspect.signature(functools.partial(__init__, None))  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name not in _KERNEL:
            raise AttributeError(f"'{type(self).__name__}' has no attribute '{name}'")
        return getattr(self.attr_weights_configs_mapping[configs.KERNEL_ATTR], _KERNEL[name])

    def clone_and_edit(self, attr_to_edit: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> Self:
        """Return a copy with other arguments.

        Raises:
            ModelingError: there is no such argument.
        """
        attributes = dict(attr_to_edit or {})
        kernel = {_KERNEL[k]: changes.pop(k) for k in list(changes) if k in _KERNEL}
        attributes[configs.KERNEL_ATTR] = {**attributes.get(configs.KERNEL_ATTR, {}), **kernel}
        return super().clone_and_edit(attributes, **changes)


class HardwareModel(TargetPlatformModel):
    """First-generation name of `TargetPlatformModel`."""

    def __init__(self, default_qco: configs.QuantizationConfigOptions, name: str = "default_hwm") -> None:
        super().__init__(default_qco, name=name)


class FrameworkHardwareModel(TargetPlatformCapabilities):
    """First-generation name of `TargetPlatformCapabilities`."""

    def __init__(self, hw_model: TargetPlatformModel, name: str = "base") -> None:
        super().__init__(hw_model, name)


def get_model(fw_name: str, hw_name: str) -> TargetPlatformCapabilities:
    """Return a built-in chip for a framework; first-generation name of `get_target_platform_capabilities`."""
    return get_target_platform_capabilities(fw_name, hw_name)
