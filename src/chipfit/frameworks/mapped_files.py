"""Files of a model that are mapped into memory while the model is read, so that only what is copied takes memory."""

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from chipfit.errors import CaptureError
from chipfit.files import wrap_read_errors

_PAGE = mmap.ALLOCATIONGRANULARITY


class MappedFiles:
    """The files of a model while it is read.

    Args:
        folder: of the model's file; None for a model that does not come from a file.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._maps: dict[str, mmap.mmap] = {}
        self._states: dict[str, tuple[int, int]] = {}
        self._blocks = 0

    def note(self, location: str) -> int:
        """Note the state of a file, and return its size [byte]."""
        if location not in self._states:
            self._states[location] = self._state(location)
        return self._states[location][0]

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Keep files mapped inside the block only: a program that writes them anew later would end this one.

        Raises:
            CaptureError: A file has changed since it was noted.
        """
        if not self._blocks:
            for location in self._states:
                self._check(location)
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if not self._blocks:
                self._maps.clear()  # each is closed with its last array

    def map(self, location: str) -> mmap.mmap:
        """Return the bytes of a file."""
        if location not in self._maps:
            with self.path(location).open("rb") as file:
                self._maps[location] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[location]

    def numbers(self, location: str, kind: Any, count: int, offset: int) -> np.ndarray:
        """Return numbers of a file, which are not copied."""
        return np.frombuffer(self.map(location), kind, count, offset)

    def release(self, location: str, offset: int, size: int) -> None:
        """Give back the memory of bytes that have been copied."""
        mapped = self._maps.get(location)
        if mapped is not None and hasattr(mapped, "madvise"):  # not on Windows
            start = offset // _PAGE * _PAGE
            mapped.madvise(mmap.MADV_DONTNEED, start, offset + size - start)

    def path(self, location: str) -> Path:
        return (self.folder or Path()) / location

    def _check(self, location: str) -> None:
        if self._state(location) != self._states[location]:
            hint = "load the model again"
            raise CaptureError("The model's file has changed since it was loaded", got=location, hint=hint)

    def _state(self, location: str) -> tuple[int, int]:
        with wrap_read_errors(self.path(location), CaptureError, "The file with weights"):
            found = self.path(location).stat()
        return found.st_size, found.st_mtime_ns
