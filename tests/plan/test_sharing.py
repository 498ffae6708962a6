"""Which quantizer rounds which tensor: what is tied or only moved is rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.plan.sharing import rounding

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Moves(nn.Module):
    """A convolution's result, moved."""

    def __init__(self, f):
        super().__init__()
        self.conv, self.f = nn.Conv2d(3, 4, 1), f

    def forward(self, x):
        return self.f(self.conv(x))


@pytest.mark.parametrize(
    "f",
    [
        lambda y: y.flatten(1),
        lambda y: y[:, [2, 0]],  # with indices, which have no quantizer
        lambda y: y.transpose(1, 2)[:, 1:],
        lambda y: torch.cat([y, y], 1),
    ],
    ids=["flatten", "gather", "transpose and slice", "concat"],
)
def test_what_is_only_moved_is_not_rounded_again(f):
    result = chipfit.quantize(Moves(f).eval(), [X], "tflite_int8", progress=False)
    found, graph = rounding(result.graph, result.plan), result.graph
    (source,) = (n.output for n in graph.nodes if n.op == "Conv2D")
    (end,) = graph.outputs
    assert end != source and found.owner[end] == found.owner[source] == source
    assert source in found.rounded and end not in found.rounded


def test_what_is_computed_is_rounded_by_its_own():
    result = chipfit.quantize(Moves(torch.tanh).eval(), [X], "tflite_int8", progress=False)
    found = rounding(result.graph, result.plan)
    (end,) = result.graph.outputs
    assert found.owner[end] == end and end in found.rounded and end in found.fixed  # 1/128 on this chip
    assert "conv.bias" in found.products and found.products["conv.bias"] == (result.graph.inputs[0], "conv.weight")
