"""The kernels of the torch engine, one per canonical operator, called as `kernel(*operands, **attributes)`.

Calibration, simulation and the trainable model use the same kernels; autograd, autocast, `torch.compile` and
`torch.export` see plain torch. A cell of the table of operators names the function: one of torch, or one of these.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.engine.curves import compute
from chipfit.engine.opaque import fill, resolve_target
from chipfit.engine.types import dtype_of
from chipfit.errors import DataError
from chipfit.graph.ir import OPAQUE, Node
from chipfit.operators.table import attribute_words, by_name, read_column, renamed, resolve
from chipfit.quantizers.dynamic import dynamic_quantize
from chipfit.quantizers.ops import TorchOps

Kernel = Callable[..., Any]

KERNELS: dict[str, Kernel] = {}


def _spatial(name: str, axes: int) -> Callable[..., Tensor]:
    """Return torch's function for a number of spatial axes, such as `F.conv2d`."""
    function: Callable[..., Tensor] = getattr(F, f"{name}{axes}d")
    return function


def _pad_spatial(x: Tensor, padding: Sequence[Sequence[int]], value: float = 0.0) -> tuple[Tensor, list[int]]:
    """Pad x if the padding is asymmetric; return x and the symmetric padding left for the kernel."""
    if all(lo == hi for lo, hi in padding):
        return x, [lo for lo, _ in padding]
    return F.pad(x, _flat(padding), value=value), [0] * len(padding)


def _flat(padding: Sequence[Sequence[int]]) -> list[int]:
    """Return ((lo, hi), ...) in the order of `F.pad`: the last axis first."""
    return [p for lo_hi in reversed(padding) for p in lo_hi]


# ---------------------------------------------------------------- weights


def conv(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, stride: Any, padding: Any, dilation: Any, groups: int
) -> Tensor:
    """Convolve over 1 to 3 spatial axes; x [N, C, ...], w [O, C / groups, ...]."""
    x, pad = _pad_spatial(x, padding)
    return _spatial("conv", w.dim() - 2)(x, w, b, stride, pad, dilation, groups)


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
    """Apply a transposed convolution, w [C, O / groups, ...]; padding trims the output."""
    both = [min(lo, hi) for lo, hi in padding]
    y = _spatial("conv_transpose", w.dim() - 2)(x, w, b, stride, both, output_padding, groups, dilation)
    for axis, ((lo, hi), cut) in enumerate(zip(padding, both, strict=True), start=2):
        y = y.narrow(axis, lo - cut, y.shape[axis] - lo - hi + 2 * cut)  # the asymmetric rest
    return y


def prelu(x: Tensor, w: Tensor) -> Tensor:
    """Multiply by a slope below zero; slopes [1], [C], or those of one sample, channels first."""
    return F.prelu(x, w) if w.dim() < 2 else torch.where(x > 0, x, x * w)


def divide(x: Tensor, y: Tensor) -> Tensor:
    """Divide; integers towards zero, as files do. The least integer by -1, on which processors trap, stays itself."""
    if torch.is_floating_point(x) or torch.is_floating_point(y):
        return torch.div(x, y)
    return torch.where(y == -1, -x, torch.div(x, torch.where(y == -1, 1, y), rounding_mode="trunc"))


def floor_divide(x: Tensor, y: Tensor) -> Tensor:
    """Round a quotient down, as runtimes do; `torch.floor_divide` rounds that of the exact numbers."""
    return torch.floor(x / y) if torch.is_floating_point(x) else torch.floor_divide(x, y)


def curve(x: Tensor, *, steps: str) -> Tensor:
    """Compute a function of each element by its steps."""
    result: Tensor = compute(steps, x, KERNELS.__getitem__, partial(torch.tensor, dtype=x.dtype, device=x.device))
    return result


# ---------------------------------------------------------------- pooling and reduction


def max_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Tensor:
    x, pad = _pad_spatial(x, padding, -math.inf)
    return _spatial("max_pool", len(kernel))(x, kernel, stride, pad, dilation, ceil_mode)


def avg_pool(x: Tensor, *, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool) -> Tensor:
    f = _spatial("avg_pool", len(kernel))
    padded, pad = _pad_spatial(x, padding)
    if padded is x:
        return f(x, kernel, stride, pad, ceil_mode, count_include_pad)
    ones, _ = _pad_spatial(torch.ones_like(x[:1, :1]), padding, float(count_include_pad))
    return f(padded, kernel, stride, 0, ceil_mode) / f(ones, kernel, stride, 0, ceil_mode)  # share that counts


