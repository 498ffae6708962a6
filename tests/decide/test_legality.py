"""Legality: the projected scales satisfy every rule, and scales that were legal do not move."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chipfit.decide.legality import project, rows
from chipfit.decide.ties import Binding, fixed, tie_groups
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
    bindings, grids = [], {}
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
        bindings.append(
            Binding(
                op=op, rules=found.rules, slots={k: tuple(v) for k, v in slots.items()}, attrs={"negative_slope": 0.1}
            )
        )
    return bindings, grids


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


def check(found, bindings):
    """Every hard rule, tested with plain arithmetic."""
    for group in tie_groups(bindings):
        scales = [found[t] for t in sorted(group) if t in found]
        assert all(
            torch.equal(v.scale, scales[0].scale) and torch.equal(v.zero_point, scales[0].zero_point) for v in scales
        )
    for t, (scale, zero) in fixed(bindings).items():
        if t in found:
            assert float(found[t].scale) == pytest.approx(scale) and int(found[t].zero_point) == zero
    for row in rows(bindings, found):
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
    bindings, grids = bind(name)
    found = project(variables(grids, scales), bindings)
    check(found, bindings)
    again = project(found, bindings)
    assert all(torch.equal(again[t].scale, found[t].scale) for t in found)


ANY = Grid(bits=8, qmin=-128, qmax=127, zero="any")
POT = Grid(bits=8, qmin=-128, qmax=127, pot=True)


def var(scale, grid=ANY, zero=0):
    scale = torch.tensor(scale, dtype=torch.float32)
    return stored(grid, scale, zero)


def binding(*rules, op="Add", **slots):
    """Rules over tensors: a = "x" puts x in slot a."""
    return Binding(
        op=op,
        rules=tuple(Rule(**r) for r in rules),
        slots={k: (v,) if isinstance(v, str) else v for k, v in slots.items()},
    )


def test_legal_scales_keep_their_bits():
    ratio = binding({"mono": {"in0": 1, "out": -1}, "min": 2.0**-10, "max": 256.0}, in0="a", out="b")
    wanted = {"a": var(0.0371, zero=3), "b": var(0.021, zero=3)}
    found = project(wanted, [ratio])
    assert all(found[n] is wanted[n] for n in wanted)


def test_only_what_a_broken_rule_can_reach_moves():
    rule = {"mono": {"in0": 1, "out": -1}, "max": 1.0}
    wanted = {"a": var(4.0), "b": var(1.0), "c": var(0.3), "d": var(0.7)}
    found = project(wanted, [binding(rule, in0="a", out="b"), binding(rule, in0="c", out="d")])
    assert found["c"] is wanted["c"]
    assert found["d"] is wanted["d"]


def test_the_least_change_is_taken():
    """a / b <= 1 with a = 4, b = 1: in log2 the ratio is 2 too large, so the total move is 2."""
    wanted = {"a": var(4.0), "b": var(1.0)}
    found = project(wanted, [binding({"mono": {"in0": 1, "out": -1}, "max": 1.0}, in0="a", out="b")])
    moved = sum(abs(math.log2(float(found[n].scale)) - math.log2(float(wanted[n].scale))) for n in wanted)
    assert moved == pytest.approx(2, abs=1e-5)


def test_only_the_channel_that_breaks_a_bound_moves():
    """s_in * s_w / s_out < 256 of the second of three channels: 0.5 * 2048 / 1 = 1024, two octaves too much."""
    wanted = {"x": var(0.5), "w": var([1.0, 2048.0, 2.0]), "y": var(1.0)}
    found = project(wanted, [binding({"mono": {"in0": 1, "w": 1, "out": -1}, "lt": 256}, in0="x", w="w", out="y")])
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
    found = project(wanted, [binding(bound, order, in0="a", in1="b", out="c")])
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
    first = binding({"tie": ("ins", "out")}, ins=("a", "b"), out="c")
    second = binding({"tie": ("in0", "out")}, in0="c", out="d")
    assert tie_groups([first, second]) == (("a", "b", "c", "d"),)
    found = project(
        {n: var(s, zero=z) for n, s, z in (("a", 0.5, 4), ("b", 0.5, 4), ("c", 0.5, 4), ("d", 0.1, 9))}, [first, second]
    )
    assert {(float(v.scale), int(v.zero_point)) for v in found.values()} == {(0.5, 4)}


def test_a_preferred_tie_is_not_enforced():
    wanted = {"a": var(0.5), "b": var(0.25)}
    soft = binding({"tie": ("in0", "out"), "hard": False}, in0="a", out="b")
    assert tie_groups([soft]) == ()
    assert project(wanted, [soft]) == wanted


def test_a_dictated_scale_holds_for_everything_tied_to_it():
    """A sigmoid's output is 1/256 with zero point -128; the concat behind it ties its other input to that."""
    sigmoid = binding({"fix": "out", "scale": 1 / 256, "zp": -128}, op="Sigmoid", out="s")
    concat = binding({"tie": ("ins", "out")}, op="Concat", ins=("s", "x"), out="y")
    found = project({n: var(0.3) for n in "sxy"}, [sigmoid, concat])
    assert {(float(v.scale), int(v.zero_point)) for v in found.values()} == {(1 / 256, -128)}


