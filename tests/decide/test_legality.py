"""Legality: the projected scales satisfy every rule, and scales that were legal do not move."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chipfit.decide.constraints import (
    Constraint,
    ProductBound,
    connected_components,
    dictated_qparams,
    product_bounds,
    tie_groups,
)
from chipfit.decide.legality import project
from chipfit.errors import UnsupportedError
from chipfit.platform.load import load, names
from chipfit.platform.match import resolve
from chipfit.platform.schema import Rule
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored

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
    """Bindings of the network on a platform, and the grid of every tensor that is an integer one."""
    platform = load(name)
    constraints, grids = [], {}
    for op, ins, w, out in NET:
        found = resolve(platform, op, {"negative_slope": 0.1, "mode": "nearest"})
        if not found.options:
            continue
        o = found.options[0]
        first = o.in_[0] if isinstance(o.in_, tuple) else o.in_
        slots = {}

        def put(slot, tensor, fmt, slots=slots):
            f = platform.formats.get(fmt or "")
            if f is not None and f.kind == "int":
                slots.setdefault(slot, []).append(tensor)
                grids.setdefault(tensor, f.grid(signed=True))

        for k, i in enumerate(ins):
            put(f"in{k}", i, first)
            put("ins", i, first)
        put("out", out, o.out)
        put("outs", out, o.out)
        if w:
            put("w", w, o.w)
        constraints.append(
            Constraint(
                op=op, rules=found.rules, slots={k: tuple(v) for k, v in slots.items()}, attrs={"negative_slope": 0.1}
            )
        )
    return constraints, grids


def stored(grid, scale, zero):
    axis = 0 if scale.dim() else None
    zeros = torch.full(scale.shape, zero, dtype=torch.int32)
    return Stored(format="", grid=grid, scale=scale, zero_point=zeros, axis=axis)


def variables(grids, scales):
    out = {}
    for (name, grid), s in zip(sorted(grids.items()), scales, strict=False):
        shape = (2,) if grid.per == "channel" and name.startswith("w") else ()
        s = 2.0 ** round(math.log2(s)) if grid.pot else max(s, grid.scale_min or 0)
        scale = torch.full(shape, s, dtype=torch.float32)
        if shape:
            scale[1] /= 128
            scale = scale.clamp_min(grid.scale_min or 0)
        out[name] = stored(grid, scale, 0)
    return out


def check(found, constraints):
    """Every hard rule, tested with plain arithmetic."""
    for group in tie_groups(constraints):
        scales = [found[t] for t in sorted(group) if t in found]
        assert all(
            torch.equal(v.scale, scales[0].scale) and torch.equal(v.zero_point, scales[0].zero_point) for v in scales
        )
    for t, (scale, zero) in dictated_qparams(constraints).items():
        if t in found:
            assert float(found[t].scale) == pytest.approx(scale) and int(found[t].zero_point) == zero
    for row in product_bounds(constraints, found):
        product = math.prod(found[t].scale.double() ** e for t, e in row.terms) * (0.1 if row.rule.times else 1)
        low, high = row.rule.bounds
        assert bool((product >= low * (1 - 3e-7 * (low == high))).all()), row
        assert bool((product <= high * (1 + 3e-7 * (low == high))).all()), row
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


ANY = Grid(bits=8, qmin=-128, qmax=127, zero="any")
POT = Grid(bits=8, qmin=-128, qmax=127, pot=True)


def var(scale, grid=ANY, zero=0):
    scale = torch.tensor(scale, dtype=torch.float32)
    return stored(grid, scale, zero)


def constraint(*rules, op="Add", **slots):
    """Rules over tensors: a = "x" puts x in slot a."""
    return Constraint(
        op=op,
        rules=tuple(Rule(**r) for r in rules),
        slots={k: (v,) if isinstance(v, str) else v for k, v in slots.items()},
    )


def test_legal_scales_keep_their_bits():
    ratio = constraint({"mono": {"in0": 1, "out": -1}, "min": 2.0**-10, "max": 256.0}, in0="a", out="b")
    wanted = {"a": var(0.0371, zero=3), "b": var(0.021, zero=3)}
    found = project(wanted, [ratio])
    assert all(found[n] is wanted[n] for n in wanted)


def test_only_what_a_broken_rule_can_reach_moves():
    rule = {"mono": {"in0": 1, "out": -1}, "max": 1.0}
    wanted = {"a": var(4.0), "b": var(1.0), "c": var(0.3), "d": var(0.7)}
    found = project(wanted, [constraint(rule, in0="a", out="b"), constraint(rule, in0="c", out="d")])
    assert found["c"] is wanted["c"]
    assert found["d"] is wanted["d"]


def test_the_least_change_is_taken():
    """a / b <= 1 with a = 4, b = 1: in log2 the ratio is 2 too large, so the total move is 2."""
    wanted = {"a": var(4.0), "b": var(1.0)}
    found = project(wanted, [constraint({"mono": {"in0": 1, "out": -1}, "max": 1.0}, in0="a", out="b")])
    moved = sum(abs(math.log2(float(found[n].scale)) - math.log2(float(wanted[n].scale))) for n in wanted)
    assert moved == pytest.approx(2, abs=1e-5)


def test_only_the_channel_that_breaks_a_bound_moves():
    """s_in * s_w / s_out < 256 of the second of three channels: 0.5 * 2048 / 1 = 1024, two octaves too much."""
    wanted = {"x": var(0.5), "w": var([1.0, 2048.0, 2.0]), "y": var(1.0)}
    found = project(wanted, [constraint({"mono": {"in0": 1, "w": 1, "out": -1}, "lt": 256}, in0="x", w="w", out="y")])
    product = found["x"].scale * found["w"].scale / found["y"].scale
    assert bool((product < 256).all())
    untouched = found["w"].scale[[0, 2]]
    assert torch.equal(untouched, torch.tensor([1.0, 2.0]))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(-6, 6), min_size=3, max_size=3), st.integers(-3, 3), st.integers(0, 3))
def test_powers_of_two_find_the_nearest_of_all_integer_solutions(v, low, width):
    """low <= a + b - c <= low + width and b - c <= 0, against trying every triple."""
    bound = {"mono": {"in0": 1, "in1": 1, "out": -1}, "min": 2.0**low, "max": 2.0 ** (low + width)}
    order = {"mono": {"in1": 1, "out": -1}, "max": 1.0}
    wanted = {n: var(2.0**k, POT) for n, k in zip("abc", v, strict=True)}
    found = project(wanted, [constraint(bound, order, in0="a", in1="b", out="c")])
    a, b, c = (int(math.log2(float(found[n].scale))) for n in "abc")
    assert low <= a + b - c <= low + width and b <= c
    tried = range(-16, 17)
    best = min(
        abs(i - v[0]) + abs(j - v[1]) + abs(k - v[2])
        for i in tried
        for j in tried
        for k in tried
        if low <= i + j - k <= low + width and j <= k
    )
    assert abs(a - v[0]) + abs(b - v[1]) + abs(c - v[2]) == best


def test_a_scale_that_is_no_power_of_two_goes_to_the_nearest():
    assert float(project({"a": var(0.3, POT)}, [])["a"].scale) == 0.25


def test_a_least_scale_is_kept():
    grid = Grid(bits=8, qmin=0, qmax=255, zero="any", scale_min=0.01 / 255)
    assert float(project({"a": var(1e-9, grid)}, [])["a"].scale) >= 0.01 / 255


def test_tied_tensors_share_scale_and_zero_point_through_chains():
    first = constraint({"tie": ("ins", "out")}, ins=("a", "b"), out="c")
    second = constraint({"tie": ("in0", "out")}, in0="c", out="d")
    assert tie_groups([first, second]) == (("a", "b", "c", "d"),)
    found = project(
        {n: var(s, zero=z) for n, s, z in (("a", 0.5, 4), ("b", 0.5, 4), ("c", 0.5, 4), ("d", 0.1, 9))}, [first, second]
    )
    assert {(float(v.scale), int(v.zero_point)) for v in found.values()} == {(0.5, 4)}


def test_a_preferred_tie_is_not_enforced():
    wanted = {"a": var(0.5), "b": var(0.25)}
    soft = constraint({"tie": ("in0", "out"), "hard": False}, in0="a", out="b")
    assert tie_groups([soft]) == ()
    assert project(wanted, [soft]) == wanted


def test_a_dictated_scale_holds_for_everything_tied_to_it():
    """A sigmoid's output is 1/256 with zero point -128; the concat behind it ties its other input to that."""
    sigmoid = constraint({"fix": "out", "scale": 1 / 256, "zp": -128}, op="Sigmoid", out="s")
    concat = constraint({"tie": ("ins", "out")}, op="Concat", ins=("s", "x"), out="y")
    found = project({n: var(0.3) for n in "sxy"}, [sigmoid, concat])
    assert {(float(v.scale), int(v.zero_point)) for v in found.values()} == {(1 / 256, -128)}


