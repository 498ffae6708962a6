"""Whether overrides did what they say: one that changes nothing is refused; one that a layer does not take is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chipfit.decide.assignment import Assignment, Slot
from chipfit.decide.narrow import method_of
from chipfit.decide.overrides import CHOICES, OF_WEIGHTS, Layers, Overrides, pairs
from chipfit.decide.scales import copies
from chipfit.decide.ties import fixed, tie_groups
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node

#: layers that a note names
_NAMED = 4
#: choice -> what a slot has in its place
_HELD: Mapping[str, Any] = {
    "bits": lambda s: s.format.bits,
    "activation_bits": lambda s: s.format.bits,
    "weight_method": lambda s: method_of(s.format),
    "method": lambda s: method_of(s.format),
    "per": lambda s: s.format.per,
    "signed": lambda s: s.format.signed,
    "weight_rule": lambda s: s.rule,
    "rule": lambda s: s.rule,
    "range": lambda s: s.range,
    "z_threshold": lambda s: s.z_threshold,
}
#: choices about numbers, which say nothing where the platform dictates them
_OF_NUMBERS = ("rule", "range", "z_threshold")


def unheard(graph: Graph, assignment: Assignment, overrides: Overrides) -> list[str]:
    """One note for each choice that some of its layers did not take.

    A choice that a later entry replaces for the same layer is not asked for any more. Filters, which choose layers by
    what they are, may mean layers that cannot take the choice: they are never refused.

    Raises:
        PlanError: none of the layers that an entry names took the choice.
    """
    look, layers, notes = _Look(graph, assignment), Layers(graph), list[str]()
    entries = [(p, {} if c == "float" else dict(c), layers.match(p)) for p, c in pairs(overrides)]
    last = {
        (n.name, k): at for at, (_, choices, nodes) in enumerate(entries) for n in nodes for k in choices or CHOICES
    }
    for at, (pattern, choices, nodes) in enumerate(entries):
        for choice, asked in choices.items():
            meant = [n for n in nodes if last[n.name, choice] == at and look.about(choice, n)]
            why = {n.who: reason for n in meant if asked is not None and (reason := look.reason(choice, asked, n))}
            if not why:
                continue
            if isinstance(pattern, str) and len(why) == len({n.who for n in meant}):
                raise PlanError(
                    f"The override {choice}={asked!r} of '{pattern}' changes nothing",
                    got="; ".join(f"'{who}': {reason}" for who, reason in list(why.items())[:_NAMED]),
                    hint="leave it out, or name a layer that can take it",
                )
            who = ", ".join(f"'{w}' ({reason})" for w, reason in list(why.items())[:_NAMED])
            more = f" and {len(why) - _NAMED} more" if len(why) > _NAMED else ""
            notes.append(f"the override {choice}={asked!r} of '{pattern}' changes nothing for {who}{more}")
    return notes


class _Look:
    """What became of the tensors that choices are about."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.all = graph, assignment
        self.tails = {name: group[-1] for group in assignment.groups for name in group}
        self.nodes = {n.name: n for n in graph.nodes}
        self.dictated = fixed(assignment.bindings)
        self.tied = {name: g for g in tie_groups(assignment.bindings) for name in g}

    def about(self, choice: str, n: Node) -> bool:
        """A choice about weights says nothing about operators without; one about results nothing about integers."""
        if choice in OF_WEIGHTS:
            return any(slot == "w" for slot, _ in self.graph.slots(n))
        return any(self.graph.is_float(o) for o in n.outputs)

    def reason(self, choice: str, asked: Any, n: Node) -> str:
        """Why a layer does not take a choice; "" when it does."""
        if choice in OF_WEIGHTS:
            tensor = next(i for slot, i in self.graph.slots(n) if slot == "w")
        else:
            tensor = self.nodes[self.tails.get(n.name, n.name)].output
        slot = self.all.slots.get(tensor)
        if slot is None or asked == "float":
            return "" if asked == "float" and slot is None else self._float(tensor, n)
        if choice in _OF_NUMBERS and tensor in self.dictated:
            return "the platform dictates its scale"
        if choice in _OF_NUMBERS and any(t in self.dictated for t in self.tied.get(tensor, ())):
            return "it shares a scale that the platform dictates"
        others = [t for t in self.tied.get(tensor, ()) if self._has_range_of_its_own(t)] if choice == "range" else []
        if any(self.all.slots[t].range != slot.range for t in others):
            names = ", ".join(repr(t) for t in others if t != tensor)
            return f"it shares a scale with {names}, whose ranges are part of it"
        return "" if _same(_HELD[choice](slot), asked) else self._other(choice, slot)

    def _has_range_of_its_own(self, tensor: str) -> bool:
        return tensor in self.all.slots and tensor not in copies(self.graph, self.tied[tensor])

    def _float(self, tensor: str, n: Node) -> str:
        if tensor in self.all.slots:
            return "a reader that cannot do without has it stored in codes"
        return self.all.floats.get(tensor) or self.all.nodes[n.name].why or "it is not stored in codes"

    def _other(self, choice: str, slot: Slot) -> str:
        runs = self.all.nodes[slot.node].why if slot.node in self.all.nodes else ""
        return f"it has {_HELD[choice](slot)!r}" + (f", as its readers want: {runs}" if runs else "")


def _same(held: Any, asked: Any) -> bool:
    return bool(tuple(held) == tuple(asked) if isinstance(asked, (list, tuple)) and held is not None else held == asked)
