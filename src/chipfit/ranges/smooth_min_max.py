"""The moving averages of each batch's minimum and maximum."""

from dataclasses import dataclass

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import Sample
from chipfit.registry import register


@register("range", "smooth_min_max")
@dataclass(frozen=True, slots=True)
class SmoothMinMaxRange:
    """The averages m <- 0.9 m + 0.1 (extreme of the batch), from the first batch on; the true extremes of weights.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.1.
    """

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for extremes and their averages [C]."""
        low = sample.low if sample.smooth_low is None else sample.smooth_low
        high = sample.high if sample.smooth_high is None else sample.smooth_high
        return from_min_max(low, high, grid)