def test_two_dictated_scales_that_are_tied_are_an_error():
    sigmoid = constraint({"fix": "out", "scale": 1 / 256, "zp": -128}, op="Sigmoid", out="s")
    tanh = constraint({"fix": "out", "scale": 1 / 128, "zp": 0}, op="Tanh", out="t")
    concat = constraint({"tie": ("ins", "out")}, op="Concat", ins=("s", "t"), out="y")
    with pytest.raises(UnsupportedError, match=r"'s' by Sigmoid.*'t' by Tanh"):
        dictated_qparams([sigmoid, tanh, concat])


def test_a_zero_point_that_is_moved_keeps_the_range_covered():
    """Codes -128..127 at scale 1 with zero point -28 hold -100..155; with zero point 0 that needs scale 155/127."""
    found = project({"a": var(1.0, zero=-28)}, [constraint({"zero": "in0", "eq": 0}, in0="a")])
    assert int(found["a"].zero_point) == 0
    assert float(found["a"].scale) == pytest.approx(155 / 127)


def test_the_nearest_allowed_zero_point_is_taken_by_all_tied_tensors():
    rules = constraint({"zero": "in0", "eq": [0, 100]}, {"tie": ("in0", "out")}, in0="a", out="b")
    found = project({"a": var(1.0, zero=80), "b": var(1.0, zero=80)}, [rules])
    assert [int(v.zero_point) for v in found.values()] == [100, 100]


