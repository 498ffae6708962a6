"""Straight-through rounding: weights train, grids stay where calibration put them."""

from dataclasses import dataclass

from chipfit.quantizers.algorithm import FixedGrid
from chipfit.registry import register


@register("training", "ste")
@dataclass(frozen=True)
class STE(FixedGrid):
    """dy/dx = 1 inside the range, 0 outside. Source: Bengio et al. 2013, arXiv:1308.3432, section 4."""
