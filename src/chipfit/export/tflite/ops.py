"""Writers of canonical operators in TensorFlow Lite: cells of the table of operators, which may name a function here.

A function receives the `TfliteBuilder`, the node (channels last) and the tensors that it must fill. `w.integer` is true
where operands are integers. Composites without a row are decomposed before (`passes.decompose`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema
from flatbuffers import flexbuffers

from chipfit.engine.curve_table import table_of
from chipfit.export.tflite.builder import TfliteBuilder
from chipfit.export.tflite.file import Quantization, quantization
from chipfit.export.tflite.recurrent import lstm
from chipfit.graph.ir import Node
from chipfit.graph.linear import is_depthwise
from chipfit.operators.table import OPS, by_name, dictated_outputs, read_column, refused, resolve
from chipfit.quantizers.stored import Stored

Write = Callable[[TfliteBuilder, Node, Sequence[int]], None]
SAME, VALID = schema.Padding.SAME, schema.Padding.VALID


@dataclass(frozen=True, slots=True, kw_only=True)
class TfliteOp:
    """The form of a canonical operator in the file."""

    kind: str  #: the schema's operator; "" if attributes decide
    write: Write
    moves: bool  #: its integer kernel is pass-through: operands and results have equal scales and zero points
    integer: bool = False  #: it has an integer kernel; else it is written in float, between DEQUANTIZE and QUANTIZE
    fuses: bool = False  #: an activation can be fused into it
    alone: bool = False  #: it has an integer form only
    same: bool = False  #: its result is its operand, so that the file has no operator for it
    #: bits -> scale and zero point that its integer kernel demands of its result
    output: Mapping[int, tuple[float, int]] = field(default_factory=dict)

    def accepts(self, result: Stored) -> bool:
        """Return whether the integer kernel can have a result of these numbers."""
        scale, zero = self.output.get(result.grid.bits, (None, None))
        return scale is None or (result.scale.tolist(), result.zero_point.tolist()) == (scale, zero)


#: operators whose kernels compute with integers of 32 bits, but not of 64
_WITHOUT_INT64 = ("ABS", "SIGN", "POW", "DIV", "FLOOR_DIV")


def _plain(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write operands and results as they are."""
    x, result = w.reads(n), w.tensors[y[0]]
    if w.kind not in _WITHOUT_INT64 or result.type != schema.TensorType.INT64:
        return w.op(w.kind, x, y)
    short = w.constant(np.int32(0))
    x = [_change_type(w, i, w.temporary(list(w.tensors[i].shape), short)) for i in x]
    computed = w.temporary(list(result.shape), short)
    w.op(w.kind, x, computed)
    _change_type(w, computed, y[0])


# ---------------------------------------------------------------- pieces


def _axis(w: TfliteBuilder, n: Node, of: str) -> int:
    return n.attrs["axis"] % len(w.shape(of))


def _reshape(w: TfliteBuilder, x: int, shape: Sequence[int], y: int) -> None:
    w.op("RESHAPE", [x, w.ints(*shape)], y, newShape=list(shape))


def _permute(w: TfliteBuilder, x: int, perm: Sequence[int], y: int) -> None:
    w.op("TRANSPOSE", [x, w.ints(*perm)], y)


def _open(w: TfliteBuilder, shape: Sequence[int]) -> list[int]:
    """Return a shape whose first size is the batch, with -1 for an open batch."""
    return list(shape) if w.batch else [-1, *shape[1:]]


#: attributes by spatial axis -> their value for an axis of size 1
_BY_AXIS = {"stride": 1, "padding": (0, 0), "dilation": 1, "kernel": 1, "output_padding": 0}


Window = Callable[[Node, int, list[int], int, list[int]], None]


def _spatial(w: TfliteBuilder, n: Node, y: Sequence[int], write: Window) -> None:
    """Call `write(node, x, shape of x, y, shape of y)` for an image.

    One spatial axis becomes an image of height 1; of three, two neighbours that no window spans become one. The maximum
    over three axes is that over two of them, then over the third.
    """
    _as_image(w, n, w.read(n.data), list(w.shape(n.data)), y[0], list(w.shape(n.output)), write)


