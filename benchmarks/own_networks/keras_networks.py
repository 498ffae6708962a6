"""The networks of `networks.py`, as a user of Keras writes them: functional, sequential, and a subclass."""

import keras
from keras import layers


def squeeze() -> keras.Model:
    """Return a residual block with squeeze-and-excitation, for grey images."""
    start = keras.Input((28, 28, 1))
    x = layers.Conv2D(16, 3, strides=2, padding="same", use_bias=False)(start)
    x = layers.Activation("hard_swish")(layers.BatchNormalization()(x))
    y = layers.Conv2D(16, 3, padding="same")(layers.Conv2D(16, 3, padding="same", activation="relu")(x))
    gate = layers.Dense(4, activation="relu")(layers.GlobalAveragePooling2D()(y))
    gate = layers.Reshape((1, 1, 16))(layers.Dense(16, activation="sigmoid")(gate))
    x = layers.ReLU()(layers.Add()([x, layers.Multiply()([y, gate])]))
    x = layers.Dropout(0.1)(layers.Flatten()(layers.AveragePooling2D(2)(x)))
    return keras.Model(start, layers.Dense(10)(x))


def sensor() -> keras.Model:
    """Return depthwise-separable convolutions over windows of an accelerometer."""
    parts = [keras.Input((128, 6)), layers.Conv1D(24, 5, strides=2, padding="same"), layers.BatchNormalization()]
    parts += [layers.ReLU(6.0)]
    for out in (32, 48):
        parts += [layers.SeparableConv1D(out, 5, padding="same"), layers.LeakyReLU(0.1), layers.MaxPooling1D(2)]
    return keras.Sequential([*parts, layers.GlobalAveragePooling1D(), layers.Dense(10, activation="softmax")])


class Branches(keras.Model):
    """Three branches of different scale, concatenated, and a decoder's upsampling with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = layers.Conv2D(8, 1), layers.Conv2D(8, (5, 3), padding="same")
        self.far = layers.Conv2D(8, 3, padding="same", dilation_rate=2)
        self.down = layers.Conv2D(24, 3, strides=2, padding="same", activation="elu")
        self.up, self.mix = layers.Conv2DTranspose(24, 2, strides=2), layers.Conv2D(16, 1, activation="elu")
        self.pool, self.head = layers.GlobalMaxPooling2D(), layers.Dense(10)

    def call(self, x):
        seen = keras.ops.relu(keras.ops.concatenate([self.narrow(x), self.wide(x), self.far(x)], -1))
        around = self.up(self.down(seen))
        return self.head(self.pool(self.mix(keras.ops.concatenate([seen, around], -1))))


def branches() -> keras.Model:
    """Return the subclass with weights, which its first call makes."""
    model = Branches()
    model(keras.ops.zeros((1, 40, 24, 3)))
    return model
