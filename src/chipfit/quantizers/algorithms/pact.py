"""PACT: learned ends of the range of activations."""

from dataclasses import dataclass
from typing import Any

import torch

from chipfit.quantizers.algorithm import Algorithm, Numbers, Tensors, Weight, clip_quantize, positive
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import clamp
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "pact")
@dataclass(frozen=True)
class PACT(Algorithm):
    """Parametrized clipping of activations. Source: Choi et al. 2018, arXiv:1805.06085, eqs. 1 to 3.

    x is clipped to [0, alpha], [-alpha, alpha] or, on affine grids, [beta, alpha], and the codes cover that range. The
    gradient of an end is that of the values beyond it, and 0 inside. With alpha = 6 on 4 unsigned bits the scale is
    0.4: [0.5, 3, 7, 9] becomes [0.4, 3.2, 6, 6], and of the sum dalpha = 2. The paper decays alpha (weight decay), and
    trains weights with DoReFa.

    Args:
        alpha: initial value of alpha and -beta, for example 6; 0: the ends of the plan's range.
    """

    equal_steps = True

    alpha: float = 0.0

    def refuses(self, grid: Grid, role: str) -> str:
        if role == "weight":
            return 'it clips activations; training={"weights": "dorefa", "activations": "pact"} is the usual pair'
        return super().refuses(grid, role)

    def init(self, stored: Stored, x: Weight) -> Tensors:
        s, z, grid = stored.scale, stored.zero_point, stored.grid
        given = torch.full_like(s, self.alpha)
        if grid.zero == "any":
            ends = {"alpha": s * (grid.qmax - z), "beta": s * (grid.qmin - z)}
            return {"alpha": given, "beta": -given} if self.alpha else ends
        sides = 1 + (z > grid.qmin).to(s.dtype)
        return {"alpha": given if self.alpha else s * (grid.qmax - grid.qmin) / sides}

    def ends(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        """Return the ends of the range, before rounding to powers of two."""
        if grid.zero == "any":
            return clamp(ops, p["beta"], -float("inf"), 0.0), clamp(ops, p["alpha"], 0.0, float("inf"))
        high = ops.abs(p["alpha"])
        return ops.where(p["zero_point"] > grid.qmin, -high, ops.zeros_like(high)), high

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        low, high = self.ends(ops, p, grid)
        s = positive(ops, (high - low) / (grid.qmax - grid.qmin), p["least"], grid)
        if grid.zero != "any":
            return s, p["zero_point"]
        return s, ops.clip(grid.qmin - ops.round(ops.stop_gradient(low / s)), grid.qmin, grid.qmax)

    def call(self, ops: Any, x: Any, p: Numbers, grid: Grid) -> Any:
        s, z = self.numbers(ops, p, grid)
        low, high = self.ends(ops, p, grid)
        snapped = ops.stop_gradient(s * (grid.qmax - grid.qmin) / ops.maximum(high - low, p["least"]))
        return clip_quantize(ops, x, low * snapped, high * snapped, (s, z), grid)
