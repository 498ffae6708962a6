"""The fake device is as strange to the CPU as CUDA is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

D = "fakegpu"
x = torch.arange(12.0).view(3, 4) - 5


@pytest.fixture
def y(fake):
    """Return `x` on the device."""
    return x.to(D)


MIXED = {
    "sum": lambda y: x + y,
    "sum, from the right": lambda y: y + x,
    "in place": lambda y: y.add_(x),
    "in place on the CPU": lambda y: x.clone().add_(y),
    "in place on the CPU, of a number": lambda y: x.clone().add_(y[0, 0]),
    "cat": lambda y: torch.cat([x, y]),
    "stack": lambda y: torch.stack([y, x]),
    "product": lambda y: x @ y.T,
    "where": lambda y: torch.where(y > 0, x, y),
    "mask of the device": lambda y: x[y > 0],
    "index_select": lambda y: y.index_select(0, torch.tensor([0])),
    "gather": lambda y: y.gather(0, x.long().clamp(0, 2)),
    "linear": lambda y: F.linear(y, x),
    "embedding": lambda y: F.embedding(torch.tensor([0]), y),
    "convolution": lambda y: nn.Conv2d(1, 1, 1)(y[None, None]),
    "batch norm": lambda y: nn.BatchNorm1d(4)(y),
    "bincount": lambda y: torch.bincount(y.abs().int().flatten(), x.flatten()),
    "index_add_": lambda y: torch.zeros(4).index_add_(0, torch.zeros(4, dtype=torch.long).to(D), y[0]),
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_tensors_of_two_devices_do_not_mix(mixed, y):
    with pytest.raises(RuntimeError, match="device"):
        mixed(y)


def test_two_devices_of_its_kind_do_not_mix(y):
    z = y.to("fakegpu:1")
    assert (z + 1).device == torch.device("fakegpu:1") and torch.equal(z.cpu(), x)
    with pytest.raises(RuntimeError, match="fakegpu:1 and fakegpu:0"):
        z + y
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        y.to("fakegpu:2")


def test_numbers_and_indices_of_the_cpu_mix(y):
    two = torch.tensor(2.0)
    assert torch.equal((two * y).cpu(), 2 * x) and torch.equal((y * two).cpu(), 2 * x)
    assert torch.equal(y[torch.tensor([0, 2])].cpu(), x[[0, 2]])
    y[0] = 1.0
    y[:, 1] = torch.tensor(3.0)
    assert y.cpu()[0].tolist() == [1, 3, 1, 1] and y.cpu()[2, 1] == 3


def test_numpy_is_refused(y):
    for convert in (torch.Tensor.numpy, np.asarray):
        with pytest.raises(TypeError, match="can't convert fakegpu"):
            convert(y)
    assert y.tolist() == x.tolist()


def test_it_draws_from_generators_of_its_own(fake):
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        draws.append((torch.randn(3), torch.randn(3, device=D).cpu()))
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    torch.manual_seed(1)
    assert torch.equal(torch.randn(3, device=D).cpu(), draws[0][1])  # though the CPU drew nothing
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(3, device=D, generator=torch.Generator())
    g = torch.Generator(device=D).manual_seed(0)
    first, second = (torch.randn(3, device=D, generator=g).cpu() for _ in range(2))
    assert not torch.equal(first, second)
    state = torch.fakegpu.get_rng_state(0)
    again = torch.randn(3, device=D)
    torch.fakegpu.set_rng_state(state, 0)
    assert torch.equal(torch.randn(3, device=D).cpu(), again.cpu())


def test_autocast_lowers_products(y):
    with torch.autocast(D, dtype=torch.bfloat16):
        assert F.linear(y, y).dtype is torch.bfloat16 and y.exp().dtype is torch.float32


def test_it_counts_what_is_launched_and_moved(fake):
    y = x.to(D)
    (y + 1).sum().item()
    y.cpu()
    found = fake.counts()
    assert (found["launches"], found["scalars"]) == (2, 1)
    assert (found["uploads"], found["uploaded"]) == (found["downloads"], found["downloaded"]) == (1, 48)
    y[torch.tensor([0])]  # an index of the CPU is a hidden copy
    assert fake.counts()["uploads"] > 1


def test_it_counts_its_memory_and_runs_out_of_it(fake):
    before = fake.counts()["allocated"]
    z = torch.zeros(100, device=D)
    assert fake.counts()["allocated"] - before == 400
    fake.limit_memory(before + 500)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        z + 1
    del z
    assert fake.counts()["allocated"] == before and fake.counts()["peak"] >= before + 400


def test_float64_can_be_refused(y, fake):
    fake.allow_float64(False)
    for refused in (y.double, lambda: torch.zeros(2, dtype=torch.float64, device=D), lambda: x.double().to(D)):
        with pytest.raises(TypeError, match="float64"):
            refused()
    assert (2.0 - torch.ones(2, device=D, dtype=torch.int32)).dtype is torch.float32


def test_it_is_the_accelerator_of_torch(fake):
    assert torch.accelerator.current_accelerator().type == D and torch.accelerator.device_count() == 2
    with torch.fakegpu.device(1):
        assert torch.zeros(1, device=D).device.index == 1
    assert torch.fakegpu.current_device() == 0
