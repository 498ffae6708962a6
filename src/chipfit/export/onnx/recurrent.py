"""Writers of LSTM, GRU and RNN, which ONNX has with steps first, an axis of directions, and gates in its own order."""

from typing import Any

import numpy as np

from chipfit.export.onnx.builder import OnnxBuilder
from chipfit.export.onnx.ops import Names, writes
from chipfit.graph.ir import Node

_ORDER = {"LSTM": "iofg", "GRU": "zrn"}


@writes("LSTM", "GRU", "RNN")
def _recurrent(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    """Write a layer in one direction, over a sequence or one step."""
    sequence, size = len(w.shape(n)) == 3, w.shape(n, "r")[1]
    x = [*x, *[None] * (7 - len(x))]
    steps = w.op("Transpose", [x[0]], perm=[1, 0, 2]) if sequence else w.op("Unsqueeze", [x[0], _ints(w, 0)])
    weights = [_weight(w, n, k, x) for k in (1, 2)]
    states = [None if s is None else w.op("Unsqueeze", [s, _ints(w, 0)]) for s in x[5 : 7 if n.op == "LSTM" else 6]]
    more: dict[str, Any] = {"linear_before_reset": int(n.attrs["reset_after"])} if n.op == "GRU" else {}
    if n.op == "RNN":
        more = {"activations": [n.attrs["activation"].capitalize()]}
    direction = "reverse" if n.attrs["reverse"] else "forward"
    inputs = [steps, *weights, _bias(w, n, x), None, *states]
    results = w.op_many(n.op, inputs, 3 if n.op == "LSTM" else 2, hidden_size=size, direction=direction, **more)
    last = [w.op("Squeeze", [r, _ints(w, 0)]) for r in results[1:]]
    if not sequence:
        return last
    return [w.op("Transpose", [w.op("Squeeze", [results[0], _ints(w, 1)])], perm=[1, 0, 2]), *last]


def _ints(w: OnnxBuilder, *v: int) -> str:
    return w.const(np.array(v, np.int64))


def _weight(w: OnnxBuilder, n: Node, k: int, x: Names) -> str:
    """Return weight `k` with the gates in the order of ONNX, and an axis of directions."""
    known, gates = w.graph.weights.get(n.inputs[k] or ""), n.attrs.get("gates", "")
    order = [gates.index(g) for g in _ORDER.get(n.op, "")] or [0]
    rows = np.arange(w.graph.shape(n.inputs[k] or "")[0] or 0).reshape(len(order), -1)[order].reshape(-1)
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
