"""Fused operators of ONNX Runtime with weights of integers, as the float operators that they were made from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from chipfit.errors import CaptureError

#: operator -> the float operator, its domain
_FLOAT = {
    "DynamicQuantizeLSTM": ("LSTM", ""),
    "QAttention": ("Attention", "com.microsoft"),
}


def in_float(model: onnx.ModelProto, where: str = "") -> onnx.ModelProto:
    """Return a model in which these operators are float ones, with the floats that their weights stand for.

    Raises:
        CaptureError: A weight, scale or zero point of them is computed or malformed.
    """
    if not any(n.op_type in _FLOAT and n.domain == "com.microsoft" for n in model.graph.node):
        return model
    reader, nodes = _Reader(model, where), list(model.graph.node)
    del model.graph.node[:]
    for n in nodes:
        if n.op_type in _FLOAT and n.domain == "com.microsoft":
            reader.replace(n)
        model.graph.node.append(n)
    return model


class _Reader:
    """The constants of a model, to which those in float are added."""

    def __init__(self, model: onnx.ModelProto, where: str) -> None:
        self.graph, self.where = model.graph, where
        self.constants = {t.name: t for t in model.graph.initializer}

    def replace(self, n: onnx.NodeProto) -> None:
        """Turn a node into the float operator."""
        ins = [*n.input, *[""] * 20]
        try:
            if n.op_type == "DynamicQuantizeLSTM":  # weights lie [directions, inputs, gates], as no other LSTM's
                w, r = (self.floats(ins[k], ins[s], ins[s + 1], (0, 2, 1)) for k, s in ((1, 8), (2, 10)))
                inputs = [ins[0], w, r, *ins[3:8]]
            else:
                x = f"{n.output[0]}/input"
                given = [i for i in (ins[0], ins[3], ins[6]) if i]
                self.graph.node.append(helper.make_node("DequantizeLinear", given, [x]))
                inputs = [x, self.floats(ins[1], ins[4], ins[7]), ins[2], ins[5], ins[8]]
        except (KeyError, ValueError, TypeError) as e:
            what = f"Weights of the operator {n.op_type} are computed or malformed: {e}"
            raise CaptureError(what, where=f"{self.where}, '{n.name or n.output[0]}'") from e
        while not inputs[-1]:
            inputs.pop()
        n.op_type, n.domain = _FLOAT[n.op_type]
        n.input[:] = inputs

    def floats(self, name: str, scale: str, zero: str, order: Sequence[int] = ()) -> str:
        """Add the floats that the integers of a constant stand for, and return their name."""
        held = f"{name}/float"
        if held not in self.constants:
            q, s = (numpy_helper.to_array(self.constants[k]) for k in (name, scale))
            z = numpy_helper.to_array(self.constants[zero]) if zero else np.zeros((), q.dtype)
            if q.ndim == 3:  # one scale for each direction, or for each of its gates
                s, z = (p.reshape(len(q), 1, -1) if p.size > 1 else p.reshape(()) for p in (s, z))
            w = (q.astype(np.int64) - z.astype(np.int64)).astype(np.float32) * s
            w = np.ascontiguousarray(w.transpose(order) if order else w, np.float32)
            self.constants[held] = numpy_helper.from_array(w, held)
            self.graph.initializer.append(self.constants[held])
        return held
