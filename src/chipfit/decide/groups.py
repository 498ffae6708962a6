"""Units: what runs as one kernel on the chip, a fused group or a lone node. Only tensors between units are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chipfit.decide.overrides import merge_overrides
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS
from chipfit.platform.match import Resolved, as_tuple, resolve_node
from chipfit.platform.schema import Format, Option, Platform, Rule

#: words of an option that name no format: whatever has one of them takes none from it
NO_FORMAT = ("float", "none", "any", None)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a unit reads from outside itself."""

    node: Node  #: of the unit
    slot: str  #: as `Graph.slots` names it
    tensor: str

    @property
    def is_data(self) -> bool:
        """It is an operand: an activation, or a constant that stands in the place of one."""
        return self.slot.startswith("in")


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """A fused group or a lone node."""

    nodes: tuple[Node, ...]
    operands: tuple[Operand, ...]
    resolved: Resolved
    choices: Mapping[str, Any]  #: what the user decided about it: "float" with a reason, or `overrides.CHOICES`

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def tail(self) -> Node:
        return self.nodes[-1]

    @property
    def who(self) -> str:
        return self.head.who

    @property
    def float_reason(self) -> str:
        """Why the user keeps it in float; "" for all others."""
        return str(self.choices.get("float", ""))

    @property
    def is_pass_through(self) -> bool:
        """It moves codes without arithmetic: it takes the format of what it reads."""
        return self.resolved.exec == "follow"

    @property
    def data(self) -> list[str]:
        """Its operands."""
        return [r.tensor for r in self.operands if r.is_data]

    def data_formats(self, option: Option) -> dict[str, Any]:
        """Operand -> the word of `option` for it; of an operand that is read twice, for the first time."""
        out: dict[str, Any] = {}
        for r in self.operands:
            if r.is_data:
                out.setdefault(r.tensor, format_of(option, r.slot))
        return out

    def with_options(self, options: Sequence[Option], **changes: Any) -> FusedGroup:
        return replace(self, resolved=replace(self.resolved, options=tuple(options), **changes))


def blocks_of(fmt: Format, op: str, shape: Sequence[int | None]) -> tuple[int, int] | None:
    """Along which axis of a matrix blocks lie that share a scale, and of how many numbers; None where none fit.

    They divide what one sum of products runs over; of a table whose rows are picked, the row.
    """
    if len(shape) != 2:
        return None
    axis = 1 if OPS[op].moves else 1 - OPS[op].weight_axis % 2
    block = block_of(fmt, shape[axis])
    return (axis, block) if block else None


def block_of(fmt: Format, size: int | None) -> int | None:
    """The first of a format's sizes of blocks that divides an axis; None where none does, or there are none."""
    sizes = fmt.block if isinstance(fmt.block, tuple) else (fmt.block,)
    return next((b for b in sizes if b and size and size % b == 0), None)


def format_of(option: Option, slot: str) -> Any:
    """The word of an option for a data slot; of several the last one serves the remaining slots."""
    formats, number = as_tuple(option.in_), slot.removeprefix("in")
    return formats[min(int(number), len(formats) - 1)] if number.isdecimal() else formats[0]


def same_fields(a: Format, b: Format, *fields: str) -> bool:
    """Whether two formats have the same `fields`."""
    return all(getattr(a, f) == getattr(b, f) for f in fields)


def find_groups(
    graph: Graph, platform: Platform, groups: Sequence[tuple[str, ...]], overrides: Mapping[str, Mapping[str, Any]]
) -> list[FusedGroup]:
    """The units in execution order. Each stands where its last node stands: all that it reads exists by then."""
    nodes = {n.name: n for n in graph.nodes}
    group_at = {g[-1]: g for g in groups}
    inner = {name for g in groups for name in g[:-1]}
    users = graph.users()
    turn = {name: k for k, name in enumerate(overrides)}  # the last word on a group wins
    units = []
    for node in graph.nodes:
        if node.name in inner:
            continue
        names = group_at.get(node.name, (node.name,))
        choices: dict[str, Any] = {}
        for name in sorted((n for n in names if n in turn), key=turn.__getitem__):
            choices = merge_overrides(choices, overrides[name])
        unit = _unit(graph, platform, tuple(nodes[n] for n in names), choices)
        if _inside(graph, platform, unit, users.get(unit.tail.output, ())):
            free = tuple(r for r in unit.resolved.rules if r.fix not in ("out", "outs"))
            unit = replace(unit, resolved=replace(unit.resolved, rules=free))
        units.append(unit)
    return _first_and_last(platform, units)


