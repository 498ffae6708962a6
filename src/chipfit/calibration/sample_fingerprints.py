"""Which samples calibration saw: enough to recognise them later, and bounded whatever their number."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

#: digests that are kept, the least ones, so that which they are depends on no order; and numbers of an input of a
#: sample that one is taken over
_KEPT, _NUMBERS = 128, 1024


class SampleHashes:
    """Digests of samples."""

    def __init__(self, digests: Iterable[str] = ()) -> None:
        self.digests = set(digests)
        self._all = hashlib.sha256()

    @classmethod
    def of(cls, provenance: Mapping[str, Any]) -> SampleHashes:
        """The samples that a plan was calibrated on, as far as they are remembered."""
        return cls(provenance.get("samples", ()))

    def note(self, inputs: Sequence[torch.Tensor]) -> None:
        """Remember the samples of one batch."""
        for x in inputs:
            self._all.update(f"{len(inputs)} {x.dtype} {tuple(x.shape)} ".encode())
            whole = x.detach().cpu().contiguous().reshape(-1)
            self._all.update(whole.view(torch.uint8).numpy().data if whole.numel() else b"")
        self.digests = set(sorted(self.digests.union(_digests(inputs)))[:_KEPT])

    @property
    def hash(self) -> str:
        """SHA-256 over every batch that was noted: types, shapes, numbers, order and borders of batches."""
        return self._all.hexdigest()

    def known(self, inputs: Sequence[torch.Tensor]) -> int:
        """How many samples of one batch are remembered."""
        return sum(d in self.digests for d in _digests(inputs))


def _digests(inputs: Sequence[torch.Tensor]) -> list[str]:
    """One for each sample of a batch, [N, ...] in every input; inputs without a batch axis count for each of them."""
    count = next((len(x) for x in inputs if x.dim()), 1)
    parts = [
        x.expand(count, *x.shape[1:]) if x.dim() and len(x) == count else x.expand(count, *x.shape) for x in inputs
    ]
    sizes = [math.prod(p.shape[1:]) for p in parts]
    rows = [p.reshape(count, n)[:, :: max(1, n // _NUMBERS)].cpu().numpy() for p, n in zip(parts, sizes, strict=True)]
    return [hashlib.blake2b(b"".join(r[k].tobytes() for r in rows), digest_size=6).hexdigest() for k in range(count)]
