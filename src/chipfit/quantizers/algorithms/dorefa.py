"""DoReFa: weights through tanh to [-1, 1], activations clipped to 1."""

from dataclasses import dataclass
from typing import Any

from chipfit.quantizers.algorithm import FixedGrid, Numbers, clip_quantize, over_scale, reach, snapped, unit_range
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import ste
from chipfit.registry import register

#: the range of transformed weights is this much smaller than [-1, 1]: what keeps an all-zero weight from 0 / 0
_GUARD = 1e-5


@register("training", "dorefa")
@dataclass(frozen=True)
class DoReFa(FixedGrid):
    """DoReFa-Net. Source: Zhou et al. 2016, arXiv:1606.06160, eqs. 9 (weights) and 11 (activations).

    Weights are t = tanh(w) / max|tanh(w)|, activations are clipped to [0, 1], or [-1, 1] where the grid is signed; b
    bits divide that range into 2^b - 1 steps. Rounding passes the whole gradient of t, and that of an activation inside
    its range. On 4 signed bits, of scale 2 / 15, [-2, 0.1, 1] is [-1, 0.1034, 0.7900] and becomes
    [-1.0667, 0.1333, 0.8].

    The scale of a layer is lost, so that each needs a normalization behind it, and training must begin with a float
    network, not with a few steps to recover from rounding; the paper leaves the first and the last layer in float.
    Quantized values are whole steps, as chips have them: in the paper's eq. 9 they lie half a step beside 0. Gradients
    are not quantized.

    Args:
        activations: the form for activations.
    """

    equal_steps = True
    scale_invariant = True

    activations: bool = False

    def refuses(self, grid: Grid, role: str) -> str:
        if role == "weight" and grid.bits < 2:
            return "weights of one bit are -E|w| and E|w| in its paper, and the format has a 0"
        return super().refuses(grid, role)

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        s, z = unit_range(ops, p, grid)
        return snapped(ops, s if self.activations else s * (1 - _GUARD), grid), z

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        if self.activations:
            return x
        t = ops.tanh(x)
        return t / ops.clip(ops.max(ops.abs(t)), _GUARD, 1.0)

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        if not self.activations:
            t = self.reals(ops, x, p, grid)
            return ste(ops, t, ops.fake_quantize(ops.stop_gradient(t), s, z, grid))
        return clip_quantize(ops, x, *self.ends(ops, s, z, grid), (s, z), grid)

    def ends(self, ops: Any, s: Any, z: Any, grid: Grid) -> tuple[Any, Any]:
        """Return the ends to which activations are clipped."""
        half, signed = (grid.qmax - grid.qmin) / 2, z > grid.qmin
        return ops.where(signed, -half * s, ops.zeros_like(s)), ops.where(signed, half * s, (grid.qmax - z) * s)


@register("training", "dorefa_rescaled")
@dataclass(frozen=True)
class DoReFaRescaled(DoReFa):
    """DoReFa-Net on the plan's ranges. Source: Zhou et al. 2016, arXiv:1606.06160, eqs. 9 and 11, times a constant.

    Weights are R tanh(w) / max|tanh(w)| with the greatest magnitude R on the plan's grid, and activations are clipped
    to the plan's range: a network without normalization keeps its scales. With R = 2, [-2, 0.1, 1] is
    [-2, 0.2068, 1.58].
    """

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        return p["scale"], p["zero_point"]

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        if self.activations:
            return x
        t = ops.tanh(x)
        return reach(ops, p, grid) * t / ops.clip(over_scale(ops.amax, ops.abs(t), p["scale"]), _GUARD, 1.0)

    def ends(self, ops: Any, s: Any, z: Any, grid: Grid) -> tuple[Any, Any]:
        return (grid.qmin - z) * s, (grid.qmax - z) * s
