"""Open composite operators into parts that the platform computes in integers, before formats are decided.

A SiLU on a chip without one is a sigmoid and a product, and the chip may have integer kernels for both. Parts carry the
user's layer and the composite's name, so that the choice can be taken back: `close_composites` restores the whole.
"""

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping

from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS
from chipfit.passes.decompose import RULES, Decomposition

#: a fact about a node on the platform
Test = Callable[[Graph, Node], bool]
#: parts of an opened composite that compute, where the platform has float kernels beside the integer ones: more would
#: take longer than one float kernel and two conversions
_FEW = 2


def open_composites(
    graph: Graph, has_kernel: Test, holds: Container[str], in_float: Test = lambda _graph, _node: False
) -> tuple[Graph, dict[str, Node]]:
    """Decompose every composite without an integer kernel all of whose parts have one.

    Args:
        has_kernel: whether the platform has an integer kernel for a node, or moves quantized values with it.
        holds: operators with integer kernels, between which rules choose.
        in_float: whether the platform lists a node's operator in float too. Where it lists all parts so, only
            composites of few parts, without weights, are decomposed.

    Returns:
        The graph, and composite's name -> the node that it was. The graph itself if there are none.
    """
    out, wholes, constants = graph, dict[str, Node](), dict[object, str]()
    for n in graph.nodes:
        if n.op not in RULES or OPS[n.op].kind or not graph.is_float(n.output) or has_kernel(graph, n):
            continue  # weights of convolutions stay whole: their layer's bits, ranges and rounding are about them
        trial = Decomposition(out.copy(), holds, has_kernel, constants)
        parts = trial.parts(n)
        computing = [m for m in parts if not OPS[m.op].moves]
        few = len(computing) <= _FEW and not OPS[n.op].weighted
        if (
            parts != [n]
            and all(has_kernel(trial.graph, m) for m in parts)
            and (few or not all(in_float(trial.graph, m) for m in computing))
        ):
            out, constants, wholes[n.name] = trial.graph, trial.constants, n
            at = out.nodes.index(n)
            out.nodes[at : at + 1] = parts
    return out, wholes


def close_composites(graph: Graph, wholes: Mapping[str, Node]) -> Graph:
    """Return the graph with whole composites in place of their parts.

    Args:
        wholes: composite's name -> its node, from `open_composites`.
    """
    out, nodes, placed = graph.copy(), list[Node](), set[str]()
    for n in graph.nodes:
        if n.composite not in wholes:
            nodes.append(n)
            continue
        if n.composite not in placed:
            placed.add(n.composite)
            nodes.append(wholes[n.composite])
        for v in {*n.outputs} - {*wholes[n.composite].outputs}:
            del out.values[v]
    out.nodes = nodes
    read = {i for n in nodes for i in n.inputs} | {*out.outputs}
    opened = {i for n in graph.nodes if n.composite in wholes for i in n.inputs if graph.is_weight(i)}
    out.weights = {k: w for k, w in out.weights.items() if k in read or k not in opened}
    out.trainable &= {*out.weights}
    return out


def composites_in(graph: Graph) -> dict[str, list[Node]]:
    """Return the parts of every opened composite, by its name."""
    out: dict[str, list[Node]] = {}
    for n in graph.nodes:
        if n.composite:
            out.setdefault(n.composite, []).append(n)
    return out


def note_of_opened(graph: Graph, names: Collection[str]) -> list[str]:
    """Return one note for each kind of opened composite: how many there are, and the operators that compute them."""
    kinds = Counter[tuple[str, str]]()
    for name, parts in composites_in(graph).items():
        if name in names:
            kinds[parts[0].composite_op, ", ".join(dict.fromkeys(n.op for n in parts))] += 1
    return [f"{count} {op} became parts with integer kernels: {parts}" for (op, parts), count in kinds.items()]
