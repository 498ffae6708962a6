"""Effects of overrides: one that changes nothing is refused or noted, and one choice does not undo another."""

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
from tests.build import graph_of, model_of, node, platform_of, quantized, randn, sequential
from tests.decide.test_overrides import OfOp

IDS = torch.randint(0, 20, (4, 6))


def forward(m, ids):
    x = m.ln(F.relu(m.a(m.emb(ids))))
    return torch.cat([m.b(x), x], -1).softmax(-1)


def network():
    torch.manual_seed(0)
    return model_of(forward, emb=nn.Embedding(20, 8), a=nn.Linear(8, 8), b=nn.Linear(8, 8), ln=nn.LayerNorm(8))


def notes_of(overrides, platform="tflite_int8", model=None, example=IDS):
    """Notes of `lint` about overrides."""
    notes = chipfit.lint(model or network(), example, platform, overrides).notes
    return [n for n in notes if "the override" in n]


@pytest.mark.parametrize(
    "overrides, platform, says",
    [
        ({"emb": {"bits": 8}}, "tflite_int16x8", "'emb' (its operator runs in float)"),
        ({"emb": {"per": "tensor"}}, "tflite_int16x8", "'emb' (its operator runs in float)"),
        ({"ln": {"activation_bits": 16}}, "ort_cpu", "'ln' (it has 8"),
        ({"LayerNorm": {"bits": 8}}, "ort_cpu", "'ln' (its operator runs in float)"),
        ({"softmax": {"rule": "mse"}}, "tflite_int8", "the platform dictates its scale"),
        ({"softmax": {"range": (0, 2)}}, "tflite_int8", "the platform dictates its scale"),
        ({"Linear": "float", "a": {"rule": "no_clipping"}}, "ort_cpu", "overrides keep 'Linear' in float"),
        ({"b": {"range": (-9, 9)}}, "tflite_int8", "whose range is part of it"),
        ({"emb": {"inputs": "codes"}}, "ort_cpu", "'emb' (its inputs are not floats)"),
        ({"a": {"inputs": "float"}}, "ort_cpu", "'a' (its inputs are 'codes')"),
        ({"a": {"inputs": "dynamic"}}, "tflite_int8", "'a' (its inputs are 'codes')"),
        ({"ln": {"result": "codes"}}, "ort_cpu", "'ln' (its result is 'float')"),
        ([("a", "float"), ("a", {"inputs": "float"})], "tflite_int8", "'a' (its inputs are 'float')"),
        ([("a", {"inputs": "codes"}), ("a", {"inputs": "float"})], "tflite_int8", "'a' (its inputs are 'codes')"),
        ([("a", "float"), ("a", {"rule": "mse"})], "ort_cpu", "'a' (overrides keep 'a' in float)"),
    ],
    ids=str,
)
def test_an_override_that_no_layer_can_follow_is_refused_with_the_reason(overrides, platform, says):
    with pytest.raises(PlanError) as e:
        notes_of(overrides, platform)
    pattern, choices = list(overrides.items() if isinstance(overrides, dict) else overrides)[-1]
    [(choice, value)] = choices.items()
    assert str(e.value).startswith(f"The override {choice}={value!r} of '{pattern}' changes nothing for '")
    assert says in str(e.value)


