"""Inputs that fill a range whose end is a power of two, by MCT's option `input_scaling`."""

import warnings

import pytest
import torch
from torch import nn

import chipfit
from chipfit import gptq
from chipfit.core import CoreConfig, QuantizationConfig, QuantizationErrorMethod
from tests.build import keras_sequential, model_of, sequential

NO_CLIPPING = QuantizationErrorMethod.NOCLIPPING
OPTIONS = CoreConfig(QuantizationConfig(NO_CLIPPING, weights_bias_correction=False, input_scaling=True))
X = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 1.25
X[0, 0, 0, 0] = 1.25
#: of the range of 8 bits up to 2, the power of two above 1.25, the last code is 255 steps of 256
FACTOR = 2 * 255 / 256 / 1.25


def data():
    yield [X]


def fit(model, batch=None, what=chipfit.pytorch_post_training_quantization):
    """Return the quantized model and its information, with warnings of the user as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return what(model, data if batch is None else lambda: iter([batch]), core_config=OPTIONS)


def test_the_largest_input_becomes_the_end_of_the_range_and_the_weights_undo_it():
    model = sequential(nn.ZeroPad2d(1), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    before = model[1].weight.clone()
    quantized, information = fit(model)
    assert information.input_scale == pytest.approx(FACTOR)
    result = information.result
    assert torch.equal(model[1].weight, before)
    scale = model[2].weight / torch.sqrt(model[2].running_var + model[2].eps)
    folded = before * scale[:, None, None, None] / information.input_scale
    torch.testing.assert_close(result.graph.weights["1.weight"], folded)
    with torch.no_grad():
        lost = (quantized(X * information.input_scale) - model(X)).square().mean() / model(X).square().mean()
    assert lost < 1e-3


def test_a_scaled_input_has_all_codes_of_its_range():
    model = sequential(nn.Conv2d(3, 3, 1))
    _, information = fit(model)
    plain = chipfit.pytorch_post_training_quantization(model, data)[1]
    largest = []
    for found in (information, plain):
        (name,) = found.result.graph.inputs
        largest.append(int(found.result.plan[name].quantize(X * found.input_scale).max()))
    assert largest == [255, 160]  # 1.25 in steps of 2 / 256


def test_every_layer_that_reads_the_input_is_divided():
    model = model_of(lambda m, x: m.a(x).mean((2, 3)) + m.b(x).mean((2, 3)), a=nn.Conv2d(3, 2, 3), b=nn.Conv2d(3, 2, 1))
    information = fit(model)[1]
    for name in ("a.weight", "b.weight"):
        torch.testing.assert_close(information.result.graph.weights[name] * FACTOR, model.get_parameter(name))


def test_learned_rounding_on_other_data_reads_them_scaled():
    model = sequential(nn.Conv2d(3, 2, 3))
    options = {"gptq_config": gptq.GradientPTQConfig(1), "gptq_representative_data_gen": data, "core_config": OPTIONS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # held-out images may lose
        quantized, information = gptq.pytorch_gradient_post_training_quantization(model, data, **options)
    assert information.input_scale == pytest.approx(FACTOR) and information.gptq_info_dict
    torch.testing.assert_close(quantized(X * FACTOR), model(X), atol=0.1, rtol=0.1)


def two_inputs():
    return model_of(lambda m, x, y: m.a(x) + m.a(y), a=nn.Conv2d(3, 2, 3)), [X, X]


def tied():
    conv = nn.Conv2d(3, 3, 3, padding=1)
    return sequential(conv, nn.ReLU(), conv), [X]


def residual():
    return model_of(lambda m, x: m.a(x) + x, a=nn.Conv2d(3, 3, 3, padding=1)), [X]


@pytest.mark.parametrize(
    ("make", "why"),
    [(two_inputs, "several inputs"), (tied, "is read by several operators"), (residual, "Add 'add' reads it")],
)
def test_inputs_that_cannot_be_scaled_stay_with_a_warning(make, why):
    model, batch = make()
    with pytest.warns(UserWarning, match=f"Inputs are not scaled: .*{why}"):
        _, information = chipfit.pytorch_post_training_quantization(model, lambda: iter([batch]), core_config=OPTIONS)
    assert information.input_scale == 1


def test_scales_of_any_size_fill_their_range_already():
    options = {"core_config": OPTIONS, "target_platform_capabilities": "ort_cpu"}
    _, information = chipfit.pytorch_post_training_quantization(sequential(nn.Conv2d(3, 2, 3)), data, **options)
    assert information.input_scale == 1


def test_the_first_layer_of_a_keras_model_is_divided():
    keras = pytest.importorskip("keras")
    layers = [keras.layers.ZeroPadding2D(), keras.layers.DepthwiseConv2D(3), keras.layers.ReLU()]
    model = keras_sequential((8, 8, 3), *layers, keras.layers.Conv2D(2, 1))
    image = X.permute(0, 2, 3, 1).numpy()
    quantized, information = fit(model, [image], chipfit.keras_post_training_quantization)
    assert information.input_scale == pytest.approx(FACTOR)
    y, want = (keras.ops.convert_to_numpy(z) for z in (quantized(image * FACTOR), model(image)))
    assert abs(y - want).max() < 0.05 * abs(want).max()
