"""ONNX Runtime's integer kernels on the CPU; sums of products are requantized by the platform's `math.requant`."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Node
from chipfit.operators.table import OPS, by_name, read_column, resolve
from chipfit.plan.record import Plan
from chipfit.quantizers.dynamic import dynamic_codes
from chipfit.quantizers.stored import Stored
from chipfit.registry import register
from chipfit.simulate import sums
from chipfit.simulate.integer import (
    CellFunction,
    Kernel,
    KernelCall,
    Profile,
    accumulate,
    dynamic_product,
    inner_product,
    kernel_of,
    pool_windows,
)
from chipfit.simulate.libm import fma, libm
from chipfit.simulate.requantize import requantize

Tensor = torch.Tensor

_RULE = {"form": "float", "round": "half_even"}  #: its own requantization, where a platform states none


def absorbed_bounds(act: Node, t: Stored) -> tuple[int, int] | None:
    """Return the whole grid if saturation in its type does what the activation does; None to compute it in float."""
    if act.clip_range is None:
        return None
    low, high = act.clip_range
    least, most = (float((end - t.zero_point.float()) * t.scale) for end in t.grid.file_ends)
    below = low is not None and least < low - 1.2e-7
    above = high is not None and most > high + 1.2e-7
    return None if below or above else (t.grid.qmin, t.grid.qmax)


def _product_sum(c: KernelCall) -> None:
    """acc -> rne(float32(acc) * float32(s_x s_w / s_y)) + z. ONNX Runtime's QLinearConv and QGemm."""
    acc, m = accumulate(c.run, c.node), c.multiplier(c.x, c.second)
    if m.dim() and c.node.facts.kind != "linear":
        m = m.view(-1, *[1] * (acc.dim() - 2))
    c.write_result(requantize(acc, m, c.run.math.requant or _RULE))


def _inner(c: KernelCall) -> Tensor:
    """Return product sums of two values."""
    return c.run.summed(inner_product(c))


def _mat_mul(c: KernelCall) -> None:
    c.write_result(requantize(_inner(c), c.multiplier(c.x, c.second), c.run.math.requant or _RULE))


def _float_output(c: KernelCall) -> Tensor:
    """Return float32(acc) * float32(s_x s_w). ONNX Runtime's QGemm and MatMulIntegerToFloat, with float results."""
    acc = _inner(c) if c.node.op == "MatMul" else accumulate(c.run, c.node)
    return acc.float().mul_(c.scale(c.x) * c.scale(c.second))


def _dynamic(c: KernelCall) -> Tensor:
    """Return float32(acc) * (s_x s_w) + b. MatMulInteger and ConvInteger behind DynamicQuantizeLinear, also as fused.

    Source: ONNX Runtime, contrib_ops/cpu/quantization/dynamic_quantize_matmul.cc.
    """
    acc, s, b = dynamic_product(c)
    w = c.scale(c.second)
    if w.dim() and c.node.facts.kind == "conv":
        w = w.view(-1, *[1] * (acc.dim() - 2))
    return acc.float().mul_(s * w).add_(b)


#: operators whose dynamic kernels are modelled
_DYNAMIC = ("MatMul", *(op for op, row in OPS.items() if row.kind in ("conv", "linear")))


def broadcasts_scalar(a: Tensor, b: Tensor) -> bool:
    """Return whether broadcasting pairs a single element of a with a row of b."""
    for x, y in zip(reversed(a.shape), reversed(b.shape), strict=False):
        if (x, y) != (1, 1):
            return x == 1
    return a.dim() < b.dim() and all(s == 1 for s in a.shape)


def _add(c: KernelCall) -> None:
    """rne(fma(a, r_a, fma(b, r_b, z_o - fma(r_a, z_a, r_b z_b)))) with r = s_in / s_out in float32. QLinearAdd.

    Where `a` is one element against a row of `b`, the two change places.
    """
    a, b = c.x, c.second
    if broadcasts_scalar(c.code(a), c.code(b)):
        a, b = b, a
    ra, rb = c.multiplier(a), c.multiplier(b)
    offset = c.zero(c.out).float() - fma(ra, c.zero(a).float(), rb * c.zero(b).float())
    qa, qb = torch.broadcast_tensors(c.code(a).float(), c.code(b).float())
    c.run.store(c.out, torch.round(fma(qa, ra, fma(qb, rb, offset))))


