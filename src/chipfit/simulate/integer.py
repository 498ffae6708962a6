"""The integer simulation: run a Graph under a Plan in the arithmetic of a runtime.

Products of 8-bit integers are added in the processor's integers (`simulate/sums.py`), others in float64, which is exact
below 2^53, so integer simulation runs at float speed. Operators that the runtime computes in float are computed in
float32 here and listed by `float_results`; their last bit may differ from the runtime's.

A `Profile` defines the arithmetic of one family of kernels (`simulate/onnxruntime.py`, `simulate/litert.py`). A
platform names its family in `math.kernels`; a runtime may name the one that it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from chipfit.engine.kernels import execute, pad
from chipfit.engine.torch_defaults import torch_defaults
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import DYNAMIC, OPAQUE, Graph, Node
from chipfit.passes.layout import Layout, apply_layout
from chipfit.plan.record import Plan
from chipfit.platform.builtin import DEFAULT
from chipfit.platform.schema import Math, Platform
from chipfit.platform.support import REQUANT_FORMS, kernels_of
from chipfit.quantizers.dynamic import Codes, dynamic_codes
from chipfit.quantizers.grids import shape_for
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.stored import Stored
from chipfit.registry import lookup
from chipfit.simulate import sums
from chipfit.simulate.requantize import requantize

Tensor = torch.Tensor


def _quantize_dynamic(x: Tensor, blocks: bool = False, readers: Set[str] = frozenset(), **how: Any) -> Codes:
    return dynamic_codes(TorchOps, x, **how)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The arithmetic of one family of kernels; registered as "kernels".

    A kernel is a function of the `Simulation` and the nodes of a fused group, or one node. It reads integers and floats
    of operands by name and stores the integers of the result, which fused activations then clip.
    """

    kernels: Mapping[str, Kernel]  #: operator -> kernel; the runtime computes missing operators in float
    #: operator -> kernel of operators that keep their operand's scale and zero point although they compute: averages
    pass_through: Mapping[str, Kernel] = field(default_factory=dict)
    #: operator -> function that computes the float output of its integer kernel, bit-exact; used when the output is not
    #: quantized
    float_outputs: Mapping[str, Callable[[KernelCall], Tensor]] = field(default_factory=dict)
    #: as `float_outputs`, for dynamic kernels; keyed by (operator, granularity of the input's ranges, weight bits)
    dynamic: Mapping[tuple[str, str, int], Callable[[KernelCall], Tensor | tuple[Tensor, ...]]] = field(
        default_factory=dict
    )
    #: operator -> its float32 function as the runtime computes it; other operators in float compute as torch does
    functions: Mapping[str, Callable[..., Tensor]] = field(default_factory=dict)
    #: quantizes the input of dynamic kernels: (floats, whether weights are in `blocks`, operators that are its
    #: `readers`, attributes of DynamicQuantize) -> integers, scale, zero point
    quantize_dynamic: Callable[..., Codes] = _quantize_dynamic
    #: (fused activation, how its result is stored) -> bounds to which it clips the integers; None if the kernel cannot,
    #: and the whole group is computed in float
    clip: Callable[[Node, Stored], tuple[int, int] | None]
    quantize: Callable[[Simulation, str, Tensor], Tensor]  #: (simulation, value, its floats) -> integers
    #: results saturate at the ends of the integer type in the file, even where their grid is narrower
    saturate_to_type: bool = False
    #: roundings and requantizations among which a platform with these kernels chooses; empty: any
    supported_math: Collection[str] = ()
    max_bits: int = 64  #: of integers that the kernels compute with; wider ones are computed in float
    float_biases: bool = False  #: kernels add biases that are not quantized
    #: whether the runtime gives an operator in float that reads and makes quantized values only to its integer kernel
    fused_in_float: Callable[[Node, Plan], bool] = lambda _node, _plan: False


