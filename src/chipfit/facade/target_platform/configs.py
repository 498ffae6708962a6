"""How one operator is quantized: immutable values, checked when they are made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from chipfit.errors import ModelingError, UnknownNameError

FLOAT_BITWIDTH = 32
#: generic names of weight attributes, mapped to a framework's own by `OperationsSetToLayers(attr_mapping=...)`
KERNEL_ATTR, BIAS_ATTR, POSITIONAL_ATTR = "kernel_attr", "bias_attr", "pos_attr"

T = TypeVar("T")


class QuantizationMethod(Enum):
    """Method for quantization function selection. Serialised by name."""

    POWER_OF_TWO = 0  #: symmetric, uniform, the threshold is a power of two
    LUT_POT_QUANTIZER = 1  #: a look-up table and a power-of-two threshold
    SYMMETRIC = 2  #: symmetric, uniform
    UNIFORM = 3  #: uniform between any two ends
    LUT_SYM_QUANTIZER = 4  #: a look-up table and a symmetric threshold
    KMEANS = 1  # noqa: PIE796 -- first-generation names of the look-up table
    LUT_QUANTIZER = 1  # noqa: PIE796 -- the same


class Signedness(Enum):
    """Whether activation codes have a sign. Serialised by name."""

    AUTO = 0  #: decided per tensor from its data
    SIGNED = 1
    UNSIGNED = 2


def _bits(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
        raise ModelingError(f"{name} is a number of bits", got=repr(value), allowed="an integer from 1 to 64")


def _kind(name: str, value: Any, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ModelingError(
            f"{name} has the wrong type", got=f"{value!r} of type {type(value).__name__}", allowed=names
        )


def _edit(record: T, changes: Mapping[str, Any]) -> T:
    """`dataclasses.replace` that names unknown fields."""
    known = [f.name for f in fields(record)]  # type: ignore[arg-type]  # records are dataclasses
    for name in changes:
        if name not in known:
            near = UnknownNameError(f"field of {type(record).__name__}", name, known)
            raise ModelingError(near.what, allowed=near.allowed)
    return replace(record, **changes)  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class AttributeQuantizationConfig:
    """How one weight attribute of a layer is stored."""

    weights_quantization_method: QuantizationMethod = QuantizationMethod.POWER_OF_TWO
    weights_n_bits: int = FLOAT_BITWIDTH
    weights_per_channel_threshold: bool = False
    enable_weights_quantization: bool = False
    lut_values_bitwidth: int | None = None  #: width of the entries of a look-up table; None: 8

    def __post_init__(self) -> None:
        _kind("weights_quantization_method", self.weights_quantization_method, QuantizationMethod)
        _bits("weights_n_bits", self.weights_n_bits)
        if self.lut_values_bitwidth is not None:
            _bits("lut_values_bitwidth", self.lut_values_bitwidth)

    def clone_and_edit(self, **changes: Any) -> AttributeQuantizationConfig:
        """A copy with other fields.

        Raises:
            ModelingError: a field that does not exist.
        """
        return _edit(self, changes)


@dataclass(frozen=True, eq=True)
class OpQuantizationConfig:
    """How an operator's weights and its result are quantized.

    Args:
        default_weight_attr_config: for weight attributes without an entry of their own.
        attr_weights_configs_mapping: weight attribute -> its configuration.
        activation_quantization_method: of the operator's result.
        activation_n_bits: of the operator's result.
        supported_input_activation_n_bits: widths that the operator takes as input; a producer that would write wider codes
            gets another of its options.
        enable_activation_quantization: whether the result is quantized.
        quantization_preserving: the result has the scale and zero point of the input.
        fixed_scale, fixed_zero_point: dictated by the hardware for the result.
        simd_size: elements that one instruction processes.
        signedness: of the result's codes.
    """

    default_weight_attr_config: AttributeQuantizationConfig
    attr_weights_configs_mapping: Mapping[str, AttributeQuantizationConfig]
    activation_quantization_method: QuantizationMethod
    activation_n_bits: int
    supported_input_activation_n_bits: int | tuple[int, ...]
    enable_activation_quantization: bool
    quantization_preserving: bool = False
    fixed_scale: float | None = None
    fixed_zero_point: int | None = None
    simd_size: int | None = None
    signedness: Signedness = Signedness.AUTO

    def __post_init__(self) -> None:
        _kind("default_weight_attr_config", self.default_weight_attr_config, AttributeQuantizationConfig)
        _kind("attr_weights_configs_mapping", self.attr_weights_configs_mapping, Mapping)
        for name, config in self.attr_weights_configs_mapping.items():
            _kind(f"attr_weights_configs_mapping['{name}']", config, AttributeQuantizationConfig)
        _kind("activation_quantization_method", self.activation_quantization_method, QuantizationMethod)
        _bits("activation_n_bits", self.activation_n_bits)
        _kind("signedness", self.signedness, Signedness)
        supported = self.supported_input_activation_n_bits
        supported = tuple(supported) if isinstance(supported, (list, tuple)) else (supported,)
        for b in supported or ("none",):
            _bits("supported_input_activation_n_bits", b)
        if self.fixed_scale is not None and not self.fixed_scale > 0:
            raise ModelingError("fixed_scale is positive", got=self.fixed_scale)
        if (self.fixed_zero_point is not None) and self.fixed_scale is None:
            raise ModelingError("fixed_zero_point needs fixed_scale", got=self.fixed_zero_point)
        if self.simd_size is not None and (not isinstance(self.simd_size, int) or self.simd_size < 1):
            raise ModelingError("simd_size is a positive integer, or None", got=self.simd_size)
        object.__setattr__(self, "supported_input_activation_n_bits", supported)
        object.__setattr__(
            self, "attr_weights_configs_mapping", MappingProxyType(dict(self.attr_weights_configs_mapping))
        )

    def __hash__(self) -> int:
        return hash(repr(self))

    @property
    def max_input_activation_n_bits(self) -> int:
        """The widest input that the operator takes [bit]."""
        supported = self.supported_input_activation_n_bits
        assert isinstance(supported, tuple)  # made one in __post_init__
        return max(supported)

    def clone_and_edit(
        self, attr_to_edit: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any
    ) -> OpQuantizationConfig:
        """A copy with other fields.

        Args:
            attr_to_edit: weight attribute -> fields of its configuration to change.
            changes: fields of this configuration.

        Raises:
            ModelingError: a field, or a weight attribute, that does not exist.
        """
        attrs = dict(changes.pop("attr_weights_configs_mapping", self.attr_weights_configs_mapping))
        for name, edits in (attr_to_edit or {}).items():
            if name not in attrs:
                near = UnknownNameError("weight attribute", name, attrs)
                raise ModelingError(near.what, allowed=near.allowed)
            attrs[name] = attrs[name].clone_and_edit(**edits)
        return _edit(self, {**changes, "attr_weights_configs_mapping": attrs})


@dataclass(frozen=True)
class QuantizationConfigOptions:
    """The configurations that an operator may take.

    Args:
        quantization_config_list: the possible configurations, at least one.
        base_config: the one to use where bits are not searched; needed when there are several, and one of them.
    """

    quantization_config_list: tuple[OpQuantizationConfig, ...]
    base_config: OpQuantizationConfig | None = field(default=None)

    def __init__(
        self, quantization_config_list: Iterable[OpQuantizationConfig], base_config: OpQuantizationConfig | None = None
    ) -> None:
        if not isinstance(quantization_config_list, (list, tuple)):
            raise ModelingError(
                "quantization_config_list must be a list",
                got=f"{quantization_config_list!r} of type {type(quantization_config_list).__name__}",
            )
        if not quantization_config_list:
            raise ModelingError(
                "quantization_config_list must hold at least one OpQuantizationConfig", got="an empty list"
            )
        for c in quantization_config_list:
            if not isinstance(c, OpQuantizationConfig):
                raise ModelingError(
                    "Each option must be an OpQuantizationConfig", got=f"{c!r} of type {type(c).__name__}"
                )
        configs = tuple(quantization_config_list)
        if base_config is None:
            if len(configs) > 1:
                raise ModelingError(
                    f"With {len(configs)} options, base_config must say which one holds where bits are not searched",
                    hint="base_config=...",
                )
            base_config = configs[0]
        if base_config not in configs:
            raise ModelingError("base_config must be one of quantization_config_list", got=base_config)
        object.__setattr__(self, "quantization_config_list", configs)
        object.__setattr__(self, "base_config", base_config)

    @property
    def base(self) -> OpQuantizationConfig:
        """base_config, which is always known once the options are made."""
        assert self.base_config is not None  # set in __init__
        return self.base_config

    def _each(self, change: Any) -> QuantizationConfigOptions:
        made = [change(c) for c in self.quantization_config_list]
        return QuantizationConfigOptions(made, made[self.quantization_config_list.index(self.base)])

    def clone_and_edit(self, **changes: Any) -> QuantizationConfigOptions:
        """Every option with other fields.

        Raises:
            ModelingError: a field that does not exist.
        """
        return self._each(lambda c: c.clone_and_edit(**changes))

    def clone_and_edit_weight_attribute(
        self, attrs: list[str] | None = None, **changes: Any
    ) -> QuantizationConfigOptions:
        """Every option with other fields for the weight attributes `attrs`, or for all of them.

        Raises:
            ModelingError: an attribute or a field that does not exist.
        """
        return self._each(lambda c: c.clone_and_edit(dict.fromkeys(attrs or c.attr_weights_configs_mapping, changes)))

    def clone_and_map_weights_attr_keys(
        self, layer_attrs_mapping: Mapping[str, str] | None
    ) -> QuantizationConfigOptions:
        """Every option with its weight attributes renamed; None leaves them.

        Raises:
            ModelingError: an attribute that the mapping does not name.
        """
        if layer_attrs_mapping is None:
            return self

        def renamed(c: OpQuantizationConfig) -> OpQuantizationConfig:
            for a in c.attr_weights_configs_mapping:
                if a not in layer_attrs_mapping:
                    raise ModelingError(
                        f"The attribute mapping does not name '{a}'", allowed=", ".join(layer_attrs_mapping)
                    )
            return c.clone_and_edit(
                attr_weights_configs_mapping={
                    layer_attrs_mapping[a]: v for a, v in c.attr_weights_configs_mapping.items()
                }
            )

        return self._each(renamed)
