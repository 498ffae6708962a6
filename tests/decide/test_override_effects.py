"""An override that changes nothing is refused or said, and one choice does not undo another."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.decide.assignment import assign
from chipfit.decide.override_effects import unapplied_overrides
from chipfit.decide.overrides import resolve_overrides
from chipfit.errors import PlanError
from chipfit.platform.schema import Platform
from tests.build import graph_of, node, platform_of


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.a, self.b, self.ln = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids):
        x = self.ln(F.relu(self.a(self.emb(ids))))
        return torch.cat([self.b(x), x], -1).softmax(-1)


IDS = [torch.randint(0, 20, (4, 6))]


def quantize(overrides, platform="ort_cpu", model=None, data=IDS):
    torch.manual_seed(0)
    return chipfit.quantize((model or Net()).eval(), data, platform=platform, overrides=overrides, progress=False)


@pytest.mark.parametrize(
    ("overrides", "platform", "says"),
    [
        ({"emb": {"bits": 8}}, "tflite_int8", "'emb' (its operator runs in float)"),
        ({"emb": {"per": "tensor"}}, "tflite_int8", "'emb' (its operator runs in float)"),
        ({"ln": {"activation_bits": 16}}, "ort_cpu", "'ln' (it has 8"),
        ({"LayerNorm": {"bits": 8}}, "ort_cpu", "'ln' (its operator runs in float)"),
        ({"softmax": {"rule": "mse"}}, "tflite_int8", "the platform dictates its scale"),
        ({"softmax": {"range": (0, 2)}}, "tflite_int8", "the platform dictates its scale"),
        ({"Linear": "float", "a": {"rule": "no_clipping"}}, "ort_cpu", "overrides keep 'Linear' in float"),
        ({"b": {"range": (-9, 9)}}, "tflite_int8", "whose range is part of it"),
    ],
)
def test_what_no_layer_can_take_is_refused_with_the_reason(overrides, platform, says):
    with pytest.raises(PlanError, match="changes nothing") as e:
        quantize(overrides, platform)
    assert says in str(e.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {"a": {"bits": 8, "activation_bits": 8}},  # what it has anyway
        {"a": {"rule": "no_clipping", "weight_rule": "mae"}},
        {"relu": {"rule": "no_clipping"}},  # the result of the kernel that it is part of
        {"a": {"per": "tensor", "method": "symmetric"}},
        [("a", {"bits": 8}), ("a", "float")],  # taken back
        {"emb": "float"},
        {"emb": {"rule": "no_clipping"}},
        {"a": {"range": (0, 3)}},
        {"a": {"range": [0, 3]}},
        {"a": {"bits": None}},
    ],
)
def test_what_is_taken_is_not_spoken_of(overrides):
    assert not [n for n in quantize(overrides).plan.rewrites if "the override" in n]


def test_what_some_layers_do_not_take_is_said():
    notes = quantize([("Linear", {"rule": "no_clipping"}), ("Relu", {"rule": "mse"})]).plan.rewrites
    assert "the override rule='no_clipping' of 'Linear' changes nothing for 'a' (it has 'mse')" in notes


@pytest.mark.parametrize("kind", [{"bits": 8}, {"activation_bits": 8}])
def test_asking_for_bits_takes_an_earlier_float_back_and_nothing_else_does(kind):
    nodes = quantize([("*", "float"), ("a", kind)]).plan.nodes
    assert [nodes[n].exec for n in ("linear", "linear_1")] == ["int", "float"]
    nodes = quantize([("a", kind), ("*", "float"), ("b", kind)]).plan.nodes
    assert [nodes[n].exec for n in ("linear", "linear_1")] == ["float", "int"]


def test_a_range_known_beforehand_is_not_widened_by_what_moves_the_same_numbers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    data = [torch.randn(4, 3, 8, 8) * 5]
    for platform in ("tflite_int8", "ort_cpu"):
        plan = quantize({"0": {"range": (-1.0, 1.0)}}, platform, model, data).plan
        assert float(plan["conv2d"].scale) == pytest.approx(2 / 255, rel=1e-3)
        assert float(plan["flatten"].scale) == pytest.approx(2 / 255, rel=1e-3)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"io_in": ["a8"], "io_out": ["a8"]}, []),
        ({"io_in": ["a16"], "io_out": ["a8", "float"]}, ["input 'input' is a8: 'npu' names a16 for it"]),
        ({"io_in": ["a8"], "io_out": ["a16"]}, ["output 'relu' is a8: 'npu' names a16 for it"]),
        ({"io_in": ["float"]}, ["input 'input' is a8: 'npu' names float for it"]),
        ({}, []),
    ],
)
def test_inputs_and_outputs_that_the_platform_names_another_format_for_are_noted(place, said):
    op = {"match": ["Linear", "Relu"], "use": [{"in": "a8", "w": "a8", "out": "a8"}], "src": ["M"], "conf": "V"}
    formats = {"a8": {"bits": 8}, "a16": {"bits": 16}}
    npu = Platform.model_validate({"name": "npu", "formats": formats, "ops": [op], "place": place})
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    plan = chipfit.quantize(net, [torch.randn(4, 3)], platform=npu, progress=False).plan
    assert [n for n in plan.rewrites if "names" in n] == said


# ---------------------------------------------------------------- before any data


def said(overrides, platform="tflite_int8", model=None, example=None):
    """What `lint` says of overrides."""
    example = IDS[0] if example is None else example
    notes = chipfit.lint((model or Net()).eval(), example, platform, overrides).notes
    return [n for n in notes if "override" in n]


@pytest.mark.parametrize(
    ("overrides", "platform"),
    [
        ({"a": {"inputs": "codes"}}, "tflite_int8"),
        ({"a": {"inputs": "dynamic"}}, "ort_cpu"),
        ({"a": {"result": "codes"}}, "tflite_int8"),
        ({"a": {"result": "float"}}, "ort_cpu"),
        ({"ln": {"result": "float"}}, "ort_cpu"),
        ({"softmax": {"activation_bits": 8}}, "tflite_int8"),
        ({"Linear": {"bits": 8}, "a": {"bits": 4}}, "tflite_int8"),
        ({"a": {"signed": True}}, "imx500"),
        ({"a": {"weight_method": "power_of_two", "weight_rule": "mae"}}, "tflite_int8"),
        ({"a": {"bits": "float"}}, "tflite_int8"),
        ({"a": {"activation_bits": "float"}}, "tflite_int8"),
        ({"a": {"z_threshold": 3.0}}, "tflite_int8"),
        ({"a": {"range": [0, 3]}}, "ort_cpu"),
        # what a later entry replaces is not asked for any more
        ([("a", {"inputs": "float"}), ("a", {"inputs": "codes"})], "tflite_int8"),
        ([("a", {"inputs": "float"}), ("a", "float")], "tflite_int8"),
        ([("a", {"inputs": "float", "bits": 8}), ("Linear", {"inputs": "codes"})], "tflite_int8"),
    ],
    ids=str,
)
def test_a_layer_that_does_what_is_asked_is_not_spoken_of(overrides, platform):
    assert said(overrides, platform) == []


@pytest.mark.parametrize(
    ("overrides", "platform", "says"),
    [
        ({"emb": {"inputs": "codes"}}, "ort_cpu", "'emb' (its inputs are not floats)"),
        ({"a": {"inputs": "float"}}, "ort_cpu", "'a' (its inputs are 'codes')"),
        ({"a": {"inputs": "dynamic"}}, "tflite_int8", "'a' (its inputs are 'codes')"),
        ({"ln": {"result": "codes"}}, "ort_cpu", "'ln' (its result is 'float')"),
        ([("a", "float"), ("a", {"inputs": "dynamic"})], "tflite_int8", "'a' (its inputs are 'float')"),
        ([("a", {"inputs": "codes"}), ("a", {"inputs": "float"})], "tflite_int8", "'a' (its inputs are 'codes')"),
        ([("a", "float"), ("a", {"rule": "mse"})], "tflite_int8", "'a' (overrides keep 'a' in float)"),
    ],
    ids=str,
)
def test_a_layer_that_does_something_else_is_refused_with_what_it_does(overrides, platform, says):
    with pytest.raises(PlanError) as e:
        said(overrides, platform)
    choice, asked = next(iter([*(overrides if isinstance(overrides, list) else overrides.items())][-1][1].items()))
    pattern = says.split("'")[1]
    assert str(e.value).startswith(f"The override {choice}={asked!r} of '{pattern}' changes nothing for {says}. Try: ")


def test_what_moves_codes_hands_over_codes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="'1' .its result is 'codes'"):
        said({"1": {"result": "float"}}, model=model, example=torch.randn(2, 4))


def linears(count):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class Every:
    """A filter for linear layers."""

    def match(self, node):
        return node.op == "Linear"


@pytest.mark.parametrize(
    ("count", "named"), [(1, "'0' ({0})"), (4, "'0' ({0}), '1' ({0}), '2' ({0}), '3' ({0})"), (6, None)]
)
def test_four_layers_are_named_and_the_others_counted(count, named):
    model = linears(count) if count > 1 else nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    named = named or "'0' ({0}), '1' ({0}), '2' ({0}), '3' ({0}) and 2 more"
    says = "override inputs='float' of 'Linear' changes nothing for " + named.format("its inputs are 'codes'")
    with pytest.raises(PlanError) as e:
        said({"Linear": {"inputs": "float"}}, model=model, example=torch.randn(2, 2))
    assert f"The {says}. Try" in str(e.value)
    # a filter, which may mean layers that cannot, is never refused
    (note,) = said([(Every(), {"inputs": "float"})], model=model, example=torch.randn(2, 2))
    assert note.startswith("the override inputs='float' of '") and note.endswith(says.partition("changes")[2])


def test_each_entry_has_a_note_of_its_own():
    notes = said([(Every(), {"inputs": "float"}), (Every(), {"result": "codes"}), (Every(), {"inputs": "dynamic"})])
    assert len(notes) == 1 and "inputs='dynamic'" in notes[0]
    notes = said([("a", {"inputs": "codes"}), (Every(), {"inputs": "float", "per": "tensor"})])
    assert len(notes) == 1 and "inputs='float'" in notes[0] and "'a'" in notes[0] and "'b'" in notes[0]


def test_what_is_no_float_has_no_format_that_a_platform_could_name():
    op = {"match": ["Linear", "Relu"], "use": [{"in": "a8", "w": "a8", "out": "a8"}], "src": ["M"], "conf": "V"}
    formats = {"a8": {"bits": 8}, "a16": {"bits": 16}}
    place = {"io_in": ["a16"], "io_out": ["a16", "a8"]}
    npu = Platform.model_validate({"name": "npu", "formats": formats, "ops": [op], "place": place})
    net = nn.Sequential(nn.Embedding(20, 3), nn.Linear(3, 2)).eval()
    assert [n for n in chipfit.lint(net, IDS[0], npu).notes if "names" in n] == []
    (note,) = [n for n in chipfit.lint(net[1], torch.randn(4, 3), npu).notes if "names" in n]
    assert note == "input 'input' is a8: 'npu' names a16 for it"


# ---------------------------------------------------------------- decisions on paper

A8 = {"use": [{"in": "a8", "out": "a8"}]}
PAPER = platform_of(
    {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "out": "a8"}]}, {"match": ["Relu"], **A8},
    {"match": ["Tanh"], "exec": "float"},
    formats={"a8": {"bits": 8, "zero": "any", "signed": "auto"}, "w8": {"bits": 8}},
)  # fmt: skip


def notes_of(overrides, groups=(("l", "r"),)):
    """Notes about three operators in a row: a linear layer, fused with an activation, and one in float."""
    row = node("l = Linear(x, w)", layer="fc"), node("r = Relu(l)", layer="act"), node("s = Tanh(r)", layer="end")
    graph = graph_of(*row, weights=["w"])
    assignment = assign(graph, PAPER, groups, resolve_overrides(graph, overrides))
    return unapplied_overrides(graph, assignment, overrides)


@pytest.mark.parametrize(
    ("choice", "value", "other"),
    [
        ("activation_bits", 8, None),
        ("method", "symmetric", "power_of_two"),
        ("signed", True, False),
        ("rule", "mae", "kl"),
        ("z_threshold", 3.0, 4.0),
        ("range", [0.0, 1.0], [0.0, 2.0]),
    ],
)
def test_a_choice_about_a_fused_kernel_is_compared_with_its_result(choice, value, other):
    for layer in ("fc", "act"):
        assert notes_of({layer: {choice: value}}) == []
    if other is not None:  # of two choices for one kernel the later one wins
        has = tuple(other) if choice == "range" else other
        with pytest.raises(PlanError, match=re.escape(f"'fc' (it has {has!r})")):
            notes_of([("fc", {choice: value}), ("act", {choice: other})])


def test_a_result_that_is_not_quantized_has_the_reason_of_its_operator():
    with pytest.raises(PlanError, match=r"'end' \('npu' computes Tanh in float\)"):
        notes_of({"end": {"rule": "mae"}})
    with pytest.raises(PlanError, match=r"'fc' \(overrides keep it in float\)"):
        notes_of([("fc", {"rule": "mae"}), ("fc", {"activation_bits": "float"})])


def test_the_bits_of_what_is_read_count_if_the_result_is_float():
    assert notes_of({"end": {"activation_bits": 8}}) == []
    with pytest.raises(PlanError, match="'end' .'npu' computes Tanh"):
        notes_of({"end": {"activation_bits": 4}})


def test_a_tensor_that_is_not_quantized_is_float():
    assert notes_of({"end": {"activation_bits": "float"}}) == notes_of({"fc": {"bits": "float"}}) == []


def test_several_notes_each_name_their_layers():
    class Of:
        def __init__(self, op):
            self.op = op

        def match(self, node):
            return node.op == self.op

    first, second = notes_of([(Of("Tanh"), {"rule": "mae"}), (Of("Tanh"), {"method": "symmetric"})])
    assert first.endswith("'npu' computes Tanh in float)") and "rule='mae'" in first
    assert second.endswith("'npu' computes Tanh in float)") and "method='symmetric'" in second
