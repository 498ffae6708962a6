"""Scale and zero point from the ends of a range, against arithmetic on paper."""

import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import HIGH_IF_ALL_ZERO, LEAST_SCALE, QParams, finish_scale, from_min_max

A8 = Grid(bits=8, qmin=0, qmax=255, zero="any")
S4, S8 = Grid(bits=4, qmin=-8, qmax=7), Grid(bits=8, qmin=-128, qmax=127)
N4, N8 = Grid(bits=4, qmin=-7, qmax=7), Grid(bits=8, qmin=-127, qmax=127)
U8 = Grid(bits=8, qmin=0, qmax=255)
P8 = Grid(bits=8, qmin=-128, qmax=127, pot=True)
MIDDLE, EITHER = (Grid(bits=8, qmin=0, qmax=255, zero=zero) for zero in (128, (128, 0)))


@pytest.mark.parametrize(
    "low, high, grid, scale, zero",
    [
        (-1.0, 4.1, A8, 5.1 / 255, 50),  # z = rint(1 / 0.02)
        (-1.0, 3.0, A8, 4 / 255, 64),
        (2.0, 5.1, A8, 5.1 / 255, 0),  # widened to hold 0
        (-5.1, -2.0, A8, 5.1 / 255, 255),
        (-10.0, 4.0, Grid(bits=3, qmin=0, qmax=7, zero="any"), 2.0, 5),
        (-3.0, 1.5, S4, 3 / 8, 0),
        (-2.0, 1.0, S8, 2.0 / 128, 0),  # the negative end has one code more
        (-1.0, 2.0, S8, 2.0 / 127, 0),
        (-2.0, 1.0, N8, 2.0 / 127, 0),
        (0.5, 2.55, U8, 2.55 / 255, 0),
        (-3.0, 2.55, U8, 2.55 / 255, 0),  # no code for what is below 0
        (-0.9, 0.7, P8, 2.0**-7, 0),  # 0.9 / 128 = 2^-7.15, the next power of two above
        (-1.0, 0.99, P8, 2.0**-7, 0),  # 1 / 128 and 0.99 / 127 just below
        (-1.001, 0.0, P8, 2.0**-6, 0),
        (-1.0, 2.0, MIDDLE, 2.0 / 127, 128),
        (-1.0, 2.0, EITHER, 2.0 / 127, 128),
        (-2.0, 1.0, MIDDLE, 2.0 / 128, 128),
        (-2.0, 0.0, EITHER, 2.0 / 128, 128),
        (-1e-6, 2.0, EITHER, 2.0 / 127, 128),
        (0.0, 2.55, EITHER, 2.55 / 255, 0),  # data without negative values take the lowest zero point
        (0.0, 0.0, A8, 1.0 / 255, 0),  # nothing was seen
        (0.0, 0.0, S8, 1.0 / 127, 0),
        (0.0, 0.0, P8, 2.0**-6, 0),  # 1 / 127 is above 2^-7
        (0.0, 1e-9, A8, LEAST_SCALE, 0),
        (-1.0, 1.0, Grid(bits=8, qmin=-128, qmax=127, scale_min=0.25), 0.25, 0),
    ],
)
def test_the_least_scale_that_holds_both_ends_and_zero(low, high, grid, scale, zero):
    q = from_min_max(low, high, grid)
    assert float(q.scale) == pytest.approx(scale, rel=1e-6) and int(q.zero_point) == zero


def test_ends_of_each_channel_make_a_grid_each():
    q = from_min_max(torch.tensor([-1.0, -4.0]), torch.tensor([1.27, 1.0]), N8)
    assert q.scale.tolist() == pytest.approx([0.01, 4 / 127]) and q.zero_point.tolist() == [0, 0]
    low, high = from_min_max(torch.tensor([-1.0, -2.55]), torch.tensor([4.1, 0.0]), A8).bounds(A8)
    assert (low, high) == pytest.approx((-2.55, 4.1), abs=1e-6)


def test_channels_of_zeros_alone_keep_the_least_scale_beside_others():
    q = from_min_max(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 1.0]), N4)
    assert q.scale.tolist() == pytest.approx([LEAST_SCALE, 1 / 7])
    assert from_min_max(torch.zeros(2), torch.zeros(2), N4).scale.tolist() == pytest.approx([HIGH_IF_ALL_ZERO / 7] * 2)


def test_the_bounds_are_the_ends_over_all_channels():
    q = QParams(torch.tensor([0.5, 2.0]), torch.tensor([10, 250], dtype=torch.int32))
    assert q.bounds(A8) == (-500.0, 122.5)
    assert q.bounds(Grid(bits=2, qmin=0, qmax=3, kind="offset", table=(-1.5, -0.5, 0.5, 1.5)))[1] == -4.25


TABLE = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)
LOG, FLOATS = (Grid(bits=3, qmin=-1, qmax=1, kind=kind, table=TABLE) for kind in ("log", "float"))


@pytest.mark.parametrize(
    "scale, grid, want",
    [
        (0.0, A8, 2.0**-24),  # what kernels can multiply
        (1e-6, Grid(bits=8, qmin=0, qmax=255, zero="any", scale_min=2.0**-10), 2.0**-10),
        (1e-9, Grid(bits=8, qmin=0, qmax=255, zero="any", scale_min=2.0**-30), 2.0**-24),
        (0.25, P8, 0.25),
        (0.25 * (1 + 1e-10), P8, 0.25),  # rounding in float64 misses no power of two
        (0.2500001, P8, 0.5),
        *((s, LOG, want) for s, want in ((4.0, 4.0), (4.000001, 4.0), (4.1, 8.0), (0.3, 0.5))),  # itself a code
        (0.3, FLOATS, 0.3),
        (0.3, Grid(bits=8, qmin=-127, qmax=127, bf16=True), 0.30078125),  # 77 / 256, the nearest bfloat16
    ],
)
def test_a_legal_scale_is_the_next_that_the_hardware_has(scale, grid, want):
    found = finish_scale(torch.tensor(scale, dtype=torch.float64), grid)
    assert found.dtype is torch.float32 and float(found) == pytest.approx(want, rel=1e-7)
