"""Inferable quantizers: fixed quantization, described by thresholds, ranges and look-up tables.

A symmetric grid of n bits has the step s = t / 2^(n-1) and covers -t to t - s; unsigned, s = t / 2^n and it covers 0 to
t - s. A uniform grid has s = (b - a) / (2^n - 1), shifted so that 0 is a code. Entries of a look-up table are integers
in units of t / 2^(B-1), unsigned t / 2^B. These classes are for PyTorch tensors; `frameworks.keras.inferable` has those
for Keras.
"""

import inspect
import math
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch

from chipfit.errors import ConfigError
from chipfit.quantizers.grids import Grid, all_codes
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.stored import Stored

#: widest index into a look-up table [bit]
LUT_BITS = 8


def symmetric(
    bits: int,
    threshold: Any,
    signed: bool,
    axis: int | None = None,
    *,
    pot: bool = False,
    table: Sequence[float] | None = None,
    entry_bits: int = LUT_BITS,
) -> Stored:
    """Return a symmetric grid with its scale.

    Args:
        threshold: [] or [C] along `axis`.
        pot: whether the threshold must be a power of two.
        table: entries of a look-up table, `entry_bits` wide.

    Raises:
        ConfigError: a threshold is not positive or not a power of two, or the table does not fit its width.
    """
    t = torch.as_tensor(threshold, dtype=torch.float64)
    if not bool((torch.isfinite(t) & (t > 0)).all()):
        raise ConfigError("A threshold is not positive", got=t.tolist(), allowed="finite numbers above 0")
    if pot and bool((t.log2() != t.log2().round()).any()):
        found = ", ".join(f"{v:g}" for v in t.reshape(-1).tolist())
        raise ConfigError(f"Expected threshold to be power of 2 but is [{found}]")
    width = bits if table is None else entry_bits
    low, high = all_codes(width, signed)
    grid = Grid(bits=bits, qmin=low, qmax=high, pot=pot, per="tensor" if axis is None else "channel")
    if table is not None:
        grid = _with_table(grid, table)
    scale = (t / float(high + 1)).float()
    return Stored(format="", grid=grid, scale=scale, zero_point=torch.zeros_like(scale, dtype=torch.int32), axis=axis)


def _with_table(grid: Grid, table: Sequence[float]) -> Grid:
    entries = tuple(sorted({float(v) for v in table}))
    if grid.bits > LUT_BITS:
        raise ConfigError("A look-up table is too large", got=f"{grid.bits} bits", allowed=f"at most {LUT_BITS} bits")
    most = grid.qmax + (0 if grid.signed else 1)  # unsigned, the threshold itself may be an entry
    if not 2 <= len(entries) <= 1 << grid.bits:
        got, allowed = f"{len(entries)} entries", f"2 to {1 << grid.bits} with {grid.bits} bits"
        raise ConfigError("A look-up table does not fit its width", got=got, allowed=allowed)
    if any(v != round(v) for v in entries) or entries[0] < grid.qmin or entries[-1] > most:
        allowed = f"integers from {grid.qmin} to {most}"
        raise ConfigError("An entry of a look-up table is out of bounds", got=list(entries)[:8], allowed=allowed)
    return replace(grid, kind="lut", table=entries)


def uniform(bits: int, low: Any, high: Any, axis: int | None = None) -> Stored:
    """Return an unsigned grid from low to high, [] or [C] along `axis`, widened to contain 0, with 0 as a code.

    Raises:
        ConfigError: low is not below high.
    """
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (low, high))
    if a.shape != b.shape or not bool((torch.isfinite(a) & torch.isfinite(b) & (a < b)).all()):
        got = f"{a.tolist()} to {b.tolist()}"
        raise ConfigError("A range is empty", got=got, allowed="min_range below max_range, both finite")
    a, b = a.clamp_max(0.0), b.clamp_min(0.0)
    grid = Grid(bits=bits, qmin=0, qmax=(1 << bits) - 1, zero="any", per="tensor" if axis is None else "channel")
    scale = (b - a) / grid.qmax
    zero = torch.round(-a / scale).to(torch.int32)
    return Stored(format="", grid=grid, scale=scale.float(), zero_point=zero, axis=axis)