def _as_image(w: TfliteBuilder, n: Node, x: int, a: list[int], y: int, b: list[int], write: Window) -> None:
    if len(a) == 4 or w.kind == "CONV_3D":
        return write(n, x, a, y, b)
    windows = {key: (n.attrs[key], one) for key, one in _BY_AXIS.items() if key in n.attrs}
    k = _unspanned_pair(n) if len(a) == 5 else 0
    w.require(n, k is not None or n.facts.moves, "its windows have three axes; use layers over two")
    if k is None:
        between = [*a[:2], *b[2:]]
        flat = {key: (one, *v[1:]) for key, (v, one) in windows.items()}
        deep = {key: (v[0], one, one) for key, (v, one) in windows.items()}
        middle = w.temporary(between, y)
        _as_image(w, n.with_(attrs={**n.attrs, **flat}), x, a, middle, between, write)
        return _as_image(w, n.with_(attrs={**n.attrs, **deep}), middle, between, y, b, write)
    if len(a) == 5:
        gone = max(k - 1, 0)
        attrs = {key: (*v[:gone], *v[gone + 1 :]) for key, (v, _) in windows.items()}
        flat_a, flat_b = ([*s[:k], s[k] * s[k + 1], *s[k + 2 :]] for s in (a, b))
    else:
        attrs = {key: (one, *v) for key, (v, one) in windows.items()}
        flat_a, flat_b = ([s[0], 1, *s[1:]] for s in (a, b))
    image, result = w.images.get(x), w.temporary(flat_b, y)
    if image is None or len(a) == 5:
        image = w.temporary(flat_a, x)
        _reshape(w, x, _open(w, flat_a), image)
    write(n.with_(attrs={**n.attrs, **attrs}), image, flat_a, result, flat_b)
    _reshape(w, result, _open(w, b), y)
    if len(a) == 3:
        w.images |= {x: image, y: result}


def _unspanned_pair(n: Node) -> int | None:
    """Return the first of two neighbouring axes, the batch or spatial, along which windows are single elements."""

    def spans(axis: int) -> bool:
        return axis > 0 and any(n.attrs[key][axis - 1] != one for key, one in _BY_AXIS.items() if key in n.attrs)

    return next((k for k in (1, 2, 0) if "kernel" in n.attrs and not spans(k) and not spans(k + 1)), None)


def per_axis(n: Node, **of: str) -> dict[str, int]:
    """Return options by spatial axis: `per_axis(n, stride="stride{}")` gives strideH and strideW, and strideD in 3D."""
    return {
        option.format(axis): step
        for key, option in of.items()
        for axis, step in zip("DHW"[-len(n.attrs[key]) :], n.attrs[key], strict=True)
    }


