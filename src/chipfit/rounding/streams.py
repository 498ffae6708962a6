"""The values of calibration images on their way through the network: compact, and on disk where they are many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.batch_cache import MemoryLimit
from chipfit.calibration.data import divisible
from chipfit.calibration.histogram import in_memory_order
from chipfit.graph.ir import Graph
from chipfit.quantizers.stored import Stored

#: images that go through a node at a time
CHUNK = 32
#: bytes of all streams in memory; what exceeds them is kept in mapped files
MEMORY = 3 << 28
#: larger magnitudes are not kept in half precision
_HALF = 3e4
#: values of fewer numbers, of all images, are kept as they are: to convert them costs more than their memory
SMALL = 1 << 24


def chunks(graph: Graph, batch: Sequence[Tensor]) -> list[list[Tensor]]:
    """Parts of a batch of graph inputs; one whose inputs do not agree on its size stays whole."""
    if not divisible(graph, batch):
        return [list(batch)]
    return [list(part) for part in zip(*(x.split(CHUNK) for x in batch), strict=True)]


#: takes some numbers of a tensor in any order; what it adds around them is 0, which the second argument stands for
Pick = Callable[[Tensor, float], Tensor]


def is_elementwise(stored: Stored) -> bool:
    """Whether numbers are stored alike wherever they are, and 0 as 0."""
    return not stored.scale.dim() and not float(stored.round(torch.zeros(())))


def _fits_half(x: Tensor) -> bool:
    low, high = torch.aminmax(in_memory_order(x))
    return float(low) > -_HALF and float(high) < _HALF


def _memory_format(x: Tensor) -> torch.memory_format:
    """Images stay in channels last where an operator made them so: the next one reads them so."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


@dataclass
class Stream:
    """One value for every chunk of images: codes where it is stored in codes, else half precision where it is large."""

    budget: MemoryLimit
    stored: Stored | None = None
    expected: int | None = None  #: chunks, where that is known
    chunks: list[Any] = field(default_factory=list)

    def append(self, x: Any) -> None:
        """One more chunk; anything that is no float tensor is kept as it is."""
        if isinstance(x, Tensor) and x.is_floating_point():
            if self.stored is not None:
                x = self.stored.quantize(x)
            elif x.dtype == torch.float32 and self._is_large(x) and _fits_half(x):
                x = x.half()
            x = self.budget.keep(x.contiguous(memory_format=_memory_format(x)))
        self.chunks.append(x)

    def __getitem__(self, k: int) -> Any:
        """Chunk k as it was given, float32 and rounded as it is kept."""
        return self._values(self.chunks[k])

    def part(self, k: int, pick: Pick) -> Tensor:
        """What is picked of chunk k: before it is decoded, so that only that is."""
        zero = 0.0
        if self.stored is not None:
            if not is_elementwise(self.stored):
                return pick(self[k], 0.0)
            zero = float(self.stored.quantize(torch.zeros(())))
        return self._values(pick(self.chunks[k], zero))

    def _is_large(self, x: Tensor) -> bool:
        return x.numel() > 0 and (self.expected is None or self.expected * x.numel() > SMALL)

    def _values(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self.stored is not None:
            return self.stored.dequantize(x)
        return x.float() if x.dtype == torch.float16 else x

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self.chunks)))

    def free(self) -> None:
        for x in self.chunks:
            if isinstance(x, Tensor) and (self.stored is not None or x.is_floating_point()):
                self.budget.release(x)
        self.chunks.clear()
