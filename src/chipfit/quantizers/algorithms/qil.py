"""QIL: the interval of magnitudes that is quantized trains."""

from dataclasses import dataclass
from typing import Any

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight, positive, reach, rows_by_scale, threshold, unit_range
from chipfit.quantizers.algorithms.lsq import Scaled
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "qil")
@dataclass(frozen=True)
class QIL(Scaled):
    """Quantization interval learning. Source: Jung et al. 2019, arXiv:1808.05779, eqs. 1 to 3, with gamma = 1.

    Magnitudes from C - D to C + D, which train, become 0 to 1, those below are pruned, those above clipped; that, with
    its sign, is rounded in equal steps. With C = 0.5, D = 0.25, [0.2, 0.5, -0.75] becomes [0, 0.5, -1].

    Args:
        use_grad_scaling: multiply the gradients of C and D by that factor of LSQ, as the paper does by 0.01.
        rescale: multiply by the plan's range, from which C and D then start: at first nothing but rounding changes. In
            the paper's form what is rounded stays in [-1, 1], which a normalization must make up for; C and D start at
            half the largest magnitude, and those of weights never exceed that.
        activations: the form for activations.
    """

    equal_steps = True
    undeployable = {"activation": "chips round in equal steps from 0, and have no operator for its interval"}

    rescale: bool = True
    activations: bool = False

    def init(self, stored: Stored, x: Weight) -> Tensors:
        half = threshold(stored) / 2
        if x is not None and not self.rescale:
            half = rows_by_scale(x, stored).abs().amax(-1) / 2
        return {"center": half, "width": half.clone()}

    def rescaled(self, ops: Any, p: Numbers, factor: Any) -> dict[str, Any]:
        return {}  # no parameter of it is a scale

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        if self.rescale:
            return p["scale"], p["zero_point"]
        s, z = unit_range(ops, p, grid)
        if grid.zero != "any":  # whole steps from 0 to 1
            s = ops.ones_like(s) / (grid.qmax - z)
        return positive(ops, s, p["least"], grid), z

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        c, d = (self.scaled(ops, ops.abs(p[name]), x, grid) for name in ("center", "width"))
        size = ops.abs(x)
        if not (self.rescale or self.activations):
            most = ops.max(size) / 2
            c, d = ops.minimum(c, most), ops.minimum(d, most)
        d = ops.maximum(d, p["least"])
        t = clamp(ops, (size - c + d) / (2 * d), 0.0, 1.0) * ops.sign(x)
        return t * reach(ops, p, grid) if self.rescale else t
