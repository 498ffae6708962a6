"""Assignments: what decisions about groups mean for tensors, on graphs of a few nodes."""

from types import SimpleNamespace

import pytest
import torch

from chipfit.decide.assignment import AssignmentBuilder, TensorSpec, assign
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Value
from chipfit.platform.schema import Format
from tests.build import graph_of, node, platform_of

A8 = {"bits": 8, "zero": "any"}
FORMATS = {
    "a8": A8, "u8": {**A8, "signed": False}, "w8": {"bits": 8, "per": "channel"}, "b32": {"bits": 32, "per": "channel"},
    "w4": {"bits": 4, "per": "block", "axis": "in", "block": 2},
}  # fmt: skip


def rule(op, inputs, out, **weights):
    return {"match": [op], "use": [{"in": inputs, "out": out, **weights}]}


def chip(*ops, **more):
    return platform_of(*ops, formats=FORMATS, **more)


LINEAR, ADD = rule("Linear", "a8", "a8", w="w8", b="b32"), rule("Add", "a8", "a8")
LAYER = graph_of("l = Linear(x, w, b)", weights={"w": torch.ones(4, 4), "b": torch.ones(4)})


@pytest.mark.parametrize(
    "role, quantized, edges, outputs, dropped",
    [
        ("activation", "", {"v b"}, "b", True),  # all readers take it in float
        ("activation", "", {"v b", "w b"}, "b", True),
        ("activation", "", {"w b"}, "b", False),
        ("activation", "", {"v b"}, "v", False),
        ("activation", "v", {"v b"}, "b", False),
        ("weight", "", {"v b"}, "b", False),
    ],
)
def test_a_float_result_that_all_readers_take_in_float_is_not_stored(role, quantized, edges, outputs, dropped):
    edges = {tuple(e.split()) for e in edges}
    spec = TensorSpec(name="v", role=role, format_name="a8", format=Format(bits=8), node="v")
    graph, formats = graph_of("v = Relu(x)", "b = Relu(v)", outputs=[outputs]), SimpleNamespace()
    formats.quantized_outputs = set(quantized)
    builder = AssignmentBuilder(graph, chip(), formats, tensors={"v": spec}, float_edges=set(edges))
    builder.drop_unread()
    assert ("v" not in builder.tensors) is dropped
    assert builder.floats == ({"v": "its readers take it in float"} if dropped else {})
    assert builder.float_edges == edges - ({("v", "b")} if dropped else set())


@pytest.mark.parametrize("name, made_by, edges", [("v", "v", set()), ("x", "", {("x", "v"), ("x", "b")})])
def test_a_result_that_nothing_reads_or_an_input_stays_stored(name, made_by, edges):
    spec = TensorSpec(name=name, role="activation", format_name="a8", format=Format(bits=8), node=made_by)
    formats = SimpleNamespace(quantized_outputs=set())
    graph = graph_of("v = Relu(x)", "b = Relu(x)")
    builder = AssignmentBuilder(graph, chip(), formats, tensors={name: spec}, float_edges=edges)
    builder.drop_unread()
    assert name in builder.tensors


def test_tensors_of_a_linear_layer():
    found = assign(LAYER, chip(LINEAR, math={"q_round": "half_up", "w_round": "half_away"}))
    assert {n: (s.role, s.format_name, s.axis, s.block, s.node, s.rounding) for n, s in found.tensors.items()} == {
        "w": ("weight", "w8", 0, None, "l", "half_away"), "b": ("bias", "b32", 0, None, "l", "half_away"),
        "x": ("activation", "a8", None, None, "", "half_up"), "l": ("activation", "a8", None, None, "l", "half_up"),
    }  # fmt: skip
    (constraint,) = found.constraints
    slots = {"in0": ("x",), "ins": ("x",), "w": ("w",), "b": ("b",), "outs": ("l",), "out": ("l",)}
    assert dict(constraint.slots) == slots and constraint.op == "Linear"
    assert (found.floats, found.float_edges, found.quantized_outputs) == ({}, frozenset(), {"x", "l"})
    assert assign(LAYER, chip(LINEAR, math={"q_round": "half_up"})).tensors["w"].rounding == "half_up"


