"""Functions of 16-bit integers as LiteRT computes them: short tables with linear interpolation between entries.

Source: TensorFlow Lite, kernels/internal/common.h and reference/integer_ops/{logistic,tanh}.h, reference/softmax.h.
"""

from collections.abc import Callable
from functools import partial

import torch

from chipfit.simulate.libm import libm
from chipfit.simulate.requantize import fixed_point, shift_up

Tensor = torch.Tensor
Function = Callable[[Tensor], Tensor]
LOW, HIGH = -(1 << 15), (1 << 15) - 1


def _away(x: Tensor) -> Tensor:
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def _table(f: Function, scale: Tensor, zero: int, result: Tensor) -> Tensor:
    """Return 513 entries of round(f / result), lowered if interpolation would be too high half way, int64.

    Args:
        f: a function of floats of the scales' type.
        scale, zero: of the integers q that index the table: x = scale (q - zero).
        result: scale of the results.
    """
    low, high = (scale * (end - zero) for end in (LOW, HIGH))
    per_unit = 65536.0 / (result * HIGH - result * LOW)
    step = (high - low) / 512
    at = low + torch.arange(512, dtype=scale.dtype) * step
    here = _away(f(at) * per_unit)
    line = _away((f(low + torch.arange(1, 513, dtype=scale.dtype) * step) * per_unit + here) / 2)
    excess = _away((line - _away(f(at + step / 2) * per_unit)) / 2)
    entries = torch.cat([here - excess, _away(f(high.reshape(1)) * per_unit)])
    return entries.clamp(LOW, HIGH).long()


def _read(table: Tensor, q: Tensor) -> Tensor:
    at = 256 + (q >> 7)
    return table[at] + shift_up((table[at + 1] - table[at]) * (q & 127), 7)


def apply(f: Function, q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """Return f of integers with zero point 0, as integers of scale `result`; int64."""
    return _read(_table(f, scale, 0, result), q)


def sigmoid_table() -> Tensor:
    """Return 65536 sigmoid(i / 24), i = 0 .. 255, lowered as in `_table`."""
    i = torch.arange(256, dtype=torch.float64)
    here, middle, after = (65536 * torch.sigmoid((i + part) / 24) for part in (0.0, 0.5, 1.0))
    table = torch.floor(here - ((here + after) / 2 - middle) / 2 + 0.5).long()
    table[255] = 65535
    return table


def in_12288ths(q: Tensor, scale: Tensor, shifts: tuple[int, ...]) -> Tensor:
    """Return q in steps of 1 / 12288: by a shift if the scale is 2^(shift - 12), else by a 15-bit multiplier."""
    exact = 12 + torch.log2(scale.double())
    if float(exact) in shifts:
        return q * (3 << int(exact))
    real, shift = float(scale) * 4096.0 * 3.0, 0
    while real <= 32767.0 / 2.0 and shift <= 30:
        real, shift = 2 * real, shift + 1
    return shift_up(q * int(real), shift)


def _line(x: Tensor, bits: int, end: int) -> Tensor:
    """Interpolate the table with `bits` fractional bits; beyond it return `end`."""
    table, size = sigmoid_table(), x.abs()
    at = (size >> bits).clamp_max(254)
    y = (table[at] << bits) + (size & (1 << bits) - 1) * (table[at + 1] - table[at])
    return torch.where(size >> bits >= 255, end, y)


def sigmoid(q: Tensor, scale: Tensor) -> Tensor:
    """Return integers of scale 1/32768."""
    x = in_12288ths(q, scale, (0,))
    y = _line(x, 9, HIGH << 10)
    return torch.where(x >= 0, y + 512, (1 << 25) - y + 511) >> 10


def tanh(q: Tensor, scale: Tensor) -> Tensor:
    """Return integers of scale 1/32768."""
    return tanh_of_12288ths(in_12288ths(q, scale, (0, 1)))


def tanh_of_12288ths(x: Tensor) -> Tensor:
    """Return integers of scale 1/32768, given those of scale 1/12288."""
    y = _line(x, 8, 65535 << 8)
    return torch.where(x >= 0, y - (1 << 23) + 128, (1 << 23) - y + 127) >> 8


def softmax(q: Tensor, scale: Tensor, kind: torch.dtype = torch.float64) -> Tensor:
    """Return a softmax over the last axis, of scale 1/32768: tables of exp on -10 .. 0 and of 1 / (1 + x) on 0 .. 1.

    Args:
        kind: type of the floats that the tables are computed in.
    """
    one, ten, two = (torch.tensor(v, dtype=kind) / 65535 for v in (1.0, 10.0, 2.0))
    exp = _table(torch.exp if kind == torch.float64 else partial(libm, "exp"), ten, HIGH, two)
    inverse = _table(lambda x: 1.0 / (1.0 + x), one, LOW, two)
    diff = q - q.amax(-1, keepdim=True)
    e = _read(exp, (fixed_point(diff, scale.double() / (10.0 / 65535.0), "away") + HIGH).clamp(LOW, HIGH))
    total = e.sum(-1, keepdim=True)
    digits = torch.frexp(total.double()).exponent.long()  # total < 2^digits
    mantissa = ((total << 31 - digits) + (1 << 13)) >> 14
    r = _read(inverse, (mantissa - (1 << 15) - (1 << 16)).clamp(LOW, HIGH))
    return shift_up(e * r, digits - 1).clamp(0, HIGH)