def parameters(s: Stored) -> dict[str, Any]:
    """Return "threshold", perhaps with "lut_values", or "range_min" and "range_max"; float32 tensors, [] or [C]."""
    return _parameters(s.grid, s.scale, s.zero_point)


def _parameters(grid: Grid, scale: torch.Tensor, zero_point: torch.Tensor) -> dict[str, Any]:
    if not grid.symmetric:
        low, high = ((end - zero_point) * scale for end in (grid.qmin, grid.qmax))
        return {"range_min": low, "range_max": high}
    if grid.table is not None:
        return {"threshold": scale * float(grid.qmax + 1), "lut_values": grid.table}
    return {"threshold": scale * float(1 << grid.bits - int(grid.signed))}


class QuantizerKind(ABCMeta):
    """A class of quantizers, to which those of a quantized model belong that have the same grid and fixed numbers."""

    def __instancecheck__(cls, instance: Any) -> bool:
        alike = getattr(instance, "inferable_class", None)
        return super().__instancecheck__(instance) or (isinstance(alike, type) and issubclass(alike, cls))


class BaseInferableQuantizer(metaclass=QuantizerKind):
    """The base of all quantizers of a layer: those with fixed parameters, and trainable ones, which convert to them."""

    def initialize_quantization(self, tensor_shape: Any, name: str, layer: Any) -> Any:
        """Create the parameters of the quantizer on the layer that holds it; one with fixed parameters creates none.

        Args:
            tensor_shape: shape of the tensor; None, or with None entries, if unknown.
            name: prefix for the names of parameters.
            layer: the module or layer that holds the quantizer.
        """
        return {}


