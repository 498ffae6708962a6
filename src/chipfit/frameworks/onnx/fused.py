"""Fused operators that ONNX Runtime's optimizers write (domain com.microsoft), in terms of ONNX's own.

So are operators of ONNX that ONNX itself does not define by others. A function enters the nodes that compute an
operator, as ONNX defines functions; they are then read as others are. It raises `Unreadable` for a form that has no
such nodes. Sources: docs/ContribOperators.md of ONNX Runtime, and docs/Operators.md of ONNX.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.model import domain_of
from chipfit.frameworks.onnx.read import readers_of
from chipfit.frameworks.reading import Unreadable, present, require
from chipfit.operators.table import enters

#: version of ONNX's operators that the nodes below have
OPSET = 23
#: operator -> the function that enters its nodes
_DEFINITIONS: dict[str, "Callable[[Body], None]"] = {}
_defines = enters(_DEFINITIONS)
#: the same of ONNX's own operators
_COMPOSED: dict[str, "Callable[[Body], None]"] = {}
_composes = enters(_COMPOSED)


class Body:
    """The nodes of one fused operator while they are entered: operands and results by name."""

    def __init__(self, call: OnnxCall) -> None:
        self.call = call
        self.nodes = list[onnx.NodeProto]()
        self.inputs = [v.name or "" if v is not None else "" for v in call.node.inputs]
        self._results = dict[str, str]()

    def given(self, index: int) -> str:
        """Return the name of an operand, "" if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def rank(self, index: int) -> int:
        return self.call.operand(index).rank

    def attr(self, name: str, default: Any) -> Any:
        found = self.call.attr(name)
        return default if found is None else found

    def op(self, kind: str, *inputs: str, **attrs: Any) -> str:
        """Enter a node of one result; return its name."""
        name = f"{self.call.name}/{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], self.call.node.name or "", **attrs))
        return name

    def constant(self, value: Any) -> str:
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(value)))

    def add(self, x: str, *others: str) -> str:
        """Return the sum of x and of those others that are present."""
        for other in filter(None, others):
            x = self.op("Add", x, other)
        return x

    def parts(self, x: str, axis: int, sizes: Sequence[int]) -> list[str]:
        """Return the parts of x along an axis, one behind the other."""
        ends = list(accumulate(sizes))
        places = zip((e - size for e, size in zip(ends, sizes, strict=True)), ends, strict=True)
        return [self.op("Slice", x, *(self.constant([v]) for v in (*place, axis))) for place in places]

    def result(self, index: int, name: str) -> None:
        """Call a result of the nodes like one of the operator, if something reads that."""
        if index < len(self.call.outputs) and self.call.outputs[index]:
            self._results[name] = self.call.outputs[index]

    def no_result(self, *indices: int) -> None:
        """Check that nothing reads these results."""
        require(all(self.call.outputs[k : k + 1] in ([], [""]) for k in indices))

    def no_operand(self, *indices: int) -> None:
        """Check that these operands are absent."""
        require(not any(self.given(k) for k in indices))

    def finish(self) -> list[ir.Node]:
        for node in self.nodes:
            node.input[:] = [self._results.get(i, i) for i in node.input]
            node.output[:] = [self._results.get(o, o) for o in node.output]
        ends = list(dict.fromkeys(filter(None, self.inputs))), list(self._results.values())
        proto = helper.make_function("", "body", *ends, self.nodes, [helper.make_opsetid("", OPSET)])
        return list(ir.serde.deserialize_function(proto))


def definition(call: OnnxCall) -> list[ir.Node]:
    """Return the nodes that compute an operator; none if it has no definition, or not in this form."""
    define = {"com.microsoft": _DEFINITIONS, "": _COMPOSED}.get(domain_of(call.node), {}).get(call.node.op_type)
    if define is None:
        return []
    body = Body(call)
    try:
        define(body)
    except Unreadable:
        return []
    return body.finish()


# ---------------------------------------------------------------- products


def _activated(f: Body, x: str, parameters: Sequence[float]) -> str:
    """Return the activation that a product ends in."""
    kind = f.attr("activation", "")
    if not kind:
        return x
    if kind == "Clip" and len(parameters) == 2:
        return f.op(kind, x, *(f.constant(np.float32(p)) for p in parameters))
    require(readers_of(kind) and len(parameters) <= 2)
    return f.op(kind, x, **dict(zip(("alpha", "beta"), parameters, strict=False)))


