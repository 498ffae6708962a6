"""The base of training algorithms: formulas that quantize a tensor while its parameters train, for all frameworks."""

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Self

import torch

from chipfit.errors import ConfigError
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp, ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import registered

#: greatest width that trains [bit]: steps of wider grids are lost in float32
MOST_BITS = 16
#: lower limit of a trained scale, unless a fraction of its first value is smaller
EPS = torch.finfo(torch.float32).eps

#: name -> parameter or constant of one quantizer, which broadcasts against its tensor
Numbers = Mapping[str, Any]
#: initial values of parameters or constants by name, [] or [C]
Tensors = dict[str, torch.Tensor]
#: a weight; None for an activation
Weight = torch.Tensor | None


class Algorithm:
    """The base of all training algorithms: straight-through rounding to a grid whose scale trains.

    A subclass is a frozen dataclass, registered under its name; its fields are the options, with defaults. It overrides
    the methods that differ: `constants` and `init` are called once, then `numbers`, `reals` and `call` in each step.
    When training ends, `numbers` become the plan's and `reals` the weights, so that the plan quantizes as training
    did. An algorithm that treats activations differently has a field `activations`, which `for_tensor` sets.

    `ops` is `quantizers.ops.TorchOps` or its twin for Keras. `p` holds the parameters of `init`, the `constants`, and
    `training`, whether this is a training step.
    """

    #: reason why a trained tensor cannot be deployed, by its role; missing roles can
    undeployable: Mapping[str, str] = {}
    #: parameters that are [N] for N levels, and do not broadcast against the tensor
    vectors: tuple[str, ...] = ()
    #: what it rounds stays the same when a weight is multiplied by a number, so that a layer has no scale of its own
    scale_invariant = False
    equal_steps = False  #: it quantizes in equal steps alone, and refuses look-up tables

    def refuses(self, grid: Grid, role: str) -> str:
        """Return why it cannot quantize a tensor ("weight" or "activation") to this grid; "" if it can."""
        return "the format's codes are entries of a table" if self.equal_steps and grid.table is not None else ""

    def grid(self, grid: Grid) -> Grid:
        """Return the grid that it uses: the plan's, unless the algorithm has levels of its own."""
        return grid

    def constants(self, stored: Stored, x: Weight) -> Tensors:
        """Return constants by name, here the plan's scale and zero point and the least scale.

        Arguments and shapes are those of `init`; parameters override constants by name.
        """
        least = torch.clamp(stored.scale / 16, max=EPS)
        return {"scale": stored.scale, "zero_point": stored.zero_point, "least": least}

    def for_tensor(self, stored: Stored, role: str, shape: tuple[int | None, ...]) -> Self:
        """Return the algorithm for one tensor: itself, with `activations` set, unless it has state for each tensor.

        Args:
            stored: grid, scale and zero point, with the channel axis in the framework's layout.
            role: "weight" or "activation".
            shape: shape of the tensor in that layout, None for a dynamic size.
        """
        return replace(self, activations=role == "activation") if hasattr(self, "activations") else self  # type: ignore[type-var]

    def start(self, host: Any) -> None:
        """Register state besides the parameters of `init` on the module or layer that hosts it."""

    def init(self, stored: Stored, x: Weight) -> Tensors:
        """Return the initial values of the parameters by name, each [] or [C], float32.

        Args:
            stored: the plan's grid, scale and zero point.
            x: the weight; None for an activation.
        """
        return {"scale": stored.scale}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        """Return scale and zero point as the chip would store them now; gradients flow to the parameters."""
        return positive(ops, p["scale"], p["least"], grid), p["zero_point"]

    def table(self, ops: Any, p: Numbers, grid: Grid) -> Any:
        """Return the current levels, ascending [N], in units of the scale; None for those of the grid."""
        return None

    def rescaled(self, ops: Any, p: Numbers, factor: Any) -> dict[str, Any]:
        """Return parameters with which the scale of `numbers` is multiplied by `factor`, to satisfy a scale bound.

        Args:
            p: the parameters, each [] or [C].
            factor: [] or [C], a power of two if the scale is one.
        """
        return {name: p[name] * factor for name in (("scale",) if "scale" in p else p)}

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        """Return the floats that are quantized in place of x [*dims]: the final weights when training ends."""
        return x

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        """Return x [*dims] fake-quantized: the value is `fake_quantize(reals, *numbers)`, the gradient is its own."""
        s, z = self.numbers(ops, p, grid)
        return ops.fake_quantize(self.reals(ops, x, p, grid), s, z, grid)


class FixedGrid(Algorithm):
    """The base of algorithms whose grids stay where calibration put them."""

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return {}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        return p["scale"], p["zero_point"]


def with_levels(grid: Grid, table: Iterable[float] | None) -> Grid:
    """Return the grid with the distinct levels of `Algorithm.table`."""
    return grid if table is None else replace(grid, table=tuple(sorted(set(table))))


