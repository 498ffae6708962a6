"""Compact storage of the values of calibration samples on their way through the network; on disk beyond a limit."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.data import Batch, count_splittable
from chipfit.calibration.histogram import in_memory_order
from chipfit.calibration.source import MemoryLimit
from chipfit.graph.ir import CPU, Graph
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan
from chipfit.quantizers.stored import Stored

#: samples that go through a node at a time
CHUNK = 32
#: bytes of all streams in memory; what exceeds them is kept in mapped files
MEMORY = 3 << 28
#: larger magnitudes are not stored in half precision
_HALF = 3e4
#: values with fewer numbers, over all samples, stay in float32, since conversion costs more than their memory
SMALL = 1 << 24


#: selects numbers of a tensor in any order, perhaps with zeros around them; the second argument stands for 0
Pick = Callable[[Tensor, float], Tensor]


def _fits_half(x: Tensor) -> bool:
    if x.dtype != torch.float32 or not x.numel():
        return False
    low, high = torch.aminmax(in_memory_order(x))
    return bool((low > -_HALF) & (high < _HALF))


@dataclass
class Stream:
    """One value for every chunk of samples: quantized as planned, else in half precision if it is large."""

    memory: MemoryLimit
    stored: Stored | None = None
    expected: int | None = None  #: number of chunks, if it is known
    chunks: list[Any] = field(default_factory=list)
    device: torch.device = CPU  #: of the chunks as they were appended; mapped files are on the CPU

    def append(self, x: Any) -> None:
        """Append a chunk; anything but a float tensor is stored unchanged."""
        if isinstance(x, Tensor) and x.is_floating_point():
            self.device = x.device
            if self.stored is not None:
                x = self.stored.quantize(x)
            elif (self.expected is None or self.expected * x.numel() > SMALL) and _fits_half(x):
                x = x.half()
            last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)  # as its operator made it
            x = self.memory.keep(x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format))
        self.chunks.append(x)

    def __getitem__(self, k: int) -> Any:
        """Return chunk k in float32, with the rounding of its storage."""
        return self._values(self._chunk(k))

    def _chunk(self, k: int) -> Any:
        """Return chunk k as it is stored, on the device."""
        x = self.chunks[k]
        return x.to(self.device) if isinstance(x, Tensor) and x.is_floating_point() | (self.stored is not None) else x

    def part(self, k: int, pick: Pick) -> Tensor:
        """Return what `pick` selects of chunk k; only the selection is decoded."""
        if self.stored is None:
            return self._values(pick(self._chunk(k), 0.0))
        if self.stored.scale.dim() or float(self.stored.round(torch.zeros(()))):  # by channel, or 0 is not stored as 0
            return pick(self[k], 0.0)
        return self._values(pick(self._chunk(k), float(self.stored.quantize(torch.zeros(())))))

    def _values(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if self.stored is not None:
            return self.stored.dequantize(x)
        return x.float() if x.dtype == torch.float16 else x

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self.chunks)))

    def free(self) -> None:
        """Release the memory of all chunks."""
        for x in self.chunks:
            if isinstance(x, Tensor) and (self.stored is not None or x.is_floating_point()):
                self.memory.release(x)
        self.chunks.clear()


class SampleStreams:
    """The samples on their way through a network, at each value that is still read: in float, and as the chip has them.

    Args:
        plan: how values are quantized; a value that some operator reads in float is kept in float.
        memory: bytes of samples in memory; the rest is kept in mapped files.
    """

    def __init__(self, plan: Plan, memory: int = MEMORY) -> None:
        self.plan, self.memory = plan, MemoryLimit(memory)
        self.floats: dict[str, Stream] = {}
        self.quantized: dict[str, Stream] = {}
        self.raw = {value for value, _ in plan.float_edges}  #: values that some operator reads before they are rounded
        self.chunks = 0

    def quantized_stream(self, name: str, expected: int | None = None) -> Stream:
        """Return an empty stream of a value as the chip has it."""
        return Stream(self.memory, None if name in self.raw else self.plan.stored(name), expected)

    def read_inputs(self, graph: Graph, batches: Iterable[Batch]) -> Iterator[list[Tensor]]:
        """Put the graph's inputs into both streams, chunk by chunk, and yield each chunk, on the graph's device.

        A batch whose inputs do not agree on its size stays whole.
        """
        for name in graph.inputs:
            self.floats[name], self.quantized[name] = Stream(self.memory), self.quantized_stream(name)
        for batch in batches:
            whole, there = not count_splittable(graph, batch), inputs_on(graph.device, batch)
            for inputs in [there] if whole else zip(*(x.split(CHUNK) for x in there), strict=True):
                self.chunks += 1
                for name, x in zip(graph.inputs, inputs, strict=True):
                    self.floats[name].append(x)
                    self.quantized[name].append(x)
                yield list(inputs)

    def free(self, names: Iterable[str]) -> None:
        """Release the samples at values that no later node reads."""
        for name in names:
            for streams in (self.floats, self.quantized):
                if name in streams:
                    streams.pop(name).free()
