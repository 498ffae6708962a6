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

from chipfit.frameworks.torch.ops import execute, pad
from chipfit.graph.ir import Node
from chipfit.plan import TensorPlan
from chipfit.quantizers.grids import dequantize
from chipfit.registry import register
from chipfit.simulate.integer import Kernel, Profile, Run, accumulate
from chipfit.simulate.requantize import fixed_point, multiplier_and_shift, scale_by, shift_away

Tensor = torch.Tensor


def round_away(x: Tensor) -> Tensor:
    """To the nearest integer, halves away from zero. Exact for float32 numbers given as float64."""
    return torch.sign(x) * torch.floor(x.abs() + 0.5)


def _f32(v: float) -> Tensor:
    return torch.tensor(v, dtype=torch.float32)


def _wide(run: Run, name: str) -> bool:
    """16-bit codes."""
    grid = run.tensor(name).grid
    return grid is not None and grid.bits > 8


def _names(unit: Sequence[Node]) -> tuple[str, str]:
    """First operand and result of a unit."""
    return unit[0].inputs[0] or "", unit[-1].output


# ---------------------------------------------------------------- products


def _scaled(acc: Tensor, real: Tensor, how: str) -> Tensor:
    """Accumulators to centred codes; "float" is XNNPACK's float32 product."""
    if how == "float":
        return torch.round(acc.float() * real.float()).double()
    return fixed_point(acc, real, how).double()


def _real(run: Run, *over: str, under: str, how: str) -> Tensor:
    """Product of the scales of `over` divided by that of `under`, in the precision that the kernels use."""
    kind = torch.float32 if how == "float" else torch.float64
    real = run.scale(over[0]).to(kind)
    for name in over[1:]:
        real = real * run.scale(name).to(kind)
    return real / run.scale(under).to(kind)


def _product_sum(run: Run, unit: Sequence[Node], how: str, grouped: str = "") -> None:
    """Convolutions and linear layers. Grouped convolutions have no optimised kernel."""
    head, (x, out) = unit[0], _names(unit)
    w = head.inputs[1] or ""
    acc = accumulate(run, head)
    if grouped and head.op == "Conv2D" and head.attrs["groups"] > 1:
        how = grouped
    if _wide(run, x):
        how = "q15" if head.op != "Linear" else "once"
    real = _real(run, x, w, under=out, how=how)
    if head.op == "Linear" and not real.dim() and how != "float":  # a single weight scale is multiplied in float32
        real = (run.scale(x) * run.scale(w)).double() / run.scale(out).double()
    if real.dim() and head.op != "Linear":
        real = real.view(-1, *[1] * (acc.dim() - 2))
    run.store(out, _scaled(acc, real, how) + run.zero(out))


def _mat_mul(run: Run, unit: Sequence[Node], how: str) -> None:
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    real = (run.scale(a) * run.scale(b)).to(torch.float32 if how == "float" else torch.float64) / run.scale(out)
    run.store(out, _scaled(torch.matmul(run.centred(a), run.centred(b)), real, how) + run.zero(out))


# ---------------------------------------------------------------- element by element


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
    ra, rb = (run.scale(a) / run.scale(out)).double(), (run.scale(b) / run.scale(out)).double()
    shift = 20 - (int(torch.frexp(torch.maximum(ra, rb)).exponent) - 1)
    ma, mb = (torch.round(r * 2.0**shift).long() for r in (ra, rb))
    total = run.centred(a).long() * ma + sign * run.centred(b).long() * mb
    run.store(out, ((total + (1 << (shift - 1))) >> shift) + run.zero(out))


def _mul(run: Run, unit: Sequence[Node], how: str) -> None:
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    real = _real(run, a, b, under=out, how=how)
    run.store(out, _scaled(run.centred(a) * run.centred(b), real, how) + run.zero(out))


def _leaky(run: Run, unit: Sequence[Node]) -> None:
    """One multiplier on either side of zero."""
    x, out = _names(unit)
    q, s = run.centred(x), _real(run, x, under=out, how="away")
    below = s * _f32(unit[0].attrs["negative_slope"]).double()
    y = torch.where(q >= 0, fixed_point(q, s, "away"), fixed_point(q, below, "away"))
    run.store(out, y + run.zero(out))


def _leaky_xnnpack(run: Run, unit: Sequence[Node]) -> None:
    """Multipliers with 8 fractional bits, halves up."""
    x, out = _names(unit)
    q, s = run.centred(x).long(), run.scale(x) / run.scale(out)
    above, below = (torch.round(256.0 * r).long() for r in (s, s * _f32(unit[0].attrs["negative_slope"])))
    run.store(out, ((q * torch.where(q >= 0, above, below) + 128) >> 8) + run.zero(out))


def _relu(run: Run, unit: Sequence[Node], how: str) -> None:
    """A rectifier on its own: another scale, then the clip."""
    x, out = _names(unit)
    run.store(out, _scaled(run.centred(x), _real(run, x, under=out, how=how), how) + run.zero(out))
    bounds = _clip(unit[0], run.tensor(out))
    assert bounds is not None
    run.codes[out] = run.codes[out].clamp(*bounds)


