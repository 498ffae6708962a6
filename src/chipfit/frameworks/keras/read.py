"""How Keras layers and `keras.ops` operations become canonical: one short reader each.

A reader takes a `Call` and the arguments of the call, tensors as `Tensor`, and returns the Tensor (or Tensors) of its
result. It raises `Unreadable` for a form without canonical equivalent; the operation is then opened or stays opaque.
Layers whose own `call` says it all in keras.ops need no reader: they are opened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from chipfit.graph.config import plain

if TYPE_CHECKING:
    from chipfit.frameworks.keras.capture import Reading, _Origin


class Unreadable(Exception):
    """This form of the operation has no canonical equivalent."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value of the Graph while it is read."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


class Call:
    """One call of a layer or operation while it is read."""

    def __init__(self, reading: Reading, op: Any, outputs: Sequence[Any], origin: _Origin, name: str) -> None:
        self.reading, self.op, self.outputs, self.origin, self.name = reading, op, outputs, origin, name

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Shape of the first output."""
        return tuple(self.outputs[0].shape)

    @property
    def dtype(self) -> str:
        return self.outputs[0].dtype

    def emit(
        self,
        op: str,
        inputs: Sequence[Any],
        like: Sequence[int | None] | None = None,
        of: str = "",
        /,
        part: str = "",
        **attrs: Any,
    ) -> Tensor:
        """Append a node.

        Args:
            like: shape of its result, where it is not the call's.
            of: dtype of its result, where it is not the call's.
            part: put behind the layer's name where a layer is several nodes.
        """
        names = [x.name if isinstance(x, Tensor) else x for x in inputs]
        name = f"{self.name}/{part}" if part else self.name
        return self.reading.emit(
            self.origin, name, op, names, attrs, self.shape if like is None else like, of or self.dtype
        )

    def emit_many(self, op: str, x: Tensor, **attrs: Any) -> list[Tensor]:
        return self.reading.emit_many(
            self.origin, self.name, op, [x.name], attrs, [(tuple(o.shape), o.dtype) for o in self.outputs]
        )

    def weight(self, variable: Any, op: str = "", name: str = "", shape: tuple[int, ...] | None = None) -> str | None:
        """The name of a variable as `op` reads it, seen as `shape` before; None for None."""
        return None if variable is None else self.reading.weight(variable, self.origin, op, name, shape)

    def operand(self, x: Any, dtype: str = "") -> str:
        """A tensor, variable, array or number as the name of a value or weight, cast to `dtype` where it has another."""
        dtype = dtype or self.dtype
        if isinstance(x, Tensor):
            return x.name if x.dtype == dtype else self.emit("Cast", [x], x.shape, dtype, part="cast", dtype=dtype).name
        if isinstance(x, (bool, int, float, np.number)):
            return self.reading.weight(
                np.asarray(x, dtype=dtype), self.origin, name=f"{self.name.rpartition('/')[2]}.scalar"
            )
        if isinstance(x, keras.Variable) and x.dtype == dtype:
            return self.reading.weight(x, self.origin)
        if x is None or isinstance(x, (str, list, tuple)):
            raise Unreadable
        array = keras.ops.convert_to_numpy(x)
        return self.reading.weight(array.astype(dtype), self.origin, name=f"{self.name.rpartition('/')[2]}.constant")

    def activation(self, x: Tensor) -> Tensor:
        """The layer's own activation as nodes behind it."""
        f = getattr(self.op, "activation", None)
        if f is None or f is keras.activations.linear:
            return x
        name = self.origin.config.get("activation")
        origin = replace(
            self.origin, kind="Activation", config={"activation": name if isinstance(name, str) else plain(f)}
        )
        if f in _UNTRACEABLE:
            op = _UNTRACEABLE[f]
            return self.reading.emit(origin, f"{self.name}/{op.lower()}", op, [x.name], {}, x.shape, x.dtype)
        opened = self.reading.open(f, f, (x,), {}, origin)
        if isinstance(opened, Tensor):
            return opened
        outputs = [keras.KerasTensor(x.shape, dtype=x.dtype)]
        return self.reading.opaque(f, (x,), {}, outputs, origin, f"{self.name}/activation")[0]


#: activations of Keras whose own code refuses symbolic tensors
_UNTRACEABLE = {keras.activations.hard_silu: "HardSwish", keras.activations.mish: "Mish"}

Read = Callable[..., Any]
READERS: dict[tuple[str, str], Read] = {}  #: ("layer" or "operation", class name) -> reader