@_defines("FusedConv")
def _conv(f: Body) -> None:
    names = "auto_pad dilations group kernel_shape pads strides".split()
    attrs = {k: v for k in names if (v := f.call.attr(k)) is not None}
    y = f.op("Conv", *(f.given(k) for k in range(3)), **attrs)
    f.result(0, _activated(f, f.add(y, f.given(3)), f.attr("activation_params", [])))


@_defines("FusedGemm")
def _gemm(f: Body) -> None:
    attrs = {k: f.attr(k, d) for k, d in {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}.items()}
    parameters = [f.call.attr(f"activation_{k}") for k in ("alpha", "beta", "gamma")]
    y = f.op("Gemm", *(f.given(k) for k in range(3)), **attrs)
    f.result(0, _activated(f, y, [p for p in parameters if p is not None]))


@_defines("FusedMatMul TransposeMatMul")
def _mat_mul(f: Body) -> None:
    require(not f.attr("transBatchA", 0) and not f.attr("transBatchB", 0))
    operands = []
    for k, flag in enumerate(("transA", "transB")):
        transposed = f.attr(flag, 0) and f.rank(k) > 1
        order = [*range(f.rank(k) - 2), f.rank(k) - 1, f.rank(k) - 2] if transposed else []
        operands.append(f.op("Transpose", f.given(k), perm=order) if transposed else f.given(k))
    y, alpha = f.op("MatMul", *operands), f.attr("alpha", 1.0)
    f.result(0, y if alpha == 1 else f.op("Mul", y, f.constant(np.float32(alpha))))


# ---------------------------------------------------------------- norms


@_defines("SkipLayerNormalization SkipSimplifiedLayerNormalization")
def _skip_norm(f: Body) -> None:
    """Enter norm(x + skip + bias), whose sum is a result too."""
    f.no_result(1, 2)
    simple = "Simplified" in f.call.node.op_type
    beta, bias = ("", f.given(3)) if simple else (f.given(3), f.given(4))
    total = f.add(f.given(0), bias, f.given(1)) if bias else f.add(f.given(0), f.given(1))
    f.result(0, _norm(f, total, "RMSNormalization" if simple else "LayerNormalization", f.given(2), beta))
    f.result(3, total)


def _norm(f: Body, x: str, kind: str, gamma: str, beta: str) -> str:
    operands = [gamma, beta] if beta else [gamma]
    return f.op(kind, x, *operands, axis=-1, epsilon=f.attr("epsilon", 1e-12))


@_defines("EmbedLayerNormalization")
def _embed(f: Body) -> None:
    """Enter norm(words[ids] + positions[0, 1, ...] + segments[ids])."""
    ids, segments, positions = f.given(0), f.given(1), f.given(8)
    if not positions:
        zero, one = f.constant(np.int64(0)), f.constant(np.int64(1))
        positions = f.op("Range", zero, f.op("Gather", f.op("Shape", ids), one), one)
    rows = [f.op("Gather", f.given(2), ids, axis=0), f.op("Gather", f.given(3), positions, axis=0)]
    if segments and f.given(4):
        rows.append(f.op("Gather", f.given(4), segments, axis=0))
    total = f.add(*rows)
    f.result(0, _norm(f, total, "LayerNormalization", f.given(5), f.given(6)))
    f.result(2, total)
    if f.given(7):
        f.result(1, f.op("ReduceSum", f.given(7), f.constant([1]), keepdims=0))
    else:
        f.no_result(1)


# ---------------------------------------------------------------- attention


def _mask(f: Body, index: int, data: int) -> str:
    """Return a mask of keys as ONNX has it: true where a key counts, [B, 1, 1 or L, S].

    Args:
        index: of the mask, with 1 where a key counts [B, S] or [B, L, S]; or counts of keys [B].
        data: of an operand [B, S, ...].
    """
    if not f.given(index):
        return ""
    rank, mask = f.rank(index), f.given(index)
    if rank == 1:
        x, counts = f.call.operand(data), f.call.operand(index)
        require(x.rank == 3 and all(m.shape[0] == n.shape[0] for m, n in zip(x.metas, counts.metas, strict=True)))
        zero, one = f.constant(np.int64(0)), f.constant(np.int64(1))
        keys = f.op("Range", zero, f.op("Gather", f.op("Shape", f.given(data)), one), one)
        lengths = f.op("Unsqueeze", f.op("Cast", mask, to=onnx.TensorProto.INT64), f.constant([1]))
        mask, rank = f.op("Less", keys, lengths), 2
    require(rank in (2, 3))
    return f.op("Unsqueeze", f.op("Cast", mask, to=onnx.TensorProto.BOOL), f.constant([1, 2] if rank == 2 else [1]))


