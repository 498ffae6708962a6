"""From what every unit does to what every tensor is: stored in which format, float and why, and bound by which rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chipfit.decide.assignment import Assignment, Slot
from chipfit.decide.narrow import narrow
from chipfit.decide.ties import Binding
from chipfit.decide.units import NO_FORMAT, Decision, Read, format_of
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.graph.ops import OPS
from chipfit.plan.record import NodePlan
from chipfit.platform.schema import Format, Platform


def record(
    graph: Graph,
    platform: Platform,
    groups: Sequence[tuple[str, ...]],
    decisions: Sequence[Decision],
    *,
    formats: Mapping[str, str],
    codes: Collection[str],
    kept: Collection[str],
) -> Assignment:
    """Everything that follows from the decisions about the units.

    Args:
        decisions: in execution order.
        formats: value -> format name.
        codes: values that exist on the chip as codes only; all others may also be read before their quantizer.
        kept: values that the user keeps in float.

    Raises:
        UnsupportedError: an operator that the platform rejects, or a format narrower than the platform's is none of it.
    """
    out = _Record(graph, platform, formats, codes, kept)
    for k, decision in enumerate(decisions):
        out.add(decision)
        if k == 0:  # plans list the model's inputs behind the weights of the operator that comes first
            out.add_inputs()
    return Assignment(
        slots=out.slots,
        floats=out.floats,
        nodes=out.nodes,
        bindings=tuple(out.bindings),
        float_edges=frozenset(out.float_edges),
        groups=tuple(groups),
    )


@dataclass(slots=True)
class _Record:
    """An assignment in the making."""

    graph: Graph
    platform: Platform
    formats: Mapping[str, str]
    codes: Collection[str]
    kept: Collection[str]
    slots: dict[str, Slot] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, NodePlan] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    float_edges: set[tuple[str, str]] = field(default_factory=set)

    def add(self, d: Decision) -> None:
        """One unit: its nodes, the tensors that it reads and writes, and its rules about them."""
        unit = d.unit
        self._refuse_unlisted(d)
        for n in unit.nodes:
            self.nodes[n.name] = NodePlan(
                name=n.name,
                op=n.op,
                layer=n.layer,
                exec=d.exec,
                group=unit.tail.name if len(unit.nodes) > 1 else "",
                why=d.why,
                simd=d.option.simd if d.option and n is unit.head else None,
            )
        bound: dict[str, list[str]] = {}
        for r in unit.reads:
            for slot in self._read(d, r):
                bound.setdefault(slot, []).append(r.tensor)
        written = [o for o in unit.tail.outputs if self._write(d, o)]
        if written:
            bound |= {"outs": written, "out": written[:1]}
        if d.integer and bound:
            slots = {slot: tuple(tensors) for slot, tensors in bound.items()}
            self.bindings.append(
                Binding(op=unit.head.op, rules=unit.resolved.rules, slots=slots, attrs=dict(unit.head.attrs))
            )

    def add_inputs(self) -> None:
        for name in self.graph.inputs:
            if name in self.formats:
                self._store(name, "activation", self.formats[name])

    def _refuse_unlisted(self, d: Decision) -> None:
        head, listed = d.unit.head, d.unit.resolved.rule is not None
        if self.platform.unlisted != "reject" or d.integer or listed or not self.graph.is_float(d.unit.tail.output):
            return
        raise UnsupportedError(
            f"{head.op} '{head.who}' cannot run on '{self.platform.name}'",
            where=head.source,
            allowed="the operators that `chipfit platforms show` lists",
            hint="replace the operator, or choose a platform that runs unlisted ones in float",
        )

    def _store(self, name: str, role: str, format_name: str, fmt: Format | None = None, **facts: Any) -> bool:
        """Let a tensor be stored, unless it is already; of several readers the first one says how."""
        if name not in self.slots:
            fmt = self.platform.formats[format_name] if fmt is None else fmt
            self.slots[name] = Slot(name=name, role=role, format_name=format_name, format=fmt, **facts)
        return True

    def _read(self, d: Decision, r: Read) -> tuple[str, ...]:
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

    def _activation(self, d: Decision, r: Read) -> bool:
        """Whether a unit reads the codes of an activation."""
        stored = r.tensor in self.formats
        if stored and not d.integer and r.tensor not in self.codes:
            self.float_edges.add((r.tensor, r.node.name))
        return stored and d.integer

    def _constant(self, d: Decision, r: Read) -> bool:
        """Whether a unit reads the codes of a constant that stands in a data slot: in the format of data."""
        if not d.integer:
            self.float_edges.add((r.tensor, r.node.name))
            return False
        name = self.formats.get(r.tensor) or (format_of(d.option, r.slot) if d.option else None)
        if name == "any" and d.option is not None:
            name = d.option.w
        if name is None or name in NO_FORMAT:
            return False
        wide = [k for k, size in enumerate(self.graph.shape(r.tensor)) if size != 1]
        axis = wide[0] if self.platform.formats[name].per == "channel" and len(wide) == 1 else None
        return self._store(r.tensor, "weight", name, axis=axis, node=r.node.name)

    def _weight(self, d: Decision, r: Read) -> bool:
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
        fmt = narrow(fmt, who=d.unit.who, method=choices.get("weight_method"), per=choices.get("per"))
        axis = None
        if fmt.per == "channel":
            axis = 0 if is_bias else OPS[node.op].weight_axis % len(self.graph.shape(r.tensor))
        return self._store(
            r.tensor,
            "bias" if is_bias else "weight",
            name,
            fmt,
            axis=axis,
            node=node.name,
            rule=choices.get("weight_rule"),
        )

    def _write(self, d: Decision, value: str) -> bool:
        """Whether a unit writes the codes of a value."""
        unit, name = d.unit, self.formats.get(value)
        if name is None:
            if value in self.graph.values and self.graph.is_float(value):
                kept = "overrides keep it in float" if value in self.kept else ""
                self.floats[value] = kept or d.why or "the platform keeps this result in float"
            return False
        choices = {k: unit.choices.get(k) for k in ("rule", "z_threshold", "range")}
        fmt = self.platform.formats[name]
        fmt = narrow(fmt, who=unit.who, method=unit.choices.get("method"), signed=unit.choices.get("signed"))
        self._store(value, "activation", name, fmt, node=unit.tail.name, **choices)
        return d.integer
