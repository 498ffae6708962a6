"""The torch engine: one kernel per canonical operator, called as `kernel(*operands, **attributes)`.

Calibration, simulation and the trainable model call the same kernels; autograd, autocast, `torch.compile` and
`torch.export` see plain torch. An operator is a word in `_PLAIN`, a row in `_RENAMED`, or a function with `@kernel`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.engine.opaque import fill, resolve_target
from chipfit.engine.types import dtype_of
from chipfit.graph.ir import OPAQUE, Node

Kernel = Callable[..., Any]

#: operators that torch computes by one function of the same operands and attributes; its name follows "=" where it is
#: not the operator's own in lower case
_PLAIN = {
    torch: """
        MatMul Relu Sigmoid Tanh Exp Log Abs Neg Sqrt Rsqrt Sin Cos Erf Floor Ceil Round Sign Reciprocal Clamp Reshape
        Add Sub Mul Div Pow Where Max=maximum Min=minimum Mod=remainder FloorDiv=floor_divide LogicalNot=logical_not
        Equal=eq NotEqual=ne Less=lt LessEqual=le Greater=gt GreaterEqual=ge LogicalAnd=logical_and LogicalOr=logical_or
    """,
    F: """
        Linear Relu6 HardSwish HardSigmoid Swish=silu Mish Selu Elu Gelu Softplus LeakyRelu=leaky_relu PRelu
        SDPA=scaled_dot_product_attention ChannelShuffle=channel_shuffle
    """,
}
#: operators whose attributes have other names in torch: its function, and "attribute=parameter" for each
_RENAMED: dict[str, tuple[Kernel, str]] = {
    "Softmax": (torch.softmax, "axis=dim"),
    "LogSoftmax": (torch.log_softmax, "axis=dim"),
    "CumSum": (torch.cumsum, "axis=dim"),
    "Mean": (torch.mean, "axes=dim keepdims=keepdim"),
    "Sum": (torch.sum, "axes=dim keepdims=keepdim"),
    "ReduceMax": (torch.amax, "axes=dim keepdims=keepdim"),
    "ReduceMin": (torch.amin, "axes=dim keepdims=keepdim"),
    "ReduceL2": (torch.linalg.vector_norm, "axes=dim keepdims=keepdim"),
    "ArgMax": (torch.argmax, "axis=dim keepdims=keepdim"),
    "Transpose": (torch.permute, "perm=dims"),
    "Squeeze": (torch.squeeze, "axes=dim"),
    "Expand": (Tensor.expand, "shape=size"),
    "Tile": (Tensor.repeat, "repeats=repeats"),
    "Roll": (torch.roll, "shifts=shifts axes=dims"),
    "Split": (torch.split, "axis=dim sizes=split_size_or_sections"),
    "Unstack": (torch.unbind, "axis=dim"),
    "Select": (torch.select, "axis=dim index=index"),
    "DepthToSpace": (F.pixel_shuffle, "block=upscale_factor"),
    "SpaceToDepth": (F.pixel_unshuffle, "block=downscale_factor"),
}


def _renamed(function: Kernel, names: str) -> Kernel:
    parameter = dict(name.split("=") for name in names.split())

    def renamed(*operands: Any, **attrs: Any) -> Any:
        return function(*operands, **{parameter[k]: v for k, v in attrs.items()})

    return renamed


KERNELS: dict[str, Kernel] = {op: _renamed(*row) for op, row in _RENAMED.items()} | {
    op: getattr(module, name or op.lower())
    for module, words in _PLAIN.items()
    for op, _, name in (word.partition("=") for word in words.split())
}


def kernel(ops: str) -> Callable[[Kernel], Kernel]:
    """Decorator: the function computes these operators, whose names stand with spaces between."""

    def enter(function: Kernel) -> Kernel:
        KERNELS.update(dict.fromkeys(ops.split(), function))
        return function

    return enter


def _spatial(name: str, axes: int) -> Callable[..., Tensor]:
    """torch's function over so many spatial axes, such as `F.conv2d`."""
    function: Callable[..., Tensor] = getattr(F, f"{name}{axes}d")
    return function


def _pad_spatial(x: Tensor, padding: Sequence[Sequence[int]], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Symmetric padding is left to the kernel; an asymmetric one is applied here."""
    if all(lo == hi for lo, hi in padding):
        return x, [lo for lo, _ in padding]
    return F.pad(x, _flat(padding), value=value), [0] * len(padding)


def _flat(padding: Sequence[Sequence[int]]) -> list[int]:
    """((lo, hi), ...) as `F.pad` takes it: the last axis first."""
    return [p for lo_hi in reversed(padding) for p in lo_hi]


# ---------------------------------------------------------------- weights and norms


@kernel("Conv1D Conv2D Conv3D DepthwiseConv2D")
def conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolution over 1 to 3 spatial axes; x [N, C, ...], w [O, C / groups, ...]."""
    x, pad = _pad_spatial(x, padding)
    return _spatial("conv", w.dim() - 2)(x, w, b, stride, pad, dilation, groups)


@kernel("TransposeConv1D TransposeConv2D TransposeConv3D")
def conv_transpose(
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    output_padding: Any,
) -> Tensor:
    """Transposed convolution; w [C, O / groups, ...]; padding trims the output."""
    both = [min(lo, hi) for lo, hi in padding]
    y = _spatial("conv_transpose", w.dim() - 2)(x, w, b, stride, both, output_padding, groups, dilation)
    for axis, ((lo, hi), cut) in enumerate(zip(padding, both, strict=True), start=2):
        y = y.narrow(axis, lo - cut, y.shape[axis] - lo - hi + 2 * cut)  # what one side trims more than the other
    return y


@kernel("Embedding")
def embedding(w: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, w)


@kernel("BatchNorm")
def batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, *, eps: float) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, False, 0.0, eps)


