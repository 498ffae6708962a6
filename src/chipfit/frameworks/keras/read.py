"""Readers of Keras layers and `keras.ops` operations: a cell of the table of operators, or a function.

A reader gets a `KerasCall` and the arguments of the call, tensors as `Value`. It returns the value (or values) of the
result, before the layer's own activation. It raises `Unreadable` for a call without canonical equivalent; the operation
is then opened or becomes an opaque node. Layers whose own `call` consists of keras.ops need no reader: they are opened.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np

from chipfit.frameworks.keras import padding as paddings
from chipfit.frameworks.keras.call import KerasCall, narrowed
from chipfit.frameworks.keras.kernel_layout import DEPTHWISE, SLOPES
from chipfit.frameworks.reading import per_axis, present, require
from chipfit.graph.einsum import as_product
from chipfit.graph.hidden_scores import HIDDEN_SCORE
from chipfit.graph.ir import Value
from chipfit.operators.table import OPS, attribute_words, by_name, read_column, reader_of

Reader = Callable[..., Any]
#: ("layer" or "operation", class name) -> reader
READERS: dict[tuple[str, str], Reader] = {}
#: readers of layers that apply an activation to their result
ACTIVATED: set[Reader] = set()

#: activations whose code in Keras cannot be traced with symbolic tensors -> operator
UNTRACEABLE: dict[Any, str] = {}


def reads(layers: str = "", operations: str = "", *, activated: bool = False) -> Callable[[Reader], Reader]:
    """Decorate the reader of these classes; "Conv*D" stands for "Conv1D Conv2D Conv3D"."""

    def enter(f: Reader) -> Reader:
        for group, names in (("layer", layers), ("operation", operations)):
            for n in names.split():
                READERS.update({(group, n.replace("*", d)): f for d in ("123" if "*" in n else "1")})
        if activated:
            ACTIVATED.add(f)
        return f

    return enter


# ---------------------------------------------------------------- pieces of cells


def _integer(v: Any) -> int:
    require(isinstance(v, int))
    return v


#: conversion of a layer's setting to an attribute, by its name in a cell
_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda v: v,
    "float": float,
    "int": int,
    "bool": bool,
    "approximation": lambda yes: "tanh" if yes else "none",
    "one_axis": lambda axis: _integer(axis[0] if isinstance(axis, (list, tuple)) and len(axis) == 1 else axis),
    "integer": _integer,
    "integers": lambda v: per_axis(present(v), 1),
}


def _enter_cell(
    op: str,
    name: str = "",
    layers: str = "",
    variables: str = "",
    only: str = "",
    attrs: str = "",
    fixed: Mapping[str, Any] | None = None,
    read: str | Reader = "",
    activation: str = "",
) -> None:
    """Enter the reader of calls that become one node: a cell of the table of operators.

    Args:
        op: the canonical operator. Its operands are tensors of the call and then the layer's variables.
        name: operations of keras.ops.
        layers: classes of layers; "Conv*D" stands for 1, 2 and 3 axes.
        variables: names of the layer's variables, in the order of the operator's slots behind its data.
        only: a condition of `_CONDITIONS`.
        attrs: "attribute=setting:conversion" for each attribute, by `_CONVERSIONS`; or "attribute:function", by
            `_FUNCTIONS`.
        fixed: attributes with constant values.
        read: a reader that takes the place of the last four arguments, or the name of a function of `_READERS_OF`.
        activation: name of the operator among `keras.activations`, if its code there cannot be traced.
    """
    if activation:
        UNTRACEABLE[getattr(keras.activations, activation)] = op
    operands = sum(s.startswith("in") for s in OPS[op].slots)
    words = attribute_words(attrs)

    def read_cell(r: KerasCall, *xs: Any) -> list[Value]:
        require(len(xs) == operands and (not only or _CONDITIONS[only](r, xs[0])))
        inputs = [*(r.operand(x) for x in xs), *(r.weight(getattr(r.op, v)) for v in variables.split())]
        given: dict[str, Any] = {
            attr: _FUNCTIONS[how](r, xs[0]) if how in _FUNCTIONS else _CONVERSIONS[how](getattr(r.op, setting))
            for attr, setting, how in words
        }
        return r.emit_all(op, inputs, **given, **(fixed or {}))

    reads(layers, name)(reader_of(op, read, _READERS_OF) if read else read_cell)


def _number(v: Any) -> float:
    require(isinstance(v, (int, float)))
    return float(v)


def _static(shape: Sequence[int | None]) -> tuple[int, ...]:
    """Return a shape with -1 for the unknown size; there may be one."""
    require(sum(d is None for d in shape) <= 1)
    return tuple(-1 if d is None else d for d in shape)


def _result_shape(r: KerasCall, x: Value) -> tuple[int, ...]:
    """Return the shape of a result, with -1 for the unknown size.

    A layer that was called with an unknown batch may have (None, -1, n) as the shape of a reshape: the batch stays, and
    -1 follows from the sizes of x.
    """
    given: Any = getattr(r.op, "newshape", ())
    known = [d for d in x.shape[1:] if d is not None]
    open_, rest = [d for d in given if d is None or d < 0], [d for d in given[1:] if d is not None and d > 0]
    if open_ == [None, -1] and given[0] is None and len(known) == len(x.shape) - 1:
        sizes = {None: -1, -1: math.prod(known) // math.prod(rest)}
        return tuple(sizes.get(d, d) for d in given)
    return _static(r.shape)


def _part_sizes(r: KerasCall, x: Value) -> tuple[int, ...]:
    """Return the sizes of the parts of a split, which are known."""
    sizes = [o.shape[r.op.axis % len(x.shape)] for o in r.outputs]
    known = tuple(s for s in sizes if s is not None)
    require(len(known) == len(sizes))
    return known


def _channels_last(r: KerasCall, x: Value) -> bool:
    return r.op.data_format in (None, "channels_last")


def _without_options(r: KerasCall, x: Value) -> bool:
    """Return whether the operation has no option that its canonical operator lacks: initial value, decimals, type."""
    o = r.op
    rest = getattr(o, "initial", None) is None and not getattr(o, "decimals", 0)
    return rest and (getattr(o, "dtype", None) is None or r.dtype == x.dtype)


def _last_axis(r: KerasCall, x: Value) -> bool:
    """Return whether the operation works along the last axis."""
    return [a % len(x.shape) for a in per_axis(r.op.axis, 1)] == [len(x.shape) - 1]


def _last_shape(r: KerasCall, x: Value) -> tuple[int | None, ...]:
    """Return the shape of the last axes, along which the operation works."""
    rank, axes = len(x.shape), per_axis(r.op.axis, 1)
    require(sorted(a % rank for a in axes) == list(range(rank - len(axes), rank)))
    return x.shape[rank - len(axes) :]


def _reduced_axes(r: KerasCall, x: Value) -> tuple[int, ...]:
    """Return the axes that are reduced, in order; all of them if the operation names none."""
    axes = range(len(x.shape)) if r.op.axis is None else per_axis(r.op.axis, 1)
    return tuple(sorted(a % len(x.shape) for a in axes))


def _window(r: KerasCall, x: Value) -> tuple[int, ...]:
    return per_axis(r.op.pool_size, len(x.shape) - 2)


def _strides(r: KerasCall, x: Value) -> tuple[int, ...]:
    return _window(r, x) if r.op.strides is None else per_axis(r.op.strides, len(x.shape) - 2)


def _pool_padding(r: KerasCall, x: Value) -> paddings.Pairs:
    return _padding(r.op.padding, x.shape[1:-1], _window(r, x), _strides(r, x), (1,) * (len(x.shape) - 2))


def _padding(*args: Any) -> paddings.Pairs:
    return present(paddings.numbers(*args))


def _zero_padding(r: KerasCall, x: Value) -> tuple[tuple[int, int], ...]:
    """Return the number of zeros that a padding layer adds before and behind each axis."""
    return ((0, 0), *((int(lo), int(hi)) for lo, hi in np.atleast_2d(r.op.padding)), (0, 0))


def _interpolation(r: KerasCall, x: Value) -> str:
    return present({"nearest": "nearest", "bilinear": "linear"}.get(getattr(r.op, "interpolation", "nearest")))


def _swapped_axes(r: KerasCall, x: Value) -> tuple[int, ...]:
    """Return the permutation of numpy.swapaxes."""
    order = list(range(len(x.shape)))
    a, b = r.op.axis1, r.op.axis2
    order[a], order[b] = order[b], order[a]
    return tuple(order)


def _moved_axes(r: KerasCall, x: Value) -> tuple[int, ...]:
    """Return the permutation of numpy.moveaxis."""
    rank = len(x.shape)
    axes = zip(per_axis(r.op.source, 1), per_axis(r.op.destination, 1), strict=True)
    pairs = sorted((d % rank, s % rank) for s, d in axes)
    order = [a for a in range(rank) if a not in {s for _, s in pairs}]
    for d, s in pairs:
        order.insert(d, s)
    return tuple(order)


def _repeats(r: KerasCall, x: Value) -> tuple[int, ...]:
    """Return the repeats of every axis; axes that `repeats` leaves out are in front, as in numpy.tile."""
    repeats, rank = per_axis(r.op.repeats, 1), len(x.shape)
    require(len(repeats) <= rank)
    return (1,) * (rank - len(repeats)) + repeats


#: conditions that cells name
_CONDITIONS: dict[str, Callable[[KerasCall, Value], bool]] = {
    "without_options": _without_options,
    "centred": lambda r, x: not r.op.rms_scaling,
    "channels_last": _channels_last,
    "euclidean": lambda r, x: r.op.ord is None or (r.op.ord == 2 and len(_reduced_axes(r, x)) == 1),
    "last_axis": _last_axis,
}
#: functions of the call and its first tensor that cells name
_FUNCTIONS: dict[str, Callable[[KerasCall, Value], Any]] = {
    "zero_padding": _zero_padding,
    "last_shape": _last_shape,
    "moved_axes": _moved_axes,
    "new_axis": lambda r, x: (_integer(r.op.axis) % len(r.shape),),
    "all_axes": lambda r, x: tuple(a % len(x.shape) for a in r.op.axes or reversed(range(len(x.shape)))),
    "permuted_dims": lambda r, x: (0, *r.op.dims),
    "pool_padding": _pool_padding,
    "reduced_axes": _reduced_axes,
    "repeats": _repeats,
    "result_shape": _result_shape,
    "part_sizes": _part_sizes,
    "strides": _strides,
    "swapped_axes": _swapped_axes,
    "no_dilation": lambda r, x: (1,) * (len(x.shape) - 2),
    "window": _window,
}

_POOL: dict[str, Any] = {"kernel": _window, "stride": _strides, "padding": _pool_padding, "ceil_mode": False}


# ---------------------------------------------------------------- convolutions and linear layers


def _conv(
    r: KerasCall, x: Value, kernel: Any, bias: Any, settings: Any = None, *, depthwise: bool = False, part: str = ""
) -> Value:
    """Append a convolution with a Keras kernel: [*space, in / groups, out], depthwise [*space, in, multiplier].

    Args:
        settings: strides, padding and dilation; by default those of the layer.
        part: name of a part of the layer, which its kernel is named after.
    """
    strides, mode, dilation = settings or (r.op.strides, r.op.padding, r.op.dilation_rate)
    *window, last_but_one, last = kernel.shape
    n, channels = len(window), present(x.shape[-1])
    require(not isinstance(kernel, Value))
    groups = channels if depthwise else channels // last_but_one
    stride, dilation = per_axis(strides, n), per_axis(dilation, n)
    padding = _padding(mode, x.shape[1:-1], window, stride, dilation)
    space = [
        None if size is None else (size + lo + hi - d * (k - 1) - 1) // s + 1
        for size, (lo, hi), k, s, d in zip(x.shape[1:-1], padding, window, stride, dilation, strict=True)
    ]
    shape = (x.shape[0], *space, channels * last if depthwise else last)
    name = f"{part}_kernel" if part else "kernel"
    inputs = [x, r.weight(kernel, DEPTHWISE if depthwise else "conv", name), r.weight(bias, name="bias")]
    op = "DepthwiseConv2D" if n == 2 and groups == channels and groups > 1 else f"Conv{n}D"
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return r.emit(op, inputs, shape, part=part, **attrs)


@reads("Conv*D DepthwiseConv1D DepthwiseConv2D", activated=True)
def _conv_layer(r: KerasCall, x: Value) -> Value:
    return _conv(r, x, r.op.kernel, r.op.bias, depthwise=hasattr(r.op, "depth_multiplier"))


@reads("SeparableConv1D SeparableConv2D", activated=True)
def _separable_layer(r: KerasCall, x: Value) -> Value:
    y = _conv(r, x, r.op.depthwise_kernel, None, depthwise=True, part="depthwise")
    return _conv(r, y, r.op.pointwise_kernel, r.op.bias, (1, "valid", 1), part="pointwise")


@reads("", "Conv")
def _conv_operation(r: KerasCall, x: Value, kernel: Any, depthwise: bool = False) -> Value:
    require(_channels_last(r, x))
    return _conv(r, x, kernel, None, depthwise=depthwise)


reads("", "DepthwiseConv")(partial(_conv_operation, depthwise=True))


@reads("Conv*DTranspose", activated=True)
def _transposed_layer(r: KerasCall, x: Value) -> Value:
    o = r.op
    n = len(o.kernel.shape) - 2
    stride, dilation = per_axis(o.strides, n), per_axis(o.dilation_rate, n)
    extra = (None,) * n if o.output_padding is None else per_axis(o.output_padding, n)
    spans = [d * (k - 1) + 1 for k, d in zip(o.kernel.shape[:n], dilation, strict=True)]
    trims = [paddings.trim(span, s, o.padding, e) for span, s, e in zip(spans, stride, extra, strict=True)]
    padding, beyond = tuple((lo, max(hi, 0)) for lo, hi in trims), tuple(max(-hi, 0) for _, hi in trims)
    attrs: dict[str, Any] = {"stride": stride, "dilation": dilation, "groups": 1}
    inputs = [x, r.weight(o.kernel, "transposed"), r.weight(o.bias)]
    return r.emit(f"TransposeConv{n}D", inputs, **attrs, padding=padding, output_padding=beyond)


@reads("Dense", activated=True)
def _dense(r: KerasCall, x: Value) -> Value:
    w, b = r.weight(r.op.kernel, "linear"), r.weight(r.op.bias)
    return r.emit("Linear", [r.operand(x, "float32"), w, b])


@reads("EinsumDense", activated=True)
def _einsum_dense(r: KerasCall, x: Value) -> Value:
    """Read a linear layer: the kernel's axes are the summed axes, then the new ones, both innermost and in order.

    In "abc,cde->abde", c is summed, d and e are new. Several summed axes are merged before the product, several new
    axes are split after it.
    """
    o = r.op
    given, rest = o.equation.replace(" ", "").split(",")
    kernel, result = rest.split("->")
    summed = [c for c in kernel if c in given]
    new = [c for c in kernel if c not in given]
    kept = [c for c in given.replace("...", "") if c not in kernel]
    dots = "..." if given.startswith("...") else ""
    wanted = (dots + "".join(kept + summed), "".join(summed + new), dots + "".join(kept + new))
    require((given, kernel, result) == wanted)
    ins, outs = (math.prod(o.kernel.shape[a:b]) for a, b in ((0, len(summed)), (len(summed), None)))
    require(o.bias is None or tuple(o.bias.shape) == tuple(o.kernel.shape[len(summed) :]))
    lead = x.shape[: len(x.shape) - len(summed)]
    if len(summed) > 1:
        x = r.step("Reshape", [x], "merge", shape=_static((*lead, ins)))
    w, b = r.weight(o.kernel, "linear", shape=(ins, outs)), r.weight(o.bias, shape=(outs,))
    if len(new) == 1:
        return r.step("Linear", [x, w, b])
    y = r.step("Linear", [x, w, b], "product")
    return r.step("Reshape", [y], shape=_static((*lead, *o.kernel.shape[len(summed) :])))


# ---------------------------------------------------------------- normalization, pooling, resizing, padding


@reads("", "Normalize")
def _normalize(r: KerasCall, x: Value) -> Value:
    axes, epsilon = per_axis(r.op.axis, 1), r.op.epsilon
    require(r.op.order == 2)
    length = r.step("ReduceL2", [x], "length", axes=axes, keepdims=True)
    least = float(keras.backend.epsilon() if epsilon is None else epsilon)
    length = r.step("Clamp", [length], "length_clip", min=least, max=None)
    return r.emit("Div", [x, length])


@reads("AveragePooling*D", "AveragePool")
def _average_pool(r: KerasCall, x: Value) -> Value:
    require(_channels_last(r, x))
    attrs = {name: value(r, x) if callable(value) else value for name, value in _POOL.items()}
    padding = attrs["padding"]
    if any(lo != hi for lo, hi in padding) and keras.backend.backend() == "torch":
        pairs = ((0, 0), *padding, (0, 0))  # torch repeats the edge; other backends leave it out of the mean
        shape = [d if d is None else d + sum(p) for d, p in zip(x.shape, pairs, strict=True)]
        x = r.emit("Pad", [x], shape, part="edge", padding=pairs, mode="replicate", value=0.0)
        attrs["padding"] = ((0, 0),) * len(padding)
    return r.emit("AvgPool", [x], count_include_pad=False, **attrs)


@reads("GlobalAveragePooling*D")
def _global_average(r: KerasCall, x: Value) -> Value:
    if r.op.keepdims:
        return r.emit("GlobalAvgPool", [x])
    y = r.emit("GlobalAvgPool", [x], (*x.shape[:1], *[1] * (len(x.shape) - 2), x.shape[-1]), part="mean")
    return r.emit("Reshape", [y], shape=_static(r.shape))


@reads("", "Mean")
def _mean(r: KerasCall, x: Value) -> Value:
    """Read the mean of each channel of an image as a global pool, which more chips have in integers."""
    require(_without_options(r, x))
    axes = _reduced_axes(r, x)
    if len(x.shape) == 4 and sorted(axes) == [1, 2] and x.dtype == r.dtype:
        return _global_average(r, x)
    return r.emit("Mean", [r.operand(x)], axes=axes, keepdims=bool(r.op.keepdims))


@reads("Resizing", "Resize")
def _resize(r: KerasCall, x: Value) -> Value:
    o, mode = r.op, _interpolation(r, x)
    size = tuple(int(s) for s in ((o.height, o.width) if isinstance(o, keras.Layer) else per_axis(o.size, 2)))
    require(not getattr(o, "antialias", False) and _channels_last(r, x) and len(x.shape) == 4 and "float" in x.dtype)
    x = _to_aspect_ratio(r, x, size)
    if mode == "nearest":  # at pixel centres; the operator of that name samples at upper left corners
        whole = all(i is not None and s % i == 0 for s, i in zip(size, x.shape[1:3], strict=True))
        mode = "nearest" if whole else "nearest_exact"
    return r.emit("Resize", [x], mode=mode, size=size, scale=None, align_corners=False)


def _to_aspect_ratio(r: KerasCall, x: Value, target: Sequence[int]) -> Value:
    """Crop or pad an image so that its sides have the ratio of `target`, as the operation demands."""
    crops, pads = (getattr(r.op, f"{how}_to_aspect_ratio", False) for how in ("crop", "pad"))
    if not (crops or pads):
        return x
    sides = [_integer(s) for s in x.shape[1:3]]
    wanted = [int(np.float32(sides[1 - k] * target[k]) / target[1 - k]) for k in (0, 1)]
    if crops:
        wanted = [max(min(side, want), 1) for side, want in zip(sides, wanted, strict=True)]
        for axis, (side, want) in enumerate(zip(sides, wanted, strict=True), 1):
            if want < side:
                x = _slice(r, x, axis, slice((side - want) // 2, (side - want) // 2 + want))
        return x
    edges = [(max(side, want) - side) // 2 for side, want in zip(sides, wanted, strict=True)]
    pairs = ((0, 0), *((edge, edge) for edge in edges), (0, 0))
    return r.step("Pad", [x], "border", padding=pairs, mode="constant", value=float(r.op.fill_value))


@reads("UpSampling*D")
def _up_sampling(r: KerasCall, x: Value) -> Value:
    scale = tuple(float(s) for s in per_axis(r.op.size, len(x.shape) - 2))
    return r.emit("Resize", [x], mode=_interpolation(r, x), size=None, scale=scale, align_corners=False)


@reads("", "DepthToSpace")
def _depth_to_space(r: KerasCall, x: Value) -> Value:
    """Change the order of channels: (row, column, channel) in Keras, (channel, row, column) in the graph."""
    require(_channels_last(r, x))
    block, channels = r.op.block_size, _integer(x.shape[-1])
    order = np.arange(channels).reshape(block * block, -1).T.ravel()
    moved = r.step("Gather", [x, r.operand(order, "int64")], "order", axis=3)
    return r.emit("DepthToSpace", [moved], block=block)


def _space_to_depth(r: KerasCall, x: Value, *, op: str) -> Value:
    require(_channels_last(r, x))
    block, channels = r.op.block_size, _integer(x.shape[-1])
    order = np.arange(channels * block * block).reshape(-1, block * block).T.ravel()
    moved = r.emit(op, [x], r.shape, part="blocks", block=block)
    return r.emit("Gather", [moved, r.operand(order, "int64")], axis=3)


@reads("", "Pad")
def _pad(r: KerasCall, x: Value, constant_values: Any = None) -> Value:
    pairs = tuple((int(lo), int(hi)) for lo, hi in r.op.pad_width)
    image = len(pairs) > 2 and not any((*pairs[0], *pairs[-1]))
    require(len(pairs) == len(x.shape) and isinstance(constant_values, (int, float, type(None))))
    require(r.op.mode == "constant" or (r.op.mode == "reflect" and image))
    return r.emit("Pad", [x], padding=pairs, mode=r.op.mode, value=float(constant_values or 0))


# ---------------------------------------------------------------- element by element


def _comparison(r: KerasCall, a: Any, b: Any, *, op: str) -> Value:
    dtypes = {x.dtype for x in (a, b) if isinstance(x, Value)}
    require(len(dtypes) == 1)
    if any(isinstance(x, float) for x in (a, b)) and "float" not in min(dtypes):
        dtypes = {"float32"}  # 2 > 1.5: the integer becomes a float
    (dtype,) = dtypes
    return r.emit(op, [r.operand(a, dtype), r.operand(b, dtype)])


@reads("", "Clip")
def _clip(r: KerasCall, x: Value) -> Value:
    lo, hi = _number(r.op.x_min), _number(r.op.x_max)
    if "float" in r.dtype:
        return r.emit("Clamp", [x], min=lo, max=hi)
    require(lo.is_integer() and hi.is_integer())
    y = r.emit("Max", [r.operand(x), r.operand(int(lo))], part="low")
    return r.emit("Min", [y, r.operand(int(hi))])


@reads("", "Square")
def _square(r: KerasCall, x: Value) -> Value:
    return r.emit("Mul", [x, x])


@reads("", "ReLU")
def _relu(r: KerasCall, x: Value) -> Value:
    """Read min(x where x > 0 else negative_slope x, max_value); a formula computes those with a threshold."""
    require(not r.op.threshold)
    slope, high = (float(v) if v else v for v in (r.op.negative_slope, r.op.max_value))
    if slope:
        y = r.emit("LeakyRelu", [x], part="" if high is None else "slope", negative_slope=slope)
        return y if high is None else r.emit("Min", [y, r.operand(high)])
    if high is None:
        return r.emit("Relu", [x])
    return r.emit("Relu6", [x]) if high == 6 else r.emit("Clamp", [x], min=0.0, max=float(high))


def _prelu(r: KerasCall, x: Value, *, op: str) -> Value:
    of_channels = all(d == 1 for d in r.op.alpha.shape[:-1])
    return r.emit(op, [x, r.weight(r.op.alpha, SLOPES, shape=(-1,) if of_channels else None)])


@reads("Activation")
def _activation_layer(r: KerasCall, x: Value) -> Value:
    require(r.op.activation in UNTRACEABLE)
    return r.emit(UNTRACEABLE[r.op.activation], [x])


@reads("Rescaling")
def _rescaling(r: KerasCall, x: Value) -> Value:
    scale, offset = (np.asarray(v) if isinstance(v, (list, tuple)) else v for v in (r.op.scale, r.op.offset))
    y = r.emit("Mul", [r.operand(x), r.operand(scale)], part="scale")
    return r.emit("Add", [y, r.operand(offset)])


@reads("Normalization")
def _normalization(r: KerasCall, x: Value) -> Value:
    require(not r.op.invert)
    mean, variance = (keras.ops.convert_to_numpy(v) for v in (r.op.mean, r.op.variance))
    y = r.emit("Sub", [r.operand(x), r.operand(mean)], part="centre")
    return r.emit("Div", [y, r.operand(np.maximum(np.sqrt(variance), keras.backend.epsilon()))])


@reads("", "Cast ConvertToTensor")
def _cast(r: KerasCall, x: Value) -> Value:
    return x if x.dtype == r.dtype else r.emit("Cast", [x], dtype=r.dtype)


@reads("", "Where")
def _where(r: KerasCall, condition: Value, x1: Any = None, x2: Any = None) -> Value:
    return r.emit("Where", [r.operand(condition, "bool"), r.operand(x1), r.operand(x2)])


# ---------------------------------------------------------------- products and attention


@reads("", "Matmul")
def _matmul(r: KerasCall, a: Any, b: Any) -> Value:
    require(min(len(a.shape), len(b.shape)) >= 2)
    return r.emit("MatMul", [r.operand(a), r.operand(b)])


@reads("", "Einsum")
def _einsum(r: KerasCall, a: Any, b: Any) -> Value:
    """Read an einsum of two operands that is one matrix product."""
    product = present(as_product(r.op.subscripts))
    require(isinstance(a, Value) and isinstance(b, Value))
    x, y = _permuted(r, a, product.left, "left"), _permuted(r, b, product.right, "right")
    if product.result == tuple(range(len(product.result))):
        return r.emit("MatMul", [x, y])
    return r.emit("Transpose", [r.step("MatMul", [x, y], "product")], perm=product.result)


@reads("", "DotProductAttention")
def _attention(
    r: KerasCall, query: Value, key: Value, value: Value, bias: Any = None, mask: Any = None, scale: Any = None
) -> Value:
    """Read attention: [N, T, heads, D] in Keras, [N, heads, T, D] in the canonical operator."""
    require((bias is None or mask is None) and r.op.attn_logits_soft_cap is None)
    require(query.shape[2] == key.shape[2] and isinstance(scale, (float, int, type(None))))
    operands: list[Value | str]
    operands = [_permuted(r, x, (0, 2, 1, 3), part) for x, part in ((query, "query"), (key, "key"), (value, "value"))]
    n, t, h, _ = r.shape  # for the last size, Keras states that of the query
    d = value.shape[3]
    if mask is not None:  # a row that is hidden throughout gives the mean of all values, as in Keras
        numbers = [r.operand(x) for x in (0.0, HIDDEN_SCORE)]
        bias = r.step("Where", [r.operand(mask, "bool"), *numbers], "mask")
    operands += [] if bias is None else [r.operand(bias)]
    y = r.emit(
        "SDPA", operands, (n, h, t, d), part="product", is_causal=bool(r.op.is_causal), scale=scale, enable_gqa=False
    )
    return r.emit("Transpose", [y], (n, t, h, d), perm=(0, 2, 1, 3))


def _permuted(r: KerasCall, x: Value, perm: Sequence[int], part: str) -> Value:
    if tuple(perm) == tuple(range(len(perm))):
        return x
    return r.step("Transpose", [x], part, perm=tuple(perm))


def _layer_norm(r: KerasCall, x: Value, gamma: Any = None, beta: Any = None, *, op: str) -> Value:
    """Read the function of a normalisation layer over the last axis."""
    require(r.op.axis in (-1, len(x.shape) - 1) and not getattr(r.op, "rms_scaling", False))
    parameters = [None if p is None else r.operand(p) for p in (gamma, beta)]
    eps = float(keras.config.epsilon() if r.op.epsilon is None else r.op.epsilon)
    return r.emit(op, [r.operand(x), *parameters], normalized_shape=(_integer(x.shape[-1]),), eps=eps)


def _rms_norm(r: KerasCall, x: Value, scale: Any = None, *, op: str) -> Value:
    return _layer_norm(r, x, np.ones(_integer(x.shape[-1])) if scale is None else scale, op=op)


# ---------------------------------------------------------------- moving and looking up values


def _arg_max(r: KerasCall, x: Value, *, op: str) -> Value:
    y = r.step(op, [x], "index", axis=r.op.axis, keepdims=bool(r.op.keepdims))
    return r.emit("Cast", [y], dtype=r.dtype)


@reads("", "TopK Sort Argsort")
def _top_k(r: KerasCall, x: Value) -> list[Value] | Value:
    """Read `top_k`, `sort` and `argsort` as TopK, which orders equal values by their index as runtimes do."""
    kind = type(r.op).__name__
    k, axis = (r.op.k, -1) if kind == "TopK" else (None, _integer(r.op.axis))
    how = {"k": k, "axis": axis % len(x.shape), "largest": kind == "TopK"}
    values, indices = r.builder.emit(r.origin, r.name, "TopK", [x.name], how, [(r.shape, x.dtype), (r.shape, "int64")])
    if kind == "Sort":
        return values
    indices = r.step("Cast", [indices], "index", dtype="int32")
    return [values, indices] if kind == "TopK" else indices


def _join(r: KerasCall, xs: Sequence[Any], *, op: str) -> Value:
    return r.emit(op, [r.operand(x) for x in xs], axis=r.op.axis)


@reads("", "GetItem")
def _get_item(r: KerasCall, x: Value, key: Any) -> Value:
    """Read `x[key]` as slices, then selections from the last axis to the first, then new axes.

    `key` consists of integers, slices, new axes (None) and at most one ellipsis; further axes are not indexed.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    require(all(k is None or k is Ellipsis or isinstance(k, (int, slice)) for k in keys))
    require(not any(isinstance(k, bool) for k in keys))
    indexed = sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    keys[at : at + 1] = [slice(None)] * (len(x.shape) - indexed)
    axis, added = 0, []
    removed: list[tuple[int, int]] = []
    for position, k in enumerate(keys):
        if k is None:
            added.append(position - len(removed))
            continue
        if isinstance(k, int):
            removed.append((axis, k))
        elif (k.start, k.stop, k.step) != (None, None, None):
            x = _slice(r, x, axis, k)
        axis += 1
    for axis, index in reversed(removed):
        x = r.step("Select", [x], "select", axis=axis, index=index)
    return r.emit("Unsqueeze", [x], axes=tuple(added)) if added else x


