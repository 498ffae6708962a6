"""Readers of LSTM, GRU and RNN; each direction becomes a node of its own."""

from typing import Any

import numpy as np

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.read import reads
from chipfit.frameworks.reading import present, require

#: order of the gates, and the activations that the kernels have
_KINDS: dict[str, tuple[str, list[str]]] = {
    "LSTM": ("iofg", ["sigmoid", "tanh", "tanh"]),
    "GRU": ("zrn", ["sigmoid", "tanh"]),
    "RNN": ("", ["tanh"]),
}
_KNOWN = {"activations", "direction", "hidden_size", "layout", "linear_before_reset"}


@reads("LSTM GRU RNN")
def _recurrent(c: OnnxCall) -> Any:
    """Read a layer in one or both directions.

    Raises:
        Unreadable: weights are computed, or activations are unusual.
    """
    others = {k for k in c.node.attributes if k not in _KNOWN and not c.is_default(k)}
    require(not others and (c.optional(7) is None or _is_zero(c.operand(7))))
    op, batch_first = c.node.op_type, bool(c.attr("layout"))
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[c.attr("direction")]
    x = c.operand(0) if batch_first else _turned(c, c.operand(0))
    lengths = c.optional(4) and c.step("Cast", [c.operand(4)], dtype="int64")
    made = []
    for k, reverse in enumerate(directions):
        attrs = {**_attributes(c, k, len(directions)), "reverse": reverse}
        wanted = [f"{c.name}.{k}.{i}" for i in range(3 if op == "LSTM" else 2)]
        made.append(c.steps(op, [x, *_weights(c, k), *_states(c, k, batch_first), None, lengths], wanted, **attrs))
    y, *last = zip(*made, strict=True)
    if not batch_first:
        y = tuple(c.step("Transpose", [i], perm=(1, 0, 2)) for i in y)
    results = [_joined(c, y, 2 if batch_first else 1), *(_joined(c, i, 1 if batch_first else 0) for i in last)]
    return results[: len(c.outputs)]


def _turned(c: OnnxCall, x: Operand) -> Operand:
    """Return data with batches first; where a node has turned them before, its operand."""
    order = (1, 0, 2)
    maker = next((n for n in c.builder.graph.nodes if n.output == x.name and n.op == "Transpose"), None)
    if maker is None or maker.attrs["perm"] != order:
        return c.step("Transpose", [x], perm=order)
    return Operand(tuple(m.permute(order) for m in x.metas), maker.data)


def _attributes(c: OnnxCall, k: int, count: int) -> dict[str, Any]:
    """Return the attributes of one direction of `count`."""
    op = c.node.op_type
    gates, usual = _KINDS[op]
    given = [_text(a).lower() for a in c.attr("activations") or []] or usual * count
    own = given[k * len(usual) : (k + 1) * len(usual)]
    if op == "RNN":
        require(own in (["tanh"], ["relu"]))
        return {"activation": own[0]}
    require(own == usual)
    after = bool(c.attr("linear_before_reset"))
    return {"gates": gates, **({"cell_clip": None} if op == "LSTM" else {"reset_after": after})}


def _text(a: Any) -> str:
    return a.decode() if isinstance(a, bytes) else str(a)


def _weights(c: OnnxCall, k: int) -> list[Operand | None]:
    """Return weight, recurrent weight and both biases of one direction."""
    if c.optional(3) is None:
        return [c.weight(i, f"[{k}]", lambda t: t[k]) for i in (1, 2)] + [None, None]
    size = present(c.operand(3).shape[1])
    first = c.weight(3, f"[{k}, : {size // 2}]", lambda t: t[k, : size // 2])
    second = c.weight(3, f"[{k}, {size // 2} :]", lambda t: t[k, size // 2 :])
    return [*(c.weight(i, f"[{k}]", lambda t: t[k]) for i in (1, 2)), first, second]


def _states(c: OnnxCall, k: int, batch_first: bool) -> list[Operand | None]:
    """Return the states of one direction before the first step; None for zeros."""
    states = [c.optional(i) for i in ((5, 6) if c.node.op_type == "LSTM" else (5,))]
    axis = 1 if batch_first else 0
    return [None if s is None or _is_zero(s) else c.step("Select", [s], axis=axis, index=k) for s in states]


def _is_zero(x: Operand) -> bool:
    return bool(x.numbers) and not any(np.any(n) for n in x.numbers)


def _joined(c: OnnxCall, parts: tuple[Operand, ...], axis: int) -> Operand:
    """Return the results of all directions along an axis of their own."""
    if len(parts) == 1:
        return c.step("Unsqueeze", [parts[0]], axes=(axis,))
    return c.step("Stack", list(parts), axis=axis)
