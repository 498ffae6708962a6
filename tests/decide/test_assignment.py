"""What decisions about units mean for tensors, on graphs of a few nodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from chipfit.decide.assignment import TensorSpec, _AssignmentBuilder, assign
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.platform.schema import Format
from tests.build import platform_of


def chip(*ops, **more):
    formats = {
        "a8": {"bits": 8, "zero": "any"},
        "w8": {"bits": 8, "per": "channel"},
        "b32": {"bits": 32, "per": "channel"},
    }
    formats |= {"w4": {"bits": 4, "per": "block", "axis": "in", "block": 2}, "r8": {"bits": 8, "per": "channel"}}
    return platform_of(*ops, formats=formats, **more)


def graph_of(*nodes, outputs=None, **weights):
    made = [Node(name, op, tuple(ins), (name,), attrs) for name, op, ins, attrs in nodes]
    values = {v: Value(v, (None, 4)) for v in ("x", *(n.name for n in made))}
    return Graph(made, ["x"], outputs or [made[-1].name], values, weights)


LINEAR = {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "b": "b32", "out": "a8"}]}
ADD = {"match": ["Add"], "use": [{"in": "a8", "out": "a8"}]}


@pytest.mark.parametrize(
    "role, codes, edges, outputs, dropped",
    [
        ("activation", (), {("v", "b")}, ["b"], True),  # all that is read in float
        ("activation", (), {("v", "b"), ("w", "b")}, ["b"], True),
        ("activation", (), {("w", "b")}, ["b"], False),
        ("activation", (), {("v", "b")}, ["v"], False),
        ("activation", ("v",), {("v", "b")}, ["b"], False),
        ("weight", (), {("v", "b")}, ["b"], False),
    ],
)
def test_a_result_in_float_that_all_readers_take_so_is_not_stored(role, codes, edges, outputs, dropped):
    graph = graph_of(("v", "Relu", ["x"], {}), ("b", "Relu", ["v"], {}), outputs=outputs)
    slot = TensorSpec(name="v", role=role, format_name="a8", format=Format(bits=8), node="v")
    record = _AssignmentBuilder(
        graph, chip(), SimpleNamespace(quantized_outputs={*codes}), tensors={"v": slot}, float_edges=set(edges)
    )
    record.drop_unread()
    assert ("v" not in record.tensors) is dropped
    assert record.floats == ({"v": "its readers take it in float"} if dropped else {})
    assert record.float_edges == edges - ({("v", "b")} if dropped else set())


def test_a_result_that_nothing_reads_or_an_input_stays_stored():
    graph = graph_of(("v", "Relu", ["x"], {}), ("b", "Relu", ["x"], {}))
    for name, node in (("v", "v"), ("x", "")):
        slot = TensorSpec(name=name, role="activation", format_name="a8", format=Format(bits=8), node=node)
        edges = {(name, n.name) for n in graph.users().get(name, ())}
        record = _AssignmentBuilder(
            graph, chip(), SimpleNamespace(quantized_outputs=set()), tensors={name: slot}, float_edges=edges
        )
        record.drop_unread()
        assert name in record.tensors


def test_tensors_of_a_linear_layer():
    graph = graph_of(("l", "Linear", ["x", "w", "b"], {}), w=torch.ones(4, 4), b=torch.ones(4))
    found = assign(graph, chip(LINEAR, math={"q_round": "half_up", "w_round": "half_away"}))
    assert {n: (s.role, s.format_name, s.axis, s.block, s.node, s.rounding) for n, s in found.tensors.items()} == {
        "w": ("weight", "w8", 0, None, "l", "half_away"), "b": ("bias", "b32", 0, None, "l", "half_away"),
        "x": ("activation", "a8", None, None, "", "half_up"), "l": ("activation", "a8", None, None, "l", "half_up"),
    }  # fmt: skip
    (constraint,) = found.constraints
    slots = {"in0": ("x",), "ins": ("x",), "w": ("w",), "b": ("b",), "outs": ("l",), "out": ("l",)}
    assert dict(constraint.slots) == slots and constraint.op == "Linear"
    assert (found.floats, found.float_edges, found.quantized_outputs) == ({}, frozenset(), {"x", "l"})
    parts = Graph([Node("s", "Split", ("x",), ("a", "b"), {"axis": 1, "sizes": (2, 2)})], ["x"], ["a", "b"], {}, {})
    parts.values = {"x": Value("x", (None, 4)), **{v: Value(v, (None, 2)) for v in "ab"}}
    (split,) = assign(parts, chip({"match": ["Split"], "use": [{"in": "a8", "out": "a8"}]})).constraints
    assert (split.slots["outs"], split.slots["out"]) == (("a", "b"), ("a",))
    only = assign(graph, chip(LINEAR, math={"q_round": "half_up"}))
    assert only.tensors["w"].rounding == "half_up"


@pytest.mark.parametrize(
    "constant, axis",
    [
        (torch.ones(4), 0),
        (torch.ones(1, 4), 1),
        (torch.ones(1, 1), None),
        (torch.ones(2, 4), None),
        (torch.ones(()), None),
    ],
)
def test_a_constant_operand_has_channels_where_one_axis_is_wide(constant, axis):
    graph = graph_of(("s", "Add", ["x", "c"], {}), c=constant)
    add = {"match": ["Add"], "use": [{"in": ["a8", "r8"], "out": "a8"}]}
    slot = assign(graph, chip(add)).tensors["c"]
    assert (slot.role, slot.format_name, slot.axis) == ("weight", "r8", axis)
    plain = assign(graph, chip(ADD)).tensors["c"]
    assert (plain.format_name, plain.axis) == ("a8", None)


def test_weights_in_blocks_lie_along_what_is_summed():
    blocks = {"match": ["Linear"], "use": [{"in": "a8", "w": "w4", "out": "a8"}]}
    slot = assign(graph_of(("l", "Linear", ["x", "w"], {}), w=torch.ones(4, 6)), chip(blocks)).tensors["w"]
    assert (slot.axis, slot.block) == (1, 2)


def test_what_stays_in_float_says_why():
    graph = graph_of(("l", "Linear", ["x", "w", "b"], {}), w=torch.ones(4, 4), b=torch.ones(4))
    kept = assign(graph, chip(LINEAR), overrides={"l": {"float": "by hand"}})
    assert kept.tensors == {} and kept.float_edges == {("w", "l"), ("b", "l")}
    assert kept.floats["w"] == "its operator runs in float" and kept.floats["l"] == "by hand"
    assert kept.nodes["l"].exec == "float" and kept.constraints == ()
    bare = {"match": ["Linear"], "use": [{"in": "a8", "w": "w8", "out": "float"}]}
    found = assign(graph, chip(bare))
    assert found.floats == {"b": "the platform stores it in float", "l": "the platform keeps this result in float"}
    weights = assign(graph, chip(LINEAR), overrides={"l": {"bits": "float"}})
    assert weights.floats["w"] == "overrides keep it in float" and weights.tensors.keys() == {"x", "l"}


@pytest.mark.parametrize("unlisted, refused", [("reject", True), ("float", False)])
def test_operators_that_a_platform_does_not_list_are_refused_where_it_says_so(unlisted, refused):
    graph = graph_of(("e", "Erf", ["x"], {}), ("l", "Linear", ["e", "w"], {}), w=torch.ones(4, 4))
    p = chip(LINEAR, unlisted=unlisted)
    if refused:
        with pytest.raises(UnsupportedError, match="Erf 'e' cannot run on 'npu'"):
            assign(graph, p)
        graph.values["e"] = Value("e", (None, 4), "int64")  # integers are computed anywhere
        graph.nodes.pop()
        graph.outputs = ["e"]
    assert assign(graph, p).nodes["e"].exec == "float"


def test_what_a_kernel_in_integers_hands_over_in_float_is_not_stored_where_it_is_read_so():
    """Its reader would have rounded it, and runs in float in the end: its other operand has codes of another kind."""
    kernel = {"in": "a8", "w": "w8", "b": "b32", "out": "float"}
    mixed = {"match": ["Add"], "use": [{"in": "u8", "out": "float"}]}
    signed = {"match": ["Relu"], "use": [{"in": "a8", "out": "a8"}]}
    platform = chip({"match": ["Linear"], "use": [kernel]}, mixed, signed)
    platform = platform.model_copy(
        update={"formats": {**platform.formats, "u8": platform.formats["a8"].model_copy(update={"signed": False})}}
    )
    graph = graph_of(
        ("l", "Linear", ["x", "w", "b"], {}),
        ("r", "Relu", ["x"], {}),
        ("s", "Add", ["r", "l"], {}),
        w=torch.ones(4, 4),
        b=torch.ones(4),
    )
    found = assign(graph, platform)
    assert found.nodes["l"].exec == "int" and found.nodes["s"].exec == "float"
    assert "l" not in found.tensors and found.floats["l"] == "its readers take it in float"
    assert not [e for e in found.float_edges if e[0] == "l"]
