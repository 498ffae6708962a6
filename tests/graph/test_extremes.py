"""Finite tensors are told by their extremes."""

import math

import pytest
import torch

from chipfit.graph.extremes import is_finite


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(wrong):
    for place in range(40):  # vectors and the numbers behind them
        x = torch.arange(40.0)
        assert is_finite(x)
        x[place] = wrong
        assert not is_finite(x) and not is_finite(x.view(5, 8).T) and not is_finite(x.bfloat16())


def test_tensors_without_floats_are_finite():
    assert is_finite(torch.empty(0)) and is_finite(torch.tensor([2**62])) and is_finite(torch.tensor([True]))
