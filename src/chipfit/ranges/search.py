"""The search that the error-based rules share: try smaller and smaller ranges, keep the one with the least error.

All candidates of one round are evaluated at once, per channel when the samples are rows of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams, from_min_max

#: (sample x, its quantized value) -> error of each element
ErrorOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a range is searched in: raw values, or bin centres with counts.

    values [C, N] (C = 1 per tensor), weights [C, N] or None, low and high [C]: the true extremes.
    """

    values: torch.Tensor
    weights: torch.Tensor | None
    low: torch.Tensor
    high: torch.Tensor


def errors(sample: Sample, q: QParams, grid: Grid, error: ErrorOf) -> torch.Tensor:
    """Mean error of each candidate and channel; q.scale [K, C]. Returns [K, C] float64."""
    s, z = q.scale.unsqueeze(-1), q.zero_point.unsqueeze(-1).to(torch.float32)  # [K, C, 1]
    x = sample.values
    fq = torch.clamp(torch.round(x / s) + z, grid.qmin, grid.qmax).sub_(z).mul_(s)
    e = error(x, fq)
    if sample.weights is not None:
        return (e.double() * sample.weights).sum(-1) / sample.weights.sum(-1).clamp_min(1e-30)
    return e.mean(-1, dtype=torch.float64)


def _candidates(low: torch.Tensor, high: torch.Tensor, grid: Grid) -> QParams:
    q = from_min_max(low.reshape(-1), high.reshape(-1), grid)
    return QParams(q.scale.view(low.shape), q.zero_point.view(low.shape))


def search(sample: Sample, grid: Grid, error: ErrorOf, *, steps: int | None = None, lowest: float = 0.1) -> QParams:
    """The range with the least mean error among scaled-down versions of the full one.

    Args:
        sample: values [C, N] with their extremes.
        grid: power-of-two grids try the full threshold and its halvings; other grids a line of `steps` factors in
            [lowest, 1], then a finer line around the best; affine grids finally move each end by itself.
        error: of each element.
        steps: candidates per round; fewer where the grid is fine, since clipping then gains little.

    Returns:
        QParams [C]. Never worse, by `error`, than the unclipped range.
    """
    steps = steps or (20 if grid.bits >= 8 else 64)
    lo, hi = sample.low, sample.high  # [C]
    if grid.pot:
        factors = torch.exp2(-torch.arange(10, dtype=torch.float64)).unsqueeze(-1)  # [K, 1]
        best_f, _ = _best(sample, factors * lo, factors * hi, grid, error)
        picked = factors[best_f, 0]
        return _candidates(lo * picked, hi * picked, grid)
    line = torch.linspace(1.0, lowest, steps, dtype=torch.float64).unsqueeze(-1)
    index, _ = _best(sample, line * lo, line * hi, grid, error)
    centre = line[index, 0]  # [C]
    width = (1.0 - lowest) / (steps - 1)
    fine = (centre + torch.linspace(1, -1, 31, dtype=torch.float64).unsqueeze(-1) * width).clamp(lowest / 2, 1.05)  # [K, C]
    index, least = _best(sample, fine * lo, fine * hi, grid, error)
    f = fine.gather(0, index.unsqueeze(0))[0]
    lo, hi = lo * f, hi * f
    if grid.zero == "any" and bool((sample.low < 0).any()) and bool((sample.high > 0).any()):
        for end in ("low", "high"):
            move = torch.linspace(1.0, 0.4, 13, dtype=torch.float64).unsqueeze(-1)
            lows, highs = (move * lo, hi.expand(len(move), -1)) if end == "low" else (lo.expand(len(move), -1), move * hi)
            index, now = _best(sample, lows, highs, grid, error)
            pick = move[index, 0]
            better = now < least
            if end == "low":
                lo = torch.where(better, lo * pick, lo)
            else:
                hi = torch.where(better, hi * pick, hi)
            least = torch.minimum(now, least)
    return _candidates(lo, hi, grid)


def _best(sample: Sample, low: torch.Tensor, high: torch.Tensor, grid: Grid, error: ErrorOf) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the candidate with the least error per channel, and that error; low, high [K, C]. The first wins a tie."""
    rows = max(1, (1 << 22) // max(1, sample.values.numel()))  # candidates at once, to bound memory
    parts = [errors(sample, _candidates(a, b, grid), grid, error) for a, b in zip(low.split(rows), high.split(rows), strict=True)]
    e = torch.cat(parts)
    least, index = e.min(0)
    return index, least
