"""Pieces that rewrites build graphs with: free names, nodes in the place of others."""

from collections.abc import Container

from chipfit.graph.ir import Graph, Node


def unique_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or the first of `wanted_1`, `wanted_2`, ... that is not taken."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name


def new_name(graph: Graph, wanted: str) -> str:
    """`wanted`, or the next free name like it, among values, weights and nodes."""
    return unique_name(wanted, {*graph.values, *graph.weights, *(n.name for n in graph.nodes)})


def replace_node(graph: Graph, old: Node, *new: Node) -> None:
    """Put `new` where `old` stands."""
    at = next(k for k, n in enumerate(graph.nodes) if n.name == old.name)
    graph.nodes[at : at + 1] = new


def drop_dead(graph: Graph) -> None:
    """Take out the nodes that nothing reads, with their values."""
    live = live_values(graph)
    for o in (o for n in graph.nodes if live.isdisjoint(n.outputs) for o in n.outputs):
        graph.values.pop(o, None)
    graph.nodes = [n for n in graph.nodes if not live.isdisjoint(n.outputs)]


def live_values(graph: Graph) -> set[str]:
    """Values and weights that an output depends on."""
    live = set(graph.outputs)
    for n in reversed(graph.nodes):
        if live.intersection(n.outputs):
            live.update(i for i in n.inputs if i is not None)
    return live
