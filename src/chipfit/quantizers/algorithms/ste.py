"""Straight-through rounding: weights train, grids stay where calibration put them."""

from dataclasses import dataclass
from typing import Any

from chipfit.quantizers.algorithm import Algorithm, Numbers, Tensors, Weight
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.registry import register


@register("training", "ste")
@dataclass(frozen=True)
class STE(Algorithm):
    """dy/dx = 1 inside the range, 0 outside. Source: Bengio et al. 2013, arXiv:1308.3432, section 4."""

    def init(self, stored: Stored, x: Weight) -> Tensors:
        return {}

    def numbers(self, ops: Any, p: Numbers, grid: Grid) -> tuple[Any, Any]:
        return p["scale"], p["zero_point"]
