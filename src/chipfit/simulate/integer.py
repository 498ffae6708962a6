"""The chip's integers: run a Graph under a Plan in the arithmetic of a runtime.

A product sum on integer-valued floats is exact while it stays below 2^24 (float32) or 2^53 (float64), so integer
simulation runs at float speed. Operators that the runtime itself computes in float are computed in float32 here too
and listed by `float_operators`: there the last bit is the runtime's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from chipfit.errors import UnsupportedError
from chipfit.frameworks.torch.ops import execute, pad
from chipfit.graph.ir import Graph, Node
from chipfit.plan import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import dequantize, quantize
from chipfit.simulate.requantize import requantize

Tensor = torch.Tensor


@dataclass
class _Run:
    """State of one simulation."""

    graph: Graph
    plan: Plan
    requant: Mapping[str, Any]
    codes: dict[str, Tensor]  #: value -> integer codes, where it is quantized
    reals: dict[str, Any]  #: value -> float (or other) tensor, before its quantizer where it has one
    weights: dict[str, Tensor]  #: weight -> codes

    def tensor(self, name: str) -> TensorPlan:
        return self.plan.tensors[name]

    def code(self, name: str) -> Tensor:
        """Codes of a quantized value or weight."""
        if name in self.codes:
            return self.codes[name]
        if name not in self.weights:
            t = self.tensor(name)
            assert t.grid is not None and t.scale is not None and t.zero_point is not None
            self.weights[name] = quantize(self.graph.weights[name], t.scale, t.zero_point, t.grid, t.axis)
        return self.weights[name]

    def real(self, name: str, reader: Node) -> Any:
        """What a float operator reads: the value before its quantizer on float edges, else its codes as reals."""
        quantized = self.plan.quantized(name) and (name, reader.name) not in self.plan.float_edges
        if quantized and (name in self.codes or name in self.graph.weights):
            t = self.tensor(name)
            assert t.scale is not None and t.zero_point is not None
            return dequantize(self.code(name), t.scale, t.zero_point, t.axis)
        return self.reals[name] if name in self.reals else self.graph.weights[name]

    def centred(self, name: str) -> Tensor:
        """Codes minus zero point, float64."""
        t = self.tensor(name)
        assert t.zero_point is not None
        z = t.zero_point.double()
        q = self.code(name).double()
        if t.axis is not None and z.dim():
            z = z.view([-1 if k == t.axis else 1 for k in range(q.dim())])
        return q - z

    def store(self, name: str, x: Tensor) -> None:
        """Clip integers (before the zero point was added: not any more) to the grid and keep them as codes."""
        t = self.tensor(name)
        assert t.grid is not None
        self.codes[name] = x.clamp(t.grid.qmin, t.grid.qmax).to(t.grid.dtype)

    def scale(self, name: str) -> Tensor:
        s = self.tensor(name).scale
        assert s is not None
        return s

    def zero(self, name: str) -> Tensor:
        z = self.tensor(name).zero_point
        assert z is not None
        return z


def simulate(
    graph: Graph, plan: Plan, inputs: Sequence[Tensor], platform: Platform, *, force: Mapping[str, Tensor] | None = None,
    keep: Collection[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Run the network in the platform's integers.

    Args:
        inputs: float tensors, one per graph input.
        platform: gives the arithmetic (`math`).
        force: device codes by value name. Every operator then reads the device's codes instead of the simulated
            ones, so that each is compared by itself.
        keep: values to return; all when omitted.

    Returns:
        Value name -> codes (integer dtype) where it is quantized, else its float tensor.

    Raises:
        UnsupportedError: the platform does not say how it requantizes, so exactness cannot be claimed.
    """
    requant = platform.math.requant
    if not requant or requant.get("form") not in ("float", "q31"):
        raise UnsupportedError(
            f"'{platform.name}' has no verified arithmetic, so its integers cannot be simulated",
            got=requant, allowed="math.requant with form float or q31",
            hint="use Result.model, the float simulation, or a platform with a verified profile such as ort_cpu",
        )  # fmt: skip
    run = _Run(graph, plan, requant, {}, {}, {})
    for name, x in zip(graph.inputs, inputs, strict=True):
        _publish(run, name, x)
    wanted = set(graph.values) if keep is None else {*keep, *graph.outputs}
    groups = {n: g for g in plan.groups for n in g}
    last: dict[str, int] = {i: k for k, n in enumerate(graph.nodes) for i in n.inputs if i is not None}
    done: dict[str, Any] = {}
    for k, node in enumerate(graph.nodes):
        members = groups.get(node.name, (node.name,))
        if node.name == members[-1]:
            _unit(run, [graph.node(m) for m in members] if len(members) > 1 else [node])
        for o in (*node.outputs, *(graph.inputs if k == 0 else ())):
            if o in wanted and (o in run.codes or o in run.reals):
                done[o] = run.codes.get(o, run.reals.get(o))
            if force is not None and o in force and o in run.codes:
                run.codes[o] = force[o]
        for i in node.inputs:
            if i is not None and last[i] == k and i not in graph.outputs and node.name == members[-1]:
                run.codes.pop(i, None)
                run.reals.pop(i, None)
    return done


