"""A Keras network on handwritten digits: trained, quantized to 8 and 2 bits, trained on in 2 bits, exported, verified.

KERAS_BACKEND=torch python examples/quantize_keras.py        (or jax, or tensorflow)
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import chipfit


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [N, 8, 8, 1] and labels [N], and 360 others to test on."""
    x, y = load_digits(return_X_y=True)
    x = (x.reshape(-1, 8, 8, 1) / 8 - 1).astype("float32")
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    return x[360:], y[360:], x[:360], y[:360]


def network() -> Any:
    """Convolutions with batch norms to fold, one of them depthwise, and a shortcut."""
    image = keras.Input((8, 8, 1), name="image")
    x = shortcut = layers.ReLU()(
        layers.BatchNormalization(momentum=0.8)(
            layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem")(image)
        )
    )
    x = layers.ReLU(6.0)(
        layers.BatchNormalization(momentum=0.8)(
            layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="spatial")(x)
        )
    )
    x = layers.Conv2D(16, 1, name="mix")(x) + shortcut
    x = layers.Conv2D(32, 3, strides=2, activation="relu", name="reduce")(x)
    return keras.Model(image, layers.Dense(10, name="head")(layers.GlobalAveragePooling2D()(x)))


def fit(model: Any, x: np.ndarray, y: np.ndarray, epochs: int, rate: float) -> None:
    model.compile(keras.optimizers.Adam(rate), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)


def accuracy(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    return float((model.predict(x, verbose=0).argmax(1) == y).mean())


def main(folder: Path) -> dict[str, float | bool]:
    """Accuracies on images that training has not seen, and whether ONNX Runtime computed the simulated integers."""
    keras.utils.set_random_seed(0)
    x, y, test_x, test_y = digits()
    model = network()
    fit(model, x, y, epochs=8, rate=1e-2)
    found: dict[str, float | bool] = {"float": accuracy(model, test_x, test_y)}

    result = chipfit.quantize(model, x[:128], platform="ort_cpu", progress=False)
    result.model.summary()
    result.model.save(folder / "digits.keras")
    result.export(folder / "digits.onnx")
    found["8 bit"] = accuracy(result.model, test_x, test_y)
    found["exact"] = result.verify([(test_x, test_y)]).exact

    two = {"platform": "imx500", "overrides": {"*": {"bits": 2}}, "progress": False}
    found["2 bit weights"] = accuracy(chipfit.quantize(model, x[:128], **two).model, test_x, test_y)
    nearest = chipfit.quantize(model, x[:128], settings=chipfit.Settings(rounding="off"), **two)
    found["2 bits, nearest codes"] = accuracy(nearest.model, test_x, test_y)
    fit(nearest.model, x, y, epochs=3, rate=2e-3)
    found["2 bits, those trained"] = accuracy(nearest.trained().model, test_x, test_y)
    for name, value in found.items():
        print(f"{name:25} {value if isinstance(value, bool) else f'{100 * value:.1f} %'}")
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
