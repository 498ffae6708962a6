"""Fake-quantized `.keras` files load with Keras alone and give the numbers of the simulation."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

import chipfit
from chipfit import errors
from chipfit.exporter import KerasExportSerializationFormat, QuantizationFormat, keras_export_model
from tests import keras_zoo
from tests.build import keras_sequential, quantized
from tests.processes import LEAN

LAYERS = keras.layers
LOAD = """
import sys, keras, numpy as np
model, x = keras.saving.load_model(sys.argv[1]), np.load(sys.argv[2])
assert not any(name.startswith("chipfit") for name in sys.modules)
np.save(sys.argv[3], keras.ops.convert_to_numpy(model(x)))
"""


def numbers(outputs):
    return [keras.ops.convert_to_numpy(y) for y in keras.tree.flatten(outputs)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "name, platform", [(n, "imx500") for n in sorted(keras_zoo.ZOO)] + [("mobilenet", "tflite_int8")]
)
def test_a_file_gives_the_numbers_of_the_simulation(name, platform, tmp_path):
    model, batch = keras_zoo.make(name)
    result = quantized(model, [batch], platform)
    loaded = keras.saving.load_model(result.export(tmp_path / "m.keras", format="fake"))
    for got, want in zip(numbers(loaded(batch)), numbers(result.model(batch)), strict=True):
        assert np.mean(np.abs(got - want) > 1e-4) <= 0.02


def test_a_file_needs_no_chipfit(tmp_path):
    layers = LAYERS.Conv2D(4, 3, activation="relu"), LAYERS.Multiply(name="divide"), LAYERS.Flatten(), LAYERS.Dense(3)
    x = inputs = keras.Input((8, 8, 3))
    x = layers[0](x)
    x = layers[1]([x, x]) * 0.5  # the name of a layer is also that of the function that rounds
    model = keras.Model(inputs, layers[3](layers[2](keras.ops.roll(x, 1, 2))))
    batch = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
    result = quantized(model, [batch], "tflite_int8")
    path, given, got = result.export(tmp_path / "m.keras", format="fake"), tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(given, batch)
    elsewhere = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", LEAN + LOAD, path, given, got], check=True, env=elsewhere, cwd=tmp_path)
    np.testing.assert_allclose(np.load(got), numbers(result.model(batch))[0], atol=1e-5)


@pytest.mark.parametrize("platform", ["imx500", "tflite_int8"])
def test_a_layer_that_is_called_twice_needs_no_chipfit(platform, tmp_path):
    """Its calls have different biases, corrected or of different scales; a layer of Keras has one."""
    conv, inputs = LAYERS.Conv2D(3, 3), keras.Input((8, 8, 3))
    model = keras.Model(inputs, conv(keras.ops.relu(conv(inputs))))
    batch = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
    result = quantized(model, [batch], platform, settings=chipfit.Settings(correct_bias=True))
    loaded = keras.saving.load_model(result.export(tmp_path / "m.keras", format="fake"))
    assert {type(layer).__module__.partition(".")[0] for layer in loaded.layers} == {"keras"}
    assert np.mean(np.abs(numbers(loaded(batch))[0] - numbers(result.model(batch))[0]) > 1e-4) <= 0.02


def test_the_names_of_mct_write_keras_and_tflite_files(tmp_path):
    model = keras_sequential((8, 8, 3), LAYERS.Conv2D(4, 3), LAYERS.ReLU(), LAYERS.Flatten(), LAYERS.Dense(3))
    batch = np.random.default_rng(0).normal(size=(4, 8, 8, 3)).astype("float32")
    quantized_model, _ = chipfit.keras_post_training_quantization(model, lambda: iter([[batch]]))
    files = {
        "m.keras": ("KERAS", "FAKELY_QUANT"),
        "f.tflite": ("TFLITE", "FAKELY_QUANT"),
        "m.tflite": ("TFLITE", "INT8"),
    }
    for name, (form, kind) in files.items():
        form, kind = KerasExportSerializationFormat[form], QuantizationFormat[kind]
        assert keras_export_model(quantized_model, str(tmp_path / name), None, form, kind) == {}
    got = keras.saving.load_model(tmp_path / "m.keras")(batch)
    np.testing.assert_allclose(numbers(got)[0], numbers(quantized_model(batch))[0], atol=1e-5)
    assert (tmp_path / "m.tflite").stat().st_size < (tmp_path / "f.tflite").stat().st_size


def test_a_suffix_of_another_framework_is_refused(tmp_path):
    result = quantized(keras_sequential((4,), LAYERS.Dense(3)), [np.ones((2, 4), "float32")], "imx500")
    with pytest.raises(
        errors.UnsupportedError, match="Keras cannot write this suffix.*Allowed: .keras, .onnx, .tflite"
    ):
        result.export(tmp_path / "m.pt2", format="fake")
