"""The chip's integers: run a Graph under a Plan in the arithmetic of a runtime.

A product sum on integer-valued floats is exact while it stays below 2^24 (float32) or 2^53 (float64), so integer
simulation runs at float speed. Operators that the runtime itself computes in float are computed in float32 here too
and listed by `float_operators`: there the last bit is the runtime's own.

Which integers a kernel computes is said by a `Profile`, one per family of kernels (`simulate/onnxruntime.py`,
`simulate/litert.py`). A platform names its own in `math.kernels`; a runtime may name the one that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from chipfit.engine.kernels import execute, pad
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import dequantize, quantize
from chipfit.registry import lookup
from chipfit.simulate.requantize import FORMS

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How one family of kernels computes."""

    kernels: Mapping[str, Kernel]  #: by operator; what is missing the runtime computes in float
    moves: Mapping[str, Kernel] = field(
        default_factory=dict
    )  #: operators that follow their operand's format and compute all the same
    #: (activation, plan of the result) -> the codes between which a kernel clips instead; None when it does not
    clip: Callable[[Node, TensorPlan], tuple[int, int] | None]
    #: (reals, plan of the tensor) -> codes
    quantize: Callable[[Tensor, TensorPlan], Tensor]


def quantize_half_even(x: Tensor, t: TensorPlan) -> Tensor:
    """Reals to codes by a true division, halves to even."""
    assert t.grid is not None and t.scale is not None and t.zero_point is not None
    return quantize(x, t.scale, t.zero_point, t.grid, t.axis)


@dataclass
class Run:
    """State of one simulation."""

    graph: Graph
    plan: Plan
    profile: Profile
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
        """Clip integers, zero point included, to the grid and keep them as codes."""
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


Kernel = Callable[[Run, Sequence[Node]], None]


def kernels_of(platform: Platform) -> str | None:
    """The name of the platform's kernels; None when nothing is known about its integers."""
    if platform.math.kernels:
        return platform.math.kernels
    return "onnxruntime" if (platform.math.requant or {}).get("form") in FORMS else None


def profile_for(platform: Platform, kernels: str | None = None) -> Profile:
    """How the platform's kernels, or other named ones, compute.

    Raises:
        UnsupportedError: the platform does not say how it computes, so exactness cannot be claimed.
    """
    name = kernels or kernels_of(platform)
    if name is None:
        raise UnsupportedError(
            f"'{platform.name}' has no verified arithmetic, so its integers cannot be simulated",
            got=platform.math.requant,
            allowed="math.kernels, or math.requant with form float or q31",
            hint="use Result.model, the float simulation, or a platform with a verified profile such as ort_cpu",
        )
    profile: Profile = lookup("kernels", name)
    return profile


def simulate(
    graph: Graph,
    plan: Plan,
    inputs: Sequence[Tensor],
    platform: Platform,
    *,
    force: Mapping[str, Tensor] | None = None,
    keep: Collection[str] | None = None,
    kernels: str | None = None,
) -> dict[str, Any]:
    """Run the network in the platform's integers.

    Args:
        inputs: float tensors, one per graph input.
        platform: gives the arithmetic (`math`).
        force: device codes by value name. Every operator then reads the device's codes instead of the simulated
            ones, so that each is compared by itself.
        keep: values to return; all when omitted.
        kernels: the family that runs instead of the platform's own.

    Returns:
        Value name -> codes (integer dtype) where it is quantized, else its float tensor.

    Raises:
        UnsupportedError: see `profile_for`.
    """
    run = Run(graph, plan, profile_for(platform, kernels), platform.math.requant or {}, {}, {}, {})
    wanted = set(graph.values) if keep is None else {*keep, *graph.outputs}
    groups = {n: g for g in plan.groups for n in g}
    last: dict[str, int] = {i: k for k, n in enumerate(graph.nodes) for i in n.inputs if i is not None}
    done: dict[str, Any] = {}

    def settle(names: Sequence[str]) -> None:
        """Note what was computed; later operators read the device's codes where they are given."""
        for o in names:
            if o in wanted and (o in run.codes or o in run.reals):
                done[o] = run.codes.get(o, run.reals.get(o))
            if force is not None and o in force and o in run.codes:
                run.codes[o] = force[o]

    for name, x in zip(graph.inputs, inputs, strict=True):
        _publish(run, name, x)
    settle(graph.inputs)
    for k, node in enumerate(graph.nodes):
        members = groups.get(node.name, (node.name,))
        if node.name == members[-1]:
            _unit(run, [graph.node(m) for m in members] if len(members) > 1 else [node])
        settle(node.outputs)
        for i in node.inputs:
            if i is not None and last[i] == k and i not in graph.outputs and node.name == members[-1]:
                run.codes.pop(i, None)
                run.reals.pop(i, None)
    return done


