"""ONNX Runtime's integer kernels on the CPU; convolutions and products requantize as the platform's `math.requant` says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.grids import dequantize, quantize
from chipfit.registry import register
from chipfit.simulate.integer import Kernel, Profile, Run, accumulate, quantize_half_even
from chipfit.simulate.requantize import requantize

Tensor = torch.Tensor


def _absorbed(act: Node, t: TensorPlan) -> tuple[int, int] | None:
    """The whole grid, where clipping to it already does what the activation does; else the activation is computed in float."""
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    bounds = {"Relu": (0.0, math.inf), "Relu6": (0.0, 6.0)}.get(act.op)
    if act.op == "Clamp":
        lo, hi = act.attrs["min"], act.attrs["max"]
        bounds = (-math.inf if lo is None else lo, math.inf if hi is None else hi)
    if bounds is None:
        return None
    low = float((t.grid.qmin - t.zero_point.float()) * t.scale)
    high = float((t.grid.qmax - t.zero_point.float()) * t.scale)
    return (t.grid.qmin, t.grid.qmax) if low >= bounds[0] - 1.2e-7 and high <= bounds[1] + 1.2e-7 else None


def _product_sum(run: Run, unit: Sequence[Node]) -> None:
    """acc -> rne(float32(acc) * float32(s_x s_w / s_y)) + z. ONNX Runtime's QLinearConv and QGemm."""
    head, out = unit[0], unit[-1].output
    acc = accumulate(run, head)
    m = run.scale(head.inputs[0] or "") * run.scale(head.inputs[1] or "") / run.scale(out)
    if m.dim() and head.op != "Linear":
        m = m.view(-1, *[1] * (acc.dim() - 2))
    run.store(out, requantize(acc, m, run.requant) + run.zero(out))


def _mat_mul(run: Run, unit: Sequence[Node]) -> None:
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    m = run.scale(a) * run.scale(b) / run.scale(out)
    run.store(out, requantize(torch.matmul(run.centred(a), run.centred(b)), m, run.requant) + run.zero(out))


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """float32 fused multiply-add: one rounding."""
    return (a.double() * b.double() + c.double()).float()


def _spans_scalar(a: Tensor, b: Tensor) -> bool:
    """Whether broadcasting makes the runtime walk b while a single element of a stands still."""
    for x, y in zip(reversed(a.shape), reversed(b.shape), strict=False):
        if (x, y) != (1, 1):
            return x == 1
    return a.dim() < b.dim() and all(s == 1 for s in a.shape)


def _add(run: Run, unit: Sequence[Node]) -> None:
    """rne(fma(a, r_a, fma(b, r_b, z_o - fma(r_a, z_a, r_b z_b)))) with r = s_in / s_out in float32. QLinearAdd.

    Where `a` is one element against a row of `b`, the two change places.
    """
    a, b = (i or "" for i in unit[0].inputs[:2])
    if _spans_scalar(run.code(a), run.code(b)):
        a, b = b, a
    out = unit[-1].output
    ra, rb = run.scale(a) / run.scale(out), run.scale(b) / run.scale(out)
    za, zb = run.zero(a).float(), run.zero(b).float()
    offset = run.zero(out).float() - _fma(ra, za, rb * zb)
    qa, qb = torch.broadcast_tensors(run.code(a).float(), run.code(b).float())
    run.store(out, torch.round(_fma(qa, ra, _fma(qb, rb, offset))))


def _mul(run: Run, unit: Sequence[Node]) -> None:
    """rne((a - z_a)(b - z_b) * (s_a s_b / s_o) + z_o), each step rounded to float32. QLinearMul."""
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    m = run.scale(a) * run.scale(b) / run.scale(out)
    run.store(out, torch.round((run.centred(a) * run.centred(b)).float() * m + run.zero(out).float()))


def _softmax(run: Run, unit: Sequence[Node]) -> None:
    """Exponentials from a float32 table, aligned so that each row's maximum reads the last entry. QLinearSoftmax.

    t[i] = exp((i - 255 + shift) s_x), shift = max(0, ln(float32 max / n) - 5) / s_x;
    y = rne(t[q + 255 - max q] floor(1 / s_y) / sum t) + z_y, with the sum taken in order.
    """
    name, out = unit[0].inputs[0] or "", unit[-1].output
    q = run.code(name).to(torch.int64).movedim(unit[0].attrs["axis"], -1)
    s = float(run.scale(name))
    shift = max(0.0, float(np.log(np.float64(np.finfo(np.float32).max / np.float32(q.shape[-1])))) - 5) / s
    table = torch.from_numpy(np.exp((np.arange(256, dtype=np.float64) - 255 + shift) * s).astype(np.float32))
    t = table[q + (255 - q.amax(-1, keepdim=True))]
    total = torch.from_numpy(np.cumsum(t.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())
    c = torch.floor(1.0 / run.scale(out))
    y = torch.round(t * c / total) + run.zero(out)
    run.store(out, y.movedim(-1, unit[0].attrs["axis"]))


def _global_average(run: Run, unit: Sequence[Node]) -> None:
    """rne(sum(q - z) * float32(s / (s_o N))) + z_o. QLinearGlobalAveragePool."""
    x, out = unit[0].inputs[0] or "", unit[-1].output
    q = run.centred(x)
    axes = tuple(range(2, q.dim()))
    n = torch.tensor(float(math.prod(q.shape[2:])))
    total = q.sum(axes, keepdim=True).float()
    run.store(out, torch.round(total * (run.scale(x) / (run.scale(out) * n))) + run.zero(out))


def _concat(run: Run, unit: Sequence[Node]) -> None:
    """Each input requantized by a table of its codes, then joined. QLinearConcat."""
    out = unit[-1].output
    t = run.tensor(out)
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    parts = []
    for i in unit[0].inputs:
        name = i or ""
        same = torch.equal(run.scale(name), t.scale) and torch.equal(run.zero(name), t.zero_point)
        if same:
            parts.append(run.code(name))
        else:
            parts.append(
                quantize(dequantize(run.code(name), run.scale(name), run.zero(name)), t.scale, t.zero_point, t.grid)
            )
    run.codes[out] = torch.cat(parts, unit[0].attrs["axis"])


def _table(run: Run, unit: Sequence[Node]) -> None:
    """Element-wise operators that the runtime turns into a table over all codes, computed in float32."""
    name, out = unit[0].inputs[0] or "", unit[-1].output
    (y,) = execute(unit[0], [dequantize(run.code(name), run.scale(name), run.zero(name))])
    t = run.tensor(out)
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    run.codes[out] = quantize(y, t.scale, t.zero_point, t.grid)


KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D", "Linear"), _product_sum),
    "MatMul": _mat_mul,
    "Add": _add,
    "Mul": _mul,
    "GlobalAvgPool": _global_average,
    "Concat": _concat,
    "Sigmoid": _table,
    "LeakyRelu": _table,
    "Softmax": _softmax,
}
register("kernels", "onnxruntime")(Profile(kernels=KERNELS, clip=_absorbed, quantize=quantize_half_even))
