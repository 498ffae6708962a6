"""Data that can be read once do for what reads them twice: they are kept, in memory or on disk."""

import tempfile
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.calibration.kept import Budget, Kept
from chipfit.errors import DataError

FOUR = {"*": {"bits": 4, "activation_bits": 8}}
IMAGES = torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LIMITS = chipfit.Limits(weights="60%")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)).mean((2, 3)))


def refilled():
    """One array, filled anew for each batch; and labels."""
    array = np.zeros((32, 3, 8, 8), np.float32)
    for part in IMAGES.split(32):
        array[:] = part.numpy()
        yield array, [1] * 32


def fitted(data, overrides=FOUR, **options):
    return chipfit.quantize(Net().eval(), data, "mqbench_academic", overrides=overrides, progress=False, **options)


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
    assert plain._data is None
    assert any("quantize again with these overrides" in n for n in plain.edit(FOUR).plan.rewrites)


def test_what_is_beyond_the_limit_lies_on_disk_and_is_the_same():
    kept = Kept(iter([{"x": part, "name": "n"} for part in IMAGES.split(16)]), most=IMAGES[:32].nbytes)
    first = list(kept)
    assert kept._budget.used == IMAGES[:32].nbytes and kept._budget.spilled == IMAGES[32:].nbytes
    for _ in range(2):
        again = list(kept)
        assert [b["name"] for b in again] == ["n"] * 6
        assert torch.equal(torch.cat([b["x"] for b in again]), IMAGES)
    assert all(a["x"].data_ptr() != b["x"].data_ptr() for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_every_kind_of_number_comes_back_from_disk(dtype):
    x = (torch.arange(24) % 5).to(dtype).reshape(2, 3, 4).transpose(0, 1)
    budget = Budget(0)
    back = budget.keep(x)
    assert back.dtype == dtype and torch.equal(back, x) and budget.spilled == x.nbytes and back.is_shared()


def test_reading_goes_on_where_it_ended():
    kept = Kept(iter(IMAGES.split(32)))
    assert torch.equal(next(iter(kept)), IMAGES[:32])
    assert torch.equal(torch.cat(list(kept)), IMAGES)


def test_a_full_disk_is_said(monkeypatch):
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", partial(open, "/dev/full", "wb", buffering=0))
    with pytest.raises(DataError, match="cannot be written: No space left on device.*TMPDIR"):
        list(Kept(iter([IMAGES]), most=10))
