"""From where on data are doubted."""

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data_checks import check_input_scale, check_sample_count
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.ir import Graph, Node
from tests.build import model_of

MEAN, VAR, EPS = torch.tensor([5.0, -70.0, 0.0]), torch.tensor([3.0, 15.0, 0.0]), 1.0  # deviations 2, 4, 1


def said(z):
    """Of data whose channels have the values z [3, values] once they are normalised."""
    model = nn.Sequential(nn.BatchNorm1d(3, eps=EPS)).eval()
    model[0].running_mean.copy_(MEAN)
    model[0].running_var.copy_(VAR)
    x = z * torch.tensor([2.0, 4.0, 1.0]).view(3, 1) + MEAN.view(3, 1)
    return " ".join(check_input_scale(capture(model, (x.view(3, -1, 20).transpose(0, 1).contiguous(),))))


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
    assert check_input_scale(graph) == []


def stats(name, low, high, count=8):
    return TensorStats(name, low, high, count=count, batches=1)


def test_a_single_sample_and_inputs_of_one_number_are_said():
    graph = Graph([Node("r", "Relu", ("a",), ("y",))], ["a", "b", "c"], ["y"], {}, {})
    seen = {s.name: s for s in (stats("a", 0.5, 0.5), stats("b", 1.0, 2.0), stats("c", 3.0, 3.0), stats("y", 0.5, 0.5))}
    one, never = check_sample_count(graph, seen, 1)
    assert "a single sample" in one
    assert never.endswith("a single number: input 'a' was 0.5 throughout, 'c' was 3 throughout")  # and not its readers
    for fine in (seen["b"], stats("a", 0.5, 0.5, count=1)):
        assert check_sample_count(graph, {fine.name: fine}, 2) == []
    assert len(check_sample_count(graph, {"a": stats("a", 0.5, 0.5, count=2)}, 2)) == 1
    (dead,) = check_sample_count(graph, {"y": seen["y"]}, 0)
    assert dead.endswith("comes from Relu 'r' (0.5)")


@pytest.mark.parametrize("values, doubted", [(7, False), (8, True), (9, True)])
def test_fewer_than_eight_values_of_a_channel_tell_no_spread(values, doubted):
    x = torch.arange(values).float()[:, None] * torch.tensor([2e-4, 4e-4, 1e-4]) + MEAN
    model = nn.BatchNorm1d(3, eps=EPS).eval()
    model.running_mean.copy_(MEAN)
    model.running_var.copy_(VAR)
    assert bool(check_input_scale(capture(model, (x,)))) is doubted


def test_the_first_batch_norm_that_learned_is_looked_at_with_what_reaches_it():
    """100 z, where z has a mean square of 1: as the second learned a deviation of 1, or of 100."""
    parts = nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3, eps=1e-30), nn.BatchNorm1d(3)
    parts[2].running_mean.fill_(1e6)  # it would be doubted
    model = model_of(lambda m, x: m.third(m.second(m.first(x) * 100)), **dict(zip(("first", "second", "third"), parts)))
    x = torch.tensor([[1.0], [-1.0]]).repeat(10, 3)
    (text,) = check_input_scale(capture(model, (x,)))
    assert text.startswith("warning: the input of batch norm 'second' is 100 times as large as the statistics that it")
    model.second.running_var.fill_(100.0**2)
    assert check_input_scale(capture(model, (x,))) == []


def test_a_graph_without_an_example_is_not_doubted():
    graph = capture(nn.BatchNorm1d(3).eval(), (torch.full((20, 3), 1e6),))
    assert check_input_scale(graph)
    graph.example = ()
    assert check_input_scale(graph) == []


@pytest.mark.parametrize(
    "count, end", [(1, "'r0' (0.5)"), (4, "'r3' (0.5)"), (5, "'r3' (0.5) and 1 more"), (6, "2 more")]
)
def test_of_many_layers_that_never_change_four_are_named(count, end):
    nodes = [Node(f"r{k}", "Relu", ("a",), (f"y{k}",)) for k in range(count)]
    graph = Graph(nodes, ["a"], ["y0"], {}, {})
    (text,) = check_sample_count(graph, {f"y{k}": stats(f"y{k}", 0.5, 0.5) for k in range(count)}, 9)
    assert text.endswith(end) and text.count("Relu") == min(count, 4)
    assert text.startswith("warning: the same number on all calibration data comes from Relu 'r0' (0.5)")


def test_zeros_that_a_network_starts_from_are_not_doubted():
    nodes = [
        Node("n", "Size", ("a",), ("n",), {"axis": 0}),
        Node("zeros", "Expand", ("zero", "n"), ("zeros",)),
        Node("decayed", "Mul", ("zeros", "a"), ("decayed",)),
        Node("r", "Relu", ("a",), ("r",)),
    ]
    graph = Graph(nodes, ["a"], ["r"], {}, {"zero": torch.zeros(1)})
    known = {name: stats(name, 0.0, 0.0) for name in ("zeros", "decayed", "r")}
    (text,) = check_sample_count(graph, known, 9)
    assert text.endswith("comes from Relu 'r' (0)")
