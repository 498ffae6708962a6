"""The chip's integers: run a Graph under a Plan in the arithmetic of a runtime.

Products of 8-bit codes are added in the processor's integers (`simulate/sums.py`), others in float64, which is exact
below 2^53, so integer simulation runs at float speed. Operators that the runtime itself computes in float are computed
in float32 here too and listed by `float_results`: there the last bit is the runtime's own.

A `Profile` holds which integers one family of kernels computes (`simulate/onnxruntime.py`, `simulate/litert.py`). A
platform names its own in `math.kernels`; a runtime may name the one that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from chipfit.engine.kernels import execute, pad
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.graph.ops import OPS
from chipfit.passes.layout import Layout, apply_layout
from chipfit.plan.record import Plan
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.schema import Math, Platform
from chipfit.platform.support import kernels_of
from chipfit.quantizers.dynamic import Codes, dynamic_codes
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.stored import Stored
from chipfit.registry import lookup
from chipfit.simulate import sums

Tensor = torch.Tensor


def _codes(x: Tensor, blocks: bool = False, **how: Any) -> Codes:
    return dynamic_codes(TorchOps, x, **how)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How one family of kernels computes; registered as "kernels".

    A kernel takes the `Simulation` and a unit: the nodes of a fused group, or one node. It reads codes and reals of
    operands by name and leaves the codes of the unit's result, before its fused activations clip them.
    """

    kernels: Mapping[str, Kernel]  #: by operator; the runtime computes in float what is missing
    #: the same for operators that follow their operand's format and, given its numbers, compute nevertheless; those
    #: that hold nothing but numbers of their operands are a `move`
    pass_through: Mapping[str, Kernel] = field(default_factory=dict)
    #: by operator, what its integer kernel hands over as floats where its result is never stored in codes, bit for bit
    float_outputs: Mapping[str, Callable[[KernelCall], Tensor]] = field(default_factory=dict)
    #: the same of kernels that round their data themselves, by operator, what shares a range there, and bits of weights
    dynamic: Mapping[tuple[str, str, int], Callable[[KernelCall], Tensor]] = field(default_factory=dict)
    #: how they round: reals, whether weights are in `blocks`, the attributes of DynamicQuantize -> codes, scale, zero
    #: point
    quantize_dynamic: Callable[..., Codes] = _codes
    #: (fused activation, how its result is stored) -> the codes between which it clips; None where the kernel cannot do
    #: that, and the whole unit is computed in float
    clip: Callable[[Node, Stored], tuple[int, int] | None]
    quantize: Callable[[Simulation, str, Tensor], Tensor]  #: (run, value, its reals) -> codes
    #: values saturate at the ends of the file's integer type, not at those of a narrower grid
    saturate_to_type: bool = False
    #: what a platform with these kernels may say of rounding and requantization; none: they compute as it says
    supported_math: Collection[str] = ()
    max_bits: int = 64  #: bits of the codes that the kernels compute with; beyond, the runtime computes in float


