"""Functions of TensorFlow in `.h5` files of Keras 2 give the numbers of Keras 2, or a typed error."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("h5py")
pytest.importorskip("tf_keras")
import h5py
import tensorflow as tf
import tf_keras as keras_2

from chipfit.errors import CaptureError
from chipfit.frameworks import load_model

L = keras_2.layers


def arithmetic(x):
    y = tf.nn.relu6(L.Conv2D(4, 3, padding="same", activation=tf.nn.swish)(x) * 2.0 + 1.0) / 6.0
    y = x[..., :1] * y
    y = tf.concat([y, tf.reduce_mean(y, axis=-1, keepdims=True)], -1)
    y = tf.image.resize(1.0 - tf.square(y), (12, 10))[:, 1:-1, ::2]
    return tf.reshape(y, (tf.shape(y)[0], 250))


def attention(x):
    q, k, v = (L.Dense(8, name=f"{n}/dense")(x[:, 0]) for n in "qkv")
    rates = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / tf.sqrt(8.0))
    y = tf.transpose(tf.matmul(rates, v), [0, 2, 1])
    y = L.MultiHeadAttention(2, 8)(y, L.Dense(10)(y))
    return tf.math.cumsum(tf.cast(tf.argmax(y, -1), tf.float32)) + tf.reduce_max(keras_2.activations.gelu(y), axis=2)


def moves(x):
    y = tf.pad(tf.nn.depth_to_space(L.Conv2D(8, 3, strides=2)(x), 2), [[0, 0], [1, 1], [1, 1], [0, 0]])
    a, b = tf.split(tf.stack([y, -y], axis=1), 2, axis=1)
    return tf.clip_by_value(tf.maximum(a, b * 0.5), 0, 1)


def written(function, file):
    """Write a model of a function as Keras 2 does, and return it."""
    keras_2.utils.set_random_seed(0)
    x = L.Input((10, 10, 3))
    model = keras_2.Model(x, function(x))
    model.save(file)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [arithmetic, attention, moves])
def test_functions_in_a_file_of_keras_2_give_its_numbers(function, tmp_path):
    model = written(function, tmp_path / "m.h5")
    x = np.random.default_rng(0).random((3, 10, 10, 3), dtype=np.float32)
    with torch.no_grad():
        got = load_model(str(tmp_path / "m.h5"))(torch.from_numpy(x))
    np.testing.assert_allclose(np.asarray(got), model(x).numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "function, message",
    [
        (tf.math.lgamma, "Layer 'tf.math.lgamma.*' is a function of TensorFlow without a reader"),
        (lambda x: tf.cumsum(x, reverse=True), "Layer 'tf.math.cumsum.*tf.math.cumsum with reverse has no formula"),
        (lambda x: tf.einsum("bij,bij->bij", x[..., 0], x[..., 0]), "Layer 'tf.einsum"),  # its operands are not stored
    ],
)
def test_a_function_that_nothing_computes_is_refused_by_its_layer(function, message, tmp_path):
    written(function, tmp_path / "m.h5")
    with pytest.raises(CaptureError, match=f"{message}.*Try: .*TFLiteConverter"):
        load_model(str(tmp_path / "m.h5"))


@pytest.mark.filterwarnings("ignore")
def test_an_operator_of_tensorflow_2_3_is_refused_by_its_layer(tmp_path):
    written(tf.square, tmp_path / "m.h5")
    with h5py.File(tmp_path / "m.h5", "r+") as file:
        config = json.loads(file.attrs["model_config"])
        config["config"]["layers"][1] |= {"class_name": "TensorFlowOpLayer", "name": "op"}
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(CaptureError, match="Layer 'op' is an operator of TensorFlow 2.3 or older"):
        load_model(str(tmp_path / "m.h5"))


@pytest.mark.parametrize("node", [{}, [], [["x"]], ["x", 0], [[[], 0, 0, []]], ["x", 0, 0, {"y": ["x", {}, []]}], [3]])
@pytest.mark.parametrize("kind", ["TFOpLambda", "SlicingOpLambda", "Dense"])
def test_a_malformed_call_of_a_layer_is_refused(kind, node, tmp_path):
    layers = [{"class_name": "InputLayer", "name": "x", "config": {"name": "x", "batch_shape": [None, 2]}}]
    own = {"name": "y", "function": "math.multiply", "units": 2}
    layers += [{"class_name": kind, "name": "y", "config": own, "inbound_nodes": [node]}]
    ends = {"input_layers": [["x", 0, 0]], "output_layers": [["y", 0, 0]], "name": "m"}
    with h5py.File(tmp_path / "m.h5", "w") as file:
        config = {"class_name": "Functional", "config": {"layers": layers, **ends}}
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(CaptureError):
        load_model(str(tmp_path / "m.h5"))