@dataclass
class Simulation:
    """The state of one simulation."""

    graph: Graph
    plan: Plan
    profile: Profile
    math: Math
    part: int | None = None  #: samples that the device computes at once; None for all
    in_pairs: bool = False  #: the processor adds pairs of u8 x s8 products in 16 bits, with saturation
    in_double: bool = False  #: operators in float compute in float64, but for opaque ones
    codes: dict[str, Tensor] = field(default_factory=dict)  #: quantized value -> integers
    floats: dict[str, Any] = field(default_factory=dict)  #: value -> float (or other) tensor, before its quantizer
    #: weight -> integers; "{weight} in float" -> the floats that they represent
    weights: dict[str, Tensor] = field(default_factory=dict)
    #: result of DynamicQuantize -> integers, scale and zero point
    dynamic: dict[str, Codes] = field(default_factory=dict)

    @cached_property
    def forms(self) -> Mapping[str, Layout]:
        """The layouts of values in a file with channels last; a value without one keeps the order of the graph."""
        return apply_layout(self.graph, self.plan, "channels_last", change_io=True)[0].layouts

    def stored(self, name: str) -> Stored:
        """Return how a quantized value or weight is stored."""
        return self.plan[name]

    def code(self, name: str) -> Tensor:
        """Return the integers of a quantized value or weight."""
        if name in self.codes:
            return self.codes[name]
        if name not in self.weights:
            self.weights[name] = self.plan[name].quantize(self.graph.weights[name])
        return self.weights[name]

    def float_value(self, name: str, reader: Node) -> Any:
        """Return an operand of a float operator: the value before its quantizer on float edges, else dequantized."""
        x = self._float_value(name, reader)
        real = self.in_double and isinstance(x, Tensor) and x.is_floating_point()
        return x.to(torch.float32 if reader.op == OPAQUE else torch.float64) if real else x

    def _float_value(self, name: str, reader: Node) -> Any:
        stored = None if (name, reader.name) in self.plan.float_edges else self.plan.stored(name)
        if stored is not None and (name in self.codes or name in self.graph.weights):
            return stored.dequantize(self.code(name)) if name in self.codes else self._dequantized_weight(name, stored)
        self.decode(name)
        return self.floats[name] if name in self.floats else self.graph.weights[name]

    def decode(self, name: str) -> None:
        """Dequantize a result of DynamicQuantize for readers in float."""
        if name in self.dynamic and name not in self.floats:
            q, s, z = self.dynamic[name]
            self.floats[name] = (q.float() - z) * s

    def _dequantized_weight(self, name: str, stored: Stored) -> Tensor:
        key = f"{name} in float"
        if key not in self.weights:
            self.weights[key] = stored.dequantize(self.code(name))
        return self.weights[key]

    def centred(self, name: str) -> Tensor:
        """Return integers minus zero point, float64."""
        stored, q = self.plan[name], self.code(name).double()
        return q - shape_for(stored.zero_point.double(), q, stored.axis)

    def summed(self, acc: Tensor, most: float = float("inf")) -> Tensor:
        """Wrap or saturate sums of products as the last accumulator of `math.acc` does.

        Args:
            most: a bound on their magnitudes, if one is known.
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
        """Clip integers, zero point included, to the grid of a value, and keep them."""
        grid = self.plan[name].grid
        self.codes[name] = x.clamp(grid.qmin, grid.qmax).to(grid.dtype)

    def publish(self, name: str, x: Any) -> None:
        """Keep a float result, and its integers if it is quantized."""
        self.floats[name] = x
        if self.plan.quantized(name):
            self.codes[name] = self.profile.quantize(self, name, x)

    def reuse(self, names: Sequence[str], done: Mapping[str, Any], floats: Mapping[str, Any]) -> None:
        """Keep results of an earlier simulation: integers and the floats before their quantizer, or floats alone."""
        for o in names:
            if self.plan.quantized(o):
                self.codes[o] = done[o]
            if o in floats or not self.plan.quantized(o):
                self.floats[o] = floats.get(o, done[o])

    def drop(self, name: str) -> None:
        """Release a value that no later operator reads."""
        for table in (self.codes, self.floats, self.dynamic):
            table.pop(name, None)


Kernel = Callable[[Simulation, Sequence[Node]], None]


class KernelCall:
    """One call of a kernel: its operands and its result, by name."""

    def __init__(self, run: Simulation, nodes: Sequence[Node]) -> None:
        self.run, self.nodes, self.node = run, nodes, nodes[0]
        self.x, self.out, self.attrs = self.node.data, nodes[-1].output, self.node.attrs

    @property
    def second(self) -> str:
        """The second operand: the weight of operators that have one."""
        return self.node.inputs[1] or ""

    @property
    def wide(self) -> bool:
        """The first operand has more than 8 bits."""
        return self.bits(self.x) > 8

    def bits(self, name: str) -> int:
        return self.run.plan[name].grid.bits

    def scale(self, name: str) -> Tensor:
        return self.run.plan[name].scale

    def zero(self, name: str) -> Tensor:
        return self.run.plan[name].zero_point

    def code(self, name: str = "") -> Tensor:
        """Return integers, by default of the first operand."""
        return self.run.code(name or self.x)

    def centred(self, name: str = "") -> Tensor:
        """Return integers minus zero point, float64, by default of the first operand."""
        return self.run.centred(name or self.x)

    def multiplier(self, *over: str, kind: torch.dtype = torch.float32) -> Tensor:
        """Return the product of operands' scales (by default the first operand's), divided by the result's scale."""
        first, *others = over or (self.x,)
        real = self.scale(first).to(kind)
        for name in others:
            real = real * self.scale(name).to(kind)
        return real / self.scale(self.out).to(kind)

    def write_result(self, y: Tensor) -> None:
        """Store the result, given its integers minus zero point."""
        self.run.store(self.out, y + self.zero(self.out))


