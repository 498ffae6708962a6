"""A model is read as Keras runs it for inference: without randomness, in every float type, for any batch."""

import numpy as np
import pytest
import torch

keras = pytest.importorskip("keras")

from keras import layers, ops  # noqa: E402 -- after the import that may skip

import chipfit  # noqa: E402
from chipfit.engine.run import run  # noqa: E402
from chipfit.errors import CaptureError  # noqa: E402
from chipfit.frameworks.keras.backend import in_float32  # noqa: E402
from chipfit.frameworks.keras.capture import capture  # noqa: E402
from chipfit.graph.ir import OPAQUE  # noqa: E402

IMAGE = (12, 10, 3)
R = np.random.default_rng(0)


def model_of(f, shape=IMAGE, **given):
    x = keras.Input(shape, **given)
    return keras.Model(x, f(x))


def images(n, shape=IMAGE):
    return R.uniform(0, 255, (n, *shape)).astype("float32")


def agrees(graph, model, x):
    """Check that graph and model compute the same, twice."""
    for _ in range(2):
        (name,) = graph.outputs
        want = ops.convert_to_numpy(model(x, training=False))
        np.testing.assert_allclose(run(graph, [torch.from_numpy(x)])[name], want, rtol=1e-5, atol=2e-4)


class Noise(layers.Layer):
    """Random numbers in training, drawn by layers inside it too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds, self.flip = keras.random.SeedGenerator(1), layers.RandomFlip()

    def call(self, x, training=None):
        x = self.flip(x)
        return x + keras.random.normal(ops.shape(x)[1:], seed=self.seeds) if training else x


class AlwaysNoise(layers.Layer):
    """Random numbers in every call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x)[1:], seed=self.seeds)


class Wrapped(layers.Layer):
    """A layer around others, without an argument `training` of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = [layers.RandomRotation(0.3), layers.GaussianNoise(0.5), layers.SpatialDropout2D(0.5)]

    def call(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


class Untraceable(layers.Layer):
    """A layer that stays opaque, around one that is random in training."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.flip = layers.RandomFlip()

    def build(self, shape):
        self.flip.build(shape)

    def call(self, x):
        return self.flip(x) * (2.0 if isinstance(float(ops.max(x)), float) else 1.0)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


RANDOM = {
    **{name: getattr(layers, name)() for name in ("RandomFlip", "RandomGrayscale", "RandomErasing", "RandAugment")},
    **{name: getattr(layers, name)(0.3) for name in ("RandomRotation", "RandomZoom", "RandomContrast")},
    **{name: getattr(layers, name)(0.3) for name in ("RandomBrightness", "GaussianNoise", "GaussianDropout")},
    "RandomTranslation": layers.RandomTranslation(0.2, 0.2),
    "RandomHue": layers.RandomHue(0.3),
    "several": keras.Sequential([layers.RandomFlip("horizontal"), layers.RandomRotation(0.1)]),
    "own": Noise(),
    "wrapped": Wrapped(),
}


@pytest.mark.parametrize("layer", RANDOM.values(), ids=list(RANDOM))
def test_layers_that_are_random_in_training_are_not_there_in_inference(layer):
    model = model_of(lambda x: layers.Conv2D(4, 3)(layers.Rescaling(1 / 255)(layer(x))))
    graph = capture(model, (torch.from_numpy(images(2)),))
    assert {n.op for n in graph.nodes} <= {"Mul", "Add", "Transpose", "Conv2D", "Dropout"}
    agrees(graph, model, images(3))


def test_an_opaque_layer_runs_as_in_inference():
    model = model_of(lambda x: layers.Conv2D(4, 3)(Untraceable()(layers.Rescaling(1 / 255)(x))))
    graph = capture(model, (torch.from_numpy(images(2)),))
    assert OPAQUE in {n.op for n in graph.nodes}
    agrees(graph, model, images(3))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="a pure function draws the same numbers at each call")
