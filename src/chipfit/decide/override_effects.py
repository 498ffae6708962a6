"""Whether overrides did what they say: one that changes nothing is refused; one that a layer does not take is said."""

from collections.abc import Callable
from typing import Any

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import dictated_qparams, tie_groups
from chipfit.decide.narrow import method_of
from chipfit.decide.overrides import CHOICES, OF_WEIGHTS, Layers, Overrides, override_entries
from chipfit.decide.scales import copies
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.platform.schema import Platform

#: layers that a message names
_NAMED = 4


def unapplied_overrides(graph: Graph, assignment: Assignment, overrides: Overrides | None) -> list[str]:
    """One note for each choice that some of its layers did not take.

    A choice that a later entry replaces for the same layer is not asked for any more. Filters, which choose layers by
    what they are, may mean layers that cannot take the choice: they are never refused.

    Raises:
        PlanError: none of the layers that an entry names took the choice.
    """
    reason, layers, notes = _reasons(graph, assignment), Layers(graph), list[str]()
    entries = [(p, {} if c == "float" else dict(c), layers.match(p)) for p, c in override_entries(overrides)]
    last = {(n.name, k): at for at, (_, own, nodes) in enumerate(entries) for n in nodes for k in own or CHOICES}
    for at, (pattern, choices, nodes) in enumerate(entries):
        for choice, asked in choices.items():
            found = {n.who: reason(choice, asked, n) for n in nodes if asked is not None and last[n.name, choice] == at}
            found = {who: why for who, why in found.items() if why is not None}  # those that it is about
            deaf = [f"'{who}' ({why})" for who, why in found.items() if why]
            if deaf:
                more = f" and {len(deaf) - _NAMED} more" if len(deaf) > _NAMED else ""
                notes.append(f"the override {choice}={asked!r} of '{pattern}' changes nothing for ")
                notes[-1] += ", ".join(deaf[:_NAMED]) + more
            if deaf and isinstance(pattern, str) and len(deaf) == len(found):
                hint = "leave it out, or name a layer that can take it"
                raise PlanError(notes[-1][0].upper() + notes[-1][1:], hint=hint)
    return notes


def _reasons(graph: Graph, assignment: Assignment) -> Callable[[str, Any, Node], str | None]:
    """f(choice, what is asked, node): why the node does not take it; "" when it does, None where it says nothing."""
    tails = {name: group[-1] for group in assignment.groups for name in group}
    nodes = assignment.nodes
    made, slots, dictated = (
        {n.name: n.output for n in graph.nodes},
        assignment.tensors,
        dictated_qparams(assignment.constraints),
    )
    ties = {name: group for group in tie_groups(assignment.constraints) for name in group}

    def reason(choice: str, asked: Any, n: Node) -> str | None:
        tensor = made[tails.get(n.name, n.name)] if graph.is_float(n.output) else None
        if choice in OF_WEIGHTS:
            tensor = next((i for slot, i in graph.slots(n) if slot == "w"), None)
        if choice == "inputs":
            if tensor is None or not graph.is_float(n.data):
                return None if tensor is None else "it reads no floats"
            takes = "dynamic" if n.name in assignment.dynamic else "codes" if nodes[n.name].exec != "float" else "float"
            return "" if takes == asked and tensor in slots else f"it takes them in {takes}"
        if choice == "result" and tensor is not None:
            hands = "codes" if tensor in assignment.quantized_outputs else "float"
            return "" if hands == asked else f"it hands over {hands}"
        if tensor is None or (asked == "float" and tensor not in slots):
            return None if tensor is None else ""
        read = [slots[i].format.bits for i in n.inputs if i is not None and i in slots]
        if choice == "activation_bits" and asked in read:
            return ""  # of what it reads, where its result is float
        if tensor not in slots:
            return assignment.floats.get(tensor) or assignment.nodes[n.name].why or "it is not stored in codes"
        slot, kind, tie = slots[tensor], choice.removeprefix("weight_"), ties.get(tensor, ())
        if choice in ("rule", "range", "z_threshold") and not dictated.keys().isdisjoint((tensor, *tie)):
            return "the platform dictates its scale"
        others = [t for t in tie if t in slots and t not in copies(graph, tie) and slots[t].range != slot.range]
        if choice == "range" and others:
            return f"it shares a scale with '{others[0]}', whose range is part of it"
        by_format = {"bits": slot.format.bits, "activation_bits": slot.format.bits, "method": method_of(slot.format)}
        by_format |= {"per": slot.format.per, "signed": slot.format.signed}
        held = by_format[kind] if kind in by_format else getattr(slot, kind)
        same = held == (tuple(asked) if isinstance(asked, list) else asked)
        return "" if same else f"it has {held!r}; {assignment.nodes[slot.node].why}".removesuffix("; ")

    return reason


def unmet_io_formats(graph: Graph, platform: Platform, assignment: Assignment) -> list[str]:
    """One note for each input and output of the model in a format that the platform does not name for it."""
    ends = (("input", graph.inputs, platform.place.io_in), ("output", graph.outputs, platform.place.io_out))
    formats = {name: s.format_name for name, s in assignment.tensors.items()}
    return [
        f"{word} '{v}' is {formats.get(v, 'float')}: '{platform.name}' names {', '.join(named)} for it"
        for word, values, named in ends
        for v in values
        if named and graph.is_float(v) and formats.get(v, "float") not in named
    ]
