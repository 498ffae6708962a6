"""Which joint formats a platform leaves for an operator, and which of them is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.decide.options import first_fitting, usable
from chipfit.decide.units import find_units
from chipfit.errors import UnsupportedError
from chipfit.frameworks.torch.capture import capture
from chipfit.platform.schema import Format, OpRule, Option, Platform
from tests.steps import captured

A8_W8 = Option(in_="a8", w="w8", out="a8")
A8_W4 = Option(in_="a8", w="w4", out="a8")
A16_W8 = Option(in_="a16", w="w8", out="a16")
W4 = Option(in_="float", w="w4", out="float")  #: only weights are codes
NOTHING = Option(in_="float", w="float", out="float")

CHIP = Platform(
    name="paper",
    formats={
        "a8": Format(bits=8, zero="any"),
        "same8": Format(bits=8, zero="any"),
        "pot8": Format(bits=8, zero="any", scale="pot"),
        "u8": Format(bits=8, zero="any", signed=False),
        "a16": Format(bits=16),
        "w8": Format(bits=8, per="channel"),
        "w4": Format(bits=4, per="channel"),
    },
    ops=(
        OpRule(match=("Conv2D",), use=(NOTHING, A8_W8, A8_W4, A16_W8, W4), src=("M",), conf="V"),
        OpRule(match=("Add",), use=(Option(in_=("a8", "a16"), out="a16"),), src=("M",), conf="V"),
    ),
)


def unit(choices):
    """A convolution about which the user says `choices`."""
    graph = captured(nn.Conv2d(2, 2, 1), torch.randn(1, 2, 3, 3))
    first = find_units(graph, CHIP, (), {graph.nodes[0].name: choices})[0]
    return usable(graph, CHIP, first, {})


@pytest.mark.parametrize(
    "choices, left",
    [
        ({}, [A8_W8, A8_W4, A16_W8, W4]),  # the one without any code is none
        ({"bits": 8}, [A8_W8, A16_W8]),
        ({"bits": 4}, [A8_W4, W4]),
        ({"activation_bits": 16}, [A16_W8, W4]),  # weights alone have no activation bits
        ({"activation_bits": 8, "bits": 4}, [A8_W4, W4]),
        ({"float": "by hand"}, []),
    ],
)
def test_what_the_user_says_about_bits_leaves_the_options_that_have_them(choices, left):
    assert list(unit(choices).resolved.options) == left


@pytest.mark.parametrize(
    "choices, allowed",
    [({"bits": 16}, "4, 8 bits"), ({"bits": 5}, "4, 8 bits"), ({"bits": 8, "activation_bits": 4}, "8, 16 bits")],
)
def test_bits_that_no_option_has_are_refused_with_those_that_some_have(choices, allowed):
    with pytest.raises(UnsupportedError, match=allowed):
        unit(choices)


@pytest.mark.parametrize(
    "have, taken",
    [
        (None, A8_W8),
        ("a8", A8_W8),
        ("same8", A8_W8),  # another name, the same storage
        ("a16", A16_W8),
        ("pot8", W4),  # stored in another way: only the kernel that reads floats can take it
        ("u8", W4),
    ],
)
def test_the_first_option_that_reads_its_input_as_it_is_stored_is_taken(have, taken):
    u = unit({})
    (value,) = u.data
    assert first_fitting(CHIP, u, {value: have} if have else {}) == taken


@pytest.mark.parametrize("have, fits", [(("a8", "a16"), True), (("a16", "a8"), False), (("a8", "a8"), False)])
def test_every_operand_has_a_word_of_its_own(have, fits):
    class Two(nn.Module):
        def forward(self, a, b):
            return a + b

    graph = capture(Two().eval(), (torch.randn(1, 2), torch.randn(1, 2)), {})
    (add,) = find_units(graph, CHIP, (), {})
    assert (first_fitting(CHIP, add, dict(zip(graph.inputs, have, strict=True))) is not None) is fits


def test_free_widths_begin_at_one():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1)).eval()
    with pytest.raises(UnsupportedError, match=r"Allowed: 1, 2, 3, .*, 15, 16 bits"):
        chipfit.quantize(
            model, [torch.randn(2, 3, 4, 4)], "mqbench_academic", overrides={"1": {"bits": 17}}, progress=False
        )


@pytest.mark.parametrize("overrides, scale", [({}, 1 / 256), ({"*": {"activation_bits": 16}}, 1 / 65536)])
def test_rules_for_eight_bits_hold_where_nobody_asks_for_others(overrides, scale):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid()).eval(), torch.randn(2, 3, 4, 4)
    plan = chipfit.quantize(model, [x], "qnn_htp", overrides=overrides, progress=False).plan
    assert float(plan["sigmoid"].scale) == scale and "sigmoid" in plan.fixed
