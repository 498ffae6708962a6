"""ONNX Runtime's integer kernels on the CPU; product sums requantize as the platform's `math.requant` says."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.quantizers.stored import Stored
from chipfit.registry import register
from chipfit.simulate.integer import Kernel, Profile, Run, accumulate, bounds, windows
from chipfit.simulate.libm import libm
from chipfit.simulate.requantize import requantize

Tensor = torch.Tensor


def _absorbed(act: Node, t: Stored) -> tuple[int, int] | None:
    """The whole grid, where saturating in its type does what the activation does; else that is computed in float."""
    reals = bounds(act)
    if reals is None:
        return None
    low, high = reals
    least, most = (float((end - t.zero_point.float()) * t.scale) for end in t.grid.file_ends)
    below = low is not None and least < low - 1.2e-7
    above = high is not None and most > high + 1.2e-7
    return None if below or above else (t.grid.qmin, t.grid.qmax)


def _ends(unit: Sequence[Node]) -> tuple[str, str, str]:
    """Both operands of a unit, and its result."""
    a, b = (i for i in unit[0].inputs[:2] if i is not None)
    return a, b, unit[-1].output


def _multiplier(run: Run, unit: Sequence[Node]) -> Tensor:
    """s_a s_b / s_out in float32."""
    a, b, out = _ends(unit)
    return run.scale(a) * run.scale(b) / run.scale(out)


def _product_sum(run: Run, unit: Sequence[Node]) -> None:
    """acc -> rne(float32(acc) * float32(s_x s_w / s_y)) + z. ONNX Runtime's QLinearConv and QGemm."""
    out, acc, m = unit[-1].output, accumulate(run, unit[0]), _multiplier(run, unit)
    if m.dim() and unit[0].op != "Linear":
        m = m.view(-1, *[1] * (acc.dim() - 2))
    run.store(out, requantize(acc, m, run.math.requant or {}) + run.zero(out))


def _mat_mul(run: Run, unit: Sequence[Node]) -> None:
    a, b, out = _ends(unit)
    acc = run.summed(torch.matmul(run.centred(a), run.centred(b)))
    run.store(out, requantize(acc, _multiplier(run, unit), run.math.requant or {}) + run.zero(out))


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
    a, b, out = _ends(unit)
    if _spans_scalar(run.code(a), run.code(b)):
        a, b = b, a
    ra, rb = run.scale(a) / run.scale(out), run.scale(b) / run.scale(out)
    za, zb = run.zero(a).float(), run.zero(b).float()
    offset = run.zero(out).float() - _fma(ra, za, rb * zb)
    qa, qb = torch.broadcast_tensors(run.code(a).float(), run.code(b).float())
    run.store(out, torch.round(_fma(qa, ra, _fma(qb, rb, offset))))


def _mul(run: Run, unit: Sequence[Node]) -> None:
    """rne((a - z_a)(b - z_b) * (s_a s_b / s_o) + z_o), each step rounded to float32. QLinearMul."""
    a, b, out = _ends(unit)
    product = (run.centred(a) * run.centred(b)).float()
    run.store(out, torch.round(product * _multiplier(run, unit) + run.zero(out).float()))


def _softmax(run: Run, unit: Sequence[Node]) -> None:
    name, out, axis = unit[0].data, unit[-1].output, unit[0].attrs["axis"]
    q = run.code(name).to(torch.int64).movedim(axis, -1)
    y = softmax(q, run.scale(name), run.scale(out))
    run.store(out, (torch.round(y) + run.zero(out)).movedim(-1, axis))


def softmax(q: torch.Tensor, s_x: torch.Tensor, s_y: torch.Tensor) -> torch.Tensor:
    """Codes along the last axis to those of the result, before rounding and zero point. QLinearSoftmax.

    Exponentials come from a float32 table, aligned so that each row's maximum reads the last entry:
    t[i] = exp((i - 255 + shift) s_x), shift = max(0, ln(float32 max / n) - 5) / s_x, the logarithm in float32;
    y = t[q + 255 - max q] floor(1 / s_y) / sum t, with the sum taken in order.
    """
    s = float(s_x)
    shift = max(0.0, float(libm("log", torch.tensor(torch.finfo(torch.float32).max) / q.shape[-1])) - 5) / s
    table = torch.from_numpy(np.exp((np.arange(256, dtype=np.float64) - 255 + shift) * s).astype(np.float32))
    t = table[q + (255 - q.amax(-1, keepdim=True))]
    total = torch.from_numpy(np.cumsum(t.numpy(), axis=-1, dtype=np.float32)[..., -1:].copy())
    return t * torch.floor(1.0 / s_y) / total


