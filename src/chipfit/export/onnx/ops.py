"""How each canonical operator is written in ONNX: one short function per operator.

A writer receives the `Writer`, the node and the names of its inputs, and returns the names of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from chipfit.graph.ir import Node

if TYPE_CHECKING:
    from chipfit.export.onnx.writer import Writer

Write = Callable[["Writer", Node, Sequence[Any]], Any]
WRITERS: dict[str, Write] = {}


def _writes(*names: str) -> Callable[[Write], Write]:
    def enter(f: Write) -> Write:
        WRITERS.update(dict.fromkeys(names, f))
        return f

    return enter


def _plain(kind: str) -> Write:
    """An operator that ONNX has under another name, without attributes."""
    return lambda w, n, x: w.op(kind, x)


def _ints(*v: int) -> np.ndarray:
    return np.array(v, dtype=np.int64)


def _pads(padding: Any) -> list[int]:
    return [lo for lo, _ in padding] + [hi for _, hi in padding]


for _op, _onnx in {
    "Relu": "Relu",
    "Sigmoid": "Sigmoid",
    "Tanh": "Tanh",
    "Exp": "Exp",
    "Log": "Log",
    "Abs": "Abs",
    "Neg": "Neg",
    "Sqrt": "Sqrt",
    "Sin": "Sin",
    "Cos": "Cos",
    "Erf": "Erf",
    "Floor": "Floor",
    "Ceil": "Ceil",
    "Round": "Round",
    "Sign": "Sign",
    "Reciprocal": "Reciprocal",
    "LogicalNot": "Not",
    "Identity": "Identity",
    "Requantize": "Identity",
    "Dropout": "Identity",
    "Selu": "Selu",
    "MatMul": "MatMul",
    "Add": "Add",
    "Sub": "Sub",
    "Mul": "Mul",
    "Div": "Div",
    "Pow": "Pow",
    "Max": "Max",
    "Min": "Min",
    "Equal": "Equal",
    "Less": "Less",
    "LessEqual": "LessOrEqual",
    "Greater": "Greater",
    "GreaterEqual": "GreaterOrEqual",
    "LogicalAnd": "And",
    "LogicalOr": "Or",
    "Where": "Where",
    "GlobalAvgPool": "GlobalAveragePool",
    "Softplus": "Softplus",
}.items():
    WRITERS[_op] = _plain(_onnx)


@_writes("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D")
def _conv(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a, kernel = n.attrs, w.graph.shape(n.inputs[1] or "")[2:]
    return w.op(
        "Conv",
        x,
        strides=list(a["stride"]),
        pads=_pads(a["padding"]),
        dilations=list(a["dilation"]),
        group=a["groups"],
        kernel_shape=list(kernel),
    )


@_writes("TransposeConv1D", "TransposeConv2D", "TransposeConv3D")
def _conv_transpose(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a = n.attrs
    return w.op(
        "ConvTranspose",
        x,
        strides=list(a["stride"]),
        pads=_pads(a["padding"]),
        dilations=list(a["dilation"]),
        group=a["groups"],
        output_padding=list(a["output_padding"]),
    )


@_writes("Linear")
def _linear(w: Writer, n: Node, x: Sequence[Any]) -> str:
    """Gemm on two axes; inputs of other rank are flattened around it, so that runtimes see one integer product."""
    shape = w.graph.shape(n.inputs[0] or "")
    out, k = w.graph.shape(n.inputs[1] or "")
    if len(shape) == 2:
        return w.op("Gemm", x, transB=1)
    flat = w.mover("Reshape", [x[0], w.const(_ints(-1, k or 0))], n.inputs[0], n.name)
    y = w.op("Gemm", [flat, *x[1:]], transB=1)
    target = [s if s is not None else -1 for s in shape[:-1]] + [out or 0]
    if target.count(-1) > 1:
        w.refuse(n, "more than one axis of its input is only known at run time")
    w.defer(n.output, lambda result: w.op("Reshape", [result, w.const(_ints(*target))]))
    return y


@_writes("BatchNorm")
def _batch_norm(w: Writer, n: Node, x: Sequence[Any]) -> str:
    size = w.graph.shape(n.inputs[3] or "")[0]
    scale = x[1] or w.const(np.ones(size, np.float32))
    shift = x[2] or w.const(np.zeros(size, np.float32))
    return w.op("BatchNormalization", [x[0], scale, shift, x[3], x[4]], epsilon=n.attrs["eps"])


def _normalise(w: Writer, x: Any, axes: list[int], eps: float, centre: bool = True) -> str:
    if centre:
        x = w.op("Sub", [x, w.op("ReduceMean", [x], axes_=axes, keepdims=1)])
    var = w.op("ReduceMean", [w.op("Mul", [x, x])], axes_=axes, keepdims=1)
    return w.op("Div", [x, w.op("Sqrt", [w.op("Add", [var, w.const(np.float32(eps))])])])


@_writes("LayerNorm", "RMSNorm")
def _layer_norm(w: Writer, n: Node, x: Sequence[Any]) -> str:
    axes = list(range(-len(n.attrs["normalized_shape"]), 0))
    eps = n.attrs["eps"] if n.attrs["eps"] is not None else float(np.finfo(np.float32).eps)
    if n.op == "LayerNorm" and len(x) > 1 and x[1] is not None and w.opset >= 17:
        return w.op("LayerNormalization", x, axis=axes[0], epsilon=eps)
    y = _normalise(w, x[0], axes, eps, centre=n.op == "LayerNorm")
    for op, p in zip(("Mul", "Add"), x[1:], strict=False):
        y = y if p is None else w.op(op, [y, p])
    return y


@_writes("GroupNorm", "InstanceNorm")
def _group_norm(w: Writer, n: Node, x: Sequence[Any]) -> str:
    shape = w.graph.shape(n.inputs[0] or "")
    channels = shape[1] or 0
    groups = n.attrs.get("groups", channels)
    y = w.op("Reshape", [x[0], w.const(_ints(0, groups, -1))])
    y = _normalise(w, y, [2], n.attrs["eps"])
    y = w.op("Reshape", [y, w.op("Shape", [x[0]])])
    for op, p in zip(("Mul", "Add"), x[1:], strict=False):
        if p is not None:
            y = w.op(op, [y, w.op("Reshape", [p, w.const(_ints(1, channels, *[1] * (len(shape) - 2)))])])
    return y


@_writes("SDPA")
def _sdpa(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a, shape = n.attrs, w.graph.shape(n.inputs[0] or "")
    if a["enable_gqa"]:
        w.refuse(n, "grouped-query attention has no ONNX form here")
    scale = a["scale"] if a["scale"] is not None else float(shape[-1] or 1) ** -0.5
    rank = len(shape)
    k = w.op("Transpose", [x[1]], perm=[*range(rank - 2), rank - 1, rank - 2])
    s = w.op("Mul", [w.op("MatMul", [x[0], k]), w.const(np.float32(scale))])
    if a["is_causal"]:
        rows, columns = shape[-2], w.graph.shape(n.inputs[1] or "")[-2]
        if rows is None or columns is None:
            w.refuse(n, "a causal mask needs a fixed sequence length")
        s = w.op("Add", [s, w.const(np.triu(np.full((rows or 0, columns or 0), -np.inf, np.float32), 1))])
    if len(x) > 3 and x[3] is not None:
        mask = x[3]
        if w.graph.values.get(n.inputs[3] or "") is not None and w.graph.values[n.inputs[3] or ""].dtype == "bool":
            mask = w.op("Where", [mask, w.const(np.float32(0)), w.const(np.float32(-np.inf))])
        s = w.op("Add", [s, mask])
    return w.op("MatMul", [w.op("Softmax", [s], axis=-1), x[2]])


@_writes("Relu6")
def _relu6(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Clip", [x[0], w.const(np.float32(0)), w.const(np.float32(6))])


@_writes("Clamp")
def _clamp(w: Writer, n: Node, x: Sequence[Any]) -> str:
    ends = [w.const(np.float32(v)) if v is not None else "" for v in (n.attrs["min"], n.attrs["max"])]
    return w.op("Clip", [x[0], *ends])


@_writes("LeakyRelu")
def _leaky(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("LeakyRelu", x, alpha=n.attrs["negative_slope"])


@_writes("Elu")
def _elu(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Elu", x, alpha=n.attrs["alpha"])


@_writes("PRelu")
def _prelu(w: Writer, n: Node, x: Sequence[Any]) -> str:
    rank = len(w.graph.shape(n.inputs[0] or ""))
    slope = x[1] if rank <= 1 else w.op("Reshape", [x[1], w.const(_ints(-1, *[1] * (rank - 2)))])
    return w.op("PRelu", [x[0], slope])


@_writes("Softplus")
def _softplus(w: Writer, n: Node, x: Sequence[Any]) -> str:
    if n.attrs["beta"] != 1.0:
        w.refuse(n, "beta other than 1")
    return w.op("Softplus", x)


@_writes("Swish")
def _swish(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Mul", [x[0], w.op("Sigmoid", [x[0]])])


@_writes("Mish")
def _mish(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Mul", [x[0], w.op("Tanh", [w.op("Softplus", [x[0]])])])


@_writes("HardSigmoid")
def _hard_sigmoid(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("HardSigmoid", x, alpha=1.0 / 6.0, beta=0.5)


@_writes("HardSwish")
def _hard_swish(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Mul", [x[0], w.op("HardSigmoid", [x[0]], alpha=1.0 / 6.0, beta=0.5)])


@_writes("Gelu")
def _gelu(w: Writer, n: Node, x: Sequence[Any]) -> str:
    def c(v: float) -> str:
        return w.const(np.float32(v))

    if n.attrs["approximate"] == "tanh":
        cube = w.op("Mul", [w.op("Mul", [x[0], x[0]]), x[0]])
        inner = w.op("Mul", [w.op("Add", [x[0], w.op("Mul", [cube, c(0.044715)])]), c(0.7978845608028654)])
        gate = w.op("Tanh", [inner])
    else:
        gate = w.op("Erf", [w.op("Div", [x[0], c(1.4142135623730951)])])
    return w.op("Mul", [w.op("Mul", [x[0], w.op("Add", [gate, c(1.0)])]), c(0.5)])


@_writes("Softmax", "LogSoftmax")
def _softmax(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op(n.op, x, axis=n.attrs["axis"])


@_writes("NotEqual")
def _not_equal(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Not", [w.op("Equal", x)])


@_writes("Rsqrt")
def _rsqrt(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Reciprocal", [w.op("Sqrt", x)])


@_writes("Concat")
def _concat(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Concat", x, axis=n.attrs["axis"])


@_writes("Stack")
def _stack(w: Writer, n: Node, x: Sequence[Any]) -> str:
    axis = w.const(_ints(n.attrs["axis"]))
    return w.op("Concat", [w.op("Unsqueeze", [i, axis]) for i in x], axis=n.attrs["axis"])


@_writes("Split")
def _split(w: Writer, n: Node, x: Sequence[Any]) -> list[str]:
    return w.op_many("Split", [x[0], w.const(_ints(*n.attrs["sizes"]))], len(n.outputs), axis=n.attrs["axis"])


@_writes("Unstack")
def _unstack(w: Writer, n: Node, x: Sequence[Any]) -> list[str]:
    return [w.op("Gather", [x[0], w.const(np.int64(i))], axis=n.attrs["axis"]) for i in range(len(n.outputs))]


@_writes("MaxPool")
def _max_pool(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a = n.attrs
    return w.op(
        "MaxPool",
        x,
        kernel_shape=list(a["kernel"]),
        strides=list(a["stride"]),
        pads=_pads(a["padding"]),
        dilations=list(a["dilation"]),
        ceil_mode=int(a["ceil_mode"]),
    )


@_writes("AvgPool")
def _avg_pool(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a = n.attrs
    return w.op(
        "AveragePool",
        x,
        kernel_shape=list(a["kernel"]),
        strides=list(a["stride"]),
        pads=_pads(a["padding"]),
        ceil_mode=int(a["ceil_mode"]),
        count_include_pad=int(a["count_include_pad"]),
    )


@_writes("Mean", "Sum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2")
def _reduce(w: Writer, n: Node, x: Sequence[Any]) -> str:
    op = {"Mean": "ReduceMean", "Sum": "ReduceSum"}.get(n.op, n.op)
    return w.op(op, x, axes_=list(n.attrs["axes"]), keepdims=int(n.attrs["keepdims"]))


@_writes("ArgMax")
def _arg_max(w: Writer, n: Node, x: Sequence[Any]) -> str:
    if n.attrs["axis"] is None:
        return w.op("ArgMax", [w.op("Reshape", [x[0], w.const(_ints(-1))])], axis=0, keepdims=0)
    return w.op("ArgMax", x, axis=n.attrs["axis"], keepdims=int(n.attrs["keepdims"]))


@_writes("CumSum")
def _cum_sum(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("CumSum", [x[0], w.const(np.int64(n.attrs["axis"]))])


@_writes("Pad")
def _pad(w: Writer, n: Node, x: Sequence[Any]) -> str:
    mode = {"constant": "constant", "reflect": "reflect", "replicate": "edge"}.get(n.attrs["mode"])
    if mode is None:
        w.refuse(n, "circular padding")
    ins = [x[0], w.const(_ints(*_pads(n.attrs["padding"])))]
    return w.op("Pad", [*ins, w.const(np.float32(n.attrs["value"]))] if mode == "constant" else ins, mode=mode)


@_writes("Reshape")
def _reshape(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Reshape", [x[0], w.const(_ints(*n.attrs["shape"]))])


@_writes("Transpose")
def _transpose(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Transpose", x, perm=list(n.attrs["perm"]))


@_writes("Squeeze", "Unsqueeze")
def _squeeze(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op(n.op, [x[0], w.const(_ints(*n.attrs["axes"]))]) if n.attrs["axes"] else w.op("Identity", x)


@_writes("Expand")
def _expand(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Expand", [x[0], w.const(_ints(*(1 if s == -1 else s for s in n.attrs["shape"])))])


@_writes("Slice")
def _slice(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a = n.attrs
    end = np.iinfo(np.int64).max if a["end"] is None else a["end"]
    return w.op("Slice", [x[0], *(w.const(_ints(v)) for v in (a["start"], end, a["axis"], a["step"]))])


@_writes("Select")
def _select(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Gather", [x[0], w.const(np.int64(n.attrs["index"]))], axis=n.attrs["axis"])


@_writes("Gather")
def _gather(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Gather", x, axis=n.attrs["axis"])


@_writes("Embedding")
def _embedding(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Gather", x, axis=0)


@_writes("Roll")
def _roll(w: Writer, n: Node, x: Sequence[Any]) -> str:
    y = x[0]
    for shift, axis in zip(n.attrs["shifts"], n.attrs["axes"], strict=True):
        big = np.iinfo(np.int64).max
        head = w.op("Slice", [y, w.const(_ints(-shift)), w.const(_ints(big)), w.const(_ints(axis))])
        tail = w.op("Slice", [y, w.const(_ints(0)), w.const(_ints(-shift)), w.const(_ints(axis))])
        y = w.op("Concat", [head, tail], axis=axis)
    return y


@_writes("Tile")
def _tile(w: Writer, n: Node, x: Sequence[Any]) -> str:
    repeats = n.attrs["repeats"]
    extra = len(repeats) - len(w.graph.shape(n.inputs[0] or ""))
    y = x[0] if not extra else w.op("Unsqueeze", [x[0], w.const(_ints(*range(extra)))])
    return w.op("Tile", [y, w.const(_ints(*repeats))])


@_writes("Resize")
def _resize(w: Writer, n: Node, x: Sequence[Any]) -> str:
    a = n.attrs
    rank = len(w.graph.shape(n.inputs[0] or ""))
    if a["scale"] is not None:
        extra = ["", w.const(np.array([1.0] * (rank - len(a["scale"])) + list(a["scale"]), np.float32))]
    else:
        shape = w.op("Slice", [w.op("Shape", [x[0]]), w.const(_ints(0)), w.const(_ints(2)), w.const(_ints(0))])
        extra = ["", "", w.op("Concat", [shape, w.const(_ints(*a["size"]))], axis=0)]
    how = {"nearest": "asymmetric"}.get(a["mode"], "align_corners" if a["align_corners"] else "pytorch_half_pixel")
    more: dict[str, Any] = {"nearest_mode": "floor"} if a["mode"] == "nearest" else {}
    if a["mode"] == "cubic":
        more["cubic_coeff_a"] = -0.75
    return w.op("Resize", [x[0], *extra], mode=a["mode"], coordinate_transformation_mode=how, **more)


@_writes("DepthToSpace")
def _depth_to_space(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("DepthToSpace", x, blocksize=n.attrs["block"], mode="CRD")


@_writes("SpaceToDepth")
def _space_to_depth(w: Writer, n: Node, x: Sequence[Any]) -> str:
    b, (_, c, h, k) = n.attrs["block"], w.graph.shape(n.inputs[0] or "")
    y = w.op("Reshape", [x[0], w.const(_ints(-1, c or 0, (h or 0) // b, b, (k or 0) // b, b))])
    return w.op(
        "Reshape",
        [
            w.op("Transpose", [y], perm=[0, 1, 3, 5, 2, 4]),
            w.const(_ints(-1, (c or 0) * b * b, (h or 0) // b, (k or 0) // b)),
        ],
    )


@_writes("ChannelShuffle")
def _channel_shuffle(w: Writer, n: Node, x: Sequence[Any]) -> str:
    g, (_, c, h, k) = n.attrs["groups"], w.graph.shape(n.inputs[0] or "")
    y = w.op("Reshape", [x[0], w.const(_ints(-1, g, (c or 0) // g, h or 0, k or 0))])
    return w.op("Reshape", [w.op("Transpose", [y], perm=[0, 2, 1, 3, 4]), w.const(_ints(-1, c or 0, h or 0, k or 0))])


@_writes("Cast")
def _cast(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Cast", x, to=w.type_of(n.attrs["dtype"]))


@_writes("Size")
def _size(w: Writer, n: Node, x: Sequence[Any]) -> str:
    return w.op("Gather", [w.op("Shape", [x[0]]), w.const(np.int64(n.attrs["axis"]))])
