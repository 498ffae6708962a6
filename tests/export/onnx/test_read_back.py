"""What is read back from an ONNX file: codes in bytes, blocks, products, quantizers of every kind."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import chipfit
from chipfit.export.onnx.read_back import _in_blocks, _of_products, from_bytes, in_bytes, stored


def test_four_bits_lie_two_to_a_byte_the_low_half_first():
    assert in_bytes([[1, 2, 15], [4, 5, 6]], 4).tolist() == [[0x21, 0x0F], [0x54, 0x06]]
    assert in_bytes([[1, 2], [3, 200]], 8).tolist() == [[1, 2], [3, 200]]
    assert in_bytes([[3, 9]], 4).tolist() == [[0x93]] and in_bytes([[3, 9]], 4).dtype == np.uint8


@pytest.mark.parametrize("bits, shape", [(4, (5,)), (4, (2, 3)), (4, (2, 3, 5)), (8, (2, 3, 5)), (4, (3, 4, 6))])
def test_bytes_are_read_back_in_any_number_of_axes(bits, shape):
    codes = np.random.default_rng(0).integers(0, 1 << bits, shape)
    read = from_bytes(in_bytes(codes, bits), bits, shape[-1])
    assert np.array_equal(read, codes) and read.dtype == np.int64


def node(op, inputs, **attrs):
    return helper.make_node(op, inputs, ["y"], **attrs)


SCALES = np.float32([[0.5, 0.25], [1.0, 2.0], [4.0, 8.0]])


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_a_product_are_read_with_or_without_zero_points(bits):
    """Two rows of 48 in three blocks of 16; codes with a sign are held without, in the middle of the range."""
    codes = np.random.default_rng(1).integers(0, 1 << bits, (2, 48))
    scales, zeros = SCALES.T, np.array([[1, 2, 3], [4, 5, 6]])
    held = {"w_q": in_bytes(codes, bits).reshape(2, 3, -1), "s": scales, "z": in_bytes(zeros, bits)}
    how = {"K": 48, "N": 2, "bits": bits, "block_size": 16}
    found = _in_blocks(node("MatMulNBits", ["x", "w_q", "s", "z"], **how), held)
    assert list(found) == ["w"] and np.array_equal(found["w"].codes, codes)
    assert np.array_equal(found["w"].numbers[0][0], scales) and np.array_equal(found["w"].numbers[0][1], zeros)
    for inputs in (["x", "w_q", "s"], ["x", "w_q", "s", ""]):
        (bare,) = _in_blocks(node("MatMulNBits", inputs, **how), held).values()
        assert np.array_equal(bare.codes, codes - (8 if bits == 4 else 128))
        assert not bare.numbers[0][1].any() and bare.numbers[0][1].shape == (2, 3)


def test_a_table_in_blocks_is_as_wide_as_its_blocks():
    codes = np.random.default_rng(2).integers(0, 16, (3, 32))
    held = {"t_rows_q": in_bytes(codes, 4), "s": SCALES, "z": in_bytes(np.zeros((3, 2), int), 4)}
    op = node("GatherBlockQuantized", ["t_rows_q", "i", "s", "z"], bits=4, block_size=16, gather_axis=0)
    ((name, found),) = _in_blocks(op, held).items()
    assert name == "t" and np.array_equal(found.codes, codes)
    assert _in_blocks(node("MatMul", ["x", "w"]), held) == {}


def product(order=("c", "s"), cast="Cast", kind="MatMulInteger"):
    nodes = [
        helper.make_node(kind, ["x_q", "w_q", "x_z"], ["acc"]),
        helper.make_node(cast, ["acc"], ["c"]),
        helper.make_node("Mul", ["x_s", "w_s"], ["s"]),
        helper.make_node("Mul", list(order), ["y"]),
    ]
    return helper.make_graph(nodes, "g", [], [])


CONSTANTS = {"w_q": np.int8([[1, -2], [3, 4]]), "w_s": np.float32([0.5, 0.25])}


def test_the_weight_of_an_integer_product_has_the_scale_that_multiplies_the_datas():
    ((name, found),) = _of_products(product(), CONSTANTS).items()
    assert name == "w" and found.codes.tolist() == [[1, -2], [3, 4]] and found.codes.dtype == np.int8
    ((scale, zero),) = found.numbers
    assert scale.tolist() == [0.5, 0.25] and zero.tolist() == [0.0, 0.0]
    assert np.isnan(_of_products(product(), {"w_q": CONSTANTS["w_q"]})["w"].numbers[0][0])
    for other in (product(cast="Identity"), product(kind="MatMul"), product(("c", "other")), product(("s", "c"))):
        assert _of_products(other, CONSTANTS) == {}


def saved(tmp_path, nodes, constants, inputs=()):
    held = [numpy_helper.from_array(np.asarray(v), k) for k, v in constants.items()]
    takes = [helper.make_tensor_value_info(name, kind, [2]) for name, kind in inputs]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", takes, [], held)), tmp_path / "m.onnx")
    return stored(tmp_path / "m.onnx")


@pytest.mark.parametrize("by", ["columns", "rows"])
def test_a_table_whose_rows_are_multiplied_has_their_scales(by, tmp_path):
    make = helper.make_node
    looked_up = [make("Gather", ["s", "i"], ["s_rows"]), make("Unsqueeze", ["s_rows", "axis"], ["s_read"])]
    nodes = [
        make("Gather", ["e_q", "i"], ["rows"]),
        make("Cast", ["rows"], ["reals"], to=1),
        *(looked_up if by == "rows" else []),
        make("Mul", ["reals", "s_read" if by == "rows" else "s"], ["e"]),
        make("Gather", ["f", "i"], ["floats"]),  # a table in float, and what is no table
        make("Cast", ["floats"], ["f_reals"], to=1),
        make("Mul", ["f_reals", "s"], ["g"]),
        make("Mul", ["a", "s"], ["b"]),
    ]
    constants = {
        "s": np.float32([0.25, 2]), "e_q": np.int8([[1, 2], [3, 4]]), "i": np.int64([0]), "axis": np.int64([1]),
        "f": np.float32([[1, 2], [3, 4]]),
    }  # fmt: skip
    found = saved(tmp_path, nodes, constants, [("a", TensorProto.FLOAT)])
    assert sorted(found) == ["e"] and found["e"].codes.tolist() == [[1, 2], [3, 4]]
    ((scale, zero),) = found["e"].numbers
    assert scale.tolist() == [0.25, 2] and zero.tolist() == [0, 0]


def test_the_table_of_an_embedding_is_read_back():
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3)).eval()
    ids = torch.randint(9, (16, 5))
    found = chipfit.quantize(net, [ids], "ort_cpu", progress=False).verify([ids])
    (table,) = (h for h in found.held if h.tensor == "0.weight")
    assert found.exact and (table.elements, table.differing, table.fault) == (36, 0, "")


def test_a_tensor_has_the_numbers_of_every_quantizer_of_it(tmp_path):
    """A value that is clipped after its quantizer, a weight, rows of a table, a quantizer without zero point."""
    make = helper.make_node
    nodes = [
        make("QuantizeLinear", ["a", "s", "z"], ["saturated"]),
        make("Clip", ["saturated", "low", "high"], ["a_q"]),
        make("DequantizeLinear", ["a_q", "s", "z"], ["a_d"]),
        make("DequantizeLinear", ["w_q", "t"], ["w"]),
        make("Gather", ["e_q", "i"], ["rows"]),
        make("DequantizeLinear", ["rows", "t", "z"], ["e"]),
        make("QuantizeLinear", ["b", "s", "unknown"], ["b_q"]),
        make("DequantizeLinear", ["given", "s", "z"], ["g"]),
    ]
    constants = {
        "s": np.float32(0.5), "t": np.float32([0.25, 2]), "z": np.int8(3), "low": np.int8(-7), "high": np.int8(7),
        "w_q": np.int8([1, 2]), "e_q": np.int8([[1, 2], [3, 4]]), "i": np.int64([0]),
    }  # fmt: skip
    found = saved(tmp_path, nodes, constants, [("given", TensorProto.INT8), ("a", TensorProto.FLOAT)])
    assert sorted(found) == ["a", "b", "e", "w"]
    assert found["a"].codes is None and [(float(s), float(z)) for s, z in found["a"].numbers] == [(0.5, 3.0)] * 2
    assert found["w"].codes.tolist() == [1, 2] and found["w"].codes.dtype == np.int8
    ((scale, zero),) = found["w"].numbers
    assert scale.tolist() == [0.25, 2] and zero.tolist() == [0, 0]
    assert found["e"].codes.tolist() == [[1, 2], [3, 4]]
    ((scale, zero),) = found["b"].numbers
    assert scale == 0.5 and np.isnan(zero) and scale.dtype == np.float32 and zero.dtype == np.float64
    assert all(
        n.dtype == t for f in found.values() for pair in f.numbers for n, t in zip(pair, (np.float32, np.float64))
    )
