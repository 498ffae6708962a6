"""Between which bounds a scale may move: numbers on paper."""

from __future__ import annotations

import pytest
import torch

from chipfit.graph.ir import Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.quantizers.stored import Stored
from chipfit.rounding.gptq import WeightRows
from chipfit.rounding.scale_bounds import scale_bounds, scale_is_allowed, weight_rows

N4 = Grid(bits=4, qmin=-7, qmax=7)
TINY = float(torch.finfo(torch.float32).tiny)


def tensor(name, scale, axis=None, grid=N4):
    s = torch.tensor(scale)
    stored = Stored(format="w4", grid=grid, scale=s, zero_point=torch.zeros_like(s, dtype=torch.int32), axis=axis)
    return TensorPlan(name=name, role="weight", stored=stored)


def plan(*tensors, **more):
    return Plan(tensors={t.name: t for t in tensors}, **more)


def limit(low, high, **terms):
    return ScaleBound(op="Conv2D", terms=tuple(terms.items()), low=low, high=high)


W, X, Y = tensor("w", [0.5, 2.0], 0), tensor("x", 0.25), tensor("y", [4.0, 1.0], 0)


def ends(p, name="w"):
    return [b.tolist() for b in scale_bounds(p, name)]


def test_without_rules_every_scale_that_multiplies_is_allowed():
    low, high = ends(plan(W))
    assert low == [TINY] * 2 and high == [2.0**100] * 2
    least = Grid(bits=4, qmin=-7, qmax=7, scale_min=0.125)
    assert ends(plan(tensor("w", [0.5, 2.0], 0, least)))[0] == [0.125] * 2
    assert ends(plan(tensor("w", 0.0625, grid=least)))[0] == [0.0625]  # its own is always allowed


@pytest.mark.parametrize("rule", [{"ties": (("x", "w"),)}, {"fixed": ("w",)}, {"sums": (("w", 9.0),)}])
def test_a_scale_with_rules_beyond_bounds_stays(rule):
    assert scale_bounds(plan(W, X, **rule), "w") is None and not scale_is_allowed(plan(W, X, **rule), "w", W.scale)
    other = {
        k: tuple(x if k == "fixed" else (x[0], "y") if k == "ties" else ("y", 9.0) for x in v) for k, v in rule.items()
    }
    if "fixed" not in rule:
        assert scale_bounds(plan(W, X, Y, **other), "w") is not None


@pytest.mark.parametrize(
    ("bound", "low", "high"),
    [
        (limit(-1.0, 2.0, w=1), [0.5, 0.5], [4, 4]),
        (limit(-4.0, 4.0, w=2), [0.25, 0.25], [4, 4]),
        (limit(-1.0, 2.0, w=-1), [0.25, 0.25], [2, 2]),
        (limit(-4.0, 1.0, w=1, x=1), [0.25, 0.25], [8, 8]),  # log2 x = -2
        (limit(-3.0, 4.0, w=1, x=-1), [0.03125, 0.03125], [4, 4]),
        (limit(-3.0, 4.0, w=1, y=1), [0.03125, 0.125], [4, 16]),  # channel by channel: 4 and 1
        (limit(-3.0, 4.0, w=1, y=-1), [0.5, 0.125], [64, 16]),
        (limit(-9.0, 4.0, w=1, x=1, y=1), [2.0**-9, 2.0**-7], [16, 64]),
        (limit(-9.0, 9.0, x=1), [TINY] * 2, [2.0**100] * 2),  # about others alone
        (limit(-9.0, 9.0, w=1, float=1), [TINY] * 2, [2.0**100] * 2),  # about one that is not quantized
    ],
)
def test_bounds_of_the_platform_with_all_other_scales_as_they_are(bound, low, high):
    p = plan(W, X, Y, TensorPlan(name="float", role="activation"), limits=(bound,))
    found = ends(p)
    assert found[0] == pytest.approx([min(a, b) for a, b in zip(low, [0.5, 2.0], strict=True)], rel=1e-4)
    assert found[1] == pytest.approx([max(a, b) for a, b in zip(high, [0.5, 2.0], strict=True)], rel=1e-4)


