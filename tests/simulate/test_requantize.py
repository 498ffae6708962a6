"""From accumulators to codes: a platform's multiplier and rounding on ties, and products against fractions."""

import math
from fractions import Fraction

import pytest
import torch

from chipfit.errors import UnsupportedError
from chipfit.simulate.requantize import fixed_point, multiplier_and_shift, requantize, scale_by, shift, short

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
        ({"form": "shift"}, [-1, -1, 0, 0, 0, 0, 1, 1, 2, 3]),
        ({"form": "shift", "round": "half_away"}, [-2, -1, -1, 0, 0, 0, 1, 1, 2, 3]),
        ({"form": "shift", "round": "half_even"}, [-2, -1, 0, 0, 0, 0, 0, 1, 2, 2]),
        ({"form": "shift", "round": "floor"}, [-2, -2, -1, -1, 0, 0, 0, 0, 1, 2]),
        ({"form": "shift", "round": "trunc"}, [-1, -1, 0, 0, 0, 0, 0, 0, 1, 2]),
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


def test_a_shift_takes_powers_of_two_above_and_below_one():
    by = torch.tensor([4.0, 1.0, 0.125])
    assert requantize(
        torch.tensor([[3, -5, 12], [-3, 5, -12]]), by, {"form": "shift", "round": "half_away"}
    ).tolist() == [[12, -5, 2], [-12, 5, -2]]
    with pytest.raises(UnsupportedError, match=r"powers of two\. Got: 0.375"):
        requantize(ACC, torch.tensor(0.375), {"form": "shift"})


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


# ---------------------------------------------------------------- products in integers, against fractions


HALF = Fraction(1, 2)
ACCUMULATORS = [-(2**31), -70001, -4097, -3, -2, -1, 0, 1, 2, 3, 5, 4097, 70001, 2**31 - 1]
REALS = [0.5, 1.0, 0.75, 1.5, 3.999, 0.0009765625, 0.3, 2.0**-20 * 1.7, 6.5]


def up(x: Fraction) -> int:
    return math.floor(x + HALF)


def away(x: Fraction) -> int:
    return up(x) if x >= 0 else -up(-x)


@pytest.mark.parametrize(
    "real, m, e",
    [
        (1.0, 1 << 30, 1),
        (0.5, 1 << 30, 0),
        (0.75, 3 << 29, 0),
        (6.0, 3 << 29, 3),
        (1 - 2.0**-40, 1 << 30, 1),  # the mantissa rounds up to 1
        (0.5 + 2.0**-33, (1 << 30) + 0, 0),  # a quarter of the last place
        (0.5 + 2.0**-32, (1 << 30) + 1, 0),  # half of it, up
        (2.0**-32, 1 << 30, -31),
        (2.0**-33, 0, 0),  # vanishes
        (0.0, 0, 0),
    ],
)
def test_a_multiplier_is_a_mantissa_of_31_bits_and_an_exponent(real, m, e):
    found = multiplier_and_shift(torch.tensor(real, dtype=torch.float64))
    assert [int(v) for v in found] == [m, e]


@pytest.mark.parametrize("m, want", [(1 << 30, 1 << 14), ((1 << 30) + (1 << 15), (1 << 14) + 1), (0x7FFE7FFF, 0x7FFE)])
def test_a_short_mantissa_has_15_bits_and_never_16(m, want):
    assert int(short(torch.tensor(m))) == want
    assert int(short(torch.tensor((1 << 31) - 1))) == 0x7FFF


@pytest.mark.parametrize("real", REALS)
def test_each_way_takes_the_roundings_that_it_names(real):
    m, e = multiplier_and_shift(torch.tensor(real, dtype=torch.float64))
    mantissa, power = int(m), int(e)
    left, right = 1 << max(power, 0), 1 << max(-power, 0)
    acc = [a for a in ACCUMULATORS if -(2**31) <= a * left < 2**31]  # as far as 32 bits hold what is shifted
    fine, coarse = Fraction(2) ** (31 - power), Fraction(2) ** (15 - power)
    high = [up(Fraction(a * left * mantissa, 1 << 31)) for a in acc]
    want = {
        "away": [away(Fraction(h, right)) for h in high],
        "up": [up(Fraction(h, right)) for h in high],
        "once": [up(a * mantissa / fine) for a in acc],
        "q15": [up(a * min(mantissa + (1 << 15) >> 16, 0x7FFF) / coarse) for a in acc],
    }
    for how, numbers in want.items():
        assert scale_by(torch.tensor(acc), m, e, how).tolist() == numbers, how
        assert fixed_point(torch.tensor(acc), torch.tensor(real, dtype=torch.float64), how).tolist() == numbers, how
