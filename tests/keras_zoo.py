"""Small Keras networks of many kinds, each with one batch of data."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")

from keras import activations, layers, ops  # noqa: E402 -- after the import that may skip


def _conv_bn(
    x: Any, filters: int, kernel: int = 3, strides: int = 1, activation: str | None = "relu", **kw: Any
) -> Any:
    x = layers.Conv2D(filters, kernel, strides, padding="same", use_bias=False, **kw)(x)
    x = layers.BatchNormalization()(x)
    return layers.Activation(activation)(x) if activation else x


def _image(side: int = 8) -> Any:
    return keras.Input((side, side, 3), name="image")


def residual() -> Any:
    x = image = _image()
    x = _conv_bn(x, 8)
    y = _conv_bn(_conv_bn(x, 8), 8, activation=None)
    x = layers.ReLU()(layers.Add()([x, y]))
    x = layers.Dropout(0.5)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, layers.Dense(5, name="head")(x))


def mobilenet() -> Any:
    """Return a network of depthwise convolutions, strided "same" padding, relu6 as operation, shortcut by operator."""
    image = _image(9)
    x = layers.ReLU(max_value=6.0)(_conv_bn(image, 8, 3, 2, None))
    y = _conv_bn(x, 24, 1, activation=None)
    y = layers.DepthwiseConv2D(3, 1, padding="same", use_bias=False)(ops.relu6(y))
    y = ops.relu6(layers.BatchNormalization()(y))
    x = x + _conv_bn(y, 8, 1, activation=None)
    x = layers.DepthwiseConv2D(3, 2, padding="same", depth_multiplier=2, activation="relu")(x)
    x = layers.GlobalAveragePooling2D(keepdims=True)(x)
    return keras.Model(image, layers.Softmax()(layers.Flatten()(layers.Conv2D(4, 1)(x))))


def squeeze_excite() -> Any:
    image = _image()
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    g = layers.GlobalAveragePooling2D(keepdims=True)(x)
    g = layers.Conv2D(8, 1, activation="sigmoid")(layers.Conv2D(4, 1, activation="relu")(g))
    x = layers.Multiply()([x, g])
    return keras.Model(image, layers.Conv2D(2, 1, activation="tanh")(x))


def concat_pools() -> Any:
    image = _image(7)
    x = layers.Conv2D(6, 3, activation="relu")(image)
    a = layers.AveragePooling2D(3, strides=2, padding="same")(x)
    b = layers.MaxPooling2D(2, strides=2, padding="same")(x)
    c = layers.Conv2D(4, 3, strides=2, padding="same", activation="relu6")(x)
    x = layers.Concatenate()([a, b, c])
    x = layers.Conv2D(4, 3, dilation_rate=2, padding="same", activation="leaky_relu")(
        layers.ZeroPadding2D(((1, 0), (2, 1)))(x)
    )
    return keras.Model(image, layers.GlobalMaxPooling2D()(layers.Cropping2D(1)(x)))


def heads() -> Any:
    """Return a network with every activation behind one trunk."""
    v = keras.Input((6,), name="v")
    x = layers.Dense(8, activation="silu")(v)
    names = "gelu sigmoid tanh softmax elu selu softplus hard_sigmoid hard_silu exponential mish"
    outs = [layers.Dense(4, activation=a)(x) for a in names.split()]
    outs += [layers.LeakyReLU(0.1)(x), layers.PReLU()(x), layers.ReLU(max_value=3.0)(x)]
    outs.append(activations.gelu(x, approximate=True))
    return keras.Model(v, layers.Concatenate()(outs))


def unet() -> Any:
    image = _image()
    a = _conv_bn(image, 6)
    b = _conv_bn(layers.MaxPooling2D()(a), 8)
    up = layers.UpSampling2D(2)(b)
    smooth = layers.UpSampling2D(2, interpolation="bilinear")(b)
    learned = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="relu")(b)
    x = layers.Concatenate()([a, up, smooth, learned])
    return keras.Model(image, layers.Conv2D(2, 1)(layers.Resizing(4, 6)(x)))


def transposed() -> Any:
    """Return transposed convolutions with every padding."""
    image = _image(5)
    x = layers.Conv2DTranspose(4, 4, strides=2, padding="same")(image)
    x = layers.Conv2DTranspose(4, 2, strides=3, padding="valid")(x)
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="valid")(x)
    return keras.Model(image, layers.Conv2DTranspose(2, 3, strides=1, padding="same")(x))


def separable() -> Any:
    image = _image(8)
    x = layers.SeparableConv2D(8, 3, strides=2, padding="same", depth_multiplier=2, activation="relu")(image)
    return keras.Model(image, layers.Conv2D(4, 3, groups=2, padding="same")(x))


def shared() -> Any:
    image = _image()
    conv, relu = layers.Conv2D(6, 3, padding="same", name="shared"), layers.ReLU()
    x = layers.Conv2D(6, 1)(image)
    for _ in range(3):
        x = relu(conv(x))
    return keras.Model(image, x)


def nested() -> Any:
    """Return a model that contains a Functional model, used twice, and a Sequential one."""
    inner = keras.Input((8, 8, 4))
    block = keras.Model(
        inner,
        layers.Add()([inner, layers.Conv2D(4, 3, padding="same", activation="relu", name="conv")(inner)]),
        name="block",
    )
    head = keras.Sequential(
        [layers.GlobalAveragePooling2D(), layers.Dense(3, activation="softmax", name="out")], name="head"
    )
    image = _image()
    x = layers.Conv2D(4, 1, name="stem")(image)
    return keras.Model(image, head(block(block(x))))


def sequential() -> Any:
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Rescaling(1 / 2.0, offset=-0.1),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(8, activation="relu"),
            layers.Reshape((4, 2)),
            layers.Permute((2, 1)),
            layers.Dense(2),
        ]
    )


def many_in_and_out() -> Any:
    a, b = keras.Input((6,), name="a"), keras.Input((4,), name="b")
    x, y = layers.Dense(8)(a), layers.Dense(8)(b)
    return keras.Model([a, b], {"sum": x + y, "parts": [layers.Subtract()([x, y]), layers.Maximum()([x, y])]})


def named_inputs() -> Any:
    inputs = {"left": keras.Input((6,), name="left"), "right": keras.Input((6,), name="right")}
    x = layers.Average()([layers.Dense(4)(inputs["right"]), layers.Dense(4)(inputs["left"])])
    return keras.Model(inputs, [x, layers.Dense(2, activation="sigmoid")(x)])


def subclassed() -> Any:
    class Block(layers.Layer):
        def __init__(self, filters: int, **kw: Any) -> None:
            super().__init__(**kw)
            self.conv = layers.Conv2D(filters, 3, padding="same", name="conv")
            self.norm = layers.BatchNormalization(name="norm")

        def build(self, shape: Any) -> None:
            self.gain = self.add_weight(shape=(shape[-1],), name="gain", initializer="ones")

        def call(self, x: Any) -> Any:
            return ops.relu(self.norm(self.conv(x * self.gain))) + x

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(3, name="first"), Block(3, name="second")
            self.head = layers.Dense(4, name="head")

        def call(self, x: Any, training: bool = False) -> Any:
            x = self.second(self.first(x))
            return self.head(ops.mean(x, axis=(1, 2)))

    model = Net()
    model(np.zeros((1, 8, 8, 3), "float32"))
    return model


def arithmetic() -> Any:
    """Return a network of keras.ops and Python operators."""
    image = _image()
    x = (layers.Conv2D(8, 3, padding="same")(image) - 0.25) / 2.0
    y = ops.clip(x[..., :4], -0.5, 0.5) * 2.0 + ops.abs(x[..., 4:])
    y = ops.concatenate([y, -ops.square(y)], axis=-1)
    y = ops.where(y > 0.1, y, 0.1 * y)
    z = ops.reshape(ops.transpose(y, (0, 3, 1, 2)), (-1, 8, 64))
    z = ops.matmul(z, np.linspace(-1, 1, 64 * 5, dtype="float32").reshape(64, 5))
    return keras.Model(image, ops.max(z, axis=1) + ops.sum(y, axis=(1, 2, 3))[:, None] + y[:, 0, 0, :5])


def attention() -> Any:
    image = _image()
    x = layers.Reshape((4, 16))(layers.Conv2D(16, 4, strides=4, name="patch")(image))
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 8, name="attention")(y, y)
    y = layers.Dense(16)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))
    return keras.Model(image, layers.Dense(3)(ops.mean(layers.Add()([x, y]), axis=1)))


def embedding() -> Any:
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    x = layers.Embedding(11, 8)(tokens)
    x = layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="relu")(x)
    x = layers.Conv1D(8, 3, strides=2, padding="same")(x)
    return keras.Model(tokens, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def norms() -> Any:
    image = _image()
    x = layers.GroupNormalization(2)(layers.Conv2D(6, 3, padding="same")(image))
    x = layers.UnitNormalization()(x)
    x = layers.RMSNormalization()(layers.GaussianNoise(0.1)(x))
    return keras.Model(image, layers.BatchNormalization()(x))


def recurrent() -> Any:
    """Return a network whose LSTM is called as a layer: its gates are unusual, and its first states are given."""
    x = steps = keras.Input((5, 6), name="steps")
    x, state = layers.Dense(6, activation="relu")(x), layers.Dense(8)(layers.Flatten()(x))
    x = layers.LSTM(8, recurrent_activation="hard_sigmoid", name="lstm")(x, initial_state=[state, state])
    return keras.Model(steps, layers.Dense(3)(x))


ZOO: dict[str, Callable[[], Any]] = {
    f.__name__: f
    for f in (
        *(residual, mobilenet, squeeze_excite, concat_pools, heads, unet, transposed, separable, shared, nested),
        *(sequential, many_in_and_out, named_inputs, subclassed, arithmetic, attention, embedding, norms, recurrent),
    )
}

#: networks that contain every kind of layer; `make test-all` runs the others on backends other than torch
FEW = {"mobilenet", "unet", "shared", "nested", "subclassed", "named_inputs", "attention", "recurrent"}


def on_others(*marks: Any) -> Any:
    """Return `marks` if Keras runs on another backend than torch, else nothing."""
    return () if os.environ.get("KERAS_BACKEND", "torch") == "torch" else marks


def networks() -> list[Any]:
    """Return the zoo as parameters of a test."""
    return [pytest.param(n, marks=() if n in FEW else on_others(pytest.mark.slow)) for n in sorted(ZOO)]


def randomize(model: Any, seed: int = 0) -> None:
    """Set every variable to plausible numbers that depend on `seed` alone."""
    rng = np.random.default_rng(seed)
    for v in model.variables:
        if v.dtype != "float32":
            continue
        shape = tuple(v.shape)
        name = v.name
        if "variance" in name:
            new = rng.uniform(0.5, 2.0, shape)
        elif "gamma" in name or name in ("gain", "scale"):
            new = rng.uniform(0.5, 1.5, shape)
        elif len(shape) < 2:
            new = rng.normal(0, 0.2, shape)
        else:
            new = rng.normal(0, 1 / np.sqrt(max(np.prod(shape[:-1]), 1)), shape)
        v.assign(new.astype("float32"))


def batch_for(model: Any, seed: int = 0, rows: int = 4) -> Any:
    """Return one batch in the structure of the model's inputs."""
    rng = np.random.default_rng(seed)

    def one(kt: Any) -> np.ndarray:
        shape = (rows, *kt.shape[1:])
        if "int" in kt.dtype:
            return rng.integers(0, 11, shape).astype("int32")
        return rng.normal(0, 1, shape).astype("float32")

    of_call = getattr(model, "_functional", None) if not hasattr(model, "_inputs_struct") else model
    if of_call is None:  # a subclassed model takes images
        return rng.normal(0, 1, (rows, 8, 8, 3)).astype("float32")
    return keras.tree.map_structure(one, of_call._inputs_struct)


def make(name: str) -> tuple[Any, Any]:
    """Return a network and one batch for it."""
    keras.utils.set_random_seed(0)
    model = ZOO[name]()
    randomize(model)
    return model, batch_for(model)