def float_operators(graph: Graph, plan: Plan) -> list[Node]:
    """Operators that the runtime computes in float although their result is stored in codes."""
    groups = {n: g for g in plan.groups for n in g}
    out = []
    for n in graph.nodes:
        members = [graph.node(m) for m in groups.get(n.name, (n.name,))]
        if n.name == members[-1].name and plan.quantized(n.output) and _kernel(graph, plan, members) is None:
            out.append(members[0])
    return out


# ---------------------------------------------------------------- one kernel


def _publish(run: _Run, name: str, x: Any) -> None:
    """Keep a float result, and its codes when it is quantized."""
    run.reals[name] = x
    if run.plan.quantized(name):
        t = run.tensor(name)
        assert t.grid is not None and t.scale is not None and t.zero_point is not None
        run.codes[name] = quantize(x, t.scale, t.zero_point, t.grid, t.axis)


def _kernel(graph: Graph, plan: Plan, unit: Sequence[Node]) -> Callable[[_Run, Sequence[Node]], None] | None:
    """The integer kernel of a unit; None when the runtime computes it in float."""
    head, tail = unit[0], unit[-1]
    if plan.nodes.get(head.name) is None or plan.nodes[head.name].exec == "float":
        return None
    reads = [i for n in unit for i in n.inputs if i is not None and i not in {o for m in unit for o in m.outputs}]
    if not all(plan.quantized(i) for i in reads if graph.is_float(i)) or not plan.quantized(tail.output):
        return None
    if not all(absorbed(n, plan.tensors[tail.output]) for n in unit[1:]):
        return None
    return INTEGER.get(head.op) if (plan.nodes[head.name].exec != "follow") else _move


def _unit(run: _Run, unit: Sequence[Node]) -> None:
    kernel = _kernel(run.graph, run.plan, unit)
    if kernel is not None:
        kernel(run, unit)
        return
    env: dict[str, Any] = {}
    for n in unit:
        outs = execute(n, [None if i is None else env[i] if i in env else run.real(i, n) for i in n.inputs])
        env.update(zip(n.outputs, outs, strict=False))
    for o in unit[-1].outputs:
        _publish(run, o, env[o])


def absorbed(act: Node, t: TensorPlan) -> bool:
    """Whether clipping to the output's grid already does what the activation does."""
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    bounds = {"Relu": (0.0, math.inf), "Relu6": (0.0, 6.0)}.get(act.op)
    if act.op == "Clamp":
        lo, hi = act.attrs["min"], act.attrs["max"]
        bounds = (-math.inf if lo is None else lo, math.inf if hi is None else hi)
    if bounds is None:
        return False
    low = float((t.grid.qmin - t.zero_point.float()) * t.scale)
    high = float((t.grid.qmax - t.zero_point.float()) * t.scale)
    return low >= bounds[0] - 1.2e-7 and high <= bounds[1] + 1.2e-7


