"""Keras models without training, by the same files."""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

from chipfit.bench.config import of
from chipfit.bench.run import run
from tests.bench.tiny import config


def net() -> keras.Model:
    """Images [N, 8, 8, 3] to 10 classes; the same weights at every call."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Flatten()(x)))


def test_a_keras_model_is_quantized_and_its_integers_are_compared(tmp_path):
    plain = {k: v for k, v in config().items() if k not in ("qparams", "backend", "bnfold", "lr_scheduler", "saver")}
    asked = {**plain, "model": {"type": "tests.bench.test_keras_experiments:net"}, "ptq": {"platform": "tflite_int8"}}
    out = run(of(asked), tmp_path, lambda text: None)
    (found,) = out.deployed
    assert (found.runtime, found.exact, found.differing) == ("litert", True, 0) and found.integers > 50_000
    assert abs(out.top1 - out.float_top1) <= 3 and found.top1 == out.top1
