"""What a network returns on its device, and which operators that computes in float."""

from __future__ import annotations

import pytest
import torch

from chipfit.graph.ir import DYNAMIC, OPAQUE, Graph, Node, Value
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.registry import lookup
from chipfit.simulate.device import float_operators, output
from tests.simulate.one_operator import Codes

PROFILE = lookup("kernels", "onnxruntime")
STORED = Codes(torch.zeros(1), 0.5, 3).stored()


def planned(*names: str, **more) -> Plan:
    return Plan(tensors={n: TensorPlan(name=n, role="activation", stored=STORED) for n in names}, **more)


def test_an_output_is_the_reals_of_its_codes_or_the_floats_that_were_computed():
    graph, plan = Graph([], [], [], {}, {"w": torch.tensor([7.0])}), planned("y")
    codes, reals = torch.tensor([5, 3, -1], dtype=torch.int8), torch.tensor([0.3, 0.7])
    assert output(graph, plan, {"y": codes}, "y").tolist() == [1.0, 0.0, -2.0]
    assert torch.equal(output(graph, plan, {"y": reals}, "y"), reals)  # stored in codes, but read before these
    assert torch.equal(output(graph, plan, {"z": reals}, "z"), reals)
    assert output(graph, plan, {"z": codes}, "z").dtype == torch.int8  # integers that are no codes
    assert output(graph, plan, {}, "w").tolist() == [7.0] and output(graph, plan, {"n": 4}, "n").tolist() == 4


def line(*nodes: Node, **weights: torch.Tensor) -> Graph:
    names = ["x", *(o for n in nodes for o in n.outputs)]
    return Graph([*nodes], ["x"], [names[-1]], {n: Value(n, (None, 4)) for n in names}, weights)


def behind(graph: Graph, plan: Plan) -> tuple[str, ...]:
    return float_operators(graph, plan, PROFILE)(graph.outputs[0])


def opaque(target: str, layer_type: str = "") -> Node:
    return Node("o", OPAQUE, ("x",), ("v",), {"target": target, "args": (), "kwargs": {}}, layer_type=layer_type)


@pytest.mark.parametrize(
    "node, called",
    [
        (opaque("aten.erfinv.default", "Thing"), "aten.erfinv.default"),
        (opaque("keras:my_package>Twist", "Twist"), "Twist"),
        (Node("o", "Erf", ("x",), ("v",), {}, layer_type="Erf2"), "Erf"),
    ],
)
def test_an_operator_in_float_has_the_name_that_a_user_knows(node, called):
    assert behind(line(node), planned("x")) == (called,)


@pytest.mark.parametrize("op, told", [("Transpose", False), ("Relu", False), ("Neg", False), ("Sin", True)])
def test_what_moves_numbers_or_is_exact_by_its_standard_is_left_out(op, told):
    node = Node("n", op, ("x",), ("v",), {"perm": (0, 1)} if op == "Transpose" else {})
    assert behind(line(node), planned("x")) == ((op,) if told else ())


def test_operators_are_followed_back_through_both_operands_once():
    nodes = Node("a", "Sin", ("x",), ("u",)), Node("b", "Cos", ("u",), ("v",)), Node("c", "Mul", ("v", "u"), ("y",))
    assert behind(line(*nodes), planned("x")) == ("Cos", "Sin")
    assert behind(line(*nodes), planned("x", "u")) == ("Cos",)
    assert behind(line(*nodes), planned("x", "u", "v")) == ()
    early = planned("x", "u", "v", float_edges=frozenset({("v", "c")}))
    assert behind(line(*nodes), early) == ("Cos",)
    assert behind(line(*nodes), planned("x", "u", "v", float_edges=frozenset({("v", "d")}))) == ()


def test_members_of_a_fused_group_are_told_together():
    nodes = Node("a", "Sin", ("x",), ("u",)), Node("b", "Tanh", ("u",), ("y",))
    assert behind(line(*nodes), planned("x", groups=(("a", "b"),))) == ("Sin", "Tanh")


def test_integers_and_weights_that_are_read_are_computed_by_nobody():
    node = Node("a", "Gather", ("x", "i"), ("u",), {"axis": 1})
    graph = line(Node("s", "Floor", ("x",), ("i",)), Node("m", "Mul", ("i", "w"), ("y",)), w=torch.ones(4))
    assert behind(graph, planned("x")) == ("Floor",)
    graph = line(Node("s", "Floor", ("x",), ("i",)), node)
    graph.values["i"] = Value("i", (4,), "int64")
    assert behind(graph, planned("x")) == ()


@pytest.mark.parametrize("per, told", [("tensor", ()), ("row", ("Linear",))])
def test_codes_of_the_moment_are_codes_where_the_product_is_exact(per, told):
    """Where it is not, its operand is followed to the rounding, which makes codes, and no further."""
    nodes = (
        Node("s", "Sin", ("x",), ("u",)),
        Node("d", DYNAMIC, ("u",), ("m",), {"per": per}),
        Node("l", "Linear", ("m", "w", None), ("y",)),
    )
    weight = TensorPlan(name="w", role="weight", stored=Codes(torch.ones(4, 4), 0.5).stored())
    plan = Plan(tensors={"w": weight}, nodes={"l": NodePlan(name="l", op="Linear", exec="int")})
    found = behind(line(*nodes, w=torch.ones(4, 4)), plan)
    assert found == told