def _slice(r: KerasCall, x: Value, axis: int, k: slice) -> Value:
    size, step = x.shape[axis], 1 if k.step is None else k.step
    require(step >= 1 and all(v is None or isinstance(v, int) for v in (k.start, k.stop)))
    if size is None:  # the batch
        require((k.start or 0) >= 0 and (k.stop is None or k.stop >= 0))
        start, end = k.start or 0, k.stop
    else:
        start, end, _ = k.indices(size)
    return r.step("Slice", [x], "slice", axis=axis, start=start, end=end, step=step)


@reads("", "OneHot")
def _one_hot(r: KerasCall, x: Value) -> Value:
    require(not r.op.sparse)
    return _one_hot_encoding(r, x, r.op.num_classes, r.op.axis)


@reads("", "MultiHot")
def _multi_hot(r: KerasCall, x: Value) -> Value:
    require(r.op.axis == -1 and len(x.shape) > 1 and not r.op.sparse)
    each = _one_hot_encoding(r, x, r.op.num_classes, part="each")
    return r.step("ReduceMax", [each], axes=(1,), keepdims=False)


@reads("CategoryEncoding")
def _category_encoding(r: KerasCall, x: Value) -> Value:
    """Read one-hot encodings of classes; several classes of a sample, along axis 1, become one row or their counts."""
    mode, n = r.op.output_mode, r.op.num_tokens
    require(not r.op.sparse and len(x.shape) > 1)
    if mode == "one_hot":
        if x.shape[-1] == 1:
            x = r.step("Reshape", [x], "entries", shape=_static(x.shape[:-1]))
        return _one_hot_encoding(r, x, n)
    each = _one_hot_encoding(r, x, n, part="each")
    return r.emit("ReduceMax" if mode == "multi_hot" else "Sum", [each], axes=(1,), keepdims=False)


