"""Layers that prepare inputs, and other layers of a Keras model that need several operators, in exact files."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter, OpResolverType  # noqa: E402 -- after the import that may skip
from keras import layers, ops  # noqa: E402

import chipfit  # noqa: E402
from chipfit.errors import UnsupportedError  # noqa: E402

IMAGE = (12, 10, 3)


def quantized(f, shape, platform, dtype="float32"):
    """A result for a model of random weights, and data of these layers' kind."""
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, dtype=dtype)
    rng = np.random.default_rng(0)
    data = rng.normal(size=(48, *shape)) if "float" in dtype else rng.integers(0, 5, (48, *shape))
    model, data = keras.Model(x, f(x)), data.astype(dtype)
    return chipfit.quantize(model, data, platform, progress=False), model, data


def check(result, model, data, floor):
    """Check that the file computes what the simulation does, within `floor` dB of the model."""
    got, want = (ops.convert_to_numpy(m(data)).astype("float64") for m in (result.model, model))
    assert 10 * np.log10((want**2).sum() / ((want - got) ** 2).sum()) > floor
    assert result.verify(data).exact


def kinds(path):
    """The operators of a .tflite file."""
    interpreter = Interpreter(str(path), experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
    interpreter.allocate_tensors()
    return {d["op_name"] for d in interpreter._get_ops_details()}


def conv(x):
    return layers.Conv2D(8, 3)(x)


#: layers -> operators of an integer file with them
INTEGER = {
    "RepeatVector": (
        lambda x: layers.Conv1D(4, 3)(layers.RepeatVector(6)(layers.GlobalMaxPooling1D()(layers.Conv1D(8, 3)(x)))),
        (12, 4),
        "TILE",
    ),
    "repeat": (lambda x: ops.repeat(layers.Conv1D(4, 3)(x), 3, axis=1), (12, 4), "TILE"),
    "repeat each its times": (
        lambda x: ops.repeat(layers.Conv1D(3, 3)(x), np.array([2, 0, 1]), axis=2),
        (12, 4),
        "GATHER",
    ),
    "ReLU": (lambda x: conv(layers.ReLU(max_value=1.0, negative_slope=0.1)(conv(x))), IMAGE, "LEAKY_RELU MINIMUM"),
    "nearest": (lambda x: layers.Resizing(20, 7, "nearest")(conv(x)), IMAGE, "RESIZE_NEAREST_NEIGHBOR"),
    "bilinear": (lambda x: conv(layers.Resizing(20, 7)(x)), IMAGE, "RESIZE_BILINEAR"),
    "crop": (lambda x: conv(layers.Resizing(8, 8, crop_to_aspect_ratio=True)(x)), IMAGE, "STRIDED_SLICE"),
    "pad": (lambda x: conv(layers.Resizing(24, 24, pad_to_aspect_ratio=True)(x)), IMAGE, "PAD RESIZE_BILINEAR"),
    "CenterCrop": (lambda x: conv(layers.CenterCrop(8, 6)(x)), IMAGE, "STRIDED_SLICE"),
    "CenterCrop of small images": (lambda x: conv(layers.CenterCrop(16, 16)(x)), IMAGE, "RESIZE_BILINEAR"),
}


@pytest.mark.parametrize("f, shape, operators", INTEGER.values(), ids=list(INTEGER))
def test_layers_without_an_operator_of_their_own_are_integer_operators(f, shape, operators, tmp_path):
    result, model, data = quantized(f, shape, "tflite_int8")
    check(result, model, data, 24)
    inside = kinds(result.export(tmp_path / "model.tflite", io="int8", batch=1))
    assert set(operators.split()) <= inside and not {"QUANTIZE", "DEQUANTIZE"} & inside


CATEGORIES = {
    "one_hot": (lambda x: layers.Flatten()(layers.CategoryEncoding(5, "one_hot")(x)), "int32"),
    "multi_hot": (lambda x: layers.CategoryEncoding(5, "multi_hot")(x), "int32"),
    "count": (lambda x: layers.CategoryEncoding(5, "count")(x), "int32"),
    "bins": (lambda x: layers.Flatten()(layers.Discretization([-1.0, 0.2, 1.0], output_mode="one_hot")(x)), "float32"),
    "rows of bins": (
        lambda x: layers.Flatten()(layers.Embedding(4, 3)(layers.Discretization([-1.0, 0.2, 1.0])(x))),
        "float32",
    ),
}


@pytest.mark.parametrize("platform", ["tflite_int8", "ort_cpu"])
@pytest.mark.parametrize("f, dtype", CATEGORIES.values(), ids=list(CATEGORIES))
def test_categories_and_bins_are_computed_in_the_file(f, dtype, platform):
    check(*quantized(lambda x: layers.Dense(3)(f(x)), (6,), platform, dtype), floor=15)


@pytest.mark.parametrize("name", ["nearest", "crop", "ReLU", "RepeatVector"])
def test_an_onnx_file_has_these_layers_too(name):
    f, shape, _ = INTEGER[name]
    check(*quantized(f, shape, "ort_cpu"), floor=24)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Resizing(6, 7, antialias=True),
        lambda: layers.Resizing(16, 9, interpolation="bicubic"),
        lambda: layers.UpSampling2D((2, 1), interpolation="bicubic"),
    ],
)
def test_other_interpolations_are_products_with_matrices(layer, tmp_path):
    result, model, data = quantized(lambda x: conv(layer()(x)), IMAGE, "tflite_int8")
    check(result, model, data, 24)
    assert "FULLY_CONNECTED" in kinds(result.export(tmp_path / "model.tflite", io="int8", batch=1))


def test_a_layer_without_a_form_in_the_file_is_refused_by_its_class_and_name(tmp_path):
    layer = layers.Resizing(6, 6, antialias=True, crop_to_aspect_ratio=True, name="smaller")
    result, _, _ = quantized(lambda x: conv(layer(x)), IMAGE, "tflite_int8")
    with pytest.raises(UnsupportedError, match="Resizing 'smaller'") as refusal:
        result.export(tmp_path / "model.tflite")
    assert "{" not in str(refusal.value)
