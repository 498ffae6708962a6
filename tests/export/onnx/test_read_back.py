"""What is read back from an ONNX file: integers in bytes, blocks, products, quantizers of every kind."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from chipfit.export.onnx.read_back import from_bytes, read_back, to_bytes
from tests.build import quantized, sequential
from tests.onnx_models import onnx_node, onnx_of

make = helper.make_node


@pytest.fixture
def read(tmp_path):
    """Return what is read back of a graph of nodes and constants."""

    def read(nodes, constants, inputs=()):
        ends = {"inputs": dict.fromkeys(dict(inputs), (2,)), "outputs": (), "types": dict(inputs)}
        onnx.save(onnx_of(*nodes, **ends, constants=constants), tmp_path / "m.onnx")
        return read_back(tmp_path / "m.onnx")

    return read


def test_four_bits_lie_two_to_a_byte_the_low_half_first():
    assert to_bytes([[1, 2, 15], [4, 5, 6]], 4).tolist() == [[0x21, 0x0F], [0x54, 0x06]]
    assert to_bytes([[1, 2], [3, 200]], 8).tolist() == [[1, 2], [3, 200]]
    assert to_bytes([[3, 9]], 4).tolist() == [[0x93]] and to_bytes([[3, 9]], 4).dtype == np.uint8
    assert from_bytes(np.array([[0x21, 0x0F]], np.uint8), 4, 3).tolist() == [[1, 2, 15]]


@pytest.mark.parametrize("bits, shape", [(4, (5,)), (4, (2, 3)), (4, (2, 3, 5)), (8, (2, 3, 5)), (4, (3, 4, 6))])
def test_bytes_are_read_back_in_any_number_of_axes(bits, shape):
    codes = np.random.default_rng(0).integers(0, 1 << bits, shape)
    unpacked = from_bytes(to_bytes(codes, bits), bits, shape[-1])
    assert np.array_equal(unpacked, codes) and unpacked.dtype == np.int64


SCALES = np.float32([[0.5, 0.25], [1.0, 2.0], [4.0, 8.0]])


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_a_product_are_read_with_or_without_zero_points(bits, read):
    """Two rows of 48 in three blocks of 16; signed integers are stored unsigned, about the middle of the range."""
    codes = np.random.default_rng(1).integers(0, 1 << bits, (2, 48))
    scales, zeros = SCALES.T, np.array([[1, 2, 3], [4, 5, 6]])
    constants = {"w_q": to_bytes(codes, bits).reshape(2, 3, -1), "s": scales, "z": to_bytes(zeros, bits)}
    for inputs in (["w_q", "s", "z"], ["w_q", "s"], ["w_q", "s", ""]):
        found = read([make("MatMulNBits", ["x", *inputs], ["y"], K=48, N=2, bits=bits, block_size=16)], constants)
        ((scale, zero),), with_zeros = found["w"].qparams, inputs[2:] == ["z"]
        assert np.array_equal(scale, scales) and np.array_equal(zero, zeros if with_zeros else np.zeros((2, 3)))
        assert np.array_equal(found["w"].values, codes - (0 if with_zeros else 1 << bits - 1)) and len(found) == 1


@pytest.mark.parametrize("by", ["columns", "rows"])
def test_a_table_whose_rows_are_multiplied_has_their_scales(by, read):
    looked_up = [onnx_node("s_rows = Gather(s, i)"), onnx_node("s_read = Unsqueeze(s_rows, axis)")]
    nodes = [
        "rows = Gather(e_q, i)",
        onnx_node("reals = Cast(rows)", to=1),
        *(looked_up if by == "rows" else []),
        make("Mul", ["reals", "s_read" if by == "rows" else "s"], ["e"]),
        "floats = Gather(f, i)",  # a table in float, and what is no table
        onnx_node("f_reals = Cast(floats)", to=1),
        "g = Mul(f_reals, s)",
        "b = Mul(a, s)",
    ]
    constants = {
        "s": np.float32([0.25, 2]), "e_q": np.int8([[1, 2], [3, 4]]), "i": np.int64([0]), "axis": np.int64([1]),
        "f": np.float32([[1, 2], [3, 4]]),
    }  # fmt: skip
    found = read(nodes, constants, [("a", TensorProto.FLOAT)])
    assert sorted(found) == ["e"] and found["e"].values.tolist() == [[1, 2], [3, 4]]
    ((scale, zero),) = found["e"].qparams
    assert scale.tolist() == [0.25, 2] and zero.tolist() == [0, 0]


def test_the_table_of_an_embedding_is_read_back():
    ids = torch.randint(9, (16, 5))
    found = quantized(sequential(nn.Embedding(9, 4), nn.Linear(4, 3)), ids).verify([ids])
    (table,) = (h for h in found.held if h.tensor == "0.weight")
    assert found.exact and (table.elements, table.differing, table.fault) == (36, 0, "")


def test_a_tensor_has_the_numbers_of_every_quantizer_of_it(read):
    """A value that is clipped after its quantizer, a weight, rows of a table, a quantizer without zero point."""
    nodes = [
        "saturated = QuantizeLinear(a, s, z)",
        "a_q = Clip(saturated, low, high)",
        "a_d = DequantizeLinear(a_q, s, z)",
        "w = DequantizeLinear(w_q, t)",
        "rows = Gather(e_q, i)",
        "e = DequantizeLinear(rows, t, z)",
        "b_q = QuantizeLinear(b, s, unknown)",
        "g = DequantizeLinear(given, s, z)",
    ]
    constants = {
        "s": np.float32(0.5), "t": np.float32([0.25, 2]), "z": np.int8(3), "low": np.int8(-7), "high": np.int8(7),
        "w_q": np.int8([1, 2]), "e_q": np.int8([[1, 2], [3, 4]]), "i": np.int64([0]),
    }  # fmt: skip
    found = read(nodes, constants, [("given", TensorProto.INT8), ("a", TensorProto.FLOAT)])
    assert sorted(found) == ["a", "b", "e", "w"]
    assert found["a"].values is None and [(float(s), float(z)) for s, z in found["a"].qparams] == [(0.5, 3.0)] * 2
    assert found["w"].values.tolist() == [1, 2] and found["w"].values.dtype == np.int8
    ((scale, zero),) = found["w"].qparams
    assert scale.tolist() == [0.25, 2] and zero.tolist() == [0, 0]
    assert found["e"].values.tolist() == [[1, 2], [3, 4]]
    ((scale, zero),) = found["b"].qparams
    assert scale == 0.5 and np.isnan(zero)
    assert all((s.dtype, z.dtype) == (np.float32, np.float64) for f in found.values() for s, z in f.qparams)
