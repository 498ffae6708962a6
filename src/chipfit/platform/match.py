"""Which rule of a platform governs an operator, and why none does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chipfit.graph.ops import OPS, words_of
from chipfit.platform.load import groups
from chipfit.platform.schema import OpRule, Option, Platform, Rule
from chipfit.platform.where import judge


@dataclass(frozen=True, slots=True)
class Resolved:
    """The answer of a platform about one operator."""

    rule: OpRule | None  #: the rule that won; None when the operator is not listed
    options: tuple[Option, ...]  #: joint formats, best first, gates applied
    rules: tuple[Rule, ...]  #: constraints, those of fall-through rules included
    exec: str  #: "int", "float", "table" or "follow"
    why: str = ""  #: why it runs in float
    notes: tuple[str, ...] = ()  #: conditions of the rule that this node does not tell; they count as satisfied


def covers(match: tuple[str, ...], words: set[str], *, everything: bool = True) -> bool:
    """Whether a rule's `match` names one of `words`, directly, by @group, or (where `everything` counts) by "*"."""
    return any(
        (m == "*" and everything) or m in words or (m.startswith("@") and not words.isdisjoint(groups().get(m, ())))
        for m in match
    )


def sets_of(
    platform: Platform, op: str, layer_type: str, config: Mapping[str, Any], *, filtered: bool = False
) -> set[str]:
    """The platform's own operator sets that a node belongs to, as "@name"; with `filtered`, only by a condition on attributes."""
    return {
        f"@{name}"
        for name, members in platform.sets.items()
        if any(m.match(op, layer_type, config) for m in members if m.where is not None or not filtered)
    }


def resolve(platform: Platform, op: str, attrs: Mapping[str, Any], *, bits: int = 8) -> Resolved:
    """The rule that governs an operator on a platform.

    Args:
        op: canonical operator.
        attrs: its attributes and facts derived from shapes (`assign.facts`).
        bits: activation bits that gates may ask for.
    """
    why = ""
    who = op, attrs.get("layer_type", ""), attrs.get("config") or {}
    conditioned = sets_of(
        platform, *who, filtered=True
    )  # a set that names this very layer goes before one that names its operator
    words_in_turn = [conditioned] * bool(conditioned) + [
        words_of(op, attrs) | sets_of(platform, *who),
        *({w} for w in (OPS[op].case_of if op in OPS else ())),
    ]
    for words in words_in_turn:
        extra: list[Rule] = []
        for number, rule in enumerate(platform.ops):
            if not covers(rule.match, words, everything=words is not conditioned) or not platform.allows(
                rule.when, bits=bits
            ):
                continue
            broken, unknown = judge(rule.where, attrs)
            if broken:
                why = why or f"'{platform.name}' runs {op} only with {broken}; rule ops.{number}"
                if not rule.use and rule.exec is None:  # it restricts all rules below
                    return Resolved(None, (), (), "float", why)
                continue
            extra += rule.rules
            if not rule.use and rule.exec is None:
                continue
            allowed = [o for o in rule.use if platform.allows(o.when, bits=bits)]
            options = tuple(_in_plain_words(platform, o) for o in allowed if not _gap(platform, o))
            notes = tuple(f"{platform.name}: whether {k} fits is not known for this {op}" for k in unknown)
            said = "" if rule.how != "float" else f"'{platform.name}' computes {op} in float"
            if allowed and not options:
                said = f"the formats of '{platform.name}' for {op} need {_gap(platform, allowed[0])}, which chipfit cannot decide yet"
            elif rule.use and not options:
                said = f"'{platform.name}' has no formats for {op} on revision {platform.arch_selected}"
            return Resolved(rule, options, tuple(extra), rule.how, said, notes)
    fallback = {"float": "float", "cpu": "float", "reject": "float", "follow": "follow"}[platform.unlisted]
    return Resolved(None, (), tuple(extra), fallback, why or f"'{platform.name}' lists no rule for {op}")


def _names(option: Option) -> tuple[str | None, ...]:
    return (*(option.in_ if isinstance(option.in_, tuple) else (option.in_,)), option.w, option.b, option.out)


def _gap(platform: Platform, option: Option) -> str:
    """What chipfit cannot decide yet about the formats of an option; "" when it can."""
    return next((gap for n in _names(option) if n in platform.formats and (gap := platform.formats[n].gap)), "")


def _in_plain_words(platform: Platform, option: Option) -> Option:
    """Formats that are 16- or 32-bit floating point become the word "float"."""
    floats = {n for n in _names(option) if n in platform.formats and platform.formats[n].is_float}
    if not floats:
        return option
    plain = lambda n: "float" if n in floats else n  # noqa: E731 -- one word
    ins = tuple(map(plain, option.in_)) if isinstance(option.in_, tuple) else plain(option.in_)
    return option.model_copy(update={"in_": ins, "w": plain(option.w), "b": plain(option.b), "out": plain(option.out)})


def fusions(platform: Platform) -> tuple[tuple[frozenset[str], ...], ...]:
    """The platform's fusions as chains of operator alternatives, groups expanded, in the file's order."""

    def alternatives(m: str) -> tuple[str, ...]:
        members = platform.sets.get(m.removeprefix("@")) if m.startswith("@") else None
        if members is None:
            return groups().get(m, (m,))
        bare = [o for member in members if member.bare for o in member.op]
        return (*bare, m) if any(not member.bare for member in members) else tuple(bare)

    return tuple(
        tuple(frozenset(n for m in step for n in alternatives(m)) for step in f.steps)
        for f in platform.fuse
        if platform.allows({k: v for k, v in f.when.items() if k == "arch"})
    )
