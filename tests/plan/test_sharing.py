"""Which quantizer rounds which tensor: what is tied or only moved is rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import TrainingError
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import Plan, TensorPlan
from chipfit.plan.sharing import share_quantizers, with_trained_numbers
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from tests.build import stored

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Moves(nn.Module):
    """A convolution's result, moved."""

    def __init__(self, f):
        super().__init__()
        self.conv, self.f = nn.Conv2d(3, 4, 1), f

    def forward(self, x):
        return self.f(self.conv(x))


@pytest.mark.parametrize(
    "f",
    [
        lambda y: y.flatten(1),
        lambda y: y[:, [2, 0]],  # with indices, which have no quantizer
        lambda y: y.transpose(1, 2)[:, 1:],
        lambda y: torch.cat([y, y], 1),
    ],
    ids=["flatten", "gather", "transpose and slice", "concat"],
)
def test_what_is_only_moved_is_not_rounded_again(f):
    result = chipfit.quantize(Moves(f).eval(), [X], "tflite_int8", progress=False)
    found, graph = share_quantizers(result.graph, result.plan), result.graph
    (source,) = (n.output for n in graph.nodes if n.op == "Conv2D")
    (end,) = graph.outputs
    assert end != source and found.owner[end] == found.owner[source] == source
    assert source in found.rounded and end not in found.rounded


def test_what_is_computed_is_rounded_by_its_own():
    result = chipfit.quantize(Moves(torch.tanh).eval(), [X], "tflite_int8", progress=False)
    found = share_quantizers(result.graph, result.plan)
    (end,) = result.graph.outputs
    assert found.owner[end] == end and end in found.rounded and end in found.fixed  # 1/128 on this chip
    assert "conv.bias" in found.products and found.products["conv.bias"] == (result.graph.inputs[0], "conv.weight")


# ---------------------------------------------------------------- plans of a few tensors

GRID = Grid(bits=8, qmin=-128, qmax=127, zero="any")


def tensors(**given):
    """Name -> how it is stored; weights are called w, biases b."""
    roles = {"w": "weight", "b": "bias"}
    return {n: TensorPlan(name=n, role=roles.get(n[0], "activation"), stored=s) for n, s in given.items()}


def graph_of(*nodes, weights=("w", "b")):
    made = [Node(o, op, tuple(ins), (o,), attrs) for op, ins, o, attrs in nodes]
    values = {v: Value(v, (None, 3)) for v in ("x", "z", *(n.output for n in made))}
    return Graph(made, ["x", "z"], [made[-1].output], values, {w: torch.ones(3) for w in weights})


CONCAT, LINEAR = ("Concat", "xz", "y", {"axis": 1}), ("Linear", "xwb", "y", {})


def test_tied_tensors_of_equal_numbers_share_a_quantizer():
    graph = graph_of(CONCAT)
    plan = Plan(
        tensors=tensors(x=stored(), z=stored(0.25), y=stored(), u=stored(), v=stored(0.25), t=None),
        ties=(("x", "y", "z"), ("u", "v")),
    )
    found = share_quantizers(graph, plan)
    assert found.owner == {"x": "x", "z": "z", "y": "x", "u": "u", "v": "v"} and found.rounded == set("xzyuv")


@pytest.mark.parametrize(
    "given, edges, owner, rounded",
    [
        ({}, (), "x", "x"),
        ({"z": stored(0.25)}, (), "y", "xzy"),
        ({"z": None}, (), "y", "xy"),
        ({}, (("x", "y"),), "y", "xzy"),
        ({}, (("x", "other"),), "x", "x"),
        ({"y": stored(0.25)}, (), "y", "xzy"),
    ],
)
def test_what_joins_numbers_of_one_quantizer_is_rounded_already(given, edges, owner, rounded):
    plan = Plan(
        tensors=tensors(**{"x": stored(), "z": stored(), "y": stored(), **given}),
        ties=(("x", "z"),),
        float_edges=frozenset(edges),
    )
    found = share_quantizers(graph_of(CONCAT), plan)
    assert found.owner["y"] == owner
    assert found.rounded == set(rounded) | ({"z"} if given.get("z", 1) is not None else set())


