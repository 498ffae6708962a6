"""Fixed-point functions against gemmlowp's steps on Python's integers, with constants from the functions they are."""

import math

import pytest
import torch

from chipfit.simulate.gemmlowp import (
    exp_of_negative,
    log,
    log_softmax,
    reciprocal_of_one_plus,
    rescaled_differences,
    softmax,
)


def fixed(real: float, width: int, integers: int = 0) -> int:
    """A constant: gemmlowp writes it in 32 bits and rounds it from there to 16."""
    raw = round(real * 2 ** (31 - integers))
    return raw if width == 32 else (raw + (1 << 15)) >> 16


def times(a: int, b: int, width: int) -> int:
    """SaturatingRoundingDoublingHighMul: a b / 2^(w - 1), halves up."""
    return min((a * b + (1 << width - 2)) >> width - 1, (1 << width - 1) - 1)


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
    a += [-one * k // 12_000 for k in range(18_000) if width == 32]  # enough to tell the last bit of a constant
    want = [exp_on_negative_values(v, integers, width) for v in a]
    assert exp_of_negative(torch.tensor(a), integers, width).tolist() == want


@pytest.mark.parametrize("width", [32, 16])
def test_a_reciprocal_takes_gemmlowps_steps(width):
    a = [k * ((1 << width - 1) - 1) // 997 for k in range(998)]
    want = [one_over_one_plus_x(v, width) for v in a]
    assert reciprocal_of_one_plus(torch.tensor(a), width).tolist() == want


def log_of_one_or_more(x: int) -> int:
    """log_x_for_x_greater_than_or_equal_to_1_impl: x with 12 integer bits, the result with 5."""
    root = math.sqrt(math.sqrt(2))
    wide, quarter = 32, 1 << 23

    def lifted(v: int, by: int) -> int:
        return saturated(v << by, wide)

    lead = wide - x.bit_length()
    a = lifted(times(lifted(x, lead - 1), fixed(math.sqrt(0.5), wide), wide), 1)
    y = times(x, fixed(math.sqrt(0.5), wide), wide)
    head = wide - y.bit_length() - 1
    b = lifted(x, head)  # x, with the room that x / sqrt 2 has
    r = min(a, b)
    power = max(((12 - lead) << 25) + quarter, ((12 - head) << 25) - quarter)
    p, q = (r + fixed(1 / root, wide) + 1) >> 1, 2 * (r - fixed(1 / root, wide))
    q2 = times(q, q, wide)
    num = times(q, r, wide) + times(times(q, q2, wide), fixed(11 / 240 * root, wide), wide)
    slow = fixed(2 / root - root, wide) + q + times(q2, fixed(root / 20, wide), wide)
    less = times(p, slow, wide) + times(q, fixed(root / 4, wide), wide)
    part = times(divided(num, 6), one_over_one_plus_x(less, wide), wide)
    return lifted(times(power, fixed(math.log(2), wide), wide) + part, 1)


def test_a_logarithm_takes_the_kernels_steps():
    """From 1 to 4096, each power of two and its neighbours among them."""
    one = 1 << 19
    x = [one + one * k // 1201 for k in range(6000)] + [(one << k) + d for k in range(1, 12) for d in (-1, 0, 1)]
    x += [one + 1, (1 << 31) - 1, *((1 << 31) - 12345 * k for k in range(1, 6000))]
    got = log(torch.tensor(x)).tolist()
    assert got == [log_of_one_or_more(v) for v in x]
    assert max(abs(v / 2**26 - math.log(a / one)) for v, a in zip(got, x)) < 1e-6


DIFFERENCES = [0, -1, -2, -5, -17, -40, -90, -255]


@pytest.mark.parametrize("scale", [0.004, 0.03, 0.11, 0.4, 1.3, 20.0])
@pytest.mark.parametrize("count", [1, 2, 8, 500])
def test_a_softmax_and_its_logarithm_are_the_functions_within_a_code(scale, count):
    row = DIFFERENCES[: min(count, 8)] + [-3] * (count - 8)
    diff = torch.tensor([[row, [0] * count, row[::-1]], [[0] + [-1] * (count - 1), row, row]])
    reals = diff.double() * scale
    got = softmax(diff, torch.tensor(scale), 8)
    assert float((got - 256 * reals.softmax(-1)).abs().max()) <= 0.501
    fine = softmax(diff, torch.tensor(scale), 16)
    assert float((fine - 65536 * reals.softmax(-1)).abs().max()) <= 24  # of exponentials with 19 bits behind the point
    logs = log_softmax(diff, torch.tensor(scale))
    assert float((logs - (16 * reals.log_softmax(-1)).clamp_min(-255)).abs().max()) <= 0.51


def test_what_lies_31_below_the_largest_counts_for_nothing():
    """Scale 1: 31 below is the last that counts, exp(-31) of which a softmax is 0; a logarithm is at its end by 16."""
    diff = torch.tensor([[0, -15, -16, -31, -32, -255]])
    assert softmax(diff, torch.tensor(1.0), 8).tolist() == [[256, 0, 0, 0, 0, 0]]
    assert log_softmax(diff, torch.tensor(1.0)).tolist() == [[0, -240, -255, -255, -255, -255]]
    wide = torch.zeros(1, 2, dtype=torch.long)
    assert log_softmax(wide, torch.tensor(1.0)).tolist() == [[-11, -11]]  # -16 log 2 = -11.09
    many = torch.cat([torch.zeros(1, dtype=torch.long), torch.full((1 << 16,), -32)])
    assert softmax(many, torch.tensor(1.0), 8)[:2].tolist() == [256, 0]
    assert log_softmax(many, torch.tensor(1.0))[:2].tolist() == [0, -255]


@pytest.mark.parametrize("scale, last", [(0.9, 31), (0.5, 31), (1.0, 15), (0.3, 62), (4.0, 3)])
def test_the_last_difference_that_counts_goes_by_the_power_of_two_above_the_scale(scale, last):
    """31 / 2^(e - 26), cut off, of a multiplier scale 2^26 below 2^e."""
    _, counts = rescaled_differences(torch.tensor([0, -last, -last - 1]), torch.tensor(scale))
    assert counts.tolist() == [True, True, False]
