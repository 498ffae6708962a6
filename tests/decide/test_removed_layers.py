"""A layer that a rewrite joined with others, or folded into another, still has its name for overrides."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.decide.overrides import match_layers
from chipfit.errors import PlanError
from chipfit.frameworks.torch.capture import capture
from tests.build import model_of, quantized, randn


class Above(nn.Module):
    def forward(self, x):
        return 1 + torch.abs(x)


class Over(nn.Module):
    def forward(self, x, y):
        return x / y


def network():
    """Functions that become one table, a batch norm and a division that are folded, an identity, an unread layer."""
    torch.manual_seed(0)

    def forward(m, x):
        return m.head(m.same(m.act(m.norm(m.conv(x / 255)))).mean((2, 3)))

    gated = model_of(lambda m, x: m.two(x, m.one(x)), one=Above(), two=Over())  # x / (1 + |x|)
    parts = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "act": gated, "same": nn.Identity()}
    return model_of(forward, **parts, head=nn.Linear(4, 2), unread=nn.Linear(2, 2))


X = 255 * randn(4, 3, 6, 6, seed=3).abs()


@pytest.fixture(scope="module")
def plain():
    return quantized(network(), X, "tflite_int8")


def in_float(result):
    return {n.display_name for n in result.graph.nodes if result.plan.nodes[n.name].exec == "float"}


@pytest.mark.parametrize("name", ["act.one", "act.two", "act", "abs_1", "div_1", "act.o*", "Above", "Abs", "Curve"])
def test_each_name_of_a_joined_function_stands_for_the_table(name, plain):
    assert [n.op for n in plain.graph.nodes if n.layer.startswith("act")] == ["Curve"]
    for result in (quantized(network(), X, "tflite_int8", overrides={name: "float"}), plain.edit({name: "float"})):
        assert in_float(result) == {"act.two"}
        assert result.verify([X]).exact


def test_a_note_says_which_operator_follows_the_override_of_a_joined_layer(plain):
    notes = plain.edit({"act.one": "float"}).plan.rewrites
    assert "the override of 'act.one' holds for what its layers became: 'act.one' is a part of Curve 'act.two'" in notes


@pytest.mark.parametrize("name", ["norm", "div", "nor?", "batch_norm"])
def test_the_name_of_a_folded_layer_stands_for_the_one_it_is_folded_into(name, plain):
    assert in_float(plain.edit({name: "float"})) == {"conv"}


def test_the_range_of_a_folded_norm_is_that_of_its_result_and_a_value_that_is_gone_has_none(plain):
    result = quantized(network(), X, "tflite_int8", overrides={"norm": {"range": (-3.0, 3.0)}})
    made = next(n.output for n in result.graph.nodes if n.layer == "conv")
    assert float(result.plan[made].scale) == pytest.approx(6 / 255)  # codes -128 to 127 over -3 to 3
    for name in ("div", "act.one"):
        with pytest.raises(PlanError, match=rf"range=.* of '{name}' changes nothing .*is a part of \w+ '"):
            plain.edit({name: {"range": (0.0, 1.0)}})


def test_a_class_of_folded_layers_is_refused_with_the_layers_that_hold_them(plain):
    with pytest.raises(PlanError, match="Nothing is left of 'BatchNorm2d'.*'norm' is a part of 'conv'.*name one"):
        plain.edit({"BatchNorm2d": "float"})


@pytest.mark.parametrize("name", ["same", "unread"])
def test_a_layer_that_computes_nothing_is_known_as_such(name, plain):
    with pytest.raises(PlanError, match=f"Nothing is left of '{name}'.*computes nothing"):
        plain.edit({name: "float"})


def test_bits_of_a_layer_without_weights_are_refused_although_it_is_folded_into_one_with_weights(plain):
    with pytest.raises(PlanError, match="'div' has no weights"):
        plain.edit({"div": {"bits": 4}})


def test_a_saved_result_knows_the_names_of_removed_layers(plain, tmp_path):
    loaded = chipfit.load(plain.save(tmp_path / "saved"))
    assert in_float(loaded.edit({"act.one": "float", "norm": "float"})) == {"act.two", "conv"}


def test_a_filter_chooses_a_joined_layer_by_its_class(plain):
    class Above_:
        def match(self, node):
            return node.layer_type == "Above"

    assert in_float(plain.edit([(Above_(), "float")])) == {"act.two"}


def test_a_layer_whose_weights_another_one_reads_is_that_one():
    torch.manual_seed(0)
    net = model_of(lambda m, x: m.mha(x, x, x)[0], mha=nn.MultiheadAttention(8, 2, batch_first=True))
    result = quantized(net, randn(2, 5, 8), overrides={"mha.out_proj": "float"})
    (n,) = [n for n in result.graph.nodes if "mha.out_proj.weight" in n.inputs]
    assert result.plan.nodes[n.name].exec == "float"


PASSES = {
    "constant products": lambda m, x: m.fc(2 * (3 * torch.tanh(x))),
    "undone moves": lambda m, x: m.fc(x.transpose(1, 2).transpose(1, 2)),
    "a sum as bias": lambda m, x: m.fc(x) + 1.5,
    "unit length": lambda m, x: m.fc(F.normalize(x, dim=-1)),
    "attention": lambda m, x: m.fc(torch.softmax(x @ x.transpose(1, 2) / 3, -1) @ x),
    "scale of a norm": lambda m, x: m.fc(m.norm(x)),
    "softplus": lambda m, x: m.fc(x * torch.tanh(F.softplus(x))),
}


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8"])
@pytest.mark.parametrize("name", PASSES)
def test_every_operator_of_the_captured_network_can_be_named_after_all_rewrites(name, platform):
    torch.manual_seed(0)
    net, x = model_of(PASSES[name], fc=nn.Linear(6, 4), norm=nn.LayerNorm(6)), randn(3, 5, 6)
    result = quantized(net, x, platform)
    nodes = capture(net, (x,)).nodes
    for known in {name for n in nodes for name in (n.name, n.display_name, *n.outputs)}:
        assert match_layers(result.graph, known), known
