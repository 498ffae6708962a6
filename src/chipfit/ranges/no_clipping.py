"""The whole calibrated range."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import HIGH_IF_ALL_ZERO, QParams, finish_scale, from_min_max
from chipfit.ranges.search import Sample
from chipfit.registry import register


@register("range", "no_clipping")
@dataclass(frozen=True, slots=True)
class NoClippingRange:
    """The range from minimum to maximum: no calibrated value is clipped."""

    histogram: ClassVar[bool] = False  #: extremes are enough
    expand: bool = True  #: False: a signed symmetric threshold is exactly max|x|, so +max is one code too large

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for extremes [C]."""
        if not self.expand and grid.zero == 0:
            threshold = torch.maximum(sample.high.abs(), sample.low.abs())
            threshold = threshold if bool(threshold.any()) else torch.full_like(threshold, HIGH_IF_ALL_ZERO)
            scale = finish_scale(threshold / (-grid.qmin or grid.qmax + 1), grid)
            return QParams(scale, torch.zeros_like(scale, dtype=torch.int32))
        return from_min_max(sample.low, sample.high, grid)
