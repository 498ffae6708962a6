"""Kernels that round what they read themselves, to a range of the moment: a node of its own in front of each."""

from dataclasses import replace

from chipfit.decide.assignment import Assignment
from chipfit.decide.groups import block_of
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.platform.schema import Platform


def with_dynamic(graph: Graph, platform: Platform, assignment: Assignment) -> Graph:
    """A copy with a DynamicQuantize in front of every kernel that has one inside; kernels of one format share it."""
    out, made, nodes = graph.copy(), dict[tuple[str, str, int], Node](), list[Node]()
    taken = {*graph.values, *graph.weights, *(n.name for n in graph.nodes)}
    for n in graph.nodes:
        if n.name in assignment.dynamic:
            name = assignment.dynamic[n.name]
            fmt, grid = platform.formats[name], platform.formats[name].grid()
            block = block_of(fmt, graph.shape(n.data)[-1]) or 1
            if (n.data, name, block) not in made:
                here = unique_name(f"{n.data}_dynamic", taken)
                taken.add(here)
                how = {
                    "qmin": grid.qmin,
                    "qmax": grid.qmax,
                    "affine": grid.zero == "any",
                    "per": fmt.per,
                    "block": block,
                }
                made[n.data, name, block] = Node(here, DYNAMIC, (n.data,), (here,), how, layer=n.layer)
                out.values[here] = replace(graph.values[n.data], name=here)
                nodes.append(made[n.data, name, block])
            n = n.with_(inputs=(made[n.data, name, block].output, *n.inputs[1:]))
        nodes.append(n)
    out.nodes = nodes
    return out


def without_dynamic(graph: Graph) -> Graph:
    """The graph as it was before; itself where there is no such node."""
    before = {n.output: n.data for n in graph.nodes if n.op == DYNAMIC}
    if not before:
        return graph
    out = graph.copy()
    out.values = {k: v for k, v in graph.values.items() if k not in before}
    kept = (n for n in graph.nodes if n.op != DYNAMIC)
    out.nodes = [n.with_(inputs=tuple(before.get(i or "", i) for i in n.inputs)) for n in kept]
    return out
