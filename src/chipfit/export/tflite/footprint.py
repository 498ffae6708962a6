"""The memory of a chip that a `.tflite` file takes."""

from chipfit.export.tflite.arena import arena
from chipfit.export.tflite.writer import content
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear
from chipfit.plan.record import Plan
from chipfit.search.chip_memory import Footprint
from chipfit.search.resources import bits_of


def measure(graph: Graph, plan: Plan) -> Footprint:
    """Return what the file that `export` writes for one sample takes.

    Raises:
        UnsupportedError: see `chipfit.export.tflite.writer.content`.
    """
    file = content(graph, plan, batch=1)
    needed = arena(file)
    layers = _layers(graph, plan)
    weights = {
        n.display_name: int(graph.weights[n.weight].numel() * bits_of(plan, n.weight) / 8)
        for n in graph.nodes
        if is_linear(graph, n) and n.weight in graph.weights
    }
    largest = max(weights, key=weights.__getitem__, default="")
    at = next((layers[v] for v in (needed.layer, needed.layer.split("/")[0]) if v in layers), needed.layer)
    return Footprint(needed.total, len(file), at, needed.alive, largest, weights.get(largest, 0))


def _layers(graph: Graph, plan: Plan) -> dict[str, str]:
    """Return value or node -> the layer that computes it: of a kernel, its linear operator."""
    nodes = {n.name: n for n in graph.nodes}
    names = {n.name: n.display_name for n in graph.nodes}
    for group in plan.groups:
        linear = next((name for name in group if name in nodes and is_linear(graph, nodes[name])), None)
        names |= dict.fromkeys(group, names[linear]) if linear else {}
    return {o: names[n.name] for n in graph.nodes for o in (n.name, *n.outputs)}