def _mul(c: KernelCall) -> None:
    """rne((a - z_a)(b - z_b) * (s_a s_b / s_o) + z_o), each step rounded to float32. QLinearMul."""
    product = (c.centred() * c.centred(c.second)).float()
    c.run.store(c.out, torch.round(product * c.multiplier(c.x, c.second) + c.zero(c.out).float()))


def _softmax(c: KernelCall) -> None:
    q = c.code().long().movedim(c.attrs["axis"], -1)
    c.write_result(torch.round(softmax(q, c.scale(c.x), c.scale(c.out))).movedim(-1, c.attrs["axis"]))


def softmax(q: torch.Tensor, s_x: torch.Tensor, s_y: torch.Tensor) -> torch.Tensor:
    """Return the softmax of integers over the last axis, before rounding and zero point. QLinearSoftmax.

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


def _global_average(c: KernelCall) -> None:
    """rne(sum(q - z) * float32(s / (s_o N))) + z_o. QLinearGlobalAveragePool."""
    q = c.centred()
    n = torch.tensor(float(math.prod(q.shape[2:])))
    total = q.sum(tuple(range(2, q.dim())), keepdim=True).float()
    c.write_result(torch.round(total * (c.scale(c.x) / (c.scale(c.out) * n))))


def _average(c: KernelCall) -> None:
    """rne(mean / s_o + z_o) with the floats of a window added in order, in float32. QLinearAveragePool.

    QLinearGlobalAveragePool computes a window that is the whole image.
    """
    q = c.code()
    if tuple(q.shape[2:]) == tuple(c.attrs["kernel"]) and not any(p for ends in c.attrs["padding"] for p in ends):
        return _global_average(c)
    parts, n = pool_windows(c.run.stored(c.x).dequantize(q), c.node)
    total = torch.zeros_like(parts[..., 0])
    for x in parts.unbind(-1):
        total = total + x
    c.run.store(c.out, torch.round(total / n / c.scale(c.out) + c.zero(c.out).float()))


def _concat(c: KernelCall) -> None:
    """Requantize each input by a table over its integers, then join them. QLinearConcat."""
    reals = [c.run.stored(i).dequantize(c.code(i)) for i in c.node.inputs if i is not None]
    c.run.codes[c.out] = torch.cat([c.run.stored(c.out).quantize(x) for x in reals], c.attrs["axis"])


def _table(c: KernelCall) -> None:
    """Compute an element-wise operator by a table over all integers, filled in float32."""
    reals = c.run.stored(c.x).dequantize(c.code())
    y = logistic(reals) if c.node.op == "Sigmoid" else execute(c.node, [reals])[0]
    c.run.codes[c.out] = c.run.stored(c.out).quantize(y)


#: coefficients of the odd numerator and the even denominator, from the highest power down
_ABOVE = (4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01)
_BELOW = (6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03, 1.16817656904453e-01)
_CONSTANT = 9.93151921023180e-01


#: those of the hyperbolic tangent
_TANH_ABOVE = (
    *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
    *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
)
_TANH_BELOW = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)


def _ratio(x: torch.Tensor, above: Sequence[float], below: Sequence[float]) -> torch.Tensor:
    """Return x p(x^2) / q(x^2), in fused multiply-adds."""
    square = (x * x).double()

    def horner(coefficients: Sequence[float]) -> torch.Tensor:
        first, *rest = torch.tensor(coefficients, dtype=torch.float32).double()
        total = first.expand_as(square)
        for c in rest:
            total = (total * square + c).float().double()  # fused: rounded once
        return total.float()

    return x * horner(above) / horner(below)


def logistic(x: torch.Tensor) -> torch.Tensor:
    """Return the runtime's float32 1 / (1 + exp(-x)), bit for bit."""
    return (_ratio(x.clamp(-18, 18), _ABOVE, (*_BELOW, _CONSTANT)) + 0.5).clamp(0, 1)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the runtime's float32 hyperbolic tangent, bit for bit."""
    return _ratio(x.clamp(-9, 9), _TANH_ABOVE, _TANH_BELOW)


