"""The least mean |error|^p."""

from dataclasses import dataclass

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams
from chipfit.ranges.search import Sample, search
from chipfit.registry import register


@register("range", "lp")
@dataclass(frozen=True, slots=True)
class LpRange:
    """The least mean |x - q|^p among ranges inside the full range; p = 2 is the mean squared error."""

    p: float = 2.4  #: exponent

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values [C, N] with weights and extremes."""
        return search(sample, grid, p=self.p)