def test_zero_rules_that_exclude_each_other_are_an_error():
    with pytest.raises(UnsupportedError, match="No zero point of 'a'"):
        project(
            {"a": var(1.0)},
            [constraint({"zero": "in0", "eq": 0}, in0="a"), constraint({"zero": "in0", "eq": 1}, in0="a")],
        )


@pytest.mark.parametrize("slope, bound", [(0.5, 256.0), (-0.5, 255.9921875)])
def test_a_rule_may_count_an_attribute_in(slope, bound):
    """-127.99609375 <= slope * s_in / s_out <= 128, so the ratio is at most 256, or 255.99 for a negative slope."""
    rule = Rule(mono={"in0": 1, "out": -1}, times="negative_slope", min=-127.99609375, max=128)
    leaky = Constraint(
        op="LeakyRelu", rules=(rule,), slots={"in0": ("a",), "out": ("b",)}, attrs={"negative_slope": slope}
    )
    found = project({"a": var(1000.0), "b": var(1.0)}, [leaky])
    assert float(found["a"].scale / found["b"].scale) == pytest.approx(bound, rel=1e-5)


def test_a_rule_about_a_float_tensor_bounds_nothing():
    wanted = {"a": var(1000.0)}
    assert (
        project(wanted, [constraint({"mono": {"in0": 1, "out": -1}, "max": 1.0}, in0="a", out="float_one")]) == wanted
    )


