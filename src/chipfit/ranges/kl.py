"""Least Kullback-Leibler divergence between the distribution of the values and that of their codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import Sample
from chipfit.registry import register

#: bins that both distributions are compared in
_BINS = 512


@register("range", "kl")
@dataclass(frozen=True, slots=True)
class KlRange:
    """Compares, for each candidate range, the histogram of x with that of the quantized x spread over its steps.

    Both are counted in the same bins over the full range; clipped values count at the ends. Each code's mass is
    spread evenly over the occupied bins that it covers, so that a coarse grid is not punished for empty bins.
    Source: Migacz, 8-bit inference with TensorRT, 2017.
    """

    steps: int = 40
    lowest: float = 0.1  #: least range tried, as a fraction of the full one

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """sample: values [C, N] with weights. Returns QParams [C]."""
        if grid.pot:
            factors = torch.exp2(-torch.arange(10, dtype=torch.float64))
        else:
            factors = torch.linspace(1.0, self.lowest, self.steps, dtype=torch.float64)
        best: list[QParams] = []
        for c in range(sample.values.shape[0]):
            x = sample.values[c].double()
            w = torch.ones_like(x) if sample.weights is None else sample.weights[c]
            lo, hi = sample.low[c], sample.high[c]
            tried = [from_min_max(lo * f, hi * f, grid) for f in factors]
            divergences = [_divergence(x, w, lo, hi, q, grid) for q in tried]
            best.append(tried[divergences.index(min(divergences))])
        return QParams(torch.stack([q.scale for q in best]), torch.stack([q.zero_point for q in best]))


def _divergence(x: torch.Tensor, w: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor, q: QParams, grid: Grid) -> float:
    """sum p log(p / r) over the bins that hold values; r is p after quantization."""
    span = float((hi - lo).clamp_min(1e-30))
    bins = ((x - lo) / span * _BINS).long().clamp(0, _BINS - 1)
    p = torch.zeros(_BINS, dtype=torch.float64).index_add_(0, bins, w.double())
    centre = lo + (torch.arange(_BINS, dtype=torch.float64) + 0.5) * span / _BINS
    code = torch.clamp(torch.round(centre / q.scale.double()) + q.zero_point, grid.qmin, grid.qmax)
    inside = centre.clamp(*(float(b) for b in ((grid.qmin - q.zero_point) * q.scale, (grid.qmax - q.zero_point) * q.scale)))
    home = ((inside - lo) / span * _BINS).long().clamp(0, _BINS - 1)
    clipped = torch.zeros_like(p).index_add_(0, home, p)  # clipped mass piles up at the ends
    occupied = (clipped > 0).double()
    group = (code - grid.qmin).long()
    mass = torch.zeros(grid.levels, dtype=torch.float64).index_add_(0, group, clipped)
    count = torch.zeros(grid.levels, dtype=torch.float64).index_add_(0, group, occupied)
    r = occupied * (mass / count.clamp_min(1))[group]
    p, r = p / p.sum(), r / r.sum().clamp_min(1e-30)
    used = p > 0
    return float((p[used] * (p[used] / r[used].clamp_min(1e-10)).log()).sum())
