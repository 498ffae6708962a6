"""The facade for Keras models: every option works on them as it does on PyTorch ones."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit import target_platform as tp  # noqa: E402
from chipfit.core import CoreConfig, DebugConfig, QuantizationConfig  # noqa: E402
from chipfit.core.network_editor import (  # noqa: E402  # noqa: E402
    ChangeFinalWeightsQuantConfigAttr,
    EditRule,
    NodeNameFilter,
    NodeTypeFilter,
    ReplaceLayer,
)
from chipfit.engine.run import run  # noqa: E402
from chipfit.errors import ConfigError, PlanError, UnknownNameError, UnsupportedError  # noqa: E402
from tests.mct.target_platform.chips import FLOAT, config, options  # noqa: E402
from tests.mct.target_platform.chips import model as chip_model  # noqa: E402

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


def test_layers_of_keras_models_are_replaced(net):
    model, images = net

    def doubled(weights, **settings):
        return {name: 2 * w for name, w in weights.items()}, settings

    rules = [EditRule(NodeNameFilter("head"), ReplaceLayer(layers.Dense, doubled))]
    rules += [
        EditRule(
            NodeTypeFilter(layers.Softmax), ReplaceLayer(layers.Identity, lambda w, name, **_: ({}, {"name": name}))
        )
    ]
    quantized, _ = fit(net, debug_config=DebugConfig(network_editor=rules))
    scores = keras.Model(model.input, model.get_layer("head").output)
    got, want = numbers(quantized(images)), 2 * numbers(scores(images))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()
    assert numbers(model(images)).sum(1) == pytest.approx(1, abs=1e-5)  # the model itself is as it was


class Scaled(layers.Layer):
    """A layer of a user, with a variable."""

    def __init__(self, start, **kwargs):
        super().__init__(**kwargs)
        self.start = start

    def build(self, shape):
        self.factor = self.add_weight(name="factor", initializer=keras.initializers.Constant(self.start))

    def call(self, x):
        return x * self.factor

    def get_config(self):
        return {**super().get_config(), "start": self.start}


def test_layers_of_a_users_class_that_replace_others_are_layers_of_the_quantized_model(net):
    model, images = net
    rules = [
        EditRule(NodeTypeFilter(layers.Softmax), ReplaceLayer(Scaled, lambda w, **_: ({}, {"start": 3.0, "name": "s"})))
    ]
    quantized, _ = fit(net, debug_config=DebugConfig(network_editor=rules))
    (own,) = (layer for layer in quantized.layers if isinstance(layer, Scaled))
    assert own.start == 3.0
    scores = keras.Model(model.input, model.get_layer("head").output)
    got, want = numbers(quantized(images)), 3 * numbers(scores(images))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_layers_of_a_users_class_that_a_chip_does_not_quantize_stay_whole():
    keras.utils.set_random_seed(0)
    given = keras.Input((6, 6, 3))
    x = Scaled(2.0, name="once")(layers.Conv2D(4, 1)(given))
    model = keras.Model(given, layers.Conv2D(2, 1)(Scaled(1.0, name="again")(x)))
    in_float = options(config(kernel=FLOAT, enable_activation_quantization=False))
    tpc = tp.TargetPlatformCapabilities(chip_model(tp.OperatorsSet("Own", in_float)))
    with tpc:
        tp.OperationsSetToLayers("Own", [tp.LayerFilterParams(Scaled, start=2.0)])
    images = np.random.default_rng(0).standard_normal((16, 6, 6, 3)).astype(np.float32)
    quantized, info = chipfit.keras_post_training_quantization(
        model, lambda: iter([[images]]), target_platform_capabilities=tpc
    )
    assert [layer.start for layer in quantized.layers if isinstance(layer, Scaled)] == [2.0]
    assert ("again", "Mul") in {(n.layer, n.op) for n in info.result.graph.nodes}  # the filter is not about it
    assert np.abs(numbers(quantized(images)) - numbers(model(images))).mean() < 0.03


@pytest.mark.parametrize(
    ("name", "new", "error", "message"),
    [
        ("heda", (layers.Dense, lambda w, **a: (w, a)), UnknownNameError, "'head'"),
        ("head", (layers.Conv2D, lambda w, **a: (w, a)), ConfigError, "'head' cannot become a Conv2D"),
        ("head", (layers.Dense, lambda w, **a: ({"other": 1}, a)), ConfigError, "'head' cannot become a Dense"),
        ("head", (layers.Dense, lambda w, **a: ({"kernel": np.ones((1, 2))}, a)), ConfigError, "'head' cannot become"),
    ],
)
def test_a_layer_that_cannot_be_replaced_is_named(net, name, new, error, message):
    rules = [EditRule(NodeNameFilter(name), ReplaceLayer(*new))]
    with pytest.raises(error, match=message):
        fit(net, debug_config=DebugConfig(network_editor=rules))


def test_only_models_whose_calls_are_known_have_layers_replaced(net):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = layers.Dense(2, name="head")

        def call(self, x):
            return self.head(x)

    model, rules = Own(), [EditRule(NodeNameFilter("head"), ReplaceLayer(layers.Dense, lambda w, **a: (w, a)))]
    model(np.ones((1, 3), "float32"))
    with pytest.raises(UnsupportedError, match="Functional and Sequential"):
        fit((model, np.ones((1, 3), "float32")), debug_config=DebugConfig(network_editor=rules))


def test_a_trainable_model_is_saved_as_hdf5_and_read_back(net, tmp_path):
    model, images = net
    made, _, _ = chipfit.qat.keras_quantization_aware_training_init(model, lambda: iter([[images]]))
    made.save(tmp_path / "m.h5")
    loaded = chipfit.keras_load_quantized_model(tmp_path / "m.h5")
    np.testing.assert_array_equal(numbers(loaded(images)), numbers(made(images)))


def test_a_network_of_which_the_chip_quantizes_nothing_is_exported_in_float(net, tmp_path):
    model, images = net
    with pytest.warns(UserWarning, match="its file is a float model"):
        chipfit.exporter.keras_export_model(model, tmp_path / "m.keras")
    loaded = chipfit.keras_load_quantized_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(numbers(loaded(images)), numbers(model(images)))


@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_a_trained_model_from_a_file_is_finalized_and_exported_without_information(net, tmp_path, suffix):
    images = net[1]
    model, information, _ = chipfit.keras_quantization_aware_training_init(
        net[0], lambda: iter([[images]]), target_platform_capabilities="tflite_int8"
    )
    kernel = model.get_layer("head").layer.kernel
    kernel.assign(kernel * 0.5)  # a training step
    want = chipfit.keras_quantization_aware_training_finalize(model, information)
    model.save(tmp_path / f"trainable{suffix}")
    loaded = chipfit.keras_load_quantized_model(tmp_path / f"trainable{suffix}")
    final = chipfit.keras_quantization_aware_training_finalize(loaded)
    np.testing.assert_array_equal(numbers(final(images)), numbers(want(images)))
    final.save(tmp_path / f"final{suffix}")
    again = chipfit.keras_load_quantized_model(tmp_path / f"final{suffix}")
    form = {"serialization_format": chipfit.exporter.KerasExportSerializationFormat.TFLITE}
    form |= {"quantization_format": chipfit.exporter.QuantizationFormat.INT8}
    for name, exported in (("want", want), ("again", again)):
        chipfit.exporter.keras_export_model(exported, tmp_path / f"{name}.tflite", **form)
    assert (tmp_path / "again.tflite").read_bytes() == (tmp_path / "want.tflite").read_bytes()


def test_an_exported_file_is_read_back_under_any_suffix(net, tmp_path):
    model, images = fit(net)[0], net[1]
    form = chipfit.exporter.QuantizationFormat.FAKELY_QUANT
    chipfit.exporter.keras_export_model(model, tmp_path / "m.h5", quantization_format=form)
    loaded = chipfit.keras_load_quantized_model(tmp_path / "m.h5")
    np.testing.assert_allclose(numbers(loaded(images)), numbers(model(images)), atol=1e-5)


def test_a_loaded_model_that_was_trained_since_is_not_exported_before_it_is_finalized(net, tmp_path):
    fit(net)[0].save(tmp_path / "m.keras")
    loaded = chipfit.keras_load_quantized_model(tmp_path / "m.keras")
    kernel = loaded.get_layer("head").layer.kernel
    kernel.assign(kernel * 0.5)
    with pytest.raises(PlanError, match="has changed since it was made"):
        chipfit.exporter.keras_export_model(loaded, tmp_path / "m.tflite")
