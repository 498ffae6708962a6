"""Least mean |error|^p."""

from dataclasses import dataclass

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams
from chipfit.ranges.search import Sample, search
from chipfit.registry import register


@register("range", "lp")
@dataclass(frozen=True, slots=True)
class LpRange:
    """Least mean |x - q|^p, searched over ranges inside the full one; p = 2 is the mean squared error."""

    p: float = 2.4  #: exponent

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """sample: values [C, N] with weights and extremes. Returns QParams [C]."""
        return search(sample, grid, p=self.p)