def _dynamic_lstm(c: KernelCall) -> tuple[Tensor, ...]:
    """Compute an LSTM that quantizes its data, of all steps at once, and its state, anew in each step; the rest floats.

    Source: ONNX Runtime, core/providers/cpu/rnn/uni_directional_lstm.cc and rnn_helpers.cc; its kernel on one thread.
    """
    (q, s, z), n = c.run.dynamic[c.x], c.node
    w, r = n.inputs[1] or "", n.inputs[2] or ""

    def product(q: Tensor, s: Tensor, z: Tensor, weight: str) -> Tensor:
        acc = (q.double() - z) @ c.centred(weight).t()
        rows = q.to(torch.uint8).reshape(-1, q.shape[-1])
        lost = sums.lost_in_pairs(rows, c.code(weight)) if c.run.in_pairs else None
        acc = acc if lost is None else acc + lost.reshape(acc.shape)
        return acc.float() * (s.reshape(()) * c.scale(weight))

    x = product(q, s, z, w)
    steps = list((x if x.dim() == 3 else x.unsqueeze(1)).unbind(1))
    biases = [c.run.graph.weights[b].detach() for b in n.inputs[3:5] if b is not None]
    given = [c.run.float_value(i, n) if i is not None else None for i in (n.operand("h"), n.operand("c"))]
    start = steps[0].new_zeros(len(x), c.code(r).shape[1])
    h, cell = (start if state is None else state.expand_as(start) for state in given)
    states = []
    how: dict[str, Any] = {"qmin": 0, "qmax": 255, "affine": True, "per": "tensor", "block": 1}
    for step in steps[::-1] if c.attrs["reverse"] else steps:
        gates = step + product(*dynamic_codes(torch, h, **how), r)
        gates = gates + sum(biases[1:], biases[0]) if biases else gates
        of = dict(zip(c.attrs["gates"], gates.chunk(4, -1), strict=True))
        cell = logistic(of["f"]) * cell + logistic(of["i"]) * tanh(of["g"])
        h = tanh(cell) * logistic(of["o"])
        states.append(h)
    if x.dim() == 2:
        return h, cell
    return torch.stack(states[::-1] if c.attrs["reverse"] else states, 1), h, cell


_FUNCTIONS = by_name(_product_sum, _mat_mul, _add, _mul, _global_average, _average, _concat, _table, _softmax)
_KERNELS: dict[str, Kernel] = {}
_PASS_THROUGH: dict[str, Kernel] = {}


def _enter_cell(op: str, name: CellFunction, pass_through: CellFunction | None = None) -> None:
    """Enter a cell of the table of operators: a kernel, and one for operands and results that share a scale."""
    _KERNELS[op] = kernel_of(resolve(name, _FUNCTIONS))
    if pass_through is not None:
        _PASS_THROUGH[op] = kernel_of(resolve(pass_through, _FUNCTIONS))


def _fused_in_float(node: Node, plan: Plan) -> bool:
    """Return whether the optimiser finds an integer kernel: data and result have one type of integers.

    Products of signed data have one on ARM processors only. Softmax is written so that none is found.
    """
    ends = (plan.tensors.get(v or "") for v in (*node.inputs, node.output))
    signs = {t.grid.signed for t in ends if t is not None and t.role == "activation" and t.grid is not None}
    product = node.facts.kind != "" or node.op == "MatMul"
    return node.op in _KERNELS.keys() - {"Softmax"} and len(signs) < 2 and not (product and True in signs)


read_column("onnxruntime", _enter_cell, _KERNELS, _PASS_THROUGH)
register("kernels", "onnxruntime")(
    Profile(
        kernels=_KERNELS,
        pass_through=_PASS_THROUGH,
        float_outputs={"Linear": _float_output, "MatMul": _float_output},
        functions={"Sigmoid": logistic},
        dynamic={**{(op, "tensor", 8): _dynamic for op in _DYNAMIC}, ("LSTM", "tensor", 8): _dynamic_lstm},
        clip=absorbed_bounds,
        quantize=lambda run, name, x: run.stored(name).quantize(x),
        max_bits=8,
        fused_in_float=_fused_in_float,
    )
)
