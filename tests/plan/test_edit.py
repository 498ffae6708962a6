"""Editing a decision: what keeps its format keeps its numbers, and the result is still exact."""

from __future__ import annotations

import pytest
import torch

import chipfit
from chipfit.errors import NothingQuantizedError, PlanError, UnknownNameError
from tests.build import quantized
from tests.zoo import make


@pytest.fixture(scope="module")
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


@pytest.mark.parametrize("name, op", [("Add", "Add"), ("Conv2d", "Conv2D")])
def test_operators_and_layer_types_are_excluded_by_their_name(name, op, fitted):
    assert all(n.exec == "float" for n in fitted[0].edit({name: "float"}).plan.nodes.values() if n.op == op)


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
    with pytest.raises(PlanError, match="'head.wieght'.*did you mean 'head.weight'"):
        result.plan["head.wieght"]
    with pytest.raises(NothingQuantizedError):
        result.edit({"Conv2D": "float", "Linear": "float", "Relu": "float", "Add": "float", "GlobalAvgPool": "float"})
    with pytest.raises(PlanError, match="not understood"):
        result.edit({"head": {"bitz": 4}})
