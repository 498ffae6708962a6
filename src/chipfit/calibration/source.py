"""The user's calibration data, as the stages of `quantize` read them: once, or again from a cache.

The cache holds tensors in memory up to a limit, and beyond it in memory-mapped files.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from chipfit.calibration.data import ARRAY_BATCH, NotedBatches, as_batch, as_call, as_tensors, batches, first_batch
from chipfit.calibration.spread_samples import SpreadSamples
from chipfit.errors import DataError
from chipfit.files import WINDOWS
from chipfit.graph.ir import Graph


@dataclass
class MemoryLimit:
    """A limit on the bytes of cached tensors in memory; further tensors are mapped from temporary files."""

    most: int = 1 << 30  #: bytes allowed in memory
    used: int = 0  #: bytes in memory now
    spilled: int = 0  #: bytes written to files so far

    def keep(self, x: Tensor) -> Tensor:
        """Return the tensor itself, or its copy in a file that disappears together with the copy.

        Raises:
            DataError: the disk is full.
        """
        size = x.numel() * x.element_size()
        # Windows cannot remove a file that is mapped; its page file takes what memory does not hold
        if self.used + size <= self.most or size == 0 or WINDOWS:
            self.used += size
            return x
        self.spilled += size
        axes = sorted(range(x.dim()), key=x.stride().__getitem__, reverse=True)  # in memory order
        ordered = x.permute(axes)
        try:
            with tempfile.NamedTemporaryFile() as file:  # the mapping outlives the name
                # write() reports a full disk; writing through the mapping would end the process
                file.write(ordered.reshape(-1).view(torch.uint8).cpu().numpy().data)
                file.flush()
                mapped = torch.from_file(file.name, shared=True, size=x.numel(), dtype=x.dtype).view(ordered.shape)
                return mapped.permute([axes.index(d) for d in range(x.dim())])
        except OSError as e:
            what = f"Calibration data take more than {self.most:,} bytes, and the rest cannot be written: {e.strerror}"
            hint = "give fewer images, or set TMPDIR to a folder with room"
            raise DataError(what, where=tempfile.gettempdir(), got=f"{self.spilled:,} bytes more", hint=hint) from None

    def release(self, x: Tensor) -> None:
        """Give back the memory of a tensor from `keep`."""
        if x.device.type != "cpu" or not x.is_shared():  # a device's tensors always count as shared
            self.used -= x.numel() * x.element_size()


class CachedBatches:
    """The batches of an iterator, cached at the first reading so that they can be read again.

    Args:
        most: bytes that stay in memory.
    """

    def __init__(self, data: Iterator[Any], most: int = 1 << 28) -> None:
        self._data, self._batches, self.memory = data, list[Any](), MemoryLimit(most)

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches
        for batch in self._data:
            # a copy, because the user may fill the same array again for the next batch
            self._batches.append(tree_map_only(Tensor, self._copy, as_tensors(batch)))
            yield batch

    def _copy(self, x: Tensor) -> Tensor:
        cached = self.memory.keep(x.detach())
        return cached.clone() if cached.data_ptr() == x.data_ptr() else cached


class CalibrationData:
    """The batches of the user's data, which can be read several times; those of an iterator only after `keep_batches`.

    Args:
        data: calibration data, as the user gave them to `quantize`.
        example: the batch with which the model is captured; by default the first batch of `data`.
    """

    def __init__(self, data: Any, example: Any = None) -> None:
        self.data, self.example = data, example
        self._unread = data  #: all batches, the first too if `example_call` has read it from an iterator
        self.samples = SpreadSamples()  #: a few samples of the first pass, on which losses are measured

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on where the data come from, for the plan."""
        return self.data.notes if isinstance(self.data, NotedBatches) else ()

    @property
    def read_once(self) -> bool:
        """True while the data are an iterator whose batches are not kept."""
        return isinstance(self.data, Iterator)

    def example_call(self, model: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of a call with which the model is captured.

        Raises:
            DataError: the data are empty.
        """
        if self.example is not None:
            self._unread = self.data
            return as_call(self.example, model)
        call, self._unread = first_batch(self.data, model)
        return call

    def keep_batches(self) -> None:
        """Cache the batches of an iterator while they are read for the first time."""
        if self.read_once:
            self.data = self._unread = CachedBatches(self._unread)

    def first_pass(self, graph: Graph, note: Callable[[list[Tensor]], None]) -> batches:
        """Return the batches as graph inputs, for the first pass over them.

        Args:
            note: called with the inputs of each batch.
        """
        samples = self.samples = SpreadSamples()

        def record(batch: list[Tensor]) -> None:
            note(batch)
            samples.add(as_batch(graph, batch))

        return batches(self._unread, graph, record)

    def batches(self, graph: Graph) -> batches:
        """Return the batches as graph inputs, for a further pass; an iterator that is not cached is exhausted."""
        return batches(self.data, graph)

    @property
    def count(self) -> int | None:
        """Number of batches; None for data without a length."""
        array = next(iter(self.data.values()), None) if isinstance(self.data, Mapping) else self.data
        shape = getattr(array, "shape", None)
        if shape is not None and len(shape):  # big arrays are split into batches
            return -(-int(shape[0]) // ARRAY_BATCH)
        try:
            return len(self.data)
        except TypeError:
            return None
