"""Insert requantization where the chip dictates the scale of one tensor and ties it to tensors that need another one.

A sigmoid whose result always has the scale 1/256 may feed a concatenation that moves quantized values, and so has one
scale for all that it joins. Forcing 1/256 on the other inputs would clip them. A chip that can requantize (it has a
rule for the operator Requantize) converts the sigmoid's result before the concatenation instead.
"""

from dataclasses import replace

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint, tie_groups
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph, Node
from chipfit.platform.match import resolve_node
from chipfit.platform.schema import Platform


def requantize(graph: Graph, platform: Platform, assignment: Assignment) -> tuple[Graph, list[str]]:
    """Insert a Requantize before every operator that ties tensors with different dictated scales, or with none.

    Returns:
        The graph itself if nothing clashes; else a copy, for which formats have to be decided again, and a note for
        each insertion.
    """
    edges = [e for e in _clashes(graph, assignment) if _can_requantize(graph, platform, e[0])]
    if not edges:
        return graph, []
    out, notes = graph.copy(), []
    nodes = {n.name: n for n in graph.nodes}
    taken = {*nodes, *graph.values, *graph.weights}
    before: dict[str, list[Node]] = {}  # reader -> the nodes to insert before it
    for value, reader in edges:
        node, name = nodes[reader], unique_name(f"{value}_for_{reader}", taken)
        taken.add(name)
        out.values[name] = replace(graph.values[value], name=name)
        before.setdefault(reader, []).append(Node(name, "Requantize", (value,), (name,), layer=node.layer))
        nodes[reader] = node.with_(inputs=tuple(name if i == value else i for i in node.inputs))
        scale = f"keeps the scale that '{platform.name}' dictates"
        notes.append(f"'{value}' {scale} and is requantized for '{node.layer or reader}'")
    out.nodes[:] = [m for n in graph.nodes for m in (*before.get(n.name, ()), nodes[n.name])]
    return out, notes


def _clashes(graph: Graph, assignment: Assignment) -> list[tuple[str, str]]:
    """Return (tensor with a dictated scale, operator that ties it to tensors with another scale).

    The inputs of an operator clash if, without this operator, they would have different dictated scales, or only some
    of them one. Only operators in a group of tied tensors with a dictated one are examined.
    """
    dictated = {t: numbers for c in assignment.constraints for t, numbers in c.dictated}
    group_of = {t: k for k, group in enumerate(tie_groups(assignment.constraints)) for t in group}
    tying: dict[int, list[Constraint]] = {group_of[t]: [] for t in dictated if t in group_of}
    for c in assignment.constraints:
        for k in {group_of.get(t, -1) for members in c.tied for t in members} & tying.keys():
            tying[k].append(c)
    makers, clashes = graph.producers(), []
    for c in assignment.constraints:
        inputs = list(dict.fromkeys(c.of("ins")))
        groups = {group_of.get(t, -1) for t in inputs} & tying.keys()
        if len(inputs) < 2 or not groups or not _ties_inputs(c):
            continue
        without = tie_groups(other for k in groups for other in tying[k] if other is not c)
        tied = {t: group for group in without for t in group}
        # tensor -> the dictated scales of the tensors that it is tied to, and its own
        scales = {t: frozenset(dictated[m] for m in tied.get(t, (t,)) if m in dictated) for t in inputs}
        if len(set(scales.values())) > 1:
            readers = [makers[o] for o in c.of("out")]
            clashes += [(t, n.name) for n in readers for t in inputs if scales[t] and t in n.inputs]
    return clashes


def _ties_inputs(constraint: Constraint) -> bool:
    return any(r.tie and r.hard and ("ins" in r.tie or {"in0", "in1"} <= set(r.tie)) for r in constraint.rules)


def _can_requantize(graph: Graph, platform: Platform, value: str) -> bool:
    probe = Node("probe", "Requantize", (value,), ())
    return any(o.out in platform.formats for o in resolve_node(platform, graph, probe).options)
