"""Runtimes that load exported files: one a file, registered as "runtime" with what it needs.

A runtime is created from a file and the names of tensors to be readable. `run(inputs)` computes one batch and returns,
by name, first the outputs in the model's order, then the readable tensors that the file holds; `executed()` counts the
operators that it runs. It may have `warnings(platform)`: sentences about the machine that a reader of a verification
should know, and `open(path)`, which opens a file as a user's program does and raises `RuntimeUnavailable` if it is
refused.

Inputs and outputs of a runtime are floats even if those of the file are integers; the integers of such an input can be
read as a tensor.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from chipfit.errors import ExportError, RuntimeUnavailable
from chipfit.files import folder_beside, write_atomically
from chipfit.registry import Entry, entries, require_libraries
from chipfit.validation import error_of

#: (float32 numbers, scale) -> the numbers in steps of the scale, rounded
Steps = Callable[[np.ndarray, Any], np.ndarray]
SAMPLES = "samples"  #: axis along which a file of fixed batch size computes parts


def write_opened(write: Callable[[Path], Path], path: Path, names: Sequence[str]) -> Path:
    """Write a file, open it with a runtime that can read it, where one is installed, and then put it into its place.

    What stood there before is still there if the runtime refuses the file.

    Args:
        write: writes the file, and others beside it that belong to it, and returns its path.
        names: runtimes of the file's platform; if there is none, any runtime that reads LiteRT's files opens them.

    Raises:
        ExportError: the runtime refuses the file, or the disk does.
    """
    known = {name: e for name, e in entries("runtime").items() if e.declares.suffix == path.suffix}
    chosen = [known[n] for n in names if n in known]
    if not chosen and path.suffix == ".tflite":  # its kernels are those that other runtimes for such files repeat
        chosen = list(known.values())
    found = next((e for e in chosen if hasattr(e.thing, "open") and installed(e)), None)
    if found is None:
        return write(path)
    with folder_beside(path) as folder:
        try:
            made = write(folder / path.name)
        except ExportError as e:  # about a folder that the user has not chosen
            where = e.where.replace(str(folder), str(path.parent))
            raise ExportError(e.what, where=where, got=e.got, allowed=e.allowed, hint=e.hint) from e.__cause__
        try:
            found.thing.open(made)
        except RuntimeUnavailable as e:
            hint = "keep the operator that the message names in float with overrides, or choose another platform"
            raise ExportError(f"The file was not written: {e.what}", where=str(path), hint=hint) from e
        for other in sorted({*made.parent.iterdir()} - {made}):
            write_atomically(path.with_name(other.name), other.read_bytes())
        return write_atomically(path, made.read_bytes())


def installed(runtime: Entry) -> bool:
    """Return whether the libraries that a runtime declares are installed."""
    try:
        require_libraries(runtime)
    except RuntimeUnavailable:
        return False
    return True


def divided(x: np.ndarray, scale: Any) -> np.ndarray:
    """Return x / scale, halves to even, as ONNX defines."""
    return np.rint(x / scale)


def quantize_input(x: np.ndarray, scale: float, zero_point: int, dtype: np.dtype, steps: Steps = divided) -> np.ndarray:
    """Quantize floats as an app does, with the rounding of the runtime's own kernel, within the type."""
    ends = np.iinfo(dtype)
    q = steps(x.astype(np.float32), np.float32(scale)) + np.float32(zero_point)
    return np.clip(q, ends.min, ends.max).astype(dtype)


def dequantize_output(q: np.ndarray, scale: float, zero_point: int) -> np.ndarray:
    """Dequantize integers: (q - zero_point) * scale."""
    return (q.astype(np.int32) - np.int32(zero_point)).astype(np.float32) * np.float32(scale)


def read_notes(kind: Any, text: str | bytes, path: str) -> Any:
    """Return the chipfit notes in a file, JSON of this type.

    Raises:
        RuntimeUnavailable: they are malformed.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as e:
        why = error_of(e.errors(), {}, RuntimeUnavailable, path).what
        raise RuntimeUnavailable(f"The chipfit notes in the file are malformed: {why}", where=path) from e


def check_inputs(inputs: Sequence[np.ndarray], wanted: Mapping[str, Sequence[int | str | None] | None]) -> None:
    """Check that inputs have the sizes of those of a file.

    Args:
        wanted: input -> size of each axis, None if the file leaves it open. A name is any size, and one size wherever
            it stands; `SAMPLES` is at least 1.

    Raises:
        RuntimeUnavailable: One is missing or has other sizes.
    """
    hint = "is this the file that was written for this model?"
    if len(inputs) != len(wanted):
        got, allowed = f"{len(inputs)} inputs", ", ".join(wanted)
        raise RuntimeUnavailable("The inputs do not fit the file", got=got, allowed=allowed, hint=hint)
    known: dict[Any, int] = {}
    for x, (name, shape) in zip(inputs, wanted.items(), strict=True):
        sizes = [known.get(s, s) for s in (x.shape if shape is None else shape)]
        fits = x.ndim == len(sizes) and all(s in (None, n) or isinstance(s, str) for s, n in zip(sizes, x.shape))
        new = {s: n for s, n in zip(sizes, x.shape) if isinstance(s, str)}
        if not fits or new.get(SAMPLES, 1) == 0:
            allowed = "[" + ", ".join("any" if s is None else str(s) for s in sizes) + "]"
            what = f"Input '{name}' does not fit the file"
            raise RuntimeUnavailable(what, got=str([*x.shape]), allowed=allowed, hint=hint)
        known.update(new)


def unfit_notes(path: str = "", what: str = "tensors") -> RuntimeUnavailable:
    """Return the error for notes that do not belong to the file's tensors or outputs."""
    message = f"The chipfit notes in the file do not fit its {what}"
    return RuntimeUnavailable(message, where=path, hint="export it again")


def join_parts(parts: Sequence[np.ndarray], axis: int, front: int = 1) -> np.ndarray:
    """Join parts of a batch along `axis`, into which [front, samples] are merged; 0: each holds the whole value."""
    if front == 0 and all(np.array_equal(p, parts[0], equal_nan=p.dtype.kind == "f") for p in parts):
        return parts[0]
    if front == 1:
        return np.concatenate(parts, axis)
    if front < 1 or any(p.ndim == 0 or p.shape[axis] % front for p in parts):
        raise unfit_notes()
    shape = parts[0].shape
    split = [p.reshape(*shape[:axis], front, -1, *shape[axis + 1 :]) for p in parts]
    return np.concatenate(split, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])
