"""An operator is added by one row and one file, outside the package: in every framework, file format and simulation."""

import importlib

import pytest
import torch
from torch import nn

from chipfit.operators.table import add_operators
from chipfit.simulate.requantize import fixed_point
from tests.build import images, keras_sequential, model_of, platform_file, quantized
from tests.conftest import OPERATOR_TABLES

#: TensorFlow Lite and ONNX compute x * x, in integers by their kernels of a product
PLATFORMS = {
    "litert": "extends: tflite_int8\nops: [{match: [Square], use: [{in: a8, out: a8}], src: [C1], conf: V}]\n",
    "onnxruntime": "extends: ort_cpu\nops: [{match: [Square], use: [{in: u8, out: u8}], src: [O1], conf: V}]\n",
}


def write_tflite(w, n, y):
    w.op("MUL", [w.read(n.data)] * 2, y, fusedActivationFunction=w.fused)


def square(c):
    c.write_result(fixed_point(c.centred() ** 2, c.multiplier(c.x, c.x), "away"))


def square_in_float(c):
    c.write_result(torch.round((c.centred() ** 2).float() * c.multiplier(c.x, c.x)).double())


SQUARE = {
    "facts": "element",
    "torch": "square",
    "keras": "Square",
    "kernel": "torch:square",
    "lowering": "square",
    "onnx": {"write": lambda w, n, x: w.op("Mul", [x[0], x[0]])},
    "tflite": {"name": "MUL", "write": write_tflite, "facts": "integer"},
    "litert": {"name": square, "xnnpack": square_in_float},
    "onnxruntime": square_in_float,
}


keras = pytest.importorskip("keras")
for module in OPERATOR_TABLES:  # of tables that are filled before the test the fixture restores every entry
    importlib.import_module(f"chipfit.{module}")


@pytest.fixture
def chip(request, tmp_path, drop_ins):
    add_operators({"Square": SQUARE})
    return platform_file(tmp_path, "name: chip\n" + PLATFORMS[request.param])


def exported(model, data, chip, path):
    result = quantized(model, data, chip)
    decided = result.plan.nodes
    assert [decided[n.name].exec for n in result.graph.nodes if n.op == "Square"] == ["int"]
    result.export(path)
    check = result.verify(data)
    assert check.exact and "Square" not in check.float_ops
    return result


@pytest.mark.parametrize("chip, file", [("litert", "m.tflite"), ("onnxruntime", "m.onnx")], indirect=["chip"])
def test_an_operator_of_torch_is_one_row(chip, file, tmp_path):
    model = model_of(lambda m, x: m.conv(x).square(), conv=nn.Conv2d(3, 4, 3))
    result = exported(model, images(), chip, tmp_path / file)
    assert result.model(images()).grad_fn is not None


@pytest.mark.parametrize("chip", ["litert"], indirect=True)
def test_an_operator_of_keras_is_one_row(chip, tmp_path):
    model = keras_sequential((8, 8, 3), keras.layers.Conv2D(4, 3), keras.layers.Lambda(keras.ops.square))
    result = exported(model, images().movedim(1, -1), chip, tmp_path / "m.tflite")
    assert result.model(images().movedim(1, -1)).shape == (8, 6, 6, 4)