def window_placement(
    n: Node, sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int]
) -> tuple[int, list[tuple[int, int]] | None]:
    """Return SAME or VALID if one places the windows as the node does, else VALID and the padding to apply first."""
    same, valid, pads = True, True, []
    dilation = n.attrs.get("dilation", (1,) * len(kernel))
    axes = zip(sizes, out, kernel, n.attrs["stride"], dilation, n.attrs["padding"], strict=True)
    for i, o, k, s, d, (low, _) in axes:
        covered = (o - 1) * s + d * (k - 1) + 1  # elements under the windows, counted from the first padded one
        total = max(covered - i, 0)
        same &= o == -(-i // s) and low == total // 2
        valid &= low == 0 and covered <= i
        pads.append((low, max(covered - i - low, 0)))
    if valid:
        return VALID, None
    return (SAME, None) if same else (VALID, pads)


def _padded(
    w: TfliteBuilder, n: Node, x: int, shape: Sequence[int], pads: Sequence[tuple[int, int]], lowest: bool = False
) -> int:
    """Pad the spatial axes of x with zeros, or with the lowest value there is."""
    pairs = [(0, 0), *pads, (0, 0)]
    y = w.temporary([s + a + b for s, (a, b) in zip(shape, pairs, strict=True)], x)
    ins = [x, w.constant(np.array(pairs, np.int32))]
    if lowest:
        w.op("PADV2", [*ins, _lowest(w, n)], y)
    else:
        w.op("PAD", ins, y)
    return y


def _lowest(w: TfliteBuilder, n: Node) -> int:
    stored = w.plan.stored(n.data)
    if not w.integer or stored is None:
        return w.scalar(float(np.finfo(np.float32).min))
    return _quantized(w, n, np.array(stored.grid.qmin))


def _quantized(w: TfliteBuilder, n: Node, value: np.ndarray) -> int:
    """Add a constant integer on the grid of a node's operand."""
    stored = w.plan[n.data]
    qparams = Quantization(stored.scale.numpy(), stored.zero_point.numpy())
    return w.constant(value, kind=w.tensors[w.read(n.data)].type, numbers=qparams)


# ---------------------------------------------------------------- operators with weights

#: schema's operator -> canonical axes of the kernel in the file's order
_KERNELS = {
    "CONV_2D": (0, 2, 3, 1),
    "DEPTHWISE_CONV_2D": (1, 2, 3, 0),
    "TRANSPOSE_CONV": (1, 2, 3, 0),
    "CONV_3D": (2, 3, 4, 1, 0),
}


def _kernel(w: TfliteBuilder, n: Node) -> tuple[int, list[int]]:
    """Return the kernel (with height 1 if it has one spatial axis) and its spatial sizes."""
    order, sizes = _KERNELS[w.kind], w.shape(n.weight)[2:]
    whole = [*[1] * (2 - len(sizes)), *sizes]
    if n.weight not in w.graph.weights:
        return _computed_kernel(w, n, [*w.shape(n.weight)[:2], *whole], order), whole

    def change(a: np.ndarray) -> np.ndarray:
        return (a[:, :, None] if a.ndim == 3 else a).transpose(order)

    return w.weight(n.weight, change, order.index(n.facts.weight_axis)), whole


def _computed_kernel(w: TfliteBuilder, n: Node, shape: list[int], order: Sequence[int]) -> int:
    """Write the transposition of a kernel that the network computes, which is one of floats."""
    w.require(n, not w.integer, "its weight is computed at run time")
    x = w.read(n.weight)
    if len(w.shape(n.weight)) < len(shape):
        image = w.temporary(shape, x)
        _reshape(w, x, shape, image)
        x = image
    turned = w.temporary([shape[d] for d in order], x)
    _permute(w, x, order, turned)
    return turned


def _bias(w: TfliteBuilder, n: Node, channels: int) -> int:
    """Return the bias, or zeros if there is none: the kernels read one."""
    if not w.integer and n.bias is not None:
        return w.weight(n.bias) if n.bias in w.graph.weights else w.read(n.bias)
    if not w.integer:
        return w.constant(np.zeros(channels, np.float32))
    x, k = w.plan[n.data], w.plan[n.weight]
    scale = (x.scale * k.scale).reshape(-1).numpy()  # as many as the weight has, whatever the shape in the plan
    if n.bias is not None:
        return w.weight(n.bias, scale=scale, wide=x.grid.bits > 8)
    zeros = np.zeros(channels, np.int64 if x.grid.bits > 8 else np.int32)
    return w.constant(zeros, numbers=Quantization(scale, np.zeros(len(scale), np.int64)))


def _conv(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    if n.op == "Conv1D" and is_depthwise(w.graph, n):
        w.kind = "DEPTHWISE_CONV_2D"

    def write(m: Node, x: int, a: list[int], out: int, b: list[int]) -> None:
        kernel, sizes = _kernel(w, n)
        padding, pads = window_placement(m, a[1:-1], b[1:-1], sizes)
        if pads is not None:
            x = _padded(w, m, x, a, pads)
        how = per_axis(m, stride="stride{}", dilation="dilation{}Factor")
        if w.kind == "DEPTHWISE_CONV_2D":
            how["depthMultiplier"] = b[-1] // a[-1]
        ins = [x, kernel, _bias(w, n, b[-1])]
        w.op(w.kind, ins, out, padding=padding, fusedActivationFunction=w.fused, **how)

    _spatial(w, n, y, write)


def _transpose_conv(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write a transposed convolution; padding that SAME does not place is cut off afterwards."""
    w.require(n, all(d == 1 for d in n.attrs["dilation"]), "it has dilation")

    def write(m: Node, x: int, a: list[int], out: int, b: list[int]) -> None:
        kernel, sizes = _kernel(w, n)
        axes = list(zip(a[1:3], b[1:3], sizes, m.attrs["stride"], strict=True))
        low = [p[0] for p in m.attrs["padding"]]
        full = [(i - 1) * s + k for i, _, k, s in axes]
        cut = [max((-(-o // s) - 1) * s + k - o, 0) // 2 for _, o, k, s in axes]  # what SAME cuts off before
        same = cut == low and all(-(-o // s) == i for i, o, _, s in axes)
        whole = same or (not any(low) and all(f <= o < f + s for f, (_, o, _, s) in zip(full, axes, strict=True)))
        inside = all(p + o <= f for p, o, f in zip(low, b[1:3], full, strict=True))
        w.require(n, whole or inside, "its output padding reaches beyond the last window")
        size = b if whole else [b[0], *full, b[3]]
        result = out if whole else w.temporary(size, out)
        how = {"padding": SAME if same else VALID, "fusedActivationFunction": w.fused, **per_axis(m, stride="stride{}")}
        w.op(w.kind, [w.ints(*size), kernel, x, _bias(w, n, b[3])], result, **how)
        if not whole:
            w.op("SLICE", [result, w.ints(0, *low, 0), w.ints(-1, *b[1:3], -1)], out)

    _spatial(w, n, y, write)


def _dynamic_quantize(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write nothing: the kernel behind it quantizes its input dynamically if its weights are integers."""
    a = n.attrs
    why = f"integers {a['qmin']}..{a['qmax']} with a range for each {a['per']}; kernels have -128..127, by row"
    w.require(n, (a["per"], a["qmin"], a["qmax"]) == ("row", -128, 127), why)
    readers = w.graph.users().get(n.output, [])
    linear = readers and all(r.facts.kind == "linear" and w.plan.quantized(r.weight) for r in readers)
    w.require(n, linear, "only linear layers with quantized weights quantize their input dynamically")
    w.index[n.output] = w.read(n.data)
    w.dynamic.add(n.output)


def _linear(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    weight = w.weight(n.weight) if w.integer or n.weight in w.graph.weights else w.read(n.weight)
    ins = [w.read(n.data), weight, _bias(w, n, w.shape(n.weight)[0])]
    w.op(w.kind, ins, y, fusedActivationFunction=w.fused, keepNumDims=len(w.shape(n.output)) != 2)


def _mat_mul(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.require(n, all(len(w.shape(i or "")) >= 2 for i in n.inputs), "an operand is a vector")
    w.op(w.kind, w.reads(n), y)


def _prelu(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write slopes in the layout of the data, which lie channels last."""
    shape = (*[1] * (len(w.shape(n.data)) - 2), -1)
    slopes = w.weight(n.weight, lambda a: np.moveaxis(a, 0, -1) if a.ndim > 1 else a.reshape(shape))
    w.op(w.kind, [w.read(n.data), slopes], y)


def _attention(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write attention as `passes.decompose` does, with a transposing product and a finite mask."""
    q, k, v = (i or "" for i in n.inputs[:3])
    rows, columns = w.shape(q), w.shape(k)
    shape, mask = [*rows[:-1], columns[-2]], n.operand("mask")

    def step(kind: str, *ins: int, **options: Any) -> int:
        s = w.temporary(shape)
        w.op(kind, ins, s, **options)
        return s

    scale = n.attrs["scale"] if n.attrs["scale"] is not None else rows[-1] ** -0.5
    s = step("MUL", step("BATCH_MATMUL", w.read(q), w.read(k), adjY=True), w.scalar(scale))
    if n.attrs["is_causal"]:
        s = step("ADD", s, w.constant(np.triu(np.full((rows[-2], columns[-2]), -1e30, np.float32), 1)))
    if mask is not None:
        s = (
            step("ADD", s, w.read(mask))
            if w.graph.is_float(mask)
            else step("SELECT_V2", w.read(mask), s, w.scalar(-1e30))
        )
    w.op("BATCH_MATMUL", [step("SOFTMAX", s, beta=1.0), w.read(v)], y)


# ---------------------------------------------------------------- element by element


def _binary(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    how = {} if n.op == "Mul" else {"potScaleInt16": False}  # true is another kernel, for power-of-two scales
    w.op(w.kind, w.reads(n), y, fusedActivationFunction=w.fused, **how)


def _hard_sigmoid(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    shifted, relu6 = w.temporary(w.shape(n.output)), schema.ActivationFunctionType.RELU6
    w.op("ADD", [w.read(n.data), w.scalar(3.0)], shifted, fusedActivationFunction=relu6)
    w.op("MUL", [shifted, w.scalar(1.0 / 6.0)], y)


def _leaky_relu(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.op(w.kind, w.reads(n), y, alpha=n.attrs["negative_slope"])


def _elu(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write ELU, whose slope is 1 in the schema; another one, in float, as relu(x) + alpha elu(min(x, 0))."""
    x, alpha = w.read(n.data), n.attrs["alpha"]
    if alpha == 1:
        return w.op(w.kind, [x], y)
    w.require(n, not w.integer, f"8-bit ELU with the slope {alpha:g}")
    low, below, scaled, above = (w.temporary(w.shape(n.output)) for _ in range(4))
    w.op("MINIMUM", [x, w.scalar(0.0)], low)
    w.op(w.kind, [low], below)
    w.op("MUL", [below, w.scalar(alpha)], scaled)
    w.op("RELU", [x], above)
    w.op("ADD", [above, scaled], y)


def _gelu(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.op(w.kind, w.reads(n), y, approximate=n.attrs["approximate"] == "tanh")


def _curve(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write the table of a function of 8-bit integers as a GATHER: place = integer - the least one."""
    if w.kind and not w.integer:
        return _plain(w, n, y)
    x, (operand, result) = w.read(n.data), (w.plan[v] for v in (n.data, n.output))
    w.require(n, w.integer and operand.grid.bits <= 8, "it is a table of 8-bit integers")
    shape, low = w.shape(n.output), w.constant(np.int32(-operand.grid.qmin))
    q, place = w.temporary(shape, low), w.temporary(shape, low)
    _change_type(w, x, q)
    w.op("ADD", [q, low], place, fusedActivationFunction=0, potScaleInt16=False)
    numbers = Quantization(result.scale.numpy(), result.zero_point.numpy())
    table = w.constant(table_of(n, operand, result).numpy(), kind=w.tensors[y[0]].type, numbers=numbers)
    w.op("GATHER", [table, place], y, axis=0)


#: bounds -> rectifier of the schema
_RECTIFIERS = {(0.0, None): "RELU", (0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1", (0.0, 1.0): "RELU_0_TO_1"}


def fused_code(act: Node) -> int:
    """Return the number of an activation that can be fused into another operator; that of NONE for others."""
    if act.clip_range is None or act.op not in OPERATORS:
        return schema.ActivationFunctionType.NONE
    kind = OPERATORS[act.op].kind or _RECTIFIERS.get((act.attrs["min"], act.attrs["max"]), "NONE")
    return getattr(schema.ActivationFunctionType, kind, schema.ActivationFunctionType.NONE)


def _clamp(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    ends = (n.attrs["min"], n.attrs["max"])
    if ends in _RECTIFIERS:
        return w.op(_RECTIFIERS[ends], w.reads(n), y)
    w.require(n, not w.integer, f"8-bit clipping to {ends}")
    x, steps = w.read(n.data), [(k, e) for k, e in zip(("MAXIMUM", "MINIMUM"), ends) if e is not None]
    for kind, end in steps:
        out = y[0] if kind == steps[-1][0] else w.temporary(w.shape(n.output))
        w.op(kind, [x, w.scalar(end)], out)
        x = out


def _softmax(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write an operator over the last axis, such as a softmax, with transpositions around it for another axis."""
    x, a = w.read(n.data), w.shape(n.data)
    axis, how = _axis(w, n, n.data), {"beta": 1.0} if n.op == "Softmax" else {}
    if axis == len(a) - 1:
        return w.op(w.kind, [x], y, **how)
    perm = [*(d for d in range(len(a)) if d != axis), axis]
    moved = [a[d] for d in perm]
    image, result = w.temporary(moved, x), w.temporary(moved, y[0])
    _permute(w, x, perm, image)
    w.op(w.kind, [image], result, **how)
    _permute(w, result, [perm.index(d) for d in range(len(a))], y[0])


def _cast(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    _change_type(w, w.read(n.data), y[0])


def _change_type(w: TfliteBuilder, x: int, y: int) -> int:
    w.op("CAST", [x], y, inDataType=w.tensors[x].type, outDataType=w.tensors[y].type)
    return y


# ---------------------------------------------------------------- pools and reductions


def _pool(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.require(n, all(d == 1 for d in n.attrs.get("dilation", ())), "its window is dilated")

    def write(m: Node, x: int, a: list[int], out: int, b: list[int]) -> None:
        padding, pads = window_placement(m, a[1:3], b[1:3], m.attrs["kernel"])
        if w.kind == "AVERAGE_POOL_2D":  # SAME leaves the padding out of the mean
            around = m.attrs["padding"]
            if n.attrs["count_include_pad"] and any(p for pair in around for p in pair):
                x = _padded(w, m, x, a, around)
                wide = [s + sum(pair) for s, pair in zip(a[1:3], around, strict=True)]
                plain = m.with_(attrs={**m.attrs, "padding": ((0, 0),) * 2})
                padding, pads = window_placement(plain, wide, b[1:3], m.attrs["kernel"])
            if pads is not None:  # SAME centres windows if the stride is 1; of these every stride-th is kept
                steps = list(m.attrs["stride"])
                centred = all(low == (k - 1) // 2 for (low, _), k in zip(around, m.attrs["kernel"], strict=True))
                same = centred and [-(-i // s) for i, s in zip(a[1:3], steps, strict=True)] == [*b[1:3]]
                w.require(n, same, "its windows reach beyond what counts, and not as those of SAME")
                every = w.temporary(a, x)
                write(m.with_(attrs={**m.attrs, "stride": (1, 1)}), x, a, every, a)
                ends = ([0] * 4, [0] * 4, [1, *steps, 1])
                return w.op("STRIDED_SLICE", [every, *(w.ints(*e) for e in ends)], out, beginMask=15, endMask=15)
        if pads is not None:
            x = _padded(w, m, x, a, pads, lowest=True)
        (height, width), how = m.attrs["kernel"], per_axis(m, stride="stride{}")
        how |= {"filterHeight": height, "filterWidth": width, "fusedActivationFunction": w.fused}
        w.op(w.kind, [x], out, padding=padding, **how)

    _spatial(w, n, y, write)


#: most int8 integers that XNNPACK adds rightly in its kernel for neighbours; from 8,256 on, zeros have a mean of 128
_NEIGHBOURS = 8192


def _reduce(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    rank = len(w.shape(n.data))
    axes = [a % rank for a in n.attrs.get("axes", range(1, rank - 1))]
    if w.kind == "MEAN" and w.integer:
        return _mean(w, n, axes, y[0])
    w.op(w.kind, [w.read(n.data), w.ints(*axes)], y, keepDims=bool(n.attrs.get("keepdims", True)))


def _mean(w: TfliteBuilder, n: Node, axes: Sequence[int], y: int) -> None:
    """Write a mean of integers; one over many neighbours as if an axis of size 1 followed them.

    On x86 processors without VNNI, XNNPACK's kernel for neighbours adds more than `_NEIGHBOURS` of them wrongly in 16
    bits; its kernel for integers with others between them does not.
    """
    x, shape, known = w.read(n.data), w.shape(n.data), w.open_shape(n.data)
    keep, first = bool(n.attrs.get("keepdims", True)), len(shape)
    while first - 1 in axes:
        first -= 1
    before, count = known[:first], math.prod(shape[first:])
    result = w.open_shape(n.output)
    if count <= _NEIGHBOURS or max(sum(s < 0 for s in sizes) for sizes in (known, result)) > 1:
        return w.op("MEAN", [x, w.ints(*axes)], y, keepDims=keep)
    others = [a for a in axes if a < first]
    kept = [s for a, s in enumerate(shape[:first]) if a not in others]
    apart, mean = w.temporary([*shape[:first], count, 1], x), w.temporary([*kept, 1], y)
    _reshape(w, x, [*before, -1 if min(known[first:]) < 0 else count, 1], apart)
    w.op("MEAN", [apart, w.ints(*others, first)], mean, keepDims=False)
    _reshape(w, mean, result, y)


def _sum(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write sums of integers as means, whose scale is the n-th part, times n: LiteRT's reference SUM is faulty."""
    if not w.integer:
        return _reduce(w, n, y)
    x, shape = w.read(n.data), w.shape(n.data)
    axes = [a % len(shape) for a in n.attrs["axes"]]
    known = all(w.open_shape(n.data)[a] >= 0 for a in axes)
    w.require(n, known, "it adds up an axis whose size is open, unless `batch` is given")
    count, scale = math.prod(shape[a] for a in axes), w.plan[n.output].scale
    mean = w.temporary(w.shape(n.output), y[0])
    w.tensors[mean].quantization = quantization(
        Quantization((scale / count).numpy(), w.plan[n.output].zero_point.numpy())
    )
    _mean(w, n, axes, mean)
    one = Quantization(np.array(count, np.float32), np.array(0))
    w.op("MUL", [mean, w.constant(np.array(1), kind=w.tensors[x].type, numbers=one)], y)


def _arg_max(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    x, a, axis = w.read(n.data), w.shape(n.data), n.attrs["axis"]
    if w.tensors[x].type == schema.TensorType.INT64:  # the kernel reads no other integers than int32
        x = _change_type(w, x, w.temporary(a, w.constant(np.int32(0))))
    if axis is None:
        a, axis = (math.prod(a),), 0
        flat = w.temporary(a, x)
        _reshape(w, x, [-1], flat)
        x = flat
    axis, keep = axis % len(a), n.attrs["keepdims"]
    result = w.temporary([s for k, s in enumerate(a) if k != axis], y[0]) if keep else y[0]
    w.op(w.kind, [x, w.constant(np.int32(axis))], result, outputType=w.tensors[y[0]].type)
    if keep:
        _reshape(w, result, w.open_shape(n.output), y[0])


def _cum_sum(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.op(w.kind, [w.read(n.data), w.constant(np.int32(n.attrs["axis"]))], y)


def _least(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write the least as the largest of the negated numbers; quantized values are negated in 32 bits."""
    x, like, shapes = w.read(n.data), y[0], (w.shape(n.data), w.shape(n.output))
    if w.integer:
        x, like = w.temporary(shapes[0], w.constant(np.int32(0))), w.constant(np.int32(0))
        _change_type(w, w.read(n.data), x)
    negated, values, least = (w.temporary(shapes[k], like) for k in (0, 1, 1))
    w.op("NEG", [x], negated)
    _top_k(w, n.with_(attrs={**n.attrs, "largest": True}), [values, y[1]], negated)
    w.op("NEG", [values], least if w.integer else y[0])
    if w.integer:
        _change_type(w, least, y[0])


def _detections(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.require(n, w.shape(n.data)[0] == 1, "its kernel takes one sample: write it with batch=1")
    w.custom_op(w.kind, w.reads(n), y, bytes(flexbuffers.Dumps(dict(n.attrs))))


def _top_k(w: TfliteBuilder, n: Node, y: Sequence[int], data: int | None = None) -> None:
    """Write TOPK_V2, which looks for the largest along the last axis and has indices of 32 bits.

    The least are the largest of the negated numbers.
    """
    if not n.attrs["largest"]:
        return _least(w, n, y)
    x = w.read(n.data) if data is None else data
    axis, a, b = _axis(w, n, n.data), list(w.shape(n.data)), list(w.shape(n.output))
    swap = [d for d in range(len(a)) if d != axis] + [axis]
    moved, k = swap != sorted(swap), w.constant(np.int32(b[axis]))
    inner, result = [a[d] for d in swap], [b[d] for d in swap]
    if moved:
        image = w.temporary(inner, x)
        _permute(w, x, swap, image)
        x = image
    values = w.temporary(result, y[0]) if moved else y[0]
    indices = w.temporary(result, k)
    w.op(w.kind, [x, k], [values, indices])
    if moved:
        back = [swap.index(d) for d in range(len(a))]
        _permute(w, values, back, y[0])
        turned = w.temporary(b, k)
        _permute(w, indices, back, turned)
        indices = turned
    _change_type(w, indices, y[1])


# ---------------------------------------------------------------- pass-through


#: number of operands that TensorFlow Lite Micro concatenates at most
_MOST_OPERANDS = 10


def _join(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Join operands; of many that are concatenated, some at a time first."""
    parts, axis = w.reads(n), _axis(w, n, n.output)
    if w.kind == "PACK":
        return w.op(w.kind, parts, y, axis=axis, valuesCount=len(n.inputs))
    sizes, shape = [w.shape(i)[axis] for i in n.inputs if i is not None], list(w.shape(n.output))
    while len(parts) > _MOST_OPERANDS:
        starts = range(0, len(parts), _MOST_OPERANDS)
        chunks = [parts[k : k + _MOST_OPERANDS] for k in starts]
        sizes = [sum(sizes[k : k + _MOST_OPERANDS]) for k in starts]
        parts = [w.temporary([*shape[:axis], s, *shape[axis + 1 :]], y[0]) for s in sizes]
        for chunk, part in zip(chunks, parts, strict=True):
            w.op(w.kind, chunk, part, axis=axis)
    w.op(w.kind, parts, y, axis=axis)


def _unstack(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    w.op(w.kind, w.reads(n), y, num=len(y), axis=_axis(w, n, n.data))


def _split(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    x, axis, sizes = w.read(n.data), w.constant(np.int32(_axis(w, n, n.data))), n.attrs["sizes"]
    if len(set(sizes)) == 1:
        w.op("SPLIT", [axis, x], y, numSplits=len(y))
    else:
        w.op("SPLIT_V", [x, w.ints(*sizes), axis], y, numSplits=len(y))


def _as_shape(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    shape = w.open_shape(n.output)
    w.require(n, shape.count(-1) <= 1, "more than one axis is only known at run time, unless `batch` is given")
    x = w.read(n.data)
    _reshape(w, w.images.get(x, x), shape, y[0])


def _requantize(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    (_plain if w.integer else _as_shape)(w, n, y)


def _transpose(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    rank = len(w.shape(n.data))
    _permute(w, w.read(n.data), [d % rank for d in n.attrs["perm"]], y[0])


def _expand(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write a BROADCAST_TO, which microcontrollers have too, or a TILE, which leaves sizes open."""
    x, a, b = w.read(n.data), w.shape(n.data), w.shape(n.output)
    if n.op == "Expand" and -1 not in w.open_shape(n.output):
        return w.op(w.kind, [x, w.ints(*b)], y)
    if len(a) < len(b):
        a = (1,) * (len(b) - len(a)) + a
        lifted = w.temporary(a, x)
        _reshape(w, x, a if a[0] == 1 else _open(w, a), lifted)
        x = lifted
    has_kernel = not w.short or n.op != "Expand"
    w.require(n, has_kernel, "so many copies need a TILE, which microcontrollers lack, unless `batch` is given")
    w.op("TILE", [x, w.ints(*(q // p for p, q in zip(a, b, strict=True)))], y)


#: axes of tensors that microcontrollers slice
_MOST_SLICED = 4


def _slice(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write a STRIDED_SLICE, on microcontrollers between two RESHAPEs if there are many axes."""
    rank, axis, select = len(w.shape(n.data)), _axis(w, n, n.data), n.op == "Select"
    if select:  # one element, whatever the end is, of an axis that is dropped
        start, end, step = n.attrs["index"], None, 1
    else:
        start, end, step = n.attrs["start"], n.attrs["end"], n.attrs["step"]
    x, out, shape, sizes = w.read(n.data), y, w.shape(n.data), w.open_shape(n.data)
    merges = w.short and rank > _MOST_SLICED and -1 not in sizes[axis:]
    if merges:  # [before, axis, after]
        whole, after = x, math.prod(shape[axis + 1 :])
        x, part = (
            w.temporary((math.prod(shape[:axis]), k, after), y[0])
            for k in (shape[axis], 1 if select else w.shape(n.output)[axis])
        )
        _reshape(w, whole, [-1 if -1 in sizes else math.prod(shape[:axis]), shape[axis], after], x)
        rank, axis, select, y = 3, 1, False, [part]
        end = end if end is not None or n.op != "Select" else start + 1 or None
    bounds = [[0] * rank, [0] * rank, [1] * rank]
    for ends, value in zip(bounds, (start, end or 0, step)):
        ends[axis] = value
    one = 1 << axis
    others = (1 << rank) - 1 - one
    masks = {"beginMask": others, "endMask": others | (one if end is None else 0)}
    w.op(w.kind, [x, *(w.ints(*ends) for ends in bounds)], y, **masks, shrinkAxisMask=one if select else 0)
    if merges:
        _reshape(w, y[0], w.open_shape(n.output), out[0])


def _gather(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write a GATHER; constant indices that count from the end are made positive."""
    x, index, axis = w.read(n.data), n.operand("index") or "", _axis(w, n, n.data)
    if index in w.graph.weights:
        w.pick(x, w.graph.weights[index].remainder(w.shape(n.data)[axis]).numpy(), axis, y[0])
    else:
        w.op(w.kind, [x, w.read(index)], y, axis=axis)


def _gather_elements(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write a GATHER within every row, with transpositions around it if the rows do not lie along the last axis."""
    index, axis = n.operand("index") or "", _axis(w, n, n.data)
    perm = [*(d for d in range(len(w.shape(index))) if d != axis), axis]
    shapes = [[w.shape(i)[d] for d in perm] for i in (n.data, index)]
    w.require(n, shapes[0][:-1] == shapes[1][:-1], "it picks from some rows only")
    if axis == len(perm) - 1:
        return w.op(w.kind, w.reads(n), y, axis=axis, batchDims=axis)
    x, at = (w.temporary(shape, w.read(i)) for i, shape in zip((n.data, index), shapes, strict=True))
    picked = w.temporary(shapes[1], y[0])
    for given, moved in zip(w.reads(n), (x, at), strict=True):
        _permute(w, given, perm, moved)
    w.op(w.kind, [x, at], picked, axis=len(perm) - 1, batchDims=len(perm) - 1)
    _permute(w, picked, [perm.index(d) for d in range(len(perm))], y[0])


def _pad(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    mode, padding = n.attrs["mode"], n.attrs["padding"]
    ins = [w.read(n.data), w.constant(np.array(padding, np.int32))]
    w.require(n, all(p >= 0 for pair in padding for p in pair), "it cuts off")
    w.require(n, mode in ("reflect", "constant"), f"padding mode '{mode}'")
    if mode == "reflect":
        w.op("MIRROR_PAD", ins, y, mode=schema.MirrorPadMode.REFLECT)
    elif n.attrs["value"] == 0:
        w.op("PAD", ins, y)
    elif w.integer:
        stored = w.plan[n.data]
        w.op("PADV2", [*ins, _quantized(w, n, stored.quantize(torch.tensor(float(n.attrs["value"]))).numpy())], y)
    else:
        dtype = np.float32 if w.graph.is_float(n.data) else w.graph.values[n.data].dtype
        w.op("PADV2", [*ins, w.constant(np.array(n.attrs["value"], dtype))], y)


def _resize(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    a, b = w.shape(n.data)[1:-1], w.shape(n.output)[1:-1]
    mode, scale = n.attrs["mode"], n.attrs["scale"]
    w.require(n, len(a) <= 2 and mode != "cubic", f"mode '{mode}' over {len(a)} axes")
    whole = scale is None or all(i * s == o for i, s, o in zip(a, scale, b, strict=True))
    w.require(n, whole, "its factor does not give whole sizes; give the size instead")
    kind = "RESIZE_BILINEAR" if mode.startswith("linear") else "RESIZE_NEAREST_NEIGHBOR"
    corners = bool(n.attrs["align_corners"]) and mode == "linear"
    half = mode in ("nearest_exact", "linear") and not corners

    def write(_: Node, x: int, before: list[int], out: int, after: list[int]) -> None:
        w.op(kind, [x, w.ints(*after[1:3])], out, alignCorners=corners, halfPixelCenters=half)

    _spatial(w, n, y, write)


def _depth(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write a GATHER too: channels are (channel, row, column) in torch and (row, column, channel) in the file."""
    x, a, b, k = w.read(n.data), w.shape(n.data), w.shape(n.output), n.attrs["block"]
    if n.op == "DepthToSpace":
        order, moved = np.arange(a[3]).reshape(b[3], k * k), w.temporary(a, x)
        w.pick(x, order.T.ravel(), 3, moved)
        w.op(w.kind, [moved], y, blockSize=k)
    else:
        order, moved = np.arange(b[3]).reshape(k * k, a[3]), w.temporary(b, x)
        w.op(w.kind, [x], moved, blockSize=k)
        w.pick(moved, order.T.ravel(), 3, y[0])


def _shuffle(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    *outer, channels = w.shape(n.data)
    order = np.arange(channels).reshape(n.attrs["groups"], -1)
    w.pick(w.read(n.data), order.T.ravel(), len(outer), y[0])


# ---------------------------------------------------------------- cells of the table

#: the functions that cells of the table name
_FUNCTIONS = by_name(
    *(_plain, _conv, _transpose_conv, _dynamic_quantize, _linear, _mat_mul, _prelu, _attention, _binary),
    *(_hard_sigmoid, _leaky_relu, _elu, _gelu, _curve, _clamp, _softmax, _cast, _pool, _reduce, _sum),
    *(_arg_max, _cum_sum, _top_k, _join, _detections),
    *(_unstack, _split, _as_shape, _requantize, _transpose, _expand, _slice, _gather, _gather_elements, _pad),
    *(_resize, _depth, _shuffle, lstm),
)
OPERATORS: dict[str, TfliteOp] = {}


def _enter_cell(op: str, name: str = "", write: str | Write = "plain", facts: str = "", output: Any = None) -> None:
    """Enter a cell of the table of operators.

    Args:
        name: the schema's operator, unless attributes decide on it.
        write: the function that writes it, or its name in `_FUNCTIONS`.
        facts: fields of `TfliteOp` that are true.
        output: see `dictated_outputs`.
    """
    given: dict[str, Any] = {"moves": OPS[op].moves, **dict.fromkeys(facts.split(), True)}
    given["output"] = dictated_outputs({"output": output})
    OPERATORS[op] = TfliteOp(kind=name, write=resolve(write, _FUNCTIONS), **given)


read_column("tflite", _enter_cell, OPERATORS)
NO_FORM = "it has no TensorFlow Lite form here"
#: operators that the file cannot hold, and why
REFUSED = refused("tflite")
