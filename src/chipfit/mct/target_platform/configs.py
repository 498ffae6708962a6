"""Quantization of one operator: immutable, validated values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, Strict, TypeAdapter

from chipfit.errors import ModelingError, UnknownNameError
from chipfit.quantizers.grids import Grid
from chipfit.validation import allowed, by_name, check_value, record

__all__ = ["AttributeQuantizationConfig", "OpQuantizationConfig", "QuantizationConfigOptions"]
__all__ += ["BIAS", "KERAS_DEPTHWISE_KERNEL", "KERAS_KERNEL", "PYTORCH_KERNEL"]
__all__ += ["BIAS_ATTR", "FLOAT_BITWIDTH", "KERNEL_ATTR", "POSITIONAL_ATTR", "QuantizationMethod", "Signedness"]

FLOAT_BITWIDTH = 32
#: generic names of weight attributes, mapped to a framework's own by `OperationsSetToLayers(attr_mapping=...)`
KERNEL_ATTR, BIAS_ATTR, POSITIONAL_ATTR = "kernel_attr", "bias_attr", "pos_attr"
#: the frameworks' own names
PYTORCH_KERNEL, KERAS_KERNEL, KERAS_DEPTHWISE_KERNEL, BIAS = "weight", "kernel", "depthwise_kernel", "bias"


class QuantizationMethod(Enum):
    """The quantization method of a tensor. Serialised by name."""

    POWER_OF_TWO = 0  #: symmetric, uniform, with a power-of-two threshold
    LUT_POT_QUANTIZER = 1  #: a look-up table and a power-of-two threshold
    SYMMETRIC = 2  #: symmetric, uniform
    UNIFORM = 3  #: uniform between any two ends
    LUT_SYM_QUANTIZER = 4  #: a look-up table and a symmetric threshold
    KMEANS = 1  # noqa: PIE796 -- first-generation names of the look-up table
    LUT_QUANTIZER = 1  # noqa: PIE796 -- as KMEANS

    @classmethod
    def of(cls, *, lut: bool, pot: bool, affine: bool) -> QuantizationMethod:
        """Return the method with the given properties: look-up table, power-of-two threshold, zero point."""
        if lut:
            return cls.LUT_POT_QUANTIZER if pot else cls.LUT_SYM_QUANTIZER
        return cls.UNIFORM if affine else cls.POWER_OF_TWO if pot else cls.SYMMETRIC

    @classmethod
    def of_grid(cls, grid: Grid) -> QuantizationMethod:
        """Return the method of a grid."""
        return cls.of(lut=grid.kind == "lut", pot=grid.pot, affine=not grid.symmetric)

    @property
    def lut(self) -> bool:
        """True if quantized values are entries of a look-up table."""
        return self in (QuantizationMethod.LUT_POT_QUANTIZER, QuantizationMethod.LUT_SYM_QUANTIZER)

    @property
    def pot(self) -> bool:
        """True if thresholds are powers of two."""
        return self in (QuantizationMethod.POWER_OF_TWO, QuantizationMethod.LUT_POT_QUANTIZER)

    @property
    def affine(self) -> bool:
        """True if grids have a zero point."""
        return self is QuantizationMethod.UNIFORM

    @property
    def word(self) -> str:
        """The word of `chipfit.decide.overrides.METHODS`."""
        grid = "uniform" if self.affine else "power_of_two" if self.pot else "symmetric"
        return f"lut_{grid}" if self.lut else grid


class Signedness(Enum):
    """The signedness of quantized activations. Serialised by name."""

    AUTO = 0  #: decided per tensor from its data
    SIGNED = 1
    UNSIGNED = 2


Bits = Annotated[int, Field(ge=1, le=64), allowed("an integer from 1 to 64")]
#: None, as scripts leave fields open that have no meaning for them
_FALSE, _FLOAT = (BeforeValidator(lambda v, d=d: d if v is None else v) for d in (False, FLOAT_BITWIDTH))
Flag = Annotated[bool, Strict(False), _FALSE]
Method = Annotated[QuantizationMethod, by_name(QuantizationMethod)]
_WIDTHS: TypeAdapter[tuple[int, ...]] = TypeAdapter(Annotated[tuple[Bits, ...], Field(min_length=1)])


def _widths(given: Any) -> tuple[int, ...]:
    return _WIDTHS.validate_python(tuple(given) if isinstance(given, (list, tuple)) else (given,), strict=True)


#: one width or several
Widths = Annotated[Any, PlainValidator(_widths)]


@record(ModelingError, frozen=True)
class AttributeQuantizationConfig:
    """The quantization of one weight attribute of a layer."""

    weights_quantization_method: Method = QuantizationMethod.POWER_OF_TWO
    weights_n_bits: Annotated[Bits, _FLOAT] = FLOAT_BITWIDTH
    weights_per_channel_threshold: Flag = False
    enable_weights_quantization: Flag = False
    #: bits of the entries of a look-up table; None, or 0 as in MCT: 8
    lut_values_bitwidth: Annotated[Bits | None, BeforeValidator(lambda bits: None if bits == 0 else bits)] = None

    def clone_and_edit(self, **changes: Any) -> AttributeQuantizationConfig:
        """Return a copy with other fields.

        Raises:
            ModelingError: there is no such field.
        """
        return replace(self, **changes)


Attributes = Annotated[Mapping[str, AttributeQuantizationConfig], AfterValidator(dict)]
_Edits = Mapping[str, Mapping[str, Any]] | None
Scale = Annotated[float, Field(gt=0, strict=False, allow_inf_nan=False), allowed("a finite number above 0")]
#: True stands for SIGNED, False for UNSIGNED
_OF_BOOLS = BeforeValidator(lambda v: (Signedness.UNSIGNED, Signedness.SIGNED)[v] if isinstance(v, bool) else v)
Sign = Annotated[Signedness, by_name(Signedness), _OF_BOOLS]


@record(ModelingError, frozen=True)
class OpQuantizationConfig:
    """The quantization of an operator's weights and result.

    Args:
        default_weight_attr_config: for weight attributes without an entry of their own.
        attr_weights_configs_mapping: weight attribute -> its configuration; read-only once a model is complete.
        activation_quantization_method: of the operator's result.
        activation_n_bits: of the operator's result.
        supported_input_activation_n_bits: supported input widths; a producer with a wider result uses another of its
            options.
        enable_activation_quantization: whether the result is quantized.
        quantization_preserving: the result has the scale and zero point of the input.
        fixed_scale, fixed_zero_point: of the result, given by the hardware.
        simd_size: number of elements that one instruction processes.
        signedness: of the result; True stands for SIGNED, False for UNSIGNED.
    """

    default_weight_attr_config: AttributeQuantizationConfig
    attr_weights_configs_mapping: Attributes
    activation_quantization_method: Method
    activation_n_bits: Bits
    supported_input_activation_n_bits: Widths
    enable_activation_quantization: Flag
    quantization_preserving: Flag = False
    fixed_scale: Scale | None = None
    fixed_zero_point: Annotated[int, Strict(False)] | None = None
    simd_size: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    signedness: Sign = Signedness.AUTO

    def __post_init__(self) -> None:
        if self.fixed_zero_point is not None and self.fixed_scale is None:
            raise ModelingError("fixed_zero_point requires fixed_scale", got=self.fixed_zero_point)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields for copies and pickles, which read-only mappings refuse."""
        return {**vars(self), "attr_weights_configs_mapping": dict(self.attr_weights_configs_mapping)}

    def freeze(self) -> None:
        """Make the mapping of weight attributes read-only."""
        vars(self)["attr_weights_configs_mapping"] = MappingProxyType(dict(self.attr_weights_configs_mapping))

    @property
    def max_input_activation_n_bits(self) -> int:
        """The widest supported input [bit]."""
        return max(self.supported_input_activation_n_bits)  # type: ignore[no-any-return]  # widths

    def clone_and_edit(self, attr_to_edit: Mapping[str, Mapping[str, Any]] | None = None, **changes: Any) -> Self:
        """Return a copy with other fields.

        Args:
            attr_to_edit: weight attribute -> fields of its configuration to change.
            changes: fields of this configuration.

        Raises:
            ModelingError: there is no such field or weight attribute.
        """
        edited = check_value(_Edits, attr_to_edit, ModelingError, "OpQuantizationConfig.clone_and_edit", "attr_to_edit")
        clone = copy(self)
        vars(clone).update(vars(OpQuantizationConfig(**vars(self) | changes)))
        attrs = dict(clone.attr_weights_configs_mapping)
        for name, edits in (edited or {}).items():
            if name not in attrs:
                near = UnknownNameError("weight attribute", name, attrs)
                raise ModelingError(near.what, **near.choices)
            attrs[name] = attrs[name].clone_and_edit(**edits)
        vars(clone)["attr_weights_configs_mapping"] = attrs
        return clone


