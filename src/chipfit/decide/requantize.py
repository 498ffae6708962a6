"""Requantization in plain sight: where the chip dictates the grid of one tensor and ties it to others that need another one.

A sigmoid whose result always has the scale 1/256 may feed a concatenation that moves codes, and so wants one scale for all that it
joins. Forcing 1/256 on the others would clip them. A chip that can round codes from one scale to another (it has a rule for the
operator Requantize) does that on the way into the tie instead.
"""

from __future__ import annotations

from dataclasses import replace

from chipfit.decide.formats import Assignment, facts
from chipfit.decide.legality import Binding, tie_groups
from chipfit.graph.ir import Graph, Node
from chipfit.platform.match import resolve
from chipfit.platform.schema import Platform


def requantize(graph: Graph, platform: Platform, assignment: Assignment) -> tuple[Graph, list[str]]:
    """Put a Requantize before every operator that ties a tensor with a dictated grid to tensors without, or with another one.

    Returns:
        The graph itself where nothing clashes; else a copy, for which formats are to be decided again, and a note for each insertion.
    """
    edges = [e for e in _clashes(graph, assignment) if _is_able(graph, platform, e[0])]
    if not edges:
        return graph, []
    notes, nodes = [], {n.name: n for n in graph.nodes}
    order = [n.name for n in graph.nodes]
    values = dict(graph.values)
    for value, reader in edges:
        node = nodes[reader]
        name = f"{value}_for_{reader}"
        while name in values or name in nodes:
            name += "_"
        values[name] = replace(graph.values[value], name=name)
        nodes[name] = Node(name, "Requantize", (value,), (name,), layer=node.layer)
        nodes[reader] = node.with_(inputs=tuple(name if i == value else i for i in node.inputs))
        order.insert(order.index(reader), name)
        notes.append(
            f"'{value}' keeps the scale that '{platform.name}' dictates and is requantized for '{node.layer or reader}'"
        )
    out = graph.copy()
    out.nodes[:] = [nodes[name] for name in order]
    out.values.update(values)
    return out, notes


def _clashes(graph: Graph, assignment: Assignment) -> list[tuple[str, str]]:
    """(tensor with a dictated grid, operator that ties it to tensors with another one)."""
    makers, found = graph.producers(), []
    dictated = {
        t: (r.scale, r.zp)
        for b in assignment.bindings
        for r in b.rules
        if r.fix and r.hard
        for t in b.slots.get(r.fix, ())
    }
    for b in assignment.bindings:
        ins = (
            [t for k in ("in0", "in1", "in2") for t in b.slots.get(k, ())]
            if "ins" not in b.slots
            else list(b.slots["ins"])
        )
        if len(set(ins)) < 2 or not _ties_inputs(b):
            continue
        elsewhere = tie_groups([o for o in assignment.bindings if o is not b])
        group_of = {t: next((g for g in elsewhere if t in g), {t}) for t in ins}
        grids = {t: {dictated[m] for m in group_of[t] if m in dictated} for t in ins}
        if any(grids.values()) and len({frozenset(g) for g in grids.values()}) > 1:
            reader = makers[b.slots["out"][0]].name if b.slots.get("out") else ""
            found += [(t, reader) for t in dict.fromkeys(ins) if grids[t] and reader and t in graph.node(reader).inputs]
    return found


def _ties_inputs(b: Binding) -> bool:
    return any(r.tie and r.hard and ("ins" in r.tie or {"in0", "in1"} <= set(r.tie)) for r in b.rules)


def _is_able(graph: Graph, platform: Platform, value: str) -> bool:
    probe = Node("probe", "Requantize", (value,), ())
    return any(o.out in platform.formats for o in resolve(platform, "Requantize", facts(graph, probe)).options)
