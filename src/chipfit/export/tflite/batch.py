"""How many samples a file takes at once."""

from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS


def counts(node: Node) -> bool:
    """Its shape holds a number of samples: it repeats something, such as a class token, for each, or compares them."""
    return node.op in ("Expand", "Reshape") and None in node.attrs["shape"]


def fixed(graph: Graph) -> int | None:
    """The samples in a file of which nobody said how many; None where any number can be given to it.

    A transposed convolution is told the size of its result, which the schema has no open batch for.
    """
    kinds = (OPS[n.op].kind for n in graph.nodes if n.op in OPS)
    return 1 if "transposed" in kinds or any(map(counts, graph.nodes)) else None
