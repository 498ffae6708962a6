"""Reads back what a QDQ ONNX file says of each tensor that is stored in codes."""

from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from chipfit.export import InFile


def stored(path: Path) -> dict[str, InFile]:
    """By the name of the tensor, whose codes are called "{name}_q"; numbers from every (de)quantizer of them."""
    graph = onnx.load(str(path)).graph
    constants = {i.name: numpy_helper.to_array(i) for i in graph.initializer}
    clipped = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "Clip"}
    tables = {n.output[0]: n.input[0] for n in graph.node if n.op_type == "Gather"}  # rows of codes
    #: codes that come in, with numbers of their own
    handed = {i.name for i in graph.input if i.type.tensor_type.elem_type != onnx.TensorProto.FLOAT}
    found: dict[str, InFile] = {}
    for n in graph.node:
        if n.op_type in ("QuantizeLinear", "DequantizeLinear") and n.input[0] not in handed:
            codes = n.input[0] if n.op_type == "DequantizeLinear" else clipped.get(n.output[0], n.output[0])
            codes = tables.get(codes, codes)
            q = constants.get(codes)
            entry = found.setdefault(codes.removesuffix("_q"), InFile(None if q is None else q.astype(np.int64), []))
            scale = constants.get(n.input[1], np.array(np.nan))
            zero = constants.get(n.input[2], np.array(np.nan)) if len(n.input) > 2 else np.zeros_like(scale)
            entry.numbers.append((scale.astype(np.float32), zero.astype(np.float64)))
    return found