def _one_hot_encoding(r: KerasCall, x: Value, n: int, axis: int = -1, part: str = "") -> Value:
    """Append the one-hot encoding of integers, over `n` classes along a new axis."""
    rank = len(x.shape) + 1
    axis %= rank
    require("int" in x.dtype)
    numbers = np.arange(n).reshape([n if k == axis else 1 for k in range(rank)])
    column = r.step("Unsqueeze", [x], "column", axes=(axis,))
    same = r.step("Equal", [column, r.operand(numbers, x.dtype)], "same")
    dtype = narrowed(r.op.dtype or r.dtype)  # Keras gives the type of multi_hot's operand as that of its result
    return r.step("Cast", [same], part, dtype=dtype)


@reads("", "Digitize")
def _digitize(r: KerasCall, x: Value, bins: Any) -> Value:
    """Read `digitize`: the number of edges that are at most as large as each entry."""
    require("float" in x.dtype and not isinstance(bins, Value))
    edges = keras.ops.convert_to_numpy(bins)
    column = r.step("Unsqueeze", [x], "column", axes=(len(x.shape),))
    above = r.step("GreaterEqual", [column, r.operand(edges, x.dtype)], "above")
    counted = r.step("Cast", [above], "counted", dtype=r.dtype)
    return r.emit("Sum", [counted], axes=(len(x.shape),), keepdims=False)