def reduce_prod(x: Tensor, *, axes: Any, keepdims: bool) -> Tensor:
    for a in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(a, keepdim=keepdims, dtype=x.dtype)
    return x


# ---------------------------------------------------------------- moving data


def pad(x: Tensor, *, padding: Any, mode: str, value: float) -> Tensor:
    """Pad every axis by ((lo, hi), ...); reflecting modes pad trailing spatial axes only."""
    pairs = list(padding)
    if mode == "constant":
        return F.pad(x, _flat(pairs), mode, value)
    while len(pairs) > 1 and tuple(pairs[0]) == (0, 0) and len(pairs) > x.dim() - 2:
        pairs = pairs[1:]
    return F.pad(x, _flat(pairs), mode)


def top_k(x: Tensor, *, k: int | None, axis: int, largest: bool) -> tuple[Tensor, Tensor]:
    """Return the first k values in order along an axis, and their indices; of equal values the lowest index first.

    Runtimes break ties so (ONNX operator TopK); `torch.topk` leaves the order of equal values open.
    """
    values, indices = x.sort(dim=axis, descending=largest, stable=True)
    length = x.shape[axis] if k is None else k
    return values.narrow(axis, 0, length), indices.narrow(axis, 0, length)


def strided_slice(x: Tensor, *, axis: int, start: int, end: int | None, step: int) -> Tensor:
    index: list[Any] = [slice(None)] * x.dim()
    index[axis] = slice(start, end, step)
    return x[tuple(index)]


def resize(x: Tensor, *, mode: str, size: Any, scale: Any, align_corners: bool) -> Tensor:
    """Resize spatial axes to `size` or by `scale`; the other one is None."""
    if mode == "linear_corner":
        return _interpolated_from_corners(x, size, scale)
    names = {"linear": ("linear", "bilinear", "trilinear")[x.dim() - 3], "cubic": "bicubic"}
    names |= {"nearest": "nearest", "nearest_exact": "nearest-exact"}
    corners = None if mode in ("nearest", "nearest_exact") else align_corners
    if size is not None:
        return F.interpolate(x, size, mode=names[mode], align_corners=corners)
    return F.interpolate(x, None, scale, names[mode], corners, recompute_scale_factor=False)


def grid_sample(x: Tensor, grid: Tensor, *, mode: str, padding_mode: str, align_corners: bool) -> Tensor:
    """Sample an image at the places of a grid."""
    return F.grid_sample(x, grid, mode, padding_mode, align_corners)


def _interpolated_from_corners(x: Tensor, size: Any, scale: Any) -> Tensor:
    """Interpolate linearly between corners of pixels: result k lies at k / scale."""
    for axis, old in enumerate(x.shape[2:], 2):
        factor = scale[axis - 2] if size is None else size[axis - 2] / old
        at = torch.arange(math.floor(old * factor) if size is None else size[axis - 2], device=x.device) / factor
        low = at.long().clamp_max(old - 1)
        share = ((at - low).clamp_max(1)).reshape(-1, *[1] * (x.dim() - 1 - axis)).to(x.dtype)
        x = x.index_select(axis, low) * (1 - share) + x.index_select(axis, (low + 1).clamp_max(old - 1)) * share
    return x


def unsqueeze(x: Tensor, *, axes: Any) -> Tensor:
    for a in axes:
        x = torch.unsqueeze(x, a)
    return x


def gather(w: Tensor, index: Tensor, *, axis: int) -> Tensor:
    """Return the entries of w along an axis, such as rows of a table.

    Raises:
        DataError: an index is out of range.
    """
    try:
        return w[(slice(None),) * (axis % w.dim()) + (index,)] if axis or w.dim() != 2 else F.embedding(index, w)
    except IndexError:
        got, allowed = f"{int(index.min())} to {int(index.max())}", f"0 to {w.shape[axis] - 1}"
        hint = "does the tokenizer belong to this model? Ids of padding and positions need rows, too"
        raise DataError("Ids are out of the table's range", got=got, allowed=allowed, hint=hint) from None


def _filled(x: Tensor, shape: Sequence[int | None], sizes: Sequence[int]) -> list[int]:
    """Return a shape with each None replaced by the next of `sizes`, and each 0 by the size of `x`."""
    left = [*sizes]
    return [left.pop(0) if s is None else s or x.shape[k] for k, s in enumerate(shape)]


