"""Weights whose scale is that of a block are rounded in closed form like any others."""

from __future__ import annotations

import pytest
import torch

from chipfit import Settings
from chipfit.rounding.gptq import weight_rows
from tests.build import NEAREST, mlp, quantized, randn

DATA = [randn(64, 64, seed=k) @ randn(64, 64, seed=9) for k in range(4)]
GPTQ = Settings(rounding="gptq", rounding_guard=False)


def fitted(settings, inputs="float"):
    asked = {"Linear": {"bits": 4, "inputs": inputs}}
    return quantized(mlp(64, 96, 32), DATA, "ort_dynamic", overrides=asked, settings=settings)


@pytest.mark.parametrize("inputs", ["dynamic", "float"])
def test_the_error_in_the_outputs_is_less_than_half_that_of_the_nearest_values(inputs):
    new, model = torch.cat(DATA)[:100] * 0.9, mlp(64, 96, 32)
    plain, better = (fitted(s, inputs) for s in (NEAREST, GPTQ))
    with torch.no_grad():
        before, after = (float((r.model(new) - model(new)).square().mean()) for r in (plain, better))
    assert after < 0.5 * before and better.verify([new]).sound


def test_the_scales_of_blocks_stay_and_every_weight_lies_on_its_grid():
    plain, result = fitted(NEAREST), fitted(GPTQ)
    stored, w = result.plan["0.weight"], result.graph.weights["0.weight"]
    assert torch.equal(stored.scale, plain.plan["0.weight"].scale) and torch.allclose(stored.round(w), w, atol=1e-6)
    assert not torch.equal(stored.quantize(w), stored.quantize(plain.graph.weights["0.weight"]))


def test_a_row_has_the_scale_of_each_of_its_blocks():
    result = fitted(NEAREST)
    rows = weight_rows(result.plan, result.graph.nodes[0], result.graph.weights["0.weight"])
    stored = result.plan["0.weight"]
    assert rows.ids is None and rows.scale.shape == (1, 96, 64)
    for column, block in ((31, 0), (32, 1)):
        assert torch.equal(rows.scale[0, :, column], stored.scale[:, block])
    assert torch.equal(rows.zero[0, :, 63], stored.zero_point[:, 1])