def test_the_rules_that_contradict_each_other_are_named_and_no_others():
    first = constraint({"mono": {"in0": 1, "out": -1}, "max": 1.0}, op="Add", in0="a", out="b")
    idle = constraint({"mono": {"in0": 1, "out": -1}, "max": 64.0}, op="Mul", in0="b", out="c")
    second = constraint({"mono": {"in0": 1, "out": -1}, "min": 2.0}, op="Sub", in0="a", out="b")
    with pytest.raises(UnsupportedError) as e:
        project({n: var(1.0) for n in "abc"}, [first, idle, second])
    assert "Add over 'a', 'b'" in str(e.value) and "Sub over 'a', 'b'" in str(e.value) and "Mul" not in str(e.value)


def test_a_tie_that_breaks_a_bound_is_an_error():
    with pytest.raises(UnsupportedError, match="tied tensors"):
        project(
            {"a": var(1.0), "b": var(1.0)},
            [constraint({"tie": ("in0", "out")}, {"mono": {"in0": 1, "out": -1}, "min": 2.0}, in0="a", out="b")],
        )


def test_nothing_to_legalise_is_legal():
    assert project({}, []) == {}


def test_what_is_tied_to_a_dictated_scale_has_it_too():
    """A sigmoid of 1/256 that is joined with two others: all of them, and only they."""
    tie = Rule(tie=("ins", "out"))
    constraints = [
        Constraint(
            op="Sigmoid", rules=(Rule(fix="out", scale=1 / 256, zp=-128),), slots={"in0": ("x",), "out": ("a",)}
        ),
        Constraint(op="Concat", rules=(tie,), slots={"ins": ("a", "b", "c"), "out": ("y",)}),
        Constraint(op="Add", rules=(), slots={"ins": ("b", "z"), "out": ("s",)}),
    ]
    assert dictated_qparams(constraints) == dict.fromkeys(("a", "b", "c", "y"), (1 / 256, -128))


def test_powers_of_two_are_exact_although_the_solver_has_a_tolerance(monkeypatch):
    """HiGHS calls 3.0000001 an integer."""
    import scipy.optimize

    solved = scipy.optimize.milp

    def inexact(*args, **kwargs):
        answer = solved(*args, **kwargs)
        answer.x = answer.x + 1e-7
        return answer

    monkeypatch.setattr(scipy.optimize, "milp", inexact)
    grid = Grid(bits=8, qmin=-128, qmax=127, pot=True)
    rule = Rule(mono={"in0": 1, "out": -1}, max=0.25)
    constraint = Constraint(op="Relu", rules=(rule,), slots={"in0": ("x",), "out": ("y",)})
    found = project({t: stored(grid, torch.tensor(0.5), 0) for t in "xy"}, [constraint])
    assert float(found["x"].scale / found["y"].scale) <= 0.25
    assert all(math.log2(float(s.scale)).is_integer() for s in found.values())


# ---------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    "low, high, total, holds",
    [
        (-1.0, 2.0, -1.0, True),
        (-1.0, 2.0, 2.0, True),
        (-1.0, 2.0, 0.5, True),
        (-1.0, 2.0, -1.0 - 1e-11, False),
        (-1.0, 2.0, 2.0 + 1e-11, False),
        (-1.0, 2.0, -3.0, False),
        (-1.0, 2.0, 4.0, False),
        (-1.0, math.inf, 300.0, True),
        (1.5, 1.5, 1.5 + 2e-7, True),
        (1.5, 1.5, 1.5 - 2e-7, True),
        (1.5, 1.5, 1.5 + 3e-7, False),
        (1.5, 1.5, 1.5 - 3e-7, False),
    ],
)
def test_a_bound_holds_up_to_rounding_and_an_equality_up_to_two_of_float32(low, high, total, holds):
    row = ProductBound(op="Add", terms=(("a", 1), ("b", -2)), low=low, high=high, rule=Rule(mono={"in0": 1}, eq=1))
    assert row.holds({"a": np.array(total + 8.0), "b": np.array(4.0)}) is holds
    assert row.holds({"a": np.array([low + 8.0, total + 8.0]), "b": np.array([4.0])}) is holds


