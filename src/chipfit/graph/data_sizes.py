"""Values whose sizes depend on data, as the list of boxes that non-maximum suppression keeps."""

from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import SIZED_BY_DATA, SIZED_BY_MASK


def sized_by_data(graph: Graph) -> set[str]:
    """Return the results of operators that choose their size by data, and all values behind them."""
    found = set[str]()
    for n in graph.nodes:
        if _chooses_size(graph, n) or not found.isdisjoint(i for i in n.inputs if i):
            found.update(n.outputs)
    return found


def _chooses_size(graph: Graph, n: Node) -> bool:
    masked = any(i in graph.values and graph.values[i].dtype == "bool" for i in n.inputs)
    return n.facts.selects or n.called in SIZED_BY_DATA or (n.called in SIZED_BY_MASK and masked)


def with_comparable_outputs(graph: Graph) -> Graph:
    """Return the graph with outputs that have one size in float and quantized.

    In place of outputs whose sizes depend on data, it has the float values from which these are computed.
    """
    behind = sized_by_data(graph)
    if behind.isdisjoint(graph.outputs):
        return graph
    made = graph.producers()
    read = [i for n in graph.nodes if not behind.isdisjoint(n.outputs) for i in n.inputs if i and i not in behind]
    found = [o for o in graph.outputs if o not in behind]
    while read:
        value = read.pop(0)
        if value in graph.values and graph.is_float(value):
            found.append(value)
        elif value in made:  # a mask, whose operands are compared
            read += [i for i in made[value].inputs if i]
    out = graph.copy()
    out.outputs = list(dict.fromkeys(found)) or graph.outputs
    return out
