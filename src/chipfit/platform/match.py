"""Find the rule of a platform that governs an operator, or the reason why none does."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.graph.states import keeps_states
from chipfit.operators.table import GROUPS, OPS, words_of
from chipfit.platform.filters import Member
from chipfit.platform.predicates import evaluate
from chipfit.platform.schema import Exec, OpRule, Option, Platform, Rule

Sets = Mapping[str, tuple[Member, ...]]  #: operator set -> its members


@dataclass(frozen=True, slots=True)
class Resolved:
    """The rule and the options of a platform for one operator."""

    rule: OpRule | None  #: the rule that governs it; None if the operator is not listed
    options: tuple[Option, ...]  #: joint formats, best first, whose gates are open
    rules: tuple[Rule, ...]  #: constraints, also of the rules that only add some
    exec: Exec
    why: str = ""  #: why it runs in float
    notes: tuple[str, ...] = ()  #: conditions that cannot be tested on this node; they count as satisfied


def covers(match: tuple[str, ...], words: set[str], *, everything: bool = True) -> bool:
    """Return whether a rule's `match` names one of `words`, directly, by @group, or (if `everything`) by "*"."""
    return any(
        (m == "*" and everything) or m in words or (m.startswith("@") and not words.isdisjoint(GROUPS.get(m, ())))
        for m in match
    )


def sets_of(sets: Sets, op: str, layer_type: str, config: Mapping[str, Any], *, filtered: bool = False) -> set[str]:
    """Return the operator sets of a platform that contain a node, as "@name".

    Sets that name this very layer go before sets that only list its operator.

    Args:
        filtered: return only sets that contain it by a condition on attributes.
    """
    matching = [(s, m) for s, members in sets.items() for m in members if m.match(op, layer_type, config)]
    nearest = min((m.nearness(layer_type) for _, m in matching), default=0)
    near = [(s, m) for s, m in matching if m.nearness(layer_type) == nearest]
    return {f"@{name}" for name, m in near if m.where is not None or not filtered}


def facts(graph: Graph, node: Node) -> dict[str, Any]:
    """Return all that the `where` of a rule can test of a node: its attributes and what follows from shapes."""
    out = {**node.attrs, "config": node.config, "layer_type": node.layer_type}
    data = node.inputs[0] if node.inputs else None
    if data is not None and data in graph.values:
        shape = graph.values[data].shape
        out |= {"in_shape": shape, "static_shape": None not in shape[1:]}
        if len(shape) > 1 and shape[1] is not None:
            out["channels"] = out["in_channels"] = shape[1]
    if node.outputs and node.output in graph.values:
        out["out_shape"] = graph.values[node.output].shape
    w = node.operand("w") if needs_weight(node.op) else None
    if w is not None:
        out["const_weights"] = graph.is_weight(w)
        out["weights"] = "constant" if graph.is_weight(w) else "computed"
        out["weight_elements"] = math.prod(graph.shape(w)) if graph.is_weight(w) else None
        if "stride" in node.attrs:
            out["kernel"] = graph.shape(w)[2:]
    if "mask?" in node.facts.slots:
        out["masked"] = any(node.operand(k) is not None for k in ("mask", "lengths"))
    if "c?" in node.facts.slots:
        out["own_states"] = keeps_states(graph, node)
    return out


def needs_weight(op: str) -> bool:
    """Return whether an operator must have a weight."""
    return op in OPS and "w" in OPS[op].slots


def resolve_node(platform: Platform, graph: Graph, node: Node, *, bits: int = 8) -> Resolved:
    """Return `resolve` for a node of a graph."""
    return resolve(platform, node.op, facts(graph, node), bits=bits, called=node.called)


def runs_in_integers(platform: Platform, graph: Graph, node: Node) -> bool:
    """Return whether the platform has a kernel for a node that reads and writes quantized values, or moves them."""
    return _has_integer_kernel(platform, resolve_node(platform, graph, node))


def _has_integer_kernel(platform: Platform, resolved: Resolved) -> bool:
    if resolved.exec == "follow":
        return resolved.rule is not None
    formats = platform.formats
    return any(o.out in formats and o.ins[0] in formats for o in resolved.options if o.input_mode == "codes")


def dictated_scale(platform: Platform, graph: Graph, node: Node) -> float | None:
    """Return the scale that a platform's integer kernel of a node dictates for the result; None if it is free."""
    if not runs_in_integers(platform, graph, node):
        return None
    return next((r.scale for r in resolve_node(platform, graph, node).rules if r.fix == "out" and r.hard), None)


def lists_in_float(platform: Platform, graph: Graph, node: Node) -> bool:
    """Return whether the platform lists a kernel for a node that reads and writes floats, beside integer ones."""
    return any(o.input_mode == "float" and o.out == "float" for o in resolve_node(platform, graph, node).options)


