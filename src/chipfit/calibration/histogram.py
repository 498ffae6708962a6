"""A streaming histogram with exact counts, whose range doubles by folding bins in pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul

import torch

BINS = 2048
#: least reach, so that the bin width is a normal float32 number even for data that are all zero
LEAST_REACH = 2.0**-100
#: values that are counted at once: few enough that torch starts no second thread, which would be slower
_AT_ONCE = 1 << 15


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return the elements of x in memory order, [N], without a copy if x is dense in any memory format."""
    axes = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size != 1)
    filled = accumulate((size for _, size in axes), mul, initial=1)  # by the axes inside of each
    if all(stride == block for (stride, _), block in zip(axes, filled)):  # one block of memory, in any order of axes
        return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
    return x.reshape(-1)


@dataclass(slots=True)
class Histogram:
    """The counts over [-reach, reach) in equal bins; reach is a power of two and only grows.

    If data exceed the reach, bins are folded in pairs: counts stay exact, the resolution halves.
    """

    reach: float = 0.0
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))
    zeros: float = 0  #: count of exact zeros; bin BINS / 2, which starts at 0, contains them too

    def add(self, values: torch.Tensor, largest: float, weights: torch.Tensor | None = None) -> None:
        """Count `values` (1-D, float32, finite).

        Args:
            largest: an upper bound of their magnitudes.
            weights: count of each value, [N]; None: 1.
        """
        self.grow(largest)
        counted = repeat(None) if weights is None else weights.split(_AT_ONCE)
        for part, weight in zip(values.split(_AT_ONCE), counted, strict=False):
            index = torch.mul(part, BINS / (2 * self.reach)).add_(BINS / 2).clamp_(0, BINS - 1).to(torch.int32)
            self.counts += torch.bincount(index, weight, minlength=BINS)
            zeros = part.numel() - int(torch.count_nonzero(part))
            self.zeros += zeros if weight is None or not zeros else float(weight[part == 0].sum(dtype=torch.float64))

    def add_extremes(self, low: float, high: float, count: float) -> None:
        """Count the least and the greatest number of values of which `add` has seen a part."""
        for value in (low, high):
            if value != 0:  # every grid has zero
                bin_ = int(value * (BINS / (2 * self.reach)) + BINS / 2)
                self.counts[min(max(bin_, 0), BINS - 1)] += count

    def grow(self, largest: float) -> None:
        """Double the reach until it exceeds `largest`."""
        if largest < self.reach:
            return
        wanted = 2.0 ** math.ceil(math.log2(max(largest * (1 + 1e-6), LEAST_REACH)))
        if not self.counts.any():
            self.reach = wanted
        while self.reach < wanted:
            folded = self.counts.view(-1, 2).sum(1)
            self.counts = torch.zeros(BINS, dtype=torch.float64)
            self.counts[BINS // 4 : BINS * 3 // 4] = folded
            self.reach *= 2

    def shifted(self, by: float) -> Histogram:
        """Return the histogram of x + `by`, to the nearest bin."""
        out = Histogram(self.reach, self.counts.clone())
        used = self.edges[:-1][self.counts > 0]
        if len(used):
            out.grow(max(-(float(used.min()) + by), float(used.max()) + 2 * self.reach / BINS + by))
        bins = round(by * BINS / (2 * out.reach))
        moved = torch.zeros_like(out.counts)
        moved[max(bins, 0) : BINS + min(bins, 0)] = out.counts[max(-bins, 0) : BINS - max(bins, 0)]
        return Histogram(out.reach, moved)

    @property
    def centers(self) -> torch.Tensor:
        """Middle of each bin, float64 [BINS]."""
        return (self.edges[1:] + self.edges[:-1]) / 2

    @property
    def edges(self) -> torch.Tensor:
        """Borders of the bins, float64 [BINS + 1]."""
        return torch.linspace(-self.reach, self.reach, BINS + 1, dtype=torch.float64)


def without_outliers(centers: torch.Tensor, counts: torch.Tensor, z_threshold: float) -> torch.Tensor:
    """Return the counts without bins whose centre is more than `z_threshold` standard deviations from the mean.

    The occupied bins nearest to the mean always stay, so that data at two distant ends do not vanish.

    Args:
        centers: [N], in the tensor's unit.
        counts: [N].
    """
    mean = (centers * counts).sum() / counts.sum()
    distance = (centers - mean).abs()
    std = (distance.square() * counts).sum().div(counts.sum()).sqrt()
    nearest = distance[counts > 0].min() * (1 + 1e-6)
    return torch.where(distance <= torch.maximum(float(z_threshold) * std, nearest), counts, torch.zeros_like(counts))
