"""LiteRT's (TensorFlow Lite's) integer kernels: the reference ones, the optimised ones, and XNNPACK.

They differ in how they round. The reference kernels multiply by 31-bit integers and round twice, halves away from zero;
the optimised ones round matrix products twice with halves up; XNNPACK multiplies in float32 and rounds halves to even.
Sources: TensorFlow Lite, kernels/internal; XNNPACK, src/microparams-init.c and src/operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from chipfit.engine.kernels import execute, pad
from chipfit.graph.ir import Node
from chipfit.quantizers.grids import dequantize
from chipfit.quantizers.stored import Stored
from chipfit.registry import register
from chipfit.simulate import gemmlowp, tables16
from chipfit.simulate.integer import Kernel, Profile, Run, accumulate, move
from chipfit.simulate.requantize import fixed_point, multiplier_and_shift, scale_by, shift_away

Tensor = torch.Tensor


def round_away(x: Tensor) -> Tensor:
    """To the nearest integer, halves away from zero."""
    whole = torch.trunc(x)
    return whole + torch.sign(x) * ((x - whole).abs() >= 0.5)


def _f32(v: float) -> Tensor:
    return torch.tensor(v, dtype=torch.float32)


def _wide(run: Run, name: str) -> bool:
    """16-bit codes."""
    return run.stored(name).grid.bits > 8


def _names(unit: Sequence[Node]) -> tuple[str, str]:
    """First operand and result of a unit."""
    return unit[0].inputs[0] or "", unit[-1].output


# ---------------------------------------------------------------- products


def _scaled(acc: Tensor, real: Tensor, how: str) -> Tensor:
    """Accumulators to centred codes: XNNPACK's "float" product, the reference linear layer's "double" one, or a `fixed_point`."""
    if how == "float":
        return torch.round(acc.float() * real.float()).double()
    if how == "double":
        return round_away(acc.double() * real)
    return fixed_point(acc, real, how).double()


def _real(run: Run, *over: str, under: str, kind: torch.dtype = torch.float32) -> Tensor:
    """Product of the scales of `over` divided by that of `under`, in the precision that the kernel uses."""
    real = run.scale(over[0]).to(kind)
    for name in over[1:]:
        real = real * run.scale(name).to(kind)
    return real / run.scale(under).to(kind)


def _precision(how: str) -> torch.dtype:
    """In which products of weights compute their multiplier."""
    return torch.float32 if how == "float" else torch.float64


def _few_bits(run: Run, name: str) -> bool:
    """4-bit codes, two to a byte."""
    return run.stored(name).grid.bits <= 4


def _convolution(run: Run, unit: Sequence[Node], how: str) -> None:
    head, (x, out) = unit[0], _names(unit)
    w = head.inputs[1] or ""
    gaps = head.op.startswith("Transpose") and any(
        s > k for s, k in zip(head.attrs["stride"], run.code(w).shape[2:], strict=True)
    )
    if how == "float" and (gaps or _few_bits(run, w)):  # XNNPACK leaves these to LiteRT
        how = "up"
    if how == "up" and head.op.startswith("Conv") and head.attrs["groups"] > 1:  # no optimised kernel
        how = "away"
    if _wide(run, x):
        how = "q15"
    acc = accumulate(run, head)
    real = _real(run, x, w, under=out, kind=_precision(how)).expand(acc.shape[1]).view(-1, *[1] * (acc.dim() - 2))
    if how == "up" and not head.op.startswith(
        "Conv"
    ):  # vector instructions take 8 channels at once, the scalar code what is left
        v = acc.shape[1] // 8 * 8
        scaled = torch.cat((_scaled(acc[:, :v], real[:v], "up"), _scaled(acc[:, v:], real[v:], "away")), 1)
    else:
        scaled = _scaled(acc, real, how)
    run.store(out, scaled + run.zero(out))


def _linear(run: Run, unit: Sequence[Node], how: str) -> None:
    head, (x, out) = unit[0], _names(unit)
    w = head.inputs[1] or ""
    if (
        how == "float" and _few_bits(run, w) and run.code(w).shape[-1] % 2
    ):  # XNNPACK leaves rows of half bytes to LiteRT
        how = "up"
    if _wide(run, x):
        how = "double"
    real = _real(run, x, w, under=out, kind=_precision(how))
    if real.numel() == 1 and how == "up":  # a single scale is multiplied in float32
        real = (run.scale(x) * run.scale(w)).double() / run.scale(out).double()
    run.store(out, _scaled(accumulate(run, head), real, how) + run.zero(out))


def _mat_mul(run: Run, unit: Sequence[Node], how: str) -> None:
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    how = "q15" if _wide(run, a) else how
    real = (run.scale(a) * run.scale(b)).to(torch.float32 if how == "float" else torch.float64) / run.scale(out)
    run.store(out, _scaled(torch.matmul(run.centred(a), run.centred(b)), real, how) + run.zero(out))


def _mat_mul_xnnpack(run: Run, unit: Sequence[Node]) -> None:
    """XNNPACK takes products whose second operand has zero point 0."""
    _mat_mul(run, unit, "away" if int(run.zero(unit[0].inputs[1] or "")) else "float")


# ---------------------------------------------------------------- element by element; XNNPACK leaves far ratios of scales to LiteRT


def _add(run: Run, unit: Sequence[Node], sign: int = 1) -> None:
    """Both operands shifted left and brought to twice the larger scale, added, brought to the result's scale."""
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    left = 15 if _wide(run, a) else 20
    s1, s2 = run.scale(a).double(), run.scale(b).double()
    twice = 2 * torch.maximum(s1, s2)
    parts = [fixed_point(run.centred(i).long() << left, s / twice, "away") for i, s in ((a, s1), (b, s2))]
    real = twice / ((1 << left) * run.scale(out).double())
    run.store(out, fixed_point(parts[0] + sign * parts[1], real, "away") + run.zero(out))


