"""Platform x Graph -> slots: which format every tensor takes, what is tied, and what stays float and why.

No number is decided here: ranges come later, from data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from chipfit.decide.constraints import Constraint
from chipfit.decide.formats import FormatPropagation, GroupDecision
from chipfit.decide.groups import NO_FORMAT, Operand, blocks_of, find_groups, format_of
from chipfit.decide.narrow import constrain_format
from chipfit.decide.options import KEPT_BY_USER, execution_modes, with_applicable_options
from chipfit.decide.readers import formats_wanted_by_consumers, limit_to_consumers
from chipfit.errors import UnsupportedError
from chipfit.graph.float_only import float_only_values
from chipfit.graph.ir import Graph
from chipfit.graph.ops import OPS
from chipfit.plan.record import NodePlan, Role
from chipfit.platform.schema import Format, Platform
from chipfit.quantizers.grids import Grid
from chipfit.ranges import Rule

#: activations of so many bits or fewer get grids, and rewrites, by what their errors do
FEW_BITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that will be quantized, and in which format."""

    name: str
    role: Role
    format_name: str
    format: Format
    axis: int | None = None  #: channel axis when the format is per channel, that of the blocks when it is per block
    block: int | None = None  #: numbers along it that share a scale, when the format is per block
    node: str = ""  #: node that makes (activation) or reads (weight, bias) it; "" for an input of the model
    rule: Rule | None = None  #: range rule that the user chose for it
    z_threshold: float | None = None
    range: tuple[float, float] | None = None  #: known beforehand
    rounding: str | None = None  #: of reals to codes, where the platform says

    def grid(self, signed: bool | None = None) -> Grid:
        """The codes, once signedness is known; see `Format.grid`."""
        return self.format.grid(signed, self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Every decision that needs no data."""

    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)  #: the tensors that will be quantized
    floats: Mapping[str, str] = field(default_factory=dict)  #: float tensors that were candidates -> reason
    nodes: Mapping[str, NodePlan] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()  #: the platform's rules, with the tensors that they are about
    #: (value, node) pairs where that reader takes the value before its quantizer
    float_edges: frozenset[tuple[str, str]] = frozenset()
    groups: tuple[tuple[str, ...], ...] = ()  #: fused groups: node names, in execution order
    quantized_outputs: frozenset[str] = frozenset()  #: values whose producers output quantized values
    #: first node of a kernel with a choice -> what it can do: "codes", "float", "whole"; see `options.execution_modes`
    modes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: nodes whose kernels round what they read themselves, each time they run -> the format
    dynamic: Mapping[str, str] = field(default_factory=dict)

    def with_constraints(self, more: Iterable[Constraint]) -> Assignment:
        """The same with more rules to hold."""
        return replace(self, constraints=(*self.constraints, *more))


def assign(
    graph: Graph,
    platform: Platform,
    groups: Sequence[tuple[str, ...]] = (),
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
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
    asked = [c.get(k) for c in (overrides or {}).values() for k in ("bits", "activation_bits")]
    platform = platform.with_widths({n for n in asked if isinstance(n, int)})
    units = limit_to_consumers(platform, find_groups(graph, platform, groups, overrides or {}))
    by_hand = (o for u in units if u.choices.get("activation_bits") == "float" for o in u.tail.outputs)
    kept = float_only_values(graph) | dict.fromkeys(by_hand, KEPT_BY_USER)
    # where quantizers belong to readers or to writers alone, no kernel hands over what suits its neighbour
    can = {u.head.name: execution_modes(u) for u in units} if platform.place.at == "both" else {}
    # backwards, so that of several layers with impossible bits the last one is named
    units = [u if u.is_pass_through else with_applicable_options(graph, platform, u, kept) for u in reversed(units)][
        ::-1
    ]
    requests = {v: f for v, f in formats_wanted_by_consumers(graph, platform, units).items() if v not in kept}
    formats = FormatPropagation(graph, platform, requests, kept)
    out = _AssignmentBuilder(graph, platform, formats)
    decisions = [formats.decide(u) for u in units]
    for k, decision in enumerate(decisions):
        out.add(decision)
        if k == 0:  # plans list the model's inputs behind the weights of the operator that comes first
            out.add_inputs()
    out.drop_unread()
    return Assignment(
        tensors=out.tensors,
        floats=out.floats,
        nodes=out.nodes,
        constraints=tuple(out.constraints),
        float_edges=frozenset(out.float_edges),
        groups=tuple(groups),
        quantized_outputs=frozenset(formats.quantized_outputs),
        modes={d.unit.head.name: e for d in decisions if d.integer and (e := can.get(d.unit.head.name))},
        dynamic={d.unit.head.name: d.option.dynamic for d in decisions if d.option and d.option.dynamic},
    )


@dataclass(slots=True)
class _AssignmentBuilder:
    """An assignment in the making: what the decisions about units mean for tensors."""

    graph: Graph
    platform: Platform
    formats: FormatPropagation
    tensors: dict[str, TensorSpec] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    constraints: list[Constraint] = field(default_factory=list)
    float_edges: set[tuple[str, str]] = field(default_factory=set)

    def add(self, d: GroupDecision) -> None:
        """One unit: its nodes, the tensors that it reads and writes, and its rules about them."""
        unit = d.unit
        self._refuse_unlisted(d)
        for n in unit.nodes:
            group = unit.tail.name if len(unit.nodes) > 1 else ""
            simd = d.option.simd if d.option and n is unit.head else None
            self.nodes[n.name] = NodePlan(
                name=n.name, op=n.op, layer=n.layer, exec=d.exec, group=group, why=d.why, simd=simd
            )
        bound: dict[str, list[str]] = {}
        for r in unit.operands:
            for slot in self._read(d, r):
                bound.setdefault(slot, []).append(r.tensor)
        written = [o for o in unit.tail.outputs if self._write(d, o)]
        if written:
            bound |= {"outs": written, "out": written[:1]}
        if d.integer and bound:
            slots, head = {slot: tuple(tensors) for slot, tensors in bound.items()}, unit.head
            self.constraints.append(
                Constraint(op=head.op, rules=unit.resolved.rules, slots=slots, attrs=dict(head.attrs))
            )

    def add_inputs(self) -> None:
        for name in self.graph.inputs:
            if name in self.formats.of:
                self._store(name, "activation", self.formats.of[name])

    def drop_unread(self) -> None:
        """What nothing on the chip makes codes of, since every reader takes it before it is rounded, is not stored."""
        users = self.graph.users()
        for name, slot in list(self.tensors.items()):
            edges = {(name, n.name) for n in users.get(name, ())}
            in_float = slot.role == "activation" and slot.node and name not in self.formats.quantized_outputs
            if in_float and edges and edges <= self.float_edges and name not in self.graph.outputs:
                del self.tensors[name]
                self.float_edges -= edges
                self.floats[name] = "its readers take it in float"

    def _refuse_unlisted(self, d: GroupDecision) -> None:
        head, listed = d.unit.head, d.unit.resolved.rule is not None
        if self.platform.unlisted != "reject" or d.integer or listed or not self.graph.is_float(d.unit.tail.output):
            return
        allowed = "the operators that `chipfit platforms show` lists"
        hint = "replace the operator, or choose a platform that runs unlisted ones in float"
        what = f"{head.op} '{head.who}' cannot run on '{self.platform.name}'"
        raise UnsupportedError(what, where=head.source, allowed=allowed, hint=hint)

    def _store(self, name: str, role: Role, format_name: str, fmt: Format | None = None, **facts: Any) -> bool:
        """Let a tensor be stored, unless it is already; of several readers the first one says how."""
        if name not in self.tensors:
            fmt = self.platform.formats[format_name] if fmt is None else fmt
            math = self.platform.math
            facts["rounding"] = math.q_round if role == "activation" else math.w_round or math.q_round
            self.tensors[name] = TensorSpec(name=name, role=role, format_name=format_name, format=fmt, **facts)
        return True

    def _read(self, d: GroupDecision, r: Operand) -> tuple[str, ...]:
        """What becomes of a tensor that a unit reads; the slots in which the unit's rules are about it."""
        inner, constant = r.node is not d.unit.head, self.graph.is_weight(r.tensor)
        if r.is_data:
            if not self.graph.is_float(r.tensor) or not (self._constant if constant else self._activation)(d, r):
                return ()
            return ("ins",) if inner else (r.slot, "ins")
        if r.slot in ("w", "b") and not inner:
            return (r.slot,) if self._weight(d, r) else ()
        if constant:
            self.float_edges.add((r.tensor, r.node.name))
        return ()

    def _activation(self, d: GroupDecision, r: Operand) -> bool:
        """Whether a unit reads the codes of an activation."""
        stored = r.tensor in self.formats.of
        if stored and not d.integer and r.tensor not in self.formats.quantized_outputs:
            self.float_edges.add((r.tensor, r.node.name))
        return stored and d.integer

    def _constant(self, d: GroupDecision, r: Operand) -> bool:
        """Whether a unit reads the codes of a constant that stands in a data slot: in the format of data."""
        if not d.integer:
            self.float_edges.add((r.tensor, r.node.name))
            return False
        name = self.formats.of.get(r.tensor) or (format_of(d.option, r.slot) if d.option else None)
        if name == "any" and d.option is not None:
            name = d.option.w
        if name is None or name in NO_FORMAT:
            return False
        wide = [k for k, size in enumerate(self.graph.shape(r.tensor)) if size != 1]
        axis = wide[0] if self.platform.formats[name].per == "channel" and len(wide) == 1 else None
        return self._store(r.tensor, "weight", name, axis=axis, node=r.node.name)

    def _weight(self, d: GroupDecision, r: Operand) -> bool:
        """Whether a unit reads the codes of a weight or bias."""
        is_bias, node = r.slot == "b", r.node
        choices = {} if is_bias else d.unit.choices
        name = None if d.option is None else d.option.b if is_bias else d.option.w
        if name is None or name in NO_FORMAT:
            if self.graph.is_weight(r.tensor) and self.graph.is_float(r.tensor):
                by = "overrides keep it" if choices.get("bits") == "float" else "the platform stores it"
                self.floats.setdefault(r.tensor, f"{by} in float" if d.integer else "its operator runs in float")
                self.float_edges.add((r.tensor, node.name))
            return False
        fmt = self.platform.formats[name]
        fmt = constrain_format(fmt, who=d.unit.who, method=choices.get("weight_method"), per=choices.get("per"))
        axis = block = None
        if fmt.per == "channel":
            axis = 0 if is_bias else self._channels(r)
        elif found := blocks_of(fmt, node.op, self.graph.shape(r.tensor)) if fmt.per == "block" else None:
            axis, block = found
        role: Role = "bias" if is_bias else "weight"
        facts = {"axis": axis, "block": block, "rule": choices.get("weight_rule")}
        return self._store(r.tensor, role, name, fmt, node=node.name, **facts)

    def _channels(self, r: Operand) -> int:
        """The axis of a weight that counts channels: of an embedding that a linear layer shares, that layer's."""
        readers = [n for n in self.graph if n.operand("w") == r.tensor] if OPS[r.node.op].moves else [r.node]
        op = next((n.op for n in readers if not OPS[n.op].moves), r.node.op)
        return OPS[op].weight_axis % len(self.graph.shape(r.tensor))

    def _write(self, d: GroupDecision, value: str) -> bool:
        """Whether a unit writes the codes of a value."""
        unit, name = d.unit, self.formats.of.get(value)
        if name is None:
            if value in self.graph.values and self.graph.is_float(value):
                why = self.formats.kept.get(value) or d.why
                self.floats[value] = why or "the platform keeps this result in float"
            return False
        choices = {k: unit.choices.get(k) for k in ("rule", "z_threshold")}
        known = unit.choices.get("range")
        choices["range"] = None if known is None else tuple(known)
        fmt = self.platform.formats[name]
        fmt = constrain_format(fmt, who=unit.who, method=unit.choices.get("method"), signed=unit.choices.get("signed"))
        self._store(value, "activation", name, fmt, node=unit.tail.name, **choices)
        return d.integer
