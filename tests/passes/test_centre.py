"""Centring: tensors of mean 0 in every channel, and the same network."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import Need, collect
from chipfit.decide import statistics
from chipfit.passes.centre import centre, with_means
from tests.build import model_of, set_layer
from tests.steps import Steps, assert_same, begin


def centred(model: nn.Module, x: torch.Tensor, platform: str = "ort_cpu") -> tuple[Steps, Steps, list[str]]:
    """Before, after (without histograms), and what is said."""
    steps = begin(model, x, platform)
    needs = with_means(steps.graph, statistics.needs(steps.assignment))
    stats = collect(steps.graph, [[x]], tensors=needs)
    graph, new, notes = centre(steps.graph, steps.assignment, stats)
    return steps, steps.decided(graph, new), notes


def means(steps: Steps, name: str) -> torch.Tensor:
    x = steps.float(name)[-1]
    return x.mean([k for k in range(x.dim()) if k != 1])


def same(before: Steps, after: Steps, *inputs: torch.Tensor) -> None:
    for x in inputs:
        assert_same(before.graph, after.graph, x)


def test_a_pair_of_linear_layers_on_paper():
    """x = 1, 3: the first gives 2 x + 5 = 7, 11 of mean 9; the second -x + 1. b1' = 5 - 9, b2' = 1 - 9."""
    net = nn.Sequential(set_layer(nn.Linear(1, 1), [2.0], 5.0), set_layer(nn.Linear(1, 1), [-1.0], 1.0))
    before, after, notes = centred(net, torch.tensor([[1.0], [3.0]]))
    assert (after.graph.weights["0.bias"].item(), after.graph.weights["1.bias"].item()) == (-4.0, -8.0)
    assert after.float()[0].flatten().tolist() == before.float()[0].flatten().tolist() == [-6.0, -10.0]
    seen = after.stats[before.graph.nodes[0].output]
    assert (seen.low, seen.high, seen.mean.item(), seen.histogram) == (-2.0, 2.0, 0.0, None)
    assert notes[0] == "centred the result of '0' by at most 9"


def bottlenecks(m, x):
    """Narrow tensors that are read by 1x1 convolutions and added up, and one that is padded."""
    a = m.first(x)
    b = a + m.narrow(torch.relu(m.wide(a)))  # a has a reader of its own, the convolution's result none
    c = m.beside(x) + m.again(b) + b
    return m.last(c)


def test_the_shift_of_a_sum_is_that_of_its_operands_and_every_stored_sum_is_centred():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 7, 7) + 1
    layers = {"first": nn.Conv2d(3, 4, 3), "wide": nn.Conv2d(4, 8, 1, groups=2), "last": nn.Conv2d(4, 2, 1)}
    layers |= {"narrow": nn.Conv2d(8, 4, 3, padding=1), "again": nn.Conv2d(4, 4, 1), "beside": nn.Conv2d(3, 4, 3)}
    before, after, notes = centred(model_of(bottlenecks, **layers), x)
    same(before, after, x, torch.randn(4, 3, 7, 7) * 5)
    read = {n.data for n in before.graph.nodes if n.display_name in ("wide", "again", "last")}
    assert len(read) == 3
    for name in read:
        assert float(means(before, name).abs().max()) > 0.05 and float(means(after, name).abs().max()) < 1e-5
    assert sum(n.startswith("centred") for n in notes) == 4


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_every_position_of_a_kernel_takes_the_mean(groups):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 3, stride=2, groups=groups)).eval()
    x = torch.randn(4, 3, 7, 7) + 1
    before, after, notes = centred(net, x)
    assert notes[0].startswith("centred the result of '0'")
    same(before, after, x, torch.randn(2, 3, 7, 7) * 5)


def test_the_operand_that_can_takes_the_rest_of_the_mean():
    torch.manual_seed(1)
    x = torch.randn(8, 2, 5, 5)
    layers = {"a": nn.Conv2d(2, 3, 1), "b": nn.Conv2d(3, 3, 3, padding=1), "c": nn.Conv2d(3, 2, 1)}
    before, after, _ = centred(model_of(lambda m, x: m.c((y := torch.relu(m.a(x))) + m.b(y)), **layers), x)
    same(before, after, x, torch.randn(3, 2, 5, 5) * 4)
    (total,) = (n.output for n in before.graph.nodes if n.op == "Add")
    assert float(means(before, total).abs().max()) > 0.05 and float(means(after, total).abs().max()) < 1e-5
    relu = next(n.output for n in before.graph.nodes if n.op == "Relu")
    assert torch.equal(means(before, relu), means(after, relu))


@pytest.mark.parametrize(
    "second, why",
    [
        (nn.Conv2d(4, 2, 3, padding=1), "Conv2D '1' would need another bias at every position"),
        (nn.ConvTranspose2d(4, 2, 3), "TransposeConv2D '1' would need another bias at every position"),
        (nn.Conv2d(4, 2, 1, bias=False), "'1' has no bias"),
        (nn.Sigmoid(), "Sigmoid '1' reads it"),
    ],
)
def test_what_cannot_be_centred_says_why(second, why):
    torch.manual_seed(0)
    before, after, notes = centred(nn.Sequential(nn.Conv2d(3, 4, 1), second).eval(), torch.randn(2, 3, 5, 5))
    assert notes[0] == f"the result of '0' is not centred: {why}"
    unstored = replace(before.assignment, tensors={})
    assert centre(before.graph, unstored, before.stats)[2] == []  # of what is not stored nothing is said
    assert all(torch.equal(w, after.graph.weights[k]) for k, w in before.graph.weights.items())


def test_padding_that_was_ignored_would_be_seen(monkeypatch):
    """The check notices: a padded reader that is taken for an unpadded one changes the network at its border."""
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 3, padding=1)).eval()
    x = torch.randn(2, 3, 5, 5) + 1
    steps = begin(net, x, "ort_cpu")
    first = steps.graph.nodes[0].output
    monkeypatch.setattr("chipfit.passes.centre.why_not_centred", lambda graph, readers: {first: ""})
    _, after, _ = centred(net, x)
    with pytest.raises(AssertionError):
        same(steps, after, x)


def test_what_the_model_returns_and_what_lies_on_another_axis_stays():
    steps, _, notes = centred(nn.Linear(2, 2), torch.randn(3, 2))
    (node,) = steps.graph.nodes
    assert notes == [f"the result of 'linear' is not centred: '{node.output}' is an output of the model"]
    sequences = centred(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.randn(3, 4, 2))[2]
    assert sequences[0] == "the result of '0' is not centred: the channels of '0' are not on axis 1"


def test_a_bias_that_is_shared_takes_no_constant():
    net = model_of(lambda m, x: m.c(m.b(m.a(m.a(x)))), **{k: nn.Linear(2, 2) for k in "abc"})
    notes = centred(net, torch.randn(5, 2) + 1)[2]
    assert notes[:2] == ["the result of 'a' is not centred: 'a.weight' is read by several operators"] * 2
    assert notes[2].startswith("centred the result of 'b' by at most ")


def test_a_sum_of_what_cannot_lose_anything_stays():
    layers = {"a": nn.Linear(2, 2, bias=False), "last": nn.Linear(2, 2)}
    notes = centred(model_of(lambda m, x: m.last(m.a(x) + x), **layers), torch.randn(5, 2) + 1)[2]
    assert "the result of 'add' is not centred: no operand of the sum can lose anything" in notes
    assert not any(n.startswith("centred") for n in notes)


def test_channels_are_asked_for_of_what_can_be_centred():
    steps = begin(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)).eval(), torch.randn(3, 2), "ort_cpu")
    first, last = (n.output for n in steps.graph.nodes)
    needs = with_means(steps.graph, {first: Need(), last: Need()})
    assert needs == {first: Need(histogram=True, channel_axis=1), last: Need()}
