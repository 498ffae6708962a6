"""Computation with torch's defaults, whatever the caller has set; the caller's settings are restored afterwards.

TF32, the default of CUDA's convolutions, and oneDNN's bfloat16 keep 10 and 7 bits of a factor, so that sums of codes
that are exact in float32 become wrong. Autocast has the same effect. Some kernels of cuDNN add in an order that changes
from call to call. A default device or type of the user would change where and how new tensors are made.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch

from chipfit.engine.memory import memory_errors
from chipfit.engine.process import SharedState
from chipfit.graph.ir import CPU

_THREAD = threading.local()  #: its attribute `users`: the user's default device and type in this thread


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
    """Restore the user's default device and type for a block of the user's code inside `torch_defaults`."""
    device, dtype = getattr(_THREAD, "users", None) or (CPU, torch.get_default_dtype())
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device if device != torch.get_default_device() else ExitStack():
            yield
    finally:
        torch.set_default_dtype(before)


def _accelerator() -> str:
    device = torch.accelerator.current_accelerator()
    return "cpu" if device is None else device.type


def _set_defaults() -> Callable[[], None]:
    """Switch to exact products, sums of a fixed order and float32 as default type; return a function that restores all.

    Torch has an old and a new interface for the precision of products. The old one raises a RuntimeError if the user
    has used the new one. The old settings are left alone then, as the new ones decide.
    """
    backends: Any = torch.backends  # the types of torch lack some of its switches
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    switches = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    before, dtype = [switch.fp32_precision for switch in switches], torch.get_default_dtype()
    undo = list[Callable[[], Any]]()
    with suppress(RuntimeError):
        matmul = torch.get_float32_matmul_precision()
        if matmul != "highest":
            torch.set_float32_matmul_precision("highest")
            undo.append(lambda: torch.set_float32_matmul_precision(matmul))
    with suppress(RuntimeError):
        if cudnn.allow_tf32:
            cudnn.allow_tf32 = False
            undo.append(lambda: setattr(cudnn, "allow_tf32", True))
    algorithms = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False  # the same call learns the same weights

    def restore() -> None:
        cudnn.deterministic, cudnn.benchmark = algorithms
        for step in undo:
            step()
        _set_precisions(switches, before)
        torch.set_default_dtype(dtype)

    _set_precisions(switches, [p if p == "none" else "ieee" for p in (switch.fp32_precision for switch in switches)])
    torch.set_default_dtype(torch.float32)
    return restore


_SWITCHES = SharedState(_set_defaults)


def _set_precisions(switches: Any, values: list[str]) -> None:
    for switch, value in zip(switches, values, strict=True):
        if switch.fp32_precision != value:
            switch.fp32_precision = value
