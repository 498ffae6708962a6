"""State that all threads of a process share: random generators, and parts of torch that are not thread-safe."""

import functools
import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

#: lock while torch.export, torch.onnx or Keras trace: they temporarily change warning filters, loggers and tables
TRACING = threading.RLock()
_LOCK = threading.Lock()
_LARGEST_SEED = (1 << 63) - 1  #: largest seed that every generator supports
_RESTORE: list[Callable[[], None]] = []  #: for each running call, the function that restores the caller's generators

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def quiet() -> Iterator[None]:
    """Disable gradients, and the warnings and logs of torch while it traces."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all random generators inside the block, and restore the caller's states afterwards.

    If several threads are inside, the last one to leave restores them. Only models that draw random numbers when they
    run are affected by other threads.
    """
    with _LOCK:
        _RESTORE.append(_RESTORE[0] if _RESTORE else _save_states())
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        with _LOCK:
            restore = _RESTORE.pop()
            if not _RESTORE:
                restore()


def _save_states() -> Callable[[], None]:
    """Return a function that gives every generator its present state."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return restore


def preserve_random_state(f: F) -> F:
    """Let a function use its argument `seed` (default 0) without disturbing the caller's random generators."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seed = kwargs.get("seed", 0)
        with seeded(seed & _LARGEST_SEED if isinstance(seed, int) else 0):  # the function refuses other types
            return f(*args, **kwargs)

    return wrapped  # type: ignore[return-value]  # the same signature