def _table(run: Run, unit: Sequence[Node], f: Callable[[Tensor], Tensor] | None = None) -> None:
    """A table over all codes: y = round(f(s (q - z)) / s_y), computed in float32, halves away from zero."""
    x, out = _names(unit)
    t = run.tensor(x)
    assert t.grid is not None
    codes = torch.arange(t.grid.qmin, t.grid.qmax + 1)
    reals = dequantize(codes, run.scale(x), run.zero(x))
    (y,) = (f(reals),) if f is not None else execute(unit[0], [reals.double()])
    table = round_away((y.float() * (1.0 / run.scale(out))).double()) + run.zero(out)
    run.store(out, table[run.code(x).long() - t.grid.qmin])


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


def _softmax(run: Run, unit: Sequence[Node]) -> None:
    """Exponentials of differences to the maximum from a float32 table; floor(e / (sum s_y) + 1/2)."""
    x, out = _names(unit)
    q = run.code(x).long().movedim(unit[0].attrs["axis"], -1)
    table = torch.exp(-run.scale(x).double() * torch.arange(256, dtype=torch.float64)).float()
    e = table[q.amax(-1, keepdim=True) - q]
    total = torch.from_numpy(np.cumsum(e.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())
    y = torch.floor(e * (1.0 / (total * run.scale(out))) + 0.5) + run.zero(out)
    run.store(out, y.movedim(-1, unit[0].attrs["axis"]))


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
    m, e = multiplier_and_shift(_real(run, x, under=out, how="away"))
    k = min(n.bit_length() - 1, 32, 31 + int(e))
    run.store(out, scale_by(q.sum(axes, keep), (m << k) // n, e - k, "away") + run.zero(out))


def _mean_xnnpack(run: Run, unit: Sequence[Node]) -> None:
    x, out = _names(unit)
    axes, keep = _mean_axes(run, unit[0])
    q = run.centred(x)
    n = math.prod(q.shape[a] for a in axes)
    real = run.scale(x) / run.scale(out) / n
    run.store(out, torch.round(q.sum(axes, keep).float() * real) + run.zero(out))


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


# ---------------------------------------------------------------- profiles


def _clip(act: Node, t: TensorPlan) -> tuple[int, int] | None:
    """The codes of the activation's bounds, halves away from zero."""
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    low, high = {"Relu": (0.0, None), "Relu6": (0.0, 6.0), "Clamp": (act.attrs.get("min"), act.attrs.get("max"))}.get(act.op, (None, None))
    if low is None and high is None:
        return None
    scale, z = t.scale, int(t.zero_point)

    def code(v: float) -> int:
        return z + int(round_away((_f32(v) / scale).double()))

    return (
        t.grid.qmin if low is None else min(max(t.grid.qmin, code(low)), t.grid.qmax),
        t.grid.qmax if high is None else max(min(t.grid.qmax, code(high)), t.grid.qmin),
    )


def _quantize_away(x: Tensor, t: TensorPlan) -> Tensor:
    """round(x / s) + z, halves away from zero."""
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    return (round_away((x / t.scale).double()) + t.zero_point).clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)


def _quantize_inverse(x: Tensor, t: TensorPlan) -> Tensor:
    """round(x * (1 / s)) + z, halves to even."""
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    return (torch.round(x * (1.0 / t.scale)) + t.zero_point).clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)


_WEIGHTED = ("Conv2D", "DepthwiseConv2D", "TransposeConv2D", "Linear")
_TABLES = ("Sigmoid", "Tanh", "Gelu", "Exp", "Log")
_RECTIFIERS = ("Relu", "Relu6", "Clamp")

REFERENCE: dict[str, Kernel] = {
    **dict.fromkeys(_WEIGHTED, partial(_product_sum, how="away")),
    **dict.fromkeys(_TABLES, _table), **dict.fromkeys(_RECTIFIERS, partial(_relu, how="away")),
    "MatMul": partial(_mat_mul, how="away"), "Add": _add, "Sub": partial(_add, sign=-1), "Mul": partial(_mul, how="away"),
    "LeakyRelu": _leaky, "HardSwish": _hard_swish, "Softmax": _softmax, "Mean": _mean, "GlobalAvgPool": _mean,
}  # fmt: skip
OPTIMIZED: dict[str, Kernel] = {
    **REFERENCE,
    **dict.fromkeys(("Conv2D", "DepthwiseConv2D", "Linear"), partial(_product_sum, how="up", grouped="away")),
}
XNNPACK: dict[str, Kernel] = {
    **OPTIMIZED,
    **dict.fromkeys(_WEIGHTED, partial(_product_sum, how="float")),
    **dict.fromkeys(_RECTIFIERS, partial(_relu, how="float")),
    "Add": _add_xnnpack, "Sub": partial(_add_xnnpack, sign=-1), "Mul": partial(_mul, how="float"), "LeakyRelu": _leaky_xnnpack,
    "Mean": _mean_xnnpack, "GlobalAvgPool": _mean_xnnpack,
}  # fmt: skip
MOVES: dict[str, Kernel] = {"AvgPool": _avg_pool}

register("kernels", "litert_reference")(Profile(kernels=REFERENCE, moves=MOVES, clip=_clip, quantize=_quantize_away))
register("kernels", "litert_optimized")(Profile(kernels=OPTIMIZED, moves=MOVES, clip=_clip, quantize=_quantize_away))
register("kernels", "litert_xnnpack")(Profile(kernels=XNNPACK, moves=MOVES, clip=_clip, quantize=_quantize_inverse))
