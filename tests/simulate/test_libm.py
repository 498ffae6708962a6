"""Functions of the C library, and what stands in for them where there is none."""

import ctypes
import math

import pytest
import torch

from chipfit.simulate import libm as module
from chipfit.simulate.libm import libm

X = torch.tensor([[0.25, 1.0, 2.0], [0.5, 3.0, 1.5]])


@pytest.fixture(params=[AttributeError, OSError, TypeError])
def no_library(monkeypatch, request):
    """A process that shows no functions, as on Windows."""

    def refused(name):
        raise request.param

    module.function_of.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", refused)
    yield
    module.function_of.cache_clear()


def true(name):
    """Return the function of X in float64."""
    return torch.tensor([[getattr(math, name)(v) for v in row] for row in X.tolist()], dtype=torch.float64)


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erfc"])
def test_a_function_of_float32_keeps_the_shape_and_is_the_true_one_within_a_unit(name):
    got, want = libm(name, X), true(name)
    assert got.dtype == torch.float32 and got.shape == X.shape
    assert ((got.double() - want).abs() <= want.abs() * 2.0**-23).all()
    assert libm(name, X[0, 0]).shape == ()


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erfc"])
def test_without_a_library_it_is_the_nearest_float32(name, no_library):
    got = libm(name, X)
    assert torch.equal(got, true(name).float()) and got.dtype == torch.float32
