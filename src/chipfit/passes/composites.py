"""Open composite operators into parts that the platform computes in integers, before formats are decided.

A SiLU on a chip without one is a sigmoid and a product, and the chip may have integer kernels for both. Parts carry the
user's layer and the composite's name, so that the choice can be taken back: `close_composites` restores the whole.
"""

from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from chipfit.graph.edit import live_values, taken_names
from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.decompose import RULES, Decomposition
from chipfit.passes.rewriting import NodeTest


class Whole(NamedTuple):
    """A composite as it was before it was opened."""

    node: Node
    results: tuple[Value, ...]


#: a fact about a node on the platform
#: parts of an opened composite that compute, where the platform has float kernels beside the integer ones: more would
#: take longer than one float kernel and two conversions
_FEW = 2


def open_composites(
    graph: Graph,
    has_kernel: NodeTest,
    holds: Container[str],
    in_float: NodeTest = lambda _graph, _node: False,
    coarse: NodeTest = lambda _graph, _node: False,
) -> tuple[Graph, dict[str, Whole]]:
    """Decompose every composite without an integer kernel, or with a coarse one, all of whose parts have one.

    Args:
        has_kernel: whether the platform has an integer kernel for a node, or moves quantized values with it.
        holds: operators with integer kernels, between which rules choose.
        in_float: whether the platform lists a node's operator in float too. Where it lists all parts so, only
            composites of few parts, without weights, are decomposed.
        coarse: whether the integer kernel of a node dictates a scale, so that parts may be more exact.

    Returns:
        The graph, and composite's name -> what it was. The graph itself if there are none.
    """
    out, wholes, nodes, constants = graph.copy(), dict[str, Whole](), list[Node](), dict[object, str]()
    taken = taken_names(graph)
    for n in graph.nodes:
        nodes.append(n)
        if n.op not in RULES or n.facts.kind or not graph.is_float(n.output):
            continue  # weights of convolutions stay whole: their layer's bits, ranges and rounding are about them
        if has_kernel(graph, n) and not coarse(graph, n):
            continue
        stays, alone = partial(_is_kernel, has_kernel, n), _alone(out, n, constants.values())
        trial = Decomposition(alone, holds, stays, constants, taken, integers=True)
        parts = trial.parts(n)
        computing = [m for m in parts if not m.facts.moves]
        few = len(computing) <= _FEW and not any(m.facts.weighted for m in (n, *parts))
        if (
            parts != [n]
            and all(has_kernel(trial.graph, m) or not _sees_floats(trial.graph, m) for m in parts)
            and (few or not all(in_float(trial.graph, m) for m in computing))
        ):
            constants, nodes[-1:] = trial.constants, parts
            wholes[n.name] = Whole(n, tuple(graph.values[o] for o in n.outputs))
            out.values |= trial.graph.values
            out.weights |= trial.graph.weights
            out.trainable |= trial.graph.trainable
    out.nodes = nodes
    _drop_unread_parts(out, wholes)
    return (out if wholes else graph), wholes


def _sees_floats(graph: Graph, n: Node) -> bool:
    """Return whether a node reads or makes floats; integers and conditions need no kernel for quantized values."""
    return any(graph.is_float(v) for v in (*n.inputs, *n.outputs) if v is not None)


def _is_kernel(has_kernel: NodeTest, composite: Node, graph: Graph, n: Node) -> bool:
    """Return whether a node has an integer kernel and is not the composite that shall be decomposed."""
    return n is not composite and has_kernel(graph, n)


def _drop_unread_parts(graph: Graph, names: Container[str]) -> None:
    """Remove parts of opened composites that only make results that nothing reads."""
    live = live_values(graph)
    dead = {n.name for n in graph.nodes if n.composite in names and live.isdisjoint(n.outputs)}
    for value in (o for n in graph.nodes if n.name in dead for o in n.outputs):
        del graph.values[value]
    graph.nodes = [n for n in graph.nodes if n.name not in dead]


def _alone(graph: Graph, node: Node, constants: Collection[str]) -> Graph:
    """Return the graph of one node: its operands and results, and weights that are shared."""
    names = {*node.inputs, *node.outputs, *constants}
    values = {v: graph.values[v] for v in names if v in graph.values}
    weights = {w: graph.weights[w] for w in names if w in graph.weights}
    return replace(graph, nodes=[node], values=values, weights=weights, trainable=graph.trainable & weights.keys())


def close_composites(graph: Graph, wholes: Mapping[str, Whole]) -> Graph:
    """Return the graph with whole composites in place of their parts.

    Args:
        wholes: composite's name -> what it was, from `open_composites`.
    """
    out, nodes, placed = graph.copy(), list[Node](), set[str]()
    for n in graph.nodes:
        if n.composite not in wholes:
            nodes.append(n)
            continue
        if n.composite not in placed:
            placed.add(n.composite)
            nodes.append(wholes[n.composite].node)
        for v in n.outputs:
            del out.values[v]
    out.nodes = nodes
    out.values |= {v.name: v for name in placed for v in wholes[name].results}
    read = {i for n in nodes for i in n.inputs} | {*out.outputs}
    opened = {i for n in graph.nodes if n.composite in wholes for i in n.inputs if graph.is_weight(i)}
    out.weights = {k: w for k, w in out.weights.items() if k in read or k not in opened}
    out.trainable &= {*out.weights}
    return out


def composites_in(graph: Graph) -> dict[str, list[Node]]:
    """Return the parts of every opened composite whose results are numbers, not masks; by its name."""
    out: dict[str, list[Node]] = {}
    for n in graph.nodes:
        if n.composite and graph.is_float(n.output):
            out.setdefault(n.composite, []).append(n)
    return out


def note_of_opened(graph: Graph, names: Collection[str]) -> list[str]:
    """Return one note for each kind of opened composite: how many there are, and the operators that compute them."""
    kinds = Counter[tuple[str, str]]()
    for name, parts in composites_in(graph).items():
        if name in names:
            kinds[parts[0].composite_op, ", ".join(dict.fromkeys(n.op for n in parts))] += 1
    return [f"{count} {op} became parts with integer kernels: {parts}" for (op, parts), count in kinds.items()]