def test_a_row_sums_exponents_of_each_channel():
    row = ProductBound(op="Add", terms=(("a", 2), ("w", -1)), rule=Rule(mono={"in0": 1}, eq=1))
    log = {"a": np.array(3.0), "w": np.array([1.0, 2.0, 4.0])}
    assert row.total(log).tolist() == [5.0, 4.0, 2.0]
    assert ProductBound(op="Add", terms=(), rule=row.rule).total({}) == 0.0


@pytest.mark.parametrize(
    "slots, mono, terms",
    [
        ({"in0": "a", "out": "b"}, {"in0": 1, "out": -1}, [[("a", 1), ("b", -1)]]),
        (
            {"ins": ("a", "b", "c"), "out": "y"},
            {"ins": 2, "out": -1},
            [[("a", 2), ("y", -1)], [("b", 2), ("y", -1)], [("c", 2), ("y", -1)]],
        ),
        (
            {"ins": ("a", "b"), "outs": ("y", "z")},
            {"ins": 1, "outs": -1},
            [[("a", 1), ("y", -1)], [("b", 1), ("z", -1)]],
        ),
        (
            {"ins": ("a", "b", "c"), "outs": ("y", "z")},
            {"ins": 1, "outs": -1},
            [[("a", 1), ("y", -1)], [("b", 1), ("z", -1)], [("c", 1), ("z", -1)]],
        ),
        ({"ins": ("a", "float", "c"), "out": "y"}, {"ins": 1, "out": 1}, [[("a", 1), ("y", 1)], [("c", 1), ("y", 1)]]),
        ({"ins": ("float",), "out": "y"}, {"ins": 1, "out": 1}, []),
        ({"in0": "a"}, {"in0": 1, "out": 1}, []),
    ],
)
def test_slots_of_several_tensors_are_paired_in_order(slots, mono, terms):
    rules = [{"mono": mono, "max": 1.0, "hard": False}, {"tie": ("ins", "out")}, {"mono": mono, "min": 0.5, "max": 4.0}]
    found = product_bounds([constraint(*rules, op="Mul", **slots)], {"a", "b", "c", "y", "z"})
    assert [list(r.terms) for r in found] == terms
    assert all((r.op, r.low, r.high, r.rule.min) == ("Mul", -1.0, 2.0, 0.5) for r in found)


@pytest.mark.parametrize(
    "rule, attrs, low, high",
    [
        ({"max": 8.0}, {}, -math.inf, 3.0),
        ({"min": 0.25}, {}, -2.0, math.inf),
        ({"eq": 0.5}, {}, -1.0, -1.0),
        ({"min": 0.25, "max": 8.0, "times": "k"}, {"k": 2.0}, -3.0, 2.0),
        ({"min": 0.25, "max": 8.0, "times": "k"}, {}, -2.0, 3.0),  # an attribute that is not there counts once
        ({"min": 0.25, "max": 8.0, "times": "k"}, {"k": 0.0}, -math.inf, math.inf),
        ({"min": -4.0, "max": 8.0, "times": "k"}, {"k": -0.5}, -math.inf, 3.0),
        ({"min": 0.25, "max": 8.0}, {"k": 2.0}, -2.0, 3.0),
        ({"lt": 8.0}, {}, -math.inf, 3.0 - 2e-6),
        ({"lt": 8.0, "max": 4.0}, {}, -math.inf, 2.0),
        ({"lt": 4.0, "max": 8.0}, {}, -math.inf, 2.0 - 2e-6),
        ({"lt": 8.0, "times": "k"}, {"k": 4.0}, -math.inf, 1.0 - 2e-6),
        ({"lt": 8.0, "min": 0.5}, {}, -1.0, 3.0 - 2e-6),
    ],
)
def test_bounds_in_octaves(rule, attrs, low, high):
    b = Constraint(op="Relu", rules=(Rule(mono={"in0": 1}, **rule),), slots={"in0": ("a",)}, attrs=attrs)
    (row,) = product_bounds([b], {"a"})
    assert (row.low, row.high) == (low, pytest.approx(high, abs=1e-9))


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
    found = project({"a": var(start)}, [constraint({"mono": {"in0": 1}, **rule}, in0="a")])
    assert least <= math.log2(float(found["a"].scale)) <= most


