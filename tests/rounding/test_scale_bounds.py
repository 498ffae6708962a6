"""Bounds between which a scale may move: numbers on paper."""

from dataclasses import replace

import pytest
import torch

from chipfit.quantizers.scale_bounds import ScaleBound
from chipfit.rounding.gptq_solver import scale_bounds, scale_is_allowed, weight_rows
from tests.build import grid, node, plan_of, stored

N4 = grid(4, low=-7)
TINY, MOST = float(torch.finfo(torch.float32).tiny), 2.0**100


def tensor(scale, axis=None, on=N4):
    return stored(scale, axis=axis, on=on)


def plan(w, rules=(), **others):
    return replace(plan_of(w=w, **others), **dict(rules))


def limit(low, high, **terms):
    return ScaleBound(op="Conv2D", terms=tuple(terms.items()), low=low, high=high)


W, X, Y = tensor([0.5, 2.0], 0), tensor(0.25), tensor([4.0, 1.0], 0)


def bounds(w, *limits, **others):
    """The bounds of the scale of w under these limits."""
    return [b.tolist() for b in scale_bounds(plan(w, {"limits": limits}, **others), "w")]


def near(*values):
    return pytest.approx(list(values), rel=1e-4)


def test_without_rules_every_scale_that_multiplies_is_allowed():
    least = grid(4, low=-7, scale_min=0.125)
    assert bounds(W) == [[TINY] * 2, [MOST] * 2]
    assert bounds(tensor([0.5, 2.0], 0, least))[0] == [0.125] * 2
    assert bounds(tensor(0.0625, on=least))[0] == [0.0625]  # its own is always allowed


@pytest.mark.parametrize("rule", [{"ties": (("x", "w"),)}, {"fixed": ("w",)}, {"sums": (("w", 9.0),)}])
def test_a_scale_with_rules_beyond_bounds_stays(rule):
    tied = plan(W, rule, x=X)
    assert scale_bounds(tied, "w") is None and not scale_is_allowed(tied, "w", W.scale)


@pytest.mark.parametrize("rule", [{"ties": (("x", "y"),)}, {"fixed": ("x",)}, {"sums": (("y", 9.0),)}])
def test_rules_about_other_scales_do_not_hold_it(rule):
    assert scale_bounds(plan(W, rule, x=X, y=Y), "w") is not None


@pytest.mark.parametrize(
    ("bound", "low", "high"),
    [
        (limit(-4.0, 4.0, w=2), [0.25, 0.25], [4, 4]),
        (limit(-1.0, 2.0, w=-1), [0.25, 0.25], [2, 2]),
        (limit(-4.0, 1.0, w=1, x=1), [0.25, 0.25], [8, 8]),  # log2 x = -2
        (limit(-3.0, 4.0, w=1, x=-1), [0.03125, 0.03125], [4, 4]),
        (limit(-3.0, 4.0, w=1, y=1), [0.03125, 0.125], [4, 16]),  # channel by channel: 4 and 1
        (limit(-9.0, 4.0, w=1, x=1, y=1), [2.0**-9, 2.0**-7], [16, 64]),
        (limit(-9.0, 9.0, x=1), [TINY] * 2, [MOST] * 2),  # about others alone
        (limit(-9.0, 9.0, w=1, float=1), [TINY] * 2, [MOST] * 2),  # about one that is not quantized
        (limit(-3.0, 4.0, w=1), [0.125, 0.125], [16, 16]),
    ],
)
def test_bounds_of_the_platform_with_all_other_scales_as_they_are(bound, low, high):
    found = bounds(W, bound, x=X, y=Y, float=None)
    assert found == [near(*map(min, low, [0.5, 2.0])), near(*map(max, high, [0.5, 2.0]))]


def test_a_scale_of_all_channels_obeys_the_tightest_of_them():
    """1 / 8 over 4 and over 1; 1 / 4 over 1."""
    tight = limit(-3.0, 0.0, w=1, y=1)
    assert bounds(tensor(0.125), tight, y=Y) == [near(0.125), near(0.25)]
    assert bounds(tensor(0.5), tight, y=Y) == [near(0.125), [0.5]]  # its own is more


def test_solved_scales_keep_a_little_inside_their_bounds_whatever_is_rounded():
    low, high = (torch.tensor(b, dtype=torch.float64).log2() for b in bounds(W, limit(-3.0, 4.0, w=1)))
    for inside in (low + 3, 4 - high):
        assert bool(((inside > 1e-6) & (inside < 1e-5)).all())


@pytest.mark.parametrize(
    ("scale", "fits"), [([0.5, 2.0], True), ([0.2, 2.0], False), ([0.5, 5.0], False), ([3.9, 0.26], True)]
)
def test_a_scale_is_allowed_where_every_entry_is(scale, fits):
    p = plan(W, {"limits": (limit(-2.0, 2.0, w=1),)})
    assert scale_is_allowed(p, "w", torch.tensor(scale)) is fits
    assert all(scale_is_allowed(p, "w", end) for end in scale_bounds(p, "w"))


#: two groups of two outputs, six weights each
CONV = node("y = Conv1D(x, w, -)", {"stride": (1,), "padding": ((0, 0),), "dilation": (1,), "groups": 2})
EACH, WEIGHT = tensor([0.5, 2.0, 3.0, 4.0], 0), torch.zeros(4, 3, 2)


def test_rows_know_which_entry_of_the_scale_is_theirs():
    rows = weight_rows(plan(EACH, {"limits": (limit(-2.0, 3.0, w=1),)}), CONV, WEIGHT)
    assert rows.ids.tolist() == [[0, 1], [2, 3]] and rows.scale.shape == rows.zero.shape == (2, 2, 6)
    assert rows.scale[..., 0].tolist() == rows.scale[..., 5].tolist() == [[0.5, 2], [3, 4]] and rows.grid == N4
    assert rows.low.tolist() == near(*[0.25] * 4) and rows.high.tolist() == near(*[8] * 4)
    one = weight_rows(plan(tensor(0.5)), CONV, WEIGHT)
    assert one.ids.tolist() == [[0, 0], [0, 0]] and one.high.tolist() == [MOST]


def test_rows_whose_scale_stays_have_no_entries_to_choose():
    fixed = weight_rows(plan(EACH, {"fixed": ("w",)}), CONV, WEIGHT)
    assert fixed.ids is None and fixed.low.tolist() == fixed.high.tolist() == [0.5, 2, 3, 4]
    inputs = weight_rows(plan(tensor([0.5, 2.0, 3.0], 1)), CONV, WEIGHT)  # a scale for each input channel
    assert inputs.ids is None and inputs.scale[0, 0].tolist() == [0.5, 0.5, 2, 2, 3, 3]
    assert inputs.low.tolist() == inputs.high.tolist() == [0.5, 2, 3]
