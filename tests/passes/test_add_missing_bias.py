"""Biases of zero where the platform can hold them."""

import pytest
import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.add_missing_bias import add_missing_bias
from chipfit.platform.load import load
from chipfit.platform.schema import Format, OpRule, Option, Platform
from tests.steps import captured


def test_every_operator_gets_a_bias_of_its_width_and_nothing_changes():
    first, second = nn.Conv2d(3, 4, 3, bias=False), nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False)
    net, x = nn.Sequential(first, second, nn.Flatten(), nn.Linear(216, 5, bias=False)), torch.randn(2, 3, 7, 7)
    graph = captured(net, x)
    new, notes = add_missing_bias(graph, load("imx500"))
    added = {k: v.tolist() for k, v in new.weights.items() if k not in graph.weights}
    assert added == {"0.bias": [0.0] * 4, "1.bias": [0.0] * 6, "3.bias": [0.0] * 5}
    assert added.keys() <= new.trainable and notes == []
    torch.testing.assert_close(*run(graph, [x]).values(), *run(new, [x]).values())
    assert add_missing_bias(new, load("imx500"))[0].nodes == new.nodes


@pytest.mark.parametrize("none", [None, "none"])
def test_an_operator_whose_kernel_holds_no_bias_stays_without_and_a_note_says_so(none):
    """And one that the chip does not run stays too, in float."""
    formats = {"a8": Format(bits=8, zero="any"), "w8": Format(bits=8, range="narrow"), "b32": Format(bits=32)}
    rules = {"Conv2D": "b32", "Linear": none}
    uses = {op: Option(in_="a8", w="w8", b=b, out="a8") for op, b in rules.items()}
    ops = tuple(OpRule(match=(op,), use=(use,), src=("M",), conf="V") for op, use in uses.items())
    chip = Platform(name="paper", formats=formats, ops=ops, sources={"M": "paper"})
    layers = nn.Conv2d(2, 3, 1, bias=False), nn.ConvTranspose2d(3, 2, 1, bias=False), nn.Linear(4, 2, bias=False)
    new, notes = add_missing_bias(captured(nn.Sequential(*layers), torch.randn(2, 2, 4, 4)), chip)
    assert [n.bias for n in new.nodes] == ["0.bias", None, None]
    assert notes == ["'2' gets no bias: 'paper' has none for Linear"]
