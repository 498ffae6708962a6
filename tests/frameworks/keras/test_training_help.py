"""Distillation and averages with `keras.Model.fit`."""

import keras
import numpy as np
import pytest
import torch

import chipfit
from chipfit.errors import PlanError, UnsupportedError
from chipfit.training import EMA, divergence, teacher

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = np.arange(32) % 3


@pytest.fixture(scope="module")
def net():
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu", name="body")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="head")(x))


@pytest.fixture(scope="module")
def plain(net):
    return chipfit.quantize(net, [X], platform="ort_cpu", training="lsq", progress=False)


def test_one_formula_serves_both_frameworks():
    s, t = np.random.default_rng(1).normal(size=(2, 5, 4)).astype("float32")
    expected = divergence(torch.from_numpy(s), torch.from_numpy(t), 3.0).item()
    ours = divergence(keras.ops.convert_to_tensor(s), keras.ops.convert_to_tensor(t), 3.0, ops=keras.ops)
    assert float(ours) == pytest.approx(expected, rel=1e-5)


def test_fit_learns_from_the_float_model(net, plain):
    result = plain.as_calibrated()
    known = teacher(result).predict(X, verbose=0)
    np.testing.assert_allclose(known, net.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
    head = result.model.get_layer("head").layer
    head.kernel.assign(head.kernel + np.random.default_rng(2).normal(size=(8, 3)) / 2)

    def loss(targets, outputs):
        return divergence(outputs, targets, 2.0, ops=keras.ops)

    result.model.compile(keras.optimizers.Adam(0.01), loss=loss)
    losses = result.model.fit(X, known, batch_size=16, epochs=24, verbose=0).history["loss"]
    assert losses[-1] < 0.3 * losses[0]
    assert result.trained().verify([X]).exact


def test_the_average_of_an_optimizer_of_keras_is_deployed(plain):
    class Seen(keras.callbacks.Callback):
        rows = []

        def on_train_batch_end(self, batch, logs=None):
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            self.rows.append([keras.ops.convert_to_numpy(v).copy() for v in self.model.trainable_variables])

    seen, result = Seen(), plain.as_calibrated()
    optimizer = keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5)
    result.model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    # in a list: on JAX, Keras lets a callback that is in none run beside the next step, which takes its arrays away
    result.model.fit(X, Y, batch_size=8, epochs=1, verbose=0, shuffle=False, callbacks=[seen])
    average = seen.rows[0]
    for row in seen.rows[1:]:
        average = [0.5 * a + 0.5 * v for a, v in zip(average, row)]
    for variable, expected in zip(result.model.trainable_variables, average):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), expected, rtol=1e-5, atol=1e-7)
    trained = result.trained()
    moved = [n for n, t in trained.plan.tensors.items() if t.role != "bias" and "trained" in t.origin]
    assert moved and trained.verify([X]).exact


def test_what_is_of_pytorch_only_is_refused(plain):
    with pytest.raises(PlanError, match="not a quantized model of PyTorch"):
        EMA(plain.model)
    with pytest.raises(UnsupportedError, match="bn_sync"):
        plain.trains({"method": "lsq", "bn_fold": 4, "bn_sync": True}).model
