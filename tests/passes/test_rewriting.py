"""Who reads a value, whether a layer may change, and why not, on graphs of a few nodes."""

import pytest

from chipfit.graph.ir import Node
from chipfit.passes.rewriting import Readers, adds_equal_shapes, scales_by_channel
from tests.build import graph_of


def follow(graph, value):
    found = Readers(graph).linear_behind(value, lambda n: n.op == "Relu")
    return [n.name for n in found.crossed], [n.name for n in found.ends], found.refusal


def test_every_reader_is_followed_and_listed_in_order_of_execution():
    nodes = "b = Relu(x)", "c = Linear(x, w)", "a = Relu(b)", "e = Linear(b, w)", "d = Linear(a, w)"
    graph = graph_of(*nodes, weights="w", outputs=["c", "d", "e"])
    assert follow(graph, "x") == (["b", "a"], ["c", "e", "d"], "")


@pytest.mark.parametrize(
    "nodes, outputs, refusal",
    [
        (["r = Relu(x)", "y = Linear(r, w)"], ["r", "y"], "'r' is an output of the model"),
        (["s = Softmax(x)", "y = Linear(s, w)"], ["y"], "Softmax 's' reads it"),
        (["y = Relu(z)"], ["y"], "nothing reads it"),
        (["y = Linear(x, x)"], ["y"], "Linear 'y' reads it"),
        (["y = Relu(x, z)", "l = Linear(y, w)"], ["l"], "Relu 'y' reads it"),  # which has another operand
        (["y = Linear(z, x)"], ["y"], "Linear 'y' reads it"),  # as its weight
    ],
)
def test_a_reader_that_is_behind_no_linear_operator_is_named(nodes, outputs, refusal):
    assert follow(graph_of(*nodes, weights="w", outputs=outputs), "x")[2] == refusal


def test_the_only_reader_reads_once_and_what_it_reads_is_not_returned():
    graph = graph_of("a = Relu(x)", "b = Relu(a)", "c = Add(b, b)", "y = Relu(c)", outputs=["a", "y"])
    readers = Readers(graph)
    found = {v: readers.only(v) for v in ("x", "a", "b", "c", "y")}
    assert {v: n and n.name for v, n in found.items()} == {"x": "a", "a": None, "b": None, "c": "y", "y": None}
    assert readers.only("nobody's") is None and readers.of("nobody's") == []


@pytest.mark.parametrize(
    "nodes, outputs, why",
    [
        (["y = Linear(x, w, b)"], "y", ""),
        (["y = Linear(x, w)"], "yb", ""),  # another operator's bias may be returned
        (["y = Linear(x, w, b)", "z = Linear(y, w)"], "z", "'w' is read by several operators"),
        (["y = Linear(x, w, b)", "z = Linear(y, v, b)"], "z", "'b' is read by several operators"),
        (["y = Linear(x, w, b)"], "yw", "'w' is an output of the model"),
        (["y = Linear(x, w, b)"], "yb", "'b' is an output of the model"),
    ],
)
def test_a_layer_changes_only_if_nobody_else_has_its_weight_or_bias(nodes, outputs, why):
    graph = graph_of(*nodes, weights="vwb", outputs=list(outputs))
    assert Readers(graph).why_fixed(graph.nodes[0]) == why
    assert Readers(graph).why_fixed() == ""


def test_identities_and_dropout_are_passed_while_they_alone_read():
    nodes = "a = Linear(x, w)", "b = Identity(a)", "c = Dropout(b)", "d = Identity(c)", "y = Add(c, d)"
    graph = graph_of(*nodes, weights="w")
    value, readers = Readers(graph).after_identities(graph.nodes[0])
    assert value == "c" and [n.name for n in readers] == ["d", "y"]


@pytest.mark.parametrize(
    "op, attrs, scaled",
    [
        ("Relu", {}, True),
        ("MaxPool", {}, True),
        ("Reshape", {}, False),  # it may move numbers to other channels
        ("Nobody's", {}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (0, 0), (1, 2))}, True),
        ("Pad", {"value": 0.0, "padding": ((1, 2), (0, 0), (0, 0))}, True),
        ("Pad", {"value": 1.0, "padding": ((0, 0), (0, 0), (1, 2))}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (1, 0), (0, 0))}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (-1, 0), (0, 0))}, False),
    ],
)
def test_a_factor_of_each_channel_passes(op, attrs, scaled):
    assert scales_by_channel(Node("n", op, ("x",), ("y",), attrs)) == scaled


@pytest.mark.parametrize(
    "op, inputs, shapes, alike",
    [
        ("Add", "x, z", {}, True),
        ("Add", "z, x", {"z": (None, 4)}, True),
        ("Add", "x, z", {"z": (None, 1)}, False),
        ("Add", "x, w", {}, False),
        ("Mul", "x, w", {}, False),
    ],
)
def test_sums_of_two_activations_of_one_shape(op, inputs, shapes, alike):
    graph = graph_of("z = Relu(x)", f"y = {op}({inputs})", weights="w", shapes=shapes, inputs=["x"])
    assert adds_equal_shapes(graph, graph.node("y")) == alike
