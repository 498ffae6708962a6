"""From where on data are doubted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.doubts import thin, unlike_training
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node

MEAN, VAR, EPS = torch.tensor([5.0, -70.0, 0.0]), torch.tensor([3.0, 15.0, 0.0]), 1.0  # deviations 2, 4, 1


def said(z):
    """Of data whose channels have the values z [3, values] once they are normalised."""
    model = nn.Sequential(nn.BatchNorm1d(3, eps=EPS)).eval()
    model[0].running_mean.copy_(MEAN)
    model[0].running_var.copy_(VAR)
    x = z * torch.tensor([2.0, 4.0, 1.0]).view(3, 1) + MEAN.view(3, 1)
    return " ".join(unlike_training(capture(model, (x.view(3, -1, 20).transpose(0, 1).contiguous(),))))


def alternating(*sizes, values=2000):
    return torch.tensor(sizes).view(3, 1) * torch.tensor([1.0, -1.0]).repeat(values // 2)


@pytest.mark.parametrize("size, words", [(29.6, ""), (30.4, "is 30.4 times as large as")])
def test_thirty_times_the_deviation_that_was_learned_is_doubted(size, words):
    text = said(alternating(size, size, size))
    assert words in text and bool(text) is bool(words)
    # of all channels together, whatever the sign
    assert bool(said(alternating(0.0, 0.0, size * 3**0.5))) is bool(words)
    assert bool(said(torch.full((3, 2000), -size))) is bool(words)


@pytest.mark.parametrize("times, words", [(29.6, ""), (30.4, "is 30.4 times narrower than")])
def test_a_thirtieth_of_the_deviation_that_was_learned_is_doubted(times, words):
    text = said(alternating(1 / times, 1 / times, 1 / times))
    assert words in text and bool(text) is bool(words)
    assert bool(said(alternating(1.0, 1 / times, 0.0) + 1.0)) is bool(words)  # of the middle channel, about its mean


def test_values_that_never_change_are_no_sign_of_another_scale():
    assert said(torch.ones(3, 2000)) == ""


def test_without_a_batch_norm_that_learned_there_is_nothing_to_compare_with():
    graph = capture(nn.Sequential(nn.Linear(3, 2)).eval(), (torch.full((4, 3), 1e6),))
    assert unlike_training(graph) == []


def stats(name, low, high, count=8):
    return TensorStats(name, low, high, count=count, batches=1)


def test_a_single_sample_and_inputs_of_one_number_are_said():
    graph = Graph([Node("r", "Relu", ("a",), ("y",))], ["a", "b", "c"], ["y"], {}, {})
    seen = {s.name: s for s in (stats("a", 0.5, 0.5), stats("b", 1.0, 2.0), stats("c", 3.0, 3.0), stats("y", 0.5, 0.5))}
    one, never = thin(graph, seen, 1)
    assert "a single sample" in one
    assert never.endswith("one number only: input 'a' was 0.5 throughout, 'c' was 3 throughout")  # and not its readers
    assert thin(graph, {"b": seen["b"]}, 2) == thin(graph, {"a": stats("a", 0.5, 0.5, count=1)}, 2) == []
    assert len(thin(graph, {"a": stats("a", 0.5, 0.5, count=2)}, 2)) == 1
    (dead,) = thin(graph, {"y": seen["y"]}, 0)
    assert dead.endswith("comes from Relu 'r' (0.5)")
