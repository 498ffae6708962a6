"""`.keras` files of Keras 2 with layers of mct_quantizers, loaded back by that package in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import h5py
import keras
import numpy as np
import pytest

import chipfit
from chipfit import errors
from chipfit.exporter import keras_export_model
from chipfit.frameworks import adapter_of
from tests import keras_zoo
from tests.build import keras_sequential, quantized

LAYERS = keras.layers
needs_keras_2 = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("tf_keras", "mct_quantizers", "tensorflow"))),
    reason="the package is missing",
)
LOAD = """
import sys, pathlib, numpy as np, mct_quantizers, tensorflow as tf
for path in pathlib.Path(sys.argv[1]).glob("*.keras"):
    model = mct_quantizers.keras_load_quantized_model(path)
    given = list(np.load(path.with_suffix(".npz")).values())
    outputs = tf.nest.flatten(model(given if len(given) > 1 else given[0]))
    layers = [layer for layer in model.layers if type(layer).__name__ == "KerasQuantizationWrapper"]
    kinds = ",".join(sorted({type(q).__name__ for x in layers for q in x.weights_quantizers.values()}))
    np.savez(path.with_suffix(".out.npz"), kinds, *(y.numpy() for y in outputs))
"""
ZOO = "residual", "many_in_and_out", "transposed", "squeeze_excite", "nested"


def small(seed=0):
    layers = LAYERS.Conv2D(4, 3, activation="relu"), LAYERS.DepthwiseConv2D(3), LAYERS.Flatten(), LAYERS.Dense(3)
    batch = np.random.default_rng(seed).normal(size=(4, 8, 8, 3)).astype("float32")
    return keras_sequential((8, 8, 3), *layers), batch


def reused():
    """Return a network that calls one convolution three times, whose bias is corrected for the inputs of each call."""
    keras.utils.set_random_seed(0)
    conv, x = LAYERS.Conv2D(4, 3, padding="same"), keras.Input((6, 6, 4))
    model = keras.Model(x, LAYERS.Add()([conv(conv(x)), conv(LAYERS.ReLU()(x))]))
    return model, np.random.default_rng(1).normal(size=(4, 6, 6, 4)).astype("float32")


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    """Files that one process of Keras 2 has read: name -> (result, batch, kinds of quantizers of weights, outputs)."""
    folder, found = tmp_path_factory.mktemp("mctq"), {}
    for name in ZOO:
        model, batch = keras_zoo.make(name)
        found[name] = quantized(model, [batch], "imx500"), batch
    model, batch = small()
    chip = chipfit.get_target_platform_capabilities("tensorflow", "imx500", "v3_lut")
    found["lut"] = quantized(model, [batch], chip, overrides={"*": {"bits": 4}}), batch
    made = chipfit.keras_post_training_quantization(reused()[0], lambda: iter([[reused()[1]]]))[1]
    found["reused"] = made.result, reused()[1]
    for name, (result, batch) in found.items():
        result.export(folder / f"{name}.keras", format="mctq")
        np.savez(folder / f"{name}.npz", *map(np.asarray, keras.tree.flatten(batch)))
    env = {**os.environ, "TF_USE_LEGACY_KERAS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", LOAD, folder], check=True, env=env, cwd=folder)
    outputs = {name: [*np.load(folder / f"{name}.out.npz").values()] for name in found}
    return {name: (*made, str(outputs[name][0]), outputs[name][1:]) for name, made in found.items()}


def as_tensorflow_rounds(result, batch):
    """Return the outputs of the simulation, with results rounded as TensorFlow's fake quantization does: halves up."""

    def half_up(t):
        activation = t.role == "activation" and t.stored is not None
        return t.with_(grid=replace(t.grid, rounding="half_up")) if activation else t

    plan = replace(result.plan, tensors={k: half_up(t) for k, t in result.plan.tensors.items()})
    model = adapter_of("keras").lower(result.graph, plan, None)
    return [keras.ops.convert_to_numpy(y) for y in keras.tree.flatten(model(batch))]


@pytest.mark.thinned(3)
@needs_keras_2
@pytest.mark.parametrize(
    "name, kinds",
    [
        *((name, "WeightsSymmetricInferableQuantizer") for name in ZOO),
        ("lut", "WeightsLUTSymmetricInferableQuantizer"),
        ("reused", "WeightsSymmetricInferableQuantizer"),
    ],
)
def test_the_package_computes_what_the_simulation_computes(read_back, name, kinds):
    result, batch, found, outputs = read_back[name]
    assert found == kinds
    for got, want in zip(outputs, as_tensorflow_rounds(result, batch), strict=True):
        assert np.mean(np.abs(got - want) > 1e-5) <= 0.02


