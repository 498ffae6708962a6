"""Legality: the projected scales satisfy every rule, and scales that were legal do not move."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from chipfit.decide.constraints import dictated_qparams, tie_groups
from chipfit.decide.legality import product_bounds, project
from chipfit.errors import UnsupportedError
from chipfit.platform.load import load, names
from chipfit.platform.match import resolve
from tests.build import grid, platform_of, quantized, stored
from tests.decide.test_constraints import RATIO, constraint

#: operator, inputs, weight, output: a small network with everything that rules speak of
NET = [
    ("Conv2D", ["x"], "w1", "y1"),
    ("Add", ["y1", "x"], None, "y2"),
    ("Mul", ["y2", "y1"], None, "y3"),
    ("Concat", ["y2", "y3"], None, "y4"),
    ("MaxPool", ["y4"], None, "y5"),
    ("Linear", ["y5"], "w2", "y6"),
    ("LeakyRelu", ["y6"], None, "y7"),
    ("Sigmoid", ["y7"], None, "y8"),
    ("Softmax", ["y6"], None, "y9"),
]


def bind(name):
    """Constraints of the network on a platform, and the grid of every tensor that is an integer one."""
    platform = load(name)
    constraints, grids = [], {}
    for op, ins, w, out in NET:
        found = resolve(platform, op, {"negative_slope": 0.1, "mode": "nearest"})
        if not found.options:
            continue
        o, slots = found.options[0], {}
        first = o.in_[0] if isinstance(o.in_, tuple) else o.in_
        operands = [(slot, i, first) for k, i in enumerate(ins) for slot in (f"in{k}", "ins")]
        for slot, tensor, name in [*operands, ("out", out, o.out), ("outs", out, o.out), ("w", w, w and o.w)]:
            f = platform.formats.get(name or "")
            if f is not None and f.kind == "int":
                slots.setdefault(slot, []).append(tensor)
                grids.setdefault(tensor, f.grid(signed=True))
        slots = {slot: tuple(tensors) for slot, tensors in slots.items()}
        constraints.append(constraint(*found.rules, op=op, attrs={"negative_slope": 0.1}, **slots))
    return constraints, grids


def variables(grids, scales):
    out = {}
    for (name, g), s in zip(sorted(grids.items()), scales, strict=False):
        s = 2.0 ** round(math.log2(s)) if g.pot else max(s, g.scale_min or 0)
        channels = g.per == "channel" and name.startswith("w")
        scale = [s, max(s / 128, g.scale_min or 0)] if channels else s
        out[name] = stored(scale, on=g, axis=0 if channels else None)
    return out


def check(found, constraints):
    """Every hard rule, tested with plain arithmetic."""
    for group in tie_groups(constraints):
        first, *others = [found[t] for t in sorted(group) if t in found]
        assert all(torch.equal(v.scale, first.scale) and torch.equal(v.zero_point, first.zero_point) for v in others)
    for t, (scale, zero) in dictated_qparams(constraints).items():
        if t in found:
            assert float(found[t].scale) == pytest.approx(scale) and int(found[t].zero_point) == zero
    for bound in product_bounds(constraints, found):
        product = math.prod(found[t].scale.double() ** e for t, e in bound.terms) * (0.1 if bound.rule.times else 1)
        low, high = bound.rule.bounds
        assert bool((product >= low * (1 - 3e-7 * (low == high))).all()), bound
        assert bool((product <= high * (1 + 3e-7 * (low == high))).all()), bound
    for v in found.values():
        assert (v.scale > 0).all()
        if v.grid.pot:
            assert np.array_equal(np.log2(v.scale.numpy()), np.rint(np.log2(v.scale.numpy())))
        if v.grid.scale_min:
            assert (v.scale >= v.grid.scale_min * (1 - 1e-7)).all()


@pytest.mark.parametrize("name", names())
@settings(max_examples=4, deadline=None, derandomize=True)
@given(scales=st.lists(st.floats(2.0**-11, 1.0), min_size=12, max_size=12))
def test_projected_scales_satisfy_every_rule_and_then_stay(name, scales):
    constraints, grids = bind(name)
    found = project(variables(grids, scales), constraints)
    check(found, constraints)
    again = project(found, constraints)
    assert all(torch.equal(again[t].scale, found[t].scale) for t in found)


# ---------------------------------------------------------------- on paper

ANY, POT = grid(), grid(zero=0, pot=True)
#: the multiplier s_in s_w / s_out
REQUANT = {"in0": 1, "w": 1, "out": -1}
FIXED = [{"fix": "in0", "scale": 0.5, "zp": 0}, {"fix": "out", "scale": 0.25, "zp": 0}]
TIE = {"tie": ("in0", "out")}


def var(scale, on=ANY, zero=0):
    return stored(scale, zero, on=on, axis=0 if isinstance(scale, list) else None)


def legal(*rules, on=ANY, op="Add", **tensors):
    """Legal scales of one operator's tensors: `in0=("a", 4.0)` is a tensor a of scale 4 in slot in0."""
    wanted = {name: var(scale, on) for name, scale in tensors.values()}
    found = project(wanted, [constraint(*rules, op=op, **{slot: name for slot, (name, _) in tensors.items()})])
    return [float(found[name].scale) for name, _ in tensors.values()]


