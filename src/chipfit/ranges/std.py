"""The mean plus and minus some standard deviations, inside the calibrated range."""

from dataclasses import dataclass

import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import Sample
from chipfit.registry import register


@register("range", "std")
@dataclass(frozen=True, slots=True)
class StdRange:
    """The range [mean - k sd, mean + k sd], cut at the extremes; sd is the unbiased estimate."""

    k: float = 2.6  #: standard deviations on each side

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values [C, N] with weights and extremes."""
        x = sample.values.double()
        w = torch.ones_like(x) if sample.weights is None else sample.weights
        n = w.sum(1)
        mean = (x * w).sum(1) / n
        sd = ((x - mean.unsqueeze(1)).square() * w).sum(1).div((n - 1).clamp_min(1)).sqrt()
        return from_min_max(*within(mean, sd, self.k, sample.low, sample.high), grid)


def within(
    mean: torch.Tensor, sd: torch.Tensor, k: float, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [mean - k sd, mean + k sd] cut at the extremes, all [C]."""
    return (mean - k * sd).maximum(low), (mean + k * sd).minimum(high)