@reads("", "Repeat")
def _repeat(r: KerasCall, x: Value) -> Value:
    """Read `repeat`: an axis of size 1 is tiled; others get a new axis, which is tiled and merged into them."""
    repeats, axis = tuple(int(n) for n in np.atleast_1d(r.op.repeats)), r.op.axis
    require(isinstance(axis, int) and x.shape[axis] is not None)
    axis %= len(x.shape)
    size = _integer(x.shape[axis])
    if len(repeats) > 1:
        index = np.repeat(np.arange(size), repeats)
        return r.emit("Gather", [x, r.operand(index, "int64")], axis=axis)
    ones, (n,) = [1] * len(x.shape), repeats
    if size == 1:
        return r.emit("Tile", [x], repeats=(*ones[:axis], n, *ones[axis + 1 :]))
    y = r.step("Unsqueeze", [x], "copies", axes=(axis + 1,))
    y = r.step("Tile", [y], "tiled", repeats=(*ones[: axis + 1], n, *ones[axis + 1 :]))
    return r.emit("Reshape", [y], shape=_static(r.shape))


@reads("", "Flip")
def _flip(r: KerasCall, x: Value) -> Value:
    """Read the reversal of one axis, whose size is known, as a Gather."""
    axes = range(len(x.shape)) if r.op.axis is None else per_axis(r.op.axis, 1)
    require(len(axes) == 1)
    axis = axes[0]
    backwards = np.arange(_integer(x.shape[axis]))[::-1]
    return r.emit("Gather", [x, r.operand(backwards, "int64")], axis=axis % len(x.shape))


