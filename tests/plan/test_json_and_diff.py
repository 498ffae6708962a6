"""Plans as text: they survive the way to JSON and back, and two of them can be compared."""

import json
from dataclasses import replace

import pytest
import torch

from chipfit.errors import PlanError
from chipfit.plan.diff import diff
from chipfit.plan.json_codec import plan_from_json, plan_to_json
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from tests.build import stored

NUMBERS = stored([0.1, 1 / 3], axis=0, format="w8", low=-127)
WEIGHT = TensorPlan(name="conv.weight", role="weight", layer="conv", op="Conv2D", stored=NUMBERS, origin="mse")
FLOAT = TensorPlan(name="y", role="activation", why="the chip keeps it in float", high=float("inf"))
PLAN = Plan(
    tensors={"conv.weight": WEIGHT, "y": FLOAT},
    nodes={"conv": NodePlan(name="conv", op="Conv2D", layer="conv", exec="int")},
    groups=(("conv", "relu"),),
    float_edges=frozenset({("y", "out"), ("a", "b")}),
    ties=(("p", "q"),),
    platform="ort_cpu",
    rewrites=("folded 'bn' into 'conv'",),
    provenance={"seed": 0, "settings": {"rule": "mse", "shape": (1, 2)}},
)


def _edited(**changes):
    if "scale" in changes and changes["scale"].dim() == 0:  # one scale has one zero point
        changes["zero_point"] = torch.tensor(0, dtype=torch.int32)
    return replace(PLAN, tensors={**PLAN.tensors, "conv.weight": WEIGHT.with_(**changes)})


def test_a_plan_comes_back_from_json_exactly():
    back = plan_from_json(*plan_to_json(PLAN))
    assert diff(PLAN, back) == []
    assert back.provenance == PLAN.provenance
    assert back.tensors["conv.weight"].scale.dtype == torch.float32
    assert back.tensors["conv.weight"].zero_point.dtype == torch.int32


def test_numbers_that_json_lacks_are_marked():
    data, _ = plan_to_json(PLAN)
    assert '"high": {"$float": "inf"}' in json.dumps(data, allow_nan=False)


def test_a_plan_edited_as_text_says_the_edit():
    data, numbers = plan_to_json(PLAN)
    data["tensors"]["conv.weight"]["origin"] = "by hand"
    edited = plan_from_json(data, numbers)
    assert [str(d) for d in diff(PLAN, edited)] == ["tensor 'conv.weight': origin 'mse' -> 'by hand'"]


def test_equal_plans_do_not_differ_whatever_their_provenance():
    assert diff(PLAN, _edited()) == diff(PLAN, replace(PLAN, provenance={})) == []


@pytest.mark.parametrize(
    "field, value, line",
    [
        ("grid", Grid(bits=4, qmin=-7, qmax=7, per="channel"), "'conv.weight': grid 8 bit -127..127 -> 4 bit -7..7"),
        ("scale", torch.tensor([0.1, 0.5]), "0.100000001..0.333333343, 1 differ -> [2] in 0.100000001..0.5, 1 differ"),
        ("scale", torch.tensor([0.1, 0.333333373]), "333333343, 1 differ -> [2] in 0.100000001..0.333333373, 1 differ"),
        ("scale", torch.tensor(0.25), "-> 0.25"),
        ("axis", 1, "tensor 'conv.weight': axis 0 -> 1"),
    ],
)
def test_a_difference_reads_as_a_line_even_where_it_is_in_the_last_place(field, value, line):
    (d,) = (d for d in diff(PLAN, _edited(**{field: value})) if d.field == field)
    assert line in str(d)


def test_what_only_one_plan_has_is_said():
    less = replace(PLAN, tensors={}, float_edges=frozenset({("a", "b")}))
    assert [str(d) for d in diff(less, PLAN)] == [
        "tensor 'conv.weight': absent -> present",
        "tensor 'y': absent -> present",
        "plan: float edges - -> ('y', 'out')",
    ]


@pytest.mark.parametrize("data", [[], {}, {"schema": 0}, {"schema": 1}], ids=str)
def test_what_is_not_a_plan_is_refused(data):
    with pytest.raises(PlanError, match="schema version|is missing"):
        plan_from_json(data, {})


def test_a_provenance_without_json_form_is_refused():
    with pytest.raises(PlanError, match="cannot be saved as JSON"):
        plan_to_json(replace(PLAN, provenance={"model": object()}))


@pytest.mark.parametrize(
    "key, value",
    [
        ("chosen", [["w", 4]]),
        ("settings", {"steps": ["gptq"]}),
        ("settings", {"rule": 3}),
        ("settings", {"z_threshold": "3"}),
    ],
)
def test_what_is_read_again_of_a_provenance_has_its_type(key, value):
    data, numbers = plan_to_json(PLAN)
    data["provenance"][key] = value
    with pytest.raises(PlanError, match="must be .*provenance"):
        plan_from_json(data, numbers)
    data["provenance"] = {"samples": ["a"], "settings": {"z_threshold": 3, "steps": {}}, "mine": [1]}
    assert plan_from_json(data, numbers).provenance == data["provenance"]
