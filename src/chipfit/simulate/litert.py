"""LiteRT's (TensorFlow Lite's) integer kernels: the reference ones, the optimised ones, and XNNPACK.

They differ in how they round. The reference kernels multiply by 31-bit integers and round twice, halves away from zero;
the optimised ones round matrix products twice with halves up; XNNPACK multiplies in float32 and rounds halves to even.
Sources: TensorFlow Lite, kernels/internal; XNNPACK, src/microparams-init.c and src/operators.
"""

import math
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from chipfit.engine.curve_table import table_of
from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.graph.linear import is_depthwise
from chipfit.operators.table import OPS, by_name, read_column, resolve
from chipfit.quantizers.dynamic import Codes, Per, axes_of
from chipfit.quantizers.rounding import half_away as round_away
from chipfit.quantizers.stored import Stored, scales_per_output
from chipfit.registry import register
from chipfit.simulate import gemmlowp, recurrent, tables16
from chipfit.simulate.integer import (
    CellFunction,
    Kernel,
    KernelCall,
    Profile,
    Simulation,
    accumulate,
    dynamic_product,
    integer_clip_range,
    kernel_of,
    pass_through,
    pool_windows,
)
from chipfit.simulate.libm import libm
from chipfit.simulate.requantize import fixed_point, multiplier_and_shift, scale_by, shift_away, shift_up, short

Tensor = torch.Tensor


def _f32(v: float) -> Tensor:
    return torch.tensor(v, dtype=torch.float32)


# ---------------------------------------------------------------- products


def quantize_dynamic_xnnpack(x: Tensor, per: Per = "row", readers: Set[str] = frozenset(), **how: Any) -> Codes:
    """Quantize parts of a tensor dynamically as XNNPACK: q = rne(x m) + z with m = 255 / (max - min), 0 in the range.

    z is computed from the end that has the smaller error, and the scale is 1 / m. Depthwise convolutions are left to
    the built-in kernel.
    Source: XNNPACK, xnn_f32_qd8_asymmetric_quantization_params.
    """
    if "DepthwiseConv2D" in readers:
        return _quantize_dynamic_with_zero(x)
    axes = axes_of(per, x.dim())
    low, high = x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)
    span, one = high - low, torch.ones_like(high)
    m = torch.where(span > 0, _f32(255.0) * one / torch.where(span > 0, span, one), one)
    z = torch.where((low * m - 128) + (high * m + 127) > 0, -128 - low * m, 127 - high * m)
    z = torch.round(z.clamp(-128, 127))
    return (torch.round(x * m) + z).clamp(-128, 127), one / m, z


def _quantize_dynamic_with_zero(x: Tensor) -> Codes:
    """Quantize samples dynamically as built-in kernels with a zero point: q = round(x / s) + z, halves away from zero.

    Source: TensorFlow Lite, kernels/internal/optimized/neon_tensor_utils.cc, NeonAsymmetricQuantizeFloats.
    """
    axes = axes_of("sample", x.dim())
    low, high = (v.double() for v in (x.amin(axes, keepdim=True).clamp(max=0), x.amax(axes, keepdim=True).clamp(min=0)))
    s = torch.where(high > low, (high - low) / 255, 1.0)
    first = 128 + (low / s).abs() < 127 + (high / s).abs()
    z = round_away(torch.where(first, -128 - low / s, 127 - high / s)).clamp(-128, 127)
    z, s = torch.where(high > low, z, 0.0).float(), s.float()
    return (round_away(x * (1 / s)) + z).clamp(-128, 127), s, z


def quantize_dynamic_by_row(x: Tensor, blocks: bool = False, **how: Any) -> Codes:
    """Quantize rows dynamically as built-in kernels: q = round(x (127 / max |x|)), halves away from zero.

    For weights in blocks they call XNNPACK.

    Source: TensorFlow Lite, kernels/internal/reference/portable_tensor_utils.cc, SymmetricQuantizeFloats.
    """
    if blocks:
        return quantize_dynamic_xnnpack(x)
    top = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(top, 127)
    top = torch.where(top == 0, most, top)
    return round_away(x * (most / top)).clamp(-127, 127), top / most, torch.zeros_like(top)


def _dynamic_xnnpack(c: KernelCall) -> Tensor:
    """Return fma(float32(acc) s_x, s_w, b)."""
    acc, s, b = dynamic_product(c)
    return ((acc.float() * s).double() * _by_channel(c, acc).double() + b.double()).float()