def zero_of(zero, *rules):
    """The zero point and scale of a tensor a that had this zero point and scale 1."""
    found = project({"a": var(1.0, zero=zero)}, [constraint(*rules, in0="a")])["a"]
    return int(found.zero_point), float(found.scale)


CASES = {
    # two of three are dictated, so the third moves: 1/2 * w / (1/4) = 2 w
    "at most": ([*FIXED, {"mono": REQUANT, "max": 1.0}], POT, (0.5, 4.0, 0.25), (0.5, 0.5, 0.25)),
    "at least": ([*FIXED, {"mono": REQUANT, "min": 1.0}], POT, (0.5, 0.125, 0.25), (0.5, 0.5, 0.25)),
    "below": ([*FIXED, {"mono": REQUANT, "lt": 1.0}], POT, (0.5, 0.5, 0.25), (0.5, 0.25, 0.25)),
    "equal": ([*FIXED, {"mono": REQUANT, "eq": 1.0}], ANY, (0.5, 3.0, 0.25), (0.5, 0.5, 0.25)),
    # an exponent counts: w^2 <= 1/16
    "squared": ([{"mono": {"w": 2}, "max": 1 / 16}], ANY, (1.0, 2.0, 1.0), (1.0, 0.25, 1.0)),
    # the scale that counts twice gets there in half the octaves: s_in^2 s_w <= 1 from 2^2 * 2^2 in two octaves
    "cheapest": ([{"mono": {"in0": 2, "w": 1}, "max": 1.0}], POT, (2.0, 4.0, 1.0), (0.5, 4.0, 1.0)),
    # a tie makes one variable of two, whose exponents cancel: w <= 1 is what is left
    "tied": ([TIE, {"mono": REQUANT, "max": 1.0}], POT, (0.5, 8.0, 2.0), (0.5, 1.0, 0.5)),
    # exponents of tied tensors are added: half an octave of both, rather than one of the third
    "added": ([{"tie": ("in0", "w")}, {"mono": REQUANT, "max": 1.0}], ANY, (4, 4, 8), (2**1.5, 2**1.5, 8.0)),
    "preferred only": ([{"mono": REQUANT, "max": 1.0, "hard": False}], POT, (8.0, 8.0, 1.0), (8.0, 8.0, 1.0)),
    "legal": ([{"mono": REQUANT, "max": 1.0}], POT, (0.5, 0.5, 1.0), (0.5, 0.5, 1.0)),
    # of two moves as short the one that makes scales larger, which clips nothing: y to 4
    "larger": ([{"mono": RATIO, "eq": 1.0}], ANY, (4.0, 1.0, 1.0), (4.0, 1.0, 4.0)),
    # here smaller is shorter: 2^4 / 1, four octaves of y or two of x
    "smaller": ([{"mono": {"in0": 2, "out": -1}, "eq": 1.0}], ANY, (4.0, 1.0, 1.0), (1.0, 1.0, 1.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_legal_scales(case):
    rules, on, (x, w, y), scales = CASES[case]
    assert legal(*rules, on=on, op="Conv2D", in0=("x", x), w=("w", w), out=("y", y)) == pytest.approx(scales, rel=1e-5)


def test_bounds_that_lie_closer_together_than_the_margin_are_kept():
    x, y = legal({"mono": RATIO, "min": 1.0, "max": 2.0**1e-6}, in0=("x", 8.0), out=("y", 1.0))
    assert -2.5e-7 < math.log2(x / y) < 1.25e-6


@pytest.mark.parametrize("power", [-126, 126])
def test_scales_reach_from_the_least_normal_number_to_its_inverse_and_no_further(power):
    limit, further = ("max", power - 1) if power < 0 else ("min", power + 1)
    assert legal({"mono": {"w": 1}, limit: 2.0**power}, on=POT, w=("w", 1.0)) == [2.0**power]
    with pytest.raises(UnsupportedError, match="No scales satisfy all rules"):
        legal({"mono": {"w": 1}, limit: 2.0**further}, on=POT, w=("w", 1.0))


def test_scales_that_no_violated_rule_reaches_stay_as_they_are():
    assert project({}, []) == {}
    ratio = constraint({"mono": RATIO, "min": 2.0**-10, "max": 256.0}, in0="a", out="b")
    wanted = {"a": var(0.0371, zero=3), "b": var(0.021, zero=3)}
    assert all(v is wanted[n] for n, v in project(wanted, [ratio]).items())
    one = {"mono": RATIO, "max": 1.0}
    wanted = {"a": var(4.0), "b": var(1.0), "c": var(0.3), "d": var(0.7)}
    found = project(wanted, [constraint(one, in0="a", out="b"), constraint(one, in0="c", out="d")])
    assert found["c"] is wanted["c"] and found["d"] is wanted["d"] and found["b"] is not wanted["b"]
    wanted = {"a": var(1000.0)}  # beside a tensor that stays float
    assert project(wanted, [constraint(one, in0="a", out="float_one")]) == wanted


def test_only_the_channel_that_violates_a_bound_moves():
    """s_in * s_w / s_out < 256 of the second of three channels: 0.5 * 2048 / 1 = 1024, two octaves too much."""
    wanted = {"x": var(0.5), "w": var([1.0, 2048.0, 2.0]), "y": var(1.0)}
    found = project(wanted, [constraint({"mono": REQUANT, "lt": 256}, in0="x", w="w", out="y")])
    product = found["x"].scale * found["w"].scale / found["y"].scale
    assert bool((product < 256).all())
    assert found["w"].scale[[0, 2]].tolist() == [1.0, 2.0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(-6, 6), min_size=3, max_size=3), st.integers(-3, 3), st.integers(0, 3))
def test_powers_of_two_find_the_nearest_of_all_integer_solutions(v, low, width):
    """low <= a + b - c <= low + width and b - c <= 0, against trying every triple."""
    bound = {"mono": {"in0": 1, "in1": 1, "out": -1}, "min": 2.0**low, "max": 2.0 ** (low + width)}
    order = {"mono": {"in1": 1, "out": -1}, "max": 1.0}
    scales = legal(bound, order, on=POT, **{s: (s, 2.0**k) for s, k in zip(("in0", "in1", "out"), v, strict=True)})
    a, b, c = (int(math.log2(s)) for s in scales)
    assert low <= a + b - c <= low + width and b <= c
    tried = range(-16, 17)
    allowed = ((i, j, k) for i in tried for j in tried for k in tried if low <= i + j - k <= low + width and j <= k)
    best = min(abs(i - v[0]) + abs(j - v[1]) + abs(k - v[2]) for i, j, k in allowed)
    assert abs(a - v[0]) + abs(b - v[1]) + abs(c - v[2]) == best


@pytest.mark.parametrize("scale, power", [(0.3, 0.25), (0.4, 0.5), (3.0, 4.0), (2.8, 2.0), (1.0, 1.0), (0.5, 0.5)])
def test_a_scale_goes_to_the_nearest_power_of_two(scale, power):
    assert legal(on=POT, in0=("a", scale)) == [power]


@pytest.mark.parametrize("last", [4.0, 3.0])
def test_powers_of_two_are_looked_for_in_every_channel(last):
    weight = var([1.0, 2.0, last], POT)
    found = project({"w": weight}, [])["w"]
    assert found.scale.tolist() == [1.0, 2.0, 4.0] and (found is weight) is (last == 4.0)


def test_powers_of_two_are_exact_although_the_solver_has_a_tolerance(monkeypatch):
    """HiGHS calls 3.0000001 an integer."""
    import scipy.optimize

    solved = scipy.optimize.milp

    def inexact(*args, **kwargs):
        answer = solved(*args, **kwargs)
        answer.x = answer.x + 1e-7
        return answer

    monkeypatch.setattr(scipy.optimize, "milp", inexact)
    x, y = legal({"mono": RATIO, "max": 0.25}, on=POT, in0=("x", 0.5), out=("y", 0.5))
    assert x / y <= 0.25 and math.log2(x).is_integer() and math.log2(y).is_integer()


def test_the_least_scale_is_that_of_normal_float32_unless_the_hardware_has_one():
    tiny = var(2.0**-126)
    assert project({"a": tiny}, [])["a"] is tiny
    assert legal(on=POT, in0=("a", 2.0**-126)) == [2.0**-126]
    for pot in (False, True):
        least = grid(zero=0, pot=pot, scale_min=0.25)
        assert legal(on=least, in0=("a", 0.25)) == [0.25]
        [raised] = legal(on=least, in0=("a", 0.125))
        assert 0.25 <= raised <= 0.25 * 2 ** (0 if pot else 5e-6)
    two = {"a": var(0.125, grid(zero=0, scale_min=0.25)), "b": var(0.125, least)}
    tied = project(two, [constraint(TIE, in0="a", out="b")])
    assert float(tied["a"].scale) == float(tied["b"].scale) == 0.25


def test_the_highest_floor_of_tied_tensors_counts():
    floors = [grid(zero=0, scale_min=s) for s in (0.5, 0.25)]
    for order in (floors, floors[::-1]):
        wanted = {n: var(0.125, g) for n, g in zip("ab", order, strict=True)}
        found = project(wanted, [constraint(TIE, in0="a", out="b")])
        assert [float(found[n].scale) for n in "ab"] == pytest.approx([0.5, 0.5], rel=1e-5)


def test_tied_tensors_share_scale_and_zero_point_through_chains():
    first = constraint({"tie": ("ins", "out")}, ins=("a", "b"), out="c")
    second = constraint(TIE, in0="c", out="d")
    assert tie_groups([first, second]) == (("a", "b", "c", "d"),)
    found = project({**{n: var(0.5, zero=4) for n in "abc"}, "d": var(0.1, zero=9)}, [first, second])
    assert {(float(v.scale), int(v.zero_point)) for v in found.values()} == {(0.5, 4)}
    soft = constraint({**TIE, "hard": False}, in0="a", out="d")
    wanted = {"a": var(0.5), "d": var(0.25)}
    assert tie_groups([soft]) == () and project(wanted, [soft]) == wanted


def test_dictated_tensors_stay_and_bounds_move_the_others():
    """x is 2; x w <= 1 pulls w down, and w / v = 1 pulls v along."""
    first = constraint({"fix": "in0", "scale": 2.0, "zp": 0}, {"mono": {"in0": 1, "w": 1}, "max": 1.0}, in0="x", w="w")
    second = constraint({"mono": {"w": 1, "out": -1}, "eq": 1.0}, w="w", out="v")
    found = project({"x": var(0.3), "w": var(1.0), "v": var(1.0), "u": var(1.0)}, [second, first])
    assert [float(found[n].scale) for n in "xwvu"] == pytest.approx([2.0, 0.5, 0.5, 1.0], rel=1e-5)


@pytest.mark.parametrize("slope, bound", [(0.5, 256.0), (-0.5, 255.9921875)])
def test_a_rule_may_count_an_attribute_in(slope, bound):
    """-127.99609375 <= slope * s_in / s_out <= 128, so the ratio is at most 256, or 255.99 for a negative slope."""
    rule = {"mono": RATIO, "times": "k", "min": -127.99609375, "max": 128}
    found = project({"a": var(1000.0), "b": var(1.0)}, [constraint(rule, attrs={"k": slope}, in0="a", out="b")])
    assert float(found["a"].scale / found["b"].scale) == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize(
    "rule, start, least, most",
    [
        ({"max": 4.0}, 64.0, 2 - 5e-6, 2.0),
        ({"min": 4.0}, 0.1, 2.0, 2 + 5e-6),
        ({"min": 4.0, "max": 4.0 * 2**1e-6}, 0.1, 2.0, 2 + 1e-6),
        ({"eq": 4.0}, 0.1, 2 - 2.5e-7, 2 + 2.5e-7),
        ({"lt": 4.0}, 64.0, 2 - 8e-6, 2 - 1e-7),
    ],
)
def test_solved_scales_are_inside_their_bounds_as_float32_too(rule, start, least, most):
    [scale] = legal({"mono": {"in0": 1}, **rule}, in0=("a", start))
    assert least <= math.log2(scale) <= most


def test_channels_move_apart_and_one_scale_for_all_moves_as_its_last_channel_needs():
    rule = {"mono": {"in0": 1, "w": 1}, "max": 1.0}
    found = project({"x": var(1.0), "w": var([0.5, 4.0, 8.0])}, [constraint(rule, op="Conv2D", in0="x", w="w")])
    product = found["x"].scale * found["w"].scale
    assert float(found["w"].scale[0]) == 0.5 and bool((product <= 1).all())
    moved = [*(found["w"].scale / torch.tensor([0.5, 4.0, 8.0])), found["x"].scale]
    # two octaves of x, and one more of the last channel: shorter than two and three of the channels
    assert [math.log2(float(v)) for v in moved] == pytest.approx([0.0, 0.0, -1.0, -2.0], abs=1e-5)
    fixed = constraint({"fix": "in0", "scale": 2.0, "zp": 0}, rule, op="Conv2D", in0="x", w="w")
    found = project({"x": var(1.0), "w": var([0.5, 4.0, 0.25])}, [fixed])
    assert float(found["x"].scale) == 2.0
    assert found["w"].scale.tolist() == pytest.approx([0.5, 0.5, 0.25], rel=1e-5)


# ---------------------------------------------------------------- zero points


@pytest.mark.parametrize(
    "zero, allowed, scale",  # codes -128..127 at scale 1 hold -128 - zero .. 127 - zero
    [
        (-28, 0, 155 / 127),
        (28, 0, 156 / 128),
        (0, 27, 127 / 100),
        (0, -28, 128 / 100),
        (0, 127, 1.0),  # no code is left above: what is below has room
        (0, -128, 1.0),
        (5, 5, 1.0),
    ],
)
def test_a_scale_grows_as_the_narrower_side_needs(zero, allowed, scale):
    assert zero_of(zero, {"zero": "in0", "eq": allowed}) == (allowed, pytest.approx(scale))


@pytest.mark.parametrize(
    "zero, allowed, nearest", [(50, [0, 100], 0), (51, [0, 100], 100), (49, [100, 0], 0), (9, [9, 0], 9)]
)
def test_of_two_zero_points_as_near_the_lower_one_is_taken(zero, allowed, nearest):
    assert zero_of(zero, {"zero": "in0", "eq": allowed})[0] == nearest


def test_zero_points_that_every_rule_allows_are_left_and_soft_rules_do_not_count():
    one, two = {"zero": "in0", "eq": [0, 7, 100]}, {"zero": "out", "eq": (7, 100, 120)}
    soft = {"zero": "in0", "eq": 3, "hard": False}
    found = project({"a": var(1.0, zero=0)}, [constraint(one, in0="a"), constraint(soft, two, in0="b", out="a")])
    assert int(found["a"].zero_point) == 7
    apart = [constraint({"zero": "in0", "eq": [0]}, in0="a"), constraint({"zero": "in0", "eq": [7]}, in0="b")]
    assert [int(v.zero_point) for v in project({"a": var(1.0), "b": var(1.0)}, apart).values()] == [0, 7]
    found = project({"a": var(1.0), "b": var(1.0)}, [constraint(TIE, one, two, in0="a", out="b")])
    assert [int(found[n].zero_point) for n in "ab"] == [7, 7]


def test_zero_rules_that_exclude_each_other_or_a_dictated_zero_point_are_refused():
    fix = {"fix": "in0", "scale": 1.0, "zp": 3}
    for rules in ([{"zero": "in0", "eq": 0}, {"zero": "in0", "eq": 1}], [fix, {"zero": "in0", "eq": [0, 4]}]):
        with pytest.raises(UnsupportedError, match="No zero point of 'a'"):
            zero_of(0, *rules)
    assert zero_of(0, fix, {"zero": "in0", "eq": [0, 3]})[0] == 3


# ---------------------------------------------------------------- contradictions


def test_of_many_rules_the_two_that_contradict_each_other_are_named():
    pair = {"mono": RATIO}
    idle = [constraint({**pair, "max": 2.0**k}, op=f"Idle{k}", in0="a", out="c") for k in range(1, 4)]
    high = constraint({**pair, "max": 1.0}, op="High", in0="a", out="b")
    low = constraint({**pair, "min": 2.0}, op="Low", in0="a", out="b")
    for constraints in ([high, *idle, low], [*idle, high, low], [low, idle[0], high, *idle[1:]]):
        with pytest.raises(UnsupportedError) as e:
            project({n: var(1.0) for n in "abc"}, constraints)
        assert "High over 'a', 'b'" in str(e.value) and "Low over 'a', 'b'" in str(e.value)
        assert "Idle" not in str(e.value)


def test_ties_and_dictated_scales_may_contradict_a_bound():
    with pytest.raises(UnsupportedError, match="tied tensors"):
        legal(TIE, {"mono": RATIO, "min": 2.0}, in0=("a", 1.0), out=("b", 1.0))
    fix = {"fix": "in0", "scale": 2.0, "zp": 0}
    with pytest.raises(UnsupportedError, match="Relu over 'a'"):
        legal(fix, {"mono": {"in0": 1}, "max": 1.0}, op="Relu", in0=("a", 1.0))
    assert legal(fix, {"mono": {"in0": 1}, "max": 2.0}, in0=("a", 1.0)) == [2.0]


# ---------------------------------------------------------------- networks


def test_a_network_is_planned_with_legal_scales():
    """|x| <= 6 and y = x want 2^-4, w = 1 wants 2^-6 (127 of them are 1.98); w s_in / s_out <= 2^-8 leaves w 2^-8."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    formats = {"a8": {"bits": 8, "scale": "pot"}, "w8": {"bits": 8, "range": "narrow", "scale": "pot"}}
    both = [{"fix": slot, "scale": 2**-4, "zp": 0} for slot in ("in0", "out")]
    for rules, w in ((both, 2**-6), ([*both, {"mono": REQUANT, "max": 2**-8}], 2**-8)):
        linear = {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "out": "a8"}], "rules": rules}
        npu, exact = platform_of(linear, formats=formats), {"rule": "no_clipping", "weight_rule": "no_clipping"}
        assert float(quantized(layer, torch.tensor([[-6.0], [6.0]]), npu, **exact).plan["weight"].scale) == w
