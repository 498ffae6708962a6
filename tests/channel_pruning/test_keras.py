"""Structured pruning of Keras models: the same search over the same graph, and a Keras model as result."""

import numpy as np
import pytest

import chipfit
from chipfit import Limits

keras = pytest.importorskip("keras")
layers = keras.layers


def residual():
    """Return a network with a sum, a depthwise convolution, batch norms and slopes."""
    keras.utils.set_random_seed(0)
    given = layers.Input((8, 8, 3))
    x = layers.Conv2D(8, 3, padding="same", name="stem")(given)
    x = layers.BatchNormalization(name="norm")(x)
    y = layers.Conv2D(10, 3, padding="same", activation="relu", name="widen")(x)
    y = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(y)
    y = layers.PReLU(shared_axes=[1, 2], name="slopes")(y)
    y = layers.Conv2D(8, 1, name="narrow")(y)
    x = layers.Conv2DTranspose(6, 2, strides=2, name="up")(layers.Add()([x, y]))
    return keras.Model(given, layers.Dense(4, name="head")(layers.GlobalAveragePooling2D()(x)))


def data() -> list[np.ndarray]:
    return list(np.random.default_rng(0).normal(size=(3, 8, 8, 8, 3)).astype("float32"))


def test_a_keras_model_shrinks_to_its_limit():
    model = residual()
    pruned = chipfit.prune(model, data(), progress=False, limits=Limits(bops="40%"))
    small = pruned.model
    assert type(small) is type(model) and small.count_params() < 0.6 * model.count_params()
    assert small.output_shape == model.output_shape and small.input_shape == model.input_shape
    count = int(pruned.masks["stem"].sum())
    assert small.get_layer("stem").filters == small.get_layer("narrow").filters == count
    assert small.get_layer("norm").gamma.shape == (count,) and small.get_layer("slopes").alpha.shape[-1] < 10


def test_without_repair_it_computes_what_the_whole_one_does_without_these_channels():
    model = residual()
    pruned = chipfit.prune(model, data(), progress=False, limits=Limits(weights="60%"), repair=False)
    masks = {name: mask.numpy() for name, mask in pruned.masks.items()}
    for reader, axis, producer in (("widen", 2, "stem"), ("narrow", 2, "widen"), ("up", 3, "stem"), ("head", 0, "up")):
        kernel, *bias = model.get_layer(reader).get_weights()
        kernel[(slice(None),) * axis + (~masks[producer],)] = 0
        model.get_layer(reader).set_weights([kernel, *bias])
    x = data()[0]
    want, got = (keras.ops.convert_to_numpy(m(x)) for m in (model, pruned.model))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_smaller_model_trains_and_is_quantized_as_usual():
    small = chipfit.prune(residual(), data(), progress=False, limits=Limits(bops="60%")).model
    small.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = keras.ops.convert_to_numpy(small.get_layer("norm").moving_mean)
    small.fit(data()[0], np.zeros(8), verbose=0)
    assert not np.allclose(before, keras.ops.convert_to_numpy(small.get_layer("norm").moving_mean))
    result = chipfit.quantize(small, data(), progress=False)
    assert result.verify(data()[:1]).exact


def test_a_file_of_the_smaller_model_loads_without_chipfit(tmp_path):
    pruned = chipfit.prune(residual(), data(), progress=False, limits=Limits(bops="60%"))
    loaded = keras.models.load_model(pruned.save(tmp_path / "small.keras"), compile=False)
    np.testing.assert_allclose(*(keras.ops.convert_to_numpy(m(data()[0])) for m in (loaded, pruned.model)), rtol=1e-5)
