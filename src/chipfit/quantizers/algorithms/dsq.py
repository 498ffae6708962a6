"""DSQ: the gradient of a soft staircase."""

import math
from dataclasses import dataclass
from typing import Any

from chipfit.errors import ConfigError
from chipfit.quantizers.algorithm import Numbers, Tensors, Weight
from chipfit.quantizers.algorithms.lsq import LearnedScale
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp, ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "dsq")
@dataclass(frozen=True)
class DSQ(LearnedScale):
    """Differentiable soft quantization. Source: Gong et al. 2019, arXiv:1908.05033, eqs. 3 to 7.

    Values are rounded as on any grid. Gradients are those of n + 1/2 + tanh(k (u - n - 1/2)) / (2 (1 - alpha)) in each
    cell from n to n + 1 of u = clip(x / s + z), with k = ln(2 / alpha - 1), which passes through both ends of the cell
    and its middle. With alpha = 0.4, k = ln 4 and the slope is 1.1552 in the middle of a cell and 0.7394 at its ends.

    Args:
        alpha: between 0 (a staircase: no gradient but at the ends) and 1 (straight-through). It is fixed; in the
            paper it trains, too.
        learn_range: train the scale, as sections 3.3 and 3.4 do with the ends of the range.
    """

    equal_steps = True

    alpha: float = 0.4
    learn_range: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ConfigError("alpha of DSQ is out of bounds", got=self.alpha, allowed="a number between 0 and 1")

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return super().init(stored, x) if self.learn_range else {}

    def soft(self, ops: Any, u: Any) -> Any:
        """Return the soft staircase of codes u [*dims], which is u itself at integers."""
        middle = ops.stop_gradient(ops.floor(u)) + 0.5
        return middle + ops.tanh(math.log(2 / self.alpha - 1) * (u - middle)) / (2 * (1 - self.alpha))

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        y = ops.fake_quantize(ops.stop_gradient(x), ops.stop_gradient(s), z, grid)
        s = self.scaled(ops, s, x, grid)
        u = clamp(ops, x / s + z, float(grid.qmin), float(grid.qmax))
        return ste(ops, (self.soft(ops, u) - z) * s, y)