def test_of_two_ways_as_short_the_one_that_clips_nothing_is_taken():
    rule = {"mono": {"in0": 1, "out": -1}, "eq": 1.0}
    found = project({"a": var(4.0), "b": var(1.0)}, [constraint(rule, in0="a", out="b")])
    assert [float(found[n].scale) for n in "ab"] == pytest.approx([4.0, 4.0], rel=1e-5)
    down = {"mono": {"in0": 2, "out": -1}, "eq": 1.0}  # here it is the shorter way: 2^4 / 1, four octaves or two
    found = project({"a": var(4.0), "b": var(1.0)}, [constraint(down, in0="a", out="b")])
    assert [float(found[n].scale) for n in "ab"] == pytest.approx([1.0, 1.0], rel=1e-5)


def test_channels_move_apart_and_one_scale_for_all_moves_as_its_last_channel_needs():
    rule = {"mono": {"in0": 1, "w": 1}, "max": 1.0}
    found = project({"x": var(1.0), "w": var([0.5, 4.0, 8.0])}, [constraint(rule, op="Conv2D", in0="x", w="w")])
    product = found["x"].scale * found["w"].scale
    assert float(found["w"].scale[0]) == 0.5 and bool((product <= 1).all())
    moved = [*(found["w"].scale / torch.tensor([0.5, 4.0, 8.0])), found["x"].scale]
    # two octaves of x, and one more of the last channel: shorter than two and three of the channels
    assert [math.log2(float(v)) for v in moved] == pytest.approx([0.0, 0.0, -1.0, -2.0], abs=1e-5)
    held = [{"fix": "in0", "scale": 2.0, "zp": 0}, rule]
    found = project({"x": var(1.0), "w": var([0.5, 4.0, 0.25])}, [constraint(*held, op="Conv2D", in0="x", w="w")])
    assert float(found["x"].scale) == 2.0
    assert found["w"].scale.tolist() == pytest.approx([0.5, 0.5, 0.25], rel=1e-5)


def test_the_least_scale_is_that_of_normal_float32_unless_the_hardware_has_one():
    tiny = var(2.0**-126)
    assert project({"a": tiny}, [])["a"] is tiny
    below = stored(POT, torch.tensor(2.0**-126), 0)
    assert float(project({"a": below}, [])["a"].scale) == 2.0**-126
    for pot in (False, True):
        grid = Grid(bits=8, qmin=-128, qmax=127, pot=pot, scale_min=0.25)
        assert float(project({"a": var(0.25, grid)}, [])["a"].scale) == 0.25
        raised = float(project({"a": var(0.125, grid)}, [])["a"].scale)
        assert 0.25 <= raised <= 0.25 * 2 ** (0 if pot else 5e-6)
    two = {"a": var(0.125, Grid(bits=8, qmin=-128, qmax=127, scale_min=0.25)), "b": var(0.125, grid)}
    tied = project(two, [constraint({"tie": ("in0", "out")}, in0="a", out="b")])
    assert float(tied["a"].scale) == float(tied["b"].scale) == 0.25


