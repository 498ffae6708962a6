"""Hashes of calibration samples, by which `verify` recognises them later; a bounded number of them."""

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch

#: number of digests that are kept: the smallest, independent of the order of samples; and number of elements of an
#: input that a digest covers
_KEPT, _NUMBERS = 128, 1024


class SampleHashes:
    """The digests of samples, and one hash over all batches."""

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self.digests = set(digests)
        self._all = hashlib.sha256()

    def add(self, inputs: Sequence[torch.Tensor]) -> None:
        """Add the samples of one batch."""
        inputs = [x.detach().cpu() for x in inputs]
        for x in inputs:
            self._all.update(f"{len(inputs)} {x.dtype} {tuple(x.shape)} ".encode())
            whole = x.contiguous().reshape(-1)
            self._all.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
        self.digests = set(sorted(self.digests.union(_digests(inputs)))[:_KEPT])

    @property
    def hash(self) -> str:
        """SHA-256 over all batches: types, shapes, numbers, and the order of batches."""
        return self._all.hexdigest()

    def count_known(self, inputs: Sequence[torch.Tensor]) -> int:
        """Return how many samples of one batch are among the digests."""
        return sum(d in self.digests for d in _digests(inputs))


def _digests(inputs: Sequence[torch.Tensor]) -> list[str]:
    """Return a digest for each sample of a batch [N, ...]; inputs without a batch axis belong to every sample."""
    count = next((len(x) for x in inputs if x.dim()), 1)
    parts = [
        x.expand(count, *x.shape[1:]) if x.dim() and len(x) == count else x.expand(count, *x.shape) for x in inputs
    ]
    sizes = [math.prod(p.shape[1:]) for p in parts]
    rows = [p.reshape(count, n)[:, :: max(1, n // _NUMBERS)].cpu().numpy() for p, n in zip(parts, sizes, strict=True)]
    return [hashlib.blake2b(b"".join(r[k].tobytes() for r in rows), digest_size=6).hexdigest() for k in range(count)]
