"""TQT: the logarithm of the threshold trains."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import Numbers, Tensors, Weight
from chipfit.quantizers.algorithms.lsq import LSQ
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import ste
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "tqt")
@dataclass(frozen=True)
class TQT(LSQ):
    """Trained quantization thresholds. Source: Jain et al. 2020, arXiv:1903.08066, eqs. 4 to 8.

    The scale is 2^ceil(log2 s), straight through, so that its logarithm has the gradient s ln 2 times that of the scale
    in LSQ: with s = 0.5 and codes -8 to 7, x = [0.6, 9] gives (1 - 1.2 + 7) * 0.5 ln 2 = 2.357.

    Args:
        use_grad_scaling: multiply it by that factor of LSQ; the paper relies on Adam for it.
        pot: powers of two on every grid, as in the paper; else only where the chip wants them, and elsewhere
            the scale stays where the plan has it until it trains.
    """

    pot: bool = False

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return {"log_scale": torch.log2(super().init(stored, x)["scale"])}

    def rescaled(self, ops: Any, p: Numbers, factor: Any) -> dict[str, Any]:
        return {"log_scale": p["log_scale"] + ops.log2(factor)}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        log = ops.maximum(p["log_scale"], ops.log2(p["least"]))
        if grid.pot or self.pot:
            log = ste(ops, log, ops.ceil(log))
        return ops.power(2.0, log), p["zero_point"]