# ---------------------------------------------------------------- one expression each

#: function that cells of the table may name -> the function
_BY_NAME: dict[str, Kernel] = {
    "embedding": lambda w, index: gather(w, index, axis=0),
    # not the one of `torch.nn.functional`, which refuses an eps of 0 in some versions
    "batch_norm": lambda x, w, b, mean, var, *, eps: torch.batch_norm(
        x, w, b, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled
    ),
    "layer_norm": lambda x, w=None, b=None, *, normalized_shape, eps: F.layer_norm(x, normalized_shape, w, b, eps),
    # in channels-last layout, torch computes E[x^2] - E[x]^2, which loses small deviations from a large mean
    "group_norm": lambda x, w=None, b=None, *, groups, eps: F.group_norm(x.contiguous(), groups, w, b, eps),
    "instance_norm": lambda x, w=None, b=None, *, eps: F.instance_norm(x, weight=w, bias=b, eps=eps),
    "rms_norm": lambda x, w=None, *, normalized_shape, eps: F.rms_norm(x, normalized_shape, w, eps),
    # integers keep their type, as in files; torch's own default is int64
    "sum": lambda x, *, axes, keepdims: x.sum(axes, keepdims, dtype=x.dtype),
    "cum_sum": lambda x, *, axis: x.cumsum(axis, dtype=x.dtype),
    "identity": lambda x: x,
    "dynamic_quantize": lambda x, *, qmin, qmax, affine, per, block: dynamic_quantize(
        TorchOps, x.float(), qmin=qmin, qmax=qmax, affine=affine, per=per, block=block
    ).to(x.dtype),
    "dropout": lambda x, *, p, training=False: F.dropout(x, p, training),
    "cast": lambda x, *, dtype: x.to(dtype_of(dtype)),
    "global_avg_pool": lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
    "adaptive_avg_pool": lambda x, *, output_size: _spatial("adaptive_avg_pool", len(output_size))(x, output_size),
    "adaptive_max_pool": lambda x, *, output_size: _spatial("adaptive_max_pool", len(output_size))(x, output_size),
    "gather_elements": lambda x, index, *, axis: x.gather(axis, index.long()),
    "concat": lambda *xs, axis: torch.cat(xs, axis),
    "stack": lambda *xs, axis: torch.stack(xs, axis),
    "size": lambda x, *, axis: x.shape[axis],
    "expand": lambda x, *sizes, shape: x.expand(_filled(x, shape, sizes)),
    "squared_difference": lambda x, y: torch.sub(x, y).square(),
    "reshape": lambda x, *sizes, shape: x.reshape(_filled(x, shape, sizes)),
    **by_name(
        *(conv, conv_transpose, prelu, divide, floor_divide, curve, max_pool, avg_pool, reduce_prod, pad, top_k),
        *(resize, unsqueeze, gather, strided_slice, grid_sample),
    ),
}


def _enter_cell(op: str, name: str | Kernel, attrs: str = "") -> None:
    """Enter a cell of the table: a function, its name here, or "module:function"; `attrs` are its names of ours."""
    function: Kernel = resolve_name(name) if isinstance(name, str) and ":" in name else resolve(name, _BY_NAME)
    names = {ours: theirs for ours, theirs, _ in attribute_words(attrs)}
    KERNELS[op] = renamed(function, names) if names else function


read_column("kernel", _enter_cell, KERNELS)


# ---------------------------------------------------------------- running a node


def call(node: Node, inputs: Sequence[Any]) -> tuple[Kernel, Sequence[Any], dict[str, Any]]:
    """Return (callable, args, kwargs) of a node."""
    attrs = node.attrs
    if node.op == OPAQUE:
        return resolve_target(attrs["target"]), fill(attrs["args"], inputs), fill(attrs["kwargs"], inputs)
    return KERNELS[node.op], inputs, attrs


def run_operator(op: str, *operands: Any, **attributes: Any) -> Any:
    """Run an operator by its name; return its result, or a tuple of several."""
    out = KERNELS[op](*operands, **attributes)
    return out[0] if isinstance(out, (tuple, list)) and len(out) == 1 else out


def execute(node: Node, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Run one node eagerly and return one result per output; absent inputs are None."""
    f, args, kwargs = call(node, inputs)
    out = f(*args, **kwargs)
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)