class IntegerOperators:
    """The operators that a platform may compute in integers, whatever their attributes and shapes."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and _has_integer_kernel(self.platform, resolve(self.platform, op, {}))


def names_operator(platform: Platform, graph: Graph, node: Node) -> bool:
    """Return whether the rule that governs a node names its operator, instead of every operator."""
    rule = resolve_node(platform, graph, node).rule
    words = words_of(node.op, node.attrs) | sets_of(platform.sets, node.op, node.layer_type, node.config)
    return rule is not None and covers(rule.match, words, everything=False)


def resolve(platform: Platform, op: str, attrs: Mapping[str, Any], *, bits: int = 8, called: str = "") -> Resolved:
    """Return the rule that governs an operator on a platform: the first that names it and whose conditions hold.

    Operator sets that contain this very layer, by a condition on its attributes, go before rules for its operator;
    rules for more general operators (`OPS[op].case_of`) come last.

    Args:
        op: canonical operator.
        attrs: its attributes and what follows from shapes (`facts`).
        bits: activation bits, which gates may test.
        called: the user's name for the operator, if it has no canonical one.
    """
    if op == DYNAMIC:  # part of the kernel that reads its result
        return Resolved(None, (), (), "float", "its range is found each time it runs")
    why = ""
    node = op, attrs.get("layer_type", ""), attrs.get("config") or {}
    own_sets = sets_of(platform.sets, *node, filtered=True)
    cases = OPS[op].case_of if op in OPS else ()
    rounds = [words_of(op, attrs) | sets_of(platform.sets, *node), *({w} for w in cases)]
    for words in [own_sets, *rounds] if own_sets else rounds:
        constraints: list[Rule] = []
        for number, rule in enumerate(platform.ops):
            named = covers(rule.match, words, everything=words is not own_sets)
            if not named or not platform.allows(rule.when, bits=bits):
                continue
            restricts = not rule.use and rule.exec is None  # it only adds conditions to later rules
            broken, unknown = evaluate(rule.where, attrs)
            if broken:
                why = why or f"'{platform.name}' runs {op} only with {broken}; rule ops.{number}"
                if restricts:
                    return Resolved(None, (), (), "float", why)
                continue
            constraints += rule.rules
            if not restricts:
                notes = tuple(f"{platform.name}: whether {k} fits is not known for this {op}" for k in unknown)
                options, why = _options(platform, op, rule, bits)
                return Resolved(rule, options, tuple(constraints), rule.how, why, notes)
    on_cpu = ", which the CPU computes" if platform.unlisted == "cpu" else ""
    how: Exec = "follow" if platform.unlisted == "follow" else "float"
    return Resolved(
        None, (), tuple(constraints), how, why or f"'{platform.name}' lists no rule for {called or op}{on_cpu}"
    )


def _options(platform: Platform, op: str, rule: OpRule, bits: int) -> tuple[tuple[Option, ...], str]:
    """Return the joint formats of a rule that are open and supported, and why the operator runs in float."""
    allowed = [o for o in rule.use if platform.allows(o.when, bits=bits)]
    options = tuple(_with_float_words(platform, o) for o in allowed if not _gap(platform, op, o))
    if allowed and not options:
        gap = _gap(platform, op, allowed[0])
        return (), f"the formats of '{platform.name}' for {op} need {gap}, which chipfit does not support"
    if rule.use and not options:
        return (), f"'{platform.name}' has no formats for {op} on revision {platform.arch_selected}"
    return options, f"'{platform.name}' computes {op} in float" if rule.how == "float" else ""


def as_tuple(name: Any) -> tuple[Any, ...]:
    """Return the formats of an option's slot: one, or one for each data input."""
    return name if isinstance(name, tuple) else (name,)


def _names(option: Option) -> tuple[str | None, ...]:
    return (*as_tuple(option.in_), option.w, option.b, option.out, option.state)


def _gap(platform: Platform, op: str, option: Option) -> str:
    """Return what chipfit does not support in the formats of an option; "" if it supports all."""
    formats, ins = platform.formats, as_tuple(option.in_)
    for n in _names(option):
        if n in formats and formats[n].gap:
            return formats[n].gap
    if any(n in formats and formats[n].dynamic for n in (option.w, option.b, option.out, *ins[1:])):
        return "ranges computed at run time of other tensors than the first operand"
    if op not in ("Linear", "MatMul") and any(
        n in formats and formats[n].dynamic and formats[n].per != "tensor" for n in ins
    ):
        return f"dynamic ranges for parts of the input of {op}"
    static = (n for n in (option.out, option.b, *ins) if n in formats and not formats[n].dynamic)
    return "scales per block of activations" if any(formats[n].per == "block" for n in static) else ""


def _with_float_words(platform: Platform, option: Option) -> Option:
    """Return an option with the word "float" for formats of 16- or 32-bit floating point, and for dynamic data."""
    if option.ins and option.ins[0] in platform.formats and platform.formats[option.ins[0]].dynamic:
        option = option.with_dynamic(option.ins[0])
    floats = {n for n in _names(option) if n in platform.formats and platform.formats[n].is_float}
    if not floats:
        return option

    def plain(name: Any) -> Any:
        return tuple(map(plain, name)) if isinstance(name, tuple) else "float" if name in floats else name

    return option.model_copy(update={slot: plain(getattr(option, slot)) for slot in ("in_", "w", "b", "out")})


def fusions(platform: Platform) -> tuple[tuple[frozenset[str], ...], ...]:
    """Return the platform's fusions as chains of operator alternatives, groups expanded, in the order of the file."""

    def alternatives(m: str) -> Iterable[str]:
        members = platform.sets.get(m.removeprefix("@")) if m.startswith("@") else None
        if members is None:
            return GROUPS.get(m, (m,))
        bare = [o for member in members if member.bare for o in member.op]
        return (*bare, m) if any(not member.bare for member in members) else tuple(bare)

    return tuple(
        tuple(frozenset(n for m in step for n in alternatives(m)) for step in f.steps)
        for f in platform.fuse
        if platform.allows(f.when) and f.when.get("phase") != "qat"
    )
