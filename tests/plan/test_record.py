"""A plan and its entries: what they answer, and how they show themselves."""

import pytest
import torch

from chipfit.errors import PlanError
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.scale_bounds import ScaleBound
from tests.build import stored

ONE = TensorPlan(
    name="x", role="activation", layer="act", op="Relu", stored=stored(0.25, 3), origin="mse over 2 batches"
)
MANY = TensorPlan(name="w", role="weight", stored=stored([0.5, 0.125, 0.25], axis=0, per="channel"), origin="mse")
FLOAT = TensorPlan(name="y", role="activation", why="overrides keep it in float")


def test_a_tensor_in_float_has_a_reason_and_no_numbers():
    assert not FLOAT.quantized and FLOAT.format == "float"
    assert (FLOAT.grid, FLOAT.scale, FLOAT.axis) == (None, None, None)
    assert repr(FLOAT) == str(FLOAT) == "activation y: float, overrides keep it in float"


def test_a_quantized_tensor_shows_its_numbers_in_a_line():
    assert ONE.quantized and ONE.format == "a8" and ONE.axis is None and float(ONE.scale) == 0.25
    assert repr(ONE) == "activation x: a8, codes -128..127, scale 0.25, zero point 3; mse over 2 batches"
    assert MANY.axis == 0 and MANY.grid.per == "channel"
    assert repr(MANY) == "weight w: a8, codes -128..127, scale 0.125..0.5, one per channel, zero point 0; mse"


def test_a_copy_differs_in_what_is_named():
    changed = ONE.with_(scale=2 * ONE.scale, origin="by hand")
    assert (float(changed.scale), changed.origin, changed.layer) == (0.5, "by hand", "act")
    assert int(changed.stored.zero_point) == 3 and float(ONE.scale) == 0.25
    assert ONE.with_(why="x").stored is ONE.stored
    assert not ONE.with_(stored=None).quantized and FLOAT.with_(why="because").why == "because"
    with pytest.raises(PlanError, match="Tensor 'y' is not quantized, so it has no scale"):
        FLOAT.with_(scale=torch.tensor(1.0))


PLAN = Plan(tensors={"x": ONE, "w": MANY, "y": FLOAT}, platform="npu", float_edges=frozenset({("x", "n"), ("v", "m")}))


def test_a_plan_answers_about_a_tensor_by_its_name():
    assert PLAN["x"] is ONE.stored and PLAN.stored("w") is MANY.stored
    assert [PLAN.stored(k) for k in ("y", "lost", None)] == [None] * 3
    assert [PLAN.quantized(k) for k in ("x", "w", "y", "lost", None)] == [True, True, False, False, False]
    assert (PLAN.layer_of("x"), PLAN.layer_of("w")) == ("act", "w")
    with pytest.raises(PlanError, match="Tensor 'y' is not quantized. Got: overrides keep it in float"):
        PLAN["y"]
    with pytest.raises(PlanError, match="no tensor in the plan named 'z'.*holds all of them"):
        PLAN["z"]


def test_a_value_that_some_reader_takes_before_its_codes_is_known():
    known = [["x"], {"w", "v"}, ["w", "y"], []]
    assert [PLAN.before_rounding(k) for k in known] == [True, True, False, False]


SCREEN = """\
Plan for npu: 2 of 3 tensors quantized
operators  2 int, 1 float
kernels    1 of several operators
ties       2 groups of tensors share scale and zero point
limits     2 bounds on scales, such as: Add: x >= 1 (scales)
fixed      3 tensors whose numbers the platform dictates
rewrites   2, such as: folded

tensor  role        format  scale       origin
x       activation  a8      0.25        mse over 2 batches
w       weight      a8      0.125..0.5  mse
y       activation  float               overrides keep it in float"""


def test_a_plan_shows_its_tensors_and_one_example_of_everything_else():
    nodes = {k: NodePlan(name=k, op="Relu", exec=e) for k, e in (("a", "int"), ("b", "float"), ("c", "int"))}
    bounds = tuple(ScaleBound(op="Add", terms=((k, 1),), low=0.0) for k in "xw")
    rules = {"groups": (("a", "c"),), "ties": (("x", "y"), ("w", "v")), "limits": bounds, "fixed": ("x", "y", "w")}
    plan = Plan(tensors=PLAN.tensors, nodes=nodes, platform="npu", rewrites=("folded", "fused"), **rules)
    assert str(plan) == SCREEN
