"""What the report advises was tried: an override is named only where it was measured to help."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.report.advice import advice, output_sqnr, tried
from tests.build import quantized, sequential


@pytest.fixture(scope="module")
def spread():
    """A network whose first layer multiplies a tiny channel by huge weights: 8 bits hold neither beside the others."""
    torch.manual_seed(0)
    model = sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[:, 0] *= 1e4
    return model, [torch.randn(32, 8) * torch.tensor([1e-4] + [1.0] * 7)]


@pytest.fixture(scope="module")
def result(spread):
    made = quantized(*spread, rule="no_clipping")
    made.verify(spread[1])
    return made


def test_an_override_that_helps_is_advised_with_its_gain_and_the_gain_is_true(spread, result):
    model, data = spread
    weakest = min(result.report.layers, key=lambda r: r.sqnr_db if r.sqnr_db is not None else math.inf)
    (said,) = [a for a in advice(result.report) if "overrides=" in a]
    assert f"overrides={{'{weakest.name}': 'float'}}" in said and "tried on 2 calibration samples" in said
    before, after = (float(w) for w in said.split("lifts the outputs from ")[1].split(" dB")[0].split(" to "))

    def sqnr(r):
        x, want = data[0][:2], model(data[0][:2]).detach()
        with torch.no_grad():
            got = r.model(x)
        return float(10 * torch.log10(want.square().sum() / (got - want).square().sum()))

    other = quantized(model, data, rule="no_clipping", overrides={weakest.name: "float"})
    assert sqnr(result) == pytest.approx(before, abs=0.2) and sqnr(other) == pytest.approx(after, abs=0.2)
    assert after > before + 1


def test_advice_is_tried_on_top_of_earlier_overrides(spread):
    model, data = spread
    result = quantized(model, data, rule="no_clipping", overrides={"2": "float"})
    result.verify(data)
    (said,) = [a for a in advice(result.report) if "overrides=" in a]
    more = "0" if "{'0': 'float'}" in said else "1"
    other = quantized(model, data, rule="no_clipping", overrides={"2": "float", more: "float"})
    after = float(said.split(" to ")[1].split(" dB")[0])
    assert output_sqnr(other.graph, other.plan) == pytest.approx(after, abs=0.1)


def test_one_that_does_not_help_is_not_spoken_of(result):
    layers = [replace(r, sqnr_db=5.0 if r.name == "2" else None) for r in result.report.layers]
    report = replace(result.report, layers=tuple(layers))
    tries = []

    def edit(overrides):
        tries.append(overrides)
        other = result.edit(overrides)
        return other.graph, other.plan

    assert tried(report, result.graph, result.plan, edit) == ()
    assert tries == [{"2": "float"}]  # it was tried
    assert "Weakest result: '2' with 5.0 dB" in " ".join(advice(report))


def test_clipping_is_spoken_of_where_keeping_everything_is_better():
    torch.manual_seed(0)
    model, x = sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(64, 8)
    said = [a for a in advice(quantized(model, x, rule="percentile(share=0.8)").report) if "no_clipping" in a]
    assert all("tried on 2 calibration samples" in a and "clips" in a for a in said)
    assert not [a for a in advice(quantized(model, x).report) if "overrides={'0'" in a]


def test_a_loaded_result_has_no_samples_and_advises_nothing_that_needs_them(spread, tmp_path):
    model, data = spread
    quantized(model, data).save(tmp_path / "saved")
    assert chipfit.load(tmp_path / "saved").report.tried == ()


def test_the_noise_of_a_network_without_quantizers_is_none(result):
    assert output_sqnr(result.graph, type(result.plan)()) == math.inf
