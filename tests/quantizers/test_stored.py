"""A grid with numbers is right, or is not made."""

from dataclasses import replace

import pytest
import torch

import chipfit
from chipfit.errors import PlanError
from chipfit.quantizers.grids import SCALES, Grid
from chipfit.quantizers.stored import Stored

INT8 = Grid(bits=8, qmin=-128, qmax=127, zero="any")
UINT8 = Grid(bits=8, qmin=0, qmax=255, zero="any")


def make(scale=0.5, zero_point=0, grid=INT8, axis=None):
    zeros = torch.tensor(zero_point, dtype=torch.int32)
    return Stored(format="a8", grid=grid, scale=torch.tensor(scale), zero_point=zeros, axis=axis)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 0.0, -0.5], ids=["NaN", "infinite", "zero", "negative"])
@pytest.mark.parametrize("channels", [False, True], ids=["tensor", "channel"])
def test_a_scale_is_finite_and_positive(scale, channels):
    with pytest.raises(PlanError, match=r"A scale is not positive.*Allowed: finite numbers above 0"):
        make([0.5, scale], [0, 0], axis=0) if channels else make(scale)


@pytest.mark.parametrize(("grid", "zero_point"), [(INT8, 128), (INT8, -129), (UINT8, -1), (UINT8, 256)])
@pytest.mark.parametrize("channels", [False, True], ids=["tensor", "channel"])
def test_a_zero_point_is_a_code_of_its_grid(grid, zero_point, channels):
    with pytest.raises(
        PlanError, match=rf"A zero point is not a code.*{zero_point}.*Allowed: {grid.qmin}\.\.{grid.qmax}"
    ):
        make([0.5, 0.5], [0, zero_point], grid, 0) if channels else make(0.5, zero_point, grid)


@pytest.mark.parametrize(
    "grid, words",
    [
        (Grid(bits=0, qmin=0, qmax=1), "no codes"),
        (Grid(bits=65, qmin=0, qmax=1), "no codes"),
        (Grid(bits=8, qmin=1, qmax=1), "no codes"),
        (Grid(bits=4, qmin=-8, qmax=15), "wider than its bits"),  # either end alone would fit
        (Grid(bits=4, qmin=-8, qmax=8), "wider than its bits"),
        (Grid(bits=4, qmin=-9, qmax=0), "wider than its bits"),
        (Grid(bits=4, qmin=0, qmax=16), "wider than its bits"),
        (Grid(bits=4, qmin=9, qmax=16), "wider than its bits"),  # few codes, and one that 4 bits do not hold
    ],
    ids=str,
)
def test_a_grid_has_codes_and_they_fit_into_its_bits(grid, words):
    with pytest.raises(PlanError, match=words):
        make(grid=grid)


def test_codes_of_a_table_need_no_zero_point_among_them():
    fp8 = Grid(bits=8, qmin=1, qmax=2, kind="float", table=(1.0, 2.0))
    assert make(grid=fp8).zero_point == 0


@pytest.mark.parametrize(
    ("scale", "zero_point"),
    [([0.5, 0.5], [0, 0, 0]), ([0.5, 0.5], 0), (0.5, [0, 0]), ([[0.5], [0.5]], [[0], [0]])],
    ids=["other number of channels", "one zero point", "one scale", "two axes"],
)
def test_scale_and_zero_point_fit_each_other(scale, zero_point):
    with pytest.raises(PlanError, match=r"Shapes of scale and zero point do not match.*scale \["):
        make(scale, zero_point, axis=0)


def test_codes_stand_for_the_reals_that_rounding_gives():
    stored = make([0.5, 0.25], [0, 1], axis=0)
    x = torch.tensor([[0.3, -0.8], [0.3, 100.0]])
    assert stored.quantize(x).tolist() == [[1, -2], [2, 127]]
    assert stored.dequantize(stored.quantize(x)).tolist() == stored.round(x).tolist() == [[0.5, -1.0], [0.25, 31.5]]


@pytest.mark.parametrize(
    "change",
    [{"scale": torch.tensor(0.25)}, {"zero_point": torch.tensor(1, dtype=torch.int32)}, {"grid": UINT8}, {"axis": 0}],
    ids=["scale", "zero point", "grid", "axis"],
)
def test_numbers_are_the_same_whatever_the_format_is_called(change):
    assert make().same_numbers(make().with_(format="other"))
    assert not make().same_numbers(make().with_(**change))
    with pytest.raises(PlanError, match="not positive"):
        make().with_(scale=torch.tensor(0.0))


def test_the_codes_of_a_table_with_zero_on_top_stand_for_what_rounding_gives():
    torch.manual_seed(0)
    result = chipfit.quantize(torch.nn.Linear(8, 8), [torch.randn(64, 8)], "nnie", progress=False)
    stored = [t.stored for t in result.plan.tensors.values() if t.stored and len(t.grid.table or ()) == 257]
    x = torch.linspace(-4, 4, 999)
    assert stored and all(torch.equal(s.dequantize(s.quantize(x)), s.round(x)) for s in stored)


def test_the_least_scale_of_a_grid_is_one_that_a_chip_can_use():
    low, high = SCALES
    for least in (low, 1.0, high):
        assert make(grid=replace(INT8, scale_min=least)).grid.scale_min == least
    for least in (low / 2, high * 2, float("nan")):
        with pytest.raises(PlanError, match="its least scale is not a positive float32"):
            make(grid=replace(INT8, scale_min=least))


@pytest.mark.parametrize(
    ("bits", "low", "high"),
    [(4, -8, 7), (4, 0, 15), (4, -7, 8), (4, 1, 15), (1, -1, 1), (1, 0, 1), (64, -(2**63), 2**63 - 1)],
)
def test_a_grid_may_be_as_wide_as_its_bits_and_either_end_a_zero_point(bits, low, high):
    grid = Grid(bits=bits, qmin=low, qmax=high)
    for zero in (low, high) if bits == 4 else (0,):
        assert make(zero_point=zero, grid=grid).zero_point == zero


@pytest.mark.parametrize("table", [(1.0, 1.0), (0.0, 2.0, 1.0)])
def test_a_table_increases(table):
    with pytest.raises(PlanError, match="its table does not increase"):
        make(grid=Grid(bits=8, qmin=0, qmax=2, kind="lut", table=table))


def test_numbers_have_the_types_that_files_have():
    for scale, zero in ((torch.tensor(0.5).double(), torch.tensor(0).int()), (torch.tensor(0.5), torch.tensor(0))):
        with pytest.raises(PlanError, match="has the wrong type"):
            Stored(format="a8", grid=INT8, scale=scale, zero_point=zero)
    with pytest.raises(PlanError, match="rounding rule is not known"):
        make(grid=replace(INT8, rounding="nearest"))


def test_blocks_have_as_many_axes_as_the_tensor_and_an_axis_along_which_they_lie():
    blocks = replace(INT8, per="block")
    s = make([[0.5, 1.0], [2.0, 4.0]], [[0, 0], [0, 0]], blocks, 1)
    assert s.round(torch.tensor([[0.6, 0.6, 0.6, 0.6], [1.2, 1.2, 2.4, 2.4]])).tolist() == [
        [0.5, 0.5, 1, 1],
        [2, 2, 4, 4],
    ]
    for scale, zero, grid, axis in (
        ([[0.5], [1.0]], [[0], [0]], blocks, None),
        ([0.5, 1.0], [0, 0], blocks, 1),
        ([[0.5], [1.0]], [[0], [0]], INT8, 1),
    ):
        with pytest.raises(PlanError, match="Shapes of scale and zero point do not match"):
            make(scale, zero, grid, axis)