def _global_average(run: Run, unit: Sequence[Node]) -> None:
    """rne(sum(q - z) * float32(s / (s_o N))) + z_o. QLinearGlobalAveragePool."""
    x, out = unit[0].data, unit[-1].output
    q = run.centred(x)
    axes = tuple(range(2, q.dim()))
    n = torch.tensor(float(math.prod(q.shape[2:])))
    total = q.sum(axes, keepdim=True).float()
    run.store(out, torch.round(total * (run.scale(x) / (run.scale(out) * n))) + run.zero(out))


def _average(run: Run, unit: Sequence[Node]) -> None:
    """rne(mean / s_o + z_o) with the reals of a window added in order, in float32. QLinearAveragePool.

    A window that is the whole image is left to QLinearGlobalAveragePool.
    """
    node, out = unit[0], unit[-1].output
    q = run.code(node.data)
    if tuple(q.shape[2:]) == tuple(node.attrs["kernel"]) and not any(p for ends in node.attrs["padding"] for p in ends):
        return _global_average(run, unit)
    parts, n = windows(run.stored(node.data).dequantize(q), node)
    total = torch.zeros_like(parts[..., 0])
    for x in parts.unbind(-1):
        total = total + x
    run.store(out, torch.round(total / n / run.scale(out) + run.zero(out).float()))


def _concat(run: Run, unit: Sequence[Node]) -> None:
    """Each input requantized by a table of its codes, then joined. QLinearConcat."""
    out = unit[-1].output
    reals = [run.stored(i).dequantize(run.code(i)) for i in unit[0].inputs if i is not None]
    run.codes[out] = torch.cat([run.stored(out).quantize(x) for x in reals], unit[0].attrs["axis"])


def _table(run: Run, unit: Sequence[Node]) -> None:
    """Element-wise operators that the runtime turns into a table over all codes, computed in float32."""
    x, out = unit[0].data, unit[-1].output
    reals = run.stored(x).dequantize(run.code(x))
    y = logistic(reals) if unit[0].op == "Sigmoid" else execute(unit[0], [reals])[0]
    run.codes[out] = run.stored(out).quantize(y)


#: coefficients of the odd numerator and the even denominator, from the highest power down
_ABOVE = (4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01)
_BELOW = (6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03, 1.16817656904453e-01)
_CONSTANT = 9.93151921023180e-01


def logistic(x: torch.Tensor) -> torch.Tensor:
    """The runtime's 1 / (1 + exp(-x)) of float32, bit for bit: 1/2 + x p(x^2) / q(x^2) in fused multiply-adds."""
    x = x.clamp(-18, 18)
    square = (x * x).double()

    def horner(coefficients: Sequence[float]) -> torch.Tensor:
        first, *rest = torch.tensor(coefficients, dtype=torch.float32).double()
        total = first.expand_as(square)
        for c in rest:
            total = (total * square + c).float().double()  # fused: rounded once
        return total.float()

    return (x * horner(_ABOVE) / horner((*_BELOW, _CONSTANT)) + 0.5).clamp(0, 1)


_KERNELS: dict[str, Kernel] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D", "Linear"), _product_sum),
    "MatMul": _mat_mul,
    "Add": _add,
    "Mul": _mul,
    "GlobalAvgPool": _global_average,
    "AvgPool": _average,
    "Concat": _concat,
    "Sigmoid": _table,
    "LeakyRelu": _table,
    "Softmax": _softmax,
}
#: given one set of numbers, averages still round
_MOVES = {op: _KERNELS[op] for op in ("AvgPool", "GlobalAvgPool")}
register("kernels", "onnxruntime")(
    Profile(kernels=_KERNELS, moves=_MOVES, clip=_absorbed, quantize=lambda x, stored: stored.quantize(x), widest=8)
)
