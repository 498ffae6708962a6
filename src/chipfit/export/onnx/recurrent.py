"""Writers of LSTM, GRU and RNN, which ONNX has with steps first, an axis of directions, and gates in its own order."""

from typing import Any

import numpy as np

from chipfit.export.onnx.builder import Names, OnnxBuilder, require, tensor_type
from chipfit.graph.ir import Node

_ORDER = {"LSTM": "iofg", "GRU": "zrn"}


def has_operator(n: Node) -> bool:
    """Return whether ONNX has an operator that computes the layer."""
    return n.operand("mask") is None and n.attrs.get("cell_clip") is None


def recurrent(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    """Write a layer in one direction, over a sequence or one step."""
    sequence, size = len(w.shape(n)) == 3, w.shape(n, "r")[1]
    x = [*x, *[None] * (7 - len(x))]
    dynamic = w.floats.get(n.data) if all(w.plan.quantized(i) for i in n.inputs[1:3]) else None
    data = dynamic or x[0]
    steps = w.op("Transpose", [data], perm=[1, 0, 2]) if sequence else w.op("Unsqueeze", [data, _ints(w, 0)])
    weights, numbers = [_weight(w, n, k, x) for k in (1, 2)], list[str | None]()
    if dynamic is not None:
        require(n, n.op == "LSTM", "of recurrent layers, ONNX Runtime quantizes the operands of LSTM alone at run time")
        weights, numbers = _integers(w, n)
    states = [None if s is None else w.op("Unsqueeze", [s, _ints(w, 0)]) for s in x[5 : 7 if n.op == "LSTM" else 6]]
    lengths = None if n.operand("lengths") is None else w.op("Cast", [x[-1]], to=tensor_type("int32"))
    more: dict[str, Any] = {"linear_before_reset": int(n.attrs["reset_after"])} if n.op == "GRU" else {}
    if n.op == "RNN":
        more = {"activations": [n.attrs["activation"].capitalize()]}
    direction = "reverse" if n.attrs["reverse"] else "forward"
    inputs = [steps, *weights, _bias(w, n, x), lengths, *states, *numbers]
    kind = n.op if dynamic is None else "DynamicQuantizeLSTM@com.microsoft"
    results = w.op_many(kind, inputs, 3 if n.op == "LSTM" else 2, hidden_size=size, direction=direction, **more)
    last = [w.op("Squeeze", [r, _ints(w, 0)]) for r in results[1:]]
    if not sequence:
        return last
    return [w.op("Transpose", [w.op("Squeeze", [results[0], _ints(w, 1)])], perm=[1, 0, 2]), *last]


def _ints(w: OnnxBuilder, *v: int) -> str:
    return w.const(np.array(v, np.int64))


def _integers(w: OnnxBuilder, n: Node) -> tuple[list[str], list[str | None]]:
    """Return both weights in integers, [1, operand, gates], and the further inputs of an LSTM that multiplies them."""
    weights, numbers = list[str](), list[str | None]([None])
    rows = w.const(_rows(n, w.graph.shape(n.weight)[0] or 0).astype(np.int32))
    for name in (i or "" for i in n.inputs[1:3]):
        stored = w.plan[name]
        require(n, not stored.zero_point.any(), "weights with zero points multiply dynamically quantized data")
        codes = w.weight_integers(name, name, stored.quantize(w.graph.weights[name].detach()))
        codes = w.op("Transpose", [w.op("Gather", [codes, rows], axis=0)], perm=[1, 0])
        weights.append(w.op("Unsqueeze", [codes, _ints(w, 0)]))
        for k in w.qparams(name, stored):
            ordered = w.op("Gather", [k, rows], axis=0) if stored.scale.dim() else k
            numbers.append(w.op("Unsqueeze", [ordered, _ints(w, 0)]))
    return weights, numbers


def _rows(n: Node, count: int) -> np.ndarray:
    """Return the rows of a weight in the order of ONNX's gates."""
    gates = n.attrs.get("gates", "")
    order = [gates.index(g) for g in _ORDER.get(n.op, "")] or [0]
    return np.arange(count).reshape(len(order), -1)[order].reshape(-1)


def _weight(w: OnnxBuilder, n: Node, k: int, x: Names) -> str:
    """Return weight `k` with the gates in the order of ONNX, and an axis of directions."""
    known, rows = w.graph.weights.get(n.inputs[k] or ""), _rows(n, w.graph.shape(n.inputs[k] or "")[0] or 0)
    if known is not None and not w.plan.quantized(n.inputs[k] or ""):
        return w.const(known.detach().numpy()[rows][None])
    return w.op("Unsqueeze", [w.op("Gather", [x[k], w.const(rows)], axis=0), _ints(w, 0)])


def _bias(w: OnnxBuilder, n: Node, x: Names) -> str | None:
    """Return both biases behind one another."""
    if x[3] is None and x[4] is None:
        return None
    present = 3 if x[3] is not None else 4
    zeros = w.const(np.zeros((1, w.graph.shape(n.inputs[present] or "")[0] or 0), np.float32))
    return w.op("Concat", [zeros if x[k] is None else _weight(w, n, k, x) for k in (3, 4)], axis=1)
