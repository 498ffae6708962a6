"""LSQ: the step size of each quantizer trains."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import Algorithm, Numbers, Tensors, Weight, rows_by_scale
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import scale_gradient
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@dataclass(frozen=True)
class Scaled(Algorithm):
    """The base of algorithms that scale the gradients of a tensor's parameters to the size of those of weights.

    Args:
        use_grad_scaling: multiply the gradient of a parameter by g = 1 / sqrt(elements that share it * greatest code).
    """

    use_grad_scaling: bool = True

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        return ops.fake_quantize(self.reals(ops, x, p, grid), self.scaled(ops, s, x, grid), z, grid)

    def scaled(self, ops: Any, p: Any, x: Any, grid: Grid) -> Any:
        """Return a parameter with its gradient multiplied by g. Source: Esser et al. 2020, section 2.2."""
        if not self.use_grad_scaling:
            return p
        return scale_gradient(ops, p, (ops.size(x) / ops.size(p) * max(grid.qmax, 1)) ** -0.5)


@dataclass(frozen=True)
class LearnedScale(Scaled):
    """The base of algorithms whose scale trains.

    Args:
        from_mean: scales of weights start at 2 mean|w| / sqrt(greatest code) instead of the plan's.
    """

    from_mean: bool = False

    def init(self, stored: Stored, x: Weight) -> Tensors:
        if x is None or not self.from_mean:
            return {"scale": stored.scale}
        mean = rows_by_scale(x, stored).abs().mean(-1)
        return {"scale": torch.where(mean > 0, 2 * mean / max(stored.grid.qmax, 1) ** 0.5, stored.scale)}


@register("training", "lsq")
@dataclass(frozen=True)
class LSQ(LearnedScale):
    """Learned step size quantization. Source: Esser et al. 2020, arXiv:1902.08153, eqs. 1 to 3 and sections 2.1, 2.2.

    Inside is qmin < x / s < qmax, before rounding. With s = 0.2 and codes -8 to 7, [-0.3, 1.42, 2.0] becomes
    [-0.4, 1.4, 1.4]; only the first has a gradient. Of the sum, ds is (-2 + 1.5) + 7 + 7 times g, and
    g = 1 / sqrt(3 * 7). Elements of activations are those of the batch.

    Args:
        use_grad_scaling: multiply the gradient of the scale by g = 1 / sqrt(elements that share it * greatest code).
        from_mean: scales of weights start at 2 mean|w| / sqrt(greatest code), as in section 2.1, instead of the plan's.
        clip_first: False: inside is qmin <= round(x / s) <= qmax, as in MQBench: 1.42 has a gradient, too.
    """

    clip_first: bool = True

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        return ops.fake_quantize(x, self.scaled(ops, s, x, grid), z, grid, self.clip_first)