CellFunction = str | Callable[[KernelCall], None]  #: a cell of the table of operators: a function, or its name


def kernel_of(function: Callable[[KernelCall], None]) -> Kernel:
    """Return the kernel that calls a function with a `KernelCall`."""
    return lambda run, nodes: function(KernelCall(run, nodes))


def profile_for(platform: Platform, kernels: str | None = None) -> Profile:
    """Return the profile of the platform's kernels, or of other named ones.

    Raises:
        UnsupportedError: the platform does not state its arithmetic, so exactness cannot be claimed.
    """
    name = kernels or kernels_of(platform)
    if name is None:
        got = platform.math.requant
        hint = f"use Result.model, the float simulation, or a platform with a verified profile such as {DEFAULT}"
        what = f"'{platform.name}' has no verified arithmetic, so its integers cannot be simulated"
        raise UnsupportedError(
            what, got=got, allowed=f"math.kernels, or math.requant with form {' or '.join(REQUANT_FORMS)}", hint=hint
        )
    profile: Profile = lookup("kernels", name)
    return profile


@torch_defaults()
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
    in_pairs: bool = False,
    in_double: bool = False,
) -> dict[str, Any]:
    """Run the network in the platform's integers.

    Args:
        inputs: float tensors, one per graph input.
        platform: gives the arithmetic (`math`).
        force: the device's integers by value name, and floats of values that are not quantized. Every operator then
            reads the device's values instead of the simulated ones, so that each is compared by itself. Integers of
            another shape are not read.
        keep: values to return; all when omitted.
        kernels: the family that runs instead of the platform's own.
        floats: receives results of float operators before they are quantized, by value name; entries of operators
            that do not run again stay.
        weights: keeps integers of weights between calls.
        like: all values of an earlier call on the same inputs without `force`. Operators whose operands are all equal
            to these do not run again.
        each: called with every value as it is computed: name, integers or floats, and the floats before the quantizer
            if a float operator computed them, else None.
        part: number of samples that the device computes at once, if its file has a fixed batch size.
        in_pairs: the processor adds pairs of u8 x s8 products in 16 bits, with saturation.
        in_double: compute in float64 what the runtime computes in float32.

    Returns:
        Value name -> integers (integer dtype) if it is quantized, else its float tensor.

    Raises:
        UnsupportedError: see `profile_for`.
    """
    profile = profile_for(platform, kernels)
    run = Simulation(graph, widened_to_types(plan) if profile.saturate_to_type else plan, profile, platform.math, part)
    run.weights, run.in_pairs, run.in_double = run.weights if weights is None else weights, in_pairs, in_double
    wanted = {*(graph.values if keep is None else keep), *graph.outputs}
    results = _Results(run, wanted, force or {}, floats, like, each)
    groups = kernel_groups(graph, plan)
    last = {i: k for k, group in enumerate(groups) for n in group for i in n.inputs if i is not None}
    for o in graph.outputs:
        last.pop(o, None)
    for name, x in zip(graph.inputs, inputs, strict=True):
        run.publish(name, x)
    results.record(graph.inputs)
    for k, group in enumerate(groups):
        results.advance(group)
        for i in {i for n in group for i in n.inputs if i is not None and last.get(i) == k}:
            run.drop(i)
    return results.values


