"""Keras models without training, by the same files."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import pytest

from chipfit.bench.config import of
from chipfit.bench.run import run
from chipfit.errors import ConfigError
from tests.bench.tiny import config, quiet

MODEL = {"type": "tests.bench.test_keras_experiments:net"}


def net() -> keras.Model:
    """Images [N, 8, 8, 3] to 10 classes; the same weights at every call."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def test_a_keras_model_is_quantized_and_its_integers_are_compared(tmp_path):
    asked = {"model": MODEL, "data": config()["data"], "ptq": {"platform": "tflite_int8"}}
    out = run(of(asked), tmp_path, quiet)
    assert [d.runtime for d in out.deployed] == ["litert", "litert_optimized", "litert_reference"]
    for found in out.deployed:  # each has its own rounding, and is compared with its own simulation
        assert (found.platform, found.exact, found.differing) == ("tflite_int8", True, 0) and found.integers > 50_000
        assert abs(found.top1 - out.top1) <= 2
    assert abs(out.top1 - out.float_top1) <= 3 and out.deployed[0].top1 == out.top1


def test_a_device_for_a_keras_model_is_refused(tmp_path):
    asked = of({"model": MODEL, "data": config()["data"], "ptq": {"platform": "tflite_int8"}, "device": "cpu"})
    with pytest.raises(ConfigError, match="placed by Keras itself.*KERAS_TORCH_DEVICE"):
        run(asked, tmp_path, quiet)


@pytest.mark.parametrize(
    "over", [{"qparams": {}, "backend": "snpe"}, {"ptq": {}, "saver": {"pretrain": {"epochs": 1}}}]
)
def test_training_of_a_keras_model_is_refused(tmp_path, over):
    asked = {"model": MODEL, "data": config()["data"], **over}
    rates = {"lr_scheduler": {"kwargs": {"base_lr": 0.01, "max_iter": 2}}} if "qparams" in over else {}
    with pytest.raises(ConfigError, match="requires a PyTorch network.*Functional.*ptq in the place"):
        run(of({**asked, **rates}), tmp_path, quiet)