def test_a_layer_that_is_random_in_inference_is_refused_by_name():
    model = model_of(lambda x: layers.ReLU()(AlwaysNoise(name="hiss")(layers.Conv2D(4, 3)(x))))
    with pytest.raises(CaptureError, match=r"Layer 'hiss' \(AlwaysNoise\) returns other numbers.*training"):
        capture(model, (torch.from_numpy(images(2)),))


def test_a_layer_that_computes_something_else_when_traced_is_refused_by_name():
    class Sly(layers.Layer):
        def call(self, x):
            return x * (1.0 if isinstance(x, keras.KerasTensor) else 2.0)

    model = model_of(lambda x: layers.ReLU()(Sly(name="sly")(layers.Conv2D(4, 3)(x))))
    with pytest.raises(CaptureError, match=r"Layer 'sly' \(Sly\) computes something else when it is called") as e:
        capture(model, (torch.from_numpy(images(2)),))
    assert "report" not in str(e.value)


def test_dropout_that_is_always_on_is_read_as_predict_calls_it_with_a_warning():
    model = model_of(lambda x: layers.Dropout(0.5, name="always")(layers.Flatten()(x), training=True))
    graph = capture(model, (torch.from_numpy(images(2)),))
    assert [n for n in graph.notes if n.startswith("warning") and "'always'" in n and "training=True" in n]
    agrees(graph, model, images(2))


def test_a_random_crop_leaves_images_whole_in_inference_and_so_does_the_graph():
    model = model_of(lambda x: layers.MaxPooling2D()(layers.RandomCrop(6, 6)(x)))
    graph = capture(model, (torch.from_numpy(images(2)),))
    assert graph.shape(graph.outputs[0]) == (None, 6, 5, 3) and not graph.notes
    agrees(graph, model, images(3))


# ---------------------------------------------------------------- float types


def series(n):
    return R.normal(size=(n, 12, 4)).astype("float32")


def classifier():
    x = layers.Conv1D(8, 3, activation="relu")
    return model_of(lambda i: layers.Dense(3)(layers.Flatten()(x(i))), (12, 4))


def quantized_like(model, data, given, reference, tolerance=0.05):
    """Check that the data calibrate, and that both models of the result take such arrays, of the data's range."""
    result = chipfit.quantize(model, data, "tflite_int8", progress=False)
    for made in (result.model, result.device_model):
        y = ops.convert_to_numpy(ops.cast(made(given), "float32"))
        assert np.abs(y - reference).max() <= tolerance * np.abs(reference).max()
    return result


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_arrays_of_other_float_types_are_data(dtype):
    model, x = classifier(), series(32)
    result = quantized_like(model, x.astype(dtype), x[:4].astype(dtype), model.predict(x[:4], verbose=0))
    assert {v.dtype for v in result.graph.values.values()} == {"float32"}


def test_tensors_of_bfloat16_are_data():
    model, x = classifier(), series(32)
    quantized_like(model, [torch.from_numpy(x).bfloat16()], x[:4], model.predict(x[:4], verbose=0))


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a dataset of TensorFlow")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dataset_of_another_float_type_is_data(dtype):
    import tensorflow as tf

    model, x = classifier(), series(32)
    data = tf.data.Dataset.from_tensor_slices((tf.cast(x, dtype), np.zeros(32))).batch(8)
    quantized_like(model, data, tf.cast(x[:4], dtype), model.predict(x[:4], verbose=0))


HAS_FLOAT64 = pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX computes float64 in float32")