@dataclass(eq=False)
class _Results:
    """The values of a simulation, recorded as the operators run; see the arguments of `simulate`."""

    run: Simulation
    wanted: Collection[str]  #: values to return
    force: Mapping[str, Tensor]
    floats: dict[str, Any] | None
    like: Mapping[str, Any] | None
    each: Callable[[str, Any, Any], None] | None
    values: dict[str, Any] = field(default_factory=dict)  #: what `simulate` returns
    changed: set[str] = field(default_factory=set)  #: values that differ from `like`
    #: values that were computed again: their floats may differ even if their integers do not
    recomputed: set[str] = field(default_factory=set)

    def advance(self, group: Sequence[Node]) -> None:
        """Run a kernel, or take its results from `like` if its operands are those of that call."""
        results, again = group[-1].outputs, self._reads_changes(group)
        dynamic = group[0].op == DYNAMIC  # its integers are kept nowhere else
        if again or dynamic:
            _compute(self.run, group)
        if again:
            self.recomputed.update(results)
        elif not dynamic:
            self.run.reuse(results, self.like or {}, self.floats or {})
        self.record(results, again)

    def _reads_changes(self, group: Sequence[Node]) -> bool:
        reads = ((i, n.name) for n in group for i in n.inputs if i is not None)
        in_float = self.run.plan.float_edges
        return self.like is None or any(
            i in self.changed or (i in self.recomputed and (i, n) in in_float) for i, n in reads
        )

    def record(self, names: Sequence[str], again: bool = False) -> None:
        """Record results, computed again or reused; later operators read the device's values if given."""
        run = self.run
        for o in names:
            if o in self.wanted:
                run.decode(o)
            own, unrounded = run.codes.get(o, run.floats.get(o)), run.floats.get(o) if o in run.codes else None
            if o in self.wanted and own is not None:
                self.values[o] = own
            if self.floats is not None and unrounded is not None:
                self.floats[o] = unrounded
            if self.each is not None and own is not None:
                self.each(o, own, unrounded)
            given = _forced(self.force, o, own)
            if given is not None:
                (run.codes if o in run.codes else run.floats)[o] = given
                if self.like is not None and bool((given != self.like[o]).any()):
                    self.changed.add(o)
            elif again:
                self.changed.add(o)


def _forced(force: Mapping[str, Tensor], name: str, simulated: Any) -> Tensor | None:
    """Return the device's value if it has the shape of the simulated one, or is float and has as many elements."""
    given = None if simulated is None else force.get(name)
    if given is None or given.shape == simulated.shape:
        return given
    alike = given.is_floating_point() and given.numel() == simulated.numel()
    return given.reshape(simulated.shape) if alike else None


def widened_to_types(plan: Plan) -> Plan:
    """Return the plan with the grids of activations widened to the integer types of a file."""
    wide = {}
    for name, t in plan.tensors.items():
        if t.role == "activation" and t.grid is not None and t.grid.kind == "int":
            low, high = t.grid.file_ends
            if (low, high) != (t.grid.qmin, t.grid.qmax):
                wide[name] = t.with_(grid=replace(t.grid, bits=(high - low).bit_length(), qmin=low, qmax=high))
    return replace(plan, tensors={**plan.tensors, **wide}) if wide else plan


def kernel_groups(graph: Graph, plan: Plan) -> list[list[Node]]:
    """Return the nodes of each kernel, in execution order: the members of a fused group, or a single node."""
    nodes = {n.name: n for n in graph.nodes}
    groups = {g[-1]: [nodes[m] for m in g] for g in plan.groups}
    inner = {m for g in plan.groups for m in g[:-1]}
    return [groups.get(name, [n]) for name, n in nodes.items() if name not in inner]


