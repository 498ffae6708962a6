"""LiteRT's (TensorFlow Lite's) integer kernels: the reference ones, the optimised ones, and XNNPACK.

They differ in how they round. The reference kernels multiply by 31-bit integers and round twice, halves away from zero;
the optimised ones round matrix products twice with halves up; XNNPACK multiplies in float32 and rounds halves to even.
Sources: TensorFlow Lite, kernels/internal; XNNPACK, src/microparams-init.c and src/operators.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.graph.ops import OPS
from chipfit.quantizers.dynamic import Codes
from chipfit.quantizers.rounding import half_away as round_away
from chipfit.quantizers.stored import Stored, per_output
from chipfit.registry import register
from chipfit.simulate import gemmlowp, tables16
from chipfit.simulate.integer import (
    Kernel,
    Profile,
    Run,
    Unit,
    accumulate,
    bounds,
    by,
    move,
    rounded_each_time,
    windows,
)
from chipfit.simulate.libm import libm
from chipfit.simulate.requantize import fixed_point, multiplier_and_shift, scale_by, shift_away, shift_up, short

Tensor = torch.Tensor


def _f32(v: float) -> Tensor:
    return torch.tensor(v, dtype=torch.float32)


# ---------------------------------------------------------------- products


def _codes_xnnpack(x: Tensor, **how: Any) -> Codes:
    """XNNPACK's codes of rows that it rounds each time: q = rne(x m) + z with m = 255 / (max - min), 0 in the range.

    z is reckoned from the end that has the smaller error, and the scale is 1 / m.
    Source: XNNPACK, xnn_f32_qd8_asymmetric_quantization_params.
    """
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    span, one = high - low, torch.ones_like(high)
    m = torch.where(span > 0, _f32(255.0) * one / torch.where(span > 0, span, one), one)
    z = torch.where((low * m - 128) + (high * m + 127) > 0, -128 - low * m, 127 - high * m)
    z = torch.round(z.clamp(-128, 127))
    return (torch.round(x * m) + z).clamp(-128, 127), one / m, z


def _codes_by_row(x: Tensor, blocks: bool = False, **how: Any) -> Codes:
    """The built-in kernels': q = round(x (127 / max |x|)), halves away from zero, whatever the plan's zero point.

    Weights in blocks are XNNPACK's there as well.

    Source: TensorFlow Lite, kernels/internal/reference/portable_tensor_utils.cc, SymmetricQuantizeFloats.
    """
    if blocks:
        return _codes_xnnpack(x)
    top = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(top, 127)
    top = torch.where(top == 0, most, top)
    return round_away(x * (most / top)).clamp(-127, 127), top / most, torch.zeros_like(top)


def _dynamic_xnnpack(u: Unit) -> Tensor:
    """fma(float32(acc) s_x, s_w, b)."""
    acc, s, b = rounded_each_time(u)
    return ((acc.float() * s).double() * u.scale(u.second).double() + b.double()).float()


def _dynamic(u: Unit) -> Tensor:
    """float32(acc) (s_x s_w) + b."""
    acc, s, b = rounded_each_time(u)
    return acc.float().mul_(s * u.scale(u.second)).add_(b)


def _scaled(acc: Tensor, real: Tensor, how: str) -> Tensor:
    """Accumulators to centred codes.

    Args:
        how: XNNPACK's product in "float", the reference linear layer's in "double", or a rounding of `fixed_point`.
    """
    if how == "float":
        return torch.round(acc.float() * real.float()).double()
    if how == "double":
        return round_away(acc.double() * real)
    return fixed_point(acc, real, how).double()


def _precision(how: str) -> torch.dtype:
    """In which products of weights compute their multiplier."""
    return torch.float32 if how == "float" else torch.float64


def _convolution(u: Unit, how: str) -> None:
    head, w = u.node, u.second
    plain = head.op.startswith("Conv")
    kernel = u.code(w).shape[2:]
    gaps = OPS[head.op].kind == "transposed" and any(s > k for s, k in zip(u.attrs["stride"], kernel, strict=True))
    if how == "float" and (gaps or u.bits(w) <= 4):  # XNNPACK leaves these to LiteRT
        how = "up"
    if how == "up" and plain and u.attrs["groups"] > 1:  # no optimised kernel
        how = "away"
    if u.wide:
        how = "q15"
    acc = accumulate(u.run, head)
    real = per_output(u.real(u.x, w, kind=_precision(how)).reshape(-1), acc.shape[1]).view(-1, *[1] * (acc.dim() - 2))
    if how == "up" and not plain:  # vector instructions take 8 channels at once, the scalar code what is left
        v = acc.shape[1] // 8 * 8
        u.put(torch.cat((_scaled(acc[:, :v], real[:v], "up"), _scaled(acc[:, v:], real[v:], "away")), 1))
    else:
        u.put(_scaled(acc, real, how))


def _linear(u: Unit, how: str) -> None:
    w = u.second
    if how == "float" and u.bits(w) <= 4 and u.code(w).shape[-1] % 2:  # XNNPACK leaves rows of half bytes to LiteRT
        how = "up"
    if u.wide:
        how = "double"
    real = u.real(u.x, w, kind=_precision(how))
    if real.numel() == 1 and how == "up":  # a single scale is multiplied in float32
        real = (u.scale(u.x) * u.scale(w)).double() / u.scale(u.out).double()
    u.put(_scaled(accumulate(u.run, u.node), real, how))


def _mat_mul(u: Unit, how: str) -> None:
    if how == "float" and int(u.zero(u.second)):  # XNNPACK takes products whose second operand has zero point 0
        how = "away"
    how = "q15" if u.wide else how
    real = (u.scale(u.x) * u.scale(u.second)).to(_precision(how)) / u.scale(u.out)
    u.put(_scaled(u.run.summed(torch.matmul(u.centred(), u.centred(u.second))), real, how))


# ---------------------------------------------------------------- element by element
# XNNPACK leaves scales that are far apart to LiteRT.


def _rescaled(u: Unit, sign: int = 1, how: str = "away") -> Tensor:
    """Both operands shifted left and brought to twice the larger scale, added, brought to the result's scale."""
    left = 15 if u.wide else 20
    names = (u.x, u.second)
    scales = [u.scale(i).double() for i in names]
    twice = 2 * torch.maximum(*scales)
    a, b = (fixed_point(u.centred(i).long() << left, s / twice, how) for i, s in zip(names, scales, strict=True))
    return fixed_point(a + sign * b, twice / ((1 << left) * u.scale(u.out).double()), "away")