@dataclass
class Simulation:
    """State of one simulation."""

    graph: Graph
    plan: Plan
    profile: Profile
    math: Math
    part: int | None = None  #: samples that the device takes at once; all when None
    codes: dict[str, Tensor] = field(default_factory=dict)  #: value -> integer codes, where it is quantized
    floats: dict[str, Any] = field(default_factory=dict)  #: value -> float (or other) tensor, before its quantizer
    #: weight -> codes; "{weight} in reals" -> what they stand for
    weights: dict[str, Tensor] = field(default_factory=dict)
    #: what DynamicQuantize hands over: codes, their scale and zero point
    dynamic: dict[str, Codes] = field(default_factory=dict)

    @cached_property
    def forms(self) -> Mapping[str, Layout]:
        """The order of axes in which files hold values whose images lie channels last; others lie as in the graph."""
        return apply_layout(self.graph, self.plan, "channels_last", change_io=True)[0].layouts

    def stored(self, name: str) -> Stored:
        """How a quantized value or weight is stored."""
        return self.plan[name]

    def code(self, name: str) -> Tensor:
        """Codes of a quantized value or weight."""
        if name in self.codes:
            return self.codes[name]
        if name not in self.weights:
            self.weights[name] = self.plan[name].quantize(self.graph.weights[name])
        return self.weights[name]

    def float_value(self, name: str, reader: Node) -> Any:
        """What a float operator reads: the value before its quantizer on float edges, else its codes as reals."""
        stored = None if (name, reader.name) in self.plan.float_edges else self.plan.stored(name)
        if stored is not None and (name in self.codes or name in self.graph.weights):
            return stored.dequantize(self.code(name)) if name in self.codes else self._constant(name, stored)
        self.decode(name)
        return self.floats[name] if name in self.floats else self.graph.weights[name]

    def decode(self, name: str) -> None:
        """What DynamicQuantize hands over, as reals, for those who do not read its codes."""
        if name in self.dynamic and name not in self.floats:
            q, s, z = self.dynamic[name]
            self.floats[name] = (q.float() - z) * s

    def _constant(self, name: str, stored: Stored) -> Tensor:
        """What the codes of a weight stand for."""
        own = f"{name} in reals"
        if own not in self.weights:
            self.weights[own] = stored.dequantize(self.code(name))
        return self.weights[own]

    def centred(self, name: str) -> Tensor:
        """Codes minus zero point, float64."""
        stored, q = self.plan[name], self.code(name).double()
        return q - shape_for(stored.zero_point.double(), q, stored.axis)

    def summed(self, acc: Tensor, most: float = float("inf")) -> Tensor:
        """Sums of all products as the last accumulator of `math.acc` holds them: they wrap around, or saturate.

        Args:
            most: what they are known not to exceed.
        """
        stage = self.math.acc[-1] if self.math.acc else None
        if stage is None or "terms" in stage or not acc.numel():
            return acc
        half = 2.0 ** (stage["bits"] - 1)
        if most < half or (acc.min() >= -half and acc.max() < half):
            return acc
        acc = acc.double()
        return acc.clamp(-half, half - 1) if stage.get("sat") else torch.remainder(acc + half, 2 * half) - half

    def store(self, name: str, x: Tensor) -> None:
        """Clip integers, zero point included, to the grid and keep them as codes."""
        grid = self.plan[name].grid
        self.codes[name] = x.clamp(grid.qmin, grid.qmax).to(grid.dtype)

    def publish(self, name: str, x: Any) -> None:
        """Keep a float result, and its codes when it is quantized."""
        self.floats[name] = x
        if self.plan.quantized(name):
            self.codes[name] = self.profile.quantize(self, name, x)

    def take_over(self, names: Sequence[str], done: Mapping[str, Any], floats: Mapping[str, Any]) -> None:
        """Results of an earlier run: codes with the reals behind them, or reals alone."""
        for o in names:
            if self.plan.quantized(o):
                self.codes[o] = done[o]
            if o in floats or not self.plan.quantized(o):
                self.floats[o] = floats.get(o, done[o])

    def drop(self, name: str) -> None:
        for table in (self.codes, self.floats, self.dynamic):
            table.pop(name, None)


Kernel = Callable[[Simulation, Sequence[Node]], None]


class KernelCall:
    """The operands and the result of one kernel."""

    def __init__(self, run: Simulation, nodes: Sequence[Node]) -> None:
        self.run, self.nodes, self.node = run, nodes, nodes[0]
        self.x, self.out, self.attrs = self.node.data, nodes[-1].output, self.node.attrs

    @property
    def second(self) -> str:
        """The second operand: the weight of operators that have one."""
        return self.node.inputs[1] or ""

    @property
    def wide(self) -> bool:
        """16-bit codes."""
        return self.bits(self.x) > 8

    def bits(self, name: str) -> int:
        return self.run.plan[name].grid.bits

    def scale(self, name: str) -> Tensor:
        return self.run.plan[name].scale

    def zero(self, name: str) -> Tensor:
        return self.run.plan[name].zero_point

    def code(self, name: str = "") -> Tensor:
        """Codes; of the first operand when none is named."""
        return self.run.code(name or self.x)

    def centred(self, name: str = "") -> Tensor:
        """Codes minus zero point, float64, likewise."""
        return self.run.centred(name or self.x)

    def multiplier(self, *over: str, kind: torch.dtype = torch.float32) -> Tensor:
        """The product of the operands' scales (of the first operand's when none is named), divided by the result's."""
        first, *others = over or (self.x,)
        real = self.scale(first).to(kind)
        for name in others:
            real = real * self.scale(name).to(kind)
        return real / self.scale(self.out).to(kind)

    def write_result(self, y: Tensor) -> None:
        """Keep codes without zero point as the result's."""
        self.run.store(self.out, y + self.zero(self.out))


