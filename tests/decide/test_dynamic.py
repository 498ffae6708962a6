"""Kernels that round what they read: a node in front of each, shared by those of one format, and taken out again."""

from __future__ import annotations

import torch

from chipfit.decide.assignment import Assignment
from chipfit.decide.dynamic import with_dynamic, without_dynamic
from chipfit.graph.ir import DYNAMIC, Graph, Node, Value
from chipfit.platform.schema import Platform

FORMATS = {
    "d8": {"bits": 8, "zero": "any"},
    "s8": {"bits": 8, "per": "row"},
    "b8": {"bits": 8, "per": "block", "axis": "in", "block": [4, 3]},
}
CHIP = Platform.model_validate({"name": "npu", "formats": FORMATS, "sources": {}, "ops": []})


def graph_of(last=6):
    nodes = [
        Node("a", "Linear", ("x", "w"), ("a",), layer="first"),
        Node("b", "Linear", ("x", "w"), ("b",), layer="second"),
        Node("c", "Add", ("a", "b"), ("c",), layer="sum"),
    ]
    values = {v: Value(v, (None, 5, last)) for v in ("x", "a", "b", "c")}
    return Graph(nodes, ["x"], ["c"], values, {"w": torch.ones(last, last)})


def made(dynamic, last=6):
    graph = graph_of(last)
    return graph, with_dynamic(graph, CHIP, Assignment(dynamic=dynamic))


def test_kernels_of_one_format_share_the_node_that_rounds_for_them():
    graph, out = made({"a": "d8", "b": "d8"})
    assert [(n.op, n.inputs, n.output) for n in out.nodes] == [
        (DYNAMIC, ("x",), "x_dynamic"),
        ("Linear", ("x_dynamic", "w"), "a"),
        ("Linear", ("x_dynamic", "w"), "b"),
        ("Add", ("a", "b"), "c"),
    ]
    first = out.nodes[0]
    assert first.attrs == {"qmin": -128, "qmax": 127, "affine": True, "per": "tensor", "block": 1}
    assert first.layer == "first" and out.values["x_dynamic"].shape == (None, 5, 6)
    assert [n.op for n in graph.nodes] == ["Linear", "Linear", "Add"] and "x_dynamic" not in graph.values


def test_kernels_of_two_formats_have_a_node_each():
    _, out = made({"a": "d8", "b": "s8", "c": "d8"})
    rounding = [n for n in out.nodes if n.op == DYNAMIC]
    assert [(n.data, n.attrs["affine"], n.attrs["per"]) for n in rounding] == [
        ("x", True, "tensor"),
        ("x", False, "row"),
        ("a", True, "tensor"),
    ]
    assert len({n.output for n in rounding}) == 3 and [n.layer for n in rounding] == ["first", "second", "sum"]
    sums = next(n for n in out.nodes if n.op == "Add")
    assert sums.inputs == (rounding[2].output, "b")


def test_blocks_divide_the_last_axis():
    for last, block in ((8, 4), (6, 3), (7, 1)):
        _, out = made({"a": "b8"}, last)
        assert out.nodes[0].attrs["block"] == block and out.nodes[0].attrs["per"] == "block"


def test_what_is_put_in_front_comes_out_again():
    graph, out = made({"a": "d8", "c": "s8"})
    back = without_dynamic(out)
    assert [(n.name, n.op, n.inputs, n.outputs) for n in back.nodes] == [
        (n.name, n.op, n.inputs, n.outputs) for n in graph.nodes
    ]
    assert back.values == graph.values and back.weights.keys() == graph.weights.keys()
    assert without_dynamic(graph) is graph


def test_an_operand_that_is_left_out_stays_so():
    graph = graph_of()
    graph.nodes[0] = graph.nodes[0].with_(inputs=("x", "w", None))
    out = with_dynamic(graph, CHIP, Assignment(dynamic={"a": "d8"}))
    assert out.nodes[1].inputs == ("x_dynamic", "w", None)
    assert without_dynamic(out).nodes[0].inputs == ("x", "w", None)