def test_a_scale_of_all_channels_obeys_the_tightest_of_them():
    p = plan(tensor("w", 0.5), Y, limits=(limit(-3.0, 0.0, w=1, y=1),))
    assert ends(p) == [
        pytest.approx([0.125], rel=1e-4),
        [0.5],
    ]  # 1 / 8 over 4 and over 1; 1 / 4 over 1, its own is more
    p = plan(tensor("w", 0.125), Y, limits=(limit(-3.0, 0.0, w=1, y=1),))
    assert ends(p) == [pytest.approx([0.125], rel=1e-4), pytest.approx([0.25], rel=1e-4)]


def test_solved_scales_keep_a_little_inside_their_bounds_whatever_is_rounded():
    p = plan(W, limits=(limit(-3.0, 4.0, w=1),))
    low, high = (torch.tensor(b, dtype=torch.float64).log2() for b in ends(p))
    assert bool(((low + 3 > 1e-6) & (low + 3 < 1e-5)).all()) and bool(((4 - high > 1e-6) & (4 - high < 1e-5)).all())


def test_several_bounds_hold_together():
    p = plan(W, limits=(limit(-3.0, 4.0, w=1), limit(-6.0, 3.0, w=1), limit(-2.0, 9.0, w=1)))
    assert ends(p) == [pytest.approx([0.25] * 2, rel=1e-4), pytest.approx([8] * 2, rel=1e-4)]
    p = plan(W, limits=(limit(-9.0, 9.0, x=1), limit(-3.0, 4.0, w=1)))  # one that says nothing stands before it
    assert ends(p) == [pytest.approx([0.125] * 2, rel=1e-4), pytest.approx([16] * 2, rel=1e-4)]


@pytest.mark.parametrize(
    ("scale", "fits"), [([0.5, 2.0], True), ([0.2, 2.0], False), ([0.5, 5.0], False), ([3.9, 0.26], True)]
)
def test_a_scale_is_allowed_where_every_entry_is(scale, fits):
    p = plan(W, limits=(limit(-2.0, 2.0, w=1),))
    assert scale_is_allowed(p, "w", torch.tensor(scale)) is fits
    low, high = scale_bounds(p, "w")
    assert scale_is_allowed(p, "w", low) and scale_is_allowed(p, "w", high)


CONV = Node(
    "conv", "Conv1D", ("x", "w", None), ("y",), {"stride": (1,), "padding": ((0, 0),), "dilation": (1,), "groups": 2}
)


def test_rows_know_which_entry_of_the_scale_is_theirs():
    w = torch.zeros(4, 3, 2)  # two groups of two outputs, six weights each
    each = tensor("w", [0.5, 2.0, 3.0, 4.0], 0)
    rows: WeightRows = weight_rows(plan(each, limits=(limit(-2.0, 3.0, w=1),)), CONV, w)
    assert rows.ids.tolist() == [[0, 1], [2, 3]] and rows.scale.shape == rows.zero.shape == (2, 2, 6)
    assert rows.scale[..., 0].tolist() == rows.scale[..., 5].tolist() == [[0.5, 2], [3, 4]] and rows.grid == N4
    assert rows.low.tolist() == pytest.approx([0.25] * 4, rel=1e-4) and rows.high.tolist() == pytest.approx(
        [8] * 4, rel=1e-4
    )
    one = weight_rows(plan(tensor("w", 0.5)), CONV, w)
    assert one.ids.tolist() == [[0, 0], [0, 0]] and one.high.tolist() == [2.0**100]


def test_rows_whose_scale_stays_have_no_entries_to_choose():
    w = torch.zeros(4, 3, 2)
    fixed = weight_rows(plan(tensor("w", [0.5, 2.0, 3.0, 4.0], 0), fixed=("w",)), CONV, w)
    assert fixed.ids is None and fixed.low.tolist() == fixed.high.tolist() == [0.5, 2, 3, 4]
    inputs = weight_rows(plan(tensor("w", [0.5, 2.0, 3.0], 1)), CONV, w)  # a scale for each input channel
    assert inputs.ids is None and inputs.scale[0, 0].tolist() == [0.5, 0.5, 2, 2, 3, 3]
    assert inputs.low.tolist() == inputs.high.tolist() == [0.5, 2, 3]
