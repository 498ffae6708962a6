"""Second-moment correction: mean and spread of every channel as in float."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.correction.second_moment import correct_second_moment
from chipfit.errors import DataError
from tests.build import model_of, sequential, set_layer
from tests.correction.test_bias import weights_only
from tests.steps import begin, captured


def moments(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = y.movedim(1, 0).flatten(1)
    return rows.mean(1), rows.std(1)


def deep():
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, groups=16), nn.ConvTranspose2d(16, 8, 2, 2)]
    return sequential(*(part for layer in layers for part in (layer, nn.ReLU())), nn.Conv2d(8, 6, 1))


def test_every_layer_of_a_2_bit_network_has_floats_mean_and_spread_again_and_a_smaller_error():
    x = torch.randn(32, 3, 10, 10)
    steps = begin(deep(), x, "imx500", bits=2)
    graph, notes = correct_second_moment(steps.graph, steps.plan(), [[x[:16]], [x[16:]]])
    assert len(notes) == 4
    corrected = replace(steps, graph=graph)
    names = [n.output for n in steps.graph.nodes if n.op != "Relu"]
    gaps = []
    for s in (steps, corrected):
        tensors = {k: t if t.role == "weight" else t.with_(stored=None) for k, t in s.plan().tensors.items()}
        plan, gap = replace(s.plan(), tensors=tensors), []
        for want, got in zip(steps.float(*names)[1:], s.quantized(plan, *names)[1:]):
            (m, sd), (mq, sq) = moments(want), moments(got)
            gap += [float(((mq - m).abs() / sd).max()), float((sq / sd - 1).abs().max())]
        gaps.append(max(gap))
    assert gaps[0] > 0.3 and gaps[1] < 0.08
    want = steps.float()[0]
    before, after = ((s.quantized(s.plan())[0] - want).square().mean() for s in (steps, corrected))
    assert after < 0.8 * before


def test_no_data_is_an_error():
    graph = captured(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(DataError, match="empty"):
        correct_second_moment(graph, weights_only(graph, 1.0), [])


@pytest.mark.parametrize("layer", [nn.Linear(1, 3), nn.Conv2d(1, 3, 1)])
def test_each_channel_has_a_factor_of_its_own_over_all_batches(layer):
    """Inputs 3, 5 and 7 in two batches, mean 5; the codes 1, 1 and 1 of step 1 stand for weights 0.8, 1.2 and 4.

    k = 0.8, 1.2 and 4, of which 2 is allowed. b' = k (b - m_q) + m with b = 1, m = 5, 7, 21 and m_q = 6.
    """
    set_layer(layer, [0.8, 1.2, 4.0], 1.0)
    batches = [torch.tensor([3.0, 5.0]), torch.tensor([7.0])]
    batches = [[b.view(-1, 1, *[1] * (layer.weight.dim() - 2))] for b in batches]
    graph = captured(layer, torch.cat([b for (b,) in batches]))
    new, notes = correct_second_moment(graph, weights_only(graph, 1.0, bits=2), batches)
    torch.testing.assert_close(new.weights["weight"].flatten(), torch.tensor([0.64, 1.44, 8.0]))
    torch.testing.assert_close(new.weights["bias"], torch.tensor([0.8 * -5 + 5, 1.2 * -5 + 7, 2 * -5 + 21]))
    assert notes == [f"corrected the second moment of '{graph.nodes[0].display_name}' by 0.8 to 2"]


def test_a_channel_that_does_not_vary_keeps_its_weights_and_gets_its_mean_back():
    """x = (2 t, t, 2). 0.6, -1.2, 0 gives 0 and, as 1, -1, 0, t; 0.3, 0, 0 gives 0.6 t and, as 0, 0, 0, nothing.

    2, 0, 0 is exact, and 0, 0, 0.8 varies neither in float nor, as 0, 0, 1, rounded: 1.6 and 2.
    """
    layer = set_layer(nn.Linear(3, 4), [0.6, -1.2, 0.0, 0.3, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.8])
    x = torch.tensor([[2.0, 1.0, 2.0], [4.0, 2.0, 2.0], [6.0, 3.0, 2.0]])
    graph = captured(layer, x)
    new, notes = correct_second_moment(graph, weights_only(graph, 1.0), [[x]])
    torch.testing.assert_close(new.weights["weight"], layer.weight.detach())
    torch.testing.assert_close(new.weights["bias"], torch.tensor([-2.0, 1.2, 0.0, -0.4]))  # the means are 0, 1.2; 2, 0
    assert notes == ["corrected the second moment of 'linear' by 1 to 1"]


def test_moments_are_those_of_all_batches_together_whatever_their_sizes():
    layer = set_layer(nn.Linear(3, 4), [1.3, -2.4, 0.8, 0.7, 1.6, -1.2, 2.3, 0.4, 3.7, 0.6, -0.6, 0.6], 0.5)
    batches = [torch.randn(3, 3) + 2, torch.randn(5, 3) * 2 - 1, torch.randn(1, 3)]
    x, graph = torch.cat(batches), captured(layer, batches[0])
    w, b, limit = layer.weight.detach().double(), layer.bias.detach().double(), 1.2
    want, here = x.double() @ w.T + b, x.double() @ w.clamp(-7, 7).round().T + b
    k = (want.std(0) / here.std(0)).clamp(1 / limit, limit)
    assert (k - 1).abs().gt(1e-3).any() and ((k > 1 / limit) & (k < limit)).any() and len(k.unique()) > 2
    new, _ = correct_second_moment(graph, weights_only(graph, 1.0), [[b] for b in batches], limit=limit)
    torch.testing.assert_close(new.weights["weight"].double(), k[:, None] * w, rtol=1e-5, atol=1e-6)
    bias = k * (b - here.mean(0)) + want.mean(0)
    torch.testing.assert_close(new.weights["bias"].double(), bias, rtol=1e-5, atol=1e-5)


def test_later_operators_are_measured_on_corrected_inputs():
    """Each of two weights of 0.8 is stored as 1: either has a spread of 1.25 times floats, not the second 1.25^2."""
    graph = captured(sequential(*(set_layer(nn.Linear(1, 1), [0.8], 1.0) for _ in range(2))), torch.randn(2, 1))
    batches = [[torch.tensor([[3.0], [5.0]])], [torch.tensor([[7.0], [8.0], [9.0]])]]
    new, _ = correct_second_moment(graph, weights_only(graph, 1.0), batches, limit=4.0)
    assert [float(new.weights[f"{k}.weight"]) for k in (0, 1)] == pytest.approx([0.64, 0.64])
    # means: 6.4 of x, 6.12 behind the first and 5.896 behind the second; rounded 7.4 and, of 6.12, 7.12
    biases = [0.8 * (1 - 7.4) + 6.12, 0.8 * (1 - 7.12) + 5.896]
    assert [float(new.weights[f"{k}.bias"]) for k in (0, 1)] == pytest.approx(biases)


def test_a_refusal_is_said_and_ends_nothing():
    layers = {"bare": nn.Linear(2, 2, bias=False), "tied": nn.Linear(2, 2), "last": nn.Linear(2, 2)}
    x = torch.randn(8, 2)
    graph = captured(model_of(lambda m, x: m.last(m.tied(m.tied(m.bare(x)))), **layers), x)
    new, notes = correct_second_moment(graph, weights_only(graph, 0.25), [[x]])
    assert notes[0] == "'bare' keeps its second moment: it has none"
    assert notes[1:3] == ["'tied' keeps its second moment: 'tied.weight' is read by several operators"] * 2
    assert notes[3].startswith("corrected the second moment of 'last' by ") and len(notes) == 4
    changed = {k for k, w in graph.weights.items() if not torch.equal(w, new.weights[k])}
    assert changed == {"last.weight", "last.bias"}
