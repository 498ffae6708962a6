"""Networks whose values have fewer axes than a batch of samples."""

import pytest
from torch import nn

from tests.build import mlp, model_of, quantized, randn

PLATFORMS = ("ort_cpu", "m.onnx"), ("tflite_int8", "m.tflite")


@pytest.mark.parametrize("platform, file", PLATFORMS)
def test_an_input_may_be_one_number(platform, file, tmp_path):
    model = model_of(lambda m, x, strength: m.b(m.a(x).relu() * strength), a=nn.Linear(6, 8), b=nn.Linear(8, 3))
    data = [(randn(4, 6, seed=k), randn(1, seed=k).squeeze().abs() + 1) for k in range(4)]
    result = quantized(model, data, platform)
    result.export(tmp_path / file)
    assert result.verify([data[0]]).exact


@pytest.mark.parametrize("platform, file", PLATFORMS)
def test_a_linear_layer_of_one_axis_gives_one_axis(platform, file, tmp_path):
    data = [randn(6, seed=k) for k in range(4)]
    result = quantized(mlp(6, 8, 3), data, platform)
    result.export(tmp_path / file)
    assert result.verify([data[0]]).exact


def test_microcontrollers_slice_tensors_of_many_axes():
    def forward(m, x):
        x = x.unflatten(1, (2, -1))
        return m.a(x[:, -1]), m.a(x[..., ::2][:, 0])

    result = quantized(model_of(forward, a=nn.Conv2d(3, 4, 3, padding=1)), randn(4, 6, 6, 6), "tflm_cmsis_nn")
    assert result.verify([randn(2, 6, 6, 6, seed=1)]).exact
