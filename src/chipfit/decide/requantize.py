"""Inserted requantization: where the chip dictates the grid of one tensor and ties it to others that need another one.

A sigmoid whose result always has the scale 1/256 may feed a concatenation that moves codes, and so has one scale for
all that it joins. Forcing 1/256 on the others would clip them. A chip that can round codes from one scale to another
(it has a rule for the operator Requantize) does that on the way into the tie instead.
"""

from dataclasses import replace

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint, tie_groups
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph, Node
from chipfit.platform.match import resolve_node
from chipfit.platform.schema import Platform


def requantize(graph: Graph, platform: Platform, assignment: Assignment) -> tuple[Graph, list[str]]:
    """Put a Requantize before every operator that ties a tensor with a dictated grid to others without, or of another.

    Returns:
        The graph itself where nothing clashes; else a copy, for which formats are to be decided again, and a note for
        each insertion.
    """
    edges = [e for e in _clashes(graph, assignment) if _can_requantize(graph, platform, e[0])]
    if not edges:
        return graph, []
    out, notes = graph.copy(), []
    nodes = {n.name: n for n in graph.nodes}
    taken = {*nodes, *graph.values, *graph.weights}
    before: dict[str, list[Node]] = {}  # reader -> what is put in front of it
    for value, reader in edges:
        node, name = nodes[reader], unique_name(f"{value}_for_{reader}", taken)
        taken.add(name)
        out.values[name] = replace(graph.values[value], name=name)
        before.setdefault(reader, []).append(Node(name, "Requantize", (value,), (name,), layer=node.layer))
        nodes[reader] = node.with_(inputs=tuple(name if i == value else i for i in node.inputs))
        notes.append(
            f"'{value}' keeps the scale that '{platform.name}' dictates and is requantized for '{node.layer or reader}'"
        )
    out.nodes[:] = [m for n in graph.nodes for m in (*before.get(n.name, ()), nodes[n.name])]
    return out, notes


def _clashes(graph: Graph, assignment: Assignment) -> list[tuple[str, str]]:
    """(tensor with a dictated grid, operator that ties it to tensors with another one).

    The inputs of an operator clash when, were it not for this operator, they would have different dictated grids, or
    some of them none. That is asked only of operators in a group of tied tensors of which one is dictated.
    """
    dictated = {t: numbers for b in assignment.constraints for t, numbers in b.dictated}
    group_of = {t: k for k, group in enumerate(tie_groups(assignment.constraints)) for t in group}
    tying: dict[int, list[Constraint]] = {group_of[t]: [] for t in dictated if t in group_of}
    for b in assignment.constraints:
        for k in {group_of.get(t, -1) for members in b.tied for t in members} & tying.keys():
            tying[k].append(b)
    makers, found = graph.producers(), []
    for b in assignment.constraints:
        inputs = list(dict.fromkeys(b.of("ins")))
        groups = {group_of.get(t, -1) for t in inputs} & tying.keys()
        if len(inputs) < 2 or not groups or not _ties_inputs(b):
            continue
        without = tie_groups(o for k in groups for o in tying[k] if o is not b)
        tied = {t: group for group in without for t in group}
        # tensor -> the dictated numbers of those that it is tied to, and its own
        grids = {t: frozenset(dictated[m] for m in tied.get(t, (t,)) if m in dictated) for t in inputs}
        if len(set(grids.values())) > 1:
            readers = [makers[o] for o in b.of("out")]
            found += [(t, n.name) for n in readers for t in inputs if grids[t] and t in n.inputs]
    return found


def _ties_inputs(b: Constraint) -> bool:
    return any(r.tie and r.hard and ("ins" in r.tie or {"in0", "in1"} <= set(r.tie)) for r in b.rules)


def _can_requantize(graph: Graph, platform: Platform, value: str) -> bool:
    probe = Node("probe", "Requantize", (value,), ())
    return any(o.out in platform.formats for o in resolve_node(platform, graph, probe).options)