class InferableQuantizer(BaseInferableQuantizer):
    """A quantizer with fixed parameters: it quantizes and dequantizes tensors to the grid `stored`.

    Its arguments are attributes. `threshold`, `min_range`, `max_range` and `lut_values` are lists; the attributes of a
    range are its ends after the shift, as numbers for activations in PyTorch. `eps` is without effect: thresholds are
    positive.

    Raises:
        ConfigError: an argument is not a list, or they do not describe a grid.
    """

    ops: Any = TorchOps
    pot = False  #: thresholds are powers of two
    #: the ends of a range of activations are numbers, and lists of one number otherwise
    ends_are_numbers = True
    __signature__: inspect.Signature

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)
        bound.apply_defaults()
        self._config = given = bound.arguments
        who, per_channel, axis = type(self).__name__, given.get("per_channel", False), given.get("channel_axis")
        if per_channel and axis is None:
            raise ConfigError(f"{who} quantizes per channel without a channel_axis", hint="channel_axis=0")
        for name in _LISTS & set(given):
            if not isinstance(given[name], (list, tuple)) or not given[name]:
                raise ConfigError(f"Expected {name} of {who} to be a list", got=repr(given[name])[:80])
            if name != "lut_values" and not per_channel and len(given[name]) > 1:
                got = f"{name} {given[name]}"[:80]
                raise ConfigError(f"{who} quantizes per tensor, which takes one threshold or range", got=got)
        axis = axis if per_channel else None
        numbers = {n: given[n] if per_channel else given[n][0] for n in _LISTS & set(given) if n != "lut_values"}
        bits, table = given["num_bits"], given.get("lut_values")
        if "threshold" in numbers:
            how = {"pot": self.pot, "table": table, "entry_bits": given.get("lut_values_bitwidth", LUT_BITS)}
            self.stored = symmetric(bits, numbers["threshold"], given.get("signed", True), axis, **how)
        else:
            self.stored = uniform(bits, numbers["min_range"], numbers["max_range"], axis)
            given |= {n: v.reshape(-1).tolist() for n, v in zip(_ENDS, parameters(self.stored).values(), strict=True)}
        self.__dict__ |= given | {f"{name}_np": np.asarray(given[name]) for name in _LISTS & set(given)}
        ends = {name: given[name] for name in _ENDS if name in given}
        self.__dict__ |= {f"adjusted_{name}_np": np.asarray(v) for name, v in ends.items()}
        if self.ends_are_numbers and "per_channel" not in given:
            self.__dict__ |= {name: v[0] for name, v in ends.items()}

    def __call__(self, inputs: Any) -> Any:
        """Return floats on the grid, [*dims], for floats [*dims]."""
        rank, axis = len(inputs.shape), self.stored.axis
        shape = [] if axis is None else [-1 if k == axis % rank else 1 for k in range(rank)]
        s, z = (
            self.ops.reshape(self.ops.constant([float(v) for v in p.reshape(-1)], inputs), shape)
            for p in (self.stored.scale, self.stored.zero_point)
        )
        return self.ops.fake_quantize(inputs, s, z, self.stored.grid)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return dict(self._config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(**config)


_ENDS = "min_range", "max_range"
_LISTS = {"threshold", *_ENDS, "lut_values"}
_DEFAULTS = {"channel_axis": None, "input_rank": None, "lut_values_bitwidth": LUT_BITS, "eps": 1e-8}
_CHANNELS = "per_channel channel_axis input_rank"
#: prefix of "InferableQuantizer" in the class name -> its arguments
_ARGUMENTS = {
    "WeightsSymmetric": f"num_bits threshold {_CHANNELS}",
    "WeightsPOT": f"num_bits threshold {_CHANNELS}",
    "WeightsUniform": f"num_bits min_range max_range {_CHANNELS}",
    "WeightsLUTSymmetric": f"num_bits lut_values threshold {_CHANNELS} lut_values_bitwidth eps",
    "WeightsLUTPOT": f"num_bits lut_values threshold {_CHANNELS} lut_values_bitwidth eps",
    "ActivationSymmetric": "num_bits threshold signed",
    "ActivationPOT": "num_bits threshold signed",
    "ActivationUniform": "num_bits min_range max_range",
    "ActivationLutPOT": "num_bits lut_values threshold signed lut_values_bitwidth eps",
}
#: all of them, and the forms as arrays
ARGUMENTS = {a for row in _ARGUMENTS.values() for a in row.split()} | {f"{name}_np" for name in _LISTS}
ARGUMENTS |= {f"adjusted_{name}_np" for name in _ENDS}


def _class(name: str, arguments: str) -> type[InferableQuantizer]:
    kind, empty = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    takes = inspect.Signature([inspect.Parameter(a, kind, default=_DEFAULTS.get(a, empty)) for a in arguments.split()])
    about = {"__signature__": takes, "pot": name.endswith("POT"), "__doc__": InferableQuantizer.__doc__}
    return type(f"{name}InferableQuantizer", (InferableQuantizer,), {**about, "__module__": __name__})


#: name -> class
CLASSES = {made.__name__: made for made in (_class(*row) for row in _ARGUMENTS.items())}
globals().update(CLASSES)


def inferable_for(stored: Stored, role: str, classes: Mapping[str, Any] = CLASSES) -> Any:
    """Return the inferable quantizer of a tensor.

    Args:
        role: "weight" or "activation".
        classes: the framework's classes, by name.
    """
    grid, given = stored.grid, description(stored.grid, stored.scale, stored.zero_point, stored.axis)
    dropped = {"signed"} if role == "weight" or not grid.symmetric else set()
    dropped |= set() if role == "weight" else {"per_channel", "channel_axis"}
    given = {name: value for name, value in given.items() if name not in dropped}
    return classes[class_name(grid, role)](**given)


def class_name(grid: Grid, role: str) -> str:
    """Return the name of the inferable quantizer for a grid; `role` is "weight" or "activation"."""
    kind = ("POT" if grid.pot else "Symmetric") if grid.symmetric else "Uniform"
    if grid.table is not None:
        kind = "LUT" + kind if role == "weight" else "Lut" + kind
    return f"{role.capitalize()}{'s' if role == 'weight' else ''}{kind}InferableQuantizer"


def description(grid: Grid, scale: torch.Tensor, zero_point: torch.Tensor, axis: int | None) -> dict[str, Any]:
    """Return the arguments of inferable quantizers, for weights and for activations; shapes are those of `Stored`."""
    numbers = _parameters(grid, scale, zero_point)
    names = {"range_min": "min_range", "range_max": "max_range"}
    lists = {names.get(k, k): v.reshape(-1).tolist() for k, v in numbers.items() if k != "lut_values"}
    given = {"num_bits": grid.bits, **lists, "signed": grid.signed}
    given |= {"per_channel": axis is not None, "channel_axis": axis}
    if grid.table is not None:
        given |= {"lut_values": list(grid.table), "lut_values_bitwidth": int(math.log2(grid.qmax - grid.qmin + 1))}
    return given
