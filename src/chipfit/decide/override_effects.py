"""Check that every override had an effect: refuse one that changes nothing, and report the layers that ignored one."""

from collections.abc import Callable

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import copies, dictated_qparams, tie_groups
from chipfit.decide.overrides import CHOICES, Layers, Overrides, override_entries
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph
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
    layers, obstacle, notes = Layers(graph), _obstacles(graph, assignment), list[str]()
    entries = [(p, {} if c == "float" else dict(c), layers.match(p)) for p, c in override_entries(overrides)]
    last = {(n.name, k): at for at, (_, own, nodes) in enumerate(entries) for n in nodes for k in own or CHOICES}
    for at, (pattern, choices, nodes) in enumerate(entries):
        for choice, wanted in choices.items():
            value, reasons = tuple(wanted) if isinstance(wanted, list) else wanted, dict[str, str]()
            for n in nodes if wanted is not None else ():
                effect = assignment.effects.get((n.name, choice))
                if effect is not None and last[n.name, choice] == at:
                    own = "" if value in effect.values else effect.why
                    reasons[n.display_name] = obstacle(effect.tensor, choice) or own
            ignored = [f"'{layer}' ({why})" for layer, why in reasons.items() if why]
            if ignored:
                more = f" and {len(ignored) - _NAMED} more" if len(ignored) > _NAMED else ""
                note = f"override {choice}={wanted!r} of '{pattern}' changes nothing for "
                notes.append(f"the {note}{', '.join(ignored[:_NAMED])}{more}")
            if ignored and isinstance(pattern, str) and len(ignored) == len(reasons):
                raise PlanError("T" + notes[-1][1:], hint="leave it out, or name a layer that can take it")
    return notes


def _obstacles(graph: Graph, assignment: Assignment) -> Callable[[str, str], str]:
    """Return f(tensor, choice): why constraints of the platform decide the scale instead; "" if none do."""
    tensors, dictated = assignment.tensors, dictated_qparams(assignment.constraints)
    ties = {name: group for group in tie_groups(assignment.constraints) for name in group}

    def obstacle(tensor: str, choice: str) -> str:
        if tensor not in tensors or choice not in ("rule", "range", "z_threshold"):
            return ""
        if tensor in dictated:
            return "the platform dictates its scale"
        tie = ties.get(tensor, ()) if choice == "range" else ()
        own = set(tie).intersection(tensors) - copies(graph, tie)
        other = next((t for t in tie if t in own and tensors[t].range != tensors[tensor].range), None)
        return "" if other is None else f"it shares a scale with '{other}', whose range is part of it"

    return obstacle


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
