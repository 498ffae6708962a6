"""QIL: the interval of magnitudes that is quantized trains."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import (
    Numbers,
    Tensors,
    Weight,
    over_scale,
    reach,
    rows_by_scale,
    snapped,
    threshold,
    unit_range,
)
from chipfit.quantizers.algorithms.lsq import Scaled
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp, ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "qil")
@dataclass(frozen=True)
class QIL(Scaled):
    """Quantization interval learning. Source: Jung et al. 2019, arXiv:1808.05779, eqs. 1 to 3, with gamma = 1.

    Magnitudes from C - D to C + D, which train, become 0 to 1, those below are pruned, those above clipped; that, with
    its sign, is rounded in equal steps, 2^(b - 1) - 1 of weights and 2^b - 1 of activations without sign. With C = 0.5,
    D = 0.25, [0.2, 0.5, -0.75] becomes [0, 0.5, -1]. What is rounded stays in [-1, 1], which a normalization behind
    each layer must make up for. C and D start at half the largest magnitude, and those of weights never exceed that.

    Args:
        use_grad_scaling: multiply the gradients of C and D by that factor of LSQ, as the paper does by 0.01.
        activations: the form for activations.
    """

    equal_steps = True
    scale_invariant = True
    undeployable = {"activation": "chips round in equal steps from 0, and have no operator for its interval"}

    activations: bool = False

    def init(self, stored: Stored, x: Weight) -> Tensors:
        half = threshold(stored) / 2
        if x is not None:
            most = rows_by_scale(x, stored).abs().amax(-1)
            half = torch.where(most > 0, most / 2, half)
        return {"center": half, "width": half.clone()}

    def rescaled(self, ops: Any, p: Numbers, factor: Any) -> dict[str, Any]:
        return {}  # no parameter of it is a scale

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        s, z = unit_range(ops, p, grid)
        if grid.zero != "any":  # whole steps from 0 to 1
            s = ops.ones_like(s) / (grid.qmax - z)
        return snapped(ops, s, grid), z

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        c, d = (self.scaled(ops, ops.abs(p[name]), x, grid) for name in ("center", "width"))
        if not self.activations:
            half = over_scale(ops.amax, ops.abs(x), p["scale"]) / 2
            c, d = (ste(ops, v, ops.minimum(v, half)) for v in (c, d))
        return _interval(ops, x, c, d, p["least"])


def _interval(ops: Any, x: Any, c: Any, d: Any, least: Any) -> Any:
    """Return x with magnitudes from c - d to c + d mapped to 0 to 1; d is at least `least`."""
    d = ops.maximum(d, least)
    return clamp(ops, (ops.abs(x) - c + d) / (2 * d), 0.0, 1.0) * ops.sign(x)


@register("training", "qil_rescaled")
@dataclass(frozen=True)
class QILRescaled(QIL):
    """Quantization interval learning in the plan's range. Source: Jung et al. 2019, arXiv:1808.05779, times a constant.

    What `qil` rounds is multiplied by the plan's range, from which C and D start: at first nothing but rounding
    changes, and no normalization is needed. C and D have no limit. With the range 2, C = 0.5 and D = 0.25,
    [0.2, 0.5, -0.75] becomes [0, 1, -2].
    """

    scale_invariant = False

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return super().init(stored, None)

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        return p["scale"], p["zero_point"]

    def reals(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        c, d = (self.scaled(ops, ops.abs(p[name]), x, grid) for name in ("center", "width"))
        return _interval(ops, x, c, d, p["least"]) * reach(ops, p, grid)
