"""Legality: the projected scales satisfy every rule, and scales that were legal do not move."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chipfit.errors import UnsupportedError
from chipfit.platform.legality import Binding, Var, fixed, project, rows, tie_groups
from chipfit.platform.load import load, names
from chipfit.platform.match import resolve
from chipfit.platform.schema import Rule
from chipfit.quantizers.grids import Grid

#: operator, inputs, weight, output: a small network with everything that rules speak of
NET = [
    ("Conv2D", ["x"], "w1", "y1"), ("Add", ["y1", "x"], None, "y2"), ("Mul", ["y2", "y1"], None, "y3"),
    ("Concat", ["y2", "y3"], None, "y4"), ("MaxPool", ["y4"], None, "y5"), ("Linear", ["y5"], "w2", "y6"),
    ("LeakyRelu", ["y6"], None, "y7"), ("Sigmoid", ["y7"], None, "y8"), ("Softmax", ["y6"], None, "y9"),
]  # fmt: skip


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
        bindings.append(Binding(op=op, rules=found.rules, slots={k: tuple(v) for k, v in slots.items()}, attrs={"negative_slope": 0.1}))
    return bindings, grids


def variables(grids, scales):
    out = {}
    for (name, grid), s in zip(sorted(grids.items()), scales, strict=False):
        shape = (2,) if grid.per == "channel" and name.startswith("w") else ()
        s = 2.0 ** round(math.log2(s)) if grid.pot else max(s, grid.scale_min or 0)
        scale = torch.full(shape, s, dtype=torch.float32)
        if shape:
            scale[1] /= 128
            scale = scale.clamp_min(grid.scale_min or 0)
        out[name] = Var(scale=scale, zero_point=torch.zeros(shape, dtype=torch.int32), grid=grid)
    return out


def check(found, bindings):
    """Every hard rule, tested with plain arithmetic."""
    for group in tie_groups(bindings):
        scales = [found[t] for t in sorted(group) if t in found]
        assert all(torch.equal(v.scale, scales[0].scale) and torch.equal(v.zero_point, scales[0].zero_point) for v in scales)
    for t, (scale, zero) in fixed(bindings).items():
        if t in found:
            assert float(found[t].scale) == pytest.approx(scale) and int(found[t].zero_point) == zero
    for row, low, high, rule in rows(bindings, {t: v.scale.numel() for t, v in found.items()}):
        total = sum(e * math.log2(float(found[t].scale.reshape(-1)[c])) for (t, c), e in row.items())
        assert low - 1e-5 <= total <= high + 1e-5, rule
    for v in found.values():
        assert (v.scale > 0).all()
        if v.grid.pot:
            assert np.array_equal(np.log2(v.scale.numpy()), np.rint(np.log2(v.scale.numpy())))
        if v.grid.scale_min:
            assert (v.scale >= v.grid.scale_min * (1 - 1e-6)).all()


@pytest.mark.parametrize("name", names())
@settings(max_examples=4, deadline=None, derandomize=True)
@given(scales=st.lists(st.floats(2.0**-11, 1.0), min_size=12, max_size=12))
def test_projected_scales_satisfy_every_rule_and_then_stay(name, scales):
    bindings, grids = bind(name)
    found = project(variables(grids, scales), bindings)
    check(found, bindings)
    again = project(found, bindings)
    assert all(torch.equal(again[t].scale, found[t].scale) for t in found)


def test_legal_scales_do_not_move():
    grid = Grid(bits=8, qmin=-128, qmax=127, zero="any")
    ratio = Binding(op="Add", rules=(Rule(mono={"in0": 1, "out": -1}, min=2.0**-10, max=256.0),), slots={"in0": ("a",), "out": ("b",)})
    wanted = {
        n: Var(scale=torch.tensor(s), zero_point=torch.tensor(3, dtype=torch.int32), grid=grid) for n, s in (("a", 0.0371), ("b", 0.021))
    }
    found = project(wanted, [ratio])
    assert all(torch.equal(found[n].scale, wanted[n].scale) for n in wanted)


def test_the_least_change_is_taken():
    """a / b <= 1 with a = 4, b = 1: in log2 the ratio is 2 too large, so the total move is 2."""
    grid = Grid(bits=8, qmin=-128, qmax=127, zero="any")
    rule = Binding(op="Add", rules=(Rule(mono={"in0": 1, "out": -1}, max=1.0),), slots={"in0": ("a",), "out": ("b",)})
    wanted = {n: Var(scale=torch.tensor(s), zero_point=torch.tensor(0, dtype=torch.int32), grid=grid) for n, s in (("a", 4.0), ("b", 1.0))}
    found = project(wanted, [rule])
    moved = sum(abs(math.log2(float(found[n].scale)) - math.log2(float(wanted[n].scale))) for n in wanted)
    assert moved == pytest.approx(2, abs=1e-5)


def test_rules_that_contradict_each_other_are_an_error():
    grid = Grid(bits=8, qmin=-128, qmax=127)
    rules = (Rule(mono={"in0": 1}, max=1.0), Rule(mono={"in0": 1}, min=2.0))
    wanted = {"a": Var(scale=torch.tensor(1.0), zero_point=torch.tensor(0, dtype=torch.int32), grid=grid)}
    with pytest.raises(UnsupportedError, match="No scales satisfy"):
        project(wanted, [Binding(op="Add", rules=rules, slots={"in0": ("a",)})])
