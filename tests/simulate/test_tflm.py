"""TensorFlow Lite Micro's kernels: every code of an operator, with scales at random and at powers of two."""

import math
import random
from functools import partial

import pytest
import torch

from tests.simulate.one_operator import Codes, drawn, every, one, pairs

pytest.importorskip("tflite_micro")
A, B = (x.reshape(1, -1) for x in pairs())
ROW = every(8, 1, 256)
#: operator -> scale and zero point of its results, attributes; None: some scale
ROWS = {
    "Sigmoid": (1 / 256, -128, {}),
    "Tanh": (1 / 128, 0, {}),
    "HardSwish": (None, None, {}),
    "Relu": (None, None, {}),
    "Elu": (None, None, {"alpha": 1.0}),
    "LeakyRelu": (None, None, {"negative_slope": -0.37}),
    "Abs": (None, None, {}),
    "Requantize": (None, None, {}),
    "Softmax": (1 / 256, -128, {"axis": -1}),
    "LogSoftmax": (1 / 16, 127, {"axis": -1}),
    "L2Norm": (1 / 128, 0, {"axis": -1}),
}


def scale(draw: random.Random, k: int, low: float, high: float) -> float:
    """Return a scale in 2^low .. 2^high, each fourth time a power of two."""
    e = draw.uniform(low, high)
    return 2.0 ** (round(e) if k % 4 == 0 else e)


@pytest.mark.parametrize("op", ROWS)
def test_every_code_of_a_function(tmp_path, op):
    draw = random.Random(op)
    to, zero, attrs = ROWS[op]
    for k in range(4):
        s = scale(draw, k, -9, 2)
        result = to or s * draw.uniform(0.3, 3)
        x = ROW.reshape(16, 16) if op.endswith("max") else ROW
        y = Codes(ROW, result, draw.randint(-128, 127) if zero is None else zero)
        one(op, [Codes(x, s, draw.randint(-128, 127))], y, attrs).prove(tmp_path, runtimes=["tflm"])


@pytest.mark.parametrize("to", [0.05, 0.02])
def test_relu6_is_written_in_the_operands_integers_whatever_the_results_scale(tmp_path, to):
    one("Relu6", [Codes(ROW, 0.05, -20)], Codes(ROW, to, -128)).prove(tmp_path, runtimes=["tflm"])


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_every_pair_of_codes(tmp_path, op):
    draw = random.Random(op)
    for k in range(4):
        a, b = scale(draw, k, -8, 0), scale(draw, k, -8, 0)
        y = a * b * 150 if op == "Mul" else 2 * max(a, b)
        one(op, [Codes(A, a, 3), Codes(B, b, -7)], Codes(A, y, 5)).prove(tmp_path, runtimes=["tflm"])


@pytest.mark.parametrize("channels", [False, True])
def test_linear_layers_multiply_in_fixed_point(tmp_path, channels):
    draw = random.Random(0)
    for k in range(4):
        w = [scale(draw, 1, -9, -5) for _ in range(64)] if channels else scale(draw, k, -9, -5)
        x = Codes(drawn(k, 512, 40), scale(draw, k, -8, 0), 9)
        b = scale_of_bias(x.scale, w)
        operands = [x, Codes(drawn(k + 50, 64, 40), w), Codes(torch.arange(64) * 100, b, bits=32)]
        one("Linear", operands, Codes(ROW, x.scale * 2, -5)).prove(tmp_path, runtimes=["tflm"])


def scale_of_bias(x: float, w: float | list[float]) -> float | list[float]:
    return [x * v for v in w] if isinstance(w, list) else x * w


def test_every_code_of_a_slope_for_each_channel(tmp_path):
    slopes = Codes(drawn(7, 256), 0.0123, 11)
    for k in range(4):
        s = scale(random.Random(k), k, -8, 0)
        one("PRelu", [Codes(ROW, s, -5), slopes], Codes(ROW, s * math.e / 3, 7)).prove(tmp_path, runtimes=["tflm"])


WIDE = {
    "Sigmoid": (2.0**-15, {}),
    "Tanh": (2.0**-15, {}),
    "Softmax": (2.0**-15, {"axis": -1}),
    "Relu": (None, {}),
    "LeakyRelu": (None, {"negative_slope": 0.3}),
    "Requantize": (None, {}),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("op", WIDE)
def test_codes_of_16_bits(tmp_path, op):
    draw = random.Random(op)
    to, attrs = WIDE[op]
    for k in range(3):
        s = scale(draw, k, -15, -9)
        y = Codes(ROW, to or s * 1.3, 0, 16)
        x = Codes(drawn(k, 300, 40, bits=16), s, 0, 16)
        one(op, [x], y, attrs).prove(tmp_path, "tflite_int16x8", ["tflm"])


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul"])
def test_pairs_of_16_bits(tmp_path, op):
    of = partial(Codes, zero=0, bits=16)
    a, b = drawn(1, 1, 60000, bits=16), drawn(2, 1, 60000, bits=16)
    for s, t in ((2e-4, 3e-4), (2.0**-12, 2.0**-14)):
        y = s * t * 30000 if op == "Mul" else 2 * t
        one(op, [of(a, s), of(b, t)], of(a, y)).prove(tmp_path, "tflite_int16x8", ["tflm"])