def kernel_for_ops(kernel: Callable[..., None], *ops: str, **how: Any) -> dict[str, Kernel]:
    """Rows of operators with one kernel of a `KernelCall`; `how` it rounds."""
    return dict.fromkeys(ops, lambda run, nodes: kernel(KernelCall(run, nodes), **how))


def profile_for(platform: Platform, kernels: str | None = None) -> Profile:
    """How the platform's kernels, or other named ones, compute.

    Raises:
        UnsupportedError: the platform does not say how it computes, so exactness cannot be claimed.
    """
    name = kernels or kernels_of(platform)
    if name is None:
        got = platform.math.requant
        hint = f"use Result.model, the float simulation, or a platform with a verified profile such as {DEFAULT}"
        what = f"'{platform.name}' has no verified arithmetic, so its integers cannot be simulated"
        raise UnsupportedError(what, got=got, allowed="math.kernels, or math.requant with form float or q31", hint=hint)
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
    floats: dict[str, Any] | None = None,
    weights: dict[str, Tensor] | None = None,
    like: Mapping[str, Any] | None = None,
    each: Callable[[str, Any, Any], None] | None = None,
    part: int | None = None,
) -> dict[str, Any]:
    """Run the network in the platform's integers.

    Args:
        inputs: float tensors, one per graph input.
        platform: gives the arithmetic (`math`).
        force: device codes by value name, and floats of what is stored in none. Every operator then reads the
            device's instead of the simulated ones, so that each is compared by itself. Codes of another shape are not
            read.
        keep: values to return; all when omitted.
        kernels: the family that runs instead of the platform's own.
        floats: where to leave what float operators compute before it is quantized, by value name; what it holds of an
            operator that does not run again stays.
        weights: where codes of weights are kept between calls.
        like: what an earlier call gave for the same inputs without `force`, all values of it. Operators all of whose
            operands are the same again do not run again.
        each: is handed every value as it is computed: name, codes or reals, and the reals behind codes where a float
            operator computed them, else None.
        part: how many samples the device takes at once, where its file is of a fixed batch.

    Returns:
        Value name -> codes (integer dtype) where it is quantized, else its float tensor.

    Raises:
        UnsupportedError: see `profile_for`.
    """
    profile = profile_for(platform, kernels)
    run = Simulation(graph, _in_types(plan) if profile.saturate_to_type else plan, profile, platform.math, part)
    run.weights = run.weights if weights is None else weights
    wanted = {*(graph.values if keep is None else keep), *graph.outputs}
    todo = kernel_groups(graph, plan)
    last = {i: k for k, unit in enumerate(todo) for n in unit for i in n.inputs if i is not None}
    for o in graph.outputs:
        last.pop(o, None)
    done: dict[str, Any] = {}
    changed: set[str] = set()  #: values that are not those of `like`
    again: set[str] = set()  #: those that were computed once more: of the reals behind given codes nothing is known

    def record_results(names: Sequence[str], other: bool = False) -> None:
        """Note what was computed, by an `other` run or not; later operators read the device's codes where given."""
        for o in names:
            if o in wanted:
                run.decode(o)
            own, behind = run.codes.get(o, run.floats.get(o)), run.floats.get(o) if o in run.codes else None
            if o in wanted and own is not None:
                done[o] = own
            if floats is not None and behind is not None:
                floats[o] = behind
            if each is not None and own is not None:
                each(o, own, behind)
            given = _fitting(force, o, own)
            if given is not None:
                (run.codes if o in run.codes else run.floats)[o] = given
                if like is not None and bool((given != like[o]).any()):
                    changed.add(o)
            elif other:
                changed.add(o)

    for name, x in zip(graph.inputs, inputs, strict=True):
        run.publish(name, x)
    record_results(graph.inputs)
    for k, unit in enumerate(todo):
        results = unit[-1].outputs
        reads = {(i, n.name) for n in unit for i in n.inputs if i is not None}
        other = like is None or any(i in changed or (i in again and (i, n) in plan.float_edges) for i, n in reads)
        if other or unit[0].op == DYNAMIC:  # whose codes nothing else holds
            _compute(run, unit)
        if other:
            again.update(results)
        elif unit[0].op != DYNAMIC:
            run.take_over(results, like or {}, floats or {})
        record_results(results, other)
        for i in {i for i, _ in reads if last.get(i) == k}:
            run.drop(i)
    return done


