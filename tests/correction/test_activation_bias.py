"""Activation bias correction: the mean error of rounded inputs is taken off behind the next operator."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.calibration.collect import Need, collect
from chipfit.correction.activation_bias import correct_activation_bias, mean_shift, with_histograms
from chipfit.engine.run import run
from chipfit.frameworks.torch.lower import lower
from chipfit.plan.record import Plan
from tests.build import model_of, plan_of, sequential, set_layer, stored
from tests.steps import captured

SEVENS = torch.full((4, 2), 0.7)


def planned(graph, scale: float = 1.0, qmax: int = 255) -> Plan:
    """Inputs of linear operators on an unsigned grid, weights on one that holds quarters exactly."""
    x, w = stored(scale, low=0, high=qmax), stored(0.25, bits=16)
    linear = [n for n in graph.nodes if len(n.inputs) > 1 and n.inputs[1] in graph.weights]
    weights = {n.inputs[1] for n in linear}
    return plan_of(dict.fromkeys(weights, "weight"), **{n.data: x for n in linear}, **dict.fromkeys(weights, w))


def linear() -> nn.Module:
    return set_layer(nn.Linear(2, 2), [1.0, 2.0, 0.5, -0.25], [10.0, 20.0])


def histograms(graph, x):
    return collect(graph, [[x]], tensors={n.data: Need() for n in graph.nodes if len(n.inputs) > 1})


def corrected(layer, x, scale=1.0, **options):
    """The graph of a layer, the corrected one, and notes."""
    graph = captured(layer, x)
    return graph, *correct_activation_bias(graph, planned(graph, scale), histograms(graph, x), **options)


def shift_of(x, qmax=255):
    graph = captured(linear(), x)
    return mean_shift(histograms(graph, x)[graph.inputs[0]].histogram, planned(graph, qmax=qmax)[graph.inputs[0]])


def test_clipping_is_part_of_the_shift_and_exact_zeros_are_not():
    shift, mean = shift_of(torch.tensor([[1.0, 3.0], [1.0, 3.0]]), qmax=2)  # 3 becomes 2 half of the time
    assert shift == pytest.approx(-0.5, abs=0.005) and mean == pytest.approx(2.0, abs=0.005)
    x = torch.zeros(8, 2)
    x[0] = 1.0
    assert abs(shift_of(x)[0]) < 1e-3


def test_the_outputs_mean_comes_back():
    x = torch.rand(64, 3, 9, 9) ** 4  # most of it rounds to 0 at a step of 0.25
    graph = captured(nn.Conv2d(3, 4, 3), x)
    with torch.no_grad():
        graph.weights["weight"] = (graph.weights["weight"] * 4).round() / 4 + 0.25
    stats, plan = histograms(graph, x), planned(graph, 0.25)
    new, _ = correct_activation_bias(graph, plan, stats)
    with torch.no_grad():
        want = run(graph, [x])[graph.outputs[0]]
        before, after = ((lower(g, plan).run_flat([x])[0] - want).mean((0, 2, 3)).abs().max() for g in (graph, new))
    assert after < 0.2 * before


@pytest.mark.parametrize("threshold, notes", [(0.5, 0), (0.4, 1)])
def test_small_relative_shifts_stay_below_the_threshold(threshold, notes):
    assert len(corrected(linear(), SEVENS, threshold=threshold)[2]) == notes  # 0.3 / 0.7 = 0.43


def test_a_layer_that_needs_nothing_does_not_keep_others_from_it():
    """20.1 is stored as 20, and 0.7 behind the first layer as 1."""
    first, x = set_layer(nn.Linear(2, 2), [0.25, 0.0, 0.0, 0.25], 0.7 - 20.1 / 4), torch.full((4, 2), 20.1)
    graph, _, notes = corrected(sequential(first, linear()), x, threshold=0.1)
    assert len(notes) == 1 and "corrected the bias of '1'" in notes[0]
    plan = planned(graph)
    floats = replace(plan, tensors={k: t for k, t in plan.tensors.items() if k != graph.inputs[0]})
    assert len(correct_activation_bias(graph, floats, histograms(graph, x), threshold=0.0)[1]) == 1


@pytest.mark.parametrize(
    "layer, weight, value, bias",
    [
        (nn.Linear(2, 2), [1.0, 2.0, 0.5, -0.25], 0.2, [0.6, 0.05]),  # 0.2 is stored as 0
        (nn.Linear(2, 2), [1.0, 2.0, 0.5, -0.25], 0.7, [-0.9, -0.075]),
        (nn.Conv2d(2, 2, 1, groups=2), [1.0, 2.0], 0.7, [-0.3, -0.6]),
        (nn.ConvTranspose2d(2, 2, 1), [1.0, 2.0, 0.5, -0.25], 0.7, [-0.3 * 1.5, -0.3 * 1.75]),
        (nn.Conv2d(2, 1, 3, padding=1), [7.0] * 4 + [1.0] + [7.0] * 8 + [2.0] + [7.0] * 4, 0.7, [-0.9]),  # on 1 pixel
    ],
)
def test_the_shift_of_the_outputs_mean_by_hand(layer, weight, value, bias):
    """Step 1 stores 0.7 as 1, 0.3 too much, and 0.2 as 0: an output shifts by the sum of its weights times that."""
    x = torch.full((4, 2, *[1] * (layer.weight.dim() - 2)), value)
    _, new, notes = corrected(set_layer(layer, weight, 10.0), x)
    torch.testing.assert_close(new.weights["bias"], 10 + torch.tensor(bias), atol=2e-3, rtol=0)  # a bin: 1 / 1024
    assert len(notes) == 1


def test_a_bias_that_two_layers_share_stays_as_it_is():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.bias = a.bias
    x = torch.rand(64, 3)
    graph = chipfit.capture(model_of(lambda m, x: m.a(x) + m.b(x), a=a, b=b), (x,))
    new, notes = correct_activation_bias(graph, planned(graph, 0.3), histograms(graph, x))
    assert notes == [f"the bias of '{n}' is not corrected: 'a.bias' is read by several operators" for n in "ab"]
    assert torch.equal(new.weights["a.bias"], graph.weights["a.bias"])


def test_histograms_are_asked_for_of_all_that_is_stored():
    needs = {"a": Need(histogram=False, channel_axis=1), "b": Need()}
    asked = with_histograms(captured(linear(), torch.randn(2, 2)), needs)
    assert asked == {"a": Need(histogram=True, channel_axis=1), "b": Need(histogram=True)}


def test_inputs_that_are_exact_or_read_before_they_are_rounded_shift_nothing_and_unseen_ones_are_named():
    graph, new, notes = corrected(linear(), torch.zeros(4, 2))
    assert notes == [] and new.weights["bias"] is graph.weights["bias"]
    plan = replace(planned(graph), float_edges=frozenset({(graph.inputs[0], graph.nodes[0].name)}))
    assert correct_activation_bias(graph, plan, histograms(graph, SEVENS))[1] == []
    _, notes = correct_activation_bias(graph, planned(graph), {})
    assert notes == ["the bias of 'linear' is not corrected: there is no histogram of its input"]


def test_a_refusal_ends_nothing():
    first = set_layer(nn.Linear(2, 2, bias=False), torch.eye(2))
    _, _, notes = corrected(sequential(first, linear()), SEVENS)
    assert notes[0] == "the bias of '0' is not corrected: it has none"
    assert notes[1].startswith("corrected the bias of '1' by at most 0.9") and len(notes) == 2
