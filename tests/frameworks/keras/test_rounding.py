"""Closed-form rounding of a Keras model, exact on the device."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("ai_edge_litert")

import chipfit  # noqa: E402 -- after the imports that may skip


def test_a_keras_model_loses_less_in_4_bits_and_runs_as_simulated():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((12, 12, 3)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.DepthwiseConv2D(3, activation="relu"),
            layers.Conv2DTranspose(8, 3, strides=2, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    draw = np.random.default_rng(0)
    data = [draw.normal(size=(32, 12, 12, 3)).astype("float32") for _ in range(8)]
    new = draw.normal(size=(64, 12, 12, 3)).astype("float32")
    want = keras.ops.convert_to_numpy(model(new))
    four = dict.fromkeys(("Conv2D", "DepthwiseConv2D", "Linear"), {"bits": 4})  # noqa: RUF024 -- read only

    def error(settings: chipfit.Settings) -> tuple[float, chipfit.Result]:
        result = chipfit.quantize(model, data, "tflite_int8", overrides=four, settings=settings, progress=False)
        got = keras.ops.convert_to_numpy(result.model(new))
        return float(np.square(got - want).mean()), result

    plain, (best, result) = error(chipfit.Settings(rounding="off", repairs="off"))[0], error(chipfit.BEST)
    assert best < 0.1 * plain
    assert result.verify([new[:16]]).exact
    assert sum(name.endswith("kernel") for name in result.sensitivity(data).losses) == 4


def test_ranges_by_weighed_errors_keep_the_outputs_of_a_keras_layer():
    """Weights are large where inputs are small, so that squared errors alone serve those that hardly count."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((48,)), keras.layers.Dense(6)])
    size = np.logspace(-1.5, 1, 48).astype("float32")
    kernel, bias = model.get_weights()
    model.set_weights([kernel / size[:, None], bias])
    draw = np.random.default_rng(0)
    data = [draw.normal(size=(32, 48)).astype("float32") * size for _ in range(8)]
    new = draw.normal(size=(256, 48)).astype("float32") * size
    wide = {"*": {"bits": 4, "activation_bits": 16}}

    def lost(rule):
        options = {"overrides": wide, "settings": chipfit.Settings(rounding="off"), "weight_rule": rule}
        result = chipfit.quantize(model, data, "mqbench_academic", **options, progress=False)
        got, want = (keras.ops.convert_to_numpy(m(new)) for m in (result.model, model))
        return float(np.square(got - want).mean())

    assert lost("hmse") < 0.8 * lost("mse")
