"""A bound on the sum of a channel's codes is in the plan where the codes could exceed it, and there alone."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Format, OpRule, Option, Platform, Rule

CHIP = Platform(
    name="paper",
    formats={"a8": Format(bits=8, zero="any"), "w8": Format(bits=8, range="narrow", per="channel")},
    ops=(
        OpRule(
            match=("Linear", "Conv2D"),
            use=(Option(in_="a8", w="w8", out="a8"),),
            rules=(Rule(wsum_max=508),),
            src=("M",),
            conf="V",
        ),
    ),
    sources={"M": "paper"},
)


def test_sums_that_no_codes_can_exceed_are_left_out_of_the_plan():
    """508 is 4 times 127: of 3 and 4 inputs a channel cannot exceed it, of 5, and of a 1 x 5 window, it can."""
    torch.manual_seed(0)
    layers = [nn.Linear(n, m) for n, m in ((3, 4), (4, 5), (5, 8))]
    net = nn.Sequential(*layers, nn.Unflatten(1, (1, 1, 8)), nn.Conv2d(1, 2, (1, 4)), nn.Conv2d(2, 1, (1, 5)))
    result = chipfit.quantize(net.eval(), [torch.randn(8, 3)], platform=CHIP, progress=False)
    assert dict(result.plan.sums) == {"2.weight": 508, "5.weight": 508}
    for name in result.plan.tensors:
        if name.endswith("weight"):
            codes = result.plan[name].quantize(result.graph.weights[name])
            assert int(codes.abs().flatten(1).sum(1).max()) <= 508


def with_rules(*rules: Rule) -> Platform:
    return CHIP.model_copy(update={"ops": (CHIP.ops[0].model_copy(update={"rules": rules}),)})


def quantized(platform: Platform) -> chipfit.Result:
    """One channel of five ones, whose codes are 127 each unless the scale grows."""
    net = nn.Linear(5, 1)
    nn.init.ones_(net.weight)
    return chipfit.quantize(net.eval(), [torch.randn(8, 5)], platform=platform, progress=False)


def codes(result: chipfit.Result) -> list[int]:
    return result.plan["weight"].quantize(result.graph.weights["weight"])[0].tolist()


def test_a_sum_that_other_rules_make_too_large_again_is_refused():
    small = Rule(mono={"w": 1}, max=1 / 127)
    says = "The quantized values of 'weight' sum to more than 508, and other rules forbid a larger scale. Got: 635."
    with pytest.raises(UnsupportedError, match=re.escape(says)):
        quantized(with_rules(Rule(wsum_max=508), small))
    assert codes(quantized(with_rules(Rule(wsum_max=635), small))) == [127] * 5


def test_a_bound_that_is_only_preferred_moves_no_scale():
    assert codes(quantized(with_rules(Rule(wsum_max=508, hard=False)))) == [127] * 5
    assert sum(codes(quantized(CHIP))) <= 508