def _some(given: Any) -> Any:
    """Check that a list holds configurations, at least one; return it."""
    name, held = OpQuantizationConfig.__name__, given if isinstance(given, (list, tuple)) else [None]
    if not held:
        raise ModelingError(f"'QuantizationConfigOptions' requires at least one '{name}'. The provided list is empty")
    if wrong := [type(c) for c in held if c is not None and not isinstance(c, OpQuantizationConfig)]:
        raise ModelingError(f"Each option must be an instance of '{name}', but found an object of type: {wrong[0]}")
    return given


@record(ModelingError, frozen=True)
class QuantizationConfigOptions:
    """The configurations that an operator supports.

    Args:
        quantization_config_list: the supported configurations, at least one.
        base_config: the configuration without a search of bit widths; required if there are several.
    """

    quantization_config_list: Annotated[Sequence[OpQuantizationConfig], BeforeValidator(_some), AfterValidator(tuple)]
    base_config: OpQuantizationConfig | None = None

    def __post_init__(self) -> None:
        configs = self.quantization_config_list
        if self.base_config is None and len(configs) > 1:
            what = "For multiple configurations, a 'base_config' is required for non-mixed-precision optimization"
            raise ModelingError(what, got=f"{len(configs)} configurations", hint="base_config=...")
        object.__setattr__(self, "base_config", self.base_config or configs[0])
        if self.base_config not in configs:
            raise ModelingError("base_config must be one of quantization_config_list", got=self.base_config)

    @property
    def base(self) -> OpQuantizationConfig:
        """The base configuration, never None after construction."""
        assert self.base_config is not None  # set in __post_init__
        return self.base_config

    def to_data(self) -> dict[str, Any]:
        """Return the options as data of a file: a list of configurations, and the index of the base configuration."""
        return {"options": self.quantization_config_list, "base": self.quantization_config_list.index(self.base)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> QuantizationConfigOptions:
        """Return the options that data of a file describe.

        Raises:
            ModelingError: a configuration or the index is invalid.
        """
        configs = check_value(list[OpQuantizationConfig], data["options"], ModelingError, "a set", "options", json=True)
        if not 0 <= (base := data.get("base", 0)) < len(configs):
            raise ModelingError("'base' must be an index of 'options'", got=base, allowed=f"0..{len(configs) - 1}")
        return cls(configs, configs[base])

    def _each(self, change: Any) -> QuantizationConfigOptions:
        made = [change(c) for c in self.quantization_config_list]
        return QuantizationConfigOptions(made, made[self.quantization_config_list.index(self.base)])

    def clone_and_edit(self, **changes: Any) -> QuantizationConfigOptions:
        """Return the options with other fields in each.

        Raises:
            ModelingError: there is no such field.
        """
        return self._each(lambda c: c.clone_and_edit(**changes))

    def clone_and_edit_weight_attribute(
        self, attrs: list[str] | None = None, **changes: Any
    ) -> QuantizationConfigOptions:
        """Return the options with other fields for the weight attributes `attrs`, or for all.

        Raises:
            ModelingError: there is no such attribute or field.
        """
        return self._each(lambda c: c.clone_and_edit(dict.fromkeys(attrs or c.attr_weights_configs_mapping, changes)))

    def clone_and_map_weights_attr_keys(
        self, layer_attrs_mapping: Mapping[str, str] | None
    ) -> QuantizationConfigOptions:
        """Return the options with renamed weight attributes; None renames nothing.

        Raises:
            ModelingError: the mapping lacks an attribute.
        """
        if layer_attrs_mapping is None:
            return self

        def renamed(c: OpQuantizationConfig) -> OpQuantizationConfig:
            for a in c.attr_weights_configs_mapping:
                if a not in layer_attrs_mapping:
                    raise ModelingError(f"Attribute mapping lacks '{a}'", allowed=", ".join(layer_attrs_mapping))
            attrs = {layer_attrs_mapping[a]: v for a, v in c.attr_weights_configs_mapping.items()}
            return c.clone_and_edit(attr_weights_configs_mapping=attrs)

        return self._each(renamed)