def _unit(graph: Graph, platform: Platform, nodes: tuple[Node, ...], choices: Mapping[str, Any]) -> FusedGroup:
    asked = choices.get("activation_bits")
    bits = asked if isinstance(asked, int) else 8
    resolved = resolve_node(platform, graph, nodes[0], bits=bits)
    if len(nodes) > 1 and resolved.options and resolved.options[0].in_ == "any":
        resolved = _with_tail(resolved, resolve_node(platform, graph, nodes[-1], bits=bits))
    made = {o for n in nodes for o in n.outputs}
    reads = tuple(Operand(n, slot, tensor) for n in nodes for slot, tensor in graph.slots(n) if tensor not in made)
    return FusedGroup(nodes, reads, resolved, choices)


def _inside(graph: Graph, platform: Platform, unit: FusedGroup, readers: Sequence[Node]) -> bool:
    """It is a step of a layer or function that a set names as a whole, and not the one that gives its result."""
    rule, here = unit.resolved.rule, (unit.head.layer, unit.head.layer_type, unit.head.source)
    sets = [platform.sets[m[1:]] for m in (rule.match if rule else ()) if m[1:] in platform.sets]
    named = any(m.op == () and m.type == unit.head.layer_type for members in sets for m in members)
    inner = all((n.layer, n.layer_type, n.source) == here for n in readers)
    return named and inner and bool(readers) and unit.tail.output not in graph.outputs


def _with_tail(head: Resolved, tail: Resolved) -> Resolved:
    """Where quantizers belong to the operators that write, a fused group writes what its last operator writes."""

    def about_result(r: Rule) -> bool:
        return r.fix == "out" or r.zero == "out" or "out" in (r.scale_product or {})

    options: list[Option] = []
    for o in head.options:
        for out in [t.out for t in tail.options] or ["none"]:
            option = o.model_copy(update={"out": out})
            options += [option] * (option not in options)
    rules = [r for r in head.rules if not about_result(r)] + [r for r in tail.rules if about_result(r)]
    return replace(head, options=tuple(options), rules=tuple(rules))


def _first_and_last(platform: Platform, units: list[FusedGroup]) -> list[FusedGroup]:
    """First and last weighted units take other bits where the platform says so, and the user does not."""
    rule = platform.place.first_last
    weighted = [k for k, u in enumerate(units) if u.resolved.options and u.resolved.options[0].w] if rule else []
    if not rule or not weighted:
        return units
    out = list(units)
    named = {"in_" if s.startswith("in") else s.removesuffix("s") for s in rule.get("slots", ("w", "ins", "outs"))}
    for k in {weighted[0], weighted[-1]}:
        by_user = {"w": "bits", "in_": "activation_bits", "out": "activation_bits"}
        slots = [s for s in named if units[k].choices.get(by_user.get(s, "")) is None]
        options = units[k].resolved.options
        changes = [{s: variant_with_bits(platform, getattr(o, s), rule["bits"]) for s in slots} for o in options]
        out[k] = units[k].with_options([o.model_copy(update=c) for o, c in zip(options, changes, strict=True)])
    return out


def variant_with_bits(platform: Platform, name: Any, bits: int) -> Any:
    """The platform's format that differs from `name` in bits alone; `name` where there is none."""
    if not isinstance(name, str) or name in NO_FORMAT:
        return name
    mine, alike = platform.formats[name], ("kind", "zero", "scale", "per")
    return next((k for k, f in platform.formats.items() if f.bits == bits and same_fields(f, mine, *alike)), name)