def _add(u: Unit, sign: int = 1) -> None:
    u.put(_rescaled(u, sign))


def _stretch(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements of two operands that are broadcast lie side by side in both, for the optimised kernels.

    These walk shapes that differ in one block of axes, or in two where each operand has one; others element by element.
    Source: TensorFlow Lite, kernels/internal/reference/process_broadcast_shapes.cc.
    """
    axes = [(m, n) for m, n in zip(a, b, strict=True) if (m, n) != (1, 1)]
    kinds = "".join("=" if m == n else "a" if m == 1 else "b" for m, n in axes)
    walked = re.fullmatch("=*(a*=*b*|b*=*a*)=*", kinds)
    return math.prod(m for m, _ in axes[len(kinds.rstrip("=")) :]) if walked else 1


def _in_vectors(run: Run, name: str, at_once: int, *shapes: Sequence[int]) -> Tensor:
    """Which elements of a value vector instructions make, so many at once, of operands of these shapes.

    They begin anew in each part of the samples that the device takes at once.
    """
    rank, whole = max(map(len, shapes)), torch.broadcast_shapes(*shapes)
    padded = [[1] * (rank - len(s)) + [*s] for s in (*shapes, whole)]
    shape = run.graph.shape(name)
    axis = shape.index(None) if None in shape else None
    samples = 1 if axis is None else whole[axis]
    form = [*(run.forms.get(name) or range(rank))]

    def of(size: int) -> Tensor:
        cut = ([min(n, size) if d == axis else n for d, n in enumerate(s)] for s in padded)
        *lie, out = ([s[d] for d in form] for s in cut)
        many = _stretch(lie[0], lie[-1])
        vectors = (torch.arange(math.prod(out)) % many < many // at_once * at_once).reshape(out)
        return vectors.movedim((*range(rank),), (*form,))

    part = run.part or samples or 1
    sizes = [min(part, samples - k) for k in range(0, samples, part)] or [0]
    made = {size: of(size) for size in sizes}
    return made[sizes[0]] if axis is None else torch.cat([made[size] for size in sizes], axis)


def _add_optimized(u: Unit) -> None:
    """Vector instructions round each operand once, halves up.

    Of 16-bit operands they run where the shapes are equal, of 8-bit ones along a stretch of both.
    """
    a, b = (u.code(i).shape for i in (u.x, u.second))
    if u.wide and a != b:
        return _add(u)
    u.put(torch.where(_in_vectors(u.run, u.out, 16, a, b), _rescaled(u, how="once"), _rescaled(u)))


def _add_xnnpack(u: Unit, sign: int = 1) -> None:
    """Multipliers with 20 fractional bits below the larger one, one shift with halves up."""
    ra, rb = (u.real(i).double() for i in (u.x, u.second))
    if not all(2.0**-10 <= r < 256 for r in (ra, rb)):
        return _add(u, sign)
    shift = 20 - (int(torch.frexp(torch.maximum(ra, rb)).exponent) - 1)
    ma, mb = (torch.round(r * 2.0**shift).long() for r in (ra, rb))
    total = u.centred().long() * ma + sign * u.centred(u.second).long() * mb
    u.put(shift_up(total, shift))


def _mul(u: Unit, how: str) -> None:
    real = u.real(u.x, u.second)
    near = 2.0**-16 <= real < 256
    u.put(_scaled(u.centred() * u.centred(u.second), real, how if near else "away"))


def _leaky(u: Unit) -> None:
    """One multiplier on either side of zero; a product with a negative one is rounded before its sign is turned."""
    q, below = u.centred(), u.scale(u.x) * _f32(u.attrs["negative_slope"]) / u.scale(u.out)
    turned = fixed_point(q, below.abs(), "away") * below.sign().long()
    u.put(torch.where(q >= 0, fixed_point(q, u.real(), "away"), turned))


def _by_256ths(q: Tensor, real: Tensor) -> Tensor:
    """A product with a multiplier of 8 fractional bits, halves up."""
    return shift_up(q.long() * torch.round(256.0 * real).long(), 8)


def _leaky_xnnpack(u: Unit) -> None:
    q, s = u.centred(), u.real()
    slope = s * _f32(u.attrs["negative_slope"])
    if not (2.0**-8 <= s <= 128 and (2.0**-8 <= slope <= 128 or -127.99609375 <= slope <= -(2.0**-8))):
        return _leaky(u)
    u.put(_by_256ths(q, torch.where(q >= 0, s, slope)))


def _requantize(u: Unit) -> None:
    """Codes to another scale."""
    u.put(fixed_point(u.centred(), u.real(kind=torch.float64), "away"))


def _requantize_optimized(u: Unit) -> None:
    """Vector instructions, which 16-bit codes have none of, round twice with halves up."""
    q, real = u.centred(), u.real(kind=torch.float64)
    plain = fixed_point(q, real, "away")
    u.put(plain if u.wide else torch.where(_in_vectors(u.run, u.out, 16, q.shape), fixed_point(q, real, "up"), plain))


def _requantize_xnnpack(u: Unit) -> None:
    s = u.real()
    if not 2.0**-8 <= s <= 128:
        return _requantize_optimized(u)
    u.put(_by_256ths(u.centred(), s))


def _prelu(u: Unit) -> None:
    """Below zero, the product with the slope's code."""
    q = u.centred()
    slope = u.centred(u.second).view(-1, *[1] * (q.dim() - 2))
    below = fixed_point(q * slope, u.real(u.x, u.second), "away")
    u.put(torch.where(q >= 0, fixed_point(q, u.real(), "away"), below))


def _rectifier(u: Unit) -> None:
    """On its own: another scale, then the clip."""
    u.put(fixed_point(u.centred(), u.real(), "away"))
    ends = _clip(u.node, u.run.stored(u.out))
    if ends is not None:
        u.run.codes[u.out] = u.run.codes[u.out].clamp(*ends)


def _abs(u: Unit) -> None:
    u.put(fixed_point(u.centred().abs(), u.real(), "away"))


def _table(
    u: Unit,
    f: Callable[[Tensor, Node], Tensor] | None = None,
    wide: Any = None,
    nearest: Callable[[Tensor], Tensor] = round_away,
) -> None:
    """A table over all codes: y = round(f(s (q - z)) / s_y), computed in float32.

    Args:
        f: the function in the kernel's own steps; that of the C library when omitted.
        wide: (codes, scale) -> codes, for 16-bit ones; a table too when omitted.
        nearest: rounds 8-bit results.
    """
    codes, scale, result = u.code().long(), u.scale(u.x), u.scale(u.out)

    def function(reals: Tensor) -> Tensor:
        return f(reals, u.node) if f is not None else libm(u.node.op.lower(), reals)

    if u.wide:
        u.run.store(u.out, wide(codes, scale) if wide else tables16.apply(function, codes, scale, result))
        return
    stored = u.run.plan[u.x]
    y = function(stored.dequantize(torch.arange(stored.grid.qmin, stored.grid.qmax + 1)))
    u.put(nearest((y * (1.0 / result)).double())[codes - stored.grid.qmin])


def _curve(near: Callable[[Tensor, Tensor], Tensor], fixed: Callable[[Tensor], Tensor], shifts: Sequence[int]) -> Any:
    """Of 16-bit codes: in fixed point with 3 integer bits where a shift makes these of the scale, else as `near`."""

    def wide(q: Tensor, scale: Tensor) -> Tensor:
        by = 12 + float(torch.log2(scale.double()))
        return fixed((q << int(by)).clamp(-(1 << 15), (1 << 15) - 1)) if by in shifts else near(q, scale)

    return wide


def _sigmoid(x: Tensor, node: Node) -> Tensor:
    """Each step rounded to float32."""
    return 1.0 / (1.0 + libm("exp", -x))


def _gelu(x: Tensor, node: Node) -> Tensor:
    """Each step rounded to float32."""
    if node.attrs["approximate"] == "tanh":
        inner = _f32(math.sqrt(2 / math.pi)) * (x + _f32(0.044715) * x * x * x)
        return 0.5 * x * (1.0 + libm("tanh", inner))
    return 0.5 * x * libm("erfc", x * _f32(-math.sqrt(0.5)))


def _hard_swish(u: Unit) -> None:
    """x * relu6(x + 3) / 6 in 16-bit fixed point, with 7 more bits than the codes have."""
    fine = u.scale(u.x) / 128
    m_out, e_out = multiplier_and_shift((fine / u.scale(u.out)).double())
    m_gate, e_gate = multiplier_and_shift((fine / _f32(3.0 / 32768.0)).double())
    q = u.centred().long() << 7
    value = _product16(q, short(m_out))
    up = int(e_gate)
    gate = _saturated(q << (up - 1)) if up > 0 else q
    gate = _product16(gate, short(m_gate))
    gate = _saturated(gate << 1) if up > 0 else shift_away(gate, -e_gate)
    product = torch.div(((gate + (1 << 15)) >> 1) * value, 1 << 15, rounding_mode="trunc")
    u.put(shift_away(product, -e_out))


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-(1 << 15), (1 << 15) - 1)


