"""Readers of fused operators of ONNX Runtime with weights of integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper

from chipfit.frameworks.onnx.integers import Expansion, IntegerConstant, QParams, reads_integers

#: operands of QEmbedLayerNormalization with integers
_EMBEDDED = (2, 3, 4, 5, 6)

# ---------------------------------------------------------------- readers


@reads_integers("QAttention")
def _attention(e: Expansion, n: onnx.NodeProto) -> None:
    """Read it as one product of integers for query, key and value, and attention in float."""
    x, w, bias, scale, w_scale, mask, zero, w_zero, past = [*n.input, *[""] * 9][:9]
    if past or any(n.output[1:]):
        raise e.unread(n, "it has states")
    if any(a.name == "do_rotary" and a.i for a in n.attribute):
        raise e.unread(n, "it applies rotary embeddings")
    y = n.output[0]
    product, total = e.fresh(f"{y}/product"), e.fresh(f"{y}/qkv")
    a = x if x in e.dynamic else e.dequantized(n, x, scale, zero)
    e.compute(n, "MatMul", [a, e.dequantized(n, w, w_scale, w_zero)], product)
    e.nodes.append(helper.make_node("Add", [product, bias], [total], name=f"{n.name}/bias"))
    parts = [e.fresh(f"{y}/{k}") for k in ("query", "key", "value")]
    more: dict[str, Any] = {"num_outputs": 3} if e.opset >= 18 else {}
    e.nodes.append(helper.make_node("Split", [total], parts, name=f"{n.name}/parts", axis=2, **more))
    made = helper.make_node("MultiHeadAttention", [*parts, *(["", mask] if mask else [])], [y], domain=n.domain)
    known = ("num_heads", "unidirectional", "mask_filter_value", "scale")
    made.attribute.extend(a for a in n.attribute if a.name in known)
    e.nodes.append(made)


@reads_integers("DynamicQuantizeLSTM")
def _lstm(e: Expansion, n: onnx.NodeProto) -> None:
    """Read an LSTM of data that are quantized for all steps at once, as the graph has them: with batches first."""
    ins = [*n.input, *[""] * 12]
    weights = [_lstm_weight(e, n, *(ins[k] for k in at)) for at in ((1, 8, 9), (2, 10, 11))]
    x = _with_axes_exchanged(e, ins[0])
    e.out.returned.append(e.nodes[-1])
    q = e.quantized_at_run_time(x, e.fresh(f"{x}/dynamic"))
    inputs = [_with_axes_exchanged(e, q), *weights, *ins[3:8]]
    while not inputs[-1]:
        inputs.pop()
    made = helper.make_node("LSTM", inputs, n.output, name=n.name)
    made.attribute.extend(n.attribute)
    e.nodes.append(made)
    e.out.runs |= dict.fromkeys(filter(None, n.output), "int")


def _with_axes_exchanged(e: Expansion, x: str) -> str:
    """Add a transpose that exchanges the axes of steps and batches; return its result."""
    y = e.fresh(f"{x}/turned")
    e.nodes.append(helper.make_node("Transpose", [x], [y], name=y, perm=(1, 0, 2)))
    return y


def _lstm_weight(e: Expansion, n: onnx.NodeProto, name: str, scale: str, zero: str) -> str:
    """Return the floats of a weight of an LSTM, which lies [directions, inputs, gates] as no other LSTM's does."""
    array = e.array(name)
    if array is None or array.ndim != 3:
        raise e.unread(n, "its weight is computed")
    numbers = e.numbers(n, name, scale, zero, e.kind(name))
    count, gates = len(array), array.shape[2]
    if numbers.scale.size not in (1, count, count * gates):
        got, allowed = str(numbers.scale.size), f"1, {count} or {count * gates}"
        raise e.fault(n, f"Scale of '{name}' has another shape than its directions and gates", got, allowed)
    turned = QParams(numbers.kind, numbers.scale, numbers.zero)  # for each direction
    if numbers.scale.size == count * gates > 1:  # for each gate of each direction: blocks of all inputs
        scales, zeros = (p.reshape(count, gates, 1) for p in (numbers.scale, numbers.zero))
        turned = QParams(numbers.kind, scales, zeros, 2, array.shape[1], numbers.ends)
    return e.enter(IntegerConstant(name, array.astype(np.int64).transpose(0, 2, 1), turned))


@reads_integers("QEmbedLayerNormalization")
def _embedding(e: Expansion, n: onnx.NodeProto) -> None:
    """Read it as EmbedLayerNormalization; scales of tables and weights are operands 8..12, zero points 13..17."""
    ins = [*n.input, *[""] * 18]
    for k in _EMBEDDED:
        if ins[k]:
            ins[k] = e.dequantized(n, ins[k], n.input[k + 6], n.input[k + 11])
    inputs = ins[:8]
    while not inputs[-1]:
        inputs.pop()
    made = helper.make_node("EmbedLayerNormalization", inputs, n.output, n.name, domain=n.domain)
    made.attribute.extend(n.attribute)
    e.nodes.append(made)
