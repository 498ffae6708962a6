"""Logits in the middle of their range take a finer grid, and the softmax does not notice."""

from __future__ import annotations

from dataclasses import replace

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


class Two(nn.Module):
    """Two softmaxes behind linear layers of one kind, of which the model returns the first one's logits."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.a, self.b, self.last = logits_net(-1, 14.8)[0][0], logits_net(-1, 14.8)[0][0], second

    def forward(self, x):
        y = self.a(x)
        return y, y.softmax(-1), self.last(self.b(x))


@pytest.mark.parametrize("second", [nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_a_refusal_ends_nothing_and_both_kinds_of_softmax_are_found(second):
    steps = begin(Two(second), logits_net(-1, 14.8)[1])
    new, _, notes = softmax_shift(steps.graph, steps.assignment, steps.stats)
    assert notes[0] == "the logits of 'a' are not shifted: its logits are also read elsewhere"
    assert notes[1].startswith("shifted the logits of 'b' by -6.9: ") and len(notes) == 2
    assert new.weights["a.bias"] is steps.graph.weights["a.bias"]
    torch.testing.assert_close(new.weights["b.bias"], torch.full((4,), -6.9))


def test_a_bias_that_is_read_elsewhere_stays():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = logits_net(-1, 14.8)[0][0]

        def forward(self, x):
            return self.linear(x).softmax(-1) + self.linear.bias

    steps = begin(Net(), logits_net(-1, 14.8)[1])
    new, _, notes = softmax_shift(steps.graph, steps.assignment, steps.stats)
    assert notes == ["the logits of 'linear' are not shifted: 'linear.bias' is read by several operators"]
    assert new.nodes == steps.graph.nodes


@pytest.mark.parametrize("missing", ["tensors", "stats"])
def test_logits_that_are_not_stored_or_not_seen_are_passed_over(missing):
    net, x = logits_net(-1, 14.8)
    steps = begin(net, x)
    logits, slots, stats = steps.graph.nodes[0].output, dict(steps.assignment.tensors), dict(steps.stats)
    del {"tensors": slots, "stats": stats}[missing][logits]
    new, after, notes = softmax_shift(steps.graph, replace(steps.assignment, tensors=slots), stats)
    assert (new.nodes, after, notes) == (steps.graph.nodes, stats, [])


def test_what_makes_logits_without_a_bias_to_move_is_passed_over():
    steps = begin(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Softmax(-1)), logits_net(-1, 14.8)[1])
    new, _, notes = softmax_shift(steps.graph, steps.assignment, steps.stats)
    assert new.nodes == steps.graph.nodes and notes == []
