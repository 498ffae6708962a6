"""Insert a DynamicQuantize node before every kernel that quantizes its own input at run time."""

from dataclasses import replace

from chipfit.decide.assignment import Assignment
from chipfit.decide.groups import block_of
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import DYNAMIC, Graph, Node
from chipfit.platform.schema import Platform


def with_dynamic(graph: Graph, platform: Platform, assignment: Assignment) -> Graph:
    """Return a copy with a DynamicQuantize before every dynamic kernel; kernels with one input and format share it."""
    out, shared, nodes = graph.copy(), dict[tuple[str, str, int], str](), list[Node]()
    taken = {*graph.values, *graph.weights, *(n.name for n in graph.nodes)}
    for n in graph.nodes:
        if n.name in assignment.dynamic:
            fmt = platform.formats[assignment.dynamic[n.name]]
            block = block_of(fmt, graph.shape(n.data)[-1]) or 1
            key = n.data, assignment.dynamic[n.name], block
            if key not in shared:
                shared[key] = name = unique_name(f"{n.data}_dynamic", taken)
                taken.add(name)
                grid = fmt.grid()
                codes = {"qmin": grid.qmin, "qmax": grid.qmax, "affine": grid.zero == "any"}
                attrs = {**codes, "per": fmt.per, "block": block}
                nodes.append(Node(name, DYNAMIC, (n.data,), (name,), attrs, layer=n.layer))
                out.values[name] = replace(graph.values[n.data], name=name)
            n = n.with_(inputs=(shared[key], *n.inputs[1:]))
        nodes.append(n)
    out.nodes = nodes
    return out


def without_dynamic(graph: Graph) -> Graph:
    """Return the graph without DynamicQuantize nodes; the graph itself if it has none."""
    before = {n.output: n.data for n in graph.nodes if n.op == DYNAMIC}
    if not before:
        return graph
    out = graph.copy()
    out.values = {k: v for k, v in graph.values.items() if k not in before}
    nodes = (n for n in graph.nodes if n.op != DYNAMIC)
    out.nodes = [n.with_(inputs=tuple(before.get(i or "", i) for i in n.inputs)) for n in nodes]
    return out
