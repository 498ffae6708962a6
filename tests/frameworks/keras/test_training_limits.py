"""A platform's rules hold in every step of a Keras optimizer, and training ends where a number is none."""

from __future__ import annotations

from dataclasses import replace

import keras
import numpy as np
import pytest
import torch

import chipfit
from chipfit.errors import TrainingError

SEED = np.random.default_rng(0)
DATA = [SEED.normal(size=(8, 6, 6, 4)).astype("float32") for _ in range(2)]
Y = np.arange(8) % 3


def broken(plan, scales) -> list[str]:
    """The limits that a plan's scales do not satisfy."""
    totals = [(x, sum(e * scales(t).double().log2() for t, e in x.terms)) for x in plan.limits]
    return [str(x) for x, v in totals if bool((v < x.low - 1e-6).any() or (v > x.high + 1e-6).any())]


def keras_net():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6, 6, 4))
    a = keras.layers.Conv2D(4, 3, padding="same", name="a")(x)
    x = keras.layers.Add(name="add")([keras.layers.Conv2D(4, 1, name="b")(a), a])
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax", name="head")(x))


@pytest.fixture(scope="module")
def twin():
    return chipfit.quantize(
        keras_net(), [torch.from_numpy(x) for x in DATA], platform="tflite_int8", training="lsq", progress=False
    )


def test_a_keras_optimizer_stays_inside(twin):
    result = twin.as_calibrated().trains("lsq")
    model, plan = result.model, result.plan
    assert plan.limits and plan.fixed
    bounds = model.bounds
    softmax = next(t for t in bounds.quantizers if t in plan.fixed)
    assert not bounds.quantizers[softmax].trainable_variables
    name = next(t for x in plan.limits if x.op == "Add" for t, e in x.terms if e < 0 and t in bounds.quantizers)
    q = bounds.quantizers[name]
    model.compile(keras.optimizers.SGD(1e-6), "sparse_categorical_crossentropy")

    def scales(t):
        return torch.tensor(keras.ops.convert_to_numpy(bounds.quantizers[t].numbers()[0])).reshape(-1)

    held = replace(
        plan, tensors={t: v for t, v in plan.tensors.items() if t in bounds.quantizers}, limits=tuple(bounds.limits)
    )
    q.least.assign(q.least * 2.0**-9)
    bounds._still[name]["least"] = keras.ops.convert_to_numpy(q.least)
    q.scale.assign(q.scale * 2.0**-9)
    assert broken(held, scales)
    model.fit(DATA[0], Y, epochs=1, verbose=0)
    assert broken(held, scales) == []
    q.scale.assign(q.scale * 2.0**-1)
    after = result.trained()  # and after a step that no optimizer of Keras took
    assert broken(after.plan, lambda t: after.plan[t].scale) == []


def test_keras_training_ends_where_a_number_is_none(twin):
    model = twin.as_calibrated().trains("lsq").model
    model.compile(keras.optimizers.SGD(1e-3), "sparse_categorical_crossentropy")
    with pytest.raises(TrainingError, match="In step 1 of training"):
        model.fit(DATA[0] * float("nan"), Y, epochs=1, verbose=0)
    with pytest.raises(TrainingError, match="In step 2 of training"):
        model.train_on_batch(DATA[0], Y)
