"""Moving average of each batch's minimum and maximum."""

from dataclasses import dataclass

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import Sample
from chipfit.registry import register


@register("range", "smooth_min_max")
@dataclass(frozen=True, slots=True)
class SmoothMinMaxRange:
    """m <- 0.9 m + 0.1 (this batch's extreme), from the first batch's on; for weights, seen once, the true extremes.

    Source: Jacob et al. 2018, arXiv:1712.05877, section 3.1.
    """

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """sample: extremes and their averages [C]. Returns QParams [C]."""
        low = sample.low if sample.smooth_low is None else sample.smooth_low
        high = sample.high if sample.smooth_high is None else sample.smooth_high
        return from_min_max(low, high, grid)