def _fitting(force: Mapping[str, Tensor] | None, name: str, simulated: Any) -> Tensor | None:
    """What the device gives in place of what was simulated, if it gives that: floats may lie in another shape."""
    given = None if force is None or simulated is None else force.get(name)
    if given is None or given.shape == simulated.shape:
        return given
    alike = given.is_floating_point() and given.numel() == simulated.numel()
    return given.reshape(simulated.shape) if alike else None


def _in_types(plan: Plan) -> Plan:
    """The plan with the grids of values as wide as the types that hold them in a file."""
    wide = {}
    for name, t in plan.tensors.items():
        if t.role == "activation" and t.grid is not None and t.grid.kind == "int":
            low, high = t.grid.file_ends
            if (low, high) != (t.grid.qmin, t.grid.qmax):
                wide[name] = t.with_(grid=replace(t.grid, qmin=low, qmax=high))
    return replace(plan, tensors={**plan.tensors, **wide}) if wide else plan


def kernel_groups(graph: Graph, plan: Plan) -> list[list[Node]]:
    """What runs as one kernel, in execution order: the members of each fused group, and every other node alone."""
    nodes = {n.name: n for n in graph.nodes}
    groups = {g[-1]: [nodes[m] for m in g] for g in plan.groups}
    inner = {m for g in plan.groups for m in g[:-1]}
    return [groups.get(name, [n]) for name, n in nodes.items() if name not in inner]


def float_results(graph: Graph, plan: Plan, profile: Profile) -> set[str]:
    """Results that the runtime computes in float although they are stored in codes."""
    tails = [unit[-1] for unit in kernel_groups(graph, plan) if _kernel(graph, plan, unit, profile) is None]
    return {o for n in tails if plan.quantized(n.output) for o in n.outputs}


def float_kernel(
    graph: Graph, plan: Plan, unit: Sequence[Node], profile: Profile
) -> Callable[[KernelCall], Tensor] | None:
    """What an integer kernel hands over as floats, bit for bit; None where it hands over codes or computes in float."""
    head, decided = unit[0], plan.nodes.get(unit[0].name)
    if decided is None or decided.exec == "float" or plan.quantized(unit[-1].output):
        return None
    reads = [i for i in head.inputs if i is not None and graph.is_float(i)]
    exact = all(n.op in OPS and OPS[n.op].ieee for n in unit[1:])
    if reads[:1] == [head.data] and not plan.quantized(head.data):
        rounded = next((n for n in graph.nodes if n.op == DYNAMIC and n.output == head.data), None)
        weight = plan.stored(reads[1]) if len(reads) > 1 else None
        if rounded is None or weight is None or weight.grid.per == "block" or weight.grid.table is not None:
            return None
        return profile.dynamic.get((head.op, rounded.attrs["per"], weight.grid.bits)) if exact else None
    if not all(plan.quantized(i) and (i, head.name) not in plan.float_edges for i in reads):
        return None
    grids = [plan[i].grid for i in reads if plan.tensors[i].role != "bias"]
    narrow = all(g.table is None and g.bits <= profile.max_bits for g in grids)
    return profile.float_outputs.get(head.op) if narrow and exact else None


# ---------------------------------------------------------------- one unit