class Plain(keras.Model):
    """A model with a `call`, whose class has no configuration of its weights."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv, self.flat, self.head = layers.Conv1D(8, 3), layers.Flatten(), layers.Dense(3)

    def call(self, x):
        return self.head(self.flat(self.conv(x)))


@pytest.mark.parametrize("make", [classifier, Plain])
@pytest.mark.parametrize(
    "policy, floatx",
    [("mixed_float16", "float32"), ("float16", "float16"), pytest.param("float64", "float64", marks=HAS_FLOAT64)],
)
def test_a_program_of_another_policy_quantizes_its_models(policy, floatx, make):
    with in_float32():  # restores both
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)
        keras.utils.set_random_seed(1)
        model, x = make(), series(32).astype(floatx)
        reference = ops.convert_to_numpy(ops.cast(model(x[:4]), "float32"))
        result = quantized_like(model, x, x[:4], reference)
        assert [n for n in result.plan.rewrites if n.startswith("warning: the model computes in float")]
        assert keras.config.dtype_policy().name == policy


#: operations between layers that compute in float64: with an array on TensorFlow, in a cast and an input everywhere
IN_FLOAT64 = {
    "array": (lambda x: (x - np.array([0.4, 0.5, 0.6, 0.7])) / np.array([0.2, 0.2, 0.3, 0.1]), "float32"),
    "cast": (lambda x: ops.cast(x, "float64") * 2, "float32"),
    "input": (lambda x: x, "float64"),
}


@HAS_FLOAT64
@pytest.mark.parametrize("case", IN_FLOAT64)
def test_what_a_model_computes_in_float64_is_read_in_float32(case):
    """Layers cast to float32, so such a model runs; its graph must not hand float64 to a convolution."""
    between, dtype = IN_FLOAT64[case]
    x, inputs = series(32), keras.Input((12, 4), dtype=dtype)
    model = keras.Model(inputs, between(layers.Conv1D(4, 3)(between(inputs))))
    reference = ops.convert_to_numpy(ops.cast(model(x[:4]), "float32"))
    result = quantized_like(model, x, x[:4], reference)
    assert {v.dtype for v in result.graph.values.values()} == {"float32"}
    assert result.verify(x[:4]).exact


# ---------------------------------------------------------------- a fixed batch


def test_a_fixed_batch_is_open_where_samples_do_not_depend_on_each_other():
    head = [layers.MaxPooling2D(), layers.Flatten(), layers.Dense(5)]
    model = model_of(lambda x: keras.Sequential(head)(layers.Conv2D(8, 3)(x)), batch_size=4)
    graph = capture(model, (torch.from_numpy(images(4)),))
    assert graph.inputs == [model.inputs[0]._keras_history.operation.name]
    assert graph.shape(graph.inputs[0]) == (None, *IMAGE) and graph.shape(graph.outputs[0]) == (None, 5)
    x = images(4)
    (alone,) = run(graph, [torch.from_numpy(x[:1])]).values()
    np.testing.assert_allclose(alone, model.predict(x, batch_size=4, verbose=0)[:1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x - ops.mean(x, axis=0, keepdims=True),
        lambda x: x + np.ones((4, 1, 1, 1), "float32") * np.arange(4, dtype="float32").reshape(4, 1, 1, 1),
        lambda x: ops.reshape(ops.reshape(x, (2, -1)), (4, *IMAGE)),
    ],
)
def test_a_batch_that_the_network_depends_on_stays_fixed(mixed):
    model = model_of(lambda x: layers.Dense(3)(layers.Flatten()(mixed(x))), batch_size=4)
    graph = capture(model, (torch.from_numpy(images(4)),))
    assert graph.shape(graph.inputs[0]) == (4, *IMAGE)
    agrees(graph, model, images(4))


def test_a_model_of_a_fixed_batch_is_quantized_and_written_for_any_batch(tmp_path):
    pytest.importorskip("ai_edge_litert")
    from ai_edge_litert.interpreter import Interpreter

    model = model_of(lambda x: layers.Dense(5)(layers.Flatten()(layers.Conv2D(4, 3)(x))), batch_size=4)
    result = chipfit.quantize(model, [images(4) for _ in range(4)], "tflite_int8", progress=False)
    for batch in (1, 4):
        (given,) = Interpreter(str(result.export(tmp_path / f"{batch}.tflite", batch=batch))).get_input_details()
        assert given["shape"].tolist() == [batch, *IMAGE]
    assert result.verify([images(4)]).exact
