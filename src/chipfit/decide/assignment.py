"""The assignment: which format every tensor has, what is tied, and what stays float and why.

No number is decided here: ranges come later, from data.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from chipfit.decide.constraints import Constraint, result_ties, shared_bias_ties, state_ties, step_ties
from chipfit.decide.file_rules import file_rules
from chipfit.decide.formats import FormatPropagation, GroupDecision, limit_to_consumers, propagate_formats
from chipfit.decide.groups import NO_FORMAT, NodeGroups, Operand, blocks_of, find_groups, format_of
from chipfit.decide.options import KEPT_BY_USER, execution_modes, is_overridden, limit_options, without_shared_moves
from chipfit.decide.overrides import NodeOverrides, constrain_format
from chipfit.errors import UnsupportedError
from chipfit.graph.float_only import float_only_values
from chipfit.graph.hidden_scores import HiddenScores, hidden_scores
from chipfit.graph.ir import Graph, Node
from chipfit.graph.joins import output_joins
from chipfit.operators.table import OPS
from chipfit.plan.record import NodePlan, Role
from chipfit.platform.match import runs_in_integers
from chipfit.platform.schema import Format, Platform
from chipfit.quantizers.grids import Grid
from chipfit.ranges import Rule

#: activations of so many bits or fewer get grids, and rewrites, chosen by what their errors do to the output
FEW_BITS = 6
#: what shares a scale because of the network, not of the platform
_TIES = (shared_bias_ties, step_ties, state_ties, result_ties)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that will be quantized, and in which format."""

    name: str
    role: Role
    format_name: str
    format: Format
    axis: int | None = None  #: axis of the channels or blocks, if the format is per channel or per block
    block: int | None = None  #: numbers along it that share a scale, if the format is per block
    gates: int | None = None  #: equal parts of the channel axis that share a scale, if the format is per gate
    node: str = ""  #: node that makes (activation) or reads (weight, bias) it; "" for an input of the model
    rule: Rule | None = None  #: range rule that the user chose for it
    z_threshold: float | None = None
    range: tuple[float, float] | None = None  #: known beforehand
    rounding: str | None = None  #: rounding of float values, if the platform names one

    def grid(self, signed: bool | None = None) -> Grid:
        """Return its quantization grid, once the sign is known; see `Format.grid`."""
        return self.format.grid(signed, self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Every decision that needs no data."""

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)  #: the tensors that will be quantized
    floats: Mapping[str, str] = field(default_factory=dict)  #: float tensors that were candidates -> reason
    nodes: Mapping[str, NodePlan] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()  #: the platform's rules, with the tensors that they are about
    #: (value, node) pairs: the node reads the value before it is quantized
    float_edges: frozenset[tuple[str, str]] = frozenset()
    groups: tuple[tuple[str, ...], ...] = ()  #: fused groups: node names, in execution order
    quantized_outputs: frozenset[str] = frozenset()  #: values whose producers output quantized values
    #: first node of a kernel with a choice -> what it can do: "codes", "float", "whole"; see `options.execution_modes`
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: first node of a kernel that joins or rescales parts of an output, or makes one on a dictated scale, and may do so
    #: in float although no option of its own lists that -> the result; see `passes.float_regions`
    joins: Mapping[str, str] = field(default_factory=dict)
    #: nodes whose kernels quantize their data at run time -> the format
    dynamic: Mapping[str, str] = field(default_factory=dict)
    read_anything: frozenset[str] = frozenset()  #: nodes whose kernels read data of any format

    def in_integers(self, n: Node) -> bool:
        """Return whether a node runs in integers and outputs quantized values, or passes them on inside its kernel."""
        planned = self.nodes[n.name]
        return planned.exec != "float" and (planned.group not in ("", n.name) or n.output in self.quantized_outputs)

    def with_constraints(self, more: Iterable[Constraint]) -> Assignment:
        """Return the assignment with further rules to hold."""
        return replace(self, constraints=(*self.constraints, *more))


def assign(
    graph: Graph, platform: Platform, groups: NodeGroups = (), overrides: NodeOverrides | None = None
) -> Assignment:
    """Choose a format for every tensor.

    Args:
        graph: after folding.
        platform: the target.
        groups: fused groups of node names, from `passes.fuse`.
        overrides: node name -> {"float": reason} or `overrides.CHOICES`.

    Raises:
        UnsupportedError: an operator that the platform rejects outright, or bits that no format offers.
    """
    widths = [c.get(k) for c in (overrides or {}).values() for k in ("bits", "activation_bits")]
    platform = platform.with_widths({n for n in widths if isinstance(n, int)})
    found = limit_to_consumers(platform, find_groups(graph, platform, groups, overrides or {}))
    found = [without_shared_moves(graph, g) for g in found]
    inputs = _input_choices(graph, overrides or {})
    by_user = [o for g in found if g.choices.get("activation_bits") == "float" for o in g.tail.outputs]
    by_user += [v for v, c in inputs.items() if "float" in (*c, c.get("activation_bits"))]
    float_values = float_only_values(graph, _saturating(graph, platform)) | dict.fromkeys(by_user, KEPT_BY_USER)
    # if quantizers belong to readers alone or to writers alone, no kernel can choose what suits its neighbours
    modes = {g.head.name: execution_modes(g) for g in found} if platform.place.at == "both" else {}
    # backwards, so that an error names the last of several layers with impossible bits
    found = [g if g.is_pass_through else limit_options(graph, platform, g, float_values) for g in reversed(found)][::-1]
    formats = propagate_formats(graph, platform, found, float_values, inputs)
    out, decisions = AssignmentBuilder(graph, platform, formats, inputs=inputs), formats.decisions
    for k, decision in enumerate(decisions):
        out.add(decision)
        if k == 0:  # plans list the model's inputs behind the weights of the first operator
            out.add_inputs()
    out.drop_unread()
    return Assignment(
        tensors=out.tensors,
        floats=out.floats,
        nodes=out.nodes,
        constraints=(*out.constraints, *(c for ties in _TIES for c in ties(graph, out.tensors))),
        float_edges=frozenset(out.float_edges),
        groups=tuple(groups),
        quantized_outputs=frozenset(formats.quantized_outputs),
        modes={d.group.head.name: m for d in decisions if d.integer and (m := modes.get(d.group.head.name))},
        joins=_joins(graph, platform, decisions, {t for c in out.constraints for t, _ in c.dictated}),
        read_anything=frozenset(n.name for d in decisions if d.group.reads_anything for n in d.group.nodes),
        dynamic={d.group.head.name: d.option.dynamic for d in decisions if d.option and d.option.dynamic},
    )


def _saturating(graph: Graph, platform: Platform) -> list[HiddenScores]:
    """Return the scores of which the platform hides some by moving quantized values."""
    found = hidden_scores(graph)
    return [h for h in found if all(runs_in_integers(platform, graph, n) for n in (*h.selections, h.reader))]


def _input_choices(graph: Graph, overrides: NodeOverrides) -> NodeOverrides:
    """Return the overrides of inputs of the model: input -> choices."""
    nodes = {n.name for n in graph.nodes}
    return {v: overrides[v] for v in graph.inputs if v in overrides and v not in nodes}


def _range_choices(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices about the range of an activation, as fields of its `TensorSpec`."""
    facts = {k: choices.get(k) for k in ("rule", "z_threshold", "range")}
    return {**facts, "range": facts["range"] and tuple(facts["range"])}


def _joins(
    graph: Graph, platform: Platform, decisions: Iterable[GroupDecision], dictated: Collection[str]
) -> dict[str, str]:
    """Return `Assignment.joins`: the runtime computes operators in float that the platform does not list.

    Args:
        dictated: results whose scales the hardware dictates, which may lose all of an output.
    """
    if platform.unlisted not in ("float", "cpu") or (platform.place.io_out and "float" not in platform.place.io_out):
        return {}
    joining = {n.name for n in output_joins(graph, dictated)}
    open_ = (d.group for d in decisions if d.integer and not is_overridden(d.group))
    return {g.head.name: g.tail.output for g in open_ if g.head.name in joining}


@dataclass(slots=True)
class AssignmentBuilder:
    """An assignment in the making: what the decisions about groups mean for tensors."""

    graph: Graph
    platform: Platform
    formats: FormatPropagation
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)
    float_edges: set[tuple[str, str]] = field(default_factory=set)
    inputs: NodeOverrides = field(default_factory=dict)  #: choices for inputs of the model
    tables: set[str] = field(default_factory=set)  #: readers of weights that only move rows of them

    def __post_init__(self) -> None:
        self.tables = {n.name for n in self.graph if n.facts.moves and n.operand("w")}

    def add(self, d: GroupDecision) -> None:
        """Add one group: its nodes, the tensors that it reads and writes, and the platform's rules about them."""
        group = d.group
        self._check_listed(d)
        rule = group.resolved.rule
        beside = self.platform.unlisted == "cpu" if rule is None else rule.cpu
        on_cpu = f"the processor beside '{self.platform.name}' runs it, in integers" if beside and d.integer else ""
        for n in group.nodes:
            tail = group.tail.name if len(group.nodes) > 1 else ""
            simd = d.option.simd if d.option and n is group.head else None
            self.nodes[n.name] = NodePlan(
                name=n.name, op=n.op, layer=n.display_name, exec=d.exec, group=tail, why=d.why or on_cpu, simd=simd
            )
        bound: dict[str, list[str]] = {}
        for r in group.operands:
            for slot in self._read(d, r):
                bound.setdefault(slot, []).append(r.tensor)
        written = [o for o in group.tail.outputs if self._write(d, o)]
        if written and not (d.option and d.option.out == "float"):  # else its readers quantize it, free of its rules
            bound |= {"outs": written, "out": written[:1]}
        if d.integer and bound:
            slots, head = {slot: tuple(tensors) for slot, tensors in bound.items()}, group.head
            rules = group.resolved.rules
            if written and len(group.nodes) == 1:
                rules += file_rules(self.platform, head.op, rules, self.tensors[written[0]].format.bits)
            self.constraints.append(Constraint(op=head.op, rules=rules, slots=slots, attrs=dict(head.attrs)))
        by_user = group.choices.get("activation_bits") == "float" and (
            not bound or group.choices.get("bits") == "float"
        )
        if d.integer and not written and "w" not in bound and by_user:  # neither weights nor results are quantized
            self.nodes |= {n.name: replace(self.nodes[n.name], exec="float", why=KEPT_BY_USER) for n in group.nodes}

    def add_inputs(self) -> None:
        """Add the model's inputs."""
        for name in self.graph.inputs:
            if name in self.formats.formats:
                self._store(name, "activation", self.formats.formats[name], **_range_choices(self.inputs.get(name, {})))

    def drop_unread(self) -> None:
        """Drop activations that nothing on the chip quantizes, since every reader takes them in float."""
        users = self.graph.users()
        for name, spec in list(self.tensors.items()):
            edges = {(name, n.name) for n in users.get(name, ())}
            in_float = spec.role == "activation" and spec.node and name not in self.formats.quantized_outputs
            if in_float and edges and edges <= self.float_edges and name not in self.graph.outputs:
                del self.tensors[name]
                self.float_edges -= edges
                self.floats[name] = "its readers take it in float"

    def _check_listed(self, d: GroupDecision) -> None:
        head, listed = d.group.head, d.group.resolved.rule is not None
        if self.platform.unlisted != "reject" or d.integer or listed or not self.graph.is_float(d.group.tail.output):
            return
        allowed = "the operators that `chipfit platforms show` lists"
        hint = "replace the operator, or choose a platform that runs unlisted ones in float"
        what = f"{head.op} '{head.display_name}' cannot run on '{self.platform.name}'"
        raise UnsupportedError(what, where=head.source, got=d.group.resolved.why, allowed=allowed, hint=hint)

    def _store(self, name: str, role: Role, format_name: str, fmt: Format | None = None, **facts: Any) -> bool:
        """Add a tensor to be quantized; of several readers of a weight the first one decides how, tables last."""
        earlier, node = self.tensors.get(name), facts.get("node", "")
        if earlier is None or (node not in self.tables and earlier.node in self.tables):
            fmt = self.platform.formats[format_name] if fmt is None else fmt
            math = self.platform.math
            facts["rounding"] = math.q_round if role == "activation" else math.w_round or math.q_round
            self.tensors[name] = TensorSpec(name=name, role=role, format_name=format_name, format=fmt, **facts)
        return True

    def _read(self, d: GroupDecision, r: Operand) -> tuple[str, ...]:
        """Add an operand; return the slots in which the group's rules are about it."""
        inner, constant = r.node is not d.group.head, self.graph.is_weight(r.tensor)
        if r.is_data:
            if not self.graph.is_float(r.tensor) or not (self._constant if constant else self._activation)(d, r):
                return ()
            return ("ins",) if inner else (r.slot, "ins")
        if (r.slot in ("w", "b") or (r.slot == "r" and constant)) and not inner:
            return (r.slot,) if self._weight(d, r) else ()
        if constant:
            self.float_edges.add((r.tensor, r.node.name))
        return ()

    def _activation(self, d: GroupDecision, r: Operand) -> bool:
        """Return whether a group reads the quantized values of an activation."""
        stored = r.tensor in self.formats.formats
        if stored and not d.integer and r.tensor not in self.formats.quantized_outputs:
            self.float_edges.add((r.tensor, r.node.name))
        return stored and d.integer

    def _constant(self, d: GroupDecision, r: Operand) -> bool:
        """Add a constant in a data slot, in the format of data; return whether the group reads it quantized."""
        if not d.integer:
            self.float_edges.add((r.tensor, r.node.name))
            return False
        name = self.formats.formats.get(r.tensor) or (format_of(d.option, r.slot) if d.option else None)
        if name == "any" and d.option is not None:
            name = d.option.w
        if name is None or name in NO_FORMAT:
            return False
        wide = [k for k, size in enumerate(self.graph.shape(r.tensor)) if size != 1]
        axis = wide[0] if self.platform.formats[name].per == "channel" and len(wide) == 1 else None
        return self._store(r.tensor, "weight", name, axis=axis, node=r.node.name)

    def _weight(self, d: GroupDecision, r: Operand) -> bool:
        """Add a weight or bias; return whether the group reads it quantized."""
        is_bias, node = r.slot == "b", r.node
        choices = {} if is_bias else d.group.choices
        name = None if d.option is None else d.option.b if is_bias else d.option.w
        if name is None or name in NO_FORMAT:
            if self.graph.is_weight(r.tensor) and self.graph.is_float(r.tensor):
                by = "overrides keep it" if choices.get("bits") == "float" else "the platform stores it"
                self.floats.setdefault(r.tensor, f"{by} in float" if d.integer else "its operator runs in float")
                self.float_edges.add((r.tensor, node.name))
            return False
        fmt = self.platform.formats[name]
        fmt = constrain_format(fmt, layer=d.group.layer, method=choices.get("weight_method"), per=choices.get("per"))
        axis = block = gates = None
        if fmt.per == "channel":
            axis = 0 if is_bias else self._channel_axis(r)
        elif fmt.per == "gate":
            axis, gates = 0, len(node.attrs["gates"])
        elif fmt.per == "block" and (blocks := blocks_of(fmt, node.op, self.graph.shape(r.tensor))):
            axis, block = blocks
        role: Role = "bias" if is_bias else "weight"
        facts = {"axis": axis, "block": block, "gates": gates, "rule": choices.get("weight_rule")}
        return self._store(r.tensor, role, name, fmt, node=node.name, **facts)

    def _channel_axis(self, r: Operand) -> int:
        """Return the channel axis of a weight; if an embedding shares it with a linear layer, that of the layer."""
        readers = [n for n in self.graph if n.operand("w") == r.tensor] if r.node.facts.moves else [r.node]
        op = next((n.op for n in readers if not n.facts.moves), r.node.op)
        return OPS[op].weight_axis % len(self.graph.shape(r.tensor))

    def _write(self, d: GroupDecision, value: str) -> bool:
        """Add a result; return whether the group outputs it quantized."""
        choices, name = d.group.choices, self.formats.formats.get(value)
        if name is None:
            if value in self.graph.values and self.graph.is_float(value):
                why = self.formats.float_values.get(value) or d.why
                self.floats[value] = why or "the platform keeps this result in float"
            return False
        if d.option is not None and d.option.state and value == d.group.tail.outputs[-1]:
            return self._store(value, "activation", name, node=d.group.tail.name, rule="no_clipping")
        facts = _range_choices(choices)
        fmt = self.platform.formats[name]
        fmt = constrain_format(fmt, layer=d.group.layer, method=choices.get("method"), signed=choices.get("signed"))
        self._store(value, "activation", name, fmt, node=d.group.tail.name, **facts)
        return d.integer