def _accumulate(run: _Run, node: Node) -> Tensor:
    """Exact product sums of a convolution or linear layer, bias included; float64 or float32, integer-valued."""
    x, w = run.centred(node.inputs[0] or ""), run.centred(node.inputs[1] or "")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    b = run.code(bias).double() if bias is not None else None
    if node.op == "Linear":
        return F.linear(x, w, b)
    (acc,) = execute(node, [x, w])
    return acc if b is None else acc + b.view(1, -1, *[1] * (acc.dim() - 2))


def _product_sum(run: _Run, unit: Sequence[Node]) -> None:
    """acc -> rne(float32(acc) * float32(s_x s_w / s_y)) + z. ONNX Runtime's QLinearConv and QGemm."""
    head, out = unit[0], unit[-1].output
    acc = _accumulate(run, head)
    m = run.scale(head.inputs[0] or "") * run.scale(head.inputs[1] or "") / run.scale(out)
    if m.dim() and head.op != "Linear":
        m = m.view(-1, *[1] * (acc.dim() - 2))
    run.store(out, requantize(acc, m, run.requant) + run.zero(out))


def _mat_mul(run: _Run, unit: Sequence[Node]) -> None:
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


def _add(run: _Run, unit: Sequence[Node]) -> None:
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


def _mul(run: _Run, unit: Sequence[Node]) -> None:
    """rne((a - z_a)(b - z_b) * (s_a s_b / s_o) + z_o), each step rounded to float32. QLinearMul."""
    a, b = (i or "" for i in unit[0].inputs[:2])
    out = unit[-1].output
    m = run.scale(a) * run.scale(b) / run.scale(out)
    run.store(out, torch.round((run.centred(a) * run.centred(b)).float() * m + run.zero(out).float()))


def _softmax(run: _Run, unit: Sequence[Node]) -> None:
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


def _global_average(run: _Run, unit: Sequence[Node]) -> None:
    """rne(sum(q - z) * float32(s / (s_o N))) + z_o. QLinearGlobalAveragePool."""
    x, out = unit[0].inputs[0] or "", unit[-1].output
    q = run.centred(x)
    axes = tuple(range(2, q.dim()))
    n = torch.tensor(float(math.prod(q.shape[2:])))
    total = q.sum(axes, keepdim=True).float()
    run.store(out, torch.round(total * (run.scale(x) / (run.scale(out) * n))) + run.zero(out))


def _concat(run: _Run, unit: Sequence[Node]) -> None:
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
            parts.append(quantize(dequantize(run.code(name), run.scale(name), run.zero(name)), t.scale, t.zero_point, t.grid))
    run.codes[out] = torch.cat(parts, unit[0].attrs["axis"])


def _table(run: _Run, unit: Sequence[Node]) -> None:
    """Element-wise operators that the runtime turns into a table over all codes, computed in float32."""
    name, out = unit[0].inputs[0] or "", unit[-1].output
    (y,) = execute(unit[0], [dequantize(run.code(name), run.scale(name), run.zero(name))])
    t = run.tensor(out)
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    run.codes[out] = quantize(y, t.scale, t.zero_point, t.grid)


def _move(run: _Run, unit: Sequence[Node]) -> None:
    """Operators that move codes or choose among them."""
    node = unit[0]
    name = node.inputs[0] or ""
    q = run.code(name)
    if node.op == "Pad":
        outs: tuple[Any, ...] = (pad(q.float(), padding=node.attrs["padding"], mode="constant", value=float(run.zero(name))),)
    else:
        outs = execute(node, [q.float() if i == name else run.real(i or "", node) for i in node.inputs])
    for o, x in zip(node.outputs, outs, strict=False):
        if run.plan.quantized(o):
            t = run.tensor(o)
            assert t.grid is not None
            run.codes[o] = x.to(t.grid.dtype)


#: integer kernels by operator; what is missing here the runtime computes in float
INTEGER: dict[str, Callable[[_Run, Sequence[Node]], None]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D", "Linear"), _product_sum),
    "MatMul": _mat_mul, "Add": _add, "Mul": _mul, "GlobalAvgPool": _global_average, "Concat": _concat,
    "Sigmoid": _table, "LeakyRelu": _table, "Softmax": _softmax,
}  # fmt: skip
