"""The least Kullback-Leibler divergence between the distributions of values and quantized values."""

from dataclasses import dataclass

import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.ranges.qparams import QParams
from chipfit.ranges.search import HALVINGS, Sample, best, join
from chipfit.registry import register

#: bins that both distributions are compared in
_BINS = 512


@register("range", "kl")
@dataclass(frozen=True, slots=True)
class KlRange:
    """The candidate range for which the histograms of x and of quantized x differ least.

    Both use the same bins over the full range; clipped values count at the ends. The mass of each quantized value is
    spread evenly over the occupied bins that it covers, so that a coarse grid is not punished for empty bins.
    Source: Migacz, 8-bit inference with TensorRT, 2017.
    """

    steps: int = 40
    lowest: float = 0.1  #: smallest range tried, as a fraction of the full range

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values [C, N] with weights."""
        line = torch.linspace(1.0, self.lowest, self.steps, dtype=torch.float64)
        factors = (HALVINGS if grid.pot else line)[..., None]
        parts = sample.chunks(len(factors) * max(_BINS, sample.values.shape[1]))
        return join(best(part, grid, divergence, factors)[0] for part in parts)


def divergence(sample: Sample, q: QParams, grid: Grid) -> torch.Tensor:
    """Return the sum of p log(p / r) over occupied bins, [K, C]; r is p after quantization with q [K, C]."""
    low = sample.low[..., None]  # [C, 1]
    span = (sample.high[..., None] - low).clamp_min(2.0**-100)

    def at(x: torch.Tensor) -> torch.Tensor:
        """Return the bin of each value."""
        return ((x - low) / span * _BINS).long().clamp_(0, _BINS - 1)

    ones = torch.ones_like(sample.values)
    p = torch.zeros(len(low), _BINS, dtype=torch.float64)
    p.scatter_add_(1, at(sample.values.double()), (ones if sample.weights is None else sample.weights).double())
    middle = low + (torch.arange(_BINS, dtype=torch.float64) + 0.5) / _BINS * span  # [C, BINS]

    s, z = q.scale.double()[..., None], q.zero_point[..., None]  # [K, C, 1]
    home = at(middle.maximum((grid.qmin - z) * s).minimum((grid.qmax - z) * s))
    # clipped mass piles up at the ends
    clipped = torch.zeros(home.shape, dtype=torch.float64).scatter_add_(2, home, p.expand(home.shape))
    occupied = (clipped > 0).double()
    code = torch.clamp(ROUNDINGS[grid.rounding](middle / s) + z, grid.qmin, grid.qmax)
    group = torch.zeros_like(home)  # codes ascend over bins: number them from 0 without gaps
    group[..., 1:] = (code.diff() != 0).cumsum(-1)
    mass = torch.zeros_like(clipped).scatter_add_(2, group, clipped)
    count = torch.zeros_like(clipped).scatter_add_(2, group, occupied)
    r = occupied * (mass / count.clamp_min_(1)).gather(2, group)
    p = (p / p.sum(-1, keepdim=True)).expand(r.shape)
    r = r / r.sum(-1, keepdim=True).clamp_min(1e-30)
    return torch.xlogy(p, p / r.clamp_min(1e-10)).sum(-1)
