"""Keras models whose kernels round their data each time, with weights in blocks: as the graph computes, and saved."""

import keras
import numpy as np
import pytest
import torch

from chipfit.frameworks.keras.backend import KerasOps
from chipfit.quantizers.dynamic import dynamic_codes
from chipfit.quantizers.ops import TorchOps
from tests.build import NEAREST, keras_sequential, quantized


def network() -> keras.Model:
    wide = keras.layers.Dense(96, activation="relu"), keras.layers.LayerNormalization()
    return keras_sequential((64,), *wide, keras.layers.Dense(64, use_bias=False))


DATA = [np.random.default_rng(0).standard_normal((16, 64)).astype("float32") for _ in range(2)]
NEW = np.random.default_rng(1).standard_normal((32, 64)).astype("float32")


@pytest.mark.parametrize("platform", ["ort_dynamic", "tflite_dynamic"])
@pytest.mark.parametrize("choices", [{"bits": 8}, {"bits": 4}, {"bits": 4, "inputs": "float"}])
def test_a_keras_model_computes_what_the_device_does_and_is_saved(platform, choices, tmp_path):
    result = quantized(network(), DATA, platform, overrides={"Dense": choices}, settings=NEAREST)
    y = keras.ops.convert_to_numpy(result.model(NEW))
    device = keras.ops.convert_to_numpy(result.device_model(NEW))
    # numbers half way between two codes may go either way behind the norm
    assert np.mean(np.abs(y - device) > 1e-4 * np.abs(y).max()) < 0.01
    assert result.verify([NEW]).sound
    result.model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert np.array_equal(keras.ops.convert_to_numpy(again(NEW)), y)
    assert np.array_equal(keras.ops.convert_to_numpy(result.trained().model(NEW)), y)


def test_the_scales_of_blocks_lie_as_the_kernel_does():
    choices = {"Dense": {"bits": 4, "inputs": "float"}}
    result = quantized(network(), DATA, "ort_dynamic", overrides=choices, settings=NEAREST)
    name = next(t.name for t in result.plan.tensors.values() if t.role == "weight" and t.quantized)
    first = result.plan[name]
    assert first.scale.shape == (96, 2)
    wrapper = next(layer for layer in result.model.layers if hasattr(layer, "weights_quantizers"))
    (quantizer,) = wrapper.weights_quantizers.values()
    assert quantizer.shape == (2, 96)
    w = result.graph.weights[name].detach()
    rounded = quantizer(w.t().numpy())
    assert np.allclose(keras.ops.convert_to_numpy(rounded), first.round(w).t().numpy(), atol=1e-7)


def test_both_frameworks_round_alike():
    x = np.random.default_rng(2).standard_normal((5, 8)).astype("float32")
    for how in (
        {"qmin": 0, "qmax": 255, "affine": True, "per": "tensor", "block": 1},
        {"qmin": -128, "qmax": 127, "affine": True, "per": "row", "block": 1},
        {"qmin": -127, "qmax": 127, "affine": False, "per": "block", "block": 4},
    ):
        theirs = dynamic_codes(KerasOps, keras.ops.convert_to_tensor(x), **how)
        ours = dynamic_codes(TorchOps, torch.from_numpy(x), **how)
        for a, b in zip(theirs, ours, strict=True):
            assert np.array_equal(keras.ops.convert_to_numpy(a), b.numpy())