def float_results(graph: Graph, plan: Plan, profile: Profile) -> set[str]:
    """Return the quantized values that the runtime computes in float and rounds."""
    tails = [group[-1] for group in kernel_groups(graph, plan) if _kernel(graph, plan, group, profile) is None]
    return {o for n in tails for o in n.outputs if plan.quantized(o)}


def float_kernel(
    graph: Graph, plan: Plan, group: Sequence[Node], profile: Profile
) -> Callable[[KernelCall], Tensor | tuple[Tensor, ...]] | None:
    """Return the function of a kernel from integers to exact floats; None if it outputs integers or reads floats."""
    head, decided = group[0], plan.nodes.get(group[0].name)
    if decided is None or decided.exec == "float" or plan.quantized(group[-1].output):
        return None
    reads = [i for i in head.inputs if i is not None and graph.is_float(i) and i != _float_or_int_bias(head, profile)]
    exact = all(n.facts.ieee for n in group[1:])
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


# ---------------------------------------------------------------- one kernel


def _kernel(
    graph: Graph, plan: Plan, group: Sequence[Node], profile: Profile
) -> tuple[Kernel, list[tuple[int, int] | Node]] | None:
    """Return the integer kernel of a group, and its clips and moves; None if the runtime computes it in float."""
    head, out = group[0], plan.stored(group[-1].output)
    decided = plan.nodes.get(head.name)
    if decided is None or out is None or out.grid.table is not None:
        return None
    reads_floats = any((i, n.name) in plan.float_edges for n in group for i in n.inputs)
    if decided.exec == "float" and (reads_floats or not profile.fused_in_float(head, plan)):
        return None
    made = {o for n in group for o in n.outputs}
    if plan.before_rounding(made):
        return None
    reads = [i for n in group for i in n.inputs if i is not None and i not in made]
    reads = [i for i in reads if i != _float_or_int_bias(head, profile)]
    if not all(plan.quantized(i) and plan[i].grid.table is None for i in reads if graph.is_float(i)):
        return None
    clips = [end for act in group[1:] if (end := act if act.facts.moves else profile.clip(act, out)) is not None]
    kernel = profile.kernels.get(head.op)
    if decided.exec == "follow":
        data = [i for i in reads if graph.is_float(i)]
        ends = (*data, *(o for o in group[-1].outputs if plan.quantized(o)))
        tied = all(plan[v].same_numbers(plan[data[0]]) for v in ends)
        kernel = profile.pass_through.get(head.op) if tied else kernel
        kernel = pass_through if kernel is None and is_pass_through(head) else kernel
    widths = [
        plan[v].grid.bits for v in (*reads, group[-1].output) if plan.quantized(v) and plan.tensors[v].role != "bias"
    ]
    if kernel is not pass_through and max(widths, default=0) > profile.max_bits:
        return None
    return (kernel, clips) if kernel is not None and len(clips) == len(group) - 1 else None


def _float_or_int_bias(head: Node, profile: Profile) -> str | None:
    """Return the bias of a kernel that adds it quantized or not."""
    return head.bias if profile.float_biases else None


def is_pass_through(node: Node) -> bool:
    """Return whether a node's result holds values of its operands only, or one that its attributes state."""
    return node.facts.moves or node.op == "Pad" or node.attrs.get("mode") in ("nearest", "nearest_exact")