def _attention_of(f: Body, q: str, k: str, v: str, mask: str, bias: int, *, groups: int = 0, causal: int = 0) -> str:
    """Return attention of [B, L, heads * size], or of keys and values by head, with an addend of the scores.

    Args:
        groups: number of heads of keys and values, if it differs.
    """
    if mask and f.given(bias):
        mask = f.op("Where", mask, f.given(bias), f.constant(np.float32(f.attr("mask_filter_value", -10000.0))))
    heads = f.attr("num_heads", 0)
    attrs: dict[str, Any] = {"is_causal": causal or f.attr("unidirectional", 0)}
    attrs |= {"q_num_heads": heads, "kv_num_heads": groups or heads}
    attrs |= {"scale": f.call.attr("scale")} if f.call.attr("scale") else {}
    return f.op("Attention", q, k, v, *filter(None, [mask or f.given(bias)]), **attrs)


@_defines("Attention")
def _attention(f: Body) -> None:
    """Enter three products of x with parts of one weight, and attention of them."""
    f.no_operand(4, 6)
    f.no_result(1)
    w = f.call.operand(1)
    total = present(w.shape[1])
    require(not f.attr("do_rotary", 0))
    sizes = f.attr("qkv_hidden_sizes", [total // 3] * 3)
    products = [f.op("MatMul", f.given(0), w) for w in f.parts(f.given(1), 1, sizes)]
    if f.given(2):
        products = [f.add(y, bias) for y, bias in zip(products, f.parts(f.given(2), 0, sizes), strict=True)]
    q, k, v = products
    f.result(0, _attention_of(f, q, k, v, _mask(f, 3, 0), 5))


@_defines("MultiHeadAttention")
def _multi_head(f: Body) -> None:
    f.no_operand(6, 7, 8, 9)
    f.no_result(1, 2, 3)
    q, k, v = (f.given(i) for i in range(3))
    require((k and v) and f.rank(0) == 3 and f.rank(1) == f.rank(2) and f.rank(1) in (3, 4))
    by_head = f.rank(1) == 4
    if f.given(3):
        require(not by_head)
        biases = f.parts(f.given(3), 0, [present(f.call.operand(i).shape[-1]) for i in range(3)])
        q, k, v = (f.add(x, bias) for x, bias in zip((q, k, v), biases, strict=True))
    mask = _mask(f, 4, 1)
    if by_head:
        shape = f.constant([0, 0, f.attr("num_heads", 0), -1])
        q = f.op("Transpose", f.op("Reshape", q, shape), perm=[0, 2, 1, 3])
        y = f.op("Transpose", _attention_of(f, q, k, v, mask, 5), perm=[0, 2, 1, 3])
        f.result(0, f.op("Reshape", y, f.constant([0, 0, -1])))
    else:
        f.result(0, _attention_of(f, q, k, v, mask, 5))


@_defines("GroupQueryAttention")
def _grouped(f: Body) -> None:
    """Enter causal attention of whole sequences, whose keys and values are results too, by head.

    Lengths of sequences change nothing before their ends: later keys are hidden anyway, and what follows is padding.
    """
    f.no_operand(3, 4, 9, 10, 11)
    heads, groups = f.attr("num_heads", 0), f.attr("kv_num_heads", 0)
    others = {"local_window_size": -1, "softcap": 0.0, "smooth_softmax": 0, "k_quant_type": "NONE"}
    if f.rank(0) != 3 or any(
        f.attr(k, v) not in (v, v.encode() if isinstance(v, str) else v) for k, v in others.items()
    ):
        raise Unreadable
    q, k, v = (f.given(i) for i in range(3))
    if not k:
        width = f.call.operand(0).shape[-1]
        require(width is not None)
        size = width // (heads + 2 * groups)
        q, k, v = f.parts(q, 2, [heads * size, groups * size, groups * size])
    if f.attr("do_rotary", 0):
        q, k = (_with_rotary_embedding(f, x, count) for x, count in ((q, heads), (k, groups)))
    f.result(0, _attention_of(f, q, k, v, "", 10, groups=groups, causal=1))
    shape = f.constant([0, 0, groups, -1])
    for index, x in ((1, k), (2, v)):
        f.result(index, f.op("Transpose", f.op("Reshape", x, shape), perm=[0, 2, 1, 3]))


def _with_rotary_embedding(f: Body, x: str, heads: int) -> str:
    """Return queries or keys with the rotary embedding of positions 0, 1, ..."""
    sizes, zero, one = f.op("Shape", x, end=2), f.constant(np.int64(0)), f.constant(np.int64(1))
    positions = f.op("Expand", f.op("Range", zero, f.op("Gather", sizes, one), one), sizes)
    attrs = {"interleaved": f.attr("rotary_interleaved", 0), "num_heads": heads}
    return f.op("RotaryEmbedding", x, f.given(7), f.given(8), positions, **attrs)


@_defines("RotaryEmbedding")
def _rotary(f: Body) -> None:
    """Enter ONNX's own operator, whose positions come last."""
    table, x, positions = f.call.operand(2), f.call.operand(0), f.call.operand(1)
    require(not f.attr("is_packed_batching", 0) and f.attr("scale", 1.0) == 1 and positions.rank == 2)
    heads, rotated = f.attr("num_heads", 0), f.attr("rotary_embedding_dim", 0)
    if x.rank == 3 and not heads:
        width, half = present(x.shape[-1]), present(table.shape[-1])
        require(not rotated)
        heads = width // (2 * half)
    attrs = {"interleaved": f.attr("interleaved", 0), "num_heads": heads, "rotary_embedding_dim": rotated}
    f.result(0, f.op("RotaryEmbedding", f.given(0), f.given(2), f.given(3), f.given(1), **attrs))


# ---------------------------------------------------------------- older names of ONNX's own operators


@_defines("Trilu Pad GatherND Range Unique")
def _standard(f: Body) -> None:
    f.no_result(1, 2, 3)
    attrs = {k: f.call.attr(k) for k in f.call.node.attributes}
    f.result(0, f.op(f.call.node.op_type, *f.inputs, **attrs))


@_defines("ExpandDims")
def _expand_dims(f: Body) -> None:
    f.result(0, f.op("Unsqueeze", f.given(0), f.op("Reshape", f.given(1), f.constant([1]))))


# ---------------------------------------------------------------- ONNX's own operators that it defines by no others


@_composes("OneHot")
def _one_hot(f: Body) -> None:
    """Enter a choice between two values; an index from -depth to -1 counts from the end, others choose nothing."""
    depth = int(present(f.call.operand(1).constant).item())
    axis = f.attr("axis", -1) % (f.rank(0) + 1)
    shape = [-1, *[1] * (f.rank(0) - axis)]
    places, ends = (f.constant(np.arange(start, start + depth).reshape(shape)) for start in (0, -depth))
    index = f.op("Unsqueeze", f.op("Cast", f.given(0), to=onnx.TensorProto.INT64), f.constant([axis]))
    chosen = f.op("Or", f.op("Equal", index, places), f.op("Equal", index, ends))
    off, on = (f.op("Slice", f.given(2), f.constant([k]), f.constant([k + 1]), f.constant([0])) for k in (0, 1))
    f.result(0, f.op("Where", chosen, on, off))


@_composes("LRN")
def _local_response(f: Body) -> None:
    """Enter x / (bias + alpha * mean)^0.75, with means of squares over `size` channels, zero beyond the ends.

    Networks have this exponent, which two roots compute.
    """
    require(abs(f.attr("beta", 0.75) - 0.75) < 1e-6)
    size, x, shape = f.attr("size", 1), f.given(0), f.op("Shape", f.given(0))
    ends = [(size - 1) // 2, 0, size // 2, 0]
    lines = f.op("Reshape", f.op("Mul", x, x), f.constant([0, 1, present(f.call.operand(0).shape[1]), -1]))
    pooled = f.op("AveragePool", lines, kernel_shape=[size, 1], pads=ends, count_include_pad=1)
    mean = f.op("Mul", f.op("Reshape", pooled, shape), f.constant(np.float32(f.attr("alpha", 1e-4))))
    total = f.op("Add", mean, f.constant(np.float32(f.attr("bias", 1.0))))
    root = f.op("Sqrt", total)
    f.result(0, f.op("Div", x, f.op("Mul", root, f.op("Sqrt", root))))


@_composes("Tan")
def _tan(f: Body) -> None:
    f.result(0, f.op("Div", f.op("Sin", f.given(0)), f.op("Cos", f.given(0))))


@_composes("IsInf")
def _is_infinite(f: Body) -> None:
    signs = [s for s, name in ((1, "detect_positive"), (-1, "detect_negative")) if f.attr(name, 1)]
    require(signs)
    found = [f.op("Equal", f.given(0), f.constant(np.float32(s * np.inf))) for s in signs]
    f.result(0, f.op("Or", *found) if len(found) == 2 else found[0])


@_composes("ReverseSequence")
def _reverse(f: Body) -> None:
    """Enter a reversal of all steps, as of sequences that all have the full length."""
    axis, x, lengths = f.attr("time_axis", 0), f.call.operand(0), f.call.operand(1)
    require(lengths.numbers and all((n == m.shape[axis]).all() for n, m in zip(lengths.numbers, x.metas, strict=True)))
    f.result(0, f.op("Slice", f.given(0), *(f.constant([v]) for v in (-1, np.iinfo(np.int64).min, axis, -1))))


# ---------------------------------------------------------------- elements at places that depend on data

#: elements, of each row or in all, that are written one after the other
_MOST_WRITTEN = 8
_COMBINED = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}


def _hit(f: Body, index: str, axis: int, size: int, rank: int) -> str:
    """Return where indices along an axis, which may count from the end, are the place on it."""
    places = np.arange(size).reshape([-1 if k == axis else 1 for k in range(rank)])
    return f.op("Or", *(f.op("Equal", index, f.constant(p)) for p in (places, places - size)))


def _put(f: Body, y: str, hit: str, new: str) -> str:
    """Return y with new elements, or their combination with those of y, where `hit` is true."""
    how = _COMBINED.get(f.attr("reduction", "none"))
    return f.op("Where", hit, new if how is None else f.op(how, y, new), y)


def _same_sizes(x: Operand, other: Operand, axes: Sequence[int]) -> bool:
    return all(m.shape[k] == o.shape[k] for m, o in zip(x.metas, other.metas, strict=True) for k in axes)


@_composes("ScatterElements Scatter")
def _scatter_elements(f: Body) -> None:
    """Enter a selection for each of few elements of a row, as at places that TopK or ArgMax find."""
    x, index, axis = f.call.operand(0), f.call.operand(1), f.attr("axis", 0) % f.rank(0)
    count, y = present(index.shape[axis]), f.given(0)
    require(1 <= count <= _MOST_WRITTEN and _same_sizes(x, index, [k for k in range(x.rank) if k != axis]))
    parts = (f.parts(f.given(k), axis, [1] * count) for k in (1, 2))
    for place, new in zip(*parts, strict=True):
        y = _put(f, y, _hit(f, place, axis, present(x.shape[axis]), x.rank), new)
    f.result(0, y)


@_composes("ScatterND")
def _scatter_nd(f: Body) -> None:
    """Enter a selection for each of few parts of x, as of a cache that a step writes."""
    x, index = f.call.operand(0), f.call.operand(1)
    axes, count = present(index.shape[-1]), int(np.prod([present(n) for n in index.shape[:-1]]))
    rest, y = x.shape[axes:], f.given(0)
    require(1 <= count <= _MOST_WRITTEN and axes and rest.count(None) <= 1)
    rows = f.parts(f.op("Reshape", f.given(1), f.constant([count, axes])), 0, [1] * count)
    shape = f.constant([count, *(-1 if n is None else n for n in rest)])
    for row, new in zip(rows, f.parts(f.op("Reshape", f.given(2), shape), 0, [1] * count), strict=True):
        places = (f.op("Reshape", p, f.constant(np.ones(x.rank, np.int64))) for p in f.parts(row, 1, [1] * axes))
        hits = [_hit(f, place, k, present(x.shape[k]), x.rank) for k, place in enumerate(places)]
        hit = hits[0]
        for other in hits[1:]:
            hit = f.op("And", hit, other)
        y = _put(f, y, hit, new)
    f.result(0, y)
