"""TQT: the logarithm of the threshold trains."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight
from chipfit.quantizers.algorithms.lsq import LearnedScale
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import ste
from chipfit.quantizers.scale_bounds import SLACK
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "tqt")
@dataclass(frozen=True)
class TQT(LearnedScale):
    """Trained quantization thresholds. Source: Jain et al. 2020, arXiv:1903.08066, eqs. 4 to 8.

    The scale is 2^ceil(log2 s), straight through, on every grid, so that its logarithm has the gradient s ln 2 times
    that of the scale in LSQ; inside is qmin <= round(x / s) <= qmax. With s = 0.5 and codes -8 to 7, x = [0.6, 9] gives
    (1 - 1.2 + 7) * 0.5 ln 2 = 2.357. The logarithm starts from that of the plan's scale.

    Args:
        use_grad_scaling: multiply it by that factor of LSQ; the paper relies on Adam for it.
        pot: False: powers of two only where the chip wants them; elsewhere the scale is the plan's until it trains.
    """

    pot: bool = True

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return {"log_scale": torch.log2(super().init(stored, x)["scale"])}

    def rescaled(self, ops: Any, p: Numbers, factor: Any) -> dict[str, Any]:
        log = p["log_scale"] + ops.log2(factor)
        if self.pot:  # a power of two, moved at least as far
            exact = ops.ceil(p["log_scale"]) + ops.log2(factor)
            down, up = ops.floor(exact + SLACK), ops.ceil(exact - SLACK)
            log = ops.where(factor < 1, down, ops.where(factor > 1, up, log))
        return {"log_scale": log}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        log = ops.maximum(p["log_scale"], ops.log2(p["least"]))
        if grid.pot or self.pot:
            log = ste(ops, log, ops.ceil(log))
        return ops.power(2.0, log), p["zero_point"]
