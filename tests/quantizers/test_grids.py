"""Rounding to a grid: numbers that anyone can check."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chipfit.quantizers.grids import Grid, dequantize, fake_quantize, quantize

U4 = Grid(bits=4, qmin=0, qmax=15, zero="any")
X = torch.tensor([-9.0, -1.5, -0.75, -0.25, 0.0, 0.25, 0.75, 1.25, 3.0, 99.0])


def test_codes_count_from_the_zero_point_and_stop_at_the_ends():
    """x / 0.5 = -18, -3, -1.5, -0.5, 0, 0.5, 1.5, 2.5, 6, 198; halves to even; plus 5; within 0..15."""
    q = quantize(X, torch.tensor(0.5), torch.tensor(5), U4)
    assert q.tolist() == [0, 2, 3, 5, 5, 5, 7, 7, 11, 15] and q.dtype == torch.int8


def test_reals_are_steps_from_the_zero_point():
    q = torch.tensor([0, 5, 15], dtype=torch.uint8)
    assert dequantize(q, torch.tensor(0.5), torch.tensor(5, dtype=torch.int32)).tolist() == [-2.5, 0.0, 5.0]
    assert fake_quantize(X, torch.tensor(0.5), torch.tensor(5), U4).tolist() == [
        -2.5,
        -1.5,
        -1.0,
        0.0,
        0.0,
        0.0,
        1.0,
        1.0,
        3.0,
        5.0,
    ]


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_scales_run_along_the_axis_that_is_named(axis):
    """Against numpy, on a cube, where a wrong axis fits as well."""
    x = torch.randn(3, 3, 3) * 8
    s, z = torch.tensor([0.25, 1.0, 2.0]), torch.tensor([3, 8, 12], dtype=torch.int32)
    shape = [-1 if k == axis % 3 else 1 for k in range(3)]
    sn, zn = s.numpy().reshape(shape), z.numpy().reshape(shape)
    want = np.clip(np.rint(x.numpy() / sn) + zn, 0, 15)
    q = quantize(x, s, z, U4, axis)
    np.testing.assert_array_equal(q.numpy(), want)
    np.testing.assert_array_equal(dequantize(q, s, z, axis).numpy(), ((want - zn) * sn).astype("float32"))
    np.testing.assert_array_equal(fake_quantize(x, s, z, U4, axis).numpy(), ((want - zn) * sn).astype("float32"))


@pytest.mark.parametrize(
    "rule, codes",
    [
        ("half_even", [-2, -2, -1, 0, 0, 0, 1, 2, 2]),
        ("half_away", [-3, -2, -1, -1, 0, 1, 1, 2, 3]),
        ("half_up", [-2, -1, -1, 0, 0, 1, 1, 2, 3]),
        ("floor", [-3, -2, -2, -1, 0, 0, 1, 1, 2]),
        ("trunc", [-2, -1, -1, 0, 0, 0, 1, 1, 2]),
    ],
)
def test_each_rounding_of_halves_and_of_what_lies_between(rule, codes):
    x = torch.tensor([-2.5, -1.5, -1.25, -0.5, 0.0, 0.5, 1.25, 1.5, 2.5])
    grid = Grid(bits=4, qmin=-8, qmax=7, rounding=rule)
    assert quantize(x, torch.tensor(1.0), torch.tensor(0), grid).tolist() == codes


@pytest.mark.parametrize(
    "ends, kind",
    [
        ((-128, 127), torch.int8),
        ((0, 255), torch.uint8),
        ((-127, 127), torch.int8),
        ((0, 127), torch.int8),
        ((-32768, 32767), torch.int16),
        ((0, 65535), torch.int32),
        ((-(2**31), 2**31 - 1), torch.int32),
        ((-(2**39), 2**39 - 1), torch.int64),
    ],
)
def test_codes_are_kept_in_the_smallest_type_that_holds_them(ends, kind):
    assert Grid(bits=8, qmin=ends[0], qmax=ends[1]).dtype is kind


def test_what_a_grid_says_of_itself():
    assert U4.levels == 16 and not U4.signed and not U4.symmetric and U4.nearest
    narrow = Grid(bits=8, qmin=-127, qmax=127, rounding="trunc")
    assert narrow.levels == 255 and narrow.signed and narrow.symmetric and not narrow.nearest
    table = Grid(bits=4, qmin=0, qmax=2, kind="lut", table=(-1.0, 0.0, 4.0))
    assert table.levels == 3 and table.dtype is torch.uint8 and not table.nearest


def test_a_table_takes_the_nearest_entry():
    """Entries -1, 0, 4 times 0.5: -0.5, 0, 2; borders half way, at -0.25 and 1."""
    grid = Grid(bits=4, qmin=0, qmax=2, kind="lut", table=(-1.0, 0.0, 4.0))
    x = torch.tensor([-7.0, -0.3, -0.2, 0.0, 0.9, 1.1, 50.0])
    assert quantize(x, torch.tensor(0.5), torch.tensor(0), grid).tolist() == [0, 0, 1, 1, 1, 2, 2]
    got = fake_quantize(x, torch.tensor(0.5), torch.tensor(0), grid).tolist()
    assert got == [-0.5, -0.5, 0.0, 0.0, 0.0, 2.0, 2.0]


def test_the_ends_of_a_grid_are_codes_unless_its_levels_are_offsets():
    """A table of codes, as of look-up weights, keeps the ends of its codes; one of offsets ends where its levels do."""
    lut = Grid(bits=4, qmin=-128, qmax=127, kind="lut", table=(-100.0, 0.0, 50.0))
    offset = Grid(bits=2, qmin=0, qmax=3, kind="offset", table=(-1.5, -0.5, 0.5, 1.5))
    assert lut.ends == (-128, 127) and offset.ends == (-1.5, 1.5) and U4.ends == (0, 15)