def _compute(run: Simulation, group: Sequence[Node]) -> None:
    """Run a kernel: in integers, from integers to exact floats, or in float."""
    integer = _kernel(run.graph, run.plan, group, run.profile)
    if integer is not None:
        kernel, behind = integer
        kernel(run, group)
        for end in behind:
            q = run.codes[group[-1].output]
            run.codes[group[-1].output] = execute(end, [q])[0] if isinstance(end, Node) else q.clamp(*end)
        return
    if group[0].op == DYNAMIC:
        (node,) = group
        readers = run.graph.users().get(node.output, ())
        others = [run.plan.stored(i) for n in readers for i in n.inputs if i is not None]
        how = {
            "blocks": any(s is not None and s.grid.per == "block" for s in others),
            "readers": {n.op for n in readers},
        }
        q, s, z = run.profile.quantize_dynamic(run.float_value(node.data, node).float(), **how, **node.attrs)
        run.dynamic[node.output] = q.to(torch.int8 if bool((q < 0).any()) else torch.uint8), s, z
        return
    env: dict[str, Any] = {}
    float_output = float_kernel(run.graph, run.plan, group, run.profile)
    if float_output is not None:
        found = float_output(KernelCall(run, group))
        env.update(zip(group[0].outputs, found if isinstance(found, tuple) else (found,), strict=True))
    for n in group if float_output is None else group[1:]:
        args = [None if i is None else env[i] if i in env else run.float_value(i, n) for i in n.inputs]
        function = None if run.in_double else run.profile.functions.get(n.op)
        env.update(zip(n.outputs, [function(*args)] if function else execute(n, args), strict=False))
    for o in group[-1].outputs:
        run.publish(o, env[o])


# ---------------------------------------------------------------- kernels of every profile


def integer_clip_range(act: Node, t: Stored, rounded: Callable[[Tensor], Tensor]) -> tuple[int, int] | None:
    """Return the integers to which an activation clips the results of a kernel; None if it has no bounds.

    Args:
        rounded: rounds bounds divided by the scale.
    """
    ends, grid = act.clip_range or (None, None), t.grid
    if ends == (None, None):
        return None
    units = (e if e is None else torch.tensor(e, dtype=torch.float32) / t.scale for e in ends)
    whole = [e if e is None else int(t.zero_point) + int(rounded(e)) for e in units]
    low, high = (end if e is None else e for e, end in zip(whole, (grid.qmin, grid.qmax), strict=True))
    return min(max(grid.qmin, low), grid.qmax), min(max(grid.qmin, high), grid.qmax)


def pass_through(run: Simulation, group: Sequence[Node]) -> None:
    """Run a pass-through operator on integers, or on floats if the scales of operands and results differ."""
    node = group[0]
    data = [i for i in node.inputs if i is not None and run.graph.is_float(i)]
    results = [o for o in group[-1].outputs if run.plan.quantized(o)]
    tied = all(run.stored(v).same_numbers(run.stored(data[0])) for v in (*data, *results))
    given = [i for i in node.inputs if i is not None]
    args: list[Any] = [run.code(i).float() if i in data else run.float_value(i, node) for i in given]
    if not tied:
        args = [run.stored(i).dequantize(run.code(i)) if i in data else x for i, x in zip(node.inputs, args)]
    if tied and node.op == "Pad" and node.attrs["mode"] == "constant":
        value = run.stored(node.data).quantize(torch.tensor(float(node.attrs["value"])))  # as files store it
        node = node.with_(attrs={**node.attrs, "value": float(value)})
    for o, x in zip(group[-1].outputs, execute(node, args), strict=False):
        if not run.graph.is_float(o):
            run.floats[o] = x  # an index
        elif o in results:
            run.codes[o] = x.to(run.stored(o).grid.dtype) if tied else run.profile.quantize(run, o, x)


