"""The facade for Keras models: every option works on them as it does on PyTorch ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.core import CoreConfig, DebugConfig, QuantizationConfig  # noqa: E402
from chipfit.core.network_editor import (  # noqa: E402  # noqa: E402
    ChangeFinalWeightsQuantConfigAttr,
    EditRule,
    NodeNameFilter,
    NodeTypeFilter,
    ReplaceLayer,
)
from chipfit.engine.run import run  # noqa: E402
from chipfit.errors import UnsupportedError  # noqa: E402

REWRITES = {
    "linear_collapsing": True,
    "residual_collapsing": True,
    "relu_bound_to_power_of_2": True,
    "activation_channel_equalization": True,
    "shift_negative_activation_correction": True,
    "shift_negative_ratio": 0.5,
    "softmax_shift": True,
    "concat_threshold_update": True,
}
CORRECTIONS = {
    "weights_bias_correction": True,
    "weights_second_moment_correction": True,
    "activation_bias_correction": True,
}


@pytest.fixture(scope="module")
def net():
    keras.backend.clear_session()  # layers are named from the start again
    keras.utils.set_random_seed(0)
    given = keras.Input((10, 10, 3))
    x = layers.Conv2D(8, 1, use_bias=False)(layers.Conv2D(8, 3, padding="same", use_bias=False)(given))
    x = layers.Activation("swish")(layers.Add()([layers.Conv2D(8, 3, padding="same")(x), x]))
    x = layers.ReLU(6.0)(layers.Conv2D(6, 1)(x))
    x = layers.ReLU()(layers.Conv2D(6, 3, padding="same", name="wide")(x))
    x = layers.Concatenate()([layers.Conv2D(4, 1)(x), layers.Conv2D(4, 1)(x)])
    x = layers.Softmax()(layers.Dense(5, name="head")(layers.GlobalAveragePooling2D()(x)))
    return keras.Model(given, x), np.random.default_rng(0).standard_normal((16, 10, 10, 3)).astype(np.float32)


def fit(net, **config):
    model, images = net
    return chipfit.keras_post_training_quantization(model, lambda: iter([[images]]), core_config=CoreConfig(**config))


def numbers(x):
    return keras.ops.convert_to_numpy(x)


def test_every_rewrite_and_correction_works_on_a_keras_model(net):
    model, images = net
    want = numbers(model(images))
    quantized, info = fit(net, quantization_config=QuantizationConfig(**REWRITES, **CORRECTIONS))
    assert isinstance(quantized, keras.Model) and np.abs(numbers(quantized(images)) - want).mean() < 5e-3
    said = " ".join(info.result.plan.rewrites)
    notes = "collapsed 'conv2d'", "residual addition", "moved from 6 to 8", "shifted 'activation'"
    assert all(what in said for what in (*notes, "second moment of 'head'"))
    _, info = fit(net, quantization_config=QuantizationConfig(**REWRITES, weights_bias_correction=False))
    (out,) = run(info.result.graph, [torch.from_numpy(images)]).values()
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-6)


def test_rules_choose_keras_layers_by_type_and_by_name(net):
    rules = [
        EditRule(NodeTypeFilter(layers.Conv2D), ChangeFinalWeightsQuantConfigAttr(weights_n_bits=4)),
        EditRule(NodeNameFilter("wide"), ChangeFinalWeightsQuantConfigAttr(weights_n_bits=2)),
    ]
    _, info = fit(net, debug_config=DebugConfig(network_editor=rules))
    bits = {t.layer: t.grid.bits for t in info.result.plan.tensors.values() if t.role == "weight" and t.quantized}
    assert bits["wide"] == 2 and bits["head"] == 8 and {v for k, v in bits.items() if k.startswith("conv2d")} == {4}
    rules = [EditRule(NodeNameFilter("head"), ReplaceLayer(layers.Dense, lambda w, **a: (w, a)))]
    with pytest.raises(UnsupportedError, match="PyTorch"):
        fit(net, debug_config=DebugConfig(network_editor=rules))
