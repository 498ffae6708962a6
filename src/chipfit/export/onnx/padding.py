"""Padding with zeros as an attribute of the convolutions that read it: runtimes have no integer kernel for it alone."""

from chipfit.graph.edit import replace_values
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import CONVS
from chipfit.passes.layout import same_numbers
from chipfit.plan.record import Plan


def in_convolutions(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with each Pad that only convolutions read as their padding; integers are padded by zero points.

    The Pad adds zeros along the spatial axes alone, and keeps scale and zero point.
    """
    users, raw = graph.users(), {v for v, _ in plan.float_edges}
    grouped = {name for group in plan.groups for name in group[1:]}
    folded: dict[str, Node] = {}  #: result of a Pad -> the Pad
    for n in graph.nodes:
        readers = users.get(n.output, [])
        convs = all(r.op in CONVS and r.data == n.output and r.inputs.count(n.output) == 1 for r in readers)
        fits = n.op == "Pad" and readers and convs and n.name not in grouped and n.output not in graph.outputs
        if fits and _adds_zeros(n) and raw.isdisjoint((n.data, n.output)) and same_numbers(plan, n.data, n.output):
            folded[n.output] = n
    if not folded:
        return graph
    graph = graph.copy()
    graph.nodes = [_padded(n, folded[n.data]) if n.op in CONVS and n.data in folded else n for n in graph.nodes]
    return replace_values(graph, {value: pad.data for value, pad in folded.items()})


def _adds_zeros(n: Node) -> bool:
    ends = n.attrs["padding"]
    plain = n.attrs["mode"] == "constant" and n.attrs["value"] == 0 and not any((*ends[0], *ends[1]))
    return plain and min(end for pair in ends for end in pair) >= 0


def _padded(n: Node, pad: Node) -> Node:
    both = zip(n.attrs["padding"], pad.attrs["padding"][2:], strict=True)
    padding = tuple((a + c, b + d) for (a, b), (c, d) in both)
    return n.with_(attrs={**n.attrs, "padding": padding})
