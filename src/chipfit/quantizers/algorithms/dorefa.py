"""DoReFa: weights through tanh, activations clipped, on fixed ranges."""

from dataclasses import dataclass
from typing import Any

from chipfit.quantizers.algorithm import FixedGrid, Numbers, clip_quantize, positive, reach, unit_range
from chipfit.quantizers.grids import Grid
from chipfit.registry import register

#: tanh moves no weight by more than 1 % of the range where the largest is this
_FLAT = 0.25
#: the range of transformed weights is this much smaller than [-1, 1]: what keeps an all-zero weight from 0 / 0
_GUARD = 1e-5


@register("training", "dorefa")
@dataclass(frozen=True)
class DoReFa(FixedGrid):
    """DoReFa-Net. Source: Zhou et al. 2016, arXiv:1606.06160, eqs. 9 (weights) and 11 (activations).

    In the paper's form weights are t = tanh(w) / max|tanh(w)| on a range of [-1, 1], and activations are clipped to
    [0, 1], or [-1, 1] where the grid is signed: [-2, 0.1, 1] is [-1, 0.1034, 0.7900], and on 4 signed bits, of scale
    2 / 15, [-1.0667, 0.1333, 0.8]. That needs a normalization behind each layer.

    Args:
        rescale: keep the plan's range R in place of that: weights are R tanh(w / 4R) / tanh(1 / 4), which starts within
            1 % of R of what they were, and activations are clipped to the plan's range.
        activations: the form for activations.
    """

    equal_steps = True

    rescale: bool = True
    activations: bool = False

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        if self.rescale:
            return super().numbers(ops, p, grid)
        s, z = unit_range(ops, p, grid)
        return positive(ops, s if self.activations else s * (1 - _GUARD), p["least"], grid), z

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        if self.activations:
            return x
        if self.rescale:
            r = reach(ops, p, grid)
            return r * ops.tanh(x * (_FLAT / r)) / ops.tanh(ops.ones_like(r) * _FLAT)
        t = ops.tanh(x)
        return t / ops.clip(ops.max(ops.abs(t)), _GUARD, 1.0)

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        if not self.activations:
            return ops.fake_quantize(self.reals(ops, x, p, grid), s, z, grid)
        half = (grid.qmax - grid.qmin) / 2
        low, high = (-half * s, half * s) if not self.rescale else ((grid.qmin - z) * s, (grid.qmax - z) * s)
        low = ops.where(z > grid.qmin, low, ops.zeros_like(s))
        high = ops.where(z > grid.qmin, high, (grid.qmax - z) * s)
        return clip_quantize(ops, x, low, high, (s, z), grid)
