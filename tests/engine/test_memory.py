"""Errors of devices whose memory is exhausted."""

import pytest
import torch

from chipfit.engine.memory import memory_errors
from chipfit.errors import MemoryExceeded

#: messages of torch 2.13 for CUDA, MPS and the CPU
MESSAGES = {
    torch.OutOfMemoryError: "CUDA out of memory. Tried to allocate 2.00 GiB.",
    RuntimeError: "MPS backend out of memory (MPS allocated: 18.00 GB, max allowed: 18.13 GB).",
    type("Cpu", (RuntimeError,), {}): "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory",
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_memory_that_is_exhausted_names_device_and_batch(kind):
    with pytest.raises(MemoryExceeded) as e, memory_errors(torch.device("mps:0"), [torch.Size([32, 3, 8, 8])]):
        raise kind(MESSAGES[kind])
    assert str(e.value).startswith("Device 'mps:0' ran out of memory with a batch of 32: " + MESSAGES[kind][:20])
    assert "[32, 3, 8, 8]" in str(e.value) and "model.cpu()" in str(e.value)


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="no memory of it"), memory_errors():
        raise RuntimeError("no memory of it")
