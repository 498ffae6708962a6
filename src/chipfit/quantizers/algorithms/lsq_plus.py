"""LSQ+: the zero point trains too."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight, rows_by_scale
from chipfit.quantizers.algorithms.lsq import LSQ
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp, ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "lsq_plus")
@dataclass(frozen=True)
class LSQPlus(LSQ):
    """A learned scale, and a learned zero point if it is free. Source: Bhalgat et al. 2020, arXiv:2004.09576.

    The zero point remains a code: its parameter is clamped to the codes and rounded, straight through, so that 0 stays
    on the grid. Its gradient is 0 inside the range and -s outside (eq. 4), times g of LSQ: with s = 0.5 and two values
    above 15 codes of 4 bits, dz = -2 * 0.5 g. On a symmetric grid it is LSQ.

    Args:
        from_spread: scales of weights start at max(|m - 3 d|, |m + 3 d|) / 2^(bits - 1) with their mean m and standard
            deviation d (eq. 9), instead of the plan's.
    """

    from_spread: bool = False

    def init(self, stored: Stored, x: Weight) -> Tensors:
        p = super().init(stored, x)
        if x is not None and self.from_spread:
            w = rows_by_scale(x, stored)
            spread = w.mean(-1).abs() + 3 * w.std(-1, correction=0)
            p["scale"] = torch.where(spread > 0, spread / (1 << stored.grid.bits - 1), stored.scale)
        if stored.grid.zero == "any":
            p["zero_point"] = stored.zero_point.to(stored.scale.dtype)
        return p

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        s, z = super().numbers(ops, p, grid)
        if grid.zero == "any":
            z = clamp(ops, z, float(grid.qmin), float(grid.qmax))
            z = ste(ops, z, ops.round(z))
        return s, z

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        s, z = self.scaled(ops, s, x, grid), self.scaled(ops, z, x, grid)
        return ops.fake_quantize(x, s, z, grid, self.clip_first)
