"""Fixed-point functions against gemmlowp's steps on Python's integers, with constants from the functions they are."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from chipfit.simulate.gemmlowp import exp_of_negative, reciprocal_of_one_plus


def fixed(real: float, width: int, integers: int = 0) -> int:
    """A constant: gemmlowp writes it in 32 bits and rounds it from there to 16."""
    raw = round(real * 2 ** (31 - integers))
    return raw if width == 32 else (raw + (1 << 15)) >> 16


def times(a: int, b: int, width: int) -> int:
    """SaturatingRoundingDoublingHighMul: a b / 2^(w - 1), halves up."""
    return min(math.floor(Fraction(a * b, 1 << width - 1) + Fraction(1, 2)), (1 << width - 1) - 1)


def divided(a: int, by: int) -> int:
    """RoundingDivideByPOT: a / 2^by, halves away from zero."""
    return int(math.copysign((abs(a) + (1 << by >> 1)) >> by, a))


def saturated(a: int, width: int) -> int:
    return max(-1 << width - 1, min(a, (1 << width - 1) - 1))


def exp_on_negative_values(a: int, integers: int, width: int) -> int:
    fraction = width - 1 - integers
    quarter = 1 << fraction - 2
    low = a % quarter - quarter
    x = saturated(low << integers, width) + (1 << width - 4)
    x2 = times(x, x, width)
    x3, x4 = times(x2, x, width), times(x2, x2, width)
    tail = divided(times(divided(x4, 2) + x3, fixed(1 / 3, width), width) + x2, 1)
    start = fixed(math.exp(-1 / 8), width)
    y = start + times(start, x + tail, width)
    for power in range(-2, integers):
        if (low - a) >> fraction + power & 1:
            y = times(y, fixed(math.exp(-(2.0**power)), width), width)
    return y if a else (1 << width - 1) - 1


def one_over_one_plus_x(a: int, width: int) -> int:
    half = (a + (1 << width - 1)) >> 1
    x = fixed(48 / 17, width, 2) + times(half, fixed(-32 / 17, width, 2), width)
    for _ in range(3):
        x += saturated(times(x, (1 << width - 3) - times(half, x, width), width) << 2, width)
    return saturated(x << 1, width)


@pytest.mark.parametrize("integers, width", [(5, 32), (3, 16), (4, 16)])
def test_an_exponential_takes_gemmlowps_steps(integers, width):
    one = 1 << width - 1 - integers
    a = [0, -1, *(-(one * k) // 57 for k in range(57 * (1 << integers)))]
    want = [exp_on_negative_values(v, integers, width) for v in a]
    assert exp_of_negative(torch.tensor(a), integers, width).tolist() == want


@pytest.mark.parametrize("width", [32, 16])
def test_a_reciprocal_takes_gemmlowps_steps(width):
    a = [k * ((1 << width - 1) - 1) // 997 for k in range(998)]
    want = [one_over_one_plus_x(v, width) for v in a]
    assert reciprocal_of_one_plus(torch.tensor(a), width).tolist() == want
