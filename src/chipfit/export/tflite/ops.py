"""How each canonical operator is written in TensorFlow Lite: one short function per operator.

A writer receives the `Writer`, the node (channels last) and the tensors that it must fill. Inside one, `w.integer` says
whether operands are codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chipfit.graph.ir import Node

if TYPE_CHECKING:
    from chipfit.export.tflite.writer import Writer

Write = Callable[["Writer", Node, Sequence[int]], None]
WRITERS: dict[str, Write] = {}
#: operators that TensorFlow Lite has an integer kernel for; the others are written in float between quantizers
INTEGER: set[str] = set()
#: those that move codes or choose among them: operands and results must have the same numbers
MOVING = frozenset(
    {
        "MaxPool",
        "AvgPool",
        "Max",
        "Min",
        "ReduceMax",
        "ReduceMin",
        "Concat",
        "Stack",
        "Unstack",
        "Split",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Identity",
        "Dropout",
        "Transpose",
        "Expand",
        "Tile",
        "Slice",
        "Select",
        "Gather",
        "Pad",
        "Resize",
        "DepthToSpace",
        "SpaceToDepth",
        "ChannelShuffle",
    }
)
#: operators that apply an activation themselves
FUSING = {"Conv1D", "Conv2D", "DepthwiseConv2D", "TransposeConv2D", "Linear", "Add", "Sub", "Mul", "MaxPool", "AvgPool"}
SAME, VALID = 0, 1


def _writes(*names: str, integer: bool = False) -> Callable[[Write], Write]:
    def enter(f: Write) -> Write:
        WRITERS.update(dict.fromkeys(names, f))
        if integer:
            INTEGER.update(names)
        return f

    return enter


def _plain(kind: str, options: str = "", **settings: Any) -> Write:
    """An operator that TensorFlow Lite has under another name."""
    return lambda w, n, y: w.op(kind, [w.read(i) for i in n.inputs], y, options, **settings)


for _op, (_kind, _options) in {
    "Relu": ("RELU", ""),
    "Relu6": ("RELU6", ""),
    "Sigmoid": ("LOGISTIC", ""),
    "Tanh": ("TANH", ""),
    "HardSwish": ("HARD_SWISH", "HardSwish"),
    "Exp": ("EXP", "Exp"),
    "Log": ("LOG", ""),
    "Abs": ("ABS", "Abs"),
    "Max": ("MAXIMUM", "MaximumMinimum"),
    "Min": ("MINIMUM", "MaximumMinimum"),
}.items():
    _writes(_op, integer=True)(_plain(_kind, _options))
for _op, (_kind, _options) in {
    "Sqrt": ("SQRT", ""),
    "Rsqrt": ("RSQRT", ""),
    "Neg": ("NEG", "Neg"),
    "Sin": ("SIN", ""),
    "Cos": ("COS", "Cos"),
    "Floor": ("FLOOR", ""),
    "Ceil": ("CEIL", ""),
    "Round": ("ROUND", ""),
    "Sign": ("SIGN", "Sign"),
    "LogicalNot": ("LOGICAL_NOT", "LogicalNot"),
    "Pow": ("POW", "Pow"),
    "Div": ("DIV", "Div"),
    "Mod": ("FLOOR_MOD", "FloorMod"),
    "FloorDiv": ("FLOOR_DIV", "FloorDiv"),
    "Equal": ("EQUAL", "Equal"),
    "NotEqual": ("NOT_EQUAL", "NotEqual"),
    "Less": ("LESS", "Less"),
    "LessEqual": ("LESS_EQUAL", "LessEqual"),
    "Greater": ("GREATER", "Greater"),
    "Where": ("SELECT_V2", "SelectV2"),
    "GreaterEqual": ("GREATER_EQUAL", "GreaterEqual"),
    "LogicalAnd": ("LOGICAL_AND", "LogicalAnd"),
    "LogicalOr": ("LOGICAL_OR", "LogicalOr"),
}.items():
    _writes(_op)(_plain(_kind, _options))


@_writes("Add", "Sub", "Mul", integer=True)
def _binary(w: Writer, n: Node, y: Sequence[int]) -> None:
    how = {} if n.op == "Mul" else {"potScaleInt16": False}  # another kernel, for scales that are powers of two
    w.op(n.op.upper(), [w.read(i) for i in n.inputs], y, n.op, fusedActivationFunction=w.fused, **how)


# ---------------------------------------------------------------- pieces


def _map(w: Writer, kind: str, x: Sequence[int], shape: Sequence[int], options: str = "", **settings: Any) -> int:
    """A float operator inside a composed one; returns its result."""
    y = w.between(shape)
    w.op(kind, x, y, options, **settings)
    return y


def _reshape(w: Writer, x: int, shape: Sequence[int], y: int) -> None:
    w.op("RESHAPE", [x, w.ints(*shape)], y, "Reshape", newShape=list(shape))


def _open(w: Writer, shape: Sequence[int]) -> list[int]:
    """A shape that starts with the batch, with -1 for it when the batch is open."""
    return list(shape) if w.batch else [-1, *shape[1:]]


def _window(
    n: Node, sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int], padding: Any = None
) -> tuple[int, list[tuple[int, int]] | None]:
    """SAME or VALID where one of them places the windows as the node does; else VALID and the padding to apply before."""
    same, valid, pads = True, True, []
    dilation = n.attrs.get("dilation", (1,) * len(kernel))
    for i, o, k, s, d, (low, _) in zip(
        sizes, out, kernel, n.attrs["stride"], dilation, padding or n.attrs["padding"], strict=True
    ):
        covered = (o - 1) * s + d * (k - 1) + 1  # elements under the windows, counted from the first padded one
        total = max(covered - i, 0)
        same &= o == -(-i // s) and low == total // 2
        valid &= low == 0 and covered <= i
        pads.append((low, max(covered - i - low, 0)))
    if valid:
        return VALID, None
    return (SAME, None) if same else (VALID, pads)


def _padded(
    w: Writer, n: Node, x: int, shape: Sequence[int], pads: Sequence[tuple[int, int]], lowest: bool = False
) -> tuple[int, list[int]]:
    """x with its spatial axes padded by zeros, or by the lowest value there is."""
    pairs = [(0, 0), *pads, (0, 0)]
    new = [s + a + b for s, (a, b) in zip(shape, pairs, strict=True)]
    y = w.between(new, x)
    ins = [x, w.constant(np.array(pairs, np.int32))]
    if lowest:
        w.op("PADV2", [*ins, _lowest(w, n)], y, "PadV2")
    else:
        w.op("PAD", ins, y, "Pad")
    return y, new


def _lowest(w: Writer, n: Node) -> int:
    t = w.plan.tensors.get(n.inputs[0] or "")
    if not w.integer or t is None or t.grid is None or t.scale is None or t.zero_point is None:
        return w.scalar(float(np.finfo(np.float32).min))
    return w.constant(
        np.array(t.grid.qmin),
        kind=w.tensors[w.read(n.inputs[0])].type,
        scale=t.scale.numpy(),
        zero=t.zero_point.numpy(),
    )


def _as_image(shape: Sequence[int]) -> list[int]:
    """[N, L, C] as [N, 1, L, C]."""
    return [shape[0], 1, *shape[1:]]


def _spatial(
    w: Writer, n: Node, y: Sequence[int], write: Callable[[int, Sequence[int], int, Sequence[int]], None]
) -> None:
    """Call `write(x, shape of x, y, shape of y)` with images; one spatial axis becomes an image of height 1."""
    x, a, b = w.read(n.inputs[0]), list(w.shape(n.inputs[0])), list(w.shape(n.output))
    if len(a) == 4:
        return write(x, a, y[0], b)
    if len(a) != 3:
        w.refuse(n, "it has three spatial axes")
    image, result = w.between(_as_image(a), x), w.between(_as_image(b), y[0])
    _reshape(w, x, _open(w, _as_image(a)), image)
    write(image, _as_image(a), result, _as_image(b))
    _reshape(w, result, _open(w, b), y[0])


def _pair(values: Sequence[Any], neutral: Any) -> list[Any]:
    """Per-axis settings for an image."""
    return [neutral, *values] if len(values) == 1 else list(values)


def _as_image_node(n: Node) -> Node:
    keys = {"stride": 1, "padding": (0, 0), "dilation": 1, "kernel": 1, "output_padding": 0}
    return n.with_(attrs={**n.attrs, **{k: _pair(n.attrs[k], d) for k, d in keys.items() if k in n.attrs}})


# ---------------------------------------------------------------- operators with weights


def _bias(w: Writer, n: Node, channels: int) -> int:
    """The bias, or zeros: the kernels want one."""
    given = len(n.inputs) > 2 and n.inputs[2] is not None
    if not w.integer:
        return w.weight(n.inputs[2] or "") if given else w.constant(np.zeros(channels, np.float32))
    x, k = w.plan.tensors[n.inputs[0] or ""], w.plan.tensors[n.inputs[1] or ""]
    assert x.scale is not None and k.scale is not None and x.grid is not None
    scale = (x.scale * k.scale).reshape(-1).numpy()  # as many as the weight has, whatever the plan's shape
    if given:
        return w.weight(n.inputs[2] or "", scale=scale)
    zeros = np.zeros(channels, np.int64 if x.grid.bits > 8 else np.int32)
    return w.constant(zeros, scale=scale, zero=np.zeros(len(scale), np.int64))


def _kernel_weight(w: Writer, name: str | None, to: str) -> int:
    """A kernel [O, I, (h,) w]: "ohwi" for convolutions, "hwo" behind a 1 for depthwise ones."""

    def change(a: np.ndarray) -> np.ndarray:
        a = a[:, :, None] if a.ndim == 3 else a
        return a.transpose(0, 2, 3, 1) if to == "ohwi" else a.transpose(1, 2, 3, 0)

    return w.weight(name or "", change, axis=0 if to == "ohwi" else 3)


@_writes("Conv1D", "Conv2D", "DepthwiseConv2D")
def _conv(w: Writer, n: Node, y: Sequence[int]) -> None:
    kernel = _pair(w.shape(n.inputs[1])[2:], 1)
    m = _as_image_node(n)

    def write(x: int, a: Sequence[int], out: int, b: Sequence[int]) -> None:
        padding, pads = _window(m, a[1:3], b[1:3], kernel)
        if pads is not None:
            x, a = _padded(w, m, x, a, pads)
        (sh, sw), (dh, dw) = m.attrs["stride"], m.attrs["dilation"]
        how = {
            "padding": padding,
            "strideH": sh,
            "strideW": sw,
            "dilationHFactor": dh,
            "dilationWFactor": dw,
            "fusedActivationFunction": w.fused,
        }
        depthwise = n.op == "DepthwiseConv2D"
        ins = [x, _kernel_weight(w, n.inputs[1], "hwo" if depthwise else "ohwi"), _bias(w, n, b[3])]
        if depthwise:
            w.op("DEPTHWISE_CONV_2D", ins, out, "DepthwiseConv2D", depthMultiplier=b[3] // a[3], **how)
        else:
            w.op("CONV_2D", ins, out, "Conv2D", **how)

    _spatial(w, n, y, write)


@_writes("Conv3D")
def _conv3d(w: Writer, n: Node, y: Sequence[int]) -> None:
    a, b = list(w.shape(n.inputs[0])), w.shape(n.output)
    x = w.read(n.inputs[0])
    padding, pads = _window(n, a[1:4], b[1:4], w.shape(n.inputs[1])[2:])
    if pads is not None:
        x, a = _padded(w, n, x, a, pads)
    if n.attrs["groups"] != 1:
        w.refuse(n, "it has groups")
    (sd, sh, sw), (dd, dh, dw) = n.attrs["stride"], n.attrs["dilation"]
    kernel = w.weight(n.inputs[1] or "", lambda k: k.transpose(2, 3, 4, 1, 0))
    w.op(
        "CONV_3D",
        [x, kernel, _bias(w, n, b[4])],
        y,
        "Conv3D",
        padding=padding,
        strideD=sd,
        strideH=sh,
        strideW=sw,
        dilationDFactor=dd,
        dilationHFactor=dh,
        dilationWFactor=dw,
    )


@_writes("TransposeConv1D", "TransposeConv2D")
def _transpose_conv(w: Writer, n: Node, y: Sequence[int]) -> None:
    """The kernel is [O, h, w, I]. Padding that SAME does not place is cut off afterwards."""
    m = _as_image_node(n)
    if n.attrs["groups"] != 1 or any(d != 1 for d in n.attrs["dilation"]):
        w.refuse(n, "it has groups or dilation")
    kernel = _pair(w.shape(n.inputs[1])[2:], 1)

    def change(a: np.ndarray) -> np.ndarray:
        return (a[:, :, None] if a.ndim == 3 else a).transpose(1, 2, 3, 0)

    def write(x: int, a: Sequence[int], out: int, b: Sequence[int]) -> None:
        s, low = m.attrs["stride"], [p[0] for p in m.attrs["padding"]]
        full = [(i - 1) * s_ + k for i, s_, k in zip(a[1:3], s, kernel, strict=True)]
        cut = [
            max((-(-o // s_) - 1) * s_ + k - o, 0) // 2 for o, s_, k in zip(b[1:3], s, kernel, strict=True)
        ]  # what SAME cuts off before
        same = cut == low and [-(-o // s_) for o, s_ in zip(b[1:3], s, strict=True)] == list(a[1:3])
        if not same and any(p + o > f for p, o, f in zip(low, b[1:3], full, strict=True)):
            w.refuse(n, "its output padding reaches beyond the last window")
        whole = same or full == list(b[1:3])
        size = list(b) if whole else [b[0], *full, b[3]]
        result = out if whole else w.between(size, out)
        ins = [w.ints(*size), w.weight(n.inputs[1] or "", change), x, _bias(w, n, b[3])]
        w.op(
            "TRANSPOSE_CONV",
            ins,
            result,
            "TransposeConv",
            padding=SAME if same else VALID,
            strideH=s[0],
            strideW=s[1],
            fusedActivationFunction=w.fused,
        )
        if not whole:
            w.op("SLICE", [result, w.ints(0, *low, 0), w.ints(-1, *b[1:3], -1)], out, "Slice")

    _spatial(w, n, y, write)


@_writes("Linear", integer=True)
def _linear(w: Writer, n: Node, y: Sequence[int]) -> None:
    out = w.shape(n.inputs[1])[0]
    ins = [w.read(n.inputs[0]), w.weight(n.inputs[1] or ""), _bias(w, n, out)]
    w.op(
        "FULLY_CONNECTED",
        ins,
        y,
        "FullyConnected",
        fusedActivationFunction=w.fused,
        keepNumDims=len(w.shape(n.output)) > 2,
    )


INTEGER |= {"Conv1D", "Conv2D", "DepthwiseConv2D", "TransposeConv1D", "TransposeConv2D"}


@_writes("MatMul", integer=True)
def _mat_mul(w: Writer, n: Node, y: Sequence[int]) -> None:
    if min(len(w.shape(i)) for i in n.inputs) < 2:
        w.refuse(n, "an operand is a vector")
    w.op("BATCH_MATMUL", [w.read(i) for i in n.inputs], y, "BatchMatMul")


@_writes("PRelu", integer=True)
def _prelu(w: Writer, n: Node, y: Sequence[int]) -> None:
    rank = len(w.shape(n.inputs[0]))
    w.op("PRELU", [w.read(n.inputs[0]), w.weight(n.inputs[1] or "", lambda a: a.reshape([1] * (rank - 2) + [-1]))], y)


@_writes("Embedding")
def _embedding(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op("GATHER", [w.weight(n.inputs[0] or ""), w.read(n.inputs[1])], y, "Gather", axis=0)


# ---------------------------------------------------------------- pools and reductions


@_writes("MaxPool", "AvgPool", integer=True)
def _pool(w: Writer, n: Node, y: Sequence[int]) -> None:
    m = _as_image_node(n)
    if any(d != 1 for d in n.attrs.get("dilation", ())):
        w.refuse(n, "its window is dilated")

    def write(x: int, a: Sequence[int], out: int, b: Sequence[int]) -> None:
        kernel, (sh, sw) = m.attrs["kernel"], m.attrs["stride"]
        padding, pads = _window(m, a[1:3], b[1:3], kernel)
        padded = any(p for pair in m.attrs["padding"] for p in pair)
        if n.op == "AvgPool":  # SAME leaves the padding out of the mean
            if padded and n.attrs["count_include_pad"]:
                if n.attrs["ceil_mode"]:
                    w.refuse(n, "it counts padding and rounds its size up")
                x, a = _padded(w, m, x, a, m.attrs["padding"])
                padding, pads = VALID, None
            elif pads is not None:
                w.refuse(n, "its padding is not counted and is not that of SAME")
        if pads is not None:
            x, a = _padded(w, m, x, a, pads, lowest=True)
        kind, how = (
            ("MAX_POOL_2D" if n.op == "MaxPool" else "AVERAGE_POOL_2D"),
            {"filterHeight": kernel[0], "filterWidth": kernel[1]},
        )
        w.op(kind, [x], out, "Pool2D", padding=padding, strideH=sh, strideW=sw, fusedActivationFunction=w.fused, **how)

    _spatial(w, n, y, write)


@_writes("AdaptiveAvgPool", "AdaptiveMaxPool")
def _adaptive(w: Writer, n: Node, y: Sequence[int]) -> None:
    a, b = w.shape(n.inputs[0]), w.shape(n.output)
    if any(i % o for i, o in zip(a[1:-1], b[1:-1], strict=True)):
        w.refuse(n, f"an input of {a[1:-1]} does not divide into {b[1:-1]} equal windows")
    window = tuple(i // o for i, o in zip(a[1:-1], b[1:-1], strict=True))
    attrs = {
        "kernel": window,
        "stride": window,
        "padding": ((0, 0),) * len(window),
        "ceil_mode": False,
        "count_include_pad": False,
    }
    _pool(w, n.with_(op="AvgPool" if n.op == "AdaptiveAvgPool" else "MaxPool", attrs=attrs), y)


@_writes("GlobalAvgPool", integer=True)
def _global(w: Writer, n: Node, y: Sequence[int]) -> None:
    axes = range(1, len(w.shape(n.inputs[0])) - 1)
    w.op("MEAN", [w.read(n.inputs[0]), w.ints(*axes)], y, "Reducer", keepDims=True)


@_writes("Mean", "ReduceMax", "ReduceMin", integer=True)
def _reduce(w: Writer, n: Node, y: Sequence[int]) -> None:
    kind = {"ReduceMax": "REDUCE_MAX", "ReduceMin": "REDUCE_MIN", "ReduceProd": "REDUCE_PROD"}.get(n.op, n.op.upper())
    rank = len(w.shape(n.inputs[0]))
    w.op(
        kind,
        [w.read(n.inputs[0]), w.ints(*(a % rank for a in n.attrs["axes"]))],
        y,
        "Reducer",
        keepDims=bool(n.attrs["keepdims"]),
    )


_writes("Sum", "ReduceProd")(_reduce)  # the 8-bit reference kernel of SUM is wrong in ai-edge-litert 2.3


@_writes("ReduceL2")
def _l2(w: Writer, n: Node, y: Sequence[int]) -> None:
    x, a = w.read(n.inputs[0]), w.shape(n.inputs[0])
    square = _map(w, "MUL", [x, x], a, "Mul")
    total = _map(
        w,
        "SUM",
        [square, w.ints(*(i % len(a) for i in n.attrs["axes"]))],
        w.shape(n.output),
        "Reducer",
        keepDims=bool(n.attrs["keepdims"]),
    )
    w.op("SQRT", [total], y)


@_writes("ArgMax")
def _arg_max(w: Writer, n: Node, y: Sequence[int]) -> None:
    x, a = w.read(n.inputs[0]), w.shape(n.inputs[0])
    axis = n.attrs["axis"]
    if axis is None:
        flat = w.between([math.prod(a)], x)
        _reshape(w, x, [-1], flat)
        x, axis, a = flat, 0, (math.prod(a),)
    axis %= len(a)
    short = [s for k, s in enumerate(a) if k != axis]
    result = y[0] if not n.attrs["keepdims"] else w.between(short, y[0])
    w.op("ARG_MAX", [x, w.constant(np.array(axis, np.int32))], result, "ArgMax", outputType=w.tensors[y[0]].type)
    if n.attrs["keepdims"]:
        _reshape(w, result, w.open_shape(n.output), y[0])


@_writes("CumSum")
def _cum_sum(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op("CUMSUM", [w.read(n.inputs[0]), w.constant(np.array(n.attrs["axis"], np.int32))], y, "Cumsum")


# ---------------------------------------------------------------- moving


@_writes("Concat", integer=True)
def _concat(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op(
        "CONCATENATION",
        [w.read(i) for i in n.inputs],
        y,
        "Concatenation",
        axis=n.attrs["axis"] % len(w.shape(n.output)),
    )


@_writes("Stack", integer=True)
def _stack(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op(
        "PACK",
        [w.read(i) for i in n.inputs],
        y,
        "Pack",
        valuesCount=len(n.inputs),
        axis=n.attrs["axis"] % len(w.shape(n.output)),
    )


@_writes("Unstack", integer=True)
def _unstack(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op("UNPACK", [w.read(n.inputs[0])], y, "Unpack", num=len(y), axis=n.attrs["axis"] % len(w.shape(n.inputs[0])))


@_writes("Split", integer=True)
def _split(w: Writer, n: Node, y: Sequence[int]) -> None:
    axis = w.constant(np.array(n.attrs["axis"] % len(w.shape(n.inputs[0])), np.int32))
    sizes = n.attrs["sizes"]
    if len(set(sizes)) == 1:
        w.op("SPLIT", [axis, w.read(n.inputs[0])], y, "Split", numSplits=len(y))
    else:
        w.op("SPLIT_V", [w.read(n.inputs[0]), w.ints(*sizes), axis], y, "SplitV", numSplits=len(y))


@_writes("Reshape", "Squeeze", "Unsqueeze", "Identity", "Dropout", integer=True)
def _as_shape(w: Writer, n: Node, y: Sequence[int]) -> None:
    shape = w.open_shape(n.output)
    if shape.count(-1) > 1:
        shape = list(n.attrs["shape"]) if n.op == "Reshape" else shape
    if shape.count(-1) > 1:
        w.refuse(n, "more than one axis is only known at run time")
    _reshape(w, w.read(n.inputs[0]), shape, y[0])


@_writes("Requantize", integer=True)
def _requantize(w: Writer, n: Node, y: Sequence[int]) -> None:
    if w.integer:
        w.op("QUANTIZE", [w.read(n.inputs[0])], y, "Quantize")
    else:
        _as_shape(w, n, y)


@_writes("Transpose", integer=True)
def _transpose(w: Writer, n: Node, y: Sequence[int]) -> None:
    rank = len(w.shape(n.inputs[0]))
    w.op("TRANSPOSE", [w.read(n.inputs[0]), w.ints(*(d % rank for d in n.attrs["perm"]))], y, "Transpose")


@_writes("Expand", "Tile", integer=True)
def _expand(w: Writer, n: Node, y: Sequence[int]) -> None:
    a, b = w.shape(n.inputs[0]), w.shape(n.output)
    x, a = w.read(n.inputs[0]), (1,) * (len(b) - len(a)) + a
    if len(a) > len(w.shape(n.inputs[0])):
        lifted = w.between(a, x)
        _reshape(w, x, a if w.batch or a[0] == 1 else [-1, *a[1:]], lifted)
        x = lifted
    w.op("TILE", [x, w.ints(*(q // p for p, q in zip(a, b, strict=True)))], y, "Tile")


@_writes("Slice", "Select", integer=True)
def _slice(w: Writer, n: Node, y: Sequence[int]) -> None:
    rank, a = len(w.shape(n.inputs[0])), n.attrs
    axis = a["axis"] % rank
    start, end, step = (a["start"], a["end"], a["step"]) if n.op == "Slice" else (a["index"], None, 1)
    if n.op == "Select":
        end = start + 1 if start != -1 else None
    begin, stop, strides = [0] * rank, [0] * rank, [1] * rank
    begin[axis], stop[axis], strides[axis] = start, end or 0, step
    others = (1 << rank) - 1 - (1 << axis)
    w.op(
        "STRIDED_SLICE",
        [w.read(n.inputs[0]), w.ints(*begin), w.ints(*stop), w.ints(*strides)],
        y,
        "StridedSlice",
        beginMask=others,
        endMask=others | (1 << axis if end is None else 0),
        shrinkAxisMask=1 << axis if n.op == "Select" else 0,
    )


@_writes("Gather", integer=True)
def _gather(w: Writer, n: Node, y: Sequence[int]) -> None:
    rank = len(w.shape(n.inputs[0]))
    index = n.inputs[1] or ""
    if index in w.graph.weights:
        size = w.shape(n.inputs[0])[n.attrs["axis"] % rank]
        at = w.constant(w.graph.weights[index].remainder(size).numpy())
    else:
        at = w.read(index)
    w.op("GATHER", [w.read(n.inputs[0]), at], y, "Gather", axis=n.attrs["axis"] % rank)


@_writes("Roll")
def _roll(w: Writer, n: Node, y: Sequence[int]) -> None:
    x, a = w.read(n.inputs[0]), w.shape(n.inputs[0])
    pairs = list(zip(n.attrs["shifts"], n.attrs["axes"], strict=True))
    for k, (shift, axis) in enumerate(pairs):
        index = (np.arange(a[axis]) - shift) % a[axis]
        out = y[0] if k == len(pairs) - 1 else w.between(a, x)
        w.op("GATHER", [x, w.constant(index.astype(np.int32))], out, "Gather", axis=axis % len(a))
        x = out


@_writes("Pad", integer=True)
def _pad(w: Writer, n: Node, y: Sequence[int]) -> None:
    ins = [w.read(n.inputs[0]), w.constant(np.array(n.attrs["padding"], np.int32))]
    if any(p < 0 for pair in n.attrs["padding"] for p in pair):
        w.refuse(n, "it cuts off")
    if n.attrs["mode"] == "reflect":
        w.op("MIRROR_PAD", ins, y, "MirrorPad", mode=0)
    elif n.attrs["mode"] != "constant":
        w.refuse(n, f"padding mode '{n.attrs['mode']}'")
    elif n.attrs["value"] == 0 or w.integer:
        w.op("PAD", ins, y, "Pad")
    else:
        w.op("PADV2", [*ins, w.scalar(n.attrs["value"])], y, "PadV2")


@_writes("Resize", integer=True)
def _resize(w: Writer, n: Node, y: Sequence[int]) -> None:
    a, b = w.shape(n.inputs[0]), w.shape(n.output)
    mode, scale = n.attrs["mode"], n.attrs["scale"]
    if len(a) != 4 or mode not in ("nearest", "linear"):
        w.refuse(n, f"mode '{mode}' over {len(a) - 2} axes")
    if scale is not None and any(i * s != o for i, s, o in zip(a[1:3], scale, b[1:3], strict=True)):
        w.refuse(n, "its factor does not give whole sizes; give the size instead")
    kind, options = (
        ("RESIZE_NEAREST_NEIGHBOR", "ResizeNearestNeighbor")
        if mode == "nearest"
        else ("RESIZE_BILINEAR", "ResizeBilinear")
    )
    corners = bool(n.attrs["align_corners"]) and mode == "linear"
    half = mode == "linear" and not corners
    w.op(kind, [w.read(n.inputs[0]), w.ints(*b[1:3])], y, options, alignCorners=corners, halfPixelCenters=half)


@_writes("DepthToSpace", "SpaceToDepth", "ChannelShuffle", integer=True)
def _depth(w: Writer, n: Node, y: Sequence[int]) -> None:
    """torch counts channels by (channel, row, column), TensorFlow Lite by (row, column, channel): a Gather lies between."""
    x, a, b = w.read(n.inputs[0]), w.shape(n.inputs[0]), w.shape(n.output)
    if n.op == "ChannelShuffle":
        order = np.arange(a[3]).reshape(n.attrs["groups"], -1).T.reshape(-1)
        w.op("GATHER", [x, w.constant(order.astype(np.int32))], y, "Gather", axis=3)
        return
    k, deep = n.attrs["block"], min(a[3], b[3])
    if n.op == "DepthToSpace":
        order = np.arange(a[3]).reshape(deep, k * k).T.reshape(-1)
        moved = w.between(a, x)
        w.op("GATHER", [x, w.constant(order.astype(np.int32))], moved, "Gather", axis=3)
        w.op("DEPTH_TO_SPACE", [moved], y, "DepthToSpace", blockSize=k)
    else:
        order = np.arange(b[3]).reshape(k * k, deep).T.reshape(-1)
        moved = w.between(b, x)
        w.op("SPACE_TO_DEPTH", [x], moved, "SpaceToDepth", blockSize=k)
        w.op("GATHER", [moved, w.constant(order.astype(np.int32))], y, "Gather", axis=3)


@_writes("Cast")
def _cast(w: Writer, n: Node, y: Sequence[int]) -> None:
    x = w.read(n.inputs[0])
    w.op("CAST", [x], y, "Cast", inDataType=w.tensors[x].type, outDataType=w.tensors[y[0]].type)


# ---------------------------------------------------------------- activations and norms


@_writes("LeakyRelu", integer=True)
def _leaky(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op("LEAKY_RELU", [w.read(n.inputs[0])], y, "LeakyRelu", alpha=n.attrs["negative_slope"])


@_writes("Gelu", integer=True)
def _gelu(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op("GELU", [w.read(n.inputs[0])], y, "Gelu", approximate=n.attrs["approximate"] == "tanh")


@_writes("Clamp", integer=True)
def _clamp(w: Writer, n: Node, y: Sequence[int]) -> None:
    ends = (n.attrs["min"], n.attrs["max"])
    kind = {(-1.0, 1.0): "RELU_N1_TO_1", (0.0, 1.0): "RELU_0_TO_1", (0.0, 6.0): "RELU6", (0.0, None): "RELU"}.get(ends)
    x, a = w.read(n.inputs[0]), w.shape(n.output)
    if kind is not None:
        w.op(kind, [x], y)
        return
    if w.integer:
        w.refuse(n, f"8-bit clipping to {ends}")
    both = None not in ends
    for end, kind in zip(ends, ("MAXIMUM", "MINIMUM"), strict=True):
        if end is not None:
            out = w.between(a) if both and kind == "MAXIMUM" else y[0]
            w.op(kind, [x, w.scalar(end)], out, "MaximumMinimum")
            x = out


@_writes("Softmax", "LogSoftmax", integer=True)
def _softmax(w: Writer, n: Node, y: Sequence[int]) -> None:
    x, a = w.read(n.inputs[0]), w.shape(n.inputs[0])
    axis, last = n.attrs["axis"] % len(a), len(a) - 1
    perm = [*(d for d in range(len(a)) if d != axis), axis]
    moved = [a[d] for d in perm]
    result = y[0]
    if axis != last:
        image, result = w.between(moved, x), w.between(moved, y[0])
        w.op("TRANSPOSE", [x, w.ints(*perm)], image, "Transpose")
        x = image
    if n.op == "Softmax":
        w.op("SOFTMAX", [x], result, "Softmax", beta=1.0)
    else:
        w.op("LOG_SOFTMAX", [x], result)
    if axis != last:
        w.op("TRANSPOSE", [result, w.ints(*(perm.index(d) for d in range(len(a))))], y, "Transpose")


@_writes("Elu", "Selu")
def _elu(w: Writer, n: Node, y: Sequence[int]) -> None:
    """Composed: the reference resolver has no ELU."""
    x, a = w.read(n.inputs[0]), w.shape(n.output)
    alpha, scale = (n.attrs["alpha"], 1.0) if n.op == "Elu" else (1.6732632423543772, 1.0507009873554805)
    grown = _map(w, "EXP", [_map(w, "MINIMUM", [x, w.scalar(0.0)], a, "MaximumMinimum")], a, "Exp")
    below = _map(w, "MUL", [_map(w, "SUB", [grown, w.scalar(1.0)], a, "Sub"), w.scalar(alpha * scale)], a, "Mul")
    above = _map(w, "MUL", [_map(w, "RELU", [x], a), w.scalar(scale)], a, "Mul")
    w.op("ADD", [above, below], y, "Add")


@_writes("HardSigmoid")
def _hard_sigmoid(w: Writer, n: Node, y: Sequence[int]) -> None:
    a = w.shape(n.output)
    shifted = _map(w, "ADD", [w.read(n.inputs[0]), w.scalar(3.0)], a, "Add", fusedActivationFunction=3)
    w.op("MUL", [shifted, w.scalar(1.0 / 6.0)], y, "Mul")


@_writes("Swish")
def _swish(w: Writer, n: Node, y: Sequence[int]) -> None:
    x = w.read(n.inputs[0])
    w.op("MUL", [x, _map(w, "LOGISTIC", [x], w.shape(n.output))], y, "Mul")


def _softplus_of(w: Writer, x: int, a: Sequence[int]) -> int:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    size = _map(w, "NEG", [_map(w, "ABS", [x], a, "Abs")], a, "Neg")
    tail = _map(w, "LOG", [_map(w, "ADD", [_map(w, "EXP", [size], a, "Exp"), w.scalar(1.0)], a, "Add")], a)
    return _map(w, "ADD", [_map(w, "RELU", [x], a), tail], a, "Add")


@_writes("Softplus")
def _softplus(w: Writer, n: Node, y: Sequence[int]) -> None:
    a, beta = w.shape(n.output), n.attrs["beta"]
    x = _map(w, "MUL", [w.read(n.inputs[0]), w.scalar(beta)], a, "Mul")
    w.op("MUL", [_softplus_of(w, x, a), w.scalar(1.0 / beta)], y, "Mul")


@_writes("Mish")
def _mish(w: Writer, n: Node, y: Sequence[int]) -> None:
    x, a = w.read(n.inputs[0]), w.shape(n.output)
    w.op("MUL", [x, _map(w, "TANH", [_softplus_of(w, x, a)], a)], y, "Mul")


@_writes("Reciprocal")
def _reciprocal(w: Writer, n: Node, y: Sequence[int]) -> None:
    w.op("DIV", [w.scalar(1.0), w.read(n.inputs[0])], y, "Div")


@_writes("BatchNorm")
def _batch_norm(w: Writer, n: Node, y: Sequence[int]) -> None:
    gamma, beta, mean, var = (None if i is None else w.graph.weights[i].double() for i in n.inputs[1:])
    assert mean is not None and var is not None
    factor = (1.0 if gamma is None else gamma) / (var + n.attrs["eps"]).sqrt()
    shift = (0.0 if beta is None else beta) - mean * factor
    scaled = _map(w, "MUL", [w.read(n.inputs[0]), w.constant(factor.float().numpy())], w.shape(n.output), "Mul")
    w.op("ADD", [scaled, w.constant(shift.float().numpy())], y, "Add")


def _normalise(w: Writer, x: int, a: Sequence[int], axes: Sequence[int], eps: float, centre: bool = True) -> int:
    small = [1 if k in axes else s for k, s in enumerate(a)]
    at = w.ints(*axes)
    if centre:
        x = _map(w, "SUB", [x, _map(w, "MEAN", [x, at], small, "Reducer", keepDims=True)], a, "Sub")
    var = _map(w, "MEAN", [_map(w, "MUL", [x, x], a, "Mul"), at], small, "Reducer", keepDims=True)
    return _map(w, "MUL", [x, _map(w, "RSQRT", [_map(w, "ADD", [var, w.scalar(eps)], small, "Add")], small)], a, "Mul")


def _affine(w: Writer, n: Node, x: int, a: Sequence[int], y: int) -> None:
    """x times weight plus bias, where there are any."""
    steps = [(k, i) for k, i in zip(("Mul", "Add"), n.inputs[1:], strict=False) if i is not None]
    for k, (kind, name) in enumerate(steps):
        out = y if k == len(steps) - 1 else w.between(a)
        w.op(kind.upper(), [x, w.read(name)], out, kind)
        x = out
    if not steps:
        _reshape(w, x, _open(w, a), y)


@_writes("LayerNorm", "RMSNorm")
def _layer_norm(w: Writer, n: Node, y: Sequence[int]) -> None:
    a = w.shape(n.inputs[0])
    eps = n.attrs["eps"] if n.attrs["eps"] is not None else float(np.finfo(np.float32).eps)
    axes = list(range(len(a) - len(n.attrs["normalized_shape"]), len(a)))
    _affine(w, n, _normalise(w, w.read(n.inputs[0]), a, axes, eps, centre=n.op == "LayerNorm"), a, y[0])


@_writes("GroupNorm", "InstanceNorm")
def _group_norm(w: Writer, n: Node, y: Sequence[int]) -> None:
    a = w.shape(n.inputs[0])
    groups = n.attrs.get("groups", a[-1])
    split = [a[0], math.prod(a[1:-1]), groups, a[-1] // groups]
    x = w.between(split)
    _reshape(w, w.read(n.inputs[0]), _open(w, split), x)
    back = w.between(a)
    _reshape(w, _normalise(w, x, split, [1, 3], n.attrs["eps"]), _open(w, a), back)
    _affine(w, n, back, a, y[0])


@_writes("SDPA")
def _sdpa(w: Writer, n: Node, y: Sequence[int]) -> None:
    q, k = w.shape(n.inputs[0]), w.shape(n.inputs[1])
    if n.attrs["enable_gqa"]:
        w.refuse(n, "grouped-query attention")
    scores = [*q[:-1], k[-2]]
    scale = n.attrs["scale"] if n.attrs["scale"] is not None else q[-1] ** -0.5
    s = _map(w, "BATCH_MATMUL", [w.read(n.inputs[0]), w.read(n.inputs[1])], scores, "BatchMatMul", adjY=True)
    s = _map(w, "MUL", [s, w.scalar(scale)], scores, "Mul")
    if n.attrs["is_causal"]:
        s = _map(w, "ADD", [s, w.constant(np.triu(np.full((q[-2], k[-2]), -1e30, np.float32), 1))], scores, "Add")
    if len(n.inputs) > 3 and n.inputs[3] is not None:
        if not w.graph.is_float(n.inputs[3]):
            w.refuse(n, "a boolean mask; add one of 0 and minus infinity instead")
        s = _map(w, "ADD", [s, w.read(n.inputs[3])], scores, "Add")
    w.op("BATCH_MATMUL", [_map(w, "SOFTMAX", [s], scores, "Softmax", beta=1.0), w.read(n.inputs[2])], y, "BatchMatMul")
