"""A streaming histogram whose range doubles by folding bins: exact counts, one pass, no sample kept."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

BINS = 2048


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """The elements of x in the order of its memory, [N], without a copy when x is dense in any memory format."""
    if _dense(x):
        return torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
    return x.reshape(-1)


def _dense(x: torch.Tensor) -> bool:
    """The elements fill one block of memory in some order of the axes."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(x.stride(), x.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


@dataclass(slots=True)
class Histogram:
    """Counts over [-reach, reach) in equal bins; reach is a power of two and only grows.

    When data exceed the reach, bins are folded in pairs: counts stay exact, resolution halves. Values are float32.
    """

    reach: float = 0.0
    counts: torch.Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))

    def add(self, values: torch.Tensor, largest: float) -> None:
        """Count `values` (1-D, finite), of which none is larger than `largest` in magnitude."""
        if largest == 0.0 and self.reach == 0.0:
            self.reach = 2.0**-24
        if largest >= self.reach:
            wanted = 2.0 ** math.ceil(math.log2(largest * (1 + 1e-6)))
            while 0 < self.reach < wanted and self.counts.any():
                folded = self.counts.view(-1, 2).sum(1)
                self.counts = torch.zeros(BINS, dtype=torch.float64)
                self.counts[BINS // 4 : BINS * 3 // 4] = folded
                self.reach *= 2
            self.reach = max(wanted, self.reach)
        index = (values * (BINS / (2 * self.reach)) + BINS / 2).to(torch.int32).clamp_(0, BINS - 1)
        self.counts += torch.bincount(index, minlength=BINS)

    @property
    def centers(self) -> torch.Tensor:
        """Middle of each bin, float32 [BINS]."""
        step = 2 * self.reach / BINS
        return torch.arange(BINS, dtype=torch.float32) * step + (step / 2 - self.reach)

    @property
    def points(self) -> torch.Tensor:
        """One value inside each bin, float32 [BINS], at golden-ratio steps across the bins.

        Centres would line up with a grid whose step is a multiple of the bin width, and flatter that grid.
        """
        offset = torch.frac(torch.arange(BINS, dtype=torch.float64) * 0.6180339887498949) - 0.5
        return self.centers + (offset * (2 * self.reach / BINS)).float()


def without_outliers(centers: torch.Tensor, counts: torch.Tensor, z_threshold: float) -> torch.Tensor:
    """Counts with those bins set to 0 whose centre is further than `z_threshold` standard deviations from the mean.

    Args:
        centers: [N], in the tensor's unit.
        counts: [N].
    """
    total = counts.sum()
    mean = (centers * counts).sum() / total
    std = ((centers - mean) ** 2 * counts).sum().div(total).sqrt()
    return torch.where(((centers - mean) / std.clamp_min(1e-30)).abs() <= z_threshold, counts, torch.zeros_like(counts))