def _dynamic_depthwise(c: KernelCall) -> Tensor:
    """Return float32(acc) s_w s_x + b."""
    acc, s, b = dynamic_product(c)
    return acc.float().mul_(_by_channel(c, acc)).mul_(s).add_(b)


def _by_channel(c: KernelCall, acc: Tensor) -> Tensor:
    """Return the scales of a layer's weights, which broadcast against its sums."""
    s = c.scale(c.second)
    return s.reshape(-1, *[1] * (acc.dim() - 2)) if c.node.facts.kind == "conv" and s.dim() else s


def _dynamic(c: KernelCall) -> Tensor:
    """Return float32(acc) (s_x s_w) + b."""
    acc, s, b = dynamic_product(c)
    return acc.float().mul_(s * c.scale(c.second)).add_(b)


def _scaled(acc: Tensor, real: Tensor, how: str) -> Tensor:
    """Requantize accumulators to integers without zero point.

    Args:
        how: XNNPACK's product in "float", the reference linear layer's in "double", or a rounding of `fixed_point`.
    """
    if how == "float":
        return torch.round(acc.float() * real.float()).double()
    if how == "double":
        return round_away(acc.double() * real)
    return fixed_point(acc, real, how).double()


def _precision(how: str) -> torch.dtype:
    """Return the precision in which kernels with weights compute their multiplier."""
    return torch.float32 if how == "float" else torch.float64


def _convolution(c: KernelCall, how: str) -> None:
    head, w = c.node, c.second
    plain = head.op.startswith("Conv") and not (head.op == "Conv1D" and is_depthwise(c.run.graph, head))
    kernel = c.code(w).shape[2:]
    gaps = head.facts.kind == "transposed" and any(s > k for s, k in zip(c.attrs["stride"], kernel, strict=True))
    if how == "float" and (gaps or c.bits(w) <= 4):  # XNNPACK leaves these to LiteRT
        how = "up"
    if how == "up" and plain and c.attrs["groups"] > 1:  # no optimised kernel
        how = "away"
    if c.wide:
        how = "q15"
    acc = accumulate(c.run, head)
    real = scales_per_output(c.multiplier(c.x, w, kind=_precision(how)).reshape(-1), acc.shape[1])
    real = real.view(-1, *[1] * (acc.dim() - 2))
    if how == "up" and not plain:  # vector instructions take 8 channels at once, the scalar code what is left
        v = acc.shape[1] // 8 * 8
        c.write_result(torch.cat((_scaled(acc[:, :v], real[:v], "up"), _scaled(acc[:, v:], real[v:], "away")), 1))
    else:
        c.write_result(_scaled(acc, real, how))


def _linear(c: KernelCall, how: str) -> None:
    w = c.second
    if how == "float" and c.bits(w) <= 4 and c.code(w).shape[-1] % 2:  # XNNPACK leaves rows of half bytes to LiteRT
        how = "up"
    if c.wide:
        how = "double"
    real = c.multiplier(c.x, w, kind=_precision(how))
    if real.numel() == 1 and how == "up":  # a single scale is multiplied in float32
        real = (c.scale(c.x) * c.scale(w)).double() / c.scale(c.out).double()
    c.write_result(_scaled(accumulate(c.run, c.node), real, how))


def _mat_mul(c: KernelCall, how: str) -> None:
    if how == "float" and int(c.zero(c.second)):  # XNNPACK takes products whose second operand has zero point 0
        how = "away"
    how = "q15" if c.wide else how
    real = (c.scale(c.x) * c.scale(c.second)).to(_precision(how)) / c.scale(c.out)
    c.write_result(_scaled(c.run.summed(torch.matmul(c.centred(), c.centred(c.second))), real, how))


# ---------------------------------------------------------------- element by element
# XNNPACK leaves scales that are far apart to LiteRT.