def test_the_highest_floor_of_tied_tensors_counts():
    floors = [Grid(bits=8, qmin=-128, qmax=127, scale_min=s) for s in (0.5, 0.25)]
    for order in (floors, floors[::-1]):
        found = project(
            {n: var(0.125, g) for n, g in zip("ab", order)}, [constraint({"tie": ("in0", "out")}, in0="a", out="b")]
        )
        assert [float(found[n].scale) for n in "ab"] == pytest.approx([0.5, 0.5], rel=1e-5)


@pytest.mark.parametrize("scale, power", [(0.3, 0.25), (0.4, 0.5), (3.0, 4.0), (2.8, 2.0), (1.0, 1.0), (0.5, 0.5)])
def test_a_scale_goes_to_the_nearest_power_of_two(scale, power):
    assert float(project({"a": var(scale, POT)}, [])["a"].scale) == power


@pytest.mark.parametrize("last", [4.0, 3.0])
def test_powers_of_two_are_looked_for_in_every_channel(last):
    weight = stored(POT, torch.tensor([1.0, 2.0, last]), 0)
    found = project({"w": weight}, [])["w"]
    assert found.scale.tolist() == [1.0, 2.0, 4.0] and (found is weight) is (last == 4.0)


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
    found = project({"a": var(1.0, zero=zero)}, [constraint({"zero": "in0", "eq": allowed}, in0="a")])["a"]
    assert (int(found.zero_point), float(found.scale)) == (allowed, pytest.approx(scale))


@pytest.mark.parametrize(
    "zero, allowed, taken", [(50, [0, 100], 0), (51, [0, 100], 100), (49, [100, 0], 0), (9, [9, 0], 9)]
)
def test_of_two_zero_points_as_near_the_lower_one_is_taken(zero, allowed, taken):
    found = project({"a": var(1.0, zero=zero)}, [constraint({"zero": "in0", "eq": allowed}, in0="a")])
    assert int(found["a"].zero_point) == taken


def test_zero_points_that_every_rule_allows_are_left_and_soft_rules_do_not_count():
    one, two = {"zero": "in0", "eq": [0, 7, 100]}, {"zero": "out", "eq": (7, 100, 120)}
    soft = {"zero": "in0", "eq": 3, "hard": False}
    found = project({"a": var(1.0, zero=0)}, [constraint(one, in0="a"), constraint(soft, two, in0="b", out="a")])
    assert int(found["a"].zero_point) == 7
    apart = [constraint({"zero": "in0", "eq": [0]}, in0="a"), constraint({"zero": "in0", "eq": [7]}, in0="b")]
    assert [int(v.zero_point) for v in project({"a": var(1.0), "b": var(1.0)}, apart).values()] == [0, 7]
    tied = constraint({"tie": ("in0", "out")}, one, two, in0="a", out="b")
    found = project({"a": var(1.0), "b": var(1.0)}, [tied])
    assert [int(found[n].zero_point) for n in "ab"] == [7, 7]


def test_a_dictated_zero_point_that_a_rule_forbids_is_an_error():
    rules = [{"fix": "in0", "scale": 1.0, "zp": 3}, {"zero": "in0", "eq": [0, 4]}]
    with pytest.raises(UnsupportedError, match="No zero point of 'a'"):
        project({"a": var(1.0)}, [constraint(*rules, in0="a")])
    rules[1] = {"zero": "in0", "eq": [0, 3]}
    assert int(project({"a": var(1.0)}, [constraint(*rules, in0="a")])["a"].zero_point) == 3


def test_exponents_of_tied_tensors_are_added():
    rules = [{"tie": ("in0", "in1")}, {"mono": {"in0": 1, "in1": 1, "out": -1}, "max": 1.0}]
    found = project({"a": var(4.0), "b": var(4.0), "c": var(8.0)}, [constraint(*rules, in0="a", in1="b", out="c")])
    moved = [math.log2(float(found[n].scale)) for n in "abc"]
    assert moved == pytest.approx([1.5, 1.5, 3.0], abs=1e-5)  # half an octave of both, rather than one of the result


