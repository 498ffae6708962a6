"""Tensors that are kept to be read again: in memory up to a limit, in mapped files beyond it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from chipfit.calibration.data import as_tensors
from chipfit.errors import DataError


@dataclass
class MemoryLimit:
    """Bytes of values in memory; what comes beyond `most` is mapped from files that are gone with their tensors."""

    most: int = 1 << 30
    used: int = 0
    spilled: int = 0

    def keep(self, x: Tensor) -> Tensor:
        """The same numbers, in memory or on disk.

        Raises:
            DataError: there is no room on disk.
        """
        size = x.numel() * x.element_size()
        if self.used + size <= self.most or size == 0:
            self.used += size
            return x
        self.spilled += size
        axes = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)  # as x lies in memory
        lies = x.permute(axes)
        try:
            with tempfile.NamedTemporaryFile() as file:  # the mapping outlives its name
                # written, for a mapping that finds the disk full ends the process
                file.write(lies.reshape(-1).view(torch.uint8).numpy().data)
                file.flush()
                mapped = torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype).view(lies.shape)
                return mapped.permute([axes.index(d) for d in range(x.dim())])
        except OSError as e:
            what = f"Calibration data take more than {self.most:,} bytes, and the rest cannot be written: {e.strerror}"
            hint = "give fewer images, or set TMPDIR to a folder with room"
            raise DataError(what, where=tempfile.gettempdir(), got=f"{self.spilled:,} bytes more", hint=hint) from None

    def release(self, x: Tensor) -> None:
        if not x.is_shared():
            self.used -= x.numel() * x.element_size()


class CachedBatches:
    """Data that can be read once, kept while they are read, so that they can be read again.

    Args:
        most: bytes that stay in memory.
    """

    def __init__(self, data: Iterator[Any], most: int = 1 << 28) -> None:
        self._data, self._batches, self._budget = data, list[Any](), MemoryLimit(most)

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches
        for batch in self._data:
            # a copy, for whoever gives the batches may fill the same array again
            self._batches.append(tree_map_only(Tensor, self._copy, as_tensors(batch)))
            yield batch

    def _copy(self, x: Tensor) -> Tensor:
        kept = self._budget.keep(x.detach())
        return kept.clone() if kept.data_ptr() == x.data_ptr() else kept