@pytest.mark.parametrize(
    "overrides, platform",
    [
        ({"a": {"bits": 8, "activation_bits": 8}}, "ort_cpu"),  # what it has anyway
        ({"a": {"rule": "no_clipping", "weight_rule": "mae"}}, "ort_cpu"),
        ({"relu": {"rule": "no_clipping"}}, "ort_cpu"),  # the result of the kernel that it is part of
        ({"a": {"per": "tensor", "method": "symmetric"}}, "ort_cpu"),
        ([("a", {"bits": 8}), ("a", "float")], "ort_cpu"),  # taken back
        ({"emb": "float"}, "ort_cpu"),
        ({"emb": {"rule": "no_clipping"}}, "ort_cpu"),
        ({"emb": {"bits": 8, "per": "tensor"}}, "tflite_int8"),  # a table in codes, which integers gather
        ({"a": {"range": (0, 3)}}, "ort_cpu"),
        ({"a": {"range": [0, 3]}}, "ort_cpu"),
        ({"a": {"bits": None}}, "ort_cpu"),
        ({"a": {"inputs": "codes"}}, "tflite_int8"),
        ({"a": {"inputs": "dynamic"}}, "ort_cpu"),
        ({"a": {"result": "codes"}}, "tflite_int8"),
        ({"a": {"result": "float"}, "ln": {"result": "float"}}, "ort_cpu"),
        ({"softmax": {"activation_bits": 8}}, "tflite_int8"),
        ({"Linear": {"bits": 8}, "a": {"bits": 4}}, "tflite_int8"),
        ({"a": {"signed": True}}, "imx500"),
        ({"a": {"weight_method": "power_of_two", "weight_rule": "mae"}}, "tflite_int8"),
        ({"a": {"bits": "float"}}, "tflite_int8"),
        ({"a": {"activation_bits": "float"}}, "tflite_int8"),
        ({"a": {"z_threshold": 3.0}}, "tflite_int8"),
        # a choice that a later entry replaces needs no effect
        ([("a", {"inputs": "float"}), ("a", {"inputs": "codes"})], "tflite_int8"),
        ([("a", {"inputs": "float"}), ("a", "float")], "tflite_int8"),
        ([("a", {"inputs": "float", "bits": 8}), ("Linear", {"inputs": "codes"})], "tflite_int8"),
    ],
    ids=str,
)
def test_an_override_with_an_effect_is_not_noted(overrides, platform):
    assert notes_of(overrides, platform) == []


def test_layers_that_ignore_an_override_are_noted_in_the_plan():
    overrides = [("Linear", {"rule": "no_clipping"}), ("Relu", {"rule": "mse"})]
    notes = quantized(network(), [IDS], overrides=overrides).plan.rewrites
    assert "the override rule='no_clipping' of 'Linear' changes nothing for 'a' (it has 'mse')" in notes


@pytest.mark.parametrize("kind", [{"bits": 8}, {"activation_bits": 8}])
def test_bits_cancel_an_earlier_float_and_nothing_else_does(kind):
    for overrides, runs in (
        ([("*", "float"), ("a", kind)], ["int", "float"]),
        ([("a", kind), ("*", "float"), ("b", kind)], ["float", "int"]),
    ):
        nodes = quantized(network(), [IDS], overrides=overrides).plan.nodes
        assert [nodes[n].exec for n in ("linear", "linear_1")] == runs


@pytest.mark.parametrize(
    "place, noted",
    [
        ({"io_in": ["a8"], "io_out": ["a8"]}, []),
        ({"io_in": ["a16"], "io_out": ["a8", "float"]}, ["input 'input' is a8: 'npu' names a16 for it"]),
        ({"io_in": ["a8"], "io_out": ["a16"]}, ["output 'relu' is a8: 'npu' names a16 for it"]),
        ({"io_in": ["float"]}, ["input 'input' is a8: 'npu' names float for it"]),
        ({}, []),
    ],
)
def test_inputs_and_outputs_in_a_format_that_the_platform_does_not_list_are_noted(place, noted):
    op = {"match": ["Linear", "Relu"], "use": [{"in": "a8", "w": "a8", "out": "a8"}]}
    npu = platform_of(op, formats={"a8": {"bits": 8}, "a16": {"bits": 16}}, place=place)
    net = sequential(nn.Linear(3, 2), nn.ReLU())
    assert [n for n in chipfit.lint(net, randn(4, 3), npu).notes if "names" in n] == noted
    tokens = sequential(nn.Embedding(20, 3), *net)  # inputs that are not floats have no format
    assert not [n for n in chipfit.lint(tokens, IDS[0], npu).notes if "input" in n and "names" in n]


def test_a_pass_through_operator_outputs_quantized_values():
    model = sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 4))
    with pytest.raises(PlanError, match="'1' .its result is 'codes'"):
        notes_of({"1": {"result": "float"}}, model=model, example=randn(2, 4))


