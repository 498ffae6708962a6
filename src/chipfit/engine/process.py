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
_LARGEST_SEED = (1 << 63) - 1  #: largest seed that every generator supports

F = TypeVar("F", bound=Callable[..., Any])


class SharedState:
    """State of the process that blocks of code change: the first to begin saves it, the last to end restores it.

    Args:
        save: saves the present state, and returns the function that restores it.
    """

    def __init__(self, save: Callable[[], Callable[[], None]]) -> None:
        self._save, self._lock, self._running = save, threading.Lock(), 0

    @contextmanager
    def changed(self, change: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Change the state for the block; other threads see the change."""
        with self._lock:
            if not self._running:
                self._restore = self._save()
            self._running += 1
        try:
            with self._lock:
                change()
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._restore()


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

    Only models that draw random numbers when they run are affected by other threads.
    """
    with _GENERATORS.changed(functools.partial(_seed, seed)):
        yield


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if (device := _used_accelerator()) is not None:
        (getattr(device, "manual_seed_all", None) or device.manual_seed)(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def torch_states() -> list[torch.Tensor]:
    """Return the states of torch's generators: the CPU's, then one for each device of an accelerator that was used."""
    at_each = _device_arguments() if (device := _used_accelerator()) is not None else []
    return [torch.get_rng_state(), *(device.get_rng_state(*at) for at in at_each)]


def set_torch_states(states: list[torch.Tensor]) -> None:
    """Give torch's generators the states that `torch_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        for state, at in zip(states[1:], _device_arguments(), strict=True):
            _used_accelerator().set_rng_state(state, *at)


def _used_accelerator() -> Any:
    """Return torch's module of the accelerator, such as `torch.cuda`; None where there is none or it was not used yet.

    Asking an accelerator for its generators would start it, after which the process cannot fork.
    """
    device = torch.accelerator.current_accelerator()
    module = None if device is None else torch.get_device_module(device)
    used = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if module is not None and used() else None


def _device_arguments() -> list[tuple[int, ...]]:
    """Return arguments that choose each device: none for a single one, as functions of MPS have no such argument."""
    count = torch.accelerator.device_count()
    return [()] if count == 1 else [(i,) for i in range(count)]


def _save_states() -> Callable[[], None]:
    """Return a function that gives every generator its present state."""
    python, numpy, states = random.getstate(), np.random.get_state(), torch_states()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        set_torch_states(states)

    return restore


_GENERATORS = SharedState(_save_states)


def preserve_random_state(f: F) -> F:
    """Run a function on generators seeded by its argument `seed` (default 0), and restore the caller's afterwards."""

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        seed = kwargs.get("seed", 0)
        # the function itself refuses a seed of another type
        with seeded(seed & _LARGEST_SEED if isinstance(seed, int) else 0):
            return f(*args, **kwargs)

    return wrapped  # type: ignore[return-value]  # the same signature
