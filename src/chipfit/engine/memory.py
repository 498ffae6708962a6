"""Errors of devices that run out of memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from chipfit.errors import MemoryExceeded, first_line

_HINT = "give batches of fewer samples, or move the model to a device with more memory: model.cpu()"


@contextmanager
def memory_errors(device: torch.device | None = None, shapes: Sequence[torch.Size] = ()) -> Iterator[None]:
    """Turn a device's errors about memory into one that names the device and the batch.

    Args:
        device: where the work runs; None: the message of torch names it.
        shapes: of the tensors of the batch.

    Raises:
        MemoryExceeded: the device ran out of memory.
    """
    try:
        yield
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        where = "The device" if device is None else f"Device '{device}'"
        batch = ", ".join(str(list(s)) for s in shapes)
        size = f" with a batch of {shapes[0][0]}" if shapes and len(shapes[0]) else ""
        what = f"{where} ran out of memory{size}: {first_line(e)}"
        raise MemoryExceeded(what, got=batch or None, hint=_HINT) from e


def is_out_of_memory(e: BaseException) -> bool:
    """Return whether an exception says that a device's memory is exhausted; some devices raise a plain RuntimeError."""
    text = str(e).lower()
    return isinstance(e, torch.OutOfMemoryError) or (
        isinstance(e, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
    )