@pytest.mark.parametrize("count", [1, 4, 6])
def test_four_layers_are_named_and_the_others_counted(count):
    layers = {"model": sequential(*(nn.Linear(2, 2) for _ in range(count)), nn.ReLU()), "example": randn(2, 2)}
    names = ", ".join(f"'{k}' (its inputs are 'codes')" for k in range(min(count, 4)))
    says = f"changes nothing for {names}{' and 2 more' * (count == 6)}"
    with pytest.raises(PlanError) as e:
        notes_of({"Linear": {"inputs": "float"}}, **layers)
    assert f"The override inputs='float' of 'Linear' {says}. Try" in str(e.value)
    # a filter, which may choose layers that cannot follow, is never refused
    (note,) = notes_of([(OfOp("Linear"), {"inputs": "float"})], **layers)
    assert note.startswith("the override inputs='float' of '") and note.endswith(says)


def test_each_entry_has_a_note_of_its_own():
    every = OfOp("Linear")
    notes = notes_of([(every, {"inputs": "float"}), (every, {"result": "codes"}), (every, {"inputs": "dynamic"})])
    assert len(notes) == 1 and "inputs='dynamic'" in notes[0]
    notes = notes_of([("a", {"inputs": "codes"}), (every, {"inputs": "float", "per": "tensor"})])
    assert len(notes) == 1 and "inputs='float'" in notes[0] and "'a'" in notes[0] and "'b'" in notes[0]


# ---------------------------------------------------------------- decisions on paper

PAPER = platform_of(
    {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "out": "a8"}]},
    {"match": ["Relu"], "use": [{"in": "a8", "out": "a8"}]},
    {"match": ["Tanh"], "exec": "float"},
    formats={"a8": {"bits": 8, "zero": "any", "signed": "auto"}, "w8": {"bits": 8}},
)


def on_paper(overrides):
    """Notes about three operators in a row: a linear layer, fused with an activation, and one in float."""
    row = node("l = Linear(x, w)", layer="fc"), node("r = Relu(l)", layer="act"), node("s = Tanh(r)", layer="end")
    graph = graph_of(*row, weights=["w"])
    assignment = assign(graph, PAPER, [("l", "r")], resolve_overrides(graph, overrides))
    return unapplied_overrides(graph, assignment, overrides)


@pytest.mark.parametrize(
    "choice, value, other",
    [
        ("activation_bits", 8, None),
        ("method", "symmetric", "power_of_two"),
        ("signed", True, False),
        ("rule", "mae", "kl"),
        ("z_threshold", 3.0, 4.0),
        ("range", (0.0, 1.0), (0.0, 2.0)),
    ],
)
def test_a_choice_about_a_fused_kernel_is_compared_with_its_result(choice, value, other):
    for layer in ("fc", "act"):
        assert on_paper({layer: {choice: value}}) == []
    if other is not None:  # of two choices for one kernel the later one wins
        with pytest.raises(PlanError, match=re.escape(f"'fc' (it has {other!r})")):
            on_paper([("fc", {choice: value}), ("act", {choice: other})])


def test_a_result_that_is_not_quantized_has_the_reason_of_its_operator():
    for choices in ({"rule": "mae"}, {"activation_bits": 4}):
        with pytest.raises(PlanError, match=r"'end' \('npu' computes Tanh in float\)"):
            on_paper({"end": choices})
    with pytest.raises(PlanError, match=r"'fc' \(overrides keep it in float\)"):
        on_paper([("fc", {"rule": "mae"}), ("fc", {"activation_bits": "float"})])
    notes = on_paper([(OfOp("Tanh"), {"rule": "mae"}), (OfOp("Tanh"), {"method": "symmetric"})])
    assert [re.findall(r"(\w+)=.*\('npu' computes Tanh in float\)$", n) for n in notes] == [["rule"], ["method"]]


def test_bits_of_the_input_and_float_agree_with_a_result_that_is_not_quantized():
    for choices in ({"activation_bits": 8}, {"activation_bits": "float"}):
        assert on_paper({"end": choices}) == []
    assert on_paper({"fc": {"bits": "float"}}) == []