def test_calls_with_another_bias_are_layers_of_their_own(tmp_path):
    model, batch = reused()
    facade = chipfit.keras_post_training_quantization(model, lambda: iter([[batch]]))[1].result
    result = quantized(model, [batch], "imx500", settings=chipfit.Settings(correct_bias=True))
    biases = [{n.bias for n in made.graph.nodes if n.op == "Conv2D"} for made in (facade, result)]
    assert [len(b) for b in biases] == [1, 3]
    path = result.export(tmp_path / "m.keras", format="mctq")
    loaded = chipfit.keras_load_quantized_model(path)
    np.testing.assert_allclose(
        *map(keras.ops.convert_to_numpy, (loaded(batch), result.model(batch))), rtol=0, atol=1e-6
    )
    with zipfile.ZipFile(path) as archive:
        layers = json.loads(archive.read("config.json"))["config"]["layers"]
    assert [x["class_name"] for x in layers].count("KerasQuantizationWrapper") == 3


def test_the_names_of_mct_write_such_a_file_by_default(tmp_path):
    model, batch = small()
    made = chipfit.keras_post_training_quantization(model, lambda: iter([[batch]]))[0]
    keras_export_model(made, tmp_path / "m.keras")
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        layers = json.loads(archive.read("config.json"))["config"]["layers"]
    assert [x["class_name"] for x in layers].count("KerasQuantizationWrapper") == 3


@pytest.mark.parametrize(
    "layer, message",
    [
        (LAYERS.LSTM(3), "Keras 2 has no layer for .*Allowed: Activation, Add.*`.onnx` file with format='mctq'"),
        (LAYERS.Activation("hard_sigmoid"), "with the activation hard_sigmoid"),  # Keras 2 has another slope
    ],
)
def test_what_keras_2_computes_otherwise_is_refused(layer, message, tmp_path):
    result = quantized(keras_sequential((4, 3), LAYERS.Dense(3), layer), [np.ones((2, 4, 3), "float32")], "imx500")
    with pytest.raises(errors.UnsupportedError, match=message):
        result.export(tmp_path / "m.keras", format="mctq")


def test_a_kernel_with_scales_along_two_axes_is_refused(tmp_path):
    model = keras_sequential((8, 8, 3), LAYERS.DepthwiseConv2D(3, depth_multiplier=2))
    result = quantized(model, [np.ones((2, 8, 8, 3), "float32")], "imx500")
    with pytest.raises(errors.UnsupportedError, match="scales along two axes"):
        result.export(tmp_path / "m.keras", format="mctq")


@pytest.mark.parametrize("name", ZOO)
def test_keras_3_reads_such_a_file_back(name, tmp_path):
    model, batch = keras_zoo.make(name)
    result = quantized(model, [batch], "imx500")
    loaded = chipfit.keras_load_quantized_model(result.export(tmp_path / "m.keras", format="mctq"))
    for got, want in zip(*(keras.tree.flatten(m(batch)) for m in (loaded, result.model)), strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (got, want)))


def test_a_file_with_an_unknown_class_or_without_a_weight_is_refused_by_name(tmp_path):
    model, batch = small()
    path = quantized(model, [batch], "imx500").export(tmp_path / "m.keras", format="mctq")
    with zipfile.ZipFile(path) as archive:
        config, weights = archive.read("config.json"), archive.read("model.weights.h5")
    for old, new, group, message in (
        (b"ActivationPOTInf", b"ActivationNewInf", "", "'ActivationNewInferableQuantizer' of mct_quantizers"),
        (b"", b"", "layers/keras_quantization_wrapper/vars/0", "no weight 'layers/keras_quantization_wrapper/vars/0'"),
    ):
        (tmp_path / "w.h5").write_bytes(weights)
        with h5py.File(tmp_path / "w.h5", "a") as store:
            if group:
                del store[group]
        with zipfile.ZipFile(tmp_path / "bad.keras", "w") as archive:
            archive.writestr("config.json", config.replace(old, new) if old else config)
            archive.write(tmp_path / "w.h5", "model.weights.h5")
        with pytest.raises(errors.CaptureError, match=message):
            chipfit.keras_load_quantized_model(tmp_path / "bad.keras")