def test_all_that_shares_a_quantizer_goes_along_with_what_moves():
    """y is tied to u, and holds numbers of x: all three have one quantizer, that of x."""
    graph = graph_of(("Relu", "z", "u", {}), ("Reshape", "x", "y", {"shape": (-1, 3)}))
    plan = Plan(tensors=tensors(u=stored(), y=stored(), x=stored()), ties=(("u", "y"),))
    found = share_quantizers(graph, plan)
    assert found.owner == {"u": "x", "y": "x", "x": "x"} and found.rounded == {"u", "x"}


PRODUCT = {"x": stored(0.5), "w": stored([0.5, 1.0, 2.0], axis=0), "b": stored([0.25, 0.5, 1.0], axis=0)}


@pytest.mark.parametrize(
    "change, product",
    [
        ({}, True),
        ({"b": stored([0.25, 0.5, 2.0], axis=0)}, False),
        ({"b": stored([0.25, 0.5, 1.0], zero=1, axis=0)}, False),
        ({"b": stored(0.25)}, False),
        ({"w": stored(0.5), "b": stored(0.25)}, True),
        ({"w": stored(0.5), "b": stored([0.25, 0.25, 0.25], axis=0)}, True),
        ({"w": stored(0.5), "b": stored([0.25, 0.25, 0.5], axis=0)}, False),
        ({"x": stored([0.5, 0.5, 0.5], axis=1)}, False),
        ({"x": None}, False),
        ({"w": None}, False),
    ],
)
def test_biases_at_the_scale_of_the_products_follow_it(change, product):
    found = share_quantizers(graph_of(LINEAR), Plan(tensors=tensors(**{**PRODUCT, **change})))
    assert found.products == ({"b": ("x", "w")} if product else {})
    assert found.owner["b"] == "b" and "b" in found.rounded


def test_a_bias_that_is_not_stored_has_no_quantizer():
    found = share_quantizers(graph_of(LINEAR), Plan(tensors=tensors(**{**PRODUCT, "b": None})))
    assert found.owner == {"x": "x", "w": "w"} and found.products == {}


def test_bounds_are_about_owners_and_those_that_cancel_are_gone():
    plan = Plan(
        tensors=tensors(x=stored(zero=3), y=stored(zero=3), z=stored(0.25)),
        ties=(("x", "y"),),
        fixed=("y", "gone"),
        zeros=("y", "gone"),
        sums=(("y", 7.0), ("gone", 1.0)),
        limits=(
            ScaleBound(op="Add", terms=(("x", 1), ("y", 1), ("z", -1)), high=0.0),
            ScaleBound(op="Mul", terms=(("x", 1), ("y", -1)), high=0.0),
            ScaleBound(op="Sub", terms=(("x", 1), ("y", -1), ("z", 2)), low=-1.0),
        ),
    )
    found = share_quantizers(graph_of(("Add", "xz", "y", {})), plan)
    assert (found.fixed, found.zeros, found.sums) == ({"x"}, {"x"}, {"x": 7.0})
    assert [(r.op, r.terms) for r in found.limits] == [("Add", (("x", 2), ("z", -1))), ("Sub", (("z", 2),))]
    assert found.start(plan, "x").grid.zero == 3 and found.start(plan, "z") is plan["z"]


def test_trained_numbers_are_those_of_the_plan_where_nothing_changed():
    (t,) = tensors(x=stored(0.5, zero=3)).values()
    (nothing,) = tensors(x=None).values()
    assert with_trained_numbers(nothing, torch.tensor(2.0)) is nothing
    assert (
        with_trained_numbers(t, torch.tensor(0.5)) is t
        and with_trained_numbers(t, torch.tensor(0.5), torch.tensor(3.2)) is t
    )
    scaled = with_trained_numbers(t, torch.tensor(0.25, dtype=torch.float64, requires_grad=True), torch.tensor(-2.6))
    assert float(scaled.stored.scale) == 0.25 and int(scaled.stored.zero_point) == -3
    assert scaled.stored.scale.dtype == torch.float32 and scaled.origin.endswith(", trained")
    (t,) = tensors(w=stored([0.5, 1.0], axis=0)).values()
    assert with_trained_numbers(t, torch.tensor(2.0)).stored.scale.tolist() == [2.0, 2.0]
    narrow = with_trained_numbers(t, t.stored.scale, grid=Grid(bits=4, qmin=-8, qmax=7, zero=5)).stored
    assert (narrow.grid.bits, narrow.grid.zero) == (4, "any")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TrainingError, match="must be positive"):
            with_trained_numbers(t, torch.tensor([0.5, wrong]))
