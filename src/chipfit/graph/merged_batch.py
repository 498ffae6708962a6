"""Axes that are merged with the batch."""

import math

from chipfit.graph.ir import Graph


def sizes_in_front(graph: Graph) -> dict[str, int]:
    """Return values whose batch axis holds other axes in front of the samples, [L, N] in one, and their size L.

    Results that depend on no input, and constants that the network returns, have 0: they are the same for all samples.
    """
    found = {o: 0 for o in graph.outputs if o in graph.weights}
    varying = {*graph.inputs}
    for n in graph.nodes:
        if varying.isdisjoint(n.inputs):
            found |= dict.fromkeys(n.outputs, 0)
            continue
        varying.update(n.outputs)
        carried = max([1, *(found[i] for i in n.inputs if i in found)])
        shapes = [graph.shape(n.data), graph.shape(n.output)] if n.op == "Reshape" else []
        if shapes and all(None in s for s in shapes):
            before, after = (math.prod(s or 1 for s in shape[: shape.index(None)]) for shape in shapes)
            carried = max(carried * before // after, 1)
        if carried > 1:
            found |= {o: carried for o in n.outputs if None in graph.shape(o)}
    return found
