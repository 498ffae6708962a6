"""What the report advises was tried: an override is named only where it was measured to help."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.report.advice import advice, most_added_noise, output_sqnr, tried
from tests.build import quantized, sequential, sqnr_db


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
        return sqnr_db(want, got)

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


# ---------------------------------------------------------------- repairs before floats


def unlike_channels():
    torch.manual_seed(0)
    wide, narrow, factor = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3), 10 ** (-3 * torch.rand(16))
    with torch.no_grad():
        wide.weight.mul_(factor.view(-1, 1, 1, 1))
        wide.bias.mul_(factor)
        narrow.weight.div_(factor.view(1, -1, 1, 1))
    return sequential(wide, nn.ReLU6(), narrow, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_the_report_states_the_loss_at_the_outputs_and_advises_repairs_before_floats():
    images = [torch.randn(16, 3, 8, 8) for _ in range(4)]
    left = quantized(unlike_channels(), images, settings=chipfit.Settings(repairs="off"))
    left.sensitivity(images)
    merit, said = left.plan.provenance["merit"], advice(left.report)
    assert f"{merit['sqnr_db']} dB over quantization noise on 64 calibration samples" in str(left.report)
    assert next(a for a in said if "Settings(equalize_groups='always')" in a).startswith(
        f"The outputs have {merit['sqnr_db']} dB, less than the {merit['expected_db']} dB of the bits: quantize again"
    )
    floats = [k for k, a in enumerate(said) if "'float'" in a]
    assert all(k > said.index(next(a for a in said if "equalize_groups" in a)) for k in floats)
    mended = quantized(unlike_channels(), images)
    assert not mended.report.unexplained and not [a for a in advice(mended.report) if "equalize_groups" in a]


def test_floats_are_advised_where_noise_is_made_not_where_it_has_piled_up(result):
    noise = {"0": 12.0, "1": 11.5, "2": 11.0}  # the first layer makes nearly all of it
    layers = [replace(r, sqnr_db=noise[r.name]) for r in result.report.layers]
    assert most_added_noise(replace(result.report, layers=tuple(layers)), result.graph) == (12.0, math.inf, "0")