def _at_one_scale(c: KernelCall, left: int, how: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return both operands, shifted left and at twice the larger scale, and that scale."""
    names = (c.x, c.second)
    scales = [c.scale(i).double() for i in names]
    twice = 2 * torch.maximum(*scales)
    a, b = (fixed_point(c.centred(i).long() << left, s / twice, how) for i, s in zip(names, scales, strict=True))
    return a, b, twice


def _rescaled(c: KernelCall, sign: int = 1, how: str = "away") -> Tensor:
    """Add both operands, shifted left and at twice the larger scale, and bring the sum to the result's scale."""
    left = 15 if c.wide else 20
    a, b, twice = _at_one_scale(c, left, how)
    return fixed_point(a + sign * b, twice / ((1 << left) * c.scale(c.out).double()), "away")


def _add(c: KernelCall, sign: int = 1) -> None:
    c.write_result(_rescaled(c, sign))


def _squared_difference(c: KernelCall) -> None:
    """Square the difference of both operands, shifted left and at twice the larger scale."""
    left = 0 if c.wide else 7
    a, b, twice = _at_one_scale(c, left, "away")
    real = twice.square() / ((1 << 2 * left) * c.scale(c.out).double())
    c.write_result(fixed_point((a - b).square(), real, "away"))


def contiguous_elements(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many elements of two broadcast operands optimised kernels process as one contiguous row.

    They do so for shapes that differ in one block of axes, or in two if each operand has one; else the row is 1.
    Source: TensorFlow Lite, kernels/internal/reference/process_broadcast_shapes.cc.
    """
    axes = [(m, n) for m, n in zip(a, b, strict=True) if (m, n) != (1, 1)]
    kinds = "".join("=" if m == n else "a" if m == 1 else "b" for m, n in axes)
    walked = re.fullmatch("=*(a*=*b*|b*=*a*)=*", kinds)
    return math.prod(m for m, _ in axes[len(kinds.rstrip("=")) :]) if walked else 1


def vector_elements(run: Simulation, name: str, at_once: int, *shapes: Sequence[int]) -> Tensor:
    """Return which elements of a value vector instructions compute, `at_once` each, from operands of these shapes.

    Vectors begin anew in each part of the samples that the device computes at once.
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
        many = contiguous_elements(lie[0], lie[-1])
        vectors = (torch.arange(math.prod(out)) % many < many // at_once * at_once).reshape(out)
        return vectors.movedim((*range(rank),), (*form,))

    part = run.part or samples or 1
    sizes = [min(part, samples - k) for k in range(0, samples, part)] or [0]
    made = {size: of(size) for size in sizes}
    return made[sizes[0]] if axis is None else torch.cat([made[size] for size in sizes], axis)


def _add_optimized(c: KernelCall) -> None:
    """Round each operand once, halves up, where vector instructions run.

    These run for 16-bit operands if the shapes are equal, for 8-bit operands along contiguous rows of both.
    """
    a, b = (c.code(i).shape for i in (c.x, c.second))
    if c.wide and a != b:
        return _add(c)
    c.write_result(torch.where(vector_elements(c.run, c.out, 16, a, b), _rescaled(c, how="once"), _rescaled(c)))


def _add_xnnpack(c: KernelCall, sign: int = 1) -> None:
    """Use multipliers with 20 fractional bits below the larger one, and one shift with halves up."""
    ra, rb = (c.multiplier(i).double() for i in (c.x, c.second))
    if not all(2.0**-10 <= r < 256 for r in (ra, rb)):
        return _add(c, sign)
    shift = 20 - (int(torch.frexp(torch.maximum(ra, rb)).exponent) - 1)
    ma, mb = (torch.round(r * 2.0**shift).long() for r in (ra, rb))
    total = c.centred().long() * ma + sign * c.centred(c.second).long() * mb
    c.write_result(shift_up(total, shift))


def _mul(c: KernelCall, how: str) -> None:
    real = c.multiplier(c.x, c.second)
    near = 2.0**-16 <= real < 256
    if near and how == "float" and c.x == c.second:  # XNNPACK squares by a table
        return apply_table(c, lambda x, node: x * x, how="float")
    c.write_result(_scaled(c.centred() * c.centred(c.second), real, how if near else "away"))


def _leaky(c: KernelCall) -> None:
    """Use one multiplier on either side of zero; a product with a negative one is rounded before it is negated."""
    q, below = c.centred(), c.scale(c.x) * _f32(c.attrs["negative_slope"]) / c.scale(c.out)
    turned = fixed_point(q, below.abs(), "away") * below.sign().long()
    c.write_result(torch.where(q >= 0, fixed_point(q, c.multiplier(), "away"), turned))


def _by_256ths(q: Tensor, real: Tensor) -> Tensor:
    """Multiply by a multiplier of 8 fractional bits, halves up."""
    return shift_up(q.long() * torch.round(256.0 * real).long(), 8)


def _leaky_xnnpack(c: KernelCall) -> None:
    q, s = c.centred(), c.multiplier()
    slope = s * _f32(c.attrs["negative_slope"])
    if not (2.0**-8 <= s <= 128 and (2.0**-8 <= slope <= 128 or -127.99609375 <= slope <= -(2.0**-8))):
        return _leaky(c)
    c.write_result(_by_256ths(q, torch.where(q >= 0, s, slope)))


def _requantize(c: KernelCall) -> None:
    """Bring integers to another scale."""
    c.write_result(fixed_point(c.centred(), c.multiplier(kind=torch.float64), "away"))


def _requantize_optimized(c: KernelCall) -> None:
    """Round twice with halves up where vector instructions run, which exist for 8-bit integers only."""
    q, real = c.centred(), c.multiplier(kind=torch.float64)
    plain = fixed_point(q, real, "away")
    c.write_result(
        plain if c.wide else torch.where(vector_elements(c.run, c.out, 16, q.shape), fixed_point(q, real, "up"), plain)
    )


def _requantize_xnnpack(c: KernelCall) -> None:
    s = c.multiplier()
    if not 2.0**-8 <= s <= 128:
        return _requantize_optimized(c)
    c.write_result(_by_256ths(c.centred(), s))


def prelu(c: KernelCall, kind: torch.dtype = torch.float32) -> None:
    """Multiply by the slope's integer below zero, with multipliers computed in floats of one type."""
    q = c.centred()
    slope = c.centred(c.second)
    slope = slope.view(-1, *[1] * (q.dim() - 2)) if slope.dim() < 2 else slope
    below = fixed_point(q * slope, c.multiplier(c.x, c.second, kind=kind), "away")
    c.write_result(torch.where(q >= 0, fixed_point(q, c.multiplier(kind=kind), "away"), below))


def _rectifier(c: KernelCall) -> None:
    """Bring integers to another scale, then clip: an activation that is not fused."""
    c.write_result(fixed_point(c.centred(), c.multiplier(), "away"))
    ends = fused_bounds(c.node, c.run.stored(c.out))
    if ends is not None:
        c.run.codes[c.out] = c.run.codes[c.out].clamp(*ends)


def _abs(c: KernelCall) -> None:
    c.write_result(fixed_point(c.centred().abs(), c.multiplier(), "away"))


def _rsqrt(c: KernelCall) -> None:
    """Multiply 1 / sqrt(q), in fixed point with 20 more bits, by 1 / (sqrt(s) s_y); 0 gives the largest integer."""
    q = c.centred().long()
    real = 1.0 / (c.scale(c.x).sqrt() * c.scale(c.out)).double()
    m, e = gemmlowp.inverse_sqrt(q.clamp_min(1))
    m_out, e_out = multiplier_and_shift(real)
    fine = scale_by(torch.ones_like(q), m, e + 20, "away")
    c.write_result(torch.where(q == 0, 1 << 16, scale_by(fine, m_out, e_out - 20, "away")))


def _l2_norm(c: KernelCall) -> None:
    """Multiply q by 1 / sqrt(sum q^2) in fixed point with 7 more bits: the result's scale is 1/128."""
    q = c.centred().long()
    m, e = gemmlowp.inverse_sqrt((q * q).sum(c.attrs["axis"], keepdim=True))
    c.write_result(scale_by(q, m, e + 7, "away"))


def apply_table(
    c: KernelCall, f: Callable[[Tensor, Node], Tensor] | None = None, wide: Any = None, how: str = "away"
) -> None:
    """Look up a table over all integers: y = round(f(s (q - z)) / s_y) + z_y, computed in float32.

    Args:
        f: the function in the kernel's own steps; the C library's when omitted.
        wide: (integers, scale) -> integers, for 16 bits; a table too when omitted.
        how: 8-bit results are rounded: halves "away" from zero, or in "float", to even after z_y is added in float32.
    """
    codes, scale, result = c.code().long(), c.scale(c.x), c.scale(c.out)

    def function(reals: Tensor) -> Tensor:
        return f(reals, c.node) if f is not None else libm(c.node.op.lower(), reals)

    if c.wide:
        c.run.store(c.out, wide(codes, scale) if wide else tables16.apply(function, codes, scale, result))
        return
    stored = c.run.plan[c.x]
    y = function(stored.dequantize(torch.arange(stored.grid.qmin, stored.grid.qmax + 1))) * (1.0 / result)
    zero = c.zero(c.out).float()
    rounded = (torch.round(y + zero) - zero).double() if how == "float" else round_away(y.double())
    c.write_result(rounded[codes - stored.grid.qmin])


def _lookup(c: KernelCall) -> None:
    """Look up the table of a curve."""
    x, y = c.run.plan[c.x], c.run.plan[c.out]
    c.run.store(c.out, table_of(c.node, x, y)[c.code().long() - x.grid.qmin])


def _curve(near: Callable[[Tensor, Tensor], Tensor], fixed: Callable[..., Tensor], shifts: Sequence[int]) -> Any:
    """Return a function of 16-bit integers: `fixed` with 3 integer bits if the scale allows a shift, else `near`."""

    def wide(q: Tensor, scale: Tensor) -> Tensor:
        by = 12 + float(torch.log2(scale.double()))
        return fixed(_saturated(q << int(by)), 3, 16) if by in shifts else near(q, scale)

    return wide


def _sigmoid(x: Tensor, node: Node) -> Tensor:
    """Return the function, each step rounded to float32."""
    return 1.0 / (1.0 + libm("exp", -x))


def _elu(x: Tensor, node: Node) -> Tensor:
    """Return the function, each step rounded to float32."""
    return torch.where(x < 0, libm("expm1", x), x)


def _gelu(x: Tensor, node: Node) -> Tensor:
    """Return the function, each step rounded to float32."""
    if node.attrs["approximate"] == "tanh":
        inner = _f32(math.sqrt(2 / math.pi)) * (x + _f32(0.044715) * x * x * x)
        return 0.5 * x * (1.0 + libm("tanh", inner))
    return 0.5 * x * libm("erfc", x * _f32(-math.sqrt(0.5)))


def _hard_swish(c: KernelCall) -> None:
    """Compute x * relu6(x + 3) / 6 in 16-bit fixed point, with 7 more bits than the integers have."""
    fine = c.scale(c.x) / 128
    m_out, e_out = multiplier_and_shift((fine / c.scale(c.out)).double())
    m_gate, e_gate = multiplier_and_shift((fine / _f32(3.0 / 32768.0)).double())
    q = c.centred().long() << 7
    value = _product16(q, short(m_out))
    up = int(e_gate)
    gate = _saturated(q << (up - 1)) if up > 0 else q
    gate = _product16(gate, short(m_gate))
    gate = _saturated(gate << 1) if up > 0 else _shift_away16(gate, -up)
    product = torch.div(((gate + (1 << 15)) >> 1) * value, 1 << 15, rounding_mode="trunc")
    c.write_result(_shift_away16(product, -int(e_out)))


def _shift_away16(x: Tensor, bits: int) -> Tensor:
    """Divide 16-bit integers by 2^bits as gemmlowp does: from 16 bits on its mask overflows, and gives 1 or -1."""
    return torch.where(x < 0, -1, 1) if bits >= 16 else shift_away(x, bits)


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(-(1 << 15), (1 << 15) - 1)


def _product16(a: Tensor, b: Tensor) -> Tensor:
    """Return the doubled high half of a 16-bit product."""
    return _saturated(shift_up(a * b, 15))


def softmax(c: KernelCall, rows: Callable[[Tensor, Tensor, Tensor], Tensor], kind: torch.dtype = torch.float64) -> None:
    """Compute a softmax.

    Args:
        rows: (8-bit integers, their scale, result scale) -> integers minus zero point, axis last.
        kind: type of the floats in which tables for 16 bits are computed.
    """
    axis, scale = c.attrs["axis"], c.scale(c.x)
    q = c.code().long().movedim(axis, -1)
    if c.wide:
        c.run.store(c.out, tables16.softmax(q, scale, kind).movedim(-1, axis))
    else:
        c.write_result(rows(q, scale, c.scale(c.out)).movedim(-1, axis))


def rows_in_fixed_point(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """Return the softmax of integers over the last axis, in steps of 1/256 or 1/65536."""
    return gemmlowp.softmax(q - q.amax(-1, keepdim=True), scale, round(-math.log2(float(result))))


def _exponentials(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return exponentials of differences to the maximum from a float32 table, and their sum, added in order."""
    table = libm("exp", -scale * torch.arange(256))
    e = table[q.amax(-1, keepdim=True) - q]
    return e, torch.from_numpy(np.cumsum(e.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())


def _rows_optimized(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """floor(e / (sum s_y) + 1/2)."""
    e, total = _exponentials(q, scale)
    return torch.floor(e * (1.0 / (total * result)) + 0.5)


def _log_rows_optimized(q: Tensor, scale: Tensor, result: Tensor) -> Tensor:
    """s / s_y q - (s max q + log sum) / s_y, halves to even, with the exponentials' table."""
    most = q.amax(-1, keepdim=True)
    log = torch.log(_exponentials(q, scale)[1].double()).float()
    return torch.round(scale / result * q.float() - (scale * most.float() + log) / result)


# ---------------------------------------------------------------- windows and means


def _mean_axes(c: KernelCall) -> tuple[tuple[int, ...], bool]:
    """Return axes counted from the front, and whether they stay as size 1."""
    rank = c.code().dim()
    axes = tuple(a % rank for a in c.attrs.get("axes", range(2, rank)))
    return axes, c.attrs.get("keepdims", True)


def _sum(c: KernelCall) -> tuple[Tensor, int]:
    """Return sums of integers without zero point, and the number of terms of each."""
    axes, keep = _mean_axes(c)
    q = c.centred()
    return q.sum(axes, keep), math.prod(q.shape[a] for a in axes)


def _mean_scale(c: KernelCall, n: int, of: str) -> Tensor:
    """Return the scale of means: the result's, or that of `n`-th parts of "sums", as files write these."""
    return c.scale(c.out) / n if of == "sums" else c.scale(c.out)


def _mean(c: KernelCall, of: str = "") -> None:
    """Divide by the count within the multiplier: m 2^k / n, with k as large as 64 bits allow."""
    total, n = _sum(c)
    m, e = multiplier_and_shift(c.scale(c.x).double() / _mean_scale(c, n, of).double())
    k = min(n.bit_length() - 1, 32, 31 + int(e))
    c.write_result(scale_by(total, (m << k) // n, e - k, "away"))


def _mean_optimized(c: KernelCall, of: str = "") -> None:
    """Sum integers with their zero point, over rows and columns of an image that stay as size 1.

    Vector instructions compute 16 channels at once and round halves up, scalar code computes the remaining channels.
    """
    axes, keep = _mean_axes(c)
    q = c.code().double()
    if not keep or {*axes} != {2, 3} or q.dim() != 4 or c.wide:
        return _mean(c, of)
    n = q.shape[2] * q.shape[3]
    scale, result = c.scale(c.x), _mean_scale(c, n, of)
    real = scale / (float(n) * result)
    shift = c.zero(c.x).float() * scale / result
    total, vector = q.sum(axes, keep), q.shape[1] // 16 * 16
    parts = (fixed_point(total[:, :vector], real, "up"), fixed_point(total[:, vector:], real, "away"))
    c.write_result(torch.cat(parts, 1) - torch.trunc(torch.where(shift > 0, shift + 0.5, shift - 0.5)).to(torch.int64))


def _mean_xnnpack(c: KernelCall, of: str = "") -> None:
    """sum(q) m + (z_y - n z m) with m = (s / s_y) (1 / n), each step in float32."""
    total, n = _sum(c)
    m, shift = c.scale(c.x) / _mean_scale(c, n, of) * _f32(1.0 / n), n * c.zero(c.x)
    c.run.store(c.out, torch.round((total + shift).float() * m + (c.zero(c.out).float() - shift * m)))


def _avg_pool(c: KernelCall) -> None:
    """(sum of codes ± n/2) / n, towards zero; n counts what lies inside the image, or in the padded one."""
    parts, n = pool_windows(c.code().double(), c.node, float(c.zero(c.x)))
    total = parts.sum(-1)
    half = torch.floor(n / 2)
    c.run.store(c.out, torch.where(total > 0, torch.floor((total + half) / n), -torch.floor((half - total) / n)))


def source_positions(size: int, out: int, corners: bool, centres: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return, along one axis, two source positions for each result, and the second's share in 1024ths.

    Args:
        corners: outer pixels keep their places.
        centres: positions are those of centres of pixels, else of corners.
    """
    at = torch.arange(out)
    if corners and out > 1:
        fine = at * ((1024 * (size - 1) + (out - 1) // 2) // (out - 1))
    else:
        step = (1024 * size + out // 2) // out
        fine = at * step + (step // 2 - 512 if centres and not corners else 0)
    low = torch.div(fine, 1024, rounding_mode="trunc").clamp_min(0)
    high = torch.div(fine + 1023, 1024, rounding_mode="trunc").clamp_max(size - 1)
    return low, high, fine - 1024 * low


def source_positions_xnnpack(size: int, out: int, corners: bool, centres: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `source_positions` does, in 2048ths, from float32 positions."""
    less = int(corners and out > 1)
    step = _f32(size - less) / _f32(out - less)
    fine = torch.arange(out, dtype=torch.float32) * step
    if centres and not corners:
        fine = (fine + (_f32(0.5) * step - _f32(0.5))).clamp(0, size - 1)
    low = fine.long()
    return low, (low + 1).clamp_max(size - 1), torch.round((fine - low) * 2048).long()


def _resize(c: KernelCall, lines: Callable[[int, int, bool, bool], tuple[Tensor, Tensor, Tensor]], one: int) -> None:
    """Interpolate with fixed-point shares of `one`; halves away from zero for shares of 1024, else up."""
    if not c.attrs["mode"].startswith("linear"):
        return pass_through(c.run, c.nodes)
    q = c.code().long()
    (like,) = execute(c.node, [q.float()])
    shape = like.shape
    if len(shape) == 3:  # a row is an image of height 1
        q, like = q[:, :, None], like[:, :, None]
    how = bool(c.attrs["align_corners"]), c.attrs["mode"] == "linear"
    (top, low, v), (left, right, h) = (lines(q.shape[d], like.shape[d], *how) for d in (2, 3))
    v = v[:, None]
    upper, lower = (q[:, :, row][..., left] * (one - h) + q[:, :, row][..., right] * h for row in (top, low))
    y, half, whole = (upper * (one - v) + lower * v).reshape(shape), one * one // 2, one * one
    if one == 1024:
        c.run.store(c.out, torch.div(y + torch.where(y > 0, half, -half), whole, rounding_mode="trunc"))
    else:
        c.run.store(c.out, torch.div(y + half, whole, rounding_mode="floor"))


def _index(c: KernelCall) -> Tensor:
    """Return the places of the greatest or least integers; equal ones have the first."""
    found: Tensor = execute(c.node, [c.code()])[0]
    return found


def _copied(c: KernelCall) -> None:
    """Copy integers, whatever the scales of operand and result: files of TensorFlow's converter may have two."""
    others = [c.run.float_value(i, c.node) for i in c.node.inputs[1:] if i is not None]
    c.run.store(c.out, execute(c.node, [c.code(), *others])[0])


def _rows(c: KernelCall) -> None:
    """Move rows of quantized values."""
    pass_through(c.run, c.nodes)


# ---------------------------------------------------------------- quantization of floats, and fused activations


fused_bounds = partial(integer_clip_range, rounded=lambda x: round_away(x.double()))  #: halves away from zero


def _stored(q: Tensor, t: Stored) -> Tensor:
    """Add the zero point to integers and clip them to the grid."""
    return (q + t.zero_point).clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)


def quantize_away(run: Simulation, name: str, x: Tensor) -> Tensor:
    """round(x / s) + z, halves away from zero."""
    t = run.stored(name)
    return _stored(round_away((x / t.scale).double()), t)


def quantize_by_inverse(run: Simulation, name: str, x: Tensor) -> Tensor:
    """round(x * (1 / s)) + z, halves to even."""
    t = run.stored(name)
    return _stored(torch.round(x * (1.0 / t.scale)), t)


def _quantize_optimized(run: Simulation, name: str, x: Tensor) -> Tensor:
    """Multiply by the inverse in vector instructions; scalar code divides the other elements in double precision."""
    t, q, left = run.stored(name), quantize_by_inverse(run, name, x), ~vector_elements(run, name, 8, x.shape)
    q[left] = _stored(round_away(x[left].double() / t.scale.double()), t)
    return q


def _quantize_xnnpack(run: Simulation, name: str, x: Tensor) -> Tensor:
    return (quantize_by_inverse if run.stored(name).grid.bits <= 8 else _quantize_optimized)(run, name, x)


# ---------------------------------------------------------------- families of kernels


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "sub": partial(_add, sign=-1),
    "sub_xnnpack": partial(_add_xnnpack, sign=-1),
    "sigmoid": partial(apply_table, f=_sigmoid, wide=tables16.sigmoid),
    "sigmoid_optimized": partial(apply_table, f=_sigmoid, wide=_curve(tables16.sigmoid, gemmlowp.logistic, (0,))),
    "sigmoid_xnnpack": partial(apply_table, f=lambda x, node: torch.sigmoid(x.double()).float(), how="float"),
    "tanh": partial(apply_table, wide=tables16.tanh),
    "tanh_optimized": partial(apply_table, wide=_curve(tables16.tanh, gemmlowp.tanh, (0, 1))),
    "tanh_xnnpack": partial(apply_table, how="float"),
    "table": partial(apply_table),
    "elu": partial(apply_table, f=_elu),
    "gelu": partial(apply_table, f=_gelu),
    "softmax": partial(softmax, rows=rows_in_fixed_point),
    "softmax_optimized": partial(softmax, rows=_rows_optimized),
    "log_softmax": partial(softmax, rows=lambda q, s, _: gemmlowp.log_softmax(q - q.amax(-1, keepdim=True), s)),
    "log_softmax_optimized": partial(softmax, rows=_log_rows_optimized),
    "resize": partial(_resize, lines=source_positions, one=1024),
    "resize_xnnpack": partial(_resize, lines=source_positions_xnnpack, one=2048),
} | by_name(
    *(_convolution, _linear, _mat_mul, _add, _add_optimized, _add_xnnpack, _mul, _rectifier, _leaky, _leaky_xnnpack),
    *(prelu, _lookup, _hard_swish, _abs, _rsqrt, _l2_norm, _requantize, _requantize_optimized, _requantize_xnnpack),
    *(_squared_difference, _mean, _mean_optimized, _mean_xnnpack, _avg_pool, _lookup, _rows, _copied),
)
_FUNCTIONS |= recurrent.FUNCTIONS["litert"]
Tables = tuple[dict[str, Kernel], dict[str, Kernel], dict[str, Kernel]]
#: kernels of the reference family, of the optimised one, and of XNNPACK
_KERNELS: Tables = ({}, {}, {})
_PASS_THROUGH: Tables = ({}, {}, {})


def _enter_cell(
    op: str,
    name: CellFunction | None = None,
    optimized: CellFunction | None = None,
    xnnpack: CellFunction | None = None,
    pass_through: CellFunction | None = None,
    pass_through_xnnpack: CellFunction | None = None,
) -> None:
    """Enter a cell of the table of operators: the reference kernel (`name`), and those of faster families.

    A family without a kernel of its own has that of the family before it. `pass_through` kernels compute where operand
    and result share a scale.
    """
    _enter(_KERNELS, op, name, optimized, xnnpack)
    _enter(_PASS_THROUGH, op, pass_through, None, pass_through_xnnpack)


def _enter(tables: Tables, op: str, *functions: CellFunction | None) -> None:
    reference, optimized, xnnpack = (None if f is None else kernel_of(resolve(f, _FUNCTIONS)) for f in functions)
    if reference is not None:
        optimized = optimized or reference
        fastest = optimized if xnnpack is None else _up_to_8_bits(xnnpack, optimized)
        for table, kernel in zip(tables, (reference, optimized, fastest), strict=True):
            table[op] = kernel


def _up_to_8_bits(xnnpack: Kernel, wider: Kernel) -> Kernel:
    """Return XNNPACK's kernel, which computes with 8-bit integers, with another one for wider integers."""
    return lambda run, nodes: (wider if KernelCall(run, nodes).wide else xnnpack)(run, nodes)


read_column("litert", _enter_cell, *_KERNELS, *_PASS_THROUGH)
_SUPPORTED_MATH = ("half_even", "q31 2 half_away", "q15 1 half_up")


def _dynamic_linear(kernel: Callable[[KernelCall], Tensor], *bits: int) -> dict[tuple[str, str, int], Any]:
    """Return a table of one kernel of dynamic linear layers, for weights of these bits."""
    return dict.fromkeys((("Linear", "row", b) for b in bits), kernel)


_PROFILES = {
    "litert_reference": Profile(
        kernels=_KERNELS[0],
        pass_through=_PASS_THROUGH[0],
        float_outputs={op: _index for op, row in OPS.items() if row.layout == "arg_max"},
        dynamic=_dynamic_linear(_dynamic, 4, 8),
        quantize_dynamic=quantize_dynamic_by_row,
        clip=fused_bounds,
        quantize=quantize_away,
        saturate_to_type=True,
        supported_math=("half_away", *_SUPPORTED_MATH[1:]),
    )
}
_PROFILES["litert_optimized"] = replace(
    _PROFILES["litert_reference"],
    kernels=_KERNELS[1],
    pass_through=_PASS_THROUGH[1],
    dynamic=_dynamic_linear(_dynamic, 8),  # the product with 4-bit weights adds in an order of its own
    quantize=_quantize_optimized,
    supported_math=_SUPPORTED_MATH,
)
_PROFILES["litert_xnnpack"] = replace(
    _PROFILES["litert_reference"],
    kernels=_KERNELS[2],
    pass_through=_PASS_THROUGH[2],
    dynamic={
        **_dynamic_linear(_dynamic_xnnpack, 4, 8),
        **dict.fromkeys((("Conv2D", per, 8) for per in ("pixel", "sample")), _dynamic_xnnpack),
        ("DepthwiseConv2D", "sample", 8): _dynamic_depthwise,
    },
    quantize_dynamic=quantize_dynamic_xnnpack,
    quantize=_quantize_xnnpack,
    supported_math=("float 1 half_even", *_SUPPORTED_MATH),
)
for _name, _profile in _PROFILES.items():
    register("kernels", _name)(_profile)
