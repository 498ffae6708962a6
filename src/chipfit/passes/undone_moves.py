"""Remove moves that change nothing, or that the next one undoes, such as the axis of layers around a state."""

import math
from collections.abc import Mapping

import torch

from chipfit.graph.edit import drop_dead, replace_values
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register


@register("pass", "undone_moves", stage="rewrite", after=("fold_constants",))
def undone_moves(graph: Graph) -> Rewritten:
    """Replace moves whose results equal a value by that value.

    These are an Expand to the shape that it has, a Select of the axis that was added to it, bounds at infinity, and a
    Concat of one part; parts without elements are left out of it.
    """
    graph = graph.copy()
    for k, n in enumerate(graph.nodes):
        if n.op == "Concat":
            full = tuple(i for i in n.inputs if i in graph.inputs or (i and graph.shape(i)[n.attrs["axis"]] != 0))
            graph.nodes[k] = n.with_(inputs=full or n.inputs)
    producers, same = graph.producers(), dict[str, str]()
    for n in graph.nodes:
        source = _source(graph, n, producers, same)
        ends = n.output in graph.outputs and source in {*graph.inputs, *graph.outputs, *same.values()}
        if source is not None and not ends:
            same[n.output] = source
    graph = replace_values(graph, same)
    drop_dead(graph)
    return Rewritten(graph, [])


def _source(graph: Graph, n: Node, producers: Mapping[str, Node], same: Mapping[str, str]) -> str | None:
    """Return the value that the result of a move equals; None if it is another one."""
    data = n.inputs[0] if n.inputs else None
    if never := {"Max": -math.inf, "Min": math.inf}.get(n.op):
        free = [i for i in n.inputs if i and not bool((graph.weights.get(i, torch.zeros(1)) == never).all())]
        alike = len(free) == 1 and free[0] in graph.values and graph.shape(free[0]) == graph.shape(n.output)
        return same.get(free[0], free[0]) if alike else None
    if data is None or data not in graph.values:
        return None
    if n.op == "Concat" and len(n.inputs) == 1:
        return same.get(data, data)
    if n.op == "Expand" and len(n.inputs) == 1 and len(n.attrs["shape"]) == len(graph.shape(data)):
        alike = all(want in (-1, have) for want, have in zip(n.attrs["shape"], graph.shape(data), strict=True))
        return same.get(data, data) if alike else None
    maker = producers.get(data)
    if n.op != "Select" or maker is None or n.attrs["index"] not in (0, -1):
        return None
    axis = n.attrs["axis"] % len(graph.shape(data))
    added = maker.attrs["axes"] if maker.op == "Unsqueeze" else ()
    added = (maker.attrs["axis"],) if maker.op == "Stack" and len(maker.inputs) == 1 else added
    undoes = tuple(a % len(graph.shape(data)) for a in added) == (axis,)
    return same.get(maker.inputs[0] or "", maker.inputs[0]) if undoes else None
