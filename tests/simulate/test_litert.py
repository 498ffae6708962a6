"""LiteRT's kernels, one operator with numbers chosen by hand: ties, both sides of bounds, shapes that tell axes."""

from __future__ import annotations

import pytest
import torch

from chipfit.simulate.litert import (
    _stretch,
)
from tests.simulate.one_operator import LITERT, Codes, drawn, every, one, pairs

A, B = pairs()
#: two kernels that saturate where optimised ones wrap around
SATURATING = ("litert_reference", "litert")
ONE = 0.1  #: scale of results


# ---------------------------------------------------------------- sums, products, slopes, other scales

TIES = [(0.05, 0.07), (0.07, 0.05), (0.5, 0.75), (0.03, 0.05)]  #: over 0.1 or 1: sums half way between two codes


@pytest.mark.parametrize("op", ["Add", "Sub"])
@pytest.mark.parametrize("scales", TIES)
def test_every_pair_of_codes_is_added_as_the_kernels_add(tmp_path, op, scales):
    result = 1.0 if max(scales) > 0.5 else ONE
    one(op, [Codes(A, scales[0], 3), Codes(B, scales[1], -7)], Codes(A, result, 5)).prove(tmp_path)


@pytest.mark.parametrize(
    "op, ratio, runtimes",
    [
        *((op, r * 2.0**-10, SATURATING) for op in ("Add", "Sub") for r in (1.0, 0.99, 1.01)),
        *(("Sub", r, ("litert",)) for r in (256.0, 255.9, 100.0)),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_xnnpack_adds_where_scales_lie_within_ten_bits_below_and_eight_above(tmp_path, op, ratio, runtimes, first):
    numbers = (ratio, 0.5) if first else (0.5, ratio)
    one(op, [Codes(A, numbers[0] * ONE, 3), Codes(B, numbers[1] * ONE, -7)], Codes(A, ONE, 5)).prove(
        tmp_path, runtimes=runtimes
    )


#: -70 * 0.05 - 125 * 0.07 is 122.5 steps of 0.1 below zero: vector instructions give -122, scalar code -123
SHAPES = {
    "17": ((1, 17), (1, 17), "v" * 16 + "s"),
    "15": ((1, 15), (1, 15), "s" * 15),
    "3 x 11": ((3, 11), (3, 11), "v" * 32 + "s"),
    "3 x 1 x 20": ((3, 1, 20), (1, 2, 20), ("v" * 16 + "ssss") * 6),
    "2 x 3 x 40 and a row of each": ((2, 3, 40), (2, 1, 40), ("v" * 32 + "s" * 8) * 6),
    "a row first": ((2, 1, 40), (2, 3, 40), ("v" * 32 + "s" * 8) * 6),
    "one of each row": ((3, 40), (3, 1), "s" * 120),
    "three blocks of axes": ((2, 1, 3, 1, 17), (1, 2, 1, 3, 17), "s" * 612),
    "a first axis": ((1, 3, 20), (2, 3, 20), ("v" * 48 + "s" * 12) * 2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_an_optimised_sum_takes_16_at_once_along_what_both_operands_have(tmp_path, name):
    first, second, how = SHAPES[name]
    sum_ = one("Add", [Codes(torch.full(first, -70), 0.05), Codes(torch.full(second, -125), 0.07)], Codes(A, ONE))
    sum_.prove(tmp_path)
    got = sum_.simulated("tflite_int8", "litert_optimized").reshape(-1).tolist()
    assert "".join({-122: "v", -123: "s"}[v] for v in got) == how


@pytest.mark.parametrize(
    "a, b, many",
    [
        ((2, 3, 4), (2, 3, 4), 24),
        ((2, 3, 4), (1, 3, 4), 12),
        ((1, 3, 4), (2, 1, 4), 4),
        ((2, 1, 4), (1, 3, 4), 4),
        ((2, 3, 4), (2, 3, 1), 1),
        ((2, 1, 3, 4), (1, 5, 1, 4), 1),  # three blocks
        ((2, 1, 4), (2, 1, 4), 8),  # an axis of size 1 divides nothing
        ((3, 1, 1, 4), (3, 2, 5, 4), 4),
        ((5, 3, 1, 7), (5, 1, 2, 7), 7),
    ],
)
def test_a_stretch_is_what_lies_side_by_side_in_both(a, b, many):
    assert _stretch(a, b) == many


def in_vectors(data_format: str, *shape: int) -> torch.Tensor:
    """Which elements of a sum of images vector instructions make, where it is part of a network in that layout."""
    sum_ = one("Add", [Codes(torch.full(shape, -70), 0.05), Codes(torch.full(shape, -125), 0.07)], Codes(A, ONE))
    sum_.graph.data_format = data_format
    return sum_.simulated("tflite_int8", "litert_optimized") == -122


def test_images_lie_channels_last_and_their_last_elements_are_left_to_scalar_code():
    """2 x 3 x 2 x 2 elements, of which 16 are taken at once: channels last, whole pixels lie behind one another."""
    order = torch.arange(24).reshape(2, 2, 2, 3).movedim(-1, 1)
    assert torch.equal(in_vectors("channels_first", 2, 3, 2, 2), order < 16)
    plain = torch.arange(24) < 16
    assert torch.equal(in_vectors("channels_last", 2, 3, 2, 2).reshape(-1), plain)
    assert torch.equal(in_vectors("channels_first", 2, 3, 4).reshape(-1), plain)


def test_an_optimised_change_of_scale_takes_16_at_once(tmp_path):
    """-131 * 0.37 is -48.47: by 0.74 it is -97, whose half is -48 in vector instructions and -49 in scalar code."""
    scaled = one("Requantize", [Codes(torch.full((1, 37), -128), ONE * 0.37, 3)], Codes(A, ONE))
    scaled.prove(tmp_path)
    assert scaled.simulated("tflite_int8", "litert_optimized").tolist() == [[-48] * 32 + [-49] * 5]


@pytest.mark.parametrize("ratio", [2.0**-16, 2.0**-16 * 0.99, 0.5, 0.0123, 255.9, 256.0])
def test_every_pair_of_codes_is_multiplied_as_the_kernels_multiply(tmp_path, ratio):
    """Where the product's scale is below 2^-16 or from 2^8 on, XNNPACK leaves it to LiteRT."""
    runtimes = LITERT if ratio < 1 else SATURATING[:1]
    one("Mul", [Codes(A, 0.25, 3), Codes(B, 0.5, -7)], Codes(A, 0.125 / ratio, 5)).prove(tmp_path, runtimes=runtimes)


@pytest.mark.parametrize("slope", [0.3, -0.3, 2.0**-8, 2.0**-8 * 0.99, -(2.0**-8) * 0.99, 1.7])
@pytest.mark.parametrize("ratio", [1.0, 0.37])
def test_every_code_of_a_slope(tmp_path, slope, ratio):
    one("LeakyRelu", [Codes(every(), ONE * ratio, 3)], Codes(A, ONE, -4), {"negative_slope": slope / ratio}).prove(
        tmp_path
    )


@pytest.mark.parametrize("ratio", [2.0**-8, 2.0**-8 * 0.99, 128.0, 128.5])
def test_a_slope_at_the_ends_of_what_xnnpack_takes(tmp_path, ratio):
    one("LeakyRelu", [Codes(every(), ONE * ratio, 3)], Codes(A, ONE, -4), {"negative_slope": 0.9}).prove(tmp_path)


@pytest.mark.parametrize("slope", [128.0, 128.5, -127.99609375, -128.0])
def test_a_steep_slope(tmp_path, slope):
    one("LeakyRelu", [Codes(every(), ONE / 256, 3)], Codes(A, ONE / 256, -4), {"negative_slope": slope}).prove(tmp_path)


@pytest.mark.parametrize("ratio", [2.0**-8, 2.0**-8 * 0.99, 128.0, 128.5, 0.37, 1.5, 0.5])
def test_every_code_at_another_scale(tmp_path, ratio):
    one("Requantize", [Codes(every(), ONE * ratio, 3)], Codes(A, ONE, -4)).prove(tmp_path)
    if ratio < 1:
        one("Requantize", [Codes(drawn(0, 9, 99, bits=16), ONE * ratio, 0, 16)], Codes(A, ONE, 0, 16)).prove(
            tmp_path, "tflite_int16x8"
        )


UNARY = {
    "Relu": {},
    "Relu6": {},
    "Clamp": {"min": -1.0, "max": 1.0},
    "Abs": {},
    "HardSwish": {},
    "Exp": {},
    "Sigmoid": {},
    "Tanh": {},
    "Gelu": {"approximate": "none"},
}


@pytest.mark.parametrize("ratio", [0.5, 0.731, 1.0, 1.7, 0.01, 40.0])
@pytest.mark.parametrize("op", UNARY)
def test_every_code_of_a_function_of_one_operand(tmp_path, op, ratio):
    result = {"Sigmoid": Codes(A, 1 / 256, -128), "Tanh": Codes(A, 1 / 128)}.get(op, Codes(A, ONE / 2, -4))
    one(op, [Codes(every(), ONE * ratio / 2, 3)], result, UNARY[op]).prove(tmp_path)


def test_every_code_of_a_smooth_rectifier_by_its_hyperbolic_form(tmp_path):
    one("Gelu", [Codes(every(), 0.03, 11)], Codes(A, 0.02, -100), {"approximate": "tanh"}).prove(tmp_path)
