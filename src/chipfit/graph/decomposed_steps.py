"""The steps of recurrent layers that are decomposed, see `chipfit.passes.recurrent`."""

from collections import Counter
from collections.abc import Iterator

from chipfit.graph.ir import Graph, Node


def places_in_steps(graph: Graph) -> Iterator[tuple[Node, str, int, tuple[str, int]]]:
    """Yield the nodes of decomposed layers: node, layer, step, and its place in the step, which is alike in all steps.

    The place is the operator, and how many of the same operator the step has before.
    """
    counts = Counter[tuple[str, int, str]]()
    for n in graph.nodes:
        if n.step is not None:
            key = n.composite, n.step, n.op
            yield n, n.composite, n.step, (n.op, counts[key])
            counts[key] += 1
