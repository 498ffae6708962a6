"""Recurrent layers of Keras compute what Keras computes, in the graph and in the model that is built from it."""

import keras
import numpy as np
import pytest
import torch
from keras import layers

import chipfit
from chipfit.engine.run import run
from chipfit.frameworks.keras.capture import capture

X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32")

LAYERS = {
    "lstm": lambda: layers.LSTM(6),
    "lstm_sequence": lambda: layers.LSTM(6, return_sequences=True, return_state=True, use_bias=False),
    "lstm_backwards": lambda: layers.LSTM(6, return_sequences=True, go_backwards=True),
    "gru": lambda: layers.GRU(6),
    "gru_before": lambda: layers.GRU(6, reset_after=False, return_sequences=True),
    "simple": lambda: layers.SimpleRNN(6, activation="relu", return_state=True),
    "cell": lambda: layers.RNN(layers.GRUCell(6), return_sequences=True),
    "cells": lambda: layers.RNN([layers.GRUCell(6), layers.LSTMCell(5)], go_backwards=True, return_sequences=True),
    "bidirectional": lambda: layers.Bidirectional(layers.LSTM(6, return_sequences=True)),
    "bidirectional_last": lambda: layers.Bidirectional(layers.GRU(6), merge_mode="ave"),
    "bidirectional_states": lambda: layers.Bidirectional(layers.LSTM(6, return_state=True), merge_mode="mul"),
}


def network(name):
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 4))
    model = keras.Model(x, LAYERS[name]()(x))
    rng = np.random.default_rng(1)
    for w in model.weights:
        w.assign(rng.normal(0, 0.4, w.shape))
    return model


def flat(y):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in (y if isinstance(y, (list, tuple)) else [y])]


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_read_as_keras_computes_it(name):
    model = network(name)
    graph = capture(model, [torch.from_numpy(X)])
    assert {n.op for n in graph.nodes} & {"LSTM", "GRU", "RNN"} and "Opaque" not in {n.op for n in graph.nodes}
    values = run(graph, [torch.from_numpy(X)], keep=graph.outputs)
    for w, o in zip(flat(model(X)), graph.outputs, strict=True):
        np.testing.assert_allclose(values[o].numpy(), w, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["lstm_sequence", "gru", "gru_before", "simple", "bidirectional_last"])
def test_the_model_that_stays_in_float_has_the_layers_of_the_graph(name):
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 4))
    y = LAYERS[name]()(layers.Dense(4)(x))
    model = keras.Model(x, y)
    result = chipfit.quantize(model, [X], platform="ort_cpu", progress=False)
    assert {n.op for n in result.graph.nodes} & {"LSTM", "GRU", "RNN"}
    for got, want in zip(flat(result.model(X)), flat(model(X)), strict=True):
        np.testing.assert_allclose(got, want, atol=0.05)


@pytest.mark.parametrize("name", ["lstm", "bidirectional", "gru_before"])
def test_the_steps_are_integers_and_exact_on_litert(name, tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 4))
    model = keras.Model(x, layers.Dense(3)(LAYERS[name]()(x)))
    result = chipfit.quantize(model, [X], platform="tflite_int8", progress=False)
    assert all(result.plan.quantized(v) for n in result.graph.nodes for v in n.outputs)
    np.testing.assert_allclose(flat(result.model(X))[0], flat(model(X))[0], atol=0.05)
    result.export(tmp_path / "m.tflite", io="int8", batch=1)
    assert result.verify([X]).exact


MASKED = {
    "lstm": lambda: layers.LSTM(6),
    "gru_sequence": lambda: layers.GRU(6, return_sequences=True),
    "simple_backwards": lambda: layers.SimpleRNN(6, go_backwards=True),
    "bidirectional": lambda: layers.Bidirectional(layers.LSTM(6)),
    "bidirectional_sequence": lambda: layers.Bidirectional(layers.GRU(6, return_sequences=True)),
}


def computes_what_keras_does_exactly_on_litert(model, batch, tmp_path):
    """Check that a network with masks is read whole, computes the same, and is exact as a file of one sample."""
    graph = capture(model, [torch.from_numpy(batch)])
    assert "Opaque" not in {n.op for n in graph.nodes}
    values = run(graph, [torch.from_numpy(batch)], keep=graph.outputs)
    np.testing.assert_allclose(values[graph.outputs[0]].numpy(), flat(model(batch))[0], rtol=1e-4, atol=1e-6)
    result = chipfit.quantize(model, [batch], platform="tflite_int8", progress=False)
    result.export(tmp_path / "m.tflite", batch=1)
    assert result.verify([batch]).exact


class Cell(layers.SimpleRNNCell):
    """A cell of a user."""

    def call(self, sequence, states, training=False):
        y, states = super().call(sequence, states)
        return y * 2, states


OTHERS = {
    "activation": lambda: layers.LSTM(6, recurrent_activation="hard_sigmoid", return_sequences=True),
    "cell": lambda: layers.RNN(Cell(6), go_backwards=True),
    "image": lambda: keras.Sequential([layers.Reshape((5, 4, 1)), layers.ConvLSTM1D(3, 2), layers.Flatten()]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_cells_without_a_kernel_are_read_step_by_step(name, tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((5, 4))
    computes_what_keras_does_exactly_on_litert(keras.Model(x, layers.Dense(3)(OTHERS[name]()(x))), X, tmp_path)


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_step_leaves_the_state_as_it_is_in_integers_too(name, tmp_path):
    keras.utils.set_random_seed(0)
    ids = np.random.default_rng(0).integers(1, 9, (4, 5)).astype("int32")
    ids[:, 4:], ids[1, 2:], ids[2, 0] = 0, 0, 0
    x = keras.Input((5,), dtype="int32")
    model = keras.Model(x, layers.Dense(3)(MASKED[name]()(layers.Embedding(9, 4, mask_zero=True)(x))))
    computes_what_keras_does_exactly_on_litert(model, ids, tmp_path)
    whole = chipfit.quantize(model, [ids], platform="ort_cpu", progress=False)
    np.testing.assert_allclose(flat(whole.model(ids))[0], flat(model(ids))[0], atol=0.05)
    assert (
        chipfit.quantize(model, [ids], platform="ort_dynamic", progress=False).verify([ids]).exact
    )  # masked: in float


def test_steps_that_a_masking_layer_finds_leave_the_state_as_it_is(tmp_path):
    keras.utils.set_random_seed(0)
    sequences = np.random.default_rng(0).normal(size=(4, 6, 3)).astype("float32")
    sequences[:, 4:], sequences[1, 2] = 0, 0
    x = keras.Input((6, 3))
    model = keras.Model(x, layers.Dense(3)(layers.LSTM(6)(layers.Masking(0.0)(x))))
    computes_what_keras_does_exactly_on_litert(model, sequences, tmp_path)
