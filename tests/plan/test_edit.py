"""Editing a decision: what keeps its format keeps its numbers, and the result is still exact."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import NothingQuantizedError, PlanError, UnknownNameError
from tests.build import quantized, randn, sequential
from tests.zoo import make


@pytest.fixture
def fitted():
    model, batch = make("residual")
    return quantized(model, batch), batch


def test_excluding_a_layer_leaves_every_other_number_as_it_was(fitted):
    result, batch = fitted
    edited = result.edit({"head": "float"})
    assert edited.plan.nodes["linear"].why == "overrides keep 'head' in float"
    for name, t in edited.plan.tensors.items():
        if t.quantized and t.role != "bias":
            assert torch.equal(t.scale, result.plan.tensors[name].scale)
    assert edited.verify([batch]).exact


def test_excluding_by_operator_and_by_layer_type(fitted):
    result, _batch = fitted
    assert all(n.exec == "float" for n in result.edit({"Add": "float"}).plan.nodes.values() if n.op == "Add")
    assert all(n.exec == "float" for n in result.edit({"Conv2d": "float"}).plan.nodes.values() if n.op == "Conv2D")


def test_other_bits_for_one_layer():
    model, batch = make("residual")
    result = quantized(model, batch, "imx500")
    edited = result.edit({"a.0": {"bits": 4}})
    changed = [n for n, t in edited.plan.tensors.items() if t.grid != result.plan.tensors[n].grid]
    assert changed == ["a.0.weight"] and edited.plan.tensors["a.0.weight"].grid.bits == 4


def test_a_loaded_result_can_be_edited(fitted, tmp_path):
    result, batch = fitted
    edited = chipfit.load(result.save(tmp_path / "saved")).edit({"a": "float"})
    assert edited.verify([batch]).sound
    same = chipfit.load(tmp_path / "saved").edit({"head": "float"})
    assert {n: t.scale for n, t in same.plan.tensors.items() if t.quantized}.keys() == {
        n for n, t in result.edit({"head": "float"}).plan.tensors.items() if t.quantized
    }


def test_mistakes_are_typed_errors(fitted):
    result, _ = fitted
    with pytest.raises(UnknownNameError, match="'head'"):
        result.edit({"haed": "float"})
    with pytest.raises(NothingQuantizedError):
        result.edit({"Conv2D": "float", "Linear": "float", "Relu": "float", "Add": "float", "GlobalAvgPool": "float"})
    with pytest.raises(PlanError, match="not understood"):
        result.edit({"head": {"bitz": 4}})


def test_a_tensor_that_the_plan_does_not_know_is_named_with_those_near_it():
    plan = quantized(sequential(nn.Linear(3, 2)), randn(4, 3)).plan
    with pytest.raises(PlanError, match="'0.wieght'.*did you mean '0.weight'"):
        plan["0.wieght"]
    with pytest.raises(PlanError, match=r"plan\.tensors holds all of them"):
        plan["conv1"]
