"""What the projection makes of scales that break a rule, where only one answer is nearest."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.constraints import ProductBound
from chipfit.decide.legality import _Problem, project
from chipfit.platform.schema import Format, OpRule, Option, Platform, Rule
from tests.decide.test_legality import ANY, POT, constraint, var

#: the multiplier s_in s_w / s_out
REQUANT = {"in0": 1, "w": 1, "out": -1}
FIXED = [{"fix": "in0", "scale": 0.5, "zp": 0}, {"fix": "out", "scale": 0.25, "zp": 0}]

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
    "tied": ([{"tie": ["in0", "out"]}, {"mono": REQUANT, "max": 1.0}], POT, (0.5, 8.0, 2.0), (0.5, 1.0, 0.5)),
    "preferred only": ([{"mono": REQUANT, "max": 1.0, "hard": False}], POT, (8.0, 8.0, 1.0), (8.0, 8.0, 1.0)),
    "legal": ([{"mono": REQUANT, "max": 1.0}], POT, (0.5, 0.5, 1.0), (0.5, 0.5, 1.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_nearest_legal_scales(case):
    rules, grid, wanted, legal = CASES[case]
    names = dict(zip(("x", "w", "y"), wanted, strict=True))
    found = project(
        {n: var(s, grid) for n, s in names.items()}, [constraint(*rules, op="Conv2D", in0="x", w="w", out="y")]
    )
    assert [float(found[n].scale) for n in names] == pytest.approx(legal, rel=1e-5)


def platform(*rules: dict, **fmt) -> Platform:
    """A chip whose linear layers and joins obey these rules."""
    option = {"Linear": Option(in_="a8", w="w8", out="a8"), "Concat": Option(in_="a8", out="a8")}
    return Platform(
        name="paper",
        formats={"a8": Format(bits=8, **fmt), "w8": Format(bits=8, range="narrow", scale="pot")},
        ops=tuple(
            OpRule(
                match=(op,),
                use=(o,),
                rules=tuple(Rule(**r) for r in rules if op == "Linear" or "tie" in r),
                src=("M",),
                conf="V",
            )
            for op, o in option.items()
        ),
    )


def test_a_network_is_planned_with_legal_scales():
    """|x| <= 6 and y = x want 2^-4, w = 1 wants 2^-6 (127 of them are 1.98); w s_in / s_out <= 2^-8 leaves w 2^-8."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 1.0)
    x = torch.tensor([[-6.0], [6.0]])
    both = [{"fix": "in0", "scale": 2**-4, "zp": 0}, {"fix": "out", "scale": 2**-4, "zp": 0}]
    bound = {"mono": REQUANT, "max": 2**-8}
    for rules, w in ((both, 2**-6), ([*both, bound], 2**-8)):
        plan = chipfit.quantize(
            layer.eval(),
            [x],
            platform(*rules, scale="pot"),
            rule="no_clipping",
            weight_rule="no_clipping",
            progress=False,
        ).plan
        assert float(plan["weight"].scale) == w


def test_joined_tensors_share_the_union_of_their_ranges():
    """[-1, 2] and [-3, 1] make [-3, 2]: 5 / 255 a step, and 153 codes of the 255 below zero."""

    class Join(nn.Module):
        def forward(self, a, b):
            return torch.cat([a, b], 1)

    a, b = torch.tensor([[-1.0], [2.0]]), torch.tensor([[-3.0], [1.0]])
    for rules, scales in (((), (3 / 255, 4 / 255, 5 / 255)), (({"tie": ["ins", "out"]},), (5 / 255,) * 3)):
        plan = chipfit.quantize(
            Join().eval(), [(a, b)], platform(*rules, zero="any"), rule="no_clipping", progress=False
        ).plan
        found = [plan[n] for n in ("a", "b", "cat")]
        assert [float(s.scale) for s in found] == pytest.approx(scales)
    assert [int(s.zero_point) for s in found] == [-128 + 153] * 3


@pytest.mark.parametrize(
    "low, high, holds",
    [(-1, 0.5, True), (-0.5, 1, True), (-1, 0, True), (0, 0, True), (0.5, 1, False), (-1, -0.5, False)],
)
def test_without_anything_to_move_bounds_hold_or_there_is_no_answer(low, high, holds):
    """A scale of 1, of which log2 is 0."""
    row = ProductBound(op="Conv2D", terms=(("x", 1),), low=low, high=high, rule=Rule(mono={"in0": 1}, max=1.0))
    problem = _Problem({"x": np.zeros(())}, set(), {}, [row])
    assert problem.solve([row], ()) == ({} if holds else None)
