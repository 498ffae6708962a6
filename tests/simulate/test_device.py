"""What a network returns on its device, and which operators that computes in float."""

from dataclasses import replace

import pytest
import torch

from chipfit.graph.ir import DYNAMIC, OPAQUE, Graph, Node, Value
from chipfit.plan.record import NodePlan, Plan
from chipfit.registry import lookup
from chipfit.simulate.device import float_operators, output
from tests.build import graph_of, node, plan_of
from tests.simulate.one_operator import Codes

PROFILE = lookup("kernels", "onnxruntime")
STORED = Codes(torch.zeros(1), 0.5, 3).stored()


def planned(*names: str, **more) -> Plan:
    return replace(plan_of(**dict.fromkeys(names, STORED)), **more)


def test_an_output_is_the_reals_of_its_codes_or_the_floats_that_were_computed():
    graph, plan = Graph([], [], [], {}, {"w": torch.tensor([7.0])}), planned("y")
    codes, reals = torch.tensor([5, 3, -1], dtype=torch.int8), torch.tensor([0.3, 0.7])
    assert output(graph, plan, {"y": codes}, "y").tolist() == [1.0, 0.0, -2.0]
    assert torch.equal(output(graph, plan, {"y": reals}, "y"), reals)  # stored in codes, but read before these
    assert torch.equal(output(graph, plan, {"z": reals}, "z"), reals)
    assert output(graph, plan, {"z": codes}, "z").dtype == torch.int8  # integers that are no codes
    assert output(graph, plan, {}, "w").tolist() == [7.0] and output(graph, plan, {"n": 4}, "n").tolist() == 4


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
    assert behind(graph_of(node), planned("x")) == (called,)


@pytest.mark.parametrize("op, told", [("Transpose", False), ("Relu", False), ("Neg", False), ("Sin", True)])
def test_what_moves_numbers_or_is_exact_by_its_standard_is_left_out(op, told):
    node = Node("n", op, ("x",), ("v",), {"perm": (0, 1)} if op == "Transpose" else {})
    assert behind(graph_of(node), planned("x")) == ((op,) if told else ())


def test_operators_are_followed_back_through_both_operands_once():
    graph = graph_of("u = Sin(x)", "v = Cos(u)", "y = Mul(v, u)")
    assert behind(graph, planned("x")) == ("Cos", "Sin") and behind(graph, planned("x", "u")) == ("Cos",)
    assert behind(graph, planned("x", "u", "v")) == ()
    for edge, found in (("y", ("Cos",)), ("d", ())):
        assert behind(graph, planned("x", "u", "v", float_edges=frozenset({("v", edge)}))) == found


def test_members_of_a_fused_group_are_told_together():
    graph = graph_of("u = Sin(x)", "y = Tanh(u)")
    assert behind(graph, planned("x", groups=(("u", "y"),))) == ("Sin", "Tanh")


def test_integers_and_weights_that_are_read_are_computed_by_nobody():
    assert behind(graph_of("i = Floor(x)", "y = Mul(i, w)", weights={"w": torch.ones(4)}), planned("x")) == ("Floor",)
    graph = graph_of("i = Floor(x)", node("u = Gather(x, i)", {"axis": 1}))
    graph.values["i"] = Value("i", (4,), "int64")
    assert behind(graph, planned("x")) == ()


@pytest.mark.parametrize("per, told", [("tensor", ()), ("row", ("Linear",))])
def test_dynamic_integers_are_integers_where_the_product_is_exact(per, told):
    """Where it is not, its operand is followed to the rounding, which makes integers, and no further."""
    nodes = "u = Sin(x)", node(f"m = {DYNAMIC}(u)", {"per": per}), node("y = Linear(m, w, -)", name="l")
    plan = replace(plan_of(w=STORED), nodes={"l": NodePlan(name="l", op="Linear", exec="int")})
    plan.tensors["w"] = plan.tensors["w"].with_(zero_point=torch.tensor(0, dtype=torch.int32))
    assert behind(graph_of(*nodes, weights=["w"]), plan) == told
