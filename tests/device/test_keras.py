"""Keras on a device of its torch backend: Keras places its models, and chipfit reads and makes them there."""

import keras
import numpy as np
import pytest
import torch

import chipfit

IMAGES = torch.randn(2, 4, 8, 8, 3, generator=torch.Generator().manual_seed(1))


@keras.saving.register_keras_serializable("tests")
class Spectrum(keras.layers.Layer):
    """A layer that chipfit does not read, and calls."""

    def call(self, x):
        return keras.ops.fft2((x, keras.ops.zeros_like(x)))[0]


def net(*, opaque: bool = False) -> keras.Model:
    """Return a classifier of images [N, 8, 8, 3] with 4 classes, the same at every call."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 3))
    x = keras.layers.BatchNormalization()(keras.layers.Conv2D(8, 3, use_bias=False)(x))
    x = keras.layers.Activation("swish")(x)
    x = Spectrum()(x) if opaque else x
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Flatten()(x)))


@pytest.fixture
def placed_by_keras(accelerator, monkeypatch):
    """Make the device the one that KERAS_TORCH_DEVICE sets when Keras is imported."""
    if keras.backend.backend() != "torch":
        pytest.skip("the devices of other backends are unknown to torch")
    monkeypatch.setattr("keras.src.backend.torch.core.DEFAULT_DEVICE", str(accelerator))
    return accelerator


def scales(result):
    return {name: t.stored.scale for name, t in result.plan.tensors.items() if t.stored is not None}


@pytest.mark.parametrize("where", ["there", "on the CPU"])
def test_a_model_is_quantized_verified_and_trained_where_keras_placed_it(placed_by_keras, where, tmp_path):
    model, device = net(), placed_by_keras
    assert model.weights[0].value.device == device
    data = [x.to(device) if where == "there" else x for x in IMAGES]
    result = chipfit.quantize(model, data, platform="tflite_int8", progress=False)
    assert result.model(data[0]).device == device
    assert result.verify(data).exact
    result.save(tmp_path / "saved")
    assert chipfit.load(tmp_path / "saved").model(data[0]).device == device
    trains = result.trains("lsq")
    trains.model.compile(keras.optimizers.SGD(0.001), "mse")
    trains.model.fit(IMAGES[0].numpy(), np.zeros((4, 4), "float32"), verbose=0)
    assert all(w.value.device == device for w in trains.model.weights)
    trained = trains.trained()
    assert trained.verify(data).exact


def test_the_plan_is_that_of_the_cpu(placed_by_keras, monkeypatch):
    there = scales(chipfit.quantize(net(), list(IMAGES), platform="tflite_int8", progress=False))
    weights = net().get_weights()
    monkeypatch.setattr("keras.src.backend.torch.core.DEFAULT_DEVICE", "cpu")
    model = net()
    model.set_weights(weights)
    here = scales(chipfit.quantize(model, list(IMAGES), platform="tflite_int8", progress=False))
    torch.testing.assert_close(list(there.values()), list(here.values()), rtol=1e-4, atol=0)


def test_an_opaque_layer_is_simulated_there(placed_by_keras):
    result = chipfit.quantize(net(opaque=True), list(IMAGES), platform="tflite_int8", progress=False)
    assert result.model(IMAGES[0]).device == placed_by_keras
