"""Insert nodes that formats and scales call for: Requantize where they clash, DynamicQuantize before dynamic kernels.

A sigmoid whose result always has the scale 1/256 may feed a concatenation that moves quantized values, and so has one
scale for all that it joins. Forcing 1/256 on the other inputs would clip them. A chip that can requantize (it has a
rule for the operator Requantize) converts the sigmoid's result before the concatenation instead.
"""

from collections.abc import Collection
from dataclasses import replace

from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import Constraint, tie_groups
from chipfit.decide.formats import TooWide
from chipfit.decide.groups import block_length
from chipfit.graph.edit import new_name, replace_node, replace_values
from chipfit.graph.ir import DYNAMIC, REQUANTIZE, Graph, Node
from chipfit.platform.match import resolve_node
from chipfit.platform.schema import WIDEST, Platform


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
    for value, reader in edges:
        layer = _insert(out, value, reader)
        notes.append(f"'{value}' keeps the scale that '{platform.name}' dictates and is requantized for '{layer}'")
    return out, notes


def _insert(graph: Graph, value: str, reader: str) -> str:
    """Insert a Requantize before a node that reads a value, in place; return the node's layer."""
    node, name = graph.node(reader), new_name(graph, f"{value}_for_{reader}")
    graph.values[name] = replace(graph.values[value], name=name)
    read = node.reading({value: name})
    replace_node(graph, node, Node(name, REQUANTIZE, (value,), (name,), layer=node.display_name), read)
    return node.display_name


def narrowed(graph: Graph, platform: Platform, clash: TooWide) -> tuple[Graph, str] | None:
    """Return a copy with a Requantize to fewer bits before the consumer of a clash, and a note of it.

    None if the platform cannot requantize to so few bits, or the value is requantized already.
    """
    known = any(n.op == REQUANTIZE and (n.output == clash.value or n.name == clash.reader) for n in graph.nodes)
    if known or not _can_requantize(graph, platform, clash.value, clash.bits):
        return None
    out = graph.copy()
    layer = _insert(out, clash.value, clash.reader)
    return out, f"'{clash.value}' is requantized for '{layer}', which reads at most {clash.bits} bits"


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
        if not groups or not _ties_inputs(c):
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


def _can_requantize(graph: Graph, platform: Platform, value: str, bits: int = WIDEST) -> bool:
    """Return whether the platform can requantize a value to a format of at most so many bits."""
    options, formats = (
        resolve_node(platform, graph, Node("probe", REQUANTIZE, (value,), ())).options,
        platform.formats,
    )
    return any(o.out in formats and formats[o.out].bits <= bits for o in options)


def with_dynamic(graph: Graph, platform: Platform, assignment: Assignment) -> Graph:
    """Return a copy with a DynamicQuantize before every dynamic kernel; kernels with one input and format share it."""
    out, shared, nodes = graph.copy(), dict[tuple[str, str, int], str](), list[Node]()
    for n in graph.nodes:
        if n.name in assignment.dynamic:
            fmt = platform.formats[assignment.dynamic[n.name]]
            block = block_length(fmt, graph.shape(n.data)[-1]) or 1
            key = n.data, assignment.dynamic[n.name], block
            if key not in shared:
                shared[key] = name = new_name(out, f"{n.data}_dynamic")
                grid = fmt.grid()
                codes = {"qmin": grid.qmin, "qmax": grid.qmax, "affine": grid.zero == "any"}
                attrs = {**codes, "per": fmt.per, "block": block}
                nodes.append(Node(name, DYNAMIC, (n.data,), (name,), attrs, layer=n.display_name))
                out.values[name] = replace(graph.values[n.data], name=name)
            n = n.with_(inputs=(shared[key], *n.inputs[1:]))
        nodes.append(n)
    out.nodes = nodes
    return out


def without_insertions(graph: Graph, ops: Collection[str] = (DYNAMIC, REQUANTIZE)) -> Graph:
    """Return the graph without the nodes of `ops`, which were inserted here; the graph itself if it has none."""
    before = {n.output: n.data for n in graph.nodes if n.op in ops}
    return replace_values(graph, before) if before else graph
