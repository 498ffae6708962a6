"""From accumulators to codes: what a platform says of its multiplier and rounding, on ties."""

from __future__ import annotations

import pytest
import torch

from chipfit.errors import UnsupportedError
from chipfit.simulate.requantize import requantize, shift

#: times a quarter: -1.5 -1.25 -0.5 -0.25 0 0.25 0.5 0.75 1.5 2.5
ACC = torch.tensor([-6, -5, -2, -1, 0, 1, 2, 3, 6, 10])
QUARTER = torch.tensor(0.25)


@pytest.mark.parametrize(
    "rule, want",
    [
        ({"form": "float"}, [-2, -1, 0, 0, 0, 0, 0, 1, 2, 2]),
        ({"form": "float", "round": "half_away"}, [-2, -1, -1, 0, 0, 0, 1, 1, 2, 3]),
        ({"form": "q31", "passes": 1}, [-1, -1, 0, 0, 0, 0, 1, 1, 2, 3]),
        ({"form": "q31", "passes": 1, "round": "half_away"}, [-2, -1, -1, 0, 0, 0, 1, 1, 2, 3]),
        # first halved with halves up: -3 -2 -1 0 0 1 1 2 3 5
        ({"form": "q31"}, [-2, -1, -1, 0, 0, 1, 1, 1, 2, 3]),
        ({"form": "q31", "passes": 2, "round": "half_up"}, [-1, -1, 0, 0, 0, 1, 1, 1, 2, 3]),
        ({"form": "q31", "round": "trunc"}, [-1, -1, 0, 0, 0, 0, 0, 1, 1, 2]),
    ],
)
def test_halves_go_where_the_platform_says(rule, want):
    """A quarter is 2^30 2^(-1 - 31): the doubled high half of a product with 2^30 is half of it."""
    got = requantize(ACC, QUARTER, rule)
    assert got.tolist() == want and got.dtype == torch.float64


@pytest.mark.parametrize("form", ["float", "q31"])
def test_a_multiplier_above_one_is_shifted_left_first(form):
    for passes in (1, 2):
        rule = {"form": form, "passes": passes}
        assert requantize(torch.tensor([-3, 7]), torch.tensor(6.0), rule).tolist() == [-18, 42]
        each = requantize(torch.tensor([[5, 5]]), torch.tensor([3.0, 0.5]), {**rule, "round": "half_away"})
        assert each.tolist() == [[15, 3]]


def test_a_float_multiplier_meets_an_accumulator_rounded_to_float32():
    """2^24 + 1 lies half way between two float32, of which 2^24 is even."""
    big = torch.tensor([(1 << 24) + 1, (1 << 24) + 3])
    assert requantize(big, torch.tensor(1.0), {"form": "float"}).tolist() == [1 << 24, (1 << 24) + 4]
    assert requantize(big, torch.tensor(1.0), {"form": "q31"}).tolist() == big.tolist()


def test_a_form_that_nobody_simulates_is_refused_with_those_there_are():
    for rule in ({"form": "q15"}, {}):
        with pytest.raises(UnsupportedError, match=f"form '{rule.get('form')}' has no simulator.*Allowed: .*float"):
            requantize(ACC, QUARTER, rule)


@pytest.mark.parametrize(
    "rounding, want",
    [
        ("floor", [-2, -2, -1, -1, 0, 0, 0, 0, 1, 2]),
        ("trunc", [-1, -1, 0, 0, 0, 0, 0, 0, 1, 2]),
        ("half_up", [-1, -1, 0, 0, 0, 0, 1, 1, 2, 3]),
        ("half_away", [-2, -1, -1, 0, 0, 0, 1, 1, 2, 3]),
        ("half_even", [-2, -1, 0, 0, 0, 0, 0, 1, 2, 2]),
    ],
)
def test_a_shift_rounds_as_it_is_told(rounding, want):
    assert shift(ACC, torch.tensor(2), rounding).tolist() == want
    assert shift(ACC, torch.tensor(0), rounding).tolist() == ACC.tolist()
