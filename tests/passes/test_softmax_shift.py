"""Logits in the middle of their range take a finer grid, and the softmax does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.softmax_shift import softmax_shift
from tests.steps import begin


def logits_net(low: float, high: float, rows: int = 400) -> tuple[nn.Module, torch.Tensor]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    return net, torch.linspace(low, high, 4 * rows).view(rows, 4)[:, torch.randperm(4)]


def test_logits_from_minus_1_to_15_move_to_plus_and_minus_8():
    net, x = logits_net(-1, 14.8)
    steps = begin(net, x)
    new, stats, notes = softmax_shift(steps.graph, steps.assignment, steps.stats)
    assert notes == [
        "shifted the logits of '0' by -6.9: their step falls from 0.125 to 0.0625"
    ]  # thresholds 16 and 8, 128 codes each
    torch.testing.assert_close(new.weights["0.bias"], torch.full((4,), -6.9))
    logits = new.nodes[0].output
    assert (stats[logits].low, stats[logits].high) == (pytest.approx(-7.9), pytest.approx(7.9))
    (want,), (got,) = run(steps.graph, [x]).values(), run(new, [x]).values()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_the_error_of_the_logits_falls_to_a_quarter():
    net, x = logits_net(-1, 14.8)
    steps = begin(net, x)
    graph, stats, _ = softmax_shift(steps.graph, steps.assignment, steps.stats)
    shifted = steps.decided(graph, stats)
    assert shifted.rounding(graph.nodes[0].output) < 0.3 * steps.rounding(graph.nodes[0].output)


def test_centred_logits_and_formats_with_a_zero_point_stay():
    for (low, high), platform in (((-7, 7.5), "imx500"), ((-1, 14.8), "ort_cpu")):
        net, x = logits_net(low, high)
        steps = begin(net, x, platform)
        new, _, notes = softmax_shift(steps.graph, steps.assignment, steps.stats)
        assert notes == [] and new.nodes == steps.graph.nodes


def test_logits_that_the_model_returns_stay_and_the_note_says_so():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            return y, y.softmax(-1)

    model, (_, x) = Both(), logits_net(-1, 14.8)
    model.linear.load_state_dict(logits_net(-1, 14.8)[0][0].state_dict())
    steps = begin(model, x)
    new, _, notes = softmax_shift(steps.graph, steps.assignment, steps.stats)
    assert new.nodes == steps.graph.nodes and "also read elsewhere" in notes[0]
