"""N2UQ: thresholds that train, levels in equal steps."""

from dataclasses import dataclass
from typing import Any

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight, over_scale, rows_by_scale
from chipfit.quantizers.algorithms.lsq import Scaled
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp
from chipfit.quantizers.stored import Stored
from chipfit.registry import register

#: each code has a parameter of its own
_WIDEST = 6


@register("training", "n2uq")
@dataclass(frozen=True)
class N2UQ(Scaled):
    """Nonuniform to uniform quantization. Source: Liu et al. 2022, arXiv:2111.14826.

    Activations: intervals a_1, a_2, ... from a start, which all train, hold one step each, whose threshold is in their
    middle; the gradient of x is 1 / a_i steps, and that of the a_i follows (generalized straight-through estimator).
    From 0 with intervals 1 and 3, 0.4 becomes code 0, 0.6 and 2.4 become 1, 2.6 becomes 2.
    Weights: their mean magnitude stays where it started, so that as many as then take each code. Here the range is the
    plan's; that of the authors ends at (2^b - 1) / 2^(b - 1) times the mean magnitude of a channel.

    Args:
        activations: the form for activations.
    """

    equal_steps = True
    scale_invariant = True
    undeployable = {"activation": "chips round in equal steps, and have no operator for its thresholds"}

    activations: bool = False

    def refuses(self, grid: Grid, role: str) -> str:
        if role == "activation" and not (2 <= grid.bits <= _WIDEST and grid.per == "tensor"):
            return f"it trains a threshold for each code of a tensor: 2 to {_WIDEST} bits, one scale"
        return super().refuses(grid, role)

    def constants(self, stored: Stored, x: Weight) -> Tensors:
        size = {} if x is None else {"size": rows_by_scale(x, stored).abs().mean(-1)}
        return {**super().constants(stored, x), **size}

    def init(self, stored: Stored, x: Weight) -> Tensors:
        if x is not None:
            return {}
        s, grid = stored.scale, stored.grid
        steps = {f"interval_{k}": s.clone() for k in range(1, grid.levels)}
        return {"scale": s, "start": (grid.qmin - stored.zero_point) * s, **steps}

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        if not self.activations:
            size = ops.abs(x)  # detached, as in the paper
            now = over_scale(ops.mean, size, p["size"])
            return x * ops.stop_gradient(p["size"] / ops.maximum(now, p["least"]))
        names = [f"interval_{k}" for k in range(1, grid.levels)]
        a = ops.stack([ops.maximum(ops.abs(self.scaled(ops, p[n], x, grid)), p["least"]) for n in names])
        start = self.scaled(ops, p["start"], x, grid)
        ends = start + ops.cumsum(a, axis=0)
        starts = ops.concatenate([ops.reshape(start, (1,)), ends[:-1]])
        edges, at = ops.stop_gradient(ends[:-1]), ops.stop_gradient(x)
        cell = ops.entry(ops.constant(range(grid.qmin, grid.qmax), ends), edges, at)
        u = cell + (x - ops.entry(starts, edges, at)) / ops.entry(a, edges, at)
        s, z = self.numbers(ops, p, grid)
        return (clamp(ops, u, float(grid.qmin), float(grid.qmax)) - z) * self.scaled(ops, s, x, grid)