def _add_xnnpack(run: Run, unit: Sequence[Node], sign: int = 1) -> None:
    """Multipliers with 20 fractional bits below the larger one, one shift with halves up."""
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    ra, rb = (_real(run, i, under=out).double() for i in (a, b))
    if not all(2.0**-10 <= r < 256 for r in (ra, rb)):
        return _add(run, unit, sign)
    shift = 20 - (int(torch.frexp(torch.maximum(ra, rb)).exponent) - 1)
    ma, mb = (torch.round(r * 2.0**shift).long() for r in (ra, rb))
    total = run.centred(a).long() * ma + sign * run.centred(b).long() * mb
    run.store(out, ((total + (1 << (shift - 1))) >> shift) + run.zero(out))


def _mul(run: Run, unit: Sequence[Node], how: str) -> None:
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    real = _real(run, a, b, under=out)
    if not 2.0**-16 <= real < 256:
        how = "away"
    run.store(out, _scaled(run.centred(a) * run.centred(b), real, how) + run.zero(out))


def _leaky(run: Run, unit: Sequence[Node]) -> None:
    """One multiplier on either side of zero."""
    x, out = _names(unit)
    q, below = run.centred(x), run.scale(x) * _f32(unit[0].attrs["negative_slope"]) / run.scale(out)
    y = torch.where(q >= 0, fixed_point(q, _real(run, x, under=out), "away"), fixed_point(q, below, "away"))
    run.store(out, y + run.zero(out))


def _leaky_xnnpack(run: Run, unit: Sequence[Node]) -> None:
    """Multipliers with 8 fractional bits, halves up."""
    x, out = _names(unit)
    q, s = run.centred(x).long(), _real(run, x, under=out)
    slope = s * _f32(unit[0].attrs["negative_slope"])
    if not (2.0**-8 <= s <= 128 and (2.0**-8 <= slope <= 128 or -127.99609375 <= slope <= -(2.0**-8))):
        return _leaky(run, unit)
    above, below = torch.round(256.0 * s).long(), torch.round(256.0 * slope).long()
    run.store(out, ((q * torch.where(q >= 0, above, below) + 128) >> 8) + run.zero(out))


def _requantize(run: Run, unit: Sequence[Node]) -> None:
    """Codes to another scale."""
    x, out = _names(unit)
    run.store(out, fixed_point(run.centred(x), _real(run, x, under=out, kind=torch.float64), "away") + run.zero(out))


def _requantize_xnnpack(run: Run, unit: Sequence[Node]) -> None:
    """A multiplier with 8 fractional bits, halves up."""
    x, out = _names(unit)
    s = _real(run, x, under=out)
    if not 2.0**-8 <= s <= 128:
        return _requantize(run, unit)
    run.store(out, ((run.centred(x).long() * torch.round(256.0 * s).long() + 128) >> 8) + run.zero(out))


