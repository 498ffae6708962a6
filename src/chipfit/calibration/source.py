"""The user's calibration data, as the stages of `quantize` read them: once, or again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from chipfit.calibration.batch_cache import CachedBatches
from chipfit.calibration.data import as_call, batches, first_batch
from chipfit.calibration.progress import count_batches
from chipfit.graph.ir import Graph


class CalibrationData:
    """The batches of the user's data, which can be read several times; those of an iterator only after `keep`.

    Args:
        data: as the user gave them to `quantize`.
        example: one batch to capture the model with; None: the first batch of `data`.
    """

    def __init__(self, data: Any, example: Any = None) -> None:
        self.data, self._example = data, example
        self._unread = data  #: with the first batch still in it, where that was looked at

    @property
    def has_example(self) -> bool:
        return self._example is not None

    @property
    def read_once(self) -> bool:
        """True while the data are an iterator whose batches are not kept."""
        return isinstance(self.data, Iterator)

    def example_call(self, model: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return the arguments of a call with which the model is captured.

        Raises:
            DataError: the data are empty.
        """
        if self._example is not None:
            self._unread = self.data
            return as_call(self._example, model)
        args, kwargs, self._unread = first_batch(self.data, model)
        return args, kwargs

    def keep(self) -> None:
        """Keep the batches of an iterator while they are read for the first time."""
        if self.read_once:
            self.data = self._unread = CachedBatches(self._unread)

    def first_pass(self, graph: Graph, note: Callable[[list[torch.Tensor]], None]) -> batches:
        """Return the batches as graph inputs, for the first pass over them; `note` is called with each."""
        return batches(self._unread, graph, note)

    def batches(self, graph: Graph) -> batches:
        """Return the batches as graph inputs, for a further pass; none of an iterator that was not kept."""
        return batches(self.data, graph)

    @property
    def count(self) -> int | None:
        """Number of batches; None where the data do not tell."""
        return count_batches(self.data)