def _kernel(
    graph: Graph, plan: Plan, unit: Sequence[Node], profile: Profile
) -> tuple[Kernel, list[tuple[int, int]]] | None:
    """The integer kernel of a unit and between which codes it clips; None when the runtime computes it in float."""
    head, out = unit[0], plan.stored(unit[-1].output)
    decided = plan.nodes.get(head.name)
    if decided is None or decided.exec == "float" or out is None or out.grid.table is not None:
        return None
    made = {o for n in unit for o in n.outputs}
    if plan.before_rounding(made):
        return None
    reads = [i for n in unit for i in n.inputs if i is not None and i not in made]
    if not all(plan.quantized(i) and plan[i].grid.table is None for i in reads if graph.is_float(i)):
        return None
    clips = [bounds for act in unit[1:] if (bounds := profile.clip(act, out)) is not None]
    kernel = profile.kernels.get(head.op)
    if decided.exec == "follow":
        data = [i for i in reads if graph.is_float(i)]
        ends = (*data, *(o for o in unit[-1].outputs if plan.quantized(o)))
        tied = all(plan[v].same_numbers(plan[data[0]]) for v in ends)
        kernel = profile.pass_through.get(head.op) if tied else kernel
        kernel = pass_through if kernel is None and _moves(head) else kernel
    widths = [
        plan[v].grid.bits for v in (*reads, unit[-1].output) if plan.quantized(v) and plan.tensors[v].role != "bias"
    ]
    if kernel is not pass_through and max(widths, default=0) > profile.max_bits:
        return None
    return (kernel, clips) if kernel is not None and len(clips) == len(unit) - 1 else None


def _moves(node: Node) -> bool:
    """Its result holds numbers of its operands, or one that its attributes say."""
    return OPS[node.op].moves or node.op == "Pad" or node.attrs.get("mode") == "nearest"


def _compute(run: Simulation, unit: Sequence[Node]) -> None:
    found = _kernel(run.graph, run.plan, unit, run.profile)
    if found is not None:
        kernel, clips = found
        kernel(run, unit)
        for low, high in clips:
            run.codes[unit[-1].output] = run.codes[unit[-1].output].clamp(low, high)
        return
    if unit[0].op == DYNAMIC:
        (node,) = unit
        others = [run.plan.stored(i) for n in run.graph.users().get(node.output, ()) for i in n.inputs if i is not None]
        blocks = any(s is not None and s.grid.per == "block" for s in others)
        q, s, z = run.profile.quantize_dynamic(run.float_value(node.data, node).float(), blocks=blocks, **node.attrs)
        run.dynamic[node.output] = q.to(torch.int8 if bool((q < 0).any()) else torch.uint8), s, z
        return
    env: dict[str, Any] = {}
    reals = float_kernel(run.graph, run.plan, unit, run.profile)
    if reals is not None:
        env[unit[0].output] = reals(KernelCall(run, unit))
    for n in unit if reals is None else unit[1:]:
        outs = execute(n, [None if i is None else env[i] if i in env else run.float_value(i, n) for i in n.inputs])
        env.update(zip(n.outputs, outs, strict=False))
    for o in unit[-1].outputs:
        run.publish(o, env[o])


# ---------------------------------------------------------------- kernels of every profile


def activation_bounds(act: Node) -> tuple[float | None, float | None] | None:
    """The reals between which an activation clips, None for no bound; None for one that does something else."""
    reals = {"Relu": (0.0, None), "Relu6": (0.0, 6.0), "Clamp": (act.attrs.get("min"), act.attrs.get("max"))}
    return reals.get(act.op)


def pass_through(run: Simulation, unit: Sequence[Node]) -> None:
    """Operators that move codes or choose among them; where results have other numbers than operands, their reals."""
    node = unit[0]
    data = [i for i in node.inputs if i is not None and run.graph.is_float(i)]
    results = [o for o in unit[-1].outputs if run.plan.quantized(o)]
    tied = all(run.stored(v).same_numbers(run.stored(data[0])) for v in (*data, *results))
    given = [i for i in node.inputs if i is not None]
    args: list[Any] = [run.code(i).float() if i in data else run.float_value(i, node) for i in given]
    if not tied:
        args = [run.stored(i).dequantize(run.code(i)) if i in data else x for i, x in zip(node.inputs, args)]
    if tied and node.op == "Pad" and node.attrs["mode"] == "constant":
        value = run.stored(node.data).quantize(torch.tensor(float(node.attrs["value"])))  # as files hold it
        node = node.with_(attrs={**node.attrs, "value": float(value)})
    for o, x in zip(unit[-1].outputs, execute(node, args), strict=False):
        if o in results:
            run.codes[o] = x.to(run.stored(o).grid.dtype) if tied else run.profile.quantize(run, o, x)


