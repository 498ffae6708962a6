"""Activation bias correction: what rounding an input adds on average is taken off behind the next operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.calibration.collect import Need, collect
from chipfit.correction.activation_bias import correct_activation_bias, mean_shift, with_histograms
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.lower import lower
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from tests.steps import captured


def planned(graph, scale: float, qmax: int = 255) -> Plan:
    """The input on an unsigned grid, the weights on one that holds quarters exactly."""
    zero = torch.tensor(0, dtype=torch.int32)
    x, w = graph.inputs[0], graph.nodes[0].inputs[1]
    return Plan(
        tensors={
            x: TensorPlan(
                name=x,
                role="activation",
                stored=Stored(
                    format="", grid=Grid(bits=8, qmin=0, qmax=qmax), scale=torch.tensor(scale), zero_point=zero
                ),
            ),
            w: TensorPlan(
                name=w,
                role="weight",
                stored=Stored(
                    format="", grid=Grid(bits=16, qmin=-32768, qmax=32767), scale=torch.tensor(0.25), zero_point=zero
                ),
            ),
        }
    )


def linear() -> nn.Module:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0], [0.5, -0.25]]))
        layer.bias.copy_(torch.tensor([10.0, 20.0]))
    return layer


def test_the_correction_on_paper():
    """All inputs are 0.7, step 1: each becomes 1, 0.3 too much. The sums of the weights' rows are 3 and 0.25."""
    x = torch.full((4, 2), 0.7)
    graph = captured(linear(), x)
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    new, notes = correct_activation_bias(graph, planned(graph, 1.0), stats)
    torch.testing.assert_close(
        new.weights["bias"], torch.tensor([10 - 0.9, 20 - 0.075]), atol=2e-3, rtol=0
    )  # a bin is 1 / 1024 wide
    assert len(notes) == 1


def test_clipping_is_part_of_the_shift():
    x = torch.tensor([[1.0, 3.0], [1.0, 3.0]])
    graph = captured(linear(), x)
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    stored = planned(graph, 1.0, qmax=2)[graph.inputs[0]]
    shift, mean = mean_shift(stats[graph.inputs[0]].histogram, stored)
    assert shift == pytest.approx(-0.5, abs=0.005) and mean == pytest.approx(
        2.0, abs=0.005
    )  # 3 becomes 2 half of the time


def test_exact_zeros_do_not_shift():
    x = torch.zeros(8, 2)
    x[0] = 1.0
    graph = captured(linear(), x)
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    shift, _ = mean_shift(stats[graph.inputs[0]].histogram, planned(graph, 1.0)[graph.inputs[0]])
    assert abs(shift) < 1e-3


def test_the_outputs_mean_comes_back():
    conv = nn.Conv2d(3, 4, 3)
    x = torch.rand(64, 3, 9, 9) ** 4  # most of it rounds to 0 at a step of 0.25
    graph = captured(conv, x)
    with torch.no_grad():
        graph.weights["weight"] = (graph.weights["weight"] * 4).round() / 4 + 0.25
    stats, plan = collect(graph, [[x]], tensors={graph.inputs[0]: Need()}), planned(graph, 0.25)
    new, _ = correct_activation_bias(graph, plan, stats)
    with torch.no_grad():
        want = run(graph, [x])[graph.outputs[0]]
        before, after = ((lower(g, plan).run_flat([x])[0] - want).mean((0, 2, 3)).abs().max() for g in (graph, new))
    assert after < 0.2 * before


def test_small_relative_shifts_stay_below_the_threshold():
    x = torch.full((4, 2), 0.7)
    graph = captured(linear(), x)
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    assert correct_activation_bias(graph, planned(graph, 1.0), stats, threshold=0.5)[1] == []  # 0.3 / 0.7 = 0.43
    assert len(correct_activation_bias(graph, planned(graph, 1.0), stats, threshold=0.4)[1]) == 1


def test_a_layer_that_needs_nothing_does_not_keep_others_from_it():
    x = torch.full((4, 2), 20.1)
    net = nn.Sequential(nn.Linear(2, 2), linear())
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2) / 4)
        net[0].bias.fill_(0.7 - 20.1 / 4)  # 20.1 is stored as 20, and 0.7 as 1
    graph = captured(net, x)
    first, second = graph.nodes
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need(), second.data: Need()})
    plan = planned(graph, 1.0)
    more = {
        second.data: replace(plan.tensors[graph.inputs[0]], name=second.data),
        second.inputs[1]: replace(plan.tensors[first.inputs[1]], name=second.inputs[1]),
    }
    both = replace(plan, tensors=plan.tensors | more)
    _, notes = correct_activation_bias(graph, both, stats, threshold=0.1)
    assert len(notes) == 1 and "corrected the bias of '1'" in notes[0]
    turned = replace(both, tensors={k: t for k, t in both.tensors.items() if k != graph.inputs[0]})
    assert len(correct_activation_bias(graph, turned, stats, threshold=0.0)[1]) == 1