def _product16(a: Tensor, b: Tensor) -> Tensor:
    """Doubled high half of a 16-bit product."""
    return _saturated(shift_up(a * b, 15))


def _softmax(u: Unit, rows: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """`rows` makes codes without zero point of codes, both with the axis last, and of both scales."""
    axis, scale = u.attrs["axis"], u.scale(u.x)
    q = u.code().long().movedim(axis, -1)
    if u.wide:
        u.run.store(u.out, tables16.softmax(q, scale).movedim(-1, axis))
    else:
        u.put(rows(q, scale, u.scale(u.out)).movedim(-1, axis))


def _exponentials(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials of differences to the maximum from a float32 table, and their sum, added in order."""
    table = libm("exp", -scale * torch.arange(256))
    e = table[q.amax(-1, keepdim=True) - q]
    return e, torch.from_numpy(np.cumsum(e.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())


def _rows_optimized(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """floor(e / (sum s_y) + 1/2)."""
    e, total = _exponentials(q, scale)
    return torch.floor(e * (1.0 / (total * result)) + 0.5)


def _log_rows_optimized(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """The same table; s / s_y q - (s max q + log sum) / s_y, halves to even."""
    most = q.amax(-1, keepdim=True)
    log = torch.log(_exponentials(q, scale)[1].double()).float()
    return torch.round(scale / result * q.float() - (scale * most.float() + log) / result)


# ---------------------------------------------------------------- windows and means


def _mean_axes(u: Unit) -> tuple[tuple[int, ...], bool]:
    """Axes counted from the front, and whether they stay as size 1."""
    rank = u.code().dim()
    axes = tuple(a % rank for a in u.attrs.get("axes", range(2, rank)))
    return axes, u.attrs.get("keepdims", True)


def _sum(u: Unit) -> tuple[Tensor, int]:
    """The sum of codes without zero point, and how many each one has."""
    axes, keep = _mean_axes(u)
    q = u.centred()
    return q.sum(axes, keep), math.prod(q.shape[a] for a in axes)


def _mean(u: Unit) -> None:
    """The multiplier takes the division by the count in: m 2^k / n, with k as large as 64 bits allow."""
    total, n = _sum(u)
    m, e = multiplier_and_shift(u.real(kind=torch.float64))
    k = min(n.bit_length() - 1, 32, 31 + int(e))
    u.put(scale_by(total, (m << k) // n, e - k, "away"))


def _mean_optimized(u: Unit) -> None:
    """Over rows and columns of an image, which stay as size 1, codes are summed with their zero point.

    Vector instructions take 16 channels at once and round halves up, the channels left over take the scalar code.
    """
    axes, keep = _mean_axes(u)
    q = u.code().double()
    if not keep or {*axes} != {2, 3} or q.dim() != 4 or u.wide:
        return _mean(u)
    scale, result = u.scale(u.x), u.scale(u.out)
    real = scale / (float(q.shape[2] * q.shape[3]) * result)
    shift = u.zero(u.x).float() * scale / result
    total, vector = q.sum(axes, keep), q.shape[1] // 16 * 16
    parts = (fixed_point(total[:, :vector], real, "up"), fixed_point(total[:, vector:], real, "away"))
    u.put(torch.cat(parts, 1) - torch.trunc(torch.where(shift > 0, shift + 0.5, shift - 0.5)).to(torch.int64))


def _mean_xnnpack(u: Unit) -> None:
    """sum(q) m + (z_y - n z m) with m = s / (s_y n), each step in float32."""
    total, n = _sum(u)
    m, shift = u.real() / n, n * u.zero(u.x)
    u.run.store(u.out, torch.round((total + shift).float() * m + (u.zero(u.out).float() - shift * m)))


def _avg_pool(u: Unit) -> None:
    """(sum of codes ± n/2) / n, towards zero; n counts what lies inside the image, or in the padded one."""
    parts, n = windows(u.code().double(), u.node, float(u.zero(u.x)))
    total = parts.sum(-1)
    half = torch.floor(n / 2)
    u.run.store(u.out, torch.where(total > 0, torch.floor((total + half) / n), -torch.floor((half - total) / n)))


def _lines(size: int, out: int, corners: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Along one axis: two source positions for each result, and the second's share in 1024ths."""
    at = torch.arange(out)
    if corners and out > 1:
        fine = at * ((1024 * (size - 1) + (out - 1) // 2) // (out - 1))
    else:
        step = (1024 * size + out // 2) // out
        fine = at * step + (0 if corners else step // 2 - 512)
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


def _resize(u: Unit, lines: Callable[[int, int, bool], tuple[Tensor, Tensor, Tensor]], one: int) -> None:
    """Bilinear with fixed-point shares of `one`; halves away from zero for shares of 1024, else up."""
    if u.attrs["mode"] == "nearest":
        return move(u.run, u.nodes)
    q = u.code().long()
    (like,) = execute(u.node, [q.float()])
    shape = like.shape
    if len(shape) == 3:  # a row is an image of height 1
        q, like = q[:, :, None], like[:, :, None]
    (top, low, v), (left, right, h) = (lines(q.shape[d], like.shape[d], bool(u.attrs["align_corners"])) for d in (2, 3))
    v = v[:, None]
    upper, lower = (q[:, :, row][..., left] * (one - h) + q[:, :, row][..., right] * h for row in (top, low))
    y, half, whole = (upper * (one - v) + lower * v).reshape(shape), one * one // 2, one * one
    if one == 1024:
        u.run.store(u.out, torch.div(y + torch.where(y > 0, half, -half), whole, rounding_mode="trunc"))
    else:
        u.run.store(u.out, torch.div(y + half, whole, rounding_mode="floor"))


# ---------------------------------------------------------------- reals to codes, and the clip of fused activations


def _clip(act: Node, t: Stored) -> tuple[int, int] | None:
    """The codes of the activation's bounds, halves away from zero."""
    reals, grid = bounds(act), t.grid
    if reals is None or reals == (None, None):
        return None
    low, high = (
        end if v is None else int(t.zero_point) + int(round_away((_f32(v) / t.scale).double()))
        for v, end in zip(reals, (grid.qmin, grid.qmax), strict=True)
    )
    return min(max(grid.qmin, low), grid.qmax), min(max(grid.qmin, high), grid.qmax)


def _stored(q: Tensor, t: Stored) -> Tensor:
    """Integers without zero point as codes."""
    return (q + t.zero_point).clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)


def _quantize_away(run: Run, name: str, x: Tensor) -> Tensor:
    """round(x / s) + z, halves away from zero."""
    t = run.stored(name)
    return _stored(round_away((x / t.scale).double()), t)


def _quantize_inverse(run: Run, name: str, x: Tensor) -> Tensor:
    """round(x * (1 / s)) + z, halves to even."""
    t = run.stored(name)
    return _stored(torch.round(x * (1.0 / t.scale)), t)


def _quantize_optimized(run: Run, name: str, x: Tensor) -> Tensor:
    """Vector instructions multiply by the inverse; the scalar code of what is left divides in double precision."""
    t, q, left = run.stored(name), _quantize_inverse(run, name, x), ~_in_vectors(run, name, 8, x.shape)
    q[left] = _stored(round_away(x[left].double() / t.scale.double()), t)
    return q


def _quantize_xnnpack(run: Run, name: str, x: Tensor) -> Tensor:
    return (_quantize_inverse if run.stored(name).grid.bits <= 8 else _quantize_optimized)(run, name, x)


# ---------------------------------------------------------------- families: each as it differs from the one before


def _narrow(theirs: dict[str, Kernel], ours: dict[str, Kernel]) -> dict[str, Kernel]:
    """XNNPACK takes 8-bit operators only."""

    def either(op: str) -> Kernel:
        return lambda run, nodes: (ours if Unit(run, nodes).wide else theirs)[op](run, nodes)

    return ours | {op: either(op) for op in theirs}


_CONVOLUTIONS = [op for op, row in OPS.items() if row.kind in ("conv", "transposed") and not op.endswith("3D")]
_MEANS = ("Mean", "GlobalAvgPool")

_REFERENCE = {
    **by(_convolution, *_CONVOLUTIONS, how="away"),
    **by(_linear, "Linear", how="double"),
    **by(_mat_mul, "MatMul", how="away"),
    **by(_add, "Add"),
    **by(_add, "Sub", sign=-1),
    **by(_mul, "Mul", how="away"),
    **by(_rectifier, "Relu", "Relu6", "Clamp"),
    **by(_leaky, "LeakyRelu"),
    **by(_prelu, "PRelu"),
    **by(_table, "Exp", "Log"),
    **by(_table, "Sigmoid", f=_sigmoid, wide=tables16.sigmoid),
    **by(_table, "Tanh", wide=tables16.tanh),
    **by(_table, "Gelu", f=_gelu),
    **by(_hard_swish, "HardSwish"),
    **by(_abs, "Abs"),
    **by(_requantize, "Requantize"),
    **by(_softmax, "Softmax", rows=lambda q, s, _: gemmlowp.softmax(q - q.amax(-1, keepdim=True), s, 8)),
    **by(_softmax, "LogSoftmax", rows=lambda q, s, _: gemmlowp.log_softmax(q - q.amax(-1, keepdim=True), s)),
    **by(_mean, *_MEANS),
}
_OPTIMIZED = {
    **_REFERENCE,
    **by(_convolution, *_CONVOLUTIONS, how="up"),
    **by(_linear, "Linear", how="up"),
    **by(_add_optimized, "Add"),
    **by(_requantize_optimized, "Requantize"),
    **by(_softmax, "Softmax", rows=_rows_optimized),
    **by(_softmax, "LogSoftmax", rows=_log_rows_optimized),
    **by(_mean_optimized, *_MEANS),
    **by(_table, "Sigmoid", f=_sigmoid, wide=_curve(tables16.sigmoid, gemmlowp.logistic16, (0,))),
    **by(_table, "Tanh", wide=_curve(tables16.tanh, gemmlowp.tanh16, (0, 1))),
}
_XNNPACK = {
    **by(_convolution, *_CONVOLUTIONS, how="float"),
    **by(_linear, "Linear", how="float"),
    **by(_mat_mul, "MatMul", how="float"),
    **by(_add_xnnpack, "Add"),
    **by(_add_xnnpack, "Sub", sign=-1),
    **by(_mul, "Mul", how="float"),
    **by(_leaky_xnnpack, "LeakyRelu"),
    **by(_requantize_xnnpack, "Requantize"),
    **by(_mean_xnnpack, *_MEANS),
    **by(_table, "Sigmoid", f=lambda x, node: torch.sigmoid(x.double()).float(), nearest=torch.round),
    **by(_table, "Tanh", nearest=torch.round),
}
_MOVES = {**by(_avg_pool, "AvgPool"), **by(_resize, "Resize", lines=_lines, one=1024)}
_MOVES_XNNPACK = by(_resize, "Resize", lines=_lines_xnnpack, one=2048)

_SAYS = ("half_even", "q31 2 half_away", "q15 1 half_up")

_EIGHT_BITS = _narrow(_XNNPACK, _OPTIMIZED)
for _name, _kernels, _moves, _quantize, _says in (
    ("litert_reference", _REFERENCE, _MOVES, _quantize_away, ("half_away", *_SAYS[1:])),
    ("litert_optimized", _OPTIMIZED, _MOVES, _quantize_optimized, _SAYS),
    ("litert_xnnpack", _EIGHT_BITS, _narrow(_MOVES_XNNPACK, _MOVES), _quantize_xnnpack, ("float 1 half_even", *_SAYS)),
):
    _own = _name == "litert_xnnpack"
    # the optimised product with 4-bit weights adds in an order of its own
    _bits = (8,) if _name == "litert_optimized" else (4, 8)
    _each_time = dict.fromkeys((("Linear", "row", b) for b in _bits), _dynamic_xnnpack if _own else _dynamic)
    _how = Profile(
        kernels=_kernels,
        moves=_moves,
        dynamic=_each_time,
        rounds=_codes_xnnpack if _own else _codes_by_row,
        clip=_clip,
        quantize=_quantize,
        by_type=True,
        says=_says,
    )
    register("kernels", _name)(_how)
