"""Clipped activations get a power of two as their bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.relu_bound import relu_bound_to_power_of_two
from tests.steps import begin, captured


def test_relu6_becomes_a_clamp_at_8_and_the_weights_around_it_take_the_factor():
    x = torch.randn(2, 3, 6, 6) * 5
    graph = captured(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1)), x)
    new, notes = relu_bound_to_power_of_two(graph)
    clip = next(n for n in new.nodes if n.op == "Clamp")
    assert clip.attrs == {"min": 0.0, "max": 8.0}
    assert torch.allclose(new.weights["0.weight"], graph.weights["0.weight"] * 4 / 3)
    assert torch.allclose(new.weights["0.bias"], graph.weights["0.bias"] * 4 / 3)
    assert torch.allclose(new.weights["3.weight"], graph.weights["3.weight"] * 3 / 4)
    assert torch.equal(new.weights["3.bias"], graph.weights["3.bias"])
    assert notes == ["the bound of '1' moved from 6 to 8"]
    (want,), (got,) = run(graph, [x]).values(), run(new, [x]).values()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_lower_bound_moves_along():
    graph = captured(nn.Sequential(nn.Linear(3, 4), nn.Hardtanh(-1.5, 3.0), nn.Linear(4, 2)), torch.randn(2, 3))
    new, _ = relu_bound_to_power_of_two(graph)
    assert new.nodes[1].attrs == {"min": -2.0, "max": 4.0}


@pytest.mark.parametrize(
    "net, why",
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6()), "an output of the model"),
        (nn.Sequential(nn.ReLU6(), nn.Conv2d(3, 4, 1)), "no linear operator"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Sigmoid(), nn.Conv2d(4, 4, 1)), "Sigmoid"),
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.ConstantPad2d(1, 0.5), nn.Conv2d(4, 4, 1)), "Pad"),
    ],
)
def test_a_bound_that_cannot_be_undone_behind_stays(net, why):
    new, notes = relu_bound_to_power_of_two(captured(net, torch.randn(2, 3, 4, 4)))
    assert "Relu6" in {n.op for n in new.nodes} and len(notes) == 1 and why in notes[0]


def test_powers_of_two_and_unbounded_activations_are_not_mentioned():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(0, 4), nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
    assert relu_bound_to_power_of_two(captured(net, torch.randn(2, 3, 4, 4)))[1] == []


@pytest.mark.parametrize("ends", [(-2.0, -1.0), (0.5, 3.0), (-1.0, float("inf"))])
def test_clips_that_do_not_keep_zero_or_have_no_end_are_left_alone(ends):
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(*ends), nn.Conv2d(4, 4, 1))
    graph = captured(net, torch.randn(2, 3, 4, 4))
    new, notes = relu_bound_to_power_of_two(graph)
    assert notes == [] and [n.attrs for n in new.nodes] == [n.attrs for n in graph.nodes]


def identity_net() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU6(), nn.Linear(8, 4))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(8))
        net[0].bias.zero_()
    return net


@pytest.mark.parametrize("bits, span", [(None, 6.05), (8, 6.05), (8, 9.0)])
def test_a_power_of_two_grid_wastes_nothing_any_more(bits, span):
    """[0, 6] on a grid that ends at 8 uses 192 of 256 codes; [0, 8] uses all: the error falls by about (6 / 8)^2."""
    x = torch.rand(64, 8) * span  # values above 6 are clipped: one in a hundred, or a third of all
    before = begin(identity_net(), x)
    after = begin(relu_bound_to_power_of_two(before.graph, bits=bits)[0], x)
    name = before.graph.nodes[1].output
    assert after.rounding(name) * (6 / 8) ** 2 < 0.7 * before.rounding(name)


def test_the_bound_may_be_the_greatest_code_instead():
    (clip,) = (
        n
        for n in relu_bound_to_power_of_two(captured(identity_net(), torch.randn(2, 8)), bits=8)[0].nodes
        if n.op == "Clamp"
    )
    assert clip.attrs["max"] == 255 / 32  # code 255 at step 8 / 256
