"""Data that cannot be right are doubted aloud: in the report, on the terminal, with layer and figures."""

import logging

import pytest
import torch
from torch import nn

import chipfit
from chipfit.calibration.data_checks import check_input_scale
from chipfit.errors import CaptureError, DataError
from chipfit.frameworks.torch.capture import capture
from chipfit.report.html import page
from tests.build import quantized, sequential
from tests.report.test_report import text_of


def net():
    """A small network whose batch norms know images of 0..1."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    for _ in range(60):
        model(torch.rand(16, 3, 8, 8))
    return model.eval()


IMAGES = torch.rand(8, 3, 8, 8)


def warnings(data, model=None, **options):
    result = quantized(model or net(), data, **options)
    text = text_of(result.report)
    for w in result.report.warnings:
        assert w in text and "Read this first" in page(result.report)
    assert ("read this first" in text) == bool(result.report.warnings)
    return result.report.warnings


def test_data_like_those_of_training_are_not_doubted():
    assert warnings([IMAGES]) == []
    assert warnings([(IMAGES - 0.5) / 0.25]) == []


@pytest.mark.parametrize(
    ("data", "says", "low", "high"),
    [
        (IMAGES * 255, "times as large as the statistics", 100, 2000),
        (IMAGES + 100, "times as large as the statistics", 100, 2000),
        (IMAGES / 255, "times narrower than the statistics", 100, 500),
    ],
)
def test_images_on_another_scale_than_the_first_batch_norm_learned(data, says, low, high):
    (warning,) = warnings([data])
    assert "batch norm '1'" in warning and says in warning and "normalised as in training" in warning
    assert low < float(warning.split(" is ")[1].split()[0]) < high


def test_a_single_sample_however_often_it_comes():
    (warning,) = warnings([IMAGES[:1]] * 3)
    assert "a single sample" in warning


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_an_input_that_never_changes_names_itself(value):
    said = " ".join(warnings([torch.full((8, 3, 8, 8), value)]))
    assert f"'input' was {value:g} throughout" in said


def test_a_layer_that_is_dead_on_all_data_is_named():
    model = net()
    model[1].bias.data.fill_(-1e3)
    said = [w for w in warnings([IMAGES], model) if "the same number" in w]
    assert len(said) == 1 and "Relu '2' (0)" in said[0]


def test_the_terminal_hears_of_it_too(caplog):
    with caplog.at_level(logging.WARNING, "chipfit"):
        chipfit.quantize(net(), [IMAGES * 255])
    assert any("batch norm '1'" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_a_model_of_another_float_type_is_read_in_float32_and_the_report_says_so(kind):
    plain, other = net(), net().to(kind)
    before = {k: v.clone() for k, v in other.state_dict().items()}
    result = chipfit.quantize(other, [IMAGES.to(kind)], progress=False)
    assert any(str(kind).removeprefix("torch.") in w and "float32" in w for w in result.report.warnings)
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype for k, v in other.state_dict().items())
    assert {v.dtype for v in result.graph.weights.values() if v.is_floating_point()} == {torch.float32}
    assert (result.model(IMAGES) - plain(IMAGES)).abs().max() < 0.05
    assert result.verify([IMAGES.to(kind)]).exact


@pytest.mark.parametrize("kind", [torch.float16, torch.float64])
def test_data_of_another_float_type_are_taken(kind):
    assert quantized(net(), [IMAGES.to(kind), IMAGES]).verify([IMAGES.to(kind)]).exact


def test_what_float32_cannot_hold_is_refused():
    model = sequential(nn.Linear(4, 4)).double()
    model[0].weight.data[0, 0] = 1e60
    with pytest.raises(CaptureError, match=r"'0.weight' holds numbers outside the range of float32"):
        quantized(model, torch.randn(4, 4).double())
    data = [torch.randn(4, 4), torch.full((2, 4), 1e60, dtype=torch.float64)]
    with pytest.raises(DataError, match="'input' holds numbers outside the range of float32"):
        quantized(nn.Linear(4, 4), data)


def test_channels_of_very_different_means_are_not_doubted():
    """Each is compared with the statistics of its own."""
    model = nn.Sequential(nn.Conv2d(2, 2, 1, groups=2, bias=False), nn.BatchNorm2d(2)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].running_mean.copy_(torch.tensor([0.0, 1000.0]))
    x = torch.randn(4, 2, 5, 5) + torch.tensor([0.0, 1000.0]).view(1, 2, 1, 1)
    assert check_input_scale(capture(model, (x,))) == []
    assert check_input_scale(capture(model, (x.flip(1),)))


@pytest.mark.parametrize("values, told", [(7, False), (8, True)])
def test_a_spread_is_told_from_eight_values_a_channel_however_few_channels_there_are(values, told):
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)).eval()
    x = torch.linspace(-1e-3, 1e-3, values).view(values, 1)
    said = check_input_scale(capture(model, (x,)))
    assert bool(said) is told and all("times narrower than the statistics" in s for s in said)
