"""The torch engine: one function per canonical operator, `kernel(*inputs, **attributes)`.

Calibration and simulation call them eagerly; lowering puts the same functions into an `fx.Graph`, where autograd,
autocast, `torch.compile` and `torch.export` see plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from chipfit.engine.opaque import fill, resolve_target
from chipfit.graph.ir import OPAQUE, Node

Tensor = torch.Tensor


def _pad_spatial(x: Tensor, padding: Sequence[Sequence[int]], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Symmetric padding is left to the kernel; an asymmetric one is applied here."""
    if all(lo == hi for lo, hi in padding):
        return x, [lo for lo, _ in padding]
    flat = [p for lo_hi in reversed(list(padding)) for p in lo_hi]
    return F.pad(x, flat, value=value), [0] * len(padding)


def conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolution over 1 to 3 spatial axes; x [N, C, ...], w [O, C / groups, ...]."""
    x, pad = _pad_spatial(x, padding)
    return (F.conv1d, F.conv2d, F.conv3d)[w.dim() - 3](x, w, b, tuple(stride), tuple(pad), tuple(dilation), groups)


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
    f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[w.dim() - 3]
    both = [min(lo, hi) for lo, hi in padding]
    y = f(x, w, b, tuple(stride), tuple(both), tuple(output_padding), groups, tuple(dilation))
    for axis, ((lo, hi), cut) in enumerate(zip(padding, both, strict=True), start=2):
        y = y.narrow(axis, lo - cut, y.shape[axis] - lo - hi + 2 * cut)  # what one side trims more than the other
    return y


def batch_norm(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor, *, eps: float) -> Tensor:
    return F.batch_norm(x, mean, var, w, b, False, 0.0, eps)


def layer_norm(
    x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, normalized_shape: Any, eps: float
) -> Tensor:
    return F.layer_norm(x, tuple(normalized_shape), w, b, eps)


def group_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, groups: int, eps: float) -> Tensor:
    return F.group_norm(x, groups, w, b, eps)


def instance_norm(x: Tensor, w: Tensor | None = None, b: Tensor | None = None, *, eps: float) -> Tensor:
    return F.instance_norm(x, weight=w, bias=b, eps=eps)


def rms_norm(x: Tensor, w: Tensor | None = None, *, normalized_shape: Any, eps: float | None) -> Tensor:
    return F.rms_norm(x, tuple(normalized_shape), w, eps)


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def clamp(x: Tensor, *, min: float | None, max: float | None) -> Tensor:
    return torch.clamp(x, min, max)


def prelu(x: Tensor, w: Tensor) -> Tensor:
    return F.prelu(x, w)


def max_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    x, pad = _pad_spatial(x, padding, -math.inf)
    f = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(kernel) - 1]
    return f(x, tuple(kernel), tuple(stride), tuple(pad), tuple(dilation), ceil_mode)


def avg_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool) -> Tensor:
    f = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(kernel) - 1]
    if all(lo == hi for lo, hi in padding):
        return f(x, tuple(kernel), tuple(stride), tuple(lo for lo, _ in padding), ceil_mode, count_include_pad)
    ones, _ = _pad_spatial(torch.ones_like(x[:1, :1]), padding, float(count_include_pad))
    means = f(_pad_spatial(x, padding)[0], tuple(kernel), tuple(stride), 0, ceil_mode)
    return means / f(ones, tuple(kernel), tuple(stride), 0, ceil_mode)  # the share of each window that counts


def global_avg_pool(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def adaptive_avg_pool(x: Tensor, *, output_size: Any) -> Tensor:
    return (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(output_size) - 1](
        x, tuple(output_size)
    )


def adaptive_max_pool(x: Tensor, *, output_size: Any) -> Tensor:
    return (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(output_size) - 1](
        x, tuple(output_size)
    )


def _reduce(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor, *, axes: Any, keepdims: bool) -> Tensor:
        return f(x, tuple(axes), keepdims)

    return kernel


def reduce_prod(x: Tensor, *, axes: Any, keepdims: bool) -> Tensor:
    for a in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(a, keepdim=keepdims)
    return x


def arg_max(x: Tensor, *, axis: int | None, keepdims: bool) -> Tensor:
    return torch.argmax(x, axis, keepdims)


def pad(x: Tensor, *, padding: Any, mode: str, value: float) -> Tensor:
    """padding ((lo, hi), ...) for every axis; the reflecting modes pad trailing spatial axes only."""
    pairs = list(padding)
    if mode != "constant":
        while len(pairs) > 1 and tuple(pairs[0]) == (0, 0) and len(pairs) > x.dim() - 2:
            pairs = pairs[1:]
    flat = [p for lo_hi in reversed(pairs) for p in lo_hi]
    return F.pad(x, flat, mode, value) if mode == "constant" else F.pad(x, flat, mode)


def slice_(x: Tensor, *, axis: int, start: int, end: int | None, step: int) -> Tensor:
    index: list[Any] = [slice(None)] * x.dim()
    index[axis] = slice(start, end, step)
    return x[tuple(index)]


def resize(x: Tensor, *, mode: str, size: Any, scale: Any, align_corners: bool) -> Tensor:
    names = {"nearest": "nearest", "linear": ("linear", "bilinear", "trilinear")[x.dim() - 3], "cubic": "bicubic"}
    corners = None if mode == "nearest" else align_corners
    if size is not None:
        return F.interpolate(x, tuple(size), mode=names[mode], align_corners=corners)
    return F.interpolate(
        x, scale_factor=tuple(scale), mode=names[mode], align_corners=corners, recompute_scale_factor=False
    )


def squeeze(x: Tensor, *, axes: Any) -> Tensor:
    return torch.squeeze(x, tuple(axes))


def unsqueeze(x: Tensor, *, axes: Any) -> Tensor:
    for a in axes:
        x = torch.unsqueeze(x, a)
    return x


def gather(x: Tensor, index: Tensor, *, axis: int) -> Tensor:
    if axis % x.dim() == 0:
        return x[index]
    return x[(slice(None),) * (axis % x.dim()) + (index,)]


def roll(x: Tensor, *, shifts: Any, axes: Any) -> Tensor:
    return torch.roll(x, tuple(shifts), tuple(axes))


def dropout(x: Tensor, *, p: float, training: bool = False) -> Tensor:
    return F.dropout(x, p, training)


def _unary(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def kernel(x: Tensor) -> Tensor:
        return f(x)

    kernel.__name__ = getattr(f, "__name__", "unary")
    return kernel


def leaky_relu(x: Tensor, *, negative_slope: float) -> Tensor:
    return F.leaky_relu(x, negative_slope)


def elu(x: Tensor, *, alpha: float) -> Tensor:
    return F.elu(x, alpha)


def softplus(x: Tensor, *, beta: float, threshold: float) -> Tensor:
    return F.softplus(x, beta, threshold)


def gelu(x: Tensor, *, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def softmax(x: Tensor, *, axis: int) -> Tensor:
    return torch.softmax(x, axis)


def log_softmax(x: Tensor, *, axis: int) -> Tensor:
    return torch.log_softmax(x, axis)


def concat(*xs: Tensor, axis: int) -> Tensor:
    return torch.cat(xs, axis)


def stack(*xs: Tensor, axis: int) -> Tensor:
    return torch.stack(xs, axis)


def split(x: Tensor, *, axis: int, sizes: Any) -> tuple[Tensor, ...]:
    return torch.split(x, list(sizes), axis)


def unstack(x: Tensor, *, axis: int) -> tuple[Tensor, ...]:
    return torch.unbind(x, axis)


def cum_sum(x: Tensor, *, axis: int) -> Tensor:
    return torch.cumsum(x, axis)


def reshape(x: Tensor, *, shape: Any) -> Tensor:
    return torch.reshape(x, tuple(shape))


def transpose(x: Tensor, *, perm: Any) -> Tensor:
    return torch.permute(x, tuple(perm))


def expand(x: Tensor, *, shape: Any) -> Tensor:
    return x.expand(tuple(shape))


def select(x: Tensor, *, axis: int, index: int) -> Tensor:
    return torch.select(x, axis, index)


def embedding(w: Tensor, index: Tensor) -> Tensor:
    return F.embedding(index, w)


def tile(x: Tensor, *, repeats: Any) -> Tensor:
    return x.repeat(tuple(repeats))


def depth_to_space(x: Tensor, *, block: int) -> Tensor:
    return F.pixel_shuffle(x, block)


def space_to_depth(x: Tensor, *, block: int) -> Tensor:
    return F.pixel_unshuffle(x, block)


def channel_shuffle(x: Tensor, *, groups: int) -> Tensor:
    return F.channel_shuffle(x, groups)


def cast(x: Tensor, *, dtype: str) -> Tensor:
    return x.to(getattr(torch, dtype))


def size(x: Tensor, *, axis: int) -> int:
    return x.shape[axis]


def reduce_l2(x: Tensor, *, axes: Any, keepdims: bool) -> Tensor:
    return torch.linalg.vector_norm(x, 2, tuple(axes), keepdims)


KERNELS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D"), conv),
    **dict.fromkeys(("TransposeConv1D", "TransposeConv2D", "TransposeConv3D"), conv_transpose),
    "Linear": F.linear,
    "MatMul": torch.matmul,
    "BatchNorm": batch_norm,
    "LayerNorm": layer_norm,
    "GroupNorm": group_norm,
    "InstanceNorm": instance_norm,
    "RMSNorm": rms_norm,
    "SDPA": sdpa,
    "Relu": _unary(torch.relu),
    "Relu6": _unary(F.relu6),
    "Sigmoid": _unary(torch.sigmoid),
    "Tanh": _unary(torch.tanh),
    "HardSwish": _unary(F.hardswish),
    "HardSigmoid": _unary(F.hardsigmoid),
    "Swish": _unary(F.silu),
    "Mish": _unary(F.mish),
    "Selu": _unary(F.selu),
    "Exp": torch.exp,
    "Log": torch.log,
    "Abs": torch.abs,
    "Neg": torch.neg,
    "Sqrt": torch.sqrt,
    "Rsqrt": torch.rsqrt,
    "Sin": torch.sin,
    "Cos": torch.cos,
    "Erf": torch.erf,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Round": torch.round,
    "Sign": torch.sign,
    "Reciprocal": torch.reciprocal,
    "LogicalNot": torch.logical_not,
    "Identity": _unary(lambda x: x),
    "Requantize": _unary(lambda x: x),
    "Clamp": clamp,
    "LeakyRelu": leaky_relu,
    "PRelu": prelu,
    "Elu": elu,
    "Softplus": softplus,
    "Gelu": gelu,
    "Softmax": softmax,
    "LogSoftmax": log_softmax,
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": torch.div,
    "Pow": torch.pow,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Mod": torch.remainder,
    "FloorDiv": torch.floor_divide,
    "Equal": torch.eq,
    "NotEqual": torch.ne,
    "Less": torch.lt,
    "LessEqual": torch.le,
    "Greater": torch.gt,
    "GreaterEqual": torch.ge,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "Concat": concat,
    "Stack": stack,
    "Split": split,
    "Unstack": unstack,
    "MaxPool": max_pool,
    "AvgPool": avg_pool,
    "GlobalAvgPool": global_avg_pool,
    "AdaptiveAvgPool": adaptive_avg_pool,
    "AdaptiveMaxPool": adaptive_max_pool,
    "Mean": _reduce(torch.mean),
    "Sum": _reduce(torch.sum),
    "ReduceMax": _reduce(torch.amax),
    "ReduceMin": _reduce(torch.amin),
    "ReduceProd": reduce_prod,
    "ReduceL2": reduce_l2,
    "ArgMax": arg_max,
    "CumSum": cum_sum,
    "Pad": pad,
    "Reshape": reshape,
    "Transpose": transpose,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Expand": expand,
    "Slice": slice_,
    "Select": select,
    "Gather": gather,
    "Embedding": embedding,
    "Where": torch.where,
    "Roll": roll,
    "Tile": tile,
    "Resize": resize,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    "ChannelShuffle": channel_shuffle,
    "Cast": cast,
    "Size": size,
    "Dropout": dropout,
}


def call(node: Node, inputs: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What to call for a node, as (callable, args, kwargs); `inputs` may be tensors or fx nodes."""
    if node.op == OPAQUE:
        return (
            resolve_target(node.attrs["target"]),
            tuple(fill(node.attrs["args"], inputs)),
            fill(node.attrs["kwargs"], inputs),
        )
    return KERNELS[node.op], tuple(inputs), node.attrs


def execute(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run one node eagerly; inputs by slot (None when absent), one result per output."""
    f, args, kwargs = call(node, inputs)
    out = f(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)