def float_operators(graph: Graph, plan: Plan, profile: Profile) -> list[Node]:
    """Operators that the runtime computes in float although their result is stored in codes."""
    groups = {n: g for g in plan.groups for n in g}
    out = []
    for n in graph.nodes:
        members = [graph.node(m) for m in groups.get(n.name, (n.name,))]
        if n.name == members[-1].name and plan.quantized(n.output) and _kernel(graph, plan, members, profile) is None:
            out.append(members[0])
    return out


# ---------------------------------------------------------------- one kernel


def _publish(run: Run, name: str, x: Any) -> None:
    """Keep a float result, and its codes when it is quantized."""
    run.reals[name] = x
    if run.plan.quantized(name):
        run.codes[name] = run.profile.quantize(x, run.tensor(name))


def _kernel(graph: Graph, plan: Plan, unit: Sequence[Node], profile: Profile) -> Kernel | None:
    """The integer kernel of a unit; None when the runtime computes it in float."""
    head, tail = unit[0], unit[-1]
    if plan.nodes.get(head.name) is None or plan.nodes[head.name].exec == "float":
        return None
    reads = [i for n in unit for i in n.inputs if i is not None and i not in {o for m in unit for o in m.outputs}]
    if not all(plan.quantized(i) for i in reads if graph.is_float(i)) or not plan.quantized(tail.output):
        return None
    if any(profile.clip(n, plan.tensors[tail.output]) is None for n in unit[1:]):
        return None
    return profile.moves.get(head.op, move) if plan.nodes[head.name].exec == "follow" else profile.kernels.get(head.op)


def _unit(run: Run, unit: Sequence[Node]) -> None:
    kernel = _kernel(run.graph, run.plan, unit, run.profile)
    if kernel is not None:
        kernel(run, unit)
        out = unit[-1].output
        for act in unit[1:]:
            bounds = run.profile.clip(act, run.tensor(out))
            assert bounds is not None  # or it would have no kernel
            run.codes[out] = run.codes[out].clamp(*bounds)
        return
    env: dict[str, Any] = {}
    for n in unit:
        outs = execute(n, [None if i is None else env[i] if i in env else run.real(i, n) for i in n.inputs])
        env.update(zip(n.outputs, outs, strict=False))
    for o in unit[-1].outputs:
        _publish(run, o, env[o])


def move(run: Run, unit: Sequence[Node]) -> None:
    """Operators that move codes or choose among them."""
    node = unit[0]
    args = [run.code(i).float() if run.graph.is_float(i) else run.real(i, node) for i in node.inputs if i is not None]
    if node.op == "Pad" and node.attrs["mode"] == "constant":
        outs: tuple[Any, ...] = (
            pad(args[0], padding=node.attrs["padding"], mode="constant", value=float(run.zero(node.inputs[0] or ""))),
        )
    else:
        outs = execute(node, args)
    for o, x in zip(unit[-1].outputs, outs, strict=False):
        if run.plan.quantized(o):
            t = run.tensor(o)
            assert t.grid is not None
            run.codes[o] = x.to(t.grid.dtype)


def accumulate(run: Run, node: Node) -> Tensor:
    """Exact product sums of a convolution or linear layer, bias included; float64 or float32, integer-valued."""
    x, w = run.centred(node.inputs[0] or ""), run.centred(node.inputs[1] or "")
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    b = run.code(bias).double() if bias is not None else None
    if node.op == "Linear":
        return F.linear(x, w, b)
    (acc,) = execute(node, [x, w])
    return acc if b is None else acc + b.view(1, -1, *[1] * (acc.dim() - 2))