def test_two_dictated_scales_that_are_tied_are_an_error():
    sigmoid = binding({"fix": "out", "scale": 1 / 256, "zp": -128}, op="Sigmoid", out="s")
    tanh = binding({"fix": "out", "scale": 1 / 128, "zp": 0}, op="Tanh", out="t")
    concat = binding({"tie": ("ins", "out")}, op="Concat", ins=("s", "t"), out="y")
    with pytest.raises(UnsupportedError, match=r"'s' by Sigmoid.*'t' by Tanh"):
        fixed([sigmoid, tanh, concat])


def test_a_zero_point_that_is_moved_keeps_the_range_covered():
    """Codes -128..127 at scale 1 with zero point -28 hold -100..155; with zero point 0 that needs scale 155/127."""
    found = project({"a": var(1.0, zero=-28)}, [binding({"zero": "in0", "eq": 0}, in0="a")])
    assert int(found["a"].zero_point) == 0
    assert float(found["a"].scale) == pytest.approx(155 / 127)


def test_the_nearest_allowed_zero_point_is_taken_by_all_tied_tensors():
    rules = binding({"zero": "in0", "eq": [0, 100]}, {"tie": ("in0", "out")}, in0="a", out="b")
    found = project({"a": var(1.0, zero=80), "b": var(1.0, zero=80)}, [rules])
    assert [int(v.zero_point) for v in found.values()] == [100, 100]


def test_zero_rules_that_exclude_each_other_are_an_error():
    with pytest.raises(UnsupportedError, match="No zero point of 'a'"):
        project(
            {"a": var(1.0)}, [binding({"zero": "in0", "eq": 0}, in0="a"), binding({"zero": "in0", "eq": 1}, in0="a")]
        )


@pytest.mark.parametrize("slope, bound", [(0.5, 256.0), (-0.5, 255.9921875)])
def test_a_rule_may_count_an_attribute_in(slope, bound):
    """-127.99609375 <= slope * s_in / s_out <= 128, so the ratio is at most 256, or 255.99 for a negative slope."""
    rule = Rule(mono={"in0": 1, "out": -1}, times="negative_slope", min=-127.99609375, max=128)
    leaky = Binding(
        op="LeakyRelu", rules=(rule,), slots={"in0": ("a",), "out": ("b",)}, attrs={"negative_slope": slope}
    )
    found = project({"a": var(1000.0), "b": var(1.0)}, [leaky])
    assert float(found["a"].scale / found["b"].scale) == pytest.approx(bound, rel=1e-5)


def test_a_rule_about_a_float_tensor_bounds_nothing():
    wanted = {"a": var(1000.0)}
    assert project(wanted, [binding({"mono": {"in0": 1, "out": -1}, "max": 1.0}, in0="a", out="float_one")]) == wanted


def test_the_rules_that_contradict_each_other_are_named_and_no_others():
    first = binding({"mono": {"in0": 1, "out": -1}, "max": 1.0}, op="Add", in0="a", out="b")
    idle = binding({"mono": {"in0": 1, "out": -1}, "max": 64.0}, op="Mul", in0="b", out="c")
    second = binding({"mono": {"in0": 1, "out": -1}, "min": 2.0}, op="Sub", in0="a", out="b")
    with pytest.raises(UnsupportedError) as e:
        project({n: var(1.0) for n in "abc"}, [first, idle, second])
    assert "Add over 'a', 'b'" in str(e.value) and "Sub over 'a', 'b'" in str(e.value) and "Mul" not in str(e.value)


def test_a_tie_that_breaks_a_bound_is_an_error():
    with pytest.raises(UnsupportedError, match="tied tensors"):
        project(
            {"a": var(1.0), "b": var(1.0)},
            [binding({"tie": ("in0", "out")}, {"mono": {"in0": 1, "out": -1}, "min": 2.0}, in0="a", out="b")],
        )


def test_nothing_to_legalise_is_legal():
    assert project({}, []) == {}


def test_what_is_tied_to_a_dictated_scale_has_it_too():
    """A sigmoid of 1/256 that is joined with two others: all of them, and only they."""
    tie = Rule(tie=("ins", "out"))
    bindings = [
        Binding(op="Sigmoid", rules=(Rule(fix="out", scale=1 / 256, zp=-128),), slots={"in0": ("x",), "out": ("a",)}),
        Binding(op="Concat", rules=(tie,), slots={"ins": ("a", "b", "c"), "out": ("y",)}),
        Binding(op="Add", rules=(), slots={"ins": ("b", "z"), "out": ("s",)}),
    ]
    assert fixed(bindings) == dict.fromkeys(("a", "b", "c", "y"), (1 / 256, -128))


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
    binding = Binding(op="Relu", rules=(rule,), slots={"in0": ("x",), "out": ("y",)})
    found = project({t: stored(grid, torch.tensor(0.5), 0) for t in "xy"}, [binding])
    assert float(found["x"].scale / found["y"].scale) <= 0.25
    assert all(math.log2(float(s.scale)).is_integer() for s in found.values())
