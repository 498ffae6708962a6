"""Scales and shifts of norms in parts, folded into the linear layers behind them."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.engine.run import run
from tests.build import model_of, quantized, randn, sqnr_db

X = randn(16, 5, 12)
SETTINGS = chipfit.Settings(integer_only=True)


def norm(kind: type = nn.LayerNorm) -> nn.Module:
    layer = kind(12)
    layer.weight.data.copy_(torch.linspace(0.2, 3.0, 12))
    if kind is nn.LayerNorm:
        layer.bias.data.copy_(torch.linspace(-0.5, 0.5, 12))
    return layer


def three(m, x):
    """What reads a norm in front of an attention."""
    y = m.norm(m.first(x))
    return m.q(y) * m.k(y) + m.v(m.drop(y))


def branches(kind: type = nn.LayerNorm) -> nn.Module:
    layers = {name: nn.Linear(12, 12) for name in ("first", "q", "k", "v")}
    return model_of(three, norm=norm(kind), drop=nn.Dropout(0.1), **layers)


def parts(result) -> list[str]:
    """The operators of a norm that are left, in order."""
    return [n.op for n in result.graph.nodes if n.composite_op in ("LayerNorm", "RMSNorm")]


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("platform", ["tflite_int8", "tflm_cmsis_nn"])
def test_a_norm_that_linear_layers_read_ends_with_its_product_by_the_deviation(kind, platform):
    model = branches(kind)
    result = quantized(model, [X], platform, settings=SETTINGS)
    assert parts(result)[-2:] == ["Rsqrt", "Mul"]
    float_results = run(result.decision.graph, [X])[result.graph.outputs[0]]
    torch.testing.assert_close(float_results, model(X), rtol=1e-4, atol=1e-4)
    assert result.verify([randn(16, 5, 12, seed=3)]).exact


def test_every_norm_of_a_network_of_blocks_is_folded():
    torch.manual_seed(0)
    blocks = nn.Sequential(branches(), branches(), branches())
    result = quantized(blocks, [X], "tflite_int8", settings=SETTINGS)
    folded = [note for note in result.plan.rewrites if note.startswith("folded scale and shift of")]
    assert len(folded) == 3 and [op for op in parts(result) if op == "Add"] == ["Add"] * 3  # of the epsilons
    torch.testing.assert_close(
        run(result.decision.graph, [X])[result.graph.outputs[0]], blocks(X), rtol=1e-3, atol=1e-3
    )


def test_a_large_shift_becomes_a_bias_that_costs_no_accuracy():
    """Channels of 0.1 to 10, with means of as much: linear layers that read them as they are lose 20 dB."""
    torch.manual_seed(0)
    scale = torch.logspace(-1, 1, 12)
    layers = {"norm": nn.LayerNorm(12), "first": nn.Linear(12, 12), "q": nn.Linear(12, 12)}
    model = model_of(lambda m, x: m.q(m.norm(m.first(x))), **layers)
    model.norm.weight.data.copy_(scale)
    model.norm.bias.data.copy_(scale * torch.randn(12))
    model.q.weight.data.div_(scale)
    result = quantized(model, [X], "tflite_int8", settings=SETTINGS)
    assert parts(result)[-2:] == ["Rsqrt", "Mul"]
    want, got = model(X), result.device_model(X)
    assert 10 * torch.log10(want.square().sum() / (want - got).square().sum()) > 28


KEPT = {
    "a sum reads it too": lambda m, x: m.q(y := m.norm(m.first(x))) + y,
    "it is returned": lambda m, x: (m.q(y := m.norm(m.first(x))), y),
    "it is no linear layer": lambda m, x: torch.relu(m.norm(m.first(x))),
}


def kept(f, **layers):
    """The operators that end a norm in integers, in a network in which f reads it."""
    model = model_of(f, norm=norm(), first=nn.Linear(12, 12), **layers)
    return parts(quantized(model, [X], "tflite_int8", settings=SETTINGS))[-2:]


@pytest.mark.parametrize("name", KEPT)
def test_a_norm_that_others_read_keeps_its_scale_and_shift(name):
    assert kept(KEPT[name], q=nn.Linear(12, 12)) == ["Mul", "Add"]


def test_weights_that_another_layer_reads_stay():
    def twice(m, x):
        return m.q(m.norm(m.first(x))) + m.q(m.first(x))

    assert kept(twice, q=nn.Linear(12, 12)) == ["Mul", "Add"]


def test_weights_of_few_bits_keep_their_spread():
    result = quantized(branches(), [X], "tflite_int8", settings=SETTINGS, overrides={"k": {"bits": 4}})
    assert parts(result)[-2:] == ["Mul", "Add"]


def test_weights_of_few_bits_take_the_scales_of_channels_that_are_far_larger():
    """As in large models, whose layers make up for the scales of norms: folded weights differ less."""
    torch.manual_seed(0)
    model = branches()
    with torch.no_grad():
        for layer in (model.q, model.k, model.v):
            layer.weight[:, :3] /= 40
        model.norm.weight[:3] *= 40
    result = quantized(model, [X], "tflite_int8", settings=SETTINGS, overrides={"Linear": {"bits": 4}})
    assert parts(result)[-2:] == ["Rsqrt", "Mul"]
    assert sqnr_db(model(X).detach(), result.model(X).detach()) > 14


def test_an_edit_to_few_bits_brings_scale_and_shift_back():
    result = quantized(branches(), [X], "tflite_int8", settings=SETTINGS)
    edited = result.edit({"k": {"bits": 4}})
    assert parts(result)[-2:] == ["Rsqrt", "Mul"] and parts(edited)[-2:] == ["Mul", "Add"]
    assert edited.verify([X]).exact
