"""Computation with torch's defaults, whatever the caller has set; the caller's settings are restored afterwards.

TF32, which convolutions of CUDA use unless told otherwise, and bfloat16 of oneDNN keep 10 and 7 bits of a factor, so
that sums of codes which are exact in float32 become wrong. Autocast does the same. Some kernels of cuDNN add in an
order that changes from call to call. A default device or number type decides where and how new tensors are made.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from chipfit.engine.memory import memory_errors
from chipfit.engine.process import SharedState
from chipfit.graph.ir import CPU

_THREAD = threading.local()  #: `users`: default device and type of the thread's caller


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Compute float32 products in float32 and create tensors on the CPU inside the block, without autocast.

    Raises:
        MemoryExceeded: a device ran out of memory.
    """
    users = torch.get_default_device(), torch.get_default_dtype()
    outer = getattr(_THREAD, "users", None)
    try:
        with ExitStack() as stack:
            stack.enter_context(_SWITCHES.changed())
            stack.enter_context(memory_errors())
            _THREAD.users = outer or users
            for kind in {"cpu", _accelerator()}:
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if users[0] != CPU:
                stack.enter_context(CPU)
            yield
    finally:
        _THREAD.users = outer


@contextmanager
def users_defaults() -> Iterator[None]:
    """Let new tensors be made as the user's code makes them, inside `torch_defaults`."""
    device, dtype = getattr(_THREAD, "users", None) or (CPU, torch.get_default_dtype())
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device if device != torch.get_default_device() else ExitStack():
            yield
    finally:
        torch.set_default_dtype(before)


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator()
    return "cpu" if found is None else found.type


def _switch_off() -> Callable[[], None]:
    """Switch off what makes sums inexact or changes their order, and another default type; return what restores it.

    Torch has two sets of switches for products. Reading one of the old set raises a RuntimeError after the new one was
    used, so that the old one is used as far as it answers.
    """
    found: Any = torch.backends  # the types of torch lack some of its switches
    cudnn, mkldnn = found.cudnn, found.mkldnn
    new = (found.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    before, dtype = [switch.fp32_precision for switch in new], torch.get_default_dtype()
    undo = list[Callable[[], Any]]()
    try:
        matmul = torch.get_float32_matmul_precision()
        if matmul != "highest":
            torch.set_float32_matmul_precision("highest")
            undo.append(lambda: torch.set_float32_matmul_precision(matmul))
    except RuntimeError:
        pass
    try:
        if cudnn.allow_tf32:
            cudnn.allow_tf32 = False
            undo.append(lambda: setattr(cudnn, "allow_tf32", True))
    except RuntimeError:
        pass

    algorithms = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False  # the same call learns the same weights

    def restore() -> None:
        cudnn.deterministic, cudnn.benchmark = algorithms
        for f in undo:
            f()
        _set(new, before)
        torch.set_default_dtype(dtype)

    _set(new, [p if p in ("none", "ieee") else "ieee" for p in (switch.fp32_precision for switch in new)])
    torch.set_default_dtype(torch.float32)
    return restore


_SWITCHES = SharedState(_switch_off)


def _set(switches: Any, values: list[str]) -> None:
    for switch, value in zip(switches, values, strict=True):
        if switch.fp32_precision != value:
            switch.fp32_precision = value
