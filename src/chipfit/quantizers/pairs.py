"""Weights bounded in pairs of neighbours, for processors that add two products in a narrow register.

Without VNNI, x86 processors multiply unsigned data by signed weights and add the products 2j and 2j + 1 of each sum in
16 bits, with saturation (vpmaddubsw). Data of 8 bits stay inside if the magnitudes of two neighbouring weights of one
sign add up to at most 128, since 255 * 128 < 2^15. Products are in the order in which kernels add them: by position in
the kernel, then by input channel.

Source: ONNX Runtime, onnxruntime/core/mlas/lib/x86_64/{QgemmU8X8KernelAvx2,QgemvU8S8KernelAvx2,ConvSymKernelAvx2}.S;
`ReorderFilter` of onnxruntime/core/providers/cpu/quantization/qlinearconv.cc.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.ops import ste

#: pairs with the greatest sums that are looked at in each row when a scale is chosen, and scales that are tried
_GREATEST, _TRIES = 64, 24
#: the scale of a row of at most so many weights is tuned by their own errors, which average out over more
_LONGEST = 256
#: multiples of a scale that are tried then
_NEARBY = torch.linspace(0.85, 1.15, 49)
#: numbers held at once
_CHUNK = 1 << 18

#: axes of the output channels: one or several; None for the right operand of a matrix product, [..., K, N]
Axes = int | tuple[int, ...] | None


def _order(rank: int, outputs: Axes) -> tuple[list[int], int]:
    """Return the axes of a weight in the order of `rows_of_sums`, and how many of them count rows.

    Weights with output channels on axis 0 are [O, I, *kernel], others [*kernel, I, O].
    """
    if outputs is None:
        return [*range(rank - 2), rank - 1, rank - 2], rank - 1
    if outputs == 0:
        return [0, *range(2, rank), *range(1, min(rank, 2))], 1
    first = [a % rank for a in (outputs if isinstance(outputs, tuple) else (outputs,))]
    return [*first, *(a for a in range(rank) if a not in first)], len(first)


def rows_of_sums(ops: Any, w: Any, outputs: Axes) -> Any:
    """Return a weight as [rows, K]: the K weights of each sum, in the order in which kernels add their products."""
    order, count = _order(len(w.shape), outputs)
    first = math.prod([w.shape[a] for a in order[:count]])  # a list: torch.compile takes no generator here
    return ops.reshape(ops.moveaxis(w, order, list(range(len(order)))), (first, -1))


def bounded(ops: Any, q: Any, limit: int, outputs: Axes) -> Any:
    """Return quantized weights with every pair of neighbours of one sign moved to a sum of magnitudes <= limit.

    Half of what is too much is taken from each, the odd unit from the larger.

    Args:
        ops: `quantizers.ops.TorchOps`, or its twin for Keras.
        q: integers as floats, zero point 0, [*dims].
        outputs: axes of the output channels.

    >>> from chipfit.quantizers.ops import TorchOps
    >>> bounded(TorchOps, torch.tensor([[127.0, 4.0, -100.0, 100.0, 90.0]]), 128, 0).tolist()
    [[125.0, 3.0, -100.0, 100.0, 90.0]]
    """
    order, _ = _order(len(q.shape), outputs)
    rows = rows_of_sums(ops, q, outputs)
    even = rows.shape[1] // 2 * 2
    pairs = ops.reshape(rows[:, :even], (rows.shape[0], even // 2, 2))
    moved = ops.stack(_moved(ops, pairs[..., 0], pairs[..., 1], limit), -1)
    rows = ops.concatenate([ops.reshape(moved, (rows.shape[0], even)), rows[:, even:]], 1)
    return ops.moveaxis(ops.reshape(rows, [q.shape[a] for a in order]), list(range(len(order))), order)


def _moved(ops: Any, a: Any, b: Any, limit: int) -> tuple[Any, Any]:
    """Return neighbours a and b as `bounded` moves them."""
    excess = ops.abs(a + b) - limit
    excess = ops.where((a * b > 0) & (excess > 0), excess, excess * 0)
    half = ops.floor(excess / 2)
    of_a = ops.where(ops.abs(a) >= ops.abs(b), excess - half, half)
    return a - ops.sign(a) * of_a, b - ops.sign(b) * (excess - of_a)


def fake_bounded(ops: Any, y: Any, scale: Any, limit: int, outputs: Axes) -> Any:
    """Return fake-quantized weights y with their quantized values `bounded`; gradients pass straight through.

    Args:
        scale: broadcasts against y; the zero point is 0.
    """
    fixed, s = ops.stop_gradient(y), ops.stop_gradient(scale)
    q = ops.round(fixed / s)
    moved = bounded(ops, q, limit, outputs)
    return ste(ops, y, ops.where(moved == q, fixed, moved * s))


def bounded_codes(q: torch.Tensor, limit: int, outputs: Axes) -> torch.Tensor:
    """Return integers [*dims] of at most 16 bits as `bounded` does; only pairs beyond the limit cost more than a look.

    >>> bounded_codes(torch.tensor([[127, 4, -100, 100, 90]], dtype=torch.int8), 128, 0).tolist()
    [[125, 3, -100, 100, 90]]
    """
    if q.device.type != "cpu":  # the look would wait for the device
        moved: torch.Tensor = bounded(torch, q.float(), limit, outputs)
        return moved.to(q.dtype)
    order, _ = _order(q.dim(), outputs)
    rows: torch.Tensor = rows_of_sums(torch, q, outputs).clone(memory_format=torch.contiguous_format)
    a, b = rows[:, 0 : rows.shape[1] // 2 * 2 : 2], rows[:, 1::2]  # views
    beyond = (torch.add(a.to(torch.int32), b).abs_() > limit).nonzero(as_tuple=True)
    if len(beyond[0]):
        a[beyond], b[beyond] = (x.to(q.dtype) for x in _moved(torch, a[beyond].float(), b[beyond].float(), limit))
    return rows.reshape([q.shape[a] for a in order]).moveaxis(list(range(len(order))), order)


def sums_of_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of magnitudes of each pair of neighbours of one sign, 0 for other pairs; [rows, K // 2]."""
    a, b = rows[:, 0 : rows.shape[1] // 2 * 2 : 2], rows[:, 1::2]
    return (a + b).abs_().mul_(a * b > 0)


def _greatest(sums: torch.Tensor, count: int) -> torch.Tensor:
    """Return the greatest numbers >= 0 of each row, at most `count`, in descending order; [C, count]."""
    rows, width = len(sums), sums.shape[1] // 8
    if width > 2 * count:  # the greatest are in the groups of the greatest maxima
        groups = sums[:, : 8 * width].view(rows, 8, width)
        best = groups.amax(1).topk(count, sorted=False).indices.unsqueeze(1)
        sums = torch.cat([groups.gather(2, best.expand(-1, 8, -1)).flatten(1), sums[:, 8 * width :]], 1)
    return sums.topk(min(sums.shape[1], count)).values


def scale_for_pairs(w: torch.Tensor, scale: torch.Tensor, grid: Grid, outputs: Axes) -> torch.Tensor:
    """Return scales for weights that `bounded` moves, at least `scale`: those of the least squared error.

    A scale s costs K s^2 / 12 by rounding, and half of the square of what each pair has too much. Short rows then try
    scales nearby by what rounding costs them.

    Args:
        w: weights [*dims].
        scale: [], or [C] along the axis of the output channels.
        grid: with the limit of pairs.
    """
    assert grid.pair_limit is not None
    rows, limit = rows_of_sums(torch, w.detach(), outputs), grid.pair_limit
    sums = sums_of_pairs(rows)
    if not sums.numel():
        return scale
    if not scale.dim():
        rows, sums = rows.reshape(1, -1), sums.reshape(1, -1)
    top = _greatest(sums, _GREATEST * max(1, sums.shape[1] // 4096))
    least = scale.reshape(-1, 1)
    most = torch.maximum(top[:, :1] / limit, least)
    tried = least + (most - least) * torch.linspace(1, 0, _TRIES)  # [C, tries]
    cost = rows.shape[1] / 12 * tried.square() + _cost_of_excess(top, tried, limit)
    found = tried.gather(1, cost.argmin(1, keepdim=True))  # [C, 1]
    beyond = (most > least).flatten().nonzero().flatten()
    if rows.shape[1] <= _LONGEST and len(beyond):
        found[beyond] = _tuned(rows[beyond], found[beyond], least[beyond], top[beyond], grid)
    return found.reshape(scale.shape)


def _cost_of_excess(top: torch.Tensor, scales: torch.Tensor, limit: int) -> torch.Tensor:
    """Return half of the sum of squares of what pairs have too much at each scale, [C, tries].

    Args:
        top: greatest sums of pairs [C, count].
        scales: [C, tries].
    """
    return (top.unsqueeze(1) - limit * scales.unsqueeze(2)).clamp_min_(0).square_().sum(2) / 2


def _tuned(rows: torch.Tensor, scale: torch.Tensor, least: torch.Tensor, top: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the scales near `scale`, at least `least`, with the least squared error; all [C, 1], rows [C, K]."""
    assert grid.pair_limit is not None
    tried = torch.cat([scale, torch.maximum(scale * _NEARBY, least)], 1)
    cost = _cost_of_excess(top, tried, grid.pair_limit)
    size = max(1, _CHUNK // (rows.shape[1] * tried.shape[1]))
    for part, s, c in zip(*(torch.split(x, size) for x in (rows, tried, cost)), strict=True):
        in_steps = part.unsqueeze(1) / s.unsqueeze(2)
        e = in_steps.round().clamp_(grid.qmin, grid.qmax).sub_(in_steps)
        c += torch.linalg.vector_norm(e, dim=2).mul_(s).square_()
    return tried.gather(1, cost.argmin(1, keepdim=True))


def output_axes(shape: Sequence[int]) -> Axes:
    """Return the axes of the output channels of a weight [*kernel, I, O] by the shape of its scale; see `bounded`."""
    if not shape:
        return None
    return tuple(k for k, n in enumerate(shape) if n > 1) or len(shape) - 1