@reads("", "Take")
def _take(r: KerasCall, x: Any, indices: Any) -> Value:
    require(r.op.axis is not None)
    if isinstance(indices, Value):
        return r.emit("Gather", [r.operand(x), indices.name], axis=r.op.axis)
    places = keras.ops.convert_to_numpy(indices)
    require(np.issubdtype(places.dtype, np.integer))
    places = places % _integer(x.shape[r.op.axis])
    return r.emit("Gather", [x, r.operand(places, "int64")], axis=r.op.axis % len(x.shape))


@reads("", "TakeAlongAxis")
def _take_along(r: KerasCall, x: Any, indices: Any) -> Value:
    """Read an index for each element, where data and indices have as many elements along the other axes."""
    axis, index = r.op.axis % len(r.shape), r.operand(indices, "int64")
    pairs = zip(x.shape, indices.shape, strict=True)
    require(all(k == axis or a == b for k, (a, b) in enumerate(pairs)))
    return r.emit("GatherElements", [r.operand(x), index], axis=axis)


@reads("", "BroadcastTo")
def _broadcast_to(r: KerasCall, x: Any, batch_of: Value | None = None) -> Value:
    """Repeat a tensor, or a constant for each sample of `batch_of`, which `translate` records."""
    require(None not in r.shape[1:])
    if batch_of is None:
        return r.emit("Expand", [r.operand(x)], shape=_static(r.shape))
    size = r.step("Size", [batch_of], "size", axis=0)
    return r.emit("Expand", [r.operand(x), size], shape=(None, *r.shape[1:]))


@reads("Embedding")
def _embedding(r: KerasCall, x: Value) -> Value:
    index = x if x.dtype in ("int32", "int64") else r.step("Cast", [x], "index", dtype="int32")
    return r.emit("Embedding", [r.weight(r.op.embeddings), index])


#: functions of a call, its arguments and its canonical operator that cells name
_READERS_OF = by_name(_prelu, _comparison, _join, _space_to_depth, _layer_norm, _rms_norm, _arg_max)
read_column("keras", _enter_cell, READERS, UNTRACEABLE)
