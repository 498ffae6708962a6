"""Logits in the middle of their range take a finer grid, and the softmax does not notice."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.passes.softmax_shift import softmax_shift
from tests.build import model_of, set_layer
from tests.steps import assert_same, begin

X = torch.linspace(-1, 14.8, 1600).view(400, 4)[:, torch.randperm(4)]


def identity() -> nn.Linear:
    return set_layer(nn.Linear(4, 4), torch.eye(4))


def shifted(model: nn.Module, x: torch.Tensor = X, platform: str = "imx500"):
    """Return the steps, the graph with shifted logits, its statistics and the notes."""
    steps = begin(model, x, platform)
    return steps, *softmax_shift(steps.graph, steps.assignment, steps.stats)


LOGITS = nn.Sequential(identity(), nn.Softmax(-1))


def test_logits_from_minus_1_to_15_move_to_plus_and_minus_8():
    steps, new, stats, notes = shifted(LOGITS)
    # thresholds 16 and 8, 128 steps each
    assert notes == ["shifted the logits of '0' by -6.9: their step falls from 0.125 to 0.0625"]
    torch.testing.assert_close(new.weights["0.bias"], torch.full((4,), -6.9))
    logits = new.nodes[0].output
    assert (stats[logits].low, stats[logits].high) == (pytest.approx(-7.9), pytest.approx(7.9))
    assert_same(steps.graph, new, X, rtol=1e-4, atol=1e-6)
    assert steps.decided(new, stats).rounding(logits) < 0.3 * steps.rounding(logits)  # about a quarter


@pytest.mark.parametrize("x, platform", [((X - 6.9) * 0.9 + 0.2, "imx500"), (X, "ort_cpu")])
def test_centred_logits_and_formats_with_a_zero_point_stay(x, platform):
    steps, new, _, notes = shifted(LOGITS, x, platform)
    assert notes == [] and new.nodes == steps.graph.nodes


@pytest.mark.parametrize("second", [nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_a_refusal_ends_nothing_and_both_kinds_of_softmax_are_found(second):
    net = model_of(lambda m, x: (y := m.a(x), y.softmax(-1), m.last(m.b(x))), a=identity(), b=identity(), last=second)
    steps, new, _, notes = shifted(net)  # which returns the logits of a
    assert notes[0] == "the logits of 'a' are not shifted: its logits are also read elsewhere"
    assert notes[1].startswith("shifted the logits of 'b' by -6.9: ") and len(notes) == 2
    assert new.weights["a.bias"] is steps.graph.weights["a.bias"]
    torch.testing.assert_close(new.weights["b.bias"], torch.full((4,), -6.9))


def test_a_bias_that_is_read_elsewhere_stays_there():
    net = model_of(lambda m, x: m.linear(x).softmax(-1) + m.linear.bias, linear=identity())
    _, new, _, notes = shifted(net)
    assert len(notes) == 1 and "shifted the logits of 'linear'" in notes[0]
    assert torch.equal(new.weights["linear.bias_operand"], net.linear.bias)
    assert not torch.equal(new.weights["linear.bias"], net.linear.bias)


@pytest.mark.parametrize("missing", ["tensors", "stats"])
def test_logits_that_are_not_stored_or_not_seen_are_passed_over(missing):
    steps = begin(LOGITS, X)
    logits, slots, stats = steps.graph.nodes[0].output, dict(steps.assignment.tensors), dict(steps.stats)
    del {"tensors": slots, "stats": stats}[missing][logits]
    new, after, notes = softmax_shift(steps.graph, replace(steps.assignment, tensors=slots), stats)
    assert (new.nodes, after, notes) == (steps.graph.nodes, stats, [])


def test_what_makes_logits_without_a_bias_to_move_is_passed_over():
    steps, new, _, notes = shifted(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Softmax(-1)))
    assert new.nodes == steps.graph.nodes and notes == []
