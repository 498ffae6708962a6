"""Groups of fused nodes: what runs as one kernel on the chip. Only tensors between groups are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chipfit.decide.overrides import NodeOverrides, merge_overrides
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS
from chipfit.platform.match import Resolved, as_tuple, resolve_node, sets_of
from chipfit.platform.schema import Format, OpRule, Option, Platform, Rule

NodeGroups = Sequence[tuple[str, ...]]  #: names of the nodes of each group
#: words that may stand in an option where a format name may stand
NO_FORMAT = ("float", "none", "any", None)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a group reads from outside itself."""

    node: Node  #: of the group
    slot: str  #: as `Graph.slots` names it
    tensor: str

    @property
    def is_data(self) -> bool:
        """True for an activation, or a constant in the place of one."""
        return self.slot.startswith("in")


@dataclass(frozen=True, slots=True)
class FusedGroup:
    """Nodes that run as one kernel, or a lone node."""

    nodes: tuple[Node, ...]
    operands: tuple[Operand, ...]
    resolved: Resolved
    choices: Mapping[str, Any]  #: the user's overrides: "float" with a reason, or `overrides.CHOICES`

    @property
    def head(self) -> Node:
        return self.nodes[0]

    @property
    def tail(self) -> Node:
        return self.nodes[-1]

    @property
    def layer(self) -> str:
        """The name of the group's first node, as the user knows it."""
        return self.head.display_name

    @property
    def float_reason(self) -> str:
        """The reason why the user keeps the group in float; "" for all other groups."""
        return str(self.choices.get("float", ""))

    @property
    def is_pass_through(self) -> bool:
        """True if it moves quantized values without arithmetic, in the format of its input."""
        return self.resolved.exec == "follow"

    @property
    def reads_anything(self) -> bool:
        """True if it reads data of any format, so that its result may have other bits than its data."""
        options = self.resolved.options
        return bool(options) and all(f == "any" for o in options for f in as_tuple(o.in_))

    @property
    def data(self) -> list[str]:
        """The tensors of its data operands."""
        return [r.tensor for r in self.operands if r.is_data]

    def data_formats(self, option: Option) -> dict[str, Any]:
        """Return data tensor -> the option's format for it; the format of the first operand if it is read twice."""
        out: dict[str, Any] = {}
        for r in self.operands:
            if r.is_data:
                out.setdefault(r.tensor, format_of(option, r.slot))
        if option.state:  # the states of a layer that keeps its own, where they are inputs of the model
            given = {"h": option.out, "c": option.state}
            out |= {r.tensor: given[r.slot] for r in self.operands if r.slot in given}
        return out

    def with_options(self, options: Sequence[Option], **changes: Any) -> FusedGroup:
        return replace(self, resolved=replace(self.resolved, options=tuple(options), **changes))


def blocks_of(fmt: Format, op: str, shape: Sequence[int | None]) -> tuple[int, int] | None:
    """Return (axis, length) of the blocks of a matrix that share a scale; None if no block length divides the axis.

    Blocks lie along the axis that products are summed over; in an embedding table, along each row.
    """
    if len(shape) != 2:
        return None
    axis = 1 if OPS[op].moves else 1 - OPS[op].weight_axis % 2
    block = block_length(fmt, shape[axis])
    return (axis, block) if block else None


def block_length(fmt: Format, size: int | None) -> int | None:
    """Return the first block length of a format that divides an axis of this size; None if there is none."""
    lengths = fmt.block if isinstance(fmt.block, tuple) else (fmt.block,)
    return next((b for b in lengths if b and size and size % b == 0), None)


def format_of(option: Option, slot: str) -> Any:
    """Return the option's format for a data slot; the last one listed serves all further slots."""
    formats, number = as_tuple(option.in_), slot.removeprefix("in")
    return formats[min(int(number), len(formats) - 1)] if number.isdecimal() else formats[0]


def same_fields(a: Format, b: Format, *fields: str) -> bool:
    """Return whether two formats agree in all of `fields`."""
    return all(getattr(a, f) == getattr(b, f) for f in fields)


def variant_with_bits(platform: Platform, name: Any, bits: int) -> Any:
    """Return the platform's format that differs from `name` in its bits alone; `name` if there is none."""
    if not isinstance(name, str) or name in NO_FORMAT:
        return name
    mine, fixed = platform.formats[name], ("kind", "zero", "scale", "per")
    return next((k for k, f in platform.formats.items() if f.bits == bits and same_fields(f, mine, *fixed)), name)


def find_groups(graph: Graph, platform: Platform, fused: NodeGroups, overrides: NodeOverrides) -> list[FusedGroup]:
    """Return the groups in execution order; a group stands at its last node, when all that it reads exists.

    Args:
        fused: names of the nodes that run as one kernel, from `passes.fuse`.
        overrides: node name -> choices, in the order given: of two choices for one group the later one wins.
    """
    nodes = {n.name: n for n in graph.nodes}
    group_at = {names[-1]: names for names in fused}
    inner = {name for names in fused for name in names[:-1]}
    users, outer_rules = graph.users(), _rules_of_outer_layers(graph, platform)
    order = {name: k for k, name in enumerate(overrides)}
    groups = []
    for node in graph.nodes:
        if node.name in inner:
            continue
        names = group_at.get(node.name, (node.name,))
        choices: dict[str, Any] = {}
        for name in sorted((n for n in names if n in order), key=order.__getitem__):
            choices = merge_overrides(choices, overrides[name])
        group = _group(graph, platform, tuple(nodes[n] for n in names), choices)
        if _is_inner_step(graph, platform, group, users.get(group.tail.output, ())):
            rules = tuple(r for r in group.resolved.rules if r.fix not in ("out", "outs"))
            group = replace(group, resolved=replace(group.resolved, rules=rules))
        if group.tail.name in outer_rules:
            group = _with_result_of_layer(group, outer_rules[group.tail.name])
        groups.append(group)
    return _with_first_last_bits(platform, groups)


