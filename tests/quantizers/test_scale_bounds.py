"""Bounds on products of scales and on sums of quantized weights, by hand."""

import math

import pytest
import torch

from chipfit.errors import PlanError
from chipfit.quantizers.scale_bounds import ScaleBound, clip_to_bounds, code_sums, scale_growth
from chipfit.quantizers.stored import scales_per_output
from tests.build import stored

INF = math.inf


def limit(low=-INF, high=INF, **terms):
    return ScaleBound(op="Add", terms=tuple(terms.items()), low=low, high=high)


def moved(bounds, log, moves, pot=()):
    tensors = {k: torch.tensor(v, dtype=torch.float64) for k, v in log.items()}
    return {k: v.tolist() for k, v in clip_to_bounds(torch, bounds, tensors, moves, pot).items()}


@pytest.mark.parametrize("exponent", [8, -8])
def test_exponents_and_ends_of_platforms_are_taken(exponent):
    assert limit(0.0, 1.0, a=exponent).terms == (("a", exponent),)
    assert limit(-1074.0, 1023.0, a=1).low == -1074
    free = ScaleBound(op="Add", terms=(("a", 1),))  # neither end unless it is said
    assert (free.low, free.high) == (-INF, INF)


@pytest.mark.parametrize(
    ("ends", "terms"),
    [
        ((0.0, 1.0), {}),
        ((0.0, 1.0), {"a": 9}),
        ((0.0, 1.0), {"a": 1, "b": -9}),
        ((-1075.0, 1.0), {"a": 1}),
        ((0.0, 1024.0), {"a": 1}),
        ((math.nan, 1.0), {"a": 1}),
    ],
)
def test_bounds_that_no_platform_has_are_refused(ends, terms):
    with pytest.raises(PlanError, match="Scale bound is not valid"):
        limit(*ends, **terms)


def test_a_bound_reads_as_a_product_of_scales():
    assert str(limit(-1.0, 3.0, x=1, w=-1)) == "Add: x * w^-1 >= 0.5 and <= 8 (scales)"
    assert str(limit(-1.0, x=2)) == "Add: x^2 >= 0.5 (scales)" and str(limit(high=0.0, x=1)) == "Add: x <= 1 (scales)"


@pytest.mark.parametrize(
    ("bound", "log", "want"),
    [
        (limit(-1.0, 1.0, a=1), 5.0, 1.0),
        (limit(-1.0, 1.0, a=1), -5.0, -1.0),
        (limit(-1.0, 1.0, a=1), 0.3, 0.3),
        (limit(-1.0, 1.0, a=2), 5.0, 0.5),
        (limit(-1.0, 3.0, a=-1), 5.0, 1.0),
        (limit(-1.0, 3.0, a=-1), -5.0, -3.0),
        (limit(-1.0, 3.0, a=-2), -5.0, -1.5),
        (limit(-1.0, 3.0, a=1, b=1), 5.0, 1.0),  # b is 2
        (limit(-1.0, 3.0, a=1, b=-1), 9.0, 5.0),
        (limit(-1.0, 3.0, a=1, b=3), 9.0, -3.0),
        (limit(-1.0, 3.0, a=-1, b=1), 9.0, 3.0),
        (limit(low=7.0, a=1), 5.0, 7.0),
        (limit(high=-7.0, a=1), 5.0, -7.0),
        (limit(-1.0, 1.0, b=1), 5.0, 5.0),
        (limit(2.0, 2.0, a=1), 5.0, 2.0),
    ],
)
def test_a_scale_goes_to_the_nearest_end_that_the_others_allow(bound, log, want):
    out = moved([bound], {"a": log, "b": 2.0}, ["a"])
    assert out == {"a": pytest.approx(want, abs=2e-5), "b": 2.0}
    assert (out["a"] == log) == (want == log)


def test_what_has_left_a_bound_goes_a_little_inside_it():
    bound = limit(-1.0, 1.0, a=1)
    assert -1 + 0.9e-5 < moved([bound], {"a": -5.0}, ["a"])["a"] < -1 + 1.1e-5
    assert 1 - 1.1e-5 < moved([bound], {"a": 5.0}, ["a"])["a"] < 1 - 0.9e-5
    for a in (1 + 3e-6, -1 - 3e-6):  # a few roundings of float32 break no bound
        assert moved([bound], {"a": a}, ["a"])["a"] == a
    for a in (1 + 5e-6, -1 - 5e-6):
        assert abs(moved([bound], {"a": a}, ["a"])["a"]) < 1
    # of a bound of 2e-6 with the exponent 4 the inside is 1 / 8
    narrow = limit(-1e-6, 1e-6, a=-4)
    assert (
        moved([narrow], {"a": 3.0}, ["a"])["a"]
        == moved([narrow], {"a": -3.0}, ["a"])["a"]
        == pytest.approx(0, abs=1e-9)
    )