@pytest.mark.parametrize(
    "layer, weight, value, bias",
    [
        (nn.Linear(2, 2), [1.0, 2.0, 0.5, -0.25], 0.2, [0.6, 0.05]),  # 0.2 is stored as 0
        (nn.Conv2d(2, 2, 1, groups=2), [1.0, 2.0], 0.7, [-0.3, -0.6]),
        (nn.ConvTranspose2d(2, 2, 1), [1.0, 2.0, 0.5, -0.25], 0.7, [-0.3 * 1.5, -0.3 * 1.75]),
        (nn.Conv2d(2, 1, 3, padding=1), [7.0] * 4 + [1.0] + [7.0] * 8 + [2.0] + [7.0] * 4, 0.7, [-0.9]),  # on 1 pixel
    ],
)
def test_the_shift_of_the_outputs_mean_by_hand(layer, weight, value, bias):
    """Step 1 stores 0.7 as 1, 0.3 too much, and 0.2 as 0: an output shifts by the sum of its weights times that."""
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight).view_as(layer.weight))
        layer.bias.zero_()
    x = torch.full((4, 2, *[1] * (layer.weight.dim() - 2)), value)
    graph = captured(layer, x)
    new, _ = correct_activation_bias(
        graph, planned(graph, 1.0), collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    )
    torch.testing.assert_close(new.weights["bias"], torch.tensor(bias), atol=4e-3, rtol=0)


def test_a_bias_that_two_layers_share_stays_as_it_is():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.a(x) + self.b(x)

    x = torch.rand(64, 3)
    graph = capture(Two().eval(), (x,))
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need(histogram=True)})
    plan = planned(graph, 0.3)
    new, notes = correct_activation_bias(graph, plan, stats)
    assert notes == ["the bias of 'a' is not corrected: 'a.bias' is read by several operators"]
    assert torch.equal(new.weights["a.bias"], graph.weights["a.bias"])
    one = captured(nn.Linear(3, 3), x)
    _, notes = correct_activation_bias(one, planned(one, 0.3), {})
    assert notes == ["the bias of 'linear' is not corrected: there is no histogram of its input"]


def test_what_rounding_does_not_shift_is_not_spoken_of():
    x = torch.zeros(4, 2)
    graph = captured(linear(), x)
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    new, notes = correct_activation_bias(graph, planned(graph, 1.0), stats)
    assert notes == [] and new.weights["bias"] is graph.weights["bias"]


def test_histograms_are_asked_for_of_all_that_is_stored():
    needs = {"a": Need(histogram=False, channel_axis=1), "b": Need()}
    asked = with_histograms(captured(linear(), torch.randn(2, 2)), needs)
    assert asked == {"a": Need(histogram=True, channel_axis=1), "b": Need(histogram=True)}


def test_an_input_that_is_read_before_it_is_rounded_shifts_nothing():
    x = torch.full((4, 2), 0.7)
    graph = captured(linear(), x)
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need()})
    plan = replace(planned(graph, 1.0), float_edges=frozenset({(graph.inputs[0], graph.nodes[0].name)}))
    assert correct_activation_bias(graph, plan, stats)[1] == []


def test_a_refusal_ends_nothing():
    net, x = nn.Sequential(nn.Linear(2, 2, bias=False), linear()), torch.full((4, 2), 0.7)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
    graph = captured(net, x)
    first, second = graph.nodes
    stats = collect(graph, [[x]], tensors={graph.inputs[0]: Need(), second.data: Need()})
    plan = planned(graph, 1.0)
    more = {
        second.data: replace(plan.tensors[graph.inputs[0]], name=second.data),
        second.inputs[1]: replace(plan.tensors[first.inputs[1]], name=second.inputs[1]),
    }
    _, notes = correct_activation_bias(graph, replace(plan, tensors=plan.tensors | more), stats)
    assert notes[0] == "the bias of '0' is not corrected: it has none"
    assert notes[1].startswith("corrected the bias of '1' by at most 0.9") and len(notes) == 2