def test_tensors_that_are_dictated_stay_and_what_hangs_on_them_moves_with_its_own():
    """x is 2; x w <= 1 pulls w down, and w / v = 1 pulls v along."""
    fix = {"fix": "in0", "scale": 2.0, "zp": 0}
    first = constraint(fix, {"mono": {"in0": 1, "w": 1}, "max": 1.0}, in0="x", w="w")
    second = constraint({"mono": {"w": 1, "out": -1}, "eq": 1.0}, w="w", out="v")
    found = project({"x": var(0.3), "w": var(1.0), "v": var(1.0), "u": var(1.0)}, [second, first])
    assert [float(found[n].scale) for n in "xwvu"] == pytest.approx([2.0, 0.5, 0.5, 1.0], rel=1e-5)


def test_what_is_dictated_may_contradict_a_bound():
    rules = [{"fix": "in0", "scale": 2.0, "zp": 0}, {"mono": {"in0": 1}, "max": 1.0}]
    with pytest.raises(UnsupportedError, match="Relu over 'a'"):
        project({"a": var(1.0)}, [constraint(*rules, op="Relu", in0="a")])
    rules[1] = {"mono": {"in0": 1}, "max": 2.0}
    assert float(project({"a": var(1.0)}, [constraint(*rules, in0="a")])["a"].scale) == 2.0


def test_of_many_rules_the_two_that_contradict_each_other_are_named():
    pair = {"mono": {"in0": 1, "out": -1}}
    idle = [constraint({**pair, "max": 2.0**k}, op=f"Idle{k}", in0="a", out="c") for k in range(1, 4)]
    high = constraint({**pair, "max": 1.0}, op="High", in0="a", out="b")
    low = constraint({**pair, "min": 2.0}, op="Low", in0="a", out="b")
    for constraints in ([high, *idle, low], [*idle, high, low], [low, idle[0], high, *idle[1:]]):
        with pytest.raises(UnsupportedError) as e:
            project({n: var(1.0) for n in "abc"}, constraints)
        assert "High over 'a', 'b'" in str(e.value) and "Low over 'a', 'b'" in str(e.value)
        assert "Idle" not in str(e.value)


def test_slots_of_an_operator_stand_for_each_other():
    b = constraint(in0="a", in1="b", in2="c", out="y")
    assert (b.of("ins"), b.of("outs"), b.of("out"), b.of("w")) == (("a", "b", "c"), ("y",), ("y",), ())
    b = constraint(in0="a", ins=("a", "z"), out="y", outs=("y", "v"))
    assert (b.of("ins"), b.of("outs"), b.of("in0")) == (("a", "z"), ("y", "v"), ("a",))
    soft = {"hard": False}
    rules = [{"tie": ("in0", "out")}, {"dtype": ("ins", "out")}, {"fix": "out", "scale": 0.5, "zp": 3}]
    b = constraint(*rules, *({**r, **soft} for r in rules), in0="a", out="y")
    assert (b.tied, b.same_type, b.dictated) == ([["a", "y"]], [["a", "y"]], [("y", (0.5, 3))])


def test_groups_grow_together_over_common_members():
    assert connected_components([["b", "a"], ["c", "d"], ["e"], ["d", "b"], []]) == (("a", "b", "c", "d"), ("e",))
    assert tie_groups([constraint({"tie": ("in0", "out")}, in0="a", out="a")]) == ()
    half, quarter = ({"fix": "in0", "zp": 0, "scale": s} for s in (0.5, 0.25))
    with pytest.raises(UnsupportedError, match=r"Tensor 'a' is.*0.5.*by Add.*0.25.*by Mul"):
        dictated_qparams([constraint(half, in0="a"), constraint(quarter, op="Mul", in0="a")])
