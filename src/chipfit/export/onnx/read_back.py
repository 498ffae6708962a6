"""Reads back what a QDQ ONNX file says of each tensor that is stored in codes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from chipfit.export import FileTensor


def in_bytes(codes: Any, bits: int) -> np.ndarray:
    """Codes without a sign [*dims, n], of 4 bits two in a byte, the low half first; an odd one has its own byte."""
    q = np.asarray(codes, np.uint8)
    if bits == 8:
        return q
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, q.shape[-1] % 2)])
    return q[..., ::2] | q[..., 1::2] << 4


def from_bytes(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The inverse of `in_bytes`, [*dims, count]."""
    halves = np.stack([packed & 15, packed >> 4], -1) if bits == 4 else packed
    return halves.reshape(*packed.shape[:-1], -1)[..., :count].astype(np.int64)


def _in_blocks(n: onnx.NodeProto, constants: dict[str, np.ndarray]) -> dict[str, FileTensor]:
    """The weight of a product or table with scales for blocks, by its name; nothing of another operator."""
    operands = {"MatMulNBits": (1, 2, 3), "GatherBlockQuantized": (0, 2, 3)}.get(n.op_type)
    if operands is None:
        return {}
    a, (name, scale, zero) = (
        {x.name: x.i for x in n.attribute},
        [n.input[k] if k < len(n.input) else "" for k in operands],
    )
    rows, scales = constants[name].reshape(len(constants[name]), -1), constants[scale]
    codes = from_bytes(rows, a["bits"], a.get("K", scales.shape[1] * a["block_size"]))
    if zero:
        zeros = from_bytes(constants[zero], a["bits"], scales.shape[1]).astype(np.float64)
    else:
        codes, zeros = codes - (1 << a["bits"] - 1), np.zeros_like(scales, np.float64)
    return {name.removesuffix("_q").removesuffix("_rows"): FileTensor(codes, [(scales, zeros)])}


def _numbers(q: np.ndarray) -> np.ndarray:
    """Codes of a type that numpy computes with; it has none of 4 bits."""
    return q if q.dtype.kind in "iu" else q.astype(np.int64)


def _of_products(graph: onnx.GraphProto, constants: dict[str, np.ndarray]) -> dict[str, FileTensor]:
    """The weights of MatMulInteger, whose scale multiplies that of the data, and the product of both the sums."""
    found, makers = {}, {o: n for n in graph.node for o in n.output}
    for mul in (n for n in graph.node if n.op_type == "Mul"):
        cast, scales = (makers.get(i) for i in mul.input)
        product = makers.get(cast.input[0]) if cast is not None and cast.op_type == "Cast" else None
        if product is not None and product.op_type == "MatMulInteger" and scales is not None:
            q, scale = constants[product.input[1]], constants.get(scales.input[1], np.array(np.nan))
            zero = np.zeros(scale.shape, np.float64)
            found[product.input[1].removesuffix("_q")] = FileTensor(_numbers(q), [(scale, zero)])
    return found


def _of_tables(graph: onnx.GraphProto, constants: dict[str, np.ndarray]) -> dict[str, FileTensor]:
    """Tables whose rows of codes are multiplied by the scales, of each column or of the same rows."""
    found, makers = {}, {o: n for n in graph.node for o in n.output}
    for mul in (n for n in graph.node if n.op_type == "Mul"):
        cast, scale = makers.get(mul.input[0]), mul.input[1]
        rows = makers.get(cast.input[0]) if cast is not None and cast.op_type == "Cast" else None
        if rows is None or rows.op_type != "Gather" or constants.get(rows.input[0], np.zeros(1)).dtype.kind == "f":
            continue
        while scale not in constants and scale in makers:
            scale = makers[scale].input[0]
        numbers = constants.get(scale, np.array(np.nan))
        name, zero = rows.input[0].removesuffix("_q"), np.zeros(numbers.shape, np.float64)
        found[name] = FileTensor(_numbers(constants[rows.input[0]]), [(numbers, zero)])
    return found


def stored(path: Path) -> dict[str, FileTensor]:
    """By the name of the tensor, whose codes are called "{name}_q"; numbers from every (de)quantizer of them."""
    graph = onnx.load(str(path)).graph
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    clipped = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "Clip"}
    tables = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Gather"}  # rows of codes
    #: codes that come in, with numbers of their own
    handed = {i.name for i in graph.input if i.type.tensor_type.elem_type != onnx.TensorProto.FLOAT}
    found = _of_products(graph, constants) | _of_tables(graph, constants)
    for n in graph.node:
        found |= _in_blocks(n, constants)
        if n.op_type in ("QuantizeLinear", "DequantizeLinear") and n.input[0] not in handed:
            codes = n.input[0] if n.op_type == "DequantizeLinear" else clipped.get(n.output[0], n.output[0])
            codes = tables.get(codes, codes)
            q = constants.get(codes)
            entry = found.setdefault(codes.removesuffix("_q"), FileTensor(None if q is None else _numbers(q), []))
            scale = constants.get(n.input[1], np.array(np.nan))
            zero = constants.get(n.input[2], np.array(np.nan)) if len(n.input) > 2 else np.zeros_like(scale)
            entry.numbers.append((scale.astype(np.float32), zero.astype(np.float64)))
    return found
