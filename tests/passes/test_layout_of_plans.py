"""The layout pass for a graph that has a plan: what is inserted has the numbers of what it rearranges."""

from __future__ import annotations

import pytest
import torch

from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.layout import apply_layout, same_numbers
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored

CONV = {"stride": (1, 1), "padding": ((0, 0), (0, 0)), "dilation": (1, 1), "groups": 1}


def tensor(name: str, scale: float | None) -> TensorPlan:
    if scale is None:
        return TensorPlan(name=name, role="activation", why="kept")
    zero, grid = torch.tensor(0, dtype=torch.int32), Grid(bits=8, qmin=-128, qmax=127)
    stored = Stored(format="a8", grid=grid, scale=torch.tensor(scale), zero_point=zero)
    return TensorPlan(name=name, role="activation", stored=stored)


def plan(float_edges: tuple[tuple[str, str], ...] = (), **scales: float | None) -> Plan:
    nodes = {n: NodePlan(name=n, op="Conv2D", exec="int") for n in ("c", "t")}
    return Plan(tensors={n: tensor(n, s) for n, s in scales.items()}, nodes=nodes, float_edges=frozenset(float_edges))


def one_convolution() -> Graph:
    nodes = [Node("c", "Conv2D", ("x", "w"), ("y",), CONV, layer="net.conv")]
    return Graph(nodes, ["x"], ["y"], {v: Value(v, (None, 3, 4, 4)) for v in "xy"}, {"w": torch.ones(3, 3, 1, 1)})


@pytest.mark.parametrize("scale", [0.5, None])
def test_an_inserted_value_has_the_numbers_of_what_it_rearranges(scale):
    before = plan(x=scale, y=0.25)
    new, after = apply_layout(one_convolution(), before, "channels_last")
    entry, conv, leave = new.graph.nodes
    assert [n.op for n in new.graph.nodes] == ["Transpose", "Conv2D", "Transpose"]
    assert (entry.attrs["perm"], leave.attrs["perm"]) == ((0, 2, 3, 1), (0, 3, 1, 2))
    copy = next(i for i, (source, _) in new.copies.items() if source == "x")
    assert conv.data == copy == entry.output
    if scale is None:
        assert copy not in after.tensors
    else:
        assert after.tensors[copy].name == copy and same_numbers(after, copy, "x")
    assert after.nodes[copy] == NodePlan(name=copy, op="Transpose", exec="follow" if scale else "float")
    left = next(i for i, (source, _) in new.copies.items() if source == "y")
    assert after.tensors[left].scale == 0.25 and after.nodes[left].exec == "follow"
    assert after.nodes["c"] == before.nodes["c"] and after.tensors["x"] == before.tensors["x"]
    assert len(after.nodes) == 4 and set(before.tensors) == {"x", "y"} and set(before.nodes) == {"c", "t"}
    assert after.float_edges == frozenset()


def test_what_a_reader_takes_before_it_is_rounded_is_rearranged_in_float():
    new, after = apply_layout(one_convolution(), plan((("x", "c"),), x=0.5, y=0.25), "channels_last")
    entry = new.graph.nodes[0]
    assert entry.output not in after.tensors and after.nodes[entry.name].exec == "float"
    assert after.float_edges == {("x", "c"), ("x", entry.name), (entry.output, "c")}


@pytest.mark.parametrize("scale", [0.5, None])
def test_a_rearranged_constant_has_the_numbers_of_the_one_that_the_user_knows(scale):
    graph = one_convolution()
    graph.nodes.append(Node("t", "Add", ("y", "shift"), ("z",)))
    graph.values["z"], graph.outputs = Value("z", (None, 3, 4, 4)), ["z"]
    graph.weights["shift"] = torch.ones(3, 1, 1)
    before = plan(x=0.5, y=0.5, shift=scale)
    new, after = apply_layout(graph, before, "channels_last")
    copy = next(i for i, (source, _) in new.copies.items() if source == "shift")
    assert new.graph.weights[copy].shape[-1] == 3 and copy not in after.nodes
    assert (copy in after.tensors) is (scale is not None) and same_numbers(after, copy, "shift")


def test_inputs_are_held_rearranged_only_where_borders_may_move():
    def ops(**how: bool) -> list[str]:
        return [
            n.op for n in apply_layout(one_convolution(), plan(x=0.5, y=0.5), "channels_last", **how)[0].graph.nodes
        ]

    assert ops() == ops(change_io=False) == ["Transpose", "Conv2D", "Transpose"]
    assert ops(change_io=True) == ["Conv2D"]


@pytest.mark.parametrize(
    "scales, edges, stays",
    [
        ({"y": 0.5, "z": 0.5}, (), False),
        ({"y": 0.5, "z": 0.25}, (), True),  # the transposition rounds again
        ({"y": 0.5, "z": None}, (), True),
        ({"y": None, "z": 0.5}, (), True),
        ({"y": None, "z": None}, (), False),
        ({}, (), False),  # neither has a plan: float
        ({"y": 0.5, "z": 0.5}, (("z", "r"),), True),  # z has a side that is not rounded
    ],
)
def test_a_transposition_of_the_models_own_stays_where_it_stores_other_numbers(scales, edges, stays):
    """conv, then (0, 2, 3, 1), then ReLU: channels last, the transposition has nothing to do."""
    nodes = [
        Node("c", "Conv2D", ("x", "w"), ("y",), CONV),
        Node("t", "Transpose", ("y",), ("z",), {"perm": (0, 2, 3, 1)}),
        Node("r", "Relu", ("z",), ("o",)),
    ]
    values = {v: Value(v, (None, 3, 4, 5)) for v in "xy"} | {v: Value(v, (None, 4, 5, 3)) for v in "zo"}
    graph = Graph(nodes, ["x"], ["o"], values, {"w": torch.ones(3, 3, 1, 1)})
    new, _ = apply_layout(graph, plan(edges, x=0.5, **scales), "channels_last")
    assert ("t" in [n.name for n in new.graph.nodes]) is stays
    assert [n.op for n in new.graph.nodes if n.name in "cr"] == ["Conv2D", "Relu"]


@pytest.mark.parametrize(
    "a, b, same", [(0.5, 0.5, True), (0.5, 0.25, False), (None, None, True), (0.5, None, False), (None, 0.5, False)]
)
def test_numbers_are_the_same_on_one_grid_or_both_in_float(a, b, same):
    assert same_numbers(plan(a=a, b=b), "a", "b") is same
