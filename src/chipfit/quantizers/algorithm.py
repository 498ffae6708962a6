"""What a training algorithm is: how a tensor is rounded while its numbers train, written once for every framework."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from chipfit.errors import ConfigError
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp, ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import registered

#: widest code that trains: steps of wider ones are lost in float32
MOST_BITS = 16
#: a scale that trains stays above this, or above a fraction of its first value where that is smaller
EPS = torch.finfo(torch.float32).eps

#: name -> number or tensor of one quantizer, each broadcast against the tensor that it rounds
Numbers = Mapping[str, Any]


class Algorithm:
    """Base of all training algorithms: straight-through rounding to a grid whose scale trains.

    A subclass is a frozen dataclass, registered under its name: its fields are the options, with defaults. It overrides
    what it does otherwise, in this order: `constants` and `init` once, then `numbers`, `reals` and `call` in each step;
    when training ends, `numbers` become the plan's and `reals` the weights, so that the rounding of the plan is that of
    training. One that treats activations in another way than weights has a field `activations`, which
    `for_tensor` sets.

    `ops` is `quantizers.ops.TorchOps` or its twin of Keras; `p` has what `init` made, over the `constants`, and
    `training`, whether this is a step of training.
    """

    #: why what was trained cannot be deployed, by the role of the tensor; roles that are left out can
    undeployable: Mapping[str, str] = {}
    #: parameters that are [N] for N levels, and broadcast against nothing
    vectors: tuple[str, ...] = ()

    def refuses(self, grid: Grid, role: str) -> str:
        """Why it cannot round a tensor ("weight" or "activation") to this grid; "" where it can."""
        return ""

    def grid(self, grid: Grid) -> Grid:
        """The grid that it rounds to: the plan's, unless it brings levels of its own."""
        return grid

    def constants(self, stored: Stored, x: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What it is given besides the parameters, which may take the place of some; arguments and shapes of `init`."""
        return constants(stored)

    def for_tensor(self, stored: Stored, role: str, shape: tuple[int | None, ...]) -> Algorithm:
        """The algorithm of one tensor: itself, with `activations` said, unless it keeps something for each.

        Args:
            stored: grid, scale and zero point, with the channel axis in the framework's own layout.
            role: "weight" or "activation".
            shape: of the tensor in that layout; None where it varies.
        """
        return replace(self, activations=role == "activation") if hasattr(self, "activations") else self  # type: ignore[type-var]

    def start(self, host: Any) -> None:
        """Register what it keeps beside the parameters of `init` on the module or layer that hosts it."""

    def init(self, stored: Stored, x: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The parameters that train, by name, as they start: each [] or [C], float32.

        Args:
            stored: the plan's grid, scale and zero point.
            x: the weight; None for an activation.
        """
        return {"scale": stored.scale}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        """Scale and zero point as the chip would store them now; gradients flow to the parameters."""
        return positive(ops, p["scale"], p["least"], grid), p["zero_point"]

    def table(self, ops: Any, p: Numbers, grid: Grid) -> Any:
        """The levels as they are now, ascending [N], in units of the scale; None: those of the grid."""
        return None

    def rescaled(self, ops: Any, p: Numbers, factor: Any) -> dict[str, Any]:
        """The parameters with which `numbers` has this factor more scale, where a bound of the platform asks for it.

        Args:
            p: what trains, each [] or [C].
            factor: [] or [C], a power of two where the scale is one.
        """
        return {name: p[name] * factor for name in (("scale",) if "scale" in p else p)}

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        """What is rounded in place of x [*dims]: the weights that are stored when training ends."""
        return x

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        """x [*dims] as the chip holds it. The value is `fake_quantize(reals, *numbers)`; the gradient is its own."""
        s, z = self.numbers(ops, p, grid)
        return ops.fake_quantize(self.reals(ops, x, p, grid), s, z, grid)


def with_levels(grid: Grid, table: Iterable[float] | None) -> Grid:
    """The grid with the levels of `Algorithm.table`, each once."""
    return grid if table is None else replace(grid, table=tuple(sorted(set(table))))


def positive(ops: Any, s: Any, least: Any, grid: Grid) -> Any:
    """A scale above `least`, a power of two where the grid wants one: 2^round(log2 s), straight through."""
    s = ops.maximum(ops.abs(s), least)
    if grid.pot:
        log = ops.log2(s)
        s = ops.power(2.0, ste(ops, log, ops.round(log)))
    return s


def constants(stored: Stored) -> dict[str, torch.Tensor]:
    """The plan's numbers, and the least scale."""
    return {"scale": stored.scale, "zero_point": stored.zero_point, "least": torch.clamp(stored.scale / 16, max=EPS)}


def rows(x: torch.Tensor, stored: Stored) -> torch.Tensor:
    """A weight, with what shares a scale along the last axis: [N], or [C, N]."""
    x = x.detach().to(stored.scale.dtype)
    return x.movedim(stored.axis or 0, 0).flatten(1) if stored.scale.dim() else x.flatten()


def reach(ops: Any, p: Numbers, grid: Grid) -> Any:
    """The greatest magnitude that a grid of integers holds, in the tensor's unit."""
    z = p["zero_point"]
    return p["scale"] * ops.maximum(grid.qmax - z, z - grid.qmin)


def threshold(stored: Stored) -> torch.Tensor:
    """The greatest magnitude that is stored, [] or [C]."""
    if stored.grid.table is not None:
        return stored.scale * max(abs(v) for v in stored.grid.table)
    greatest: torch.Tensor = reach(torch, {"scale": stored.scale, "zero_point": stored.zero_point}, stored.grid)
    return greatest


def unit(ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
    """Scale and zero point of the range [-1, 1], or [0, 1] where no code stands for negative numbers."""
    steps, z = grid.qmax - grid.qmin, p["zero_point"]
    if grid.zero == "any":
        z = ops.zeros_like(z) + (grid.qmin + (steps + 1) // 2)
    return ops.where(z > grid.qmin, ops.zeros_like(p["scale"]) + 2 / steps, ops.zeros_like(p["scale"]) + 1 / steps), z


def clipped(ops: Any, x: Any, low: Any, high: Any, numbers: tuple[Any, Any], grid: Grid) -> Any:
    """x rounded with (scale, zero point), and the gradient of clipping it: 1 inside, and beyond an end to that end."""
    y = ops.fake_quantize(ops.stop_gradient(x), *(ops.stop_gradient(n) for n in numbers), grid)
    return ste(ops, clamp(ops, x, low, high), y)


def of_integers(grid: Grid) -> str:
    """Why an algorithm whose codes lie in equal steps from 0 refuses a grid; "" where it does not."""
    return "the format's codes are entries of a table" if grid.table is not None else ""


def of_table(grid: Grid, kind: str, least: int) -> str:
    """Why an algorithm with levels of a table refuses a grid; "" where it does not.

    Args:
        kind: of the tables that it knows, "lut" or "log".
        least: bits.
    """
    if not least <= grid.bits <= 8:
        return f"{grid.bits} bits; its tables have {least} to 8"
    if grid.zero == "any":
        return "its levels lie around 0, and the format has a zero point"
    return "" if grid.kind in ("int", kind) else f"the format has levels of another kind, {grid.kind}"


def text_of(algorithm: Algorithm) -> str:
    """Return the registered name with the options that differ from their defaults, as `registry.create` reads it.

    >>> from chipfit.quantizers.algorithms.lsq import LSQ
    >>> text_of(LSQ(use_grad_scaling=False))
    'lsq(use_grad_scaling=False)'
    """
    name = next((n for n, thing in registered("training").items() if thing is type(algorithm)), "")
    if not name:
        what = f"{type(algorithm).__name__} is not registered as a training algorithm, so it cannot be saved"
        raise ConfigError(what, hint='put @register("training", "name") over the class')
    own = {f.name: getattr(algorithm, f.name) for f in fields(algorithm)}  # type: ignore[arg-type]  # a dataclass
    changed = [f"{f.name}={own[f.name]!r}" for f in fields(algorithm) if own[f.name] != f.default]  # type: ignore[arg-type]
    return f"{name}({', '.join(changed)})" if changed else name
