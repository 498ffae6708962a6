"""Models that take whatever arguments they are given are captured with a free batch, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 8)

    def forward(self, *xs):
        return self.dense(xs[0]) + xs[1]


class Keywords(Positional):
    def forward(self, **named):
        return self.dense(named["x"]) + named["y"]


class Both(Positional):
    def forward(self, x, *, scale=2.0, **named):
        return self.dense(x) * scale + named["y"]


@pytest.mark.parametrize(("model", "named"), [(Positional, False), (Keywords, True), (Both, True)])
def test_open_signatures(model, named):
    x, y = torch.randn(64, 8), torch.randn(64, 8)
    batch = lambda rows: {"x": x[:rows], "y": y[:rows]} if named else (x[:rows], y[:rows])

    network = model().eval()
    result = chipfit.quantize(network, [batch(64)], progress=False)
    assert result.graph.values[result.graph.inputs[0]].shape == (None, 8)
    other = batch(7)
    run = lambda m: m(**other) if named else m(*other)
    assert (run(result.model) - run(network)).abs().max() < 0.2
    assert result.verify([other]).exact


def test_a_tensor_given_twice_is_two_inputs():
    class Difference(nn.Module):
        def forward(self, x, y):
            return 2 * x - y

    x = torch.randn(3, 4)
    graph = capture(Difference(), (x, x))
    assert torch.equal(run(graph, [x, 3 * x])[graph.outputs[0]], 2 * x - 3 * x)