def test_an_operator_with_two_results_has_both_in_its_rules():
    parts = graph_of(node("a, b = Split(x)", {"axis": 1, "sizes": (2, 2)}), shapes={"a": (None, 2), "b": (None, 2)})
    (split,) = assign(parts, chip(rule("Split", "a8", "a8"))).constraints
    assert (split.slots["outs"], split.slots["out"]) == (("a", "b"), ("a",))


@pytest.mark.parametrize("shape, axis", [((4,), 0), ((1, 4), 1), ((1, 1), None), ((2, 4), None), ((), None)])
def test_a_constant_operand_has_channels_if_one_axis_is_wide(shape, axis):
    graph = graph_of("s = Add(x, c)", weights={"c": torch.ones(shape)})
    spec = assign(graph, chip(rule("Add", ["a8", "w8"], "a8"))).tensors["c"]
    assert (spec.role, spec.format_name, spec.axis) == ("weight", "w8", axis)
    plain = assign(graph, chip(ADD)).tensors["c"]
    assert (plain.format_name, plain.axis) == ("a8", None)


def test_weights_in_blocks_lie_along_what_is_summed():
    graph = graph_of("l = Linear(x, w)", weights={"w": torch.ones(4, 6)})
    spec = assign(graph, chip(rule("Linear", "a8", "a8", w="w4"))).tensors["w"]
    assert (spec.axis, spec.block) == (1, 2)


def test_tensors_that_stay_float_have_a_reason():
    kept = assign(LAYER, chip(LINEAR), overrides={"l": {"float": "by hand"}})
    assert kept.tensors == {} and kept.float_edges == {("w", "l"), ("b", "l")}
    assert kept.floats["w"] == "its operator runs in float" and kept.floats["l"] == "by hand"
    assert kept.nodes["l"].exec == "float" and kept.constraints == ()
    found = assign(LAYER, chip(rule("Linear", "a8", "float", w="w8")))
    assert found.floats == {"b": "the platform stores it in float", "l": "the platform keeps this result in float"}
    weights = assign(LAYER, chip(LINEAR), overrides={"l": {"bits": "float"}})
    assert weights.floats["w"] == "overrides keep it in float" and weights.tensors.keys() == {"x", "l"}


def test_an_unlisted_operator_on_floats_is_refused_if_the_platform_rejects_it():
    graph = graph_of("e = Erf(x)")
    with pytest.raises(UnsupportedError, match="Erf 'e' cannot run on 'npu'.* Got: 'npu' lists no rule for Erf"):
        assign(graph, chip(LINEAR, unlisted="reject"))
    short = {**rule("Erf", "a8", "a8"), "where": {"rank": {"min": 3}}}
    with pytest.raises(UnsupportedError, match="Got: 'npu' runs Erf only with rank at least 3"):
        assign(graph, chip(LINEAR, short, unlisted="reject"))
    assert assign(graph, chip(LINEAR, unlisted="float")).nodes["e"].exec == "float"
    graph.values["e"] = Value("e", (None, 4), "int64")  # integers are computed anywhere
    assert assign(graph, chip(LINEAR, unlisted="reject")).nodes["e"].exec == "float"


def test_a_float_result_of_an_integer_kernel_is_not_stored_for_a_reader_that_runs_in_float():
    """Its reader would have quantized it, and runs in float in the end: its other operand has another format."""
    ops = rule("Linear", "a8", "float", w="w8", b="b32"), rule("Add", "u8", "float"), rule("Relu", "a8", "a8")
    graph = graph_of("l = Linear(x, w, b)", "r = Relu(x)", "s = Add(r, l)", weights=LAYER.weights)
    found = assign(graph, chip(*ops))
    assert found.nodes["l"].exec == "int" and found.nodes["s"].exec == "float"
    assert "l" not in found.tensors and found.floats["l"] == "its readers take it in float"
    assert not [e for e in found.float_edges if e[0] == "l"]
