"""Which rule of a platform governs an operator, and why none does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chipfit.graph.ops import ALIASES
from chipfit.platform.load import groups
from chipfit.platform.schema import OpRule, Option, Platform, Rule

#: platform words for attributes that our nodes spell otherwise
_ATTRIBUTE = {"size": "kernel"}


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answer of a platform about one operator."""

    rule: OpRule | None  #: the rule that won; None when the operator is not listed
    options: tuple[Option, ...]  #: joint formats, best first, gates applied
    rules: tuple[Rule, ...]  #: constraints, those of fall-through rules included
    exec: str  #: "int", "float", "table" or "follow"
    why: str = ""  #: why no rule, or not the first one, applies


def names_of(op: str, attrs: Mapping[str, Any]) -> set[str]:
    """Every word that a platform file may use for this operator: its canonical name and aliases that fit."""
    words = {op}
    if op == "Relu6":
        words.add("Clamp")
    for alias, (canonical, needed) in ALIASES.items():
        if canonical == op and all(attrs.get(k) == v for k, v in needed.items()):
            words.add(alias)
    return words


def covers(match: tuple[str, ...], words: set[str]) -> bool:
    """Whether a rule's `match` names one of `words`, directly, by @group, or by "*"."""
    return any(m == "*" or m in words or (m.startswith("@") and not words.isdisjoint(groups()[m])) for m in match)


def refusal(where: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
    """Why attributes break a rule's `where`; "" when they satisfy it or cannot be judged."""
    for key, want in where.items():
        got = attrs.get(key, attrs.get(_ATTRIBUTE.get(key, key)))
        if got is None:
            continue
        values = list(got) if isinstance(got, (tuple, list)) else [got]
        if isinstance(want, dict):
            for test, bound in want.items():
                bound = attrs.get(bound, bound) if isinstance(bound, str) else bound
                ok = {
                    "eq": lambda v, b=bound: v == b,
                    "in": lambda v, b=bound: v in b,
                    "min": lambda v, b=bound: v >= b,
                    "max": lambda v, b=bound: v <= b,
                    "multiple": lambda v, b=bound: v % b == 0,
                }.get(test)
                if ok and all(isinstance(v, (int, float, str, bool)) for v in values) and not all(ok(v) for v in values):
                    return f"{key} must be {test} {bound} (got {got})"
            continue
        if want == "equal_xy":
            if len(set(values)) > 1:
                return f"{key} must be equal in x and y (got {got})"
            continue
        allowed = want if isinstance(want, (list, tuple)) else [want]
        allowed = [attrs.get(a, a) if isinstance(a, str) else a for a in allowed]
        if key in ("padding", "fused_activation", "axis"):
            continue  # stated in words that depend on the layout; the writer of that format checks it
        if got not in allowed and not all(v in allowed for v in values):
            return f"{key} must be {' or '.join(map(str, allowed))} (got {got})"
    return ""


def resolve(platform: Platform, op: str, attrs: Mapping[str, Any], *, bits: int = 8) -> Resolved:
    """The rule that governs an operator on a platform.

    Args:
        op: canonical operator.
        attrs: its attributes and facts derived from shapes (`assign.facts`).
        bits: activation bits that gates may ask for.
    """
    words, why = names_of(op, attrs), ""
    extra: list[Rule] = []
    for rule in platform.ops:
        if not covers(rule.match, words) or not platform.allows(rule.when, bits=bits):
            continue
        broken = refusal(rule.where, attrs)
        if broken:
            why = why or f"'{platform.name}' runs {op} only where {broken}"
            continue
        extra += rule.rules
        if not rule.use and rule.exec is None:
            continue
        options = tuple(o for o in rule.use if platform.allows(o.when, bits=bits))
        return Resolved(rule, options, tuple(extra), rule.how, "" if rule.how != "float" else f"'{platform.name}' computes {op} in float")
    fallback = {"float": "float", "cpu": "float", "reject": "float", "follow": "follow"}[platform.unlisted]
    return Resolved(None, (), tuple(extra), fallback, why or f"'{platform.name}' lists no rule for {op}")


def fusions(platform: Platform) -> tuple[tuple[frozenset[str], ...], ...]:
    """The platform's fusions as chains of operator alternatives, groups expanded, in the file's order.

    A branched pattern becomes the chain along its edges; its free input may come from anywhere.
    """
    out = []
    for f in platform.fuse:
        if f.chain is not None:
            steps: list[Any] = list(f.chain)
        else:
            assert f.graph is not None  # the schema demands one of the two
            nodes = {k: [v] if isinstance(v, str) else v for k, v in f.graph["nodes"].items()}
            follows = {a: b.partition(".")[0] for a, b in f.graph["edges"]}
            at = next(n for n in nodes if n not in follows.values())
            steps = [nodes[at]]
            while at in follows:
                at = follows[at]
                steps.append(nodes[at])
        if platform.allows({k: v for k, v in f.when.items() if k == "arch"}):
            out.append(tuple(frozenset(n for m in step for n in groups().get(m, (m,))) for step in steps))
    return tuple(out)
