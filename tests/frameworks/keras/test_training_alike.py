"""The same losses on every backend of Keras, step for step: `test_backends` trains, and lets the others repeat it."""

import os
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np
import pytest
import torch
from keras import layers

import chipfit
import chipfit.frameworks.keras  # registers the classes that saved models name
from tests.build import platform_of

STEPS = 20
X = np.random.default_rng(0).normal(size=(4, 4, 4, 3)).astype("float32")
Y = np.arange(4)
#: bits, formats of weight and bias, what trains, rate.
#: Steps of a scale must be small beside it, and one of 8 bits is small: trained ten times as fast, losses of one
#: backend, from weights that differ by a factor of 1 +- 1e-7, differ by 1e-6 from step 4 on and then by 2e-3. So it is
#: with levels: at 0.003 a weight goes to another level in step 12 of one backend, in step 13 of another.
CASES = {
    "ste": (8, "w", "b", "ste", 0.01),
    "lsq of 8 bits": (8, "w", "b", "lsq", 0.0003),
    "lsq of 4 bits": (4, "w", "b", "lsq", 0.01),
    "apot": (8, "table", "bt", {"weights": "apot", "activations": "lsq"}, 0.003),
    "lut": (8, "table", "bt", {"weights": "lut", "activations": "lsq"}, 0.0003),
    "dorefa and pact": (8, "w", "b", {"weights": "dorefa", "activations": "pact"}, 0.01),
    "lsq_plus, norms folded": (4, "w", "b", {"method": "lsq_plus", "bn_fold": 4}, 0.003),
}


def net(norm: bool) -> keras.Model:
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((4, 4, 3))
    x = layers.Conv2D(6, 3, padding="same", name="stem")(x)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x) if norm else x)
    x = layers.ReLU()(layers.DepthwiseConv2D(3, padding="same", name="body")(x))
    return keras.Model(inputs, layers.Dense(4, name="head")(layers.GlobalAveragePooling2D(name="pool")(x)))


def losses(model: keras.Model, rate: float) -> np.ndarray:
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return np.array([float(model.train_on_batch(X, Y)) for _ in range(STEPS)])


def quantized(name: str) -> chipfit.Result:
    bits, w, b, training, _ = CASES[name]
    platform = platform_of(
        {"match": ["@conv", "Linear"], "use": [{"in": "a", "w": w, "b": b, "out": "a"}]},
        {"match": ["Relu", "GlobalAvgPool"], "use": [{"in": "a", "out": "a"}]},
        formats={
            "a": {"bits": bits, "zero": "any"},
            "w": {"bits": bits, "range": "narrow", "per": "channel"},
            "b": {"bits": 32, "per": "channel"},
            "table": {"kind": "lut", "bits": 4, "lut": {"value_bits": 8, "entries": 16, "per": "tensor"}},
            "bt": {"bits": 32},
        },
    )
    off = chipfit.Settings(rounding="off")  # which leaves weights beside ties
    given = {"platform": platform, "training": training, "settings": off, "progress": False}
    return chipfit.quantize(net("norm" in name), [torch.from_numpy(X)], **given)


def prepare(folder: Path, names: Iterable[str]) -> None:
    """Save models as they are before training, and the losses of training them on the backend of this process."""
    for name in names:
        model = quantized(name).model
        model.save(folder / f"{name}.keras")
        np.save(folder / f"{name}.npy", losses(model, CASES[name][-1]))


@pytest.mark.skipif("CHIPFIT_SAVED" not in os.environ, reason="`test_backends` trains first")
@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_on_another_backend(name):
    folder = Path(os.environ["CHIPFIT_SAVED"])
    expected = np.load(folder / f"{name}.npy")
    np.testing.assert_allclose(
        losses(keras.saving.load_model(folder / f"{name}.keras"), CASES[name][-1]), expected, 1e-5
    )
    assert expected[-1] < 0.998 * expected[0]


def test_levels_that_trained_are_those_of_the_plan_and_of_a_loaded_model(tmp_path):
    result = quantized("lut")
    before = {n: t.stored.grid.table for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}
    losses(result.model, 0.05)
    after = result.trained()
    assert all(after.plan[n].grid.table != table and 0.0 in after.plan[n].grid.table for n, table in before.items())
    expected = keras.ops.convert_to_numpy(result.model(X))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(after.model(X)), expected, atol=1e-6)
    result.model.save(tmp_path / "trained.keras")
    loaded = keras.saving.load_model(tmp_path / "trained.keras")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(loaded(X)), expected, atol=1e-6)


def test_no_two_variables_of_a_model_share_a_path():
    """Keras on torch keeps variables by their paths, and resets the gradients of those that it keeps."""
    result = chipfit.quantize(net(True), [torch.from_numpy(X)], "ort_cpu", training="lsq", progress=False)
    paths = [v.path for v in result.model.variables]
    assert len(set(paths)) == len(paths)
    if keras.backend.backend() == "torch":
        losses(result.model, 0.01)
        result.model.zero_grad()
        assert all(v.value.grad is None for v in result.model.trainable_variables)
