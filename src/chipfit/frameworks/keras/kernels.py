"""The canonical operators in `keras.ops`, channels last: what a quantized Keras model computes where no Keras layer says it as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from chipfit.frameworks.keras.backend import dtype_here

Kernel = Callable[..., Any]


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(1, len(x.shape) - 1))


def _max_pool(x: Any, *, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    x = ops.pad(x, [(0, 0), *map(tuple, padding), (0, 0)], constant_values=-math.inf)
    return ops.max_pool(x, tuple(kernel), tuple(stride), "valid", "channels_last")


def _avg_pool(x: Any, *, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool) -> Any:
    pairs = [(0, 0), *map(tuple, padding), (0, 0)]
    ones = ops.pad(ops.ones_like(x), pairs, constant_values=float(count_include_pad))
    means, share = (
        ops.average_pool(v, tuple(kernel), tuple(stride), "valid", "channels_last") for v in (ops.pad(x, pairs), ones)
    )
    return means / share


def _pad(x: Any, *, padding: Any, mode: str, value: float) -> Any:
    if mode == "constant":
        return ops.pad(x, [tuple(p) for p in padding], constant_values=value)
    for axis, (lo, hi) in enumerate(
        padding
    ):  # Keras knows other modes by other names on each backend: say which element goes where
        if lo or hi:
            last = x.shape[axis] - 1
            at = np.arange(-lo, last + 1 + hi)
            at = {"replicate": at.clip(0, last), "circular": at % (last + 1), "reflect": last - abs(last - abs(at))}[
                mode
            ]
            x = ops.take(x, at, axis)
    return x


def _resize(x: Any, *, mode: str, size: Any, scale: Any, align_corners: bool) -> Any:
    if size is None:
        size = [math.floor(n * s) for n, s in zip(x.shape[1:-1], scale, strict=True)]
    flat = x[:, None] if len(x.shape) == 3 else x  # one spatial axis as an image of one row
    sizes = (1, *size) if len(x.shape) == 3 else tuple(size)
    y = ops.image.resize(
        flat,
        sizes,
        interpolation={"nearest": "nearest", "linear": "bilinear", "cubic": "bicubic"}[mode],
        data_format="channels_last",
    )
    return y[:, 0] if len(x.shape) == 3 else y


def _sdpa(q: Any, k: Any, v: Any, mask: Any = None, *, is_causal: bool, scale: float | None, enable_gqa: bool) -> Any:
    scores = ops.matmul(q * (scale or 1 / math.sqrt(q.shape[-1])), ops.swapaxes(k, -1, -2))
    if is_causal:
        scores = ops.where(ops.tril(ops.ones(scores.shape[-2:], "bool")), scores, -math.inf)
    if mask is not None:
        scores = (
            ops.where(mask, scores, -math.inf)
            if keras.backend.standardize_dtype(mask.dtype) == "bool"
            else scores + mask
        )
    return ops.matmul(ops.softmax(scores, axis=-1), v)


def _expand(x: Any, *, shape: Any) -> Any:
    have = [1] * (len(shape) - len(x.shape)) + list(ops.shape(x))
    x = ops.reshape(x, have)
    return ops.broadcast_to(x, [h if s == -1 else s for h, s in zip(have, shape, strict=True)])


def _slice(x: Any, *, axis: int, start: int, end: int | None, step: int) -> Any:
    index: list[Any] = [slice(None)] * len(x.shape)
    index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _softplus(x: Any, *, beta: float, threshold: float) -> Any:
    return ops.softplus(x * beta) / beta


def _roll(x: Any, *, shifts: Any, axes: Any) -> Any:
    for s, a in zip(shifts, axes, strict=True):
        x = ops.roll(x, s, a)
    return x


def _split(x: Any, *, axis: int, sizes: Sequence[int]) -> Any:
    at = [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)]
    return ops.split(x, at, axis)


def _clamp(x: Any, *, min: float | None, max: float | None) -> Any:
    return ops.clip(x, -math.inf if min is None else min, math.inf if max is None else max)


def _reduce(f: Kernel) -> Kernel:
    return lambda x, *, axes, keepdims: f(x, axis=tuple(axes), keepdims=keepdims)


def _unsqueeze(x: Any, *, axes: Any) -> Any:
    for a in axes:
        x = ops.expand_dims(x, a)
    return x


def _cast(x: Any, *, dtype: str) -> Any:
    return ops.cast(x, dtype_here(dtype))


def _normalize(x: Any, w: Any, b: Any, axes: Sequence[int], eps: float) -> Any:
    mean, variance = ops.moments(x, tuple(axes), keepdims=True)
    y = (x - mean) * ops.rsqrt(variance + eps)
    return (y if w is None else y * w) if b is None else (y if w is None else y * w) + b


_UNARY = {
    "Relu": "relu",
    "Relu6": "relu6",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "HardSigmoid": "hard_sigmoid",
    "HardSwish": "hard_silu",
    "Swish": "silu",
    "Exp": "exp",
    "Log": "log",
    "Abs": "abs",
    "Neg": "negative",
    "Sqrt": "sqrt",
    "Rsqrt": "rsqrt",
    "Sin": "sin",
    "Cos": "cos",
    "Erf": "erf",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sign": "sign",
    "Reciprocal": "reciprocal",
    "LogicalNot": "logical_not",
    "Selu": "selu",
}
_BINARY = {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "Div": "divide",
    "Pow": "power",
    "Max": "maximum",
    "Min": "minimum",
    "Mod": "mod",
    "FloorDiv": "floor_divide",
    "Equal": "equal",
    "NotEqual": "not_equal",
    "Less": "less",
    "LessEqual": "less_equal",
    "Greater": "greater",
    "GreaterEqual": "greater_equal",
    "LogicalAnd": "logical_and",
    "LogicalOr": "logical_or",
    "MatMul": "matmul",
    "Where": "where",
}

#: canonical operator -> function of its inputs in order (None where absent) and its attributes
KERNELS: dict[str, Kernel] = {
    **{op: getattr(ops, f) for op, f in {**_UNARY, **_BINARY}.items()},
    **dict.fromkeys(("Identity", "Requantize"), lambda x: x),
    "Mish": lambda x: x * ops.tanh(ops.softplus(x)),
    "Clamp": _clamp,
    "LeakyRelu": lambda x, *, negative_slope: ops.leaky_relu(x, negative_slope),
    "PRelu": lambda x, w: ops.maximum(x, 0.0) + w * ops.minimum(x, 0.0),
    "Elu": lambda x, *, alpha: ops.elu(x, alpha),
    "Softplus": _softplus,
    "Gelu": lambda x, *, approximate: ops.gelu(x, approximate == "tanh"),
    "Softmax": lambda x, *, axis: ops.softmax(x, axis),
    "LogSoftmax": lambda x, *, axis: ops.log_softmax(x, axis),
    "Linear": lambda x, w, b=None: (
        ops.matmul(x, ops.transpose(w)) if b is None else ops.matmul(x, ops.transpose(w)) + b
    ),
    "SDPA": _sdpa,
    "InstanceNorm": lambda x, w=None, b=None, *, eps: _normalize(x, w, b, _spatial(x), eps),
    "LayerNorm": lambda x, w=None, b=None, *, normalized_shape, eps: _normalize(
        x, w, b, range(-len(normalized_shape), 0), eps
    ),
    "MaxPool": _max_pool,
    "AvgPool": _avg_pool,
    "GlobalAvgPool": lambda x: ops.mean(x, _spatial(x), keepdims=True),
    "Mean": _reduce(ops.mean),
    "Sum": _reduce(ops.sum),
    "ReduceMax": _reduce(ops.max),
    "ReduceMin": _reduce(ops.min),
    "ReduceProd": _reduce(ops.prod),
    "ReduceL2": lambda x, *, axes, keepdims: ops.sqrt(ops.sum(ops.square(x), tuple(axes), keepdims)),
    "ArgMax": lambda x, *, axis, keepdims: ops.argmax(x, axis, keepdims=keepdims),
    "CumSum": lambda x, *, axis: ops.cumsum(x, axis),
    "Concat": lambda *xs, axis: ops.concatenate(xs, axis),
    "Stack": lambda *xs, axis: ops.stack(xs, axis),
    "Split": _split,
    "Unstack": lambda x, *, axis: ops.unstack(x, axis=axis),
    "Pad": _pad,
    "Reshape": lambda x, *, shape: ops.reshape(x, tuple(shape)),
    "Transpose": lambda x, *, perm: ops.transpose(x, tuple(perm)),
    "Squeeze": lambda x, *, axes: ops.squeeze(x, tuple(axes)),
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Slice": _slice,
    "Select": lambda x, *, axis, index: ops.take(x, index if index >= 0 else x.shape[axis] + index, axis),
    "Gather": lambda x, index, *, axis: ops.take(x, index, axis),
    "Embedding": lambda w, index: ops.take(w, index, 0),
    "Roll": _roll,
    "Tile": lambda x, *, repeats: ops.tile(x, tuple(repeats)),
    "Resize": _resize,
    "Cast": _cast,
    "Dropout": lambda x, *, p: x,
}


@keras.saving.register_keras_serializable(package="chipfit")
class CanonicalOperation(keras.layers.Layer):
    """One canonical operator as a layer.

    Args:
        op: name of the operator.
        settings: its attributes.
        slots: what each input of the operator is: "x", the next tensor that the layer is called with; "-", absent; or dtype,
            whether it is trained, and shape of a weight of the layer, ["float32", true, 3, 4]. Weights are named w0, w1, ... by their slot.
    """

    def __init__(self, op: str, settings: dict[str, Any], slots: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.op, self.settings, self.slots = op, settings, list(slots)

    def build(self, input_shape: Any = None) -> None:
        self.held = [
            None
            if isinstance(s, str)
            else self.add_weight(
                name=f"w{k}", dtype=dtype_here(s[0]), trainable=s[1], shape=tuple(s[2:]), initializer="zeros"
            )
            for k, s in enumerate(self.slots)
        ]
        self.built = True

    def call(self, inputs: Any) -> Any:
        given = iter(inputs if isinstance(inputs, (list, tuple)) else [inputs])
        operands = [
            next(given) if s == "x" else None if s == "-" else ops.convert_to_tensor(w)
            for s, w in zip(self.slots, self.held, strict=True)
        ]
        while operands and operands[-1] is None:
            operands.pop()
        return KERNELS[self.op](*operands, **self.settings)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "op": self.op, "settings": self.settings, "slots": self.slots}