def _prelu(run: Run, unit: Sequence[Node]) -> None:
    """Below zero, the product with the slope's code."""
    node, (x, out) = unit[0], _names(unit)
    w = node.inputs[1] or ""
    q, slope = run.centred(x), run.centred(w)
    slope = slope.view(-1, *[1] * (q.dim() - 2))
    below = fixed_point(q * slope, _real(run, x, w, under=out), "away")
    run.store(out, torch.where(q >= 0, fixed_point(q, _real(run, x, under=out), "away"), below) + run.zero(out))


def _relu(run: Run, unit: Sequence[Node], how: str) -> None:
    """A rectifier on its own: another scale, then the clip."""
    x, out = _names(unit)
    run.store(out, _scaled(run.centred(x), _real(run, x, under=out), how) + run.zero(out))
    bounds = _clip(unit[0], run.stored(out))
    assert bounds is not None
    run.codes[out] = run.codes[out].clamp(*bounds)


def _table(run: Run, unit: Sequence[Node], f: Callable[[Tensor, Node], Tensor] | None = None) -> None:
    """A table over all codes: y = round(f(s (q - z)) / s_y), computed in float32, halves away from zero."""
    x, out = _names(unit)
    t = run.stored(x)

    def function(reals: Tensor) -> Tensor:
        return f(reals, unit[0]) if f is not None else execute(unit[0], [reals.double()])[0].float()

    if _wide(run, x):
        run.store(out, tables16.apply(function, run.code(x).long(), run.scale(x), run.scale(out)))
        return
    codes = torch.arange(t.grid.qmin, t.grid.qmax + 1)
    y = function(dequantize(codes, run.scale(x), run.zero(x)))
    table = round_away((y * (1.0 / run.scale(out))).double()) + run.zero(out)
    run.store(out, table[run.code(x).long() - t.grid.qmin])


def _table_or(
    run: Run,
    unit: Sequence[Node],
    wide: Callable[[Tensor, Tensor], Tensor],
    f: Callable[[Tensor, Node], Tensor] | None = None,
) -> None:
    """A table, or the function's own arithmetic on 16-bit codes."""
    x, out = _names(unit)
    if _wide(run, x):
        run.store(out, wide(run.code(x).long(), run.scale(x)))
    else:
        _table(run, unit, f)


def _sigmoid(x: Tensor, node: Node) -> Tensor:
    """Each step rounded to float32."""
    return 1.0 / (1.0 + torch.exp(-x.double()).float())


def _gelu(x: Tensor, node: Node) -> Tensor:
    """Each step rounded to float32."""
    if node.attrs["approximate"] == "tanh":
        inner = _f32(math.sqrt(2 / math.pi)) * (x + _f32(0.044715) * x * x * x)
        return 0.5 * x * (1.0 + torch.tanh(inner.double()).float())
    return 0.5 * x * torch.special.erfc((x * _f32(-math.sqrt(0.5))).double()).float()


def _abs(run: Run, unit: Sequence[Node]) -> None:
    x, out = _names(unit)
    run.store(out, fixed_point(run.centred(x).abs(), _real(run, x, under=out), "away") + run.zero(out))


def _hard_swish(run: Run, unit: Sequence[Node]) -> None:
    """x * relu6(x + 3) / 6 in 16-bit fixed point, with 7 more bits than the codes have."""
    x, out = _names(unit)
    fine = run.scale(x) / 128
    m_out, e_out = multiplier_and_shift((fine / run.scale(out)).double())
    m_gate, e_gate = multiplier_and_shift((fine / _f32(3.0 / 32768.0)).double())
    q = run.centred(x).long() << 7
    value = _high16(q, _to16(m_out))
    gate = q
    if int(e_gate) > 0:
        gate = _sat16(gate << (e_gate - 1))
    gate = _high16(gate, _to16(m_gate))
    if int(e_gate) > 0:
        gate = _sat16(gate << 1)
    elif int(e_gate) < 0:
        gate = shift_away(gate, -e_gate)
    gate = (gate + (1 << 15)) >> 1
    product = gate * value
    product = torch.where(product >= 0, product >> 15, -((-product) >> 15))
    run.store(out, shift_away(product, -e_out) + run.zero(out))


