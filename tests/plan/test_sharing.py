"""Assignment of quantizers to tensors: tied and moved tensors are quantized once."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit.errors import TrainingError
from chipfit.plan.sharing import share_quantizers, with_trained_numbers
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import ScaleBound
from tests.build import graph_of, model_of, node, plan_of, quantized, randn, stored


def moved(f):
    """Return the result of a convolution behind which only `f` stands."""
    net = model_of(lambda m, x: f(m.conv(x)), conv=nn.Conv2d(3, 4, 1))
    return quantized(net, randn(4, 3, 6, 6), "tflite_int8")


MOVES = {
    "flatten": lambda y: y.flatten(1),
    "gather": lambda y: y[:, [2, 0]],  # with indices, which have no quantizer
    "transpose and slice": lambda y: y.transpose(1, 2)[:, 1:],
    "concat": lambda y: torch.cat([y, y], 1),
}


@pytest.mark.parametrize("f", MOVES.values(), ids=MOVES)
def test_what_is_only_moved_is_not_rounded_again(f):
    result = moved(f)
    found, graph = share_quantizers(result.graph, result.plan), result.graph
    (source,) = (n.output for n in graph.nodes if n.op == "Conv2D")
    (end,) = graph.outputs
    assert end != source and found.owner[end] == found.owner[source] == source
    assert source in found.rounded and end not in found.rounded


def test_what_is_computed_is_rounded_by_its_own():
    result = moved(torch.tanh)
    found = share_quantizers(result.graph, result.plan)
    (end,) = result.graph.outputs
    assert found.owner[end] == end and end in found.rounded and end in found.fixed  # 1/128 on this chip
    assert "conv.bias" in found.products and found.products["conv.bias"] == (result.graph.inputs[0], "conv.weight")


# ---------------------------------------------------------------- plans of a few tensors

CONCAT = graph_of(node("y = Concat(x, z)", {"axis": 1}))
LINEAR = graph_of("y = Linear(x, w, b)", weights="wb")


def test_tied_tensors_of_equal_numbers_share_a_quantizer():
    plan = plan_of(x=stored(), z=stored(0.25), y=stored(), u=stored(), v=stored(0.25), t=None)
    found = share_quantizers(CONCAT, replace(plan, ties=(("x", "y", "z"), ("u", "v"))))
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
    plan = plan_of(**{"x": stored(), "z": stored(), "y": stored(), **given}, float_edges=edges)
    found = share_quantizers(CONCAT, replace(plan, ties=(("x", "z"),)))
    assert found.owner["y"] == owner
    assert found.rounded == set(rounded) | ({"z"} if given.get("z", 1) is not None else set())


def test_all_that_shares_a_quantizer_goes_along_with_what_moves():
    """y is tied to u, and holds numbers of x: all three have one quantizer, that of x."""
    graph = graph_of("u = Relu(z)", node("y = Reshape(x)", {"shape": (-1, 3)}))
    found = share_quantizers(graph, replace(plan_of(u=stored(), y=stored(), x=stored()), ties=(("u", "y"),)))
    assert found.owner == {"u": "x", "y": "x", "x": "x"} and found.rounded == {"u", "x"}


PRODUCT = {"x": stored(0.5), "w": stored([0.5, 1.0, 2.0], axis=0), "b": stored([0.25, 0.5, 1.0], axis=0)}


@pytest.mark.parametrize(
    "change, product",
    [
        ({}, True),
        ({"b": stored([0.25, 0.5, 2.0], axis=0)}, False),
        ({"b": stored([0.25, 0.5, 1.0], zero=1, axis=0)}, False),
        ({"b": stored(0.25)}, False),
        ({"w": stored(0.5), "b": stored([0.25, 0.25, 0.25], axis=0)}, True),
        ({"w": stored(0.5), "b": stored([0.25, 0.25, 0.5], axis=0)}, False),
        ({"x": stored([0.5, 0.5, 0.5], axis=1)}, False),
        ({"b": None}, False),
    ],
)
def test_biases_at_the_scale_of_the_products_follow_it(change, product):
    plan = plan_of(**{**PRODUCT, **change})
    found = share_quantizers(LINEAR, plan)
    assert found.products == ({"b": ("x", "w")} if product else {})
    assert (found.owner.get("b") == "b") is ("b" in found.rounded) is plan.quantized("b")


def test_bounds_are_about_owners_and_those_that_cancel_are_gone():
    plan = replace(
        plan_of(x=stored(zero=3), y=stored(zero=3), z=stored(0.25)),
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
    found = share_quantizers(graph_of("y = Add(x, z)"), plan)
    assert (found.fixed, found.zeros, found.sums) == ({"x"}, {"x"}, {"x": 7.0})
    assert [(r.op, r.terms) for r in found.limits] == [("Add", (("x", 2), ("z", -1))), ("Sub", (("z", 2),))]
    assert found.start(plan, "x").grid.zero == 3 and found.start(plan, "z") is plan["z"]


def test_trained_numbers_are_those_of_the_plan_where_nothing_changed():
    t, nothing = plan_of(x=stored(0.5, zero=3), y=None).tensors.values()
    assert with_trained_numbers(nothing, torch.tensor(2.0)) is nothing
    assert all(with_trained_numbers(t, torch.tensor(0.5), zero) is t for zero in (None, torch.tensor(3.2)))
    scaled = with_trained_numbers(t, torch.tensor(0.25, dtype=torch.float64, requires_grad=True), torch.tensor(-2.6))
    assert float(scaled.stored.scale) == 0.25 and int(scaled.stored.zero_point) == -3
    assert scaled.stored.scale.dtype == torch.float32 and scaled.origin.endswith(", trained")
    t = plan_of(w=stored([0.5, 1.0], axis=0)).tensors["w"]
    assert with_trained_numbers(t, torch.tensor(2.0)).stored.scale.tolist() == [2.0, 2.0]
    narrow = with_trained_numbers(t, t.stored.scale, grid=Grid(bits=4, qmin=-8, qmax=7, zero=5)).stored
    assert (narrow.grid.bits, narrow.grid.zero) == (4, "any")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(TrainingError, match="must be positive"):
            with_trained_numbers(t, torch.tensor([0.5, wrong]))
