"""Weights whose scale is that of a block are rounded in closed form like any others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.graph.ir import Node
from chipfit.rounding.scale_bounds import weight_rows

DATA = [torch.randn(64, 64, generator=torch.Generator().manual_seed(k)) @ torch.randn(64, 64) for k in range(4)]


def quantized(rounding: str, inputs: str) -> chipfit.quantize:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).eval()
    settings = (
        chipfit.Settings(rounding=rounding, rounding_guard=False)
        if rounding != "off"
        else chipfit.Settings(rounding="off")
    )
    asked = {"Linear": {"bits": 4, "inputs": inputs}}
    return model, chipfit.quantize(model, DATA, "ort_dynamic", overrides=asked, settings=settings, progress=False)


@pytest.mark.parametrize("inputs", ["dynamic", "float"])
def test_the_error_in_the_outputs_is_less_than_half_that_of_the_nearest_codes(inputs):
    new = torch.cat(DATA)[:100] * 0.9
    errors = {}
    for rounding in ("off", "gptq"):
        model, result = quantized(rounding, inputs)
        with torch.no_grad():
            errors[rounding] = float((result.model(new) - model(new)).square().mean())
        assert result.verify([new]).sound
    assert errors["gptq"] < 0.5 * errors["off"]


def test_the_scales_of_blocks_stay_and_every_weight_lies_on_its_grid():
    _, plain = quantized("off", "float")
    _, result = quantized("gptq", "float")
    stored = result.plan["0.weight"]
    assert torch.equal(stored.scale, plain.plan["0.weight"].scale)
    w = result.graph.weights["0.weight"]
    assert torch.allclose(stored.round(w), w, atol=1e-6)
    assert not torch.equal(stored.quantize(w), stored.quantize(plain.graph.weights["0.weight"]))


def test_a_row_has_the_scale_of_each_of_its_blocks():
    _, result = quantized("off", "float")
    node: Node = result.graph.nodes[0]
    rows = weight_rows(result.plan, node, result.graph.weights["0.weight"])
    stored = result.plan["0.weight"]
    assert rows.ids is None and rows.scale.shape == (1, 96, 64)
    assert torch.equal(rows.scale[0, :, 31], stored.scale[:, 0]) and torch.equal(
        rows.scale[0, :, 32], stored.scale[:, 1]
    )
    assert torch.equal(rows.zero[0, :, 63], stored.zero_point[:, 1])
