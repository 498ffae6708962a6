"""What lies between a value and the linear operators behind it, on graphs of a few nodes."""

from __future__ import annotations

import pytest
import torch

from chipfit.graph.ir import Graph, Node, Value
from chipfit.graph.paths import adds_alike, only_reader, paths, scaled_by_channel


def graph_of(*nodes, outputs=("y",), weights=("w",), shapes=None):
    """(name, operator, inputs) each; a node's value has its name, shape [N, 2] unless `shapes` says otherwise."""
    made = [Node(name, op, tuple(inputs), (name,)) for name, op, inputs in nodes]
    values = {v: Value(v, (shapes or {}).get(v, (None, 2))) for v in ("x", *(n.name for n in made))}
    return Graph(made, ["x"], list(outputs), values, {w: torch.ones(2, 2) for w in weights})


def follow(graph, value, crossable=("Relu",)):
    found = paths(graph, graph.users(), value, lambda n: n.op in crossable)
    return [n.name for n in found.crossed], [n.name for n in found.ends], found.refused


def test_every_reader_is_followed_and_listed_as_they_run():
    graph = graph_of(
        ("b", "Relu", ["x"]),
        ("c", "Linear", ["x", "w"]),
        ("a", "Relu", ["b"]),
        ("e", "Linear", ["b", "w"]),
        ("d", "Linear", ["a", "w"]),
        outputs=("c", "d", "e"),
    )
    assert follow(graph, "x") == (["b", "a"], ["c", "e", "d"], "")


@pytest.mark.parametrize(
    "nodes, outputs, refused",
    [
        ([("r", "Relu", ["x"]), ("y", "Linear", ["r", "w"])], ("r", "y"), "'r' is an output of the model"),
        ([("s", "Softmax", ["x"]), ("y", "Linear", ["s", "w"])], ("y",), "Softmax 's' reads it"),
        ([("y", "Relu", ["z"])], ("y",), "nothing reads it"),
        ([("y", "Linear", ["x", "x"])], ("y",), "Linear 'y' reads it"),
    ],
)
def test_a_path_that_ends_elsewhere_says_where(nodes, outputs, refused):
    assert follow(graph_of(*nodes, outputs=outputs), "x")[2] == refused


def test_an_operator_is_crossed_only_where_the_value_is_its_one_operand():
    graph = graph_of(("y", "Relu", ["x", "z"]), ("l", "Linear", ["y", "w"]))
    assert follow(graph, "x") == ([], [], "Relu 'y' reads it")


@pytest.mark.parametrize("weight", ["a", "z"])
def test_a_weight_does_not_lead_to_the_operator_that_has_it(weight):
    graph = graph_of(("y", "Linear", ["x", weight]), weights=(weight,))
    assert follow(graph, weight) == ([], [], "Linear 'y' reads it")


def test_the_only_reader_reads_once_and_what_it_reads_is_not_returned():
    graph = graph_of(
        ("a", "Relu", ["x"]), ("b", "Relu", ["a"]), ("c", "Add", ["b", "b"]), ("y", "Relu", ["c"]), outputs=("a", "y")
    )
    users = graph.users()
    found = {v: only_reader(graph, users, v) for v in ("x", "a", "b", "c", "y")}
    assert {v: n and n.name for v, n in found.items()} == {"x": "a", "a": None, "b": None, "c": "y", "y": None}
    assert only_reader(graph, users, "nobody's") is None


@pytest.mark.parametrize(
    "op, attrs, scaled",
    [
        ("Relu", {}, True),
        ("MaxPool", {}, True),
        ("Sigmoid", {}, False),
        ("Softmax", {}, False),
        ("Reshape", {}, False),  # it may move numbers to other channels
        ("Nobody's", {}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (0, 0), (1, 2))}, True),
        ("Pad", {"value": 0.0, "padding": ((1, 2), (0, 0), (0, 0))}, True),
        ("Pad", {"value": 1.0, "padding": ((0, 0), (0, 0), (1, 2))}, False),
        ("Pad", {"value": -1.0, "padding": ((0, 0), (0, 0), (1, 2))}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (1, 0), (0, 0))}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (0, 1), (0, 0))}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (-1, 0), (0, 0))}, False),
        ("Pad", {"value": 0.0, "padding": ((0, 0), (0, -1), (0, 0))}, False),
    ],
)
def test_a_factor_of_each_channel_passes(op, attrs, scaled):
    assert scaled_by_channel(Node("n", op, ("x",), ("y",), attrs)) == scaled


@pytest.mark.parametrize(
    "op, inputs, shapes, alike",
    [
        ("Add", ["x", "z"], {}, True),
        ("Add", ["z", "x"], {"z": (None, 2)}, True),
        ("Add", ["x", "z"], {"z": (None, 1)}, False),
        ("Add", ["x", "z"], {"z": (None, 3)}, False),
        ("Add", ["x", "w"], {}, False),
        ("Mul", ["x", "z"], {}, False),
        ("Mul", ["x", "w"], {}, False),
    ],
)
def test_sums_of_two_activations_of_one_shape(op, inputs, shapes, alike):
    graph = graph_of(("z", "Relu", ["x"]), ("y", op, inputs), shapes=shapes)
    assert adds_alike(graph, graph.node("y")) == alike
