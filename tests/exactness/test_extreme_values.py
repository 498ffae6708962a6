"""Numbers at the edge of what a tensor holds give an exact result, or a typed error."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import ConfigError, DataError, PlanError
from tests.build import images, quantized, sequential


@pytest.fixture
def model():
    return sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize("value", [0.0, 1e-30, 3.0, 1e6])
def test_constant_inputs_give_an_exact_result(model, value):
    x = torch.full((2, 3, 8, 8), value)
    assert quantized(model, x).verify([x]).exact


def test_one_huge_outlier_gives_an_exact_result(model):
    x = images(4)
    x[0, 0, 0, 0] = 1e8
    assert quantized(model, x).verify([x]).exact


def test_dead_channels_and_all_zero_weights_give_an_exact_result(model):
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 5.0  # alone in its channel: the weight scale has to grow until int32 holds it
        model[2].weight.zero_()
        x = images(4)
        result = quantized(model, x)
        assert result.verify([x]).exact and torch.isfinite(result.model(x)).all()


@pytest.mark.parametrize("much", [10**30, 2**64], ids=["1e30", "2^64"])
def test_a_threshold_for_outliers_may_be_above_every_value(model, much):
    quantized(model, images(4), z_threshold=much, overrides={"0": {"z_threshold": much}})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m, much: quantized(m, images(4), z_threshold=much), ConfigError, "above 0"),
        (lambda m, much: quantized(m, images(4), overrides={"0": {"z_threshold": much}}), PlanError, "deviations"),
        (lambda m, much: chipfit.Limits(total=much), ConfigError, "a number above 0"),
        (lambda m, much: chipfit.Settings(shift_negative=much), PlanError, "a number of at least 0"),
    ],
    ids=["z_threshold", "overrides", "limits", "settings"],
)
def test_an_integer_that_no_float_holds_is_refused(model, call, error, words):
    with pytest.raises(error, match=words):
        call(model, 10**400)


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu"])
def test_numbers_that_would_overflow_inside_a_kernel_are_refused_before_a_runtime_meets_them(platform):
    x = torch.randn(4, 4)
    with pytest.raises(DataError, match="too large for any kernel"):  # LiteRT ends the process on such a sum
        quantized(nn.Linear(4, 4), x * 1e35, platform)
    assert quantized(nn.Linear(4, 4), x * 1e20, platform).verify([x * 1e20]).sound