def positive(ops: Any, s: Any, least: Any, grid: Grid) -> Any:
    """Return |s|, at least `least`; on a power-of-two grid 2^round(log2 s), straight through."""
    return snapped(ops, ops.maximum(ops.abs(s), least), grid)


def snapped(ops: Any, s: Any, grid: Grid) -> Any:
    """Return a scale above 0; on a power-of-two grid 2^round(log2 s), straight through."""
    if not grid.pot:
        return s
    log = ops.log2(s)
    return ops.power(2.0, ste(ops, log, ops.round(log)))


def rows_by_scale(x: torch.Tensor, stored: Stored) -> torch.Tensor:
    """Return a weight as [N], or [C, N] with one scale for each row."""
    x = x.detach().to(stored.scale.dtype)
    return x.movedim(stored.axis or 0, 0).reshape(len(stored.scale), -1) if stored.scale.dim() else x.flatten()


def revived(stored: Stored, x: Weight) -> Stored:
    """Return the storage from which training starts: channels of a weight that are all 0 have the greatest scale.

    That of calibration is so small that it would clip whatever they become, and no gradient might lead away from it.
    """
    if x is None or not stored.scale.dim() or stored.grid.per == "block":
        return stored
    alive = (rows_by_scale(x, stored) != 0).any(-1)
    greatest = torch.where(alive, stored.scale, 0.0).max()
    return replace(stored, scale=torch.where(alive | (greatest == 0), stored.scale, greatest))


def over_scale(reduce: Any, x: Any, scale: Any) -> Any:
    """Return `ops.amax` or `ops.mean` of the numbers of x [*dims] that share a scale, in the shape of the scale."""
    if not len(scale.shape):
        return reduce(x)
    shared = tuple(d for d, n in enumerate(scale.shape) if n == 1)
    return reduce(x, axis=shared, keepdims=True) if shared else x


def reach(ops: Any, p: Numbers, grid: Grid) -> Any:
    """Return the greatest magnitude on an integer grid, in the tensor's unit."""
    z = p["zero_point"]
    return p["scale"] * ops.maximum(grid.qmax - z, z - grid.qmin)


def threshold(stored: Stored) -> torch.Tensor:
    """Return the greatest magnitude on the grid, [] or [C]."""
    if stored.grid.table is not None:
        return stored.scale * max(abs(v) for v in stored.grid.table)
    greatest: torch.Tensor = reach(torch, {"scale": stored.scale, "zero_point": stored.zero_point}, stored.grid)
    return greatest


def unit_range(ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
    """Return scale and zero point for the range [-1, 1], or [0, 1] on a grid without negative numbers."""
    steps, z = grid.qmax - grid.qmin, p["zero_point"]
    if grid.zero == "any":
        z = ops.zeros_like(z) + (grid.qmin + (steps + 1) // 2)
    return ops.where(z > grid.qmin, ops.zeros_like(p["scale"]) + 2 / steps, ops.zeros_like(p["scale"]) + 1 / steps), z


def clip_quantize(ops: Any, x: Any, low: Any, high: Any, numbers: tuple[Any, Any], grid: Grid) -> Any:
    """Return x fake-quantized with (scale, zero point), with the gradient of clipping it to low and high."""
    y = ops.fake_quantize(ops.stop_gradient(x), *(ops.stop_gradient(n) for n in numbers), grid)
    return ste(ops, clamp(ops, x, low, high), y)


def require_table(grid: Grid, kind: str, least: int) -> str:
    """Return why an algorithm with a table of levels refuses a grid; "" if it does not.

    Args:
        kind: kind of its tables, "lut" or "log".
        least: least number of bits.
    """
    if not least <= grid.bits <= 8:
        return f"{grid.bits} bits; its tables have {least} to 8"
    if grid.zero == "any":
        return "its levels lie around 0, and the format has a zero point"
    return "" if grid.kind in ("int", kind) else f"the format has levels of another kind, {grid.kind}"


def algorithm_text(algorithm: Algorithm) -> str:
    """Return the registered name with the options that differ from their defaults, as `registry.create` reads it.

    >>> from chipfit.quantizers.algorithms.lsq import LSQ
    >>> algorithm_text(LSQ(use_grad_scaling=False))
    'lsq(use_grad_scaling=False)'
    """
    name = next((n for n, thing in registered("training").items() if thing is type(algorithm)), "")
    if not name:
        what = f"{type(algorithm).__name__} is not registered as a training algorithm, so it cannot be saved"
        raise ConfigError(what, hint='put @register("training", "name") over the class')
    own = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}  # type: ignore[arg-type]  # a dataclass
    changed = [f"{f.name}={own[f.name]!r}" for f in fields(algorithm) if own[f.name] != f.default]  # type: ignore[arg-type]
    return f"{name}({', '.join(changed)})" if changed else name