def _layers(*names: str) -> Callable[[Read], Read]:
    return _enter("layer", names)


def _operations(*names: str) -> Callable[[Read], Read]:
    return _enter("operation", names)


def _enter(group: str, names: Sequence[str]) -> Callable[[Read], Read]:
    def enter(f: Read) -> Read:
        READERS.update({(group, n): f for n in names})
        return f

    return enter


def _many(v: Any, n: int) -> tuple[int, ...]:
    return tuple(int(i) for i in v) if isinstance(v, (list, tuple)) else (int(v),) * n


def _axis(axis: int, rank: int) -> int:
    return axis % rank


# ---------------------------------------------------------------- convolutions


def same_padding(
    size: Sequence[int | None], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """Zeros before and after each spatial axis for padding="same": what the last window lacks, the odd one behind.

    Raises:
        Unreadable: a strided axis whose size is not known.

    >>> same_padding((8, 7), (3, 3), (2, 2), (1, 1))
    ((0, 1), (1, 1))
    """
    out = []
    for n, k, s, d in zip(size, kernel, stride, dilation, strict=True):
        span = d * (k - 1) + 1
        if n is None and s > 1:
            raise Unreadable
        total = span - 1 if n is None or s == 1 else max((math.ceil(n / s) - 1) * s + span - n, 0)
        out.append((total // 2, total - total // 2))
    return tuple(out)


def _padding(
    mode: str, size: Sequence[int | None], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if mode == "valid":
        return ((0, 0),) * len(kernel)
    if mode == "causal":
        return tuple((d * (k - 1), 0) for k, d in zip(kernel, dilation, strict=True))
    if mode == "same":
        return same_padding(size, kernel, stride, dilation)
    raise Unreadable


def _conv(
    r: Call,
    x: Tensor,
    kernel: Any,
    bias: Any,
    strides: Any,
    mode: str,
    dilation: Any,
    *,
    depthwise: bool = False,
    part: str = "",
    name: str = "kernel",
) -> Tensor:
    """A convolution with a Keras kernel: [*space, in / groups, out], depthwise [*space, in, multiplier]."""
    *window, last_but_one, last = kernel.shape
    n, channels = len(window), x.shape[-1]
    if channels is None or isinstance(kernel, Tensor):
        raise Unreadable
    groups = channels if depthwise else channels // last_but_one
    stride, dilation = _many(strides, n), _many(dilation, n)
    padding = _padding(mode, x.shape[1:-1], window, stride, dilation)
    space = [
        None if size is None else (size + lo + hi - d * (k - 1) - 1) // s + 1
        for size, (lo, hi), k, s, d in zip(x.shape[1:-1], padding, window, stride, dilation, strict=True)
    ]
    shape = (x.shape[0], *space, channels * last if depthwise else last)
    w = r.weight(kernel, f"DepthwiseConv{n}D" if depthwise else f"Conv{n}D", name)
    op = "DepthwiseConv2D" if n == 2 and groups == channels and groups > 1 else f"Conv{n}D"
    return r.emit(
        op,
        [x, w, r.weight(bias, name="bias")],
        shape,
        part=part,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )


@_layers("Conv1D", "Conv2D", "Conv3D")
def _conv_layer(r: Call, x: Tensor) -> Tensor:
    return r.activation(_conv(r, x, r.op.kernel, r.op.bias, r.op.strides, r.op.padding, r.op.dilation_rate))


@_layers("DepthwiseConv1D", "DepthwiseConv2D")
def _depthwise_layer(r: Call, x: Tensor) -> Tensor:
    return r.activation(
        _conv(r, x, r.op.kernel, r.op.bias, r.op.strides, r.op.padding, r.op.dilation_rate, depthwise=True)
    )


@_layers("SeparableConv1D", "SeparableConv2D")
def _separable_layer(r: Call, x: Tensor) -> Tensor:
    o = r.op
    y = _conv(
        r,
        x,
        o.depthwise_kernel,
        None,
        o.strides,
        o.padding,
        o.dilation_rate,
        depthwise=True,
        part="depthwise",
        name="depthwise_kernel",
    )
    return r.activation(
        _conv(r, y, o.pointwise_kernel, o.bias, 1, "valid", 1, part="pointwise", name="pointwise_kernel")
    )


@_operations("Conv", "DepthwiseConv")
def _conv_operation(r: Call, x: Tensor, kernel: Any) -> Tensor:
    o = r.op
    if o.data_format not in (None, "channels_last"):
        raise Unreadable
    return _conv(
        r, x, kernel, None, o.strides, o.padding, o.dilation_rate, depthwise=type(o).__name__ == "DepthwiseConv"
    )


@_layers("Conv1DTranspose", "Conv2DTranspose", "Conv3DTranspose")
def _transposed_layer(r: Call, x: Tensor) -> Tensor:
    o = r.op
    n = len(o.kernel.shape) - 2
    stride, dilation = _many(o.strides, n), _many(o.dilation_rate, n)
    extra = (None,) * n if o.output_padding is None else _many(o.output_padding, n)
    trims = [
        _trim(d * (k - 1) + 1, s, o.padding, e)
        for k, s, d, e in zip(o.kernel.shape, stride, dilation, extra, strict=False)
    ]
    y = r.emit(
        f"TransposeConv{n}D",
        [x, r.weight(o.kernel, f"TransposeConv{n}D"), r.weight(o.bias)],
        stride=stride,
        dilation=dilation,
        groups=1,
        padding=tuple((lo, max(hi, 0)) for lo, hi in trims),
        output_padding=tuple(max(-hi, 0) for _, hi in trims),
    )
    return r.activation(y)


def _trim(span: int, stride: int, mode: str, extra: int | None) -> tuple[int, int]:
    """What a transposed convolution cuts from the full result of length (n - 1) stride + span, before and behind.

    Keras wants n stride for "same" and (n - 1) stride + max(span, stride) for "valid", unless `output_padding` says how much
    more than (n - 1) stride + span % 2 (or + span) it is; an odd zero to cut is cut behind.

    >>> _trim(3, 2, "same", None), _trim(2, 3, "valid", None)
    ((0, 1), (0, -1))
    """
    if mode == "valid":
        return 0, span - (max(span, stride) if extra is None else span + extra)
    kept = stride if extra is None else span % 2 + extra
    total = span - kept
    before = max(total // 2, 0) if extra is None else max(span - 1 - math.ceil((2 * (span - 1) - total) / 2), 0)
    return before, total - before


@_layers("Dense")
def _dense(r: Call, x: Tensor) -> Tensor:
    w, b = r.weight(r.op.kernel, "Linear"), r.weight(r.op.bias)
    return r.activation(r.emit("Linear", [r.operand(x, "float32"), w, b]))


# ---------------------------------------------------------------- normalization


@_layers("BatchNormalization")
def _batch_norm(r: Call, x: Tensor) -> Tensor:
    o = r.op
    if _axis(o.axis, len(x.shape)) != len(x.shape) - 1:
        raise Unreadable
    statistics = [r.weight(v) for v in (o.gamma, o.beta, o.moving_mean, o.moving_variance)]
    return r.emit("BatchNorm", [x, *statistics], eps=float(o.epsilon))


@_layers("LayerNormalization")
def _layer_norm(r: Call, x: Tensor) -> Tensor:
    o = r.op
    axes = _many(o.axis, 1)
    rank = len(x.shape)
    if sorted(_axis(a, rank) for a in axes) != list(range(rank - len(axes), rank)) or o.rms_scaling:
        raise Unreadable
    shape = x.shape[rank - len(axes) :]
    return r.emit("LayerNorm", [x, r.weight(o.gamma), r.weight(o.beta)], normalized_shape=shape, eps=float(o.epsilon))


@_layers("RMSNormalization")
def _rms_norm(r: Call, x: Tensor) -> Tensor:
    if [_axis(a, len(x.shape)) for a in _many(r.op.axis, 1)] != [len(x.shape) - 1]:
        raise Unreadable
    return r.emit("RMSNorm", [x, r.weight(r.op.scale)], normalized_shape=x.shape[-1:], eps=float(r.op.epsilon))


@_layers("GroupNormalization")
def _group_norm(r: Call, x: Tensor) -> Tensor:
    o = r.op
    if _axis(o.axis, len(x.shape)) != len(x.shape) - 1:
        raise Unreadable
    return r.emit("GroupNorm", [x, r.weight(o.gamma), r.weight(o.beta)], groups=int(o.groups), eps=float(o.epsilon))


@_operations("Normalize")
def _normalize(r: Call, x: Tensor) -> Tensor:
    axes = _many(r.op.axis, 1)
    if r.op.order != 2:
        raise Unreadable
    shape = [1 if k in {_axis(a, len(x.shape)) for a in axes} else d for k, d in enumerate(x.shape)]
    length = r.emit("ReduceL2", [x], shape, part="length", axes=axes, keepdims=True)
    length = r.emit("Clamp", [length], shape, part="length_clip", min=float(r.op.epsilon), max=None)
    return r.emit("Div", [x, length])


# ---------------------------------------------------------------- pooling, resizing, padding


@_layers("MaxPooling1D", "MaxPooling2D", "MaxPooling3D", "AveragePooling1D", "AveragePooling2D", "AveragePooling3D")
@_operations("MaxPool", "AveragePool")
def _pool(r: Call, x: Tensor) -> Tensor:
    o, n = r.op, len(x.shape) - 2
    if o.data_format not in (None, "channels_last"):
        raise Unreadable
    kernel = _many(o.pool_size, n)
    stride = kernel if o.strides is None else _many(o.strides, n)
    padding = _padding(o.padding, x.shape[1:-1], kernel, stride, (1,) * n)
    if "Average" in type(o).__name__ and any(lo != hi for lo, hi in padding) and keras.backend.backend() == "torch":
        pairs = (
            (0, 0),
            *padding,
            (0, 0),
        )  # which Keras fills by repeating the edge on this backend; the others leave it out of the mean
        shape = [d if d is None else d + sum(p) for d, p in zip(x.shape, pairs, strict=True)]
        x, padding = r.emit("Pad", [x], shape, part="edge", padding=pairs, mode="replicate", value=0.0), ((0, 0),) * n
    attrs: dict[str, Any] = {"kernel": kernel, "stride": stride, "padding": padding, "ceil_mode": False}
    if "Max" in type(o).__name__:
        return r.emit("MaxPool", [x], dilation=(1,) * n, **attrs)
    return r.emit("AvgPool", [x], count_include_pad=False, **attrs)


@_layers("GlobalAveragePooling1D", "GlobalAveragePooling2D", "GlobalAveragePooling3D")
def _global_average(r: Call, x: Tensor) -> Tensor:
    if r.op.keepdims:
        return r.emit("GlobalAvgPool", [x])
    y = r.emit("GlobalAvgPool", [x], (*x.shape[:1], *[1] * (len(x.shape) - 2), x.shape[-1]), part="mean")
    return r.emit("Reshape", [y], shape=_target(r.shape))


@_layers("UpSampling1D", "UpSampling2D", "UpSampling3D")
def _up_sampling(r: Call, x: Tensor) -> Tensor:
    n = len(x.shape) - 2
    mode = {"nearest": "nearest", "bilinear": "linear"}.get(getattr(r.op, "interpolation", "nearest"))
    if mode is None:
        raise Unreadable
    return r.emit(
        "Resize", [x], mode=mode, size=None, scale=tuple(float(s) for s in _many(r.op.size, n)), align_corners=False
    )


@_operations("Resize")
@_layers("Resizing")
def _resize(r: Call, x: Tensor) -> Tensor:
    o = r.op
    size = (o.height, o.width) if isinstance(o, keras.Layer) else _many(o.size, 2)
    plain = not (
        getattr(o, "crop_to_aspect_ratio", False)
        or getattr(o, "pad_to_aspect_ratio", False)
        or getattr(o, "antialias", False)
    )
    mode = {"nearest": "nearest", "bilinear": "linear"}.get(o.interpolation)
    if (
        o.data_format not in (None, "channels_last")
        or len(x.shape) != 4
        or not plain
        or mode is None
        or x.dtype != "float32"
    ):
        raise Unreadable
    if mode == "nearest" and any(i is None or s % i for s, i in zip(size, x.shape[1:3], strict=True)):
        raise Unreadable  # Keras samples at pixel centres, the canonical operator at their upper left corners: equal for whole factors
    return r.emit("Resize", [x], mode=mode, size=tuple(int(s) for s in size), scale=None, align_corners=False)


@_layers("ZeroPadding1D", "ZeroPadding2D", "ZeroPadding3D")
def _zero_padding(r: Call, x: Tensor) -> Tensor:
    pairs = r.op.padding if isinstance(r.op.padding[0], (tuple, list)) else (r.op.padding,)
    return r.emit(
        "Pad", [x], padding=((0, 0), *((int(lo), int(hi)) for lo, hi in pairs), (0, 0)), mode="constant", value=0.0
    )


@_operations("Pad")
def _pad(r: Call, x: Tensor, constant_values: Any = None) -> Tensor:
    pairs = tuple((int(lo), int(hi)) for lo, hi in r.op.pad_width)
    image = len(pairs) > 2 and not any((*pairs[0], *pairs[-1]))
    if len(pairs) != len(x.shape) or not isinstance(constant_values, (int, float, type(None))):
        raise Unreadable
    if r.op.mode != "constant" and not (r.op.mode == "reflect" and image):
        raise Unreadable
    return r.emit("Pad", [x], padding=pairs, mode=r.op.mode, value=float(constant_values or 0))


# ---------------------------------------------------------------- element by element

_UNARY = {
    "Relu": "Relu",
    "Relu6": "Relu6",
    "Sigmoid": "Sigmoid",
    "Tanh": "Tanh",
    "Silu": "Swish",
    "Exp": "Exp",
    "Log": "Log",
    "Absolute": "Abs",
    "Abs": "Abs",
    "Negative": "Neg",
    "Sqrt": "Sqrt",
    "Rsqrt": "Rsqrt",
    "Sin": "Sin",
    "Cos": "Cos",
    "Erf": "Erf",
    "Floor": "Floor",
    "Ceil": "Ceil",
    "Round": "Round",
    "Sign": "Sign",
    "Reciprocal": "Reciprocal",
    "LogicalNot": "LogicalNot",
    "HardSilu": "HardSwish",
    "HardSigmoid": "HardSigmoid",
    "Selu": "Selu",
    "StopGradient": "Identity",
    "Copy": "Identity",
}
_BINARY = {
    "Add": "Add",
    "Subtract": "Sub",
    "Multiply": "Mul",
    "Divide": "Div",
    "TrueDivide": "Div",
    "Power": "Pow",
    "Maximum": "Max",
    "Minimum": "Min",
    "Mod": "Mod",
    "FloorDivide": "FloorDiv",
    "LogicalAnd": "LogicalAnd",
    "LogicalOr": "LogicalOr",
}
_COMPARE = {n: n for n in ("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")}


READERS.update({("operation", k): lambda r, x, op=v: r.emit(op, [r.operand(x)]) for k, v in _UNARY.items()})
READERS.update(
    {("operation", k): lambda r, a, b, op=v: r.emit(op, [r.operand(a), r.operand(b)]) for k, v in _BINARY.items()}
)


@_operations(*_COMPARE)
def _compare(r: Call, a: Any, b: Any) -> Tensor:
    dtypes = {x.dtype for x in (a, b) if isinstance(x, Tensor)}
    if len(dtypes) != 1:
        raise Unreadable
    (dtype,) = dtypes
    return r.emit(_COMPARE[type(r.op).__name__], [r.operand(a, dtype), r.operand(b, dtype)])


@_operations("Square")
def _square(r: Call, x: Tensor) -> Tensor:
    return r.emit("Mul", [x, x])


@_operations("ReLU")
def _relu(r: Call, x: Tensor) -> Tensor:
    o = r.op
    if o.threshold != 0 or (o.negative_slope != 0 and o.max_value is not None):
        raise Unreadable
    if o.negative_slope:
        return r.emit("LeakyRelu", [x], negative_slope=float(o.negative_slope))
    if o.max_value is None:
        return r.emit("Relu", [x])
    return r.emit("Relu6", [x]) if o.max_value == 6 else r.emit("Clamp", [x], min=0.0, max=float(o.max_value))


@_operations("LeakyRelu")
@_layers("LeakyReLU")
def _leaky_relu(r: Call, x: Tensor) -> Tensor:
    return r.emit("LeakyRelu", [x], negative_slope=float(r.op.negative_slope))


@_operations("Elu")
@_layers("ELU")
def _elu(r: Call, x: Tensor) -> Tensor:
    return r.emit("Elu", [x], alpha=float(r.op.alpha))


@_layers("PReLU")
def _prelu(r: Call, x: Tensor) -> Tensor:
    shape = tuple(r.op.alpha.shape)
    if any(d != 1 for d in shape[:-1]):
        raise Unreadable
    return r.emit("PRelu", [x, r.weight(r.op.alpha, shape=(-1,))])


@_operations("Gelu")
def _gelu(r: Call, x: Tensor) -> Tensor:
    return r.emit("Gelu", [x], approximate="tanh" if r.op.approximate else "none")


@_operations("Softplus")
def _softplus(r: Call, x: Tensor) -> Tensor:
    return r.emit("Softplus", [x], beta=1.0, threshold=20.0)


@_operations("Softmax", "LogSoftmax")
@_layers("Softmax")
def _softmax(r: Call, x: Tensor) -> Tensor:
    axis = r.op.axis
    if isinstance(axis, (list, tuple)) and len(axis) == 1:
        (axis,) = axis
    if not isinstance(axis, int):
        raise Unreadable
    return r.emit(type(r.op).__name__, [x], axis=axis)


@_layers("Activation")
def _activation_layer(r: Call, x: Tensor) -> Tensor:
    if r.op.activation in _UNTRACEABLE:
        return r.emit(_UNTRACEABLE[r.op.activation], [x])
    raise Unreadable


@_layers("Rescaling")
def _rescaling(r: Call, x: Tensor) -> Tensor:
    y = r.emit("Mul", [r.operand(x), r.operand(r.op.scale)], part="scale")
    return r.emit("Add", [y, r.operand(r.op.offset)])


@_layers("Normalization")
def _normalization(r: Call, x: Tensor) -> Tensor:
    if r.op.invert:
        raise Unreadable
    mean, variance = (keras.ops.convert_to_numpy(v) for v in (r.op.mean, r.op.variance))
    y = r.emit("Sub", [r.operand(x), r.operand(mean)], part="centre")
    return r.emit("Div", [y, r.operand(np.maximum(np.sqrt(variance), keras.backend.epsilon()))])


@_operations("Clip")
def _clip(r: Call, x: Tensor) -> Tensor:
    if not all(isinstance(v, (int, float)) for v in (r.op.x_min, r.op.x_max)):
        raise Unreadable
    return r.emit("Clamp", [x], min=float(r.op.x_min), max=float(r.op.x_max))


@_operations("HardTanh")
def _hard_tanh(r: Call, x: Tensor) -> Tensor:
    return r.emit("Clamp", [x], min=-1.0, max=1.0)


@_layers("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D")
def _dropout(r: Call, x: Tensor) -> Tensor:
    return r.emit("Dropout", [x], p=float(r.op.rate))


@_operations("Cast")
def _cast(r: Call, x: Tensor) -> Tensor:
    return x if x.dtype == r.dtype else r.emit("Cast", [x], dtype=r.dtype)


@_operations("Where")
def _where(r: Call, condition: Tensor, x1: Any = None, x2: Any = None) -> Tensor:
    return r.emit("Where", [r.operand(condition, "bool"), r.operand(x1), r.operand(x2)])


# ---------------------------------------------------------------- sums, products, reductions


@_operations("Matmul")
def _matmul(r: Call, a: Any, b: Any) -> Tensor:
    if min(len(a.shape), len(b.shape)) < 2:
        raise Unreadable
    return r.emit("MatMul", [r.operand(a), r.operand(b)])


@_layers("EinsumDense")
def _einsum_dense(r: Call, x: Tensor) -> Tensor:
    """A linear layer where the kernel's axes are those summed over, then those of the result, both innermost and in order."""
    o = r.op
    given, rest = o.equation.replace(" ", "").split(",")
    kernel, result = rest.split("->")
    summed = [c for c in kernel if c in given]
    new = [c for c in kernel if c not in given]
    kept = [c for c in given.replace("...", "") if c not in kernel]
    dots = "..." if given.startswith("...") else ""
    if (
        given != dots + "".join(kept + summed)
        or kernel != "".join(summed + new)
        or result != dots + "".join(kept + new)
    ):
        raise Unreadable
    ins, outs = (math.prod(o.kernel.shape[a:b]) for a, b in ((0, len(summed)), (len(summed), None)))
    if o.bias is not None and tuple(o.bias.shape) != tuple(o.kernel.shape[len(summed) :]):
        raise Unreadable
    lead = x.shape[: len(x.shape) - len(summed)]
    if len(summed) > 1:
        x = r.emit("Reshape", [x], (*lead, ins), part="merge", shape=_target((*lead, ins)))
    w, b = r.weight(o.kernel, "Linear", shape=(ins, outs)), r.weight(o.bias, shape=(outs,))
    y = r.emit("Linear", [x, w, b], (*lead, outs), part="product" if len(new) != 1 else "")
    if len(new) != 1:
        shape = (*lead, *o.kernel.shape[len(summed) :])
        y = r.emit("Reshape", [y], shape, shape=_target(shape))
    return r.activation(y)


@_operations("Einsum")
def _einsum(r: Call, a: Any, b: Any) -> Tensor:
    """Two operands as one matrix product: axes of both and the result, of the first alone, summed over, of the second alone."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise Unreadable
    ins, _, result = r.op.subscripts.replace(" ", "").partition("->")
    left, right = ins.split(",")
    if "." in ins or len({*left}) != len(left) or len({*right}) != len(right):
        raise Unreadable
    batch = [c for c in left if c in right and c in result]
    summed = [c for c in left if c in right and c not in result]
    first, second = [c for c in left if c not in right], [c for c in right if c not in left]
    if len(summed) != 1 or len(first) != 1 or len(second) != 1 or sorted(result) != sorted([*batch, *first, *second]):
        raise Unreadable
    x = _permuted(r, a, left, [*batch, *first, *summed], "left")
    y = _permuted(r, b, right, [*batch, *summed, *second], "right")
    size = dict(zip(left + right, a.shape + b.shape, strict=True))
    axes = [*batch, *first, *second]
    if "".join(axes) == result:
        return r.emit("MatMul", [x, y])
    z = r.emit("MatMul", [x, y], [size[c] for c in axes], part="product")
    return r.emit("Transpose", [z], perm=tuple(axes.index(c) for c in result))


@_operations("DotProductAttention")
def _attention(
    r: Call, query: Tensor, key: Tensor, value: Tensor, bias: Any = None, mask: Any = None, scale: Any = None
) -> Tensor:
    """[N, T, heads, D] in Keras, [N, heads, T, D] in the canonical operator."""
    if bias is not None or mask is not None or query.shape[2] != key.shape[2] or r.op.attn_logits_soft_cap is not None:
        raise Unreadable
    if not isinstance(scale, (float, int, type(None))):
        raise Unreadable
    qkv = [_permuted(r, x, "nthd", "nhtd", part) for x, part in ((query, "query"), (key, "key"), (value, "value"))]
    n, t, h, d = r.shape
    y = r.emit("SDPA", qkv, (n, h, t, d), part="product", is_causal=bool(r.op.is_causal), scale=scale, enable_gqa=False)
    return r.emit("Transpose", [y], perm=(0, 2, 1, 3))


def _permuted(r: Call, x: Tensor, have: str, want: Sequence[str], part: str) -> Tensor:
    perm = tuple(have.index(c) for c in want)
    if perm == tuple(range(len(perm))):
        return x
    return r.emit("Transpose", [x], [x.shape[d] for d in perm], x.dtype, part, perm=perm)


def _reduction(op: str) -> Read:
    def read(r: Call, x: Tensor, initial: Any = None, where: Any = None) -> Tensor:
        axis = getattr(r.op, "axis", None)
        axes = range(len(x.shape)) if axis is None else [axis] if isinstance(axis, int) else axis
        return r.emit(
            op, [r.operand(x)], axes=tuple(sorted(_axis(a, len(x.shape)) for a in axes)), keepdims=bool(r.op.keepdims)
        )

    return read


READERS.update(
    {
        ("operation", k): _reduction(v)
        for k, v in {
            "Mean": "Mean",
            "Sum": "Sum",
            "Max": "ReduceMax",
            "Amax": "ReduceMax",
            "Min": "ReduceMin",
            "Amin": "ReduceMin",
            "Prod": "ReduceProd",
        }.items()
    }
)


@_operations("Argmax")
def _arg_max(r: Call, x: Tensor) -> Tensor:
    y = r.emit("ArgMax", [x], None, "int64", part="index", axis=r.op.axis, keepdims=bool(r.op.keepdims))
    return r.emit("Cast", [y], dtype=r.dtype)


@_operations("Cumsum")
def _cum_sum(r: Call, x: Tensor) -> Tensor:
    if r.op.axis is None:
        raise Unreadable
    return r.emit("CumSum", [r.operand(x)], axis=r.op.axis)


# ---------------------------------------------------------------- moving values


@_layers("Concatenate")
@_operations("Concatenate")
def _concat(r: Call, xs: Sequence[Any]) -> Tensor:
    return r.emit("Concat", [r.operand(x) for x in xs], axis=r.op.axis)


@_operations("Stack")
def _stack(r: Call, xs: Sequence[Any]) -> Tensor:
    return r.emit("Stack", [r.operand(x) for x in xs], axis=r.op.axis)


@_operations("Split")
def _split(r: Call, x: Tensor) -> list[Tensor]:
    axis = _axis(r.op.axis, len(x.shape))
    return r.emit_many("Split", x, axis=axis, sizes=tuple(o.shape[axis] for o in r.outputs))


@_operations("Unstack")
def _unstack(r: Call, x: Tensor) -> list[Tensor]:
    return r.emit_many("Unstack", x, axis=r.op.axis)


def _target(shape: Sequence[int | None]) -> tuple[int, ...]:
    if sum(d is None for d in shape) > 1:
        raise Unreadable
    return tuple(-1 if d is None else d for d in shape)


@_layers("Flatten", "Reshape")
@_operations("Reshape", "Ravel")
def _reshape(r: Call, x: Tensor) -> Tensor:
    return r.emit("Reshape", [x], shape=_target(r.shape))


@_operations("Transpose", "Swapaxes", "Moveaxis")
@_layers("Permute")
def _transpose(r: Call, x: Tensor) -> Tensor:
    o, rank = r.op, len(x.shape)
    if isinstance(o, keras.Layer):
        perm: Sequence[int] = (0, *o.dims)
    elif type(o).__name__ == "Transpose":
        perm = range(rank)[::-1] if o.axes is None else o.axes
    elif type(o).__name__ == "Swapaxes":
        order = list(range(rank))
        order[o.axis1], order[o.axis2] = order[o.axis2], order[o.axis1]
        perm = order
    else:
        perm = _moved(rank, o.source, o.destination)
    return r.emit("Transpose", [x], perm=tuple(_axis(p, rank) for p in perm))


def _moved(rank: int, source: Any, destination: Any) -> list[int]:
    """The permutation of numpy.moveaxis."""
    pairs = sorted(
        (_axis(d, rank), _axis(s, rank)) for s, d in zip(_many(source, 1), _many(destination, 1), strict=True)
    )
    order = [a for a in range(rank) if a not in {s for _, s in pairs}]
    for d, s in pairs:
        order.insert(d, s)
    return order


@_operations("Squeeze")
def _squeeze(r: Call, x: Tensor) -> Tensor:
    return _reshape(r, x)


@_operations("ExpandDims")
def _expand_dims(r: Call, x: Tensor) -> Tensor:
    if not isinstance(r.op.axis, int):
        raise Unreadable
    return r.emit("Unsqueeze", [x], axes=(_axis(r.op.axis, len(r.shape)),))


@_operations("BroadcastTo")
def _broadcast(r: Call, x: Tensor) -> Tensor:
    if None in r.shape[1:]:
        raise Unreadable
    return r.emit("Expand", [x], shape=tuple(-1 if d is None else d for d in r.shape))


@_operations("Tile")
def _tile(r: Call, x: Tensor) -> Tensor:
    repeats = _many(r.op.repeats, len(x.shape))
    if len(repeats) != len(x.shape):
        raise Unreadable
    return r.emit("Tile", [x], repeats=repeats)


@_operations("GetItem")
def _get_item(r: Call, x: Tensor, key: Any) -> Tensor:
    """Integers, slices, one ellipsis and new axes."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if any(not (k is None or k is Ellipsis or isinstance(k, (int, slice))) or isinstance(k, bool) for k in keys):
        raise Unreadable
    taken = sum(k is not None and k is not Ellipsis for k in keys)
    if Ellipsis not in keys:
        keys.append(Ellipsis)
    at = keys.index(Ellipsis)
    keys[at : at + 1] = [slice(None)] * (len(x.shape) - taken)
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
        shape = (*x.shape[:axis], *x.shape[axis + 1 :])
        x = r.emit("Select", [x], shape, x.dtype, "select", axis=axis, index=index)
    return r.emit("Unsqueeze", [x], axes=tuple(added)) if added else x


def _slice(r: Call, x: Tensor, axis: int, k: slice) -> Tensor:
    size, step = x.shape[axis], 1 if k.step is None else k.step
    if step < 1 or any(v is not None and not isinstance(v, int) for v in (k.start, k.stop)):
        raise Unreadable
    if size is None:  # the batch
        if (k.start or 0) < 0 or (k.stop is not None and k.stop < 0):
            raise Unreadable
        start, end, left = k.start or 0, k.stop, None
    else:
        start, end, _ = k.indices(size)
        left = len(range(start, end, step))
    return r.emit(
        "Slice",
        [x],
        (*x.shape[:axis], left, *x.shape[axis + 1 :]),
        x.dtype,
        "slice",
        axis=axis,
        start=start,
        end=end,
        step=step,
    )


@_operations("Take")
def _take(r: Call, x: Any, indices: Any) -> Tensor:
    if not isinstance(indices, Tensor) or r.op.axis is None:
        raise Unreadable
    return r.emit("Gather", [r.operand(x), indices.name], axis=r.op.axis)


@_layers("Embedding")
def _embedding(r: Call, x: Tensor) -> Tensor:
    if r.op.mask_zero:
        raise Unreadable
    index = x if x.dtype in ("int32", "int64") else r.emit("Cast", [x], x.shape, "int32", part="index", dtype="int32")
    return r.emit("Embedding", [r.weight(r.op.embeddings), index])
