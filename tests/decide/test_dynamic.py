"""Dynamic kernels: a DynamicQuantize node before each, shared by kernels of one format, and taken out again."""

from __future__ import annotations

import pytest
import torch

from chipfit.decide.assignment import Assignment
from chipfit.decide.insertions import with_dynamic, without_dynamic
from chipfit.graph.ir import DYNAMIC
from tests.build import graph_of, node, platform_of

FORMATS = {
    "d8": {"bits": 8, "zero": "any"},
    "s8": {"bits": 8, "per": "row"},
    "b8": {"bits": 8, "per": "block", "axis": "in", "block": [4, 3]},
}


def inserted(last=6, **dynamic):
    """The graph without and with nodes before kernels: `a="d8"` makes a a dynamic one."""
    first, second = node("a = Linear(x, w)", layer="first"), node("b = Linear(x, w, -)", layer="second")
    nodes = first, second, node("c = Add(a, b)", layer="sum")
    graph = graph_of(*nodes, weights={"w": torch.ones(last, last)}, shape=(None, 5, last))
    return graph, with_dynamic(graph, platform_of(formats=FORMATS), Assignment(dynamic=dynamic))


def test_kernels_of_one_format_share_a_node():
    graph, out = inserted(a="d8", b="d8")
    assert [(n.op, n.inputs, n.output) for n in out.nodes] == [
        (DYNAMIC, ("x",), "x_dynamic"),
        ("Linear", ("x_dynamic", "w"), "a"),
        ("Linear", ("x_dynamic", "w", None), "b"),
        ("Add", ("a", "b"), "c"),
    ]
    first = out.nodes[0]
    assert first.attrs == {"qmin": -128, "qmax": 127, "affine": True, "per": "tensor", "block": 1}
    assert first.layer == "first" and out.values["x_dynamic"].shape == (None, 5, 6)
    assert [n.op for n in graph.nodes] == ["Linear", "Linear", "Add"] and "x_dynamic" not in graph.values


def test_kernels_of_two_formats_have_a_node_each():
    _, out = inserted(a="d8", b="s8", c="d8")
    made = [n for n in out.nodes if n.op == DYNAMIC]
    assert [(n.data, n.attrs["affine"], n.attrs["per"], n.layer) for n in made] == [
        ("x", True, "tensor", "first"),
        ("x", False, "row", "second"),
        ("a", True, "tensor", "sum"),
    ]
    assert len({n.output for n in made}) == 3 and out.nodes[-1].inputs == (made[2].output, "b")


@pytest.mark.parametrize("last, block", [(8, 4), (6, 3), (7, 1)])
def test_blocks_divide_the_last_axis(last, block):
    _, out = inserted(last, a="b8")
    assert out.nodes[0].attrs["block"] == block and out.nodes[0].attrs["per"] == "block"


def test_inserted_nodes_come_out_again():
    graph, out = inserted(a="d8", c="s8")
    back = without_dynamic(out)
    assert back.nodes == graph.nodes and back.values == graph.values and back.weights.keys() == graph.weights.keys()
    assert without_dynamic(graph) is graph