def _rules_of_outer_layers(graph: Graph, platform: Platform) -> dict[str, OpRule]:
    """Return the last nodes of layers that hold others -> the rule of the operator set that names the layer.

    Raises:
        UnsupportedError: the rule dictates the scale of the result, and no node of the layer is left to compute it.
    """
    named = [(m, f"@{name}") for name, members in platform.sets.items() for m in members if m.type and not m.op]
    users = graph.users() if named else {}
    out: dict[str, OpRule] = {}
    for path, (kind, config) in graph.outer_layers.items() if named else ():
        held = (s for m, s in named if m.type == kind and (m.where is None or m.where.match(config)))
        own = next(held, None)
        rule = next((r for r in platform.ops if own in r.match), None)
        if own is None or rule is None:
            continue
        nodes = {n.name: n for n in graph.nodes_in(path)}
        outside = {o for n in nodes.values() for o in n.outputs if any(u.name not in nodes for u in users.get(o, ()))}
        last = [n for n in nodes.values() if not outside.union(graph.outputs).isdisjoint(n.outputs)]
        if not last and any(r.fix == "out" for r in rule.rules):
            what = f"The scale that '{platform.name}' dictates for '{path}' ({kind}) has no tensor: rewrites removed it"
            raise UnsupportedError(what, hint="turn the rewrite off, or attach the operator set to another layer")
        inside = (n for n in last if own not in sets_of(platform.sets, n.op, n.layer_type, n.config))
        out |= dict.fromkeys((n.name for n in inside), rule)
    return out


def _with_result_of_layer(group: FusedGroup, rule: OpRule) -> FusedGroup:
    """Return the group with the result that the rule of a layer around it demands."""
    own = group.resolved
    merged = with_result_of(own, Resolved(rule, tuple(rule.use), rule.rules, rule.how))
    writers_quantize = bool(own.options) and own.options[0].in_ == "any"
    return replace(group, resolved=merged if writers_quantize else replace(merged, options=own.options))


def _group(graph: Graph, platform: Platform, nodes: tuple[Node, ...], choices: Mapping[str, Any]) -> FusedGroup:
    wanted = choices.get("activation_bits")
    bits = wanted if isinstance(wanted, int) else 8
    resolved = resolve_node(platform, graph, nodes[0], bits=bits)
    if len(nodes) > 1 and resolved.options and resolved.options[0].in_ == "any":
        resolved = with_result_of(resolved, resolve_node(platform, graph, nodes[-1], bits=bits))
    made = {o for n in nodes for o in n.outputs}
    operands = tuple(Operand(n, slot, t) for n in nodes for slot, t in graph.slots(n) if t not in made)
    return FusedGroup(nodes, operands, resolved, choices)


def _is_inner_step(graph: Graph, platform: Platform, group: FusedGroup, readers: Sequence[Node]) -> bool:
    """Return whether a group is an inner step of a layer that an operator set names as a whole, not its last one."""
    rule, here = group.resolved.rule, (group.head.layer, group.head.layer_type, group.head.source)
    sets = [platform.sets[m[1:]] for m in (rule.match if rule else ()) if m[1:] in platform.sets]
    named = any(m.op == () and m.type == group.head.layer_type for members in sets for m in members)
    inner = all((n.layer, n.layer_type, n.source) == here for n in readers)
    return named and inner and bool(readers) and group.tail.output not in graph.outputs


def with_result_of(head: Resolved, tail: Resolved) -> Resolved:
    """Return the head's options and rules with the tail's result, where quantizers belong to operators that write."""

    def is_about_result(r: Rule) -> bool:
        return r.fix == "out" or r.zero == "out" or "out" in (r.scale_product or {})

    results = [t.out for t in tail.options] or ["none"]
    options = list[Option]()
    for option in (o.model_copy(update={"out": out}) for o in head.options for out in results):
        options += [option] * (option not in options)
    rules = [r for r in head.rules if not is_about_result(r)] + [r for r in tail.rules if is_about_result(r)]
    return replace(head, options=tuple(options), rules=tuple(rules))


def _with_first_last_bits(platform: Platform, groups: list[FusedGroup]) -> list[FusedGroup]:
    """Give the first and the last group with weights the bits of `place.first_last`, unless the user chose theirs."""
    rule = platform.place.first_last
    weighted = [k for k, g in enumerate(groups) if g.resolved.options and g.resolved.options[0].w] if rule else []
    if not rule or not weighted:
        return groups
    out, bits = list(groups), rule["bits"]
    named = {"in_" if s.startswith("in") else s.removesuffix("s") for s in rule.get("slots", ("w", "ins", "outs"))}
    by_user = {"w": "bits", "in_": "activation_bits", "out": "activation_bits"}
    for k in {weighted[0], weighted[-1]}:
        options = groups[k].resolved.options
        slots = [s for s in named if groups[k].choices.get(by_user.get(s, "")) is None]
        changes = [{s: variant_with_bits(platform, getattr(o, s), bits) for s in slots} for o in options]
        out[k] = groups[k].with_options([o.model_copy(update=c) for o, c in zip(options, changes, strict=True)])
    return out
