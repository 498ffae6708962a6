"""Exact sums of products of 8-bit integers, in the processor's own integers; several times as fast as in float64.

Not every processor adds such products exactly, and torch's function has given wrong numbers for odd shapes, so every
result is checked, which costs little: r (X W^T) = (r X) W^T for a random r (Freivalds 1977), both modulo 2^32. With r
on the left torch adds whole rows, several times as fast as products along them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.engine.kernels import pad

#: number of products whose sum fits 32 bits, whatever the integers: below 2^15 each, with the zero point
_MOST = (1 << 16) - 1
#: number of products whose partial sums float32 holds exactly: below 2^15 each, with the zero point
_IN_FLOAT = 1 << 9


def fits(x: Tensor, zero: Tensor, w: Tensor, w_zero: Tensor) -> bool:
    """Return whether this module can add products of these integers; w: [O, ...]."""
    kinds = x.dtype in (torch.uint8, torch.int8) and w.dtype == torch.int8
    here = x.device.type == "cpu" and hasattr(torch, "_int_mm")
    one = zero.numel() == 1 or zero.shape == (*x.shape[:-1], 1)
    return here and kinds and one and not w_zero.any() and 0 < w[0].numel() <= _MOST and x.numel() > 0


def multiplied(x: Tensor, zero: Tensor, w: Tensor) -> Tensor:
    """Return int32 sums [..., O] of (x - zero) w over the last axis, for x [..., K], w [O, K], zero [] or [..., 1]."""
    shift = 128 if x.dtype == torch.uint8 else 0
    signed = x.bitwise_xor(128).view(torch.int8) if shift else x
    rows, wide = signed.reshape(-1, x.shape[-1]), w.int()
    acc: Tensor = torch._int_mm(rows, w.t())
    r = torch.randint(1, 256, (len(rows),), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    if not torch.equal(r @ acc, (r @ rows.int()) @ wide.t()):
        acc = F.linear(rows.double(), w.double()).int()
    offset = (shift - zero.reshape(-1, 1).int()) * wide.sum(1, dtype=torch.int32)
    return acc.add_(offset).reshape(*x.shape[:-1], len(w))


class Windows(TypedDict):
    """The attributes of a convolution, one number or pair for each spatial axis."""

    stride: Sequence[int]
    padding: Sequence[Sequence[int]]
    dilation: Sequence[int]
    groups: int


def convolved(x: Tensor, zero: Tensor, w: Tensor, **how: Unpack[Windows]) -> Tensor | None:
    """Return a convolution's sums of (x - zero) w, [N, O, *out] in int32 or (exact) float32.

    One group: windows become rows of a matrix. Depthwise: products are added kernel position by kernel position. Other
    groups: None.

    Args:
        x: [N, C, *S].
        w: [O, C / groups, *k].
    """
    stride, dilation, groups = how["stride"], how["dilation"], how["groups"]
    kernel, count = w.shape[2:], w[0].numel()
    if groups > 1 and not (groups == x.shape[1] == len(w) and count <= _IN_FLOAT):
        return None
    padded = pad(x, padding=how["padding"], mode="constant", value=int(zero)).movedim(1, -1).contiguous()
    n, *size, c = padded.shape
    out = _output_size(size, kernel, stride, dilation)
    if groups == 1:
        batch, *steps, one = padded.stride()
        between = [s * t for s, t in zip(steps, stride, strict=True)]
        inside = [s * d for s, d in zip(steps, dilation, strict=True)]
        windows = padded.as_strided((n, *out, *kernel, c), (batch, *between, *inside, one)).reshape(n, *out, -1)
        return multiplied(windows, zero, w.movedim(1, -1).reshape(len(w), -1)).movedim(-1, 1)
    acc, centred, factors = torch.zeros(n, *out, c), padded.float() - float(zero), w.float().flatten(1)
    for k, elements in enumerate(_by_kernel_position(centred, kernel, stride, dilation)):
        acc.addcmul_(elements, factors[:, k])
    return acc.movedim(-1, 1)


def _output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [(s - d * (k - 1) - 1) // t + 1 for s, k, t, d in zip(size, kernel, stride, dilation, strict=True)]


def _by_kernel_position(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Iterator[Tensor]:
    """Yield, for each position in the kernel, the elements [N, *out, C] of x [N, *S, C] that its weight multiplies."""
    out = _output_size(x.shape[1:-1], kernel, stride, dilation)
    for position in product(*[range(k) for k in kernel]):
        starts = [p * d for p, d in zip(position, dilation, strict=True)]
        ends = [s + (o - 1) * t + 1 for s, o, t in zip(starts, out, stride, strict=True)]
        yield x[(slice(None), *map(slice, starts, ends, stride))]


def lost_in_pairs(x: Tensor, w: Tensor) -> Tensor | None:
    """Return what sums of products gain where two neighbours saturate in 16 bits, [rows, O] in int32; None if none can.

    Processors without VNNI add the products of the elements 2j and 2j + 1 in 16 bits: u8 by s8, with saturation.

    Args:
        x: codes [rows, K]; signed ones are added in 32 bits.
        w: codes [O, K].

    Source: ONNX Runtime, core/mlas/lib/x86_64/QgemmU8X8KernelAvx2.S (vpmaddubsw).
    """
    if w.dtype != torch.int8 or x.dtype != torch.uint8 or w.shape[1] < 2:
        return None
    pairs = w[:, : w.shape[1] // 2 * 2].int().unflatten(1, (-1, 2))
    risky = pairs.sum(2).abs() > 128  # 255 * 128 < 2^15; products of other signs stay below
    if not risky.any():
        return None
    raw = x[:, : w.shape[1] // 2 * 2].int()
    left, right = raw[:, ::2], raw[:, 1::2]
    lost = torch.zeros(len(x), len(w), dtype=torch.int32)
    for o in risky.any(1).nonzero().flatten().tolist():
        at = risky[o].nonzero().flatten()
        sums = left[:, at] * pairs[o, at, 0] + right[:, at] * pairs[o, at, 1]
        lost[:, o] = (sums.clamp(-(1 << 15), (1 << 15) - 1) - sums).sum(1)
    return lost


def lost_in_windows(x: Tensor, zero: Tensor, w: Tensor, **how: Unpack[Windows]) -> Tensor | None:
    """Return what the sums of a convolution gain by saturation, [N, O, *out] in int32; None if none can.

    Neighbours lie by position in the kernel, then by input channel. Groups of one channel to one add no pairs.
    """
    kernel, each, groups = w.shape[2:], w.shape[1], how["groups"]
    rows = w.movedim(1, -1).reshape(len(w), -1)
    if (each == 1 and len(w) == groups) or lost_in_pairs(x.new_zeros(0, rows.shape[1]), rows) is None:
        return None
    padded = pad(x, padding=how["padding"], mode="constant", value=int(zero)).movedim(1, -1)
    positions = _by_kernel_position(padded, kernel, how["stride"], how["dilation"])
    windows = torch.stack([p.unflatten(-1, (groups, each)) for p in positions], -2).flatten(-2)  # [N, *out, groups, K]
    n, *out = windows.shape[:-2]
    gains = []
    for g, weights in enumerate(rows.chunk(groups)):
        gain = lost_in_pairs(windows[..., g, :].reshape(-1, rows.shape[1]), weights)
        gains.append(torch.zeros(n * math.prod(out), len(weights), dtype=torch.int32) if gain is None else gain)
    return torch.cat(gains, 1).reshape(n, *out, -1).movedim(-1, 1)
