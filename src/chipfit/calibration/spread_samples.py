"""A few samples, spread evenly over calibration data of unknown length that are read once."""

from collections.abc import Sequence
from typing import Any

import torch

from chipfit.calibration.data import Batch, IndivisibleBatch

#: most samples that are kept, and most numbers in them; at least one sample is kept
_MOST, _NUMBERS = 128, 1 << 21


class SpreadSamples:
    """Every k-th sample of the data, copied; k doubles whenever there are too many.

    A batch counts as one sample if it is marked as whole, as for a network with a fixed batch size, or its tensors have
    different sizes.
    """

    def __init__(self) -> None:
        self._cut = True
        self._kept, self._stride, self._next, self.count = list[Batch](), 1, 0, 0

    def add(self, batch: Batch) -> None:
        """Keep the samples of a batch whose turn it is."""
        sizes = {len(x) if x.dim() else 0 for x in batch}
        self._cut = self._cut and not isinstance(batch, IndivisibleBatch) and len(sizes) == 1 and 0 not in sizes
        count = sizes.pop() if self._cut else 1
        while self._next < self.count + count:
            k = self._next - self.count
            one = [(x[k : k + 1] if self._cut else x).detach().clone() for x in batch]
            self._kept.append(one)
            most = max(1, min(_MOST, _NUMBERS // max(1, sum(x.numel() for x in one))))
            if len(self._kept) > 2 * most:
                self._kept, self._stride = self._kept[::2], 2 * self._stride
            self._next += self._stride
        self.count += count

    def take(self, most: int) -> list[Batch]:
        """Return at most `most` samples, spread evenly: one batch for each shape, or uncut where batches stay whole."""
        step = max(1, -(-len(self._kept) // max(1, most)))
        groups: dict[Any, list[Batch]] = {}
        for k, one in enumerate(self._kept[::step]):
            groups.setdefault(tuple(x.shape for x in one) if self._cut else k, []).append(one)
        if not self._cut:
            return [IndivisibleBatch(one) for (one,) in groups.values()]
        return [[_joined(xs) for xs in zip(*g, strict=True)] if g[1:] else g[0] for g in groups.values()]


def _joined(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return samples as one tensor on the device of the first: batches may come from several devices."""
    return torch.cat([x.to(samples[0].device) for x in samples])