def pool_windows(x: Tensor, node: Node, border: float = 0.0) -> tuple[Tensor, Tensor]:
    """What an average pool sees.

    Args:
        x: [N, C, ...].
        border: what lies around the image, where that counts.

    Returns:
        The elements of each window, [N, C, *out, elements], 0 beyond what counts, and their number, [1, 1, *out].
    """
    a, counted = node.attrs, node.attrs["count_include_pad"]
    axes = range(2, 2 + len(a["kernel"]))
    out = execute(node, [x[:1, :1]])[0].shape
    rows = zip(axes, a["padding"], a["kernel"], a["stride"], strict=True)
    more = [(0, max((out[d] - 1) * s + k - x.shape[d] - sum(p), 0)) for d, p, k, s in rows]

    def cut(image: Tensor, around: float) -> Tensor:
        for padding, value in ((a["padding"], around), (more, 0.0)):
            image = pad(image, padding=padding, mode="constant", value=value)
        for d, k, s in zip(axes, a["kernel"], a["stride"], strict=True):
            image = image.unfold(d, k, s).narrow(d, 0, out[d])
        return image.flatten(2 + len(axes))

    return cut(x, border if counted else 0.0), cut(torch.ones_like(x[:1, :1]), float(counted)).sum(-1)


def accumulate(run: Simulation, node: Node) -> Tensor:
    """Exact product sums of a convolution or linear layer, bias included: integers, in int32 or float64."""
    acc, w = _products(run, node), run.code(node.weight)
    terms = max(w[0].numel(), w[:, 0].numel()) if w.numel() else 0
    most = terms * 2.0 ** (run.plan[node.data].grid.bits + run.plan[node.weight].grid.bits)
    if node.bias is not None:
        b = run.code(node.bias)
        most += float(b.abs().max())
        b = b if node.op == "Linear" else b.view(-1, *[1] * (acc.dim() - 2))
        acc = acc.add_(b) if acc.dtype == b.dtype == torch.int32 and most < 2.0**31 else acc.double().add_(b)
    return run.summed(acc if acc.dtype == torch.int32 else acc.double(), most)


def _products(run: Simulation, node: Node) -> Tensor:
    x, w, a = run.code(node.data), run.code(node.weight), node.attrs
    zero, w_zero = (run.plan[name].zero_point for name in (node.data, node.weight))
    if sums.fits(x, zero, w, w_zero):
        if node.op == "Linear":
            return sums.multiplied(x, zero, w)
        plain = OPS[node.op].kind != "transposed"
        how = {k: a[k] for k in ("stride", "padding", "dilation", "groups")}
        if plain and (acc := sums.convolved(x, zero, w, **how)) is not None:
            return acc
    x, w = run.centred(node.data), run.centred(node.weight)
    return F.linear(x, w) if node.op == "Linear" else execute(node, [x, w])[0]


def dynamic_product(c: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of a product whose data the kernel rounds, int32 or float64; the data's scale; the bias in float, or 0."""
    q, s, z = c.run.dynamic[c.x]
    w, w_zero = c.code(c.second), c.zero(c.second)
    rows = w if c.node.op == "Linear" else w.transpose(-1, -2)
    if w.dim() == 2 and sums.fits(q, z, rows, w_zero):
        acc = c.run.summed(sums.multiplied(q, z, rows))
    else:
        centred = c.centred(c.second)
        acc = c.run.summed((q.double() - z) @ (centred.transpose(-1, -2) if c.node.op == "Linear" else centred))
    bias = c.node.bias
    return acc, s, torch.zeros(()) if bias is None else c.run.graph.weights[bias].detach()