def test_powers_of_two_go_to_powers_of_two():
    for a, want in ((9.0, 2.0), (-9.0, -2.0), (0.0, 0.0)):
        assert moved([limit(-2.5, 2.5, a=1)], {"a": a}, ["a"], pot=["a"])["a"] == want
    assert moved([limit(-2.0, 2.0, a=1)], {"a": 9.0}, ["a"], pot=["a"])["a"] == 2
    assert moved([limit(-2.0, 2.0, a=1)], {"a": -9.0}, ["a"], pot=["a"])["a"] == -2
    assert moved([limit(-2.000001, 1.999999, a=1)], {"a": 9.0}, ["a"], pot=["a"])["a"] == 2  # within the slack


def test_channels_go_each_their_way_and_one_scale_obeys_the_tightest():
    bound = limit(-1.0, 3.0, a=1, c=1)
    out = moved([bound], {"a": [9.0, 0.0, -9.0], "c": [0.0, 1.0, 2.0]}, ["a"])
    assert out["a"] == pytest.approx([3, 0, -3], abs=2e-5)
    for a, want in ((9.0, 1.0), (-9.0, -1.0), (0.5, 0.5)):  # -1 - 0 .. 3 - 2
        assert moved([bound], {"a": a, "c": [0.0, 1.0, 2.0]}, ["a"])["a"] == pytest.approx(want, abs=2e-5)


def test_tensors_move_in_turn_and_what_moved_holds_for_the_next():
    bounds = [limit(0.0, 10.0, a=-1, b=1), limit(-1.0, 1.0, a=1), limit(-4.0, 4.0, c=1)]
    out = moved(bounds, {"a": 5.0, "b": 12.0, "c": 9.0}, ["a", "b"])
    assert out["a"] == pytest.approx(1, abs=4e-5) and out["b"] == pytest.approx(11, abs=4e-5) and out["c"] == 9
    given = {"a": torch.tensor(5.0)}
    clip_to_bounds(torch, bounds[1:2], given, ["a"], ())
    assert float(given["a"]) == 5


# ---------------------------------------------------------------- sums of quantized weights

W = torch.tensor([[[1.0, -2.0], [0.5, 3.0]], [[-1.0, 0.0], [1.0, 0.5]], [[0.0, 0.0], [0.5, 0.0]]])  # [3, 2, 2]


@pytest.mark.parametrize("axis, sums", [(0, [13, 5, 1]), (1, [8, 11]), (2, [8, 11])])
def test_magnitudes_are_summed_over_each_channel(axis, sums):
    """Steps of a half: codes 2, 4, 1, 6; 2, 0, 2, 1; 0, 0, 1, 0."""
    found = code_sums(stored(0.5), W, axis)
    assert found.tolist() == sums and found.dtype is torch.int64


def test_scales_grow_where_their_sum_is_too_large():
    assert scale_growth(stored(0.5), W, 13.0) is None
    assert float(scale_growth(stored(0.5), W, 12.0)) == pytest.approx(1.01 * 13 / 12)  # one scale: the largest sum
    each = scale_growth(stored([0.5] * 3, axis=0), W, 4.0)
    assert each.tolist() == pytest.approx([1.01 * 13 / 4, 1.01 * 5 / 4, 1])
    assert scale_growth(stored([0.5] * 3, axis=0, pot=True), W, 4.0).tolist() == [4, 2, 1]
    inner = scale_growth(stored([0.5] * 2, axis=1), W, 10.0)
    assert inner.tolist() == pytest.approx([1, 1.01 * 11 / 10])
    assert float(scale_growth(stored(0.5), W, 10.0, axis=1)) == pytest.approx(1.01 * 11 / 10)
    assert float(scale_growth(stored(0.5), W, 10.0)) == pytest.approx(1.01 * 13 / 10)  # of axis 0


def test_groups_of_a_transposed_convolution_share_the_scales_of_their_channels():
    scale = torch.tensor([1.0, 2.0])
    assert scales_per_output(scale, 6).tolist() == [1, 2, 1, 2, 1, 2] and scales_per_output(scale, 2) is scale
    assert scales_per_output(scale, 1) is scale and float(scales_per_output(scale[0], 6)) == 1
