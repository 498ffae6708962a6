"""Functions of TensorFlow in Lambda layers and users' layers are read as operators; run by `test_backends`, too."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")
if keras.backend.backend() != "tensorflow":
    pytest.skip("Keras does not run on TensorFlow here", allow_module_level=True)

import tensorflow as tf  # noqa: E402 -- after the lines that may skip
from keras import layers  # noqa: E402

from chipfit.engine.run import run  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402

FUNCTIONS = {
    "arithmetic": lambda x: tf.nn.relu(x) - tf.reduce_mean(x, axis=[1, 2], keepdims=True) * tf.constant(2.0),
    "conditions": lambda x: tf.where(tf.greater(x, 0.5), tf.cast(x > 0, tf.float32), tf.math.divide_no_nan(x, x - x)),
    "sizes": lambda x: tf.reshape(x, [tf.shape(x)[0], -1, 2]),
    "parts": lambda x: tf.concat([tf.nn.silu(p) for p in tf.split(x, [1, 3], -1)] + tf.split(x, 2, axis=-1), -1),
    "slices": lambda x: tf.slice(x, [0, 1, 2, 0], [-1, 3, 3, -1]) + x[:, :3, 1:4],
    "pixels of channels": lambda x: tf.nn.space_to_depth(tf.nn.depth_to_space(x, 2), 4),
    "images": lambda x: tf.image.resize(tf.pad(x, [[0, 0], [1, 1], [0, 2], [0, 0]], "REFLECT"), tf.shape(x)[1:3] * 2),
    "products": lambda x: tf.matmul(x, x, transpose_b=True) + tf.einsum("bhwc,bhvc->bhwv", x, x),
    "norms": lambda x: tf.math.l2_normalize(x, -1) * tf.norm(x, axis=-1, keepdims=True) + tf.nn.softmax(x),
    "moments": lambda x: tf.nn.batch_normalization(x, *tf.nn.moments(x, [1, 2], keepdims=True), 0.5, None, 1e-3),
    "windows": lambda x: tf.nn.max_pool2d(x, 2, 2, "VALID") + tf.nn.avg_pool(x, [1, 3, 3, 1], [1, 2, 2, 1], "SAME"),
    "order": lambda x: tf.transpose(tf.reverse(tf.stack(tf.unstack(x, axis=1), axis=2), [1]), [0, 3, 1, 2]),
    "places": lambda x: tf.one_hot(tf.argmax(x, -1), 4) + tf.gather(x, [3, 2, 1, 0], axis=-1),
    "copies": lambda x: tf.squeeze(tf.expand_dims(tf.identity(tf.add_n([x, tf.stop_gradient(x)])), 1), 1),
}


class Convolution(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, shape[-1], 6), name="kernel")
        self.depth = self.add_weight(shape=(3, 3, 6, 1), name="depth")
        self.bias = self.add_weight(shape=(6,), name="bias")

    def call(self, x):
        x = tf.nn.bias_add(tf.nn.conv2d(x, self.kernel, strides=[1, 2, 2, 1], padding="SAME"), self.bias)
        return tf.nn.leaky_relu(tf.nn.depthwise_conv2d(x, self.depth, [1, 1, 1, 1], "VALID"), 0.1)


class Subclass(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.head = Convolution(), layers.Dense(3)

    def call(self, x, training=False):
        return {"scores": self.head(tf.reduce_max(tf.nn.relu6(self.inner(x)), axis=(1, 2)))}


def check(model):
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 4)).astype("float32")
    want = keras.tree.flatten(model(x))[0].numpy()
    graph = capture(model, (torch.from_numpy(x),))
    assert OPAQUE not in {n.op for n in graph.nodes}
    got = run(graph, graph.example)[graph.outputs[0]].numpy()
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())
    return graph


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_lambda_is_read_as_operators(name):
    x = keras.Input((8, 8, 4))
    check(keras.Model(x, layers.Lambda(FUNCTIONS[name])(x)))


def test_a_subclass_keeps_its_weights():
    model = Subclass()
    model(np.zeros((1, 8, 8, 4), "float32"))
    assert len(check(model).weights) >= len(model.weights)


def test_a_function_without_a_formula_is_called_as_it_is():
    x = keras.Input((8, 8, 4))
    model = keras.Model(x, layers.Lambda(lambda x: tf.math.lgamma(tf.abs(x) + 1.0))(x))
    assert [n.op for n in capture(model).nodes] == [OPAQUE]


def test_outside_of_reading_symbolic_tensors_are_refused_as_before():
    with pytest.raises(ValueError, match="KerasTensor cannot be used as input to a TensorFlow function"):
        tf.nn.relu(keras.Input((4,)))
