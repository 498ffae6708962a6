"""Least mean squared error."""

from __future__ import annotations

from dataclasses import dataclass

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams
from chipfit.ranges.search import Sample, search
from chipfit.registry import register


@register("range", "mse")
@dataclass(frozen=True, slots=True)
class MseRange:
    """Least mean squared error between the values and their codes, searched over ranges inside the full one."""

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """sample: values [C, N] with weights and extremes. Returns QParams [C]."""
        return search(sample, grid, p=2.0)
