"""Data that can be read once do for what reads them twice: they are kept, in memory or on disk."""

import tempfile
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.calibration.source import CachedBatches, CalibrationData, MemoryLimit
from chipfit.errors import DataError
from tests.build import model_of, quantized, randn

FOUR = {"*": {"bits": 4, "activation_bits": 8}}
IMAGES = randn(96, 3, 8, 8, seed=1)
LIMITS = chipfit.Limits(weights="60%")
NET = model_of(lambda m, x: m.b(torch.relu(m.a(x)).mean((2, 3))), a=nn.Conv2d(3, 8, 3), b=nn.Linear(8, 5))


def refilled():
    """One array, filled anew for each batch; and labels."""
    array = np.zeros((32, 3, 8, 8), np.float32)
    for part in IMAGES.split(32):
        array[:] = part.numpy()
        yield array, [1] * 32


def fitted(data, overrides=FOUR, **options):
    return quantized(NET, data, "mqbench_academic", overrides=overrides, **options)


def same(a, b):
    assert all(torch.equal(w, b.graph.weights[k]) for k, w in a.graph.weights.items())
    assert all(t.stored.same_numbers(b.plan[n]) for n, t in a.plan.tensors.items() if t.quantized)
    return True


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overrides": {"*": {"activation_bits": 8}}, "limits": LIMITS},
        {"overrides": {}, "settings": Settings(correct_second_moment=True)},
        {"example": (IMAGES[:2],)},
    ],
    ids=["few bits", "search", "correction", "example"],
)
@pytest.mark.parametrize("data", [lambda: iter(IMAGES.split(32)), refilled], ids=["iterator", "generator"])
def test_what_can_be_read_once_gives_the_plan_of_a_list(data, options):
    assert same(fitted(data(), **options), fitted(list(IMAGES.split(32)), **options))


def test_an_edit_reads_them_again_where_they_were_kept_and_says_so_where_not():
    three = {"*": {"bits": 3, "activation_bits": 8}}
    assert same(fitted(refilled()).edit(three), fitted(list(IMAGES.split(32))).edit(three))
    plain = fitted(refilled(), {})  # 8 bits: nothing reads them again
    assert plain.data is None
    assert any("quantize again with these overrides" in n for n in plain.edit(FOUR).plan.rewrites)


def test_what_is_beyond_the_limit_lies_on_disk_and_is_the_same():
    kept = CachedBatches(iter([{"x": part, "name": "n"} for part in IMAGES.split(16)]), most=IMAGES[:32].nbytes)
    first = list(kept)
    assert kept.memory.used == IMAGES[:32].nbytes and kept.memory.spilled == IMAGES[32:].nbytes
    for _ in range(2):
        again = list(kept)
        assert [b["name"] for b in again] == ["n"] * 6
        assert torch.equal(torch.cat([b["x"] for b in again]), IMAGES)
    assert all(a["x"].data_ptr() != b["x"].data_ptr() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_every_kind_of_number_comes_back_from_disk(dtype):
    x = (torch.arange(24) % 5).to(dtype).reshape(2, 3, 4).transpose(0, 1)
    budget = MemoryLimit(0)
    back = budget.keep(x)
    assert back.dtype == dtype and torch.equal(back, x) and budget.spilled == x.nbytes and back.is_shared()


@pytest.mark.parametrize(
    ("data", "count"),
    [([IMAGES] * 5, 5), (np.zeros((33, 3)), 3), (torch.zeros(32, 3), 2), (iter([IMAGES]), None), (list, None)],
    ids=range(5),
)
def test_data_tell_how_many_batches_they_have(data, count):
    assert CalibrationData(data).count == count


def test_reading_goes_on_where_it_ended():
    kept = CachedBatches(iter(IMAGES.split(32)))
    assert torch.equal(next(iter(kept)), IMAGES[:32])
    assert torch.equal(torch.cat(list(kept)), IMAGES)


def test_what_is_within_the_limit_is_kept_where_it_is():
    budget, x = MemoryLimit(96), torch.ones(4, 6)
    assert budget.keep(x) is x and (budget.used, budget.spilled) == (96, 0)
    empty = torch.zeros(0, 3)
    assert budget.keep(empty) is empty and (budget.used, budget.spilled) == (96, 0)
    one = torch.ones(1, dtype=torch.float64)
    assert torch.equal(budget.keep(one), one) and (budget.used, budget.spilled) == (96, 8)


def test_what_is_released_makes_room_in_memory_and_what_lies_on_disk_does_not():
    budget, x, y = MemoryLimit(100), torch.ones(20), torch.ones(10, 2)
    here, there = budget.keep(x), budget.keep(y)
    assert (budget.used, budget.spilled) == (80, 80)
    budget.release(there)
    assert budget.used == 80
    budget.release(here)
    assert budget.used == 0 and budget.keep(y) is y


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x[0, 0, 0, 0],
    ],
)
def test_numbers_come_back_from_disk_in_the_order_in_which_memory_held_them(make):
    x = make(torch.arange(120.0).view(2, 3, 4, 5))
    back = MemoryLimit(0).keep(x)
    assert torch.equal(back, x) and back.stride() == x.stride() and back.data_ptr() != x.data_ptr()


def test_a_batch_that_is_filled_again_and_one_with_history_are_kept_as_they_were():
    x, w = torch.ones(2, 2), torch.ones(2, requires_grad=True)
    kept = CachedBatches(iter([(x, [w * 3]), 5]))
    for batch in kept:
        if isinstance(batch, tuple):
            assert batch[0] is x
            x.zero_()
    (a, [b]), five = list(kept)
    assert a.tolist() == [[1, 1], [1, 1]] and b.tolist() == [3, 3] and not b.requires_grad and five == 5


def test_a_full_disk_is_told_in_bytes_with_what_to_do(monkeypatch):
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", partial(open, "/dev/full", "wb", buffering=0))
    with pytest.raises(DataError) as e:
        MemoryLimit(1000).keep(torch.zeros(500))
    assert str(e.value).startswith("Calibration data take more than 1,000 bytes, and the rest cannot be written: ")
    assert "Got: 2,000 bytes more" in str(e.value) and tempfile.gettempdir() in str(e.value)
