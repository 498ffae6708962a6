"""What all threads of a process share: random generators, and machinery of torch that one thread at a time may use."""

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

#: held while torch.export, torch.onnx or Keras trace: they change filters of warnings, loggers and tables for a while
TRACING = threading.RLock()
_LOCK = threading.Lock()
_LARGEST = (1 << 63) - 1  #: seed that every generator takes
_INSIDE: list[Callable[[], None]] = []  #: what gives the caller's generators back, once for each call that runs

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def quiet() -> Iterator[None]:
    """Without gradients, and without what torch warns of and logs while it traces."""
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
    """Draw everything random inside from `seed`; the caller's generators are afterwards as they were before.

    Where several threads are inside at once, the last one to leave gives them back. Only models that draw numbers when
    they run can then tell that they were not alone.
    """
    with _LOCK:
        _INSIDE.append(_INSIDE[0] if _INSIDE else _keep())
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        with _LOCK:
            give_back = _INSIDE.pop()
            if not _INSIDE:
                give_back()


def _keep() -> Callable[[], None]:
    """What gives every generator the state that it has now."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def give_back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return give_back


def undisturbed(f: F) -> F:
    """Let a function draw from its argument `seed`, 0 without one, and leave the caller's generators alone."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seed = kwargs.get("seed", 0)
        with seeded(seed & _LARGEST if isinstance(seed, int) else 0):  # what is no seed, the function itself refuses
            return f(*args, **kwargs)

    return wrapped  # type: ignore[return-value]  # the same signature
