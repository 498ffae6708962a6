"""Thirty small Keras networks of all kinds, with batches.

Weights are random, and norms have statistics as after training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from benchmarks.converters import enters
from keras import layers, ops

Batch = Callable[[np.random.Generator, int], tuple[np.ndarray, ...]]
#: name -> network, and batches of a number of samples
NETWORKS: dict[str, tuple[Callable[[], keras.Model], Batch]] = {}
network = enters(NETWORKS)


def images(size: int = 24, channels: int = 3) -> Batch:
    """Return smooth images with noise, [N, size, size, channels]."""

    def batch(r: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
        coarse = r.normal(size=(n, size // 4, size // 4, channels)).repeat(4, 1).repeat(4, 2)
        return ((coarse + 0.3 * r.normal(size=(n, size, size, channels))).astype("float32"),)

    return batch


def walks(length: int = 40, channels: int = 8) -> Batch:
    """Return random walks, [N, length, channels]."""
    return lambda r, n: ((0.3 * r.normal(size=(n, length, channels))).cumsum(1).astype("float32"),)


def pixels(size: int = 24) -> Batch:
    return lambda r, n: (r.integers(0, 256, (n, size // 4, size // 4, 3)).repeat(4, 1).repeat(4, 2).astype("float32"),)


def vectors(size: int = 32) -> Batch:
    mix = np.random.default_rng(5).normal(size=(size, size)) / 4
    return lambda r, n: ((r.normal(size=(n, size)) @ mix).astype("float32"),)


def tokens(r: np.random.Generator, n: int) -> tuple[np.ndarray, ...]:
    return (r.integers(0, 64, (n, 16)).astype("int32"),)


def with_statistics(model: keras.Model, r: np.random.Generator) -> keras.Model:
    """Set statistics of batch norms, biases and slopes as after training."""
    for layer in model._flatten_layers():
        if isinstance(layer, layers.BatchNormalization) and layer.built:
            k = layer.moving_mean.shape
            layer.moving_mean.assign(r.normal(0, 0.3, k)), layer.moving_variance.assign(r.uniform(0.3, 2, k))
            layer.gamma.assign(r.uniform(0.5, 1.5, k)), layer.beta.assign(r.normal(0, 0.3, k))
        for w in layer._trainable_variables:
            if w.name == "bias":
                w.assign(r.normal(0, 0.1, w.shape))
            if w.name == "alpha":
                w.assign(r.uniform(0.05, 0.4, w.shape))
    return model


def conv(
    x: Any, filters: int, kernel: Any = 3, strides: Any = 1, act: str | None = "relu", depthwise: bool = False
) -> Any:
    """Add a convolution without bias, a batch norm, and an activation unless `act` is None."""
    how = {"padding": "same", "use_bias": False, "strides": strides}
    x = (layers.DepthwiseConv2D(kernel, **how) if depthwise else layers.Conv2D(filters, kernel, **how))(x)
    x = layers.BatchNormalization()(x)
    return layers.Activation(act)(x) if act else x


def head(x: Any, classes: int = 10, act: str | None = None) -> Any:
    return layers.Dense(classes, activation=act)(layers.GlobalAveragePooling2D()(x))


# ---------------------------------------------------------------- MLPerf Tiny's shapes


@network(images(32))
def resnet8() -> keras.Model:
    i = keras.Input((32, 32, 3))
    x = conv(i, 16)
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        y = conv(conv(x, filters, 3, strides), filters, act=None)
        x = layers.Conv2D(filters, 1, strides, padding="same")(x) if strides > 1 else x
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(i, layers.Softmax()(head(x)))


@network(images(48, 1))
def ds_cnn() -> keras.Model:
    i = keras.Input((48, 48, 1))
    x = conv(i, 64, (10, 4), 2)
    for _ in range(4):
        x = conv(conv(x, 64, depthwise=True), 64, 1)
    return keras.Model(i, layers.Softmax()(head(x, 12)))


@network(vectors(128))
def autoencoder() -> keras.Model:
    x = i = keras.Input((128,))
    for units in (64, 64, 64, 8, 64, 64, 64):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(x)))
    return keras.Model(i, layers.Dense(128)(x))


@network(images(48))
def mobilenet_v1() -> keras.Model:
    i = keras.Input((48, 48, 3))
    x = conv(i, 8, 3, 2)
    for filters, strides in ((16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2), (128, 1)):
        x = conv(conv(x, 0, 3, strides, depthwise=True), filters, 1)
    return keras.Model(i, layers.Softmax()(head(x, 2)))


@network(walks(60, 40))
def wake_word() -> keras.Model:
    x = i = keras.Input((60, 40))
    for filters, kernel, dilation in ((64, 3, 1), (64, 5, 1), (64, 5, 2), (64, 9, 1)):
        x = layers.SeparableConv1D(filters, kernel, dilation_rate=dilation, use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return keras.Model(i, layers.Dense(3, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


# ---------------------------------------------------------------- convolutional networks


@network(images(32))
def mobilenet_v2() -> keras.Model:
    return keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=10)


def _gated(act: str, gate: str) -> keras.Model:
    i = keras.Input((32, 32, 3))
    x = conv(i, 16, 3, 2, act)
    for strides in (1, 2, 1):
        x = conv(conv(x, 32, 1, act=act), 32, 3, strides, act, depthwise=True)
        s = layers.GlobalAveragePooling2D(keepdims=True)(x)
        s = layers.Conv2D(32, 1, activation=gate)(layers.Conv2D(8, 1, activation=act)(s))
        x = conv(layers.Multiply()([x, s]), 16, 1, act=None)
    return keras.Model(i, head(x))


@network(images(32))
def mobilenet_v3() -> keras.Model:
    return _gated("hard_swish", "hard_sigmoid")


@network(images(32))
def efficientnet() -> keras.Model:
    return _gated("silu", "sigmoid")


@network(images())
def densenet() -> keras.Model:
    i = keras.Input((24, 24, 3))
    x = conv(i, 16)
    for _ in range(4):
        y = conv(layers.ReLU()(layers.BatchNormalization()(x)), 8)
        x = layers.Concatenate()([x, y])
    return keras.Model(i, head(layers.AveragePooling2D(2)(x)))


@network(images())
def inception() -> keras.Model:
    i = keras.Input((24, 24, 3))
    x = conv(i, 16, 3, 2)
    pooled = conv(layers.MaxPooling2D(3, 1, padding="same")(x), 8, 1)
    return keras.Model(
        i, head(layers.Concatenate()([conv(x, 8, 1), conv(conv(x, 8, 1), 16), conv(conv(x, 8, 1), 8, 5), pooled]))
    )


@network(images(32))
def unet() -> keras.Model:
    i = keras.Input((32, 32, 3))
    a = conv(i, 16)
    b = conv(a, 32, 3, 2)
    c = conv(b, 64, 3, 2)
    b = conv(layers.Concatenate()([layers.Conv2DTranspose(32, 2, 2)(c), b]), 32)
    a = conv(layers.Concatenate()([layers.Conv2DTranspose(16, 2, 2)(b), a]), 16)
    return keras.Model(i, layers.Conv2D(4, 1)(a))


@network(images(32))
def pyramid() -> keras.Model:
    i = keras.Input((32, 32, 3))
    a = conv(i, 16, 3, 2)
    b = conv(a, 32, 3, 2)
    c = conv(b, 64, 3, 2)
    y = layers.Conv2D(24, 1)(c)
    for x in (b, a):
        y = layers.Add()([layers.UpSampling2D()(y), layers.Conv2D(24, 1)(x)])
    return keras.Model(
        i, [layers.Conv2D(4, 3, padding="same")(y), layers.Conv2D(3, 3, padding="same", activation="sigmoid")(y)]
    )


@network(images(32))
def detector() -> keras.Model:
    """Boxes in pixels beside scores in one tensor, as exported detectors have them."""
    i = keras.Input((32, 32, 3))
    x = conv(conv(conv(i, 16, 3, 2, "silu"), 32, 3, 2, "silu"), 32, act="silu")
    box = layers.Rescaling(80.0)(layers.Reshape((64, 4))(layers.Conv2D(4, 1, activation="sigmoid")(x)))
    score = layers.Reshape((64, 1))(layers.Conv2D(1, 1, activation="sigmoid")(x))
    return keras.Model(i, layers.Concatenate()([box, score]))


@network(images())
def discriminator() -> keras.Model:
    i = keras.Input((24, 24, 3))
    x = layers.LeakyReLU(negative_slope=0.2)(layers.Conv2D(16, 4, 2, padding="same")(i))
    x = layers.ELU()(layers.Conv2D(32, 4, 2, padding="same")(x))
    x = layers.Conv2D(32, 3, padding="same", activation="tanh")(x)
    return keras.Model(i, layers.Dense(1)(layers.Flatten()(x)))


@network(images())
def prelu() -> keras.Model:
    i = keras.Input((24, 24, 3))
    x = layers.PReLU()(layers.Conv2D(8, 3, padding="same")(i))
    x = layers.PReLU(shared_axes=[1, 2])(layers.Conv2D(16, 3, strides=2)(x))
    return keras.Model(i, head(x, 4))


@network(images())
def norm_first() -> keras.Model:
    i = keras.Input((24, 24, 3))
    return keras.Model(i, head(layers.Conv2D(16, 3, 2, activation="relu")(layers.BatchNormalization()(i)), 4))


@network(pixels())
def pixels_by_255() -> keras.Model:
    i = keras.Input((24, 24, 3))
    return keras.Model(i, head(conv(i / 255.0, 16, 3, 2), 4))


@network(pixels())
def normalization() -> keras.Model:
    i = keras.Input((24, 24, 3))
    n = layers.Normalization(mean=[0.1, 0.2, -0.1], variance=[0.3, 0.4, 0.5])(layers.Rescaling(1 / 127.5, offset=-1)(i))
    return keras.Model(i, head(layers.Conv2D(8, 3, 2, activation="relu")(n), 6))


@network(images())
def merges() -> keras.Model:
    i = keras.Input((24, 24, 3))
    a, b = conv(i, 16), conv(i, 16, 5)
    y = layers.Average()([layers.Maximum()([a, b]), layers.Subtract()([a, b])])
    return keras.Model(i, head(layers.Cropping2D(2)(layers.ZeroPadding2D(1)(y))))


@network(images())
def unit_length() -> keras.Model:
    i = keras.Input((24, 24, 3))
    return keras.Model(i, layers.UnitNormalization()(head(conv(conv(i, 16, 3, 2), 32, 3, 2), 16)))


@network(lambda r, n: (*images()(r, n), *vectors(6)(r, n)))
def two_inputs() -> keras.Model:
    i, j = keras.Input((24, 24, 3)), keras.Input((6,))
    x = layers.Concatenate()([layers.GlobalMaxPooling2D()(conv(i, 16, 3, 2)), layers.Dense(8, activation="relu")(j)])
    return keras.Model([i, j], layers.Dense(3)(x))


# ---------------------------------------------------------------- series, text and transformers


@network(walks())
def causal_series() -> keras.Model:
    x = i = keras.Input((40, 8))
    for dilation in (1, 2, 4):
        x = layers.Conv1D(16, 3, padding="causal", dilation_rate=dilation, activation="relu")(x)
    return keras.Model(i, layers.Conv1D(2, 1)(x))


@network(tokens)
def text_convolution() -> keras.Model:
    i = keras.Input((16,), dtype="int32")
    x = layers.Conv1D(32, 3, padding="same", activation="relu")(layers.Embedding(64, 32)(i))
    return keras.Model(i, layers.Dense(4)(layers.GlobalMaxPooling1D()(x)))


@network(walks(20))
def attention_pooling() -> keras.Model:
    i = keras.Input((20, 8))
    x = layers.Conv1D(16, 3, padding="same", activation="relu")(i)
    w = layers.Softmax(axis=1)(layers.Dense(1)(x))
    return keras.Model(i, layers.Dense(3)(ops.sum(x * w, axis=1)))


def _attended(x: Any, width: int, heads: int) -> Any:
    x = layers.Add()([x, layers.MultiHeadAttention(heads, width // heads)(*[layers.LayerNormalization()(x)] * 2)])
    y = layers.Dense(width)(layers.Dense(2 * width, activation="gelu")(layers.LayerNormalization()(x)))
    return layers.Add()([x, y])


@network(walks(16, 32))
def transformer() -> keras.Model:
    i = keras.Input((16, 32))
    return keras.Model(i, layers.Dense(4)(_attended(_attended(i, 32, 4), 32, 4)))


@network(images(32))
def vision_transformer() -> keras.Model:
    i = keras.Input((32, 32, 3))
    x = layers.Reshape((16, 32))(layers.Conv2D(32, 8, 8)(i))
    x = layers.LayerNormalization()(_attended(_attended(x, 32, 2), 32, 2))
    return keras.Model(i, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


@network(walks(20))
def separable_series() -> keras.Model:
    i = keras.Input((20, 8))
    x = layers.MaxPooling1D(2)(layers.Conv1D(16, 5, activation="relu")(i))
    x = layers.AveragePooling1D(2)(layers.SeparableConv1D(24, 3, activation="relu6")(x))
    return keras.Model(i, layers.Dense(5, activation="sigmoid")(layers.Flatten()(x)))


@network(vectors())
def perceptron() -> keras.Model:
    i = keras.Input((32,))
    x = layers.Dense(64, activation="tanh")(layers.Dense(64, activation="relu")(i))
    return keras.Model(i, layers.Dense(5, activation="softmax")(x))


@network(vectors(16))
def decoder() -> keras.Model:
    i = keras.Input((16,))
    x = layers.Reshape((4, 4, 16))(layers.Dense(256, activation="relu")(i))
    x = layers.Conv2DTranspose(16, 4, 2, padding="same", activation="relu")(x)
    return keras.Model(i, layers.Conv2DTranspose(3, 4, 2, padding="same", activation="sigmoid")(x))


@network(images(32))
def upsampled() -> keras.Model:
    i = keras.Input((32, 32, 3))
    x = layers.UpSampling2D(interpolation="bilinear")(conv(conv(i, 16, 3, 2), 16, 3, 2))
    return keras.Model(i, layers.Conv2D(2, 1, activation="softmax")(x))
