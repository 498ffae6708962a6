"""A range without a fixed share of the values at each end. Never a default: it harms tensors whose outliers matter."""

from dataclasses import dataclass

import torch

from chipfit.errors import ConfigError
from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import Sample
from chipfit.registry import register


@register("range", "percentile")
@dataclass(frozen=True, slots=True)
class PercentileRange:
    """The range between the quantiles 1 - share and share."""

    share: float = 0.9999  #: share of the values below the upper end

    def __post_init__(self) -> None:
        if not 0.5 < self.share <= 1:
            allowed = "a number above 0.5 and at most 1"
            raise ConfigError("'share' of range rule 'percentile' is out of bounds", got=self.share, allowed=allowed)

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values [C, N] with weights."""
        order = sample.values.argsort(1)
        x = sample.values.gather(1, order).double()
        w = torch.ones_like(x) if sample.weights is None else sample.weights.gather(1, order)
        cdf = w.cumsum(1) / w.sum(1, keepdim=True)
        last = x.shape[1] - 1
        top = (cdf < self.share).sum(1, keepdim=True).clamp_max(last)
        bottom = (cdf <= 1 - self.share).sum(1, keepdim=True).clamp_max(last)
        low, high = (x.gather(1, end)[:, 0] for end in (bottom, top))
        return from_min_max(low.maximum(sample.low), high.minimum(sample.high), grid)