def _to16(m: Tensor) -> Tensor:
    return torch.where(m >= (1 << 31) - 1 - (1 << 15), (1 << 15) - 1, (m + (1 << 15)) >> 16)


def _sat16(x: Tensor) -> Tensor:
    return x.clamp(-(1 << 15), (1 << 15) - 1)


def _high16(a: Tensor, b: Tensor) -> Tensor:
    """Doubled high half of a 16-bit product, halves away from zero."""
    p = a * b
    n = p + torch.where(p >= 0, 1 << 14, 1 - (1 << 14))
    return _sat16(torch.where(n >= 0, n >> 15, -((-n) >> 15)))


def _softmax(run: Run, unit: Sequence[Node], rows: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """`rows` makes codes without zero point of codes, both with the axis last, and of the scales of operand and result."""
    x, out = _names(unit)
    axis = unit[0].attrs["axis"]
    q = run.code(x).long().movedim(axis, -1)
    y = tables16.softmax(q, run.scale(x)) if _wide(run, x) else rows(q, run.scale(x), run.scale(out)) + run.zero(out)
    run.store(out, y.movedim(-1, axis))


def _rows_reference(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """Exponential and reciprocal in fixed point."""
    return gemmlowp.softmax(q - q.amax(-1, keepdim=True), scale, 8)


def _exponentials(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials of differences to the maximum from a float32 table, and their sum, added in order."""
    table = torch.exp(-scale.double() * torch.arange(256, dtype=torch.float64)).float()
    e = table[q.amax(-1, keepdim=True) - q]
    return e, torch.from_numpy(np.cumsum(e.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())


def _rows_optimized(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """floor(e / (sum s_y) + 1/2)."""
    e, total = _exponentials(q, scale)
    return torch.floor(e * (1.0 / (total * result)) + 0.5)


def _log_rows_reference(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """Exponential and logarithm in fixed point."""
    return gemmlowp.log_softmax(q - q.amax(-1, keepdim=True), scale)


def _log_rows_optimized(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """The same table; s / s_y q - (s max q + log sum) / s_y, halves to even."""
    most = q.amax(-1, keepdim=True)
    log = torch.log(_exponentials(q, scale)[1].double()).float()
    return torch.round(scale / result * q.float() - (scale * most.float() + log) / result)


# ---------------------------------------------------------------- windows and means


def _mean_axes(run: Run, node: Node) -> tuple[tuple[int, ...], bool]:
    rank = run.code(node.inputs[0] or "").dim()
    return (tuple(range(2, rank)), True) if node.op == "GlobalAvgPool" else (node.attrs["axes"], node.attrs["keepdims"])


def _mean(run: Run, unit: Sequence[Node]) -> None:
    """The multiplier takes the division by the count in: m 2^k / n, with k as large as 64 bits allow."""
    x, out = _names(unit)
    axes, keep = _mean_axes(run, unit[0])
    q = run.centred(x)
    n = math.prod(q.shape[a] for a in axes)
    m, e = multiplier_and_shift(_real(run, x, under=out, kind=torch.float64))
    k = min(n.bit_length() - 1, 32, 31 + int(e))
    run.store(out, scale_by(q.sum(axes, keep), (m << k) // n, e - k, "away") + run.zero(out))


def _mean_optimized(run: Run, unit: Sequence[Node]) -> None:
    """Over rows and columns of an image, which stay as size 1, codes are summed with their zero point.

    Vector instructions take 16 channels at once and round halves up, the channels left over take the scalar code.
    """
    x, out = _names(unit)
    axes, keep = _mean_axes(run, unit[0])
    q = run.code(x).double()
    if not keep or {a % q.dim() for a in axes} != {2, 3} or q.dim() != 4 or _wide(run, x):
        return _mean(run, unit)
    real = run.scale(x) / (float(q.shape[2] * q.shape[3]) * run.scale(out))
    shift = run.zero(x).float() * run.scale(x) / run.scale(out)
    offset = run.zero(out) - torch.trunc(torch.where(shift > 0, shift + 0.5, shift - 0.5))
    total, vector = q.sum(axes, keep), q.shape[1] // 16 * 16
    parts = (fixed_point(total[:, :vector], real, "up"), fixed_point(total[:, vector:], real, "away"))
    run.store(out, torch.cat(parts, 1) + offset)


def _mean_xnnpack(run: Run, unit: Sequence[Node]) -> None:
    x, out = _names(unit)
    axes, keep = _mean_axes(run, unit[0])
    q = run.centred(x)
    n = math.prod(q.shape[a] for a in axes)
    real = run.scale(x) / run.scale(out) / n
    run.store(out, torch.round(q.sum(axes, keep).float() * real + run.zero(out)))


def _avg_pool(run: Run, unit: Sequence[Node]) -> None:
    """(sum of codes ± n/2) / n, towards zero; n counts what lies inside the image, or in the padded one."""
    x, out = _names(unit)
    a = unit[0].attrs
    q = run.code(x).double()
    padding = ((0, 0),) * (q.dim() - len(a["padding"])) + tuple(a["padding"])
    counted = torch.ones_like(q[:1, :1])
    fill = float(run.zero(x)) if a["count_include_pad"] else 0.0
    q = pad(q, padding=padding, mode="constant", value=fill)
    counted = pad(counted, padding=padding, mode="constant", value=float(a["count_include_pad"]))
    area = math.prod(a["kernel"])
    plain = unit[0].with_(attrs={**a, "padding": ((0, 0),) * len(a["padding"])})
    total = torch.round(execute(plain, [q])[0] * area)
    n = torch.round(execute(plain, [counted])[0] * area)
    half = torch.floor(n / 2)
    run.store(out, torch.where(total > 0, torch.floor((total + half) / n), -torch.floor((half - total) / n)))


def _lines(size: int, out: int, corners: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis: two source positions for each result, and the second's share in 1024ths."""
    at = torch.arange(out)
    if corners and out > 1:
        step = (1024 * (size - 1) + (out - 1) // 2) // (out - 1)
        fine = at * step
    else:
        step = (1024 * size + out // 2) // out
        fine = at * step + step // 2 - 512 if not corners else at * step
    low = torch.div(fine, 1024, rounding_mode="trunc").clamp_min(0)
    high = torch.div(fine + 1023, 1024, rounding_mode="trunc").clamp_max(size - 1)
    return low, high, fine - 1024 * low


def _lines_xnnpack(size: int, out: int, corners: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The same in 2048ths, from float32 positions."""
    less = int(corners and out > 1)
    step = _f32(size - less) / _f32(out - less)
    fine = torch.arange(out, dtype=torch.float32) * step
    if not corners:
        fine = (fine + (_f32(0.5) * step - _f32(0.5))).clamp(0, size - 1)
    low = fine.long()
    return low, (low + 1).clamp_max(size - 1), torch.round((fine - low) * 2048).long()


def _resize(
    run: Run, unit: Sequence[Node], lines: Callable[[int, int, bool], tuple[Tensor, Tensor, Tensor]], one: int
) -> None:
    """Bilinear with fixed-point shares of `one`; halves away from zero for shares of 1024, else up."""
    node, (x, out) = unit[0], _names(unit)
    if node.attrs["mode"] == "nearest":
        return move(run, unit)
    q = run.code(x).long()
    (like,) = execute(node, [q.float()])
    (top, low, v), (left, right, h) = (
        lines(q.shape[d], like.shape[d], bool(node.attrs["align_corners"])) for d in (2, 3)
    )
    v = v[:, None]
    upper, lower = (q[:, :, row][..., left] * (one - h) + q[:, :, row][..., right] * h for row in (top, low))
    y, whole = upper * (one - v) + lower * v, one * one
    if one == 1024:
        run.store(out, torch.div(y + torch.where(y > 0, whole // 2, -whole // 2), whole, rounding_mode="trunc"))
    else:
        run.store(out, torch.div(y + whole // 2, whole, rounding_mode="floor"))


# ---------------------------------------------------------------- profiles


def _clip(act: Node, t: Stored) -> tuple[int, int] | None:
    """The codes of the activation's bounds, halves away from zero."""
    low, high = {"Relu": (0.0, None), "Relu6": (0.0, 6.0), "Clamp": (act.attrs.get("min"), act.attrs.get("max"))}.get(
        act.op, (None, None)
    )
    if low is None and high is None:
        return None
    scale, z = t.scale, int(t.zero_point)

    def code(v: float) -> int:
        return z + int(round_away((_f32(v) / scale).double()))

    return (
        t.grid.qmin if low is None else min(max(t.grid.qmin, code(low)), t.grid.qmax),
        t.grid.qmax if high is None else max(min(t.grid.qmax, code(high)), t.grid.qmin),
    )


def _quantize_away(x: Tensor, t: Stored) -> Tensor:
    """round(x / s) + z, halves away from zero."""
    return (round_away((x / t.scale).double()) + t.zero_point).clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)


def _quantize_inverse(x: Tensor, t: Stored) -> Tensor:
    """round(x * (1 / s)) + z, halves to even."""
    return (torch.round(x * (1.0 / t.scale)) + t.zero_point).clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)


_CONVOLUTIONS = ("Conv1D", "Conv2D", "DepthwiseConv2D", "TransposeConv1D", "TransposeConv2D")
_TABLES = ("Exp", "Log")
_RECTIFIERS = ("Relu", "Relu6", "Clamp")

REFERENCE: dict[str, Kernel] = {
    **dict.fromkeys(_CONVOLUTIONS, partial(_convolution, how="away")),
    **dict.fromkeys(_TABLES, _table),
    **dict.fromkeys(_RECTIFIERS, partial(_relu, how="away")),
    **dict.fromkeys(("Mean", "GlobalAvgPool"), _mean),
    "Linear": partial(_linear, how="double"),
    "MatMul": partial(_mat_mul, how="away"),
    "Add": _add,
    "Sub": partial(_add, sign=-1),
    "Mul": partial(_mul, how="away"),
    "PRelu": _prelu,
    "LeakyRelu": _leaky,
    "HardSwish": _hard_swish,
    "Softmax": partial(_softmax, rows=_rows_reference),
    "LogSoftmax": partial(_softmax, rows=_log_rows_reference),
    "Sigmoid": partial(_table_or, wide=tables16.sigmoid, f=_sigmoid),
    "Tanh": partial(_table_or, wide=tables16.tanh),
    "Gelu": partial(_table, f=_gelu),
    "Abs": _abs,
    "Requantize": _requantize,
}
OPTIMIZED: dict[str, Kernel] = {
    **REFERENCE,
    **dict.fromkeys(_CONVOLUTIONS, partial(_convolution, how="up")),
    **dict.fromkeys(("Mean", "GlobalAvgPool"), _mean_optimized),
    "Linear": partial(_linear, how="up"),
    "Softmax": partial(_softmax, rows=_rows_optimized),
    "LogSoftmax": partial(_softmax, rows=_log_rows_optimized),
}
_THEIRS: dict[str, Kernel] = {
    **dict.fromkeys(_CONVOLUTIONS, partial(_convolution, how="float")),
    **dict.fromkeys(("Mean", "GlobalAvgPool"), _mean_xnnpack),
    "Linear": partial(_linear, how="float"),
    "MatMul": _mat_mul_xnnpack,
    "Add": _add_xnnpack,
    "Sub": partial(_add_xnnpack, sign=-1),
    "Mul": partial(_mul, how="float"),
    "LeakyRelu": _leaky_xnnpack,
    "Requantize": _requantize_xnnpack,
}
MOVES: dict[str, Kernel] = {"AvgPool": _avg_pool, "Resize": partial(_resize, lines=_lines, one=1024)}


def _taken(run: Run, unit: Sequence[Node], theirs: Kernel, ours: Kernel) -> None:
    """XNNPACK takes 8-bit operators only."""
    (ours if _wide(run, unit[0].inputs[0] or "") else theirs)(run, unit)


XNNPACK: dict[str, Kernel] = {
    **OPTIMIZED,
    **{op: partial(_taken, theirs=f, ours=OPTIMIZED[op]) for op, f in _THEIRS.items()},
}
MOVES_XNNPACK: dict[str, Kernel] = {
    **MOVES,
    "Resize": partial(_taken, theirs=partial(_resize, lines=_lines_xnnpack, one=2048), ours=MOVES["Resize"]),
}

register("kernels", "litert_reference")(Profile(kernels=REFERENCE, moves=MOVES, clip=_clip, quantize=_quantize_away))
register("kernels", "litert_optimized")(Profile(kernels=OPTIMIZED, moves=MOVES, clip=_clip, quantize=_quantize_inverse))
register("kernels", "litert_xnnpack")(
    Profile(kernels=XNNPACK, moves=MOVES_XNNPACK, clip=_clip, quantize=_quantize_inverse)
)
