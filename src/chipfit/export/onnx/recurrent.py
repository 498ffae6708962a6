"""Writers of LSTM, GRU and RNN, which ONNX has with steps first, an axis of directions, and gates in its own order."""

from typing import Any

import numpy as np

from chipfit.export.onnx.builder import OnnxBuilder, refuse
from chipfit.export.onnx.ops import Names, writes
from chipfit.graph.ir import Node

_ORDER = {"LSTM": "iofg", "GRU": "zrn"}


@writes("LSTM", "GRU", "RNN")
def _recurrent(w: OnnxBuilder, n: Node, x: Names) -> list[str]:
    """Write a layer in one direction, over a sequence or one step."""
    sequence, size = len(w.shape(n)) == 3, w.shape(n, "r")[1]
    x = [*x, *[None] * (7 - len(x))]
    steps = w.op("Transpose", [x[0]], perm=[1, 0, 2]) if sequence else w.op("Unsqueeze", [x[0], _ints(w, 0)])
    weights = [_weight(w, n, n.inputs[k]) for k in (1, 2)]
    states = [None if s is None else w.op("Unsqueeze", [s, _ints(w, 0)]) for s in x[5 : 7 if n.op == "LSTM" else 6]]
    more: dict[str, Any] = {"linear_before_reset": int(n.attrs["reset_after"])} if n.op == "GRU" else {}
    if n.op == "RNN":
        more = {"activations": [n.attrs["activation"].capitalize()]}
    direction = "reverse" if n.attrs["reverse"] else "forward"
    inputs = [steps, *weights, _bias(w, n), None, *states]
    results = w.op_many(n.op, inputs, 3 if n.op == "LSTM" else 2, hidden_size=size, direction=direction, **more)
    last = [w.op("Squeeze", [r, _ints(w, 0)]) for r in results[1:]]
    if not sequence:
        return last
    return [w.op("Transpose", [w.op("Squeeze", [results[0], _ints(w, 1)])], perm=[1, 0, 2]), *last]


def _ints(w: OnnxBuilder, *v: int) -> str:
    return w.const(np.array(v, np.int64))


def _weight(w: OnnxBuilder, n: Node, name: str | None) -> str:
    return w.const(_values(w, n, name)[None])


def _bias(w: OnnxBuilder, n: Node) -> str | None:
    """Return both biases behind one another."""
    both = [_values(w, n, n.operand(k)) if n.operand(k) else None for k in ("b", "rb")]
    known = [v for v in both if v is not None]
    if not known:
        return None
    return w.const(np.concatenate([np.zeros_like(known[0]) if v is None else v for v in both])[None])


def _values(w: OnnxBuilder, n: Node, name: str | None) -> np.ndarray:
    """Return a weight with its gates in the order of ONNX."""
    if name not in w.graph.weights:
        refuse(n, "its weights are computed at run time")
    if w.plan.quantized(name):
        refuse(n, f"'{name}' is quantized, and the operator takes floats")
    t, gates = w.graph.weights[name].detach(), n.attrs.get("gates", "")
    order = [gates.index(g) for g in _ORDER.get(n.op, "")]
    values: np.ndarray = (t.reshape(len(order), -1, *t.shape[1:])[order].flatten(0, 1) if order else t).numpy()
    return values
