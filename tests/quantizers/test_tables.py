"""Formats with tables go the whole way: look-up weights, logarithmic codes, 8-bit floats."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.quantizers.tables import float_table


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5)
    ).eval()


X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("platform, kind, noise", [("nnie", "log", 0.05), ("graphcore_fp8", "float", 0.1)])
def test_the_simulation_rounds_to_the_table_and_stays_near_the_float_network(network, platform, kind, noise):
    result = chipfit.quantize(network, [X], platform=platform, progress=False)
    weights = [t for t in result.plan.tensors.values() if t.role == "weight" and t.quantized]
    assert len(weights) == 3 and {t.grid.kind for t in weights} == {kind}
    with torch.no_grad():
        want, got = network(X), result.model(X)
    assert 0 < float((want - got).norm() / want.norm()) < noise


def test_look_up_weights_take_as_many_values_as_the_index_has(network, tmp_path):
    result = chipfit.quantize(network, [X], platform="coreml@iOS16", overrides={"Conv2D": {"bits": 4}}, progress=False)
    t = result.plan.tensors["0.weight"]
    assert t.grid.kind == "lut" and len(t.grid.table) <= 16 and 0.0 in t.grid.table
    from chipfit.quantizers.grids import fake_quantize

    assert len(fake_quantize(result.graph.weights["0.weight"], t.scale, t.zero_point, t.grid).unique()) <= 16
    assert chipfit.load(result.save(tmp_path / "plan")).plan.tensors["0.weight"].grid == t.grid
    result.model.train()
    result.model(X).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for n, p in result.model.named_parameters() if n == "0.weight")


def test_onnx_refuses_tables_and_the_encodings_hold_them(network, tmp_path):
    result = chipfit.quantize(network, [X], platform="graphcore_fp8", progress=False)
    with pytest.raises(UnsupportedError, match="integer grids only"):
        result.export(tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
    written = json.loads(result.export(tmp_path / "m.json").read_text())["tensors"]["0.weight"]
    assert written["kind"] == "float" and max(written["table"]) == 448


@pytest.mark.parametrize(
    "name, positive, least, greatest",
    [
        ("e2m1", 7, 0.5, 6.0),
        ("e2m3", 31, 0.125, 7.5),
        ("e3m2", 31, 0.0625, 28.0),
        ("e4m3", 126, 2.0**-9, 448.0),
        ("e5m2", 123, 2.0**-16, 57344.0),
    ],
)
def test_a_narrow_float_has_the_values_of_its_specification(name, positive, least, greatest):
    """All codes but zeros, infinities and NaNs; ends as in OCP Microscaling Formats 1.0, section 5.3."""
    table = float_table(name)
    assert (len(table), table[positive], table[positive + 1], table[-1]) == (2 * positive + 1, 0.0, least, greatest)
    assert table == tuple(-v for v in reversed(table))
