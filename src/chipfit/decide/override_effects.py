"""Check that every override had an effect: refuse one that changes nothing, and report the layers that ignored one."""

from collections.abc import Sequence
from typing import Any

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import copies, dictated_qparams, tie_groups
from chipfit.decide.overrides import (
    CHOICES,
    OF_WEIGHTS,
    Layers,
    Named,
    Overrides,
    for_other_readers,
    method_of,
    override_entries,
)
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import NodePlan
from chipfit.platform.schema import Platform

#: layers that a message names
_NAMED = 4


def unapplied_overrides(graph: Graph, assignment: Assignment, overrides: Overrides | None) -> list[str]:
    """Return one note for each choice that had no effect on some of its layers.

    A choice that a later entry replaces for a layer needs no effect there. Filters, which choose layers by what they
    are, may choose layers that cannot follow: they are never refused.

    Raises:
        PlanError: a choice had no effect on any of the layers that its entry names.
    """
    layers, effects, notes = Layers(graph), _Effects(graph, assignment), list[str]()
    entries = [(p, {} if c == "float" else dict(c), layers.find(p)) for p, c in override_entries(overrides)]
    last = {
        (n.name, k): at
        for at, (_, own, found) in enumerate(entries)
        for n, given in [*((f.node, own or CHOICES) for f in found), *for_other_readers(layers, found, own)]
        for k in given
    }
    for at, (pattern, choices, found) in enumerate(entries):
        notes += _held_by_others(pattern, [f for f in found if not choices or any(map(f.takes, choices))])
        for choice, wanted in choices.items():
            value, reasons = tuple(wanted) if isinstance(wanted, list) else wanted, dict[str, str]()
            for f in found if wanted is not None else ():
                why = effects.why_ignored(f.node, choice, value) if last[f.node.name, choice] == at else None
                if why is not None:
                    reasons[f.name] = why if f.takes(choice) else f"it is a part of {f.node.op} '{f.node.display_name}'"
            ignored = [f"'{layer}' ({why})" for layer, why in reasons.items() if why]
            if ignored:
                more = f" and {len(ignored) - _NAMED} more" if len(ignored) > _NAMED else ""
                note = f"override {choice}={wanted!r} of '{pattern}' changes nothing for "
                notes.append(f"the {note}{', '.join(ignored[:_NAMED])}{more}")
            if ignored and isinstance(pattern, str) and len(ignored) == len(reasons):
                raise PlanError("T" + notes[-1][1:], hint="leave it out, or name a layer that can take it")
    return notes


def _held_by_others(pattern: Any, found: Sequence[Named]) -> list[str]:
    """Return a note if other layers follow an override, in place of the named ones."""
    others = [f for f in found if f.removed is not None and f.node.display_name != f.name]
    if not others:
        return []
    more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    held = ", ".join(f"'{f.name}' is a part of {f.node.op} '{f.node.display_name}'" for f in others[:_NAMED])
    return [f"the override of '{pattern}' holds for what its layers became: {held}{more}"]


class _Effects:
    """The outcomes of overrides in an assignment."""

    def __init__(self, graph: Graph, assignment: Assignment) -> None:
        self.graph, self.assignment, self.tensors = graph, assignment, assignment.tensors
        self.nodes = {n.name: n for n in graph.nodes}
        self.dictated = dictated_qparams(assignment.constraints)
        self.ties = {name: group for group in tie_groups(assignment.constraints) for name in group}

    def why_ignored(self, node: Node, choice: str, value: Any) -> str | None:
        """Return why a choice has no effect on a node; "" if it has one, None if it is about nothing of the node.

        A choice about weights concerns a node with weights, every other choice the result of the node's kernel.
        """
        if choice in OF_WEIGHTS:
            tensor = next((t for slot, t in self.graph.slots(node) if slot == "w"), None)
        else:
            planned = self.assignment.nodes.get(node.name)  # None for an input
            last = node if planned is None else self.nodes[planned.group or node.name]
            tensor = last.output if self.graph.is_float(node.output) else None
        if tensor is None:
            return None
        values, why = self._outcome(node, choice, tensor)
        return self._obstacle(tensor, choice) or ("" if value in values else why)

    def _outcome(self, node: Node, choice: str, tensor: str) -> tuple[tuple[Any, ...], str]:
        """Return the values of a choice that agree with the assignment, and why any other value has no effect."""
        planned = self.assignment.nodes.get(node.name) or NodePlan(name=node.name, op=node.op)
        spec = self.tensors.get(tensor)
        if choice == "inputs":
            if not self.graph.is_float(node.data):
                return (), "its inputs are not floats"
            static = "float" if planned.exec == "float" else "codes"
            mode = "dynamic" if node.name in self.assignment.dynamic else static
            return (mode,) if spec else (), f"its inputs are {mode!r}"
        if choice == "result":
            mode = "codes" if tensor in self.assignment.quantized_outputs else "float"
            return (mode,), f"its result is {mode!r}"
        # bits of activations are also those of what a layer reads, if its result is float
        read = {self.tensors[i].format.bits for i in node.inputs if i is not None and i in self.tensors}
        values = tuple(read) if choice == "activation_bits" else ()
        if spec is None:
            return (*values, "float"), self.assignment.floats.get(tensor) or planned.why or "it is not quantized"
        field = choice.removeprefix("weight_").removeprefix("activation_")
        of_spec = getattr(spec if field in ("rule", "range", "z_threshold") else spec.format, field, None)
        have = method_of(spec.format) if field == "method" else of_spec
        why = self.assignment.nodes[spec.node].why if spec.node else ""
        return (*values, have), f"it has {have!r}; {why}".removesuffix("; ")

    def _obstacle(self, tensor: str, choice: str) -> str:
        """Return why constraints of the platform decide the scale instead; "" if none do."""
        if tensor not in self.tensors or choice not in ("rule", "range", "z_threshold"):
            return ""
        if tensor in self.dictated:
            return "the platform dictates its scale"
        tie = self.ties.get(tensor, ()) if choice == "range" else ()
        own, wanted = set(tie).intersection(self.tensors) - copies(self.graph, tie), self.tensors[tensor].range
        other = next((t for t in tie if t in own and self.tensors[t].range != wanted), None)
        return "" if other is None else f"it shares a scale with '{other}', whose range is part of it"


def unmet_io_formats(graph: Graph, platform: Platform, assignment: Assignment) -> list[str]:
    """Return one note for each input and output of the model in a format that the platform does not list for it."""
    ends = (("input", graph.inputs, platform.place.io_in), ("output", graph.outputs, platform.place.io_out))
    formats = {name: s.format_name for name, s in assignment.tensors.items()}
    return [
        f"{word} '{v}' is {formats.get(v, 'float')}: '{platform.name}' names {', '.join(listed)} for it"
        for word, values, listed in ends
        for v in values
        if listed and graph.is_float(v) and formats.get(v, "float") not in listed
    ]