def pool_windows(x: Tensor, node: Node, border: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the windows of an average pool.

    Args:
        x: [N, C, ...].
        border: value of the padding, if the average includes it.

    Returns:
        The elements of each window, [N, C, *out, elements], 0 for those that the average leaves out; the number of
        elements that it includes, [1, 1, *out].
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
    """Return exact product sums of a convolution or linear layer, bias included: integers, in int32 or float64."""
    acc, w = _products(run, node), run.code(node.weight)
    terms = max(w[0].numel(), w[:, 0].numel()) if w.numel() else 0
    most = terms * 2.0 ** (run.plan[node.data].grid.bits + run.plan[node.weight].grid.bits)
    if node.bias is not None:
        b = _aligned_bias(run, node, node.bias)
        most += float(b.abs().max())
        b = b if node.facts.kind == "linear" else b.view(-1, *[1] * (acc.dim() - 2))
        acc = acc.add_(b) if acc.dtype == b.dtype == torch.int32 and most < 2.0**31 else acc.double().add_(b)
    return run.summed(acc if acc.dtype == torch.int32 else acc.double(), most)


def _aligned_bias(run: Simulation, node: Node, bias: str) -> Tensor:
    """Return the integers of a bias at the scale of the accumulator, s_in s_w; requantize it from another scale."""
    b, steps = run.code(bias), run.plan[node.data].scale * run.plan[node.weight].scale
    ratio = run.plan[bias].scale / steps
    if bool(((ratio - 1).abs() < 1e-3).all()):
        return b
    rule = run.math.requant or {}
    return requantize(b, ratio, rule if rule.get("form") == "shift" else {"form": "float"})


def _products(run: Simulation, node: Node) -> Tensor:
    """Return sums of products as the processor computes them, with its saturation."""
    acc = _exact_products(run, node)
    if not run.in_pairs:
        return acc
    lost = _saturation_error(run.code(node.data), run.plan[node.data].zero_point, run.code(node.weight), node)
    return acc if lost is None else acc + lost


def _saturation_error(x: Tensor, zero: Tensor, w: Tensor, node: Node) -> Tensor | None:
    """Return the error that saturation in pairs adds to sums of products; None if no pair saturates."""
    if node.facts.kind == "conv":
        how = {k: node.attrs[k] for k in ("stride", "padding", "dilation", "groups")}
        return sums.lost_in_windows(x, zero, w, **how)
    rows = w if node.facts.kind == "linear" else w.transpose(-1, -2)
    lost = sums.lost_in_pairs(x.reshape(-1, x.shape[-1]), rows) if rows.dim() == 2 else None
    return None if lost is None else lost.reshape(*x.shape[:-1], -1)


def _exact_products(run: Simulation, node: Node) -> Tensor:
    """Return sums of products without saturation: in the processor's integers where they fit, else in float64."""
    x, w, a = run.code(node.data), run.code(node.weight), node.attrs
    zero, w_zero = (run.plan[name].zero_point for name in (node.data, node.weight))
    if sums.fits(x, zero, w, w_zero):
        if node.facts.kind == "linear":
            return sums.multiplied(x, zero, w)
        convolution = node.facts.kind != "transposed"
        how = {k: a[k] for k in ("stride", "padding", "dilation", "groups")}
        if convolution and (acc := sums.convolved(x, zero, w, **how)) is not None:
            return acc
    x, w = run.centred(node.data), run.centred(node.weight)
    return F.linear(x, w) if node.facts.kind == "linear" else execute(node, [x, w])[0]


def inner_product(c: KernelCall) -> Tensor:
    """Return sums of products of two values, with the processor's saturation."""
    acc = torch.matmul(c.centred(), c.centred(c.second))
    lost = _saturation_error(c.code(), c.zero(c.x), c.code(c.second), c.node) if c.run.in_pairs else None
    return acc if lost is None else acc + lost


def dynamic_product(c: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums of products of a dynamic kernel (int32 or float64), the scale of its input, and its bias or 0."""
    q, s, z = c.run.dynamic[c.x]
    w, w_zero = c.code(c.second), c.zero(c.second)
    if c.node.facts.kind == "conv":
        acc = execute(c.node.with_(inputs=c.node.inputs[:2]), [q.double() - z, c.centred(c.second)])[0]
        bias = _float_bias(c)
        return c.run.summed(acc), s, bias.reshape(-1, *[1] * (acc.dim() - 2)) if bias.dim() else bias
    rows = w if c.node.facts.kind == "linear" else w.transpose(-1, -2)
    if w.dim() == 2 and sums.fits(q, z, rows, w_zero):
        acc = c.run.summed(sums.multiplied(q, z, rows))
    else:
        centred = c.centred(c.second)
        acc = c.run.summed((q.double() - z) @ (centred.transpose(-1, -2) if c.node.facts.kind == "linear" else centred))
    # ConvInteger does not saturate: its weights are the first factor
    lost = _saturation_error(q, z, w, c.node) if c.run.in_pairs else None
    return acc if lost is None else acc + lost, s, _float_bias(c)


def _float_bias(c: KernelCall) -> Tensor:
    """Return the bias of a dynamic kernel in float, or 0."""
    return torch.zeros(()) if c.node.bias is None else c.run.graph.weights[c.node.bias].detach()