@kernel("LayerNorm")
def layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, normalized_shape: Any, eps: float
) -> Tensor:
    return F.layer_norm(x, normalized_shape, w, b, eps)


@kernel("GroupNorm")
def group_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, groups: int, eps: float) -> Tensor:
    return F.group_norm(x, groups, w, b, eps)


@kernel("InstanceNorm")
def instance_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float) -> Tensor:
    return F.instance_norm(x, weight=w, bias=b, eps=eps)


@kernel("RMSNorm")
def rms_norm(x: Tensor, w: Tensor | None = None, *, normalized_shape: Any, eps: float | None) -> Tensor:
    return F.rms_norm(x, normalized_shape, w, eps)


# ---------------------------------------------------------------- element by element


@kernel("Identity Requantize")
def identity(x: Tensor) -> Tensor:
    return x


@kernel("Dropout")
def dropout(x: Tensor, *, p: float, training: bool = False) -> Tensor:
    return F.dropout(x, p, training)


@kernel("Cast")
def cast(x: Tensor, *, dtype: str) -> Tensor:
    return x.to(dtype_of(dtype))


# ---------------------------------------------------------------- pooling and reduction


@kernel("MaxPool")
def max_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    x, pad = _pad_spatial(x, padding, -math.inf)
    return _spatial("max_pool", len(kernel))(x, kernel, stride, pad, dilation, ceil_mode)


@kernel("AvgPool")
def avg_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool) -> Tensor:
    f = _spatial("avg_pool", len(kernel))
    padded, pad = _pad_spatial(x, padding)
    if padded is x:
        return f(x, kernel, stride, pad, ceil_mode, count_include_pad)
    ones, _ = _pad_spatial(torch.ones_like(x[:1, :1]), padding, float(count_include_pad))
    return f(padded, kernel, stride, 0, ceil_mode) / f(ones, kernel, stride, 0, ceil_mode)  # the share that counts


@kernel("GlobalAvgPool")
def global_avg_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@kernel("AdaptiveAvgPool")
def adaptive_avg_pool(x: Tensor, *, output_size: Any) -> Tensor:
    return _spatial("adaptive_avg_pool", len(output_size))(x, output_size)


@kernel("AdaptiveMaxPool")
def adaptive_max_pool(x: Tensor, *, output_size: Any) -> Tensor:
    return _spatial("adaptive_max_pool", len(output_size))(x, output_size)


@kernel("ReduceProd")
def reduce_prod(x: Tensor, *, axes: Any, keepdims: bool) -> Tensor:
    for a in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(a, keepdim=keepdims)
    return x


# ---------------------------------------------------------------- moving data


@kernel("Pad")
def pad(x: Tensor, *, padding: Any, mode: str, value: float) -> Tensor:
    """padding ((lo, hi), ...) for every axis; the reflecting modes pad trailing spatial axes only."""
    pairs = list(padding)
    if mode == "constant":
        return F.pad(x, _flat(pairs), mode, value)
    while len(pairs) > 1 and tuple(pairs[0]) == (0, 0) and len(pairs) > x.dim() - 2:
        pairs = pairs[1:]
    return F.pad(x, _flat(pairs), mode)


@kernel("Slice")
def slice_(x: Tensor, *, axis: int, start: int, end: int | None, step: int) -> Tensor:
    index: list[Any] = [slice(None)] * x.dim()
    index[axis] = slice(start, end, step)
    return x[tuple(index)]


@kernel("Gather")
def gather(x: Tensor, index: Tensor, *, axis: int) -> Tensor:
    return x[(slice(None),) * (axis % x.dim()) + (index,)]


@kernel("Resize")
def resize(x: Tensor, *, mode: str, size: Any, scale: Any, align_corners: bool) -> Tensor:
    """size or scale per spatial axis, the other one None."""
    names = {"nearest": "nearest", "linear": ("linear", "bilinear", "trilinear")[x.dim() - 3], "cubic": "bicubic"}
    corners = None if mode == "nearest" else align_corners
    if size is not None:
        return F.interpolate(x, size, mode=names[mode], align_corners=corners)
    return F.interpolate(x, None, scale, names[mode], corners, recompute_scale_factor=False)


@kernel("Unsqueeze")
def unsqueeze(x: Tensor, *, axes: Any) -> Tensor:
    for a in axes:
        x = torch.unsqueeze(x, a)
    return x


@kernel("Concat")
def concat(*xs: Tensor, axis: int) -> Tensor:
    return torch.cat(xs, axis)


@kernel("Stack")
def stack(*xs: Tensor, axis: int) -> Tensor:
    return torch.stack(xs, axis)


@kernel("Size")
def size(x: Tensor, *, axis: int) -> int:
    return x.shape[axis]


# ---------------------------------------------------------------- running a node


def call(node: Node, inputs: Sequence[Any]) -> tuple[Kernel, Sequence[Any], dict[str, Any]]:
    """What to call for a node, as (callable, args, kwargs)."""
    attrs = node.attrs
    if node.op == OPAQUE:
        return resolve_target(attrs["target"]), fill(attrs["args"], inputs), fill(attrs["kwargs"], inputs)
    return KERNELS[node.op], inputs, attrs


def execute(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run one node eagerly; inputs by slot (None when absent), one result per output."""
    f, args, kwargs = call(node, inputs)
    out = f(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)
