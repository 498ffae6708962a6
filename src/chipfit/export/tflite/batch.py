"""The batch size of a file."""

from chipfit.graph.ir import Graph, Node


def depends_on_batch(node: Node) -> bool:
    """Return whether a node's target shape holds the batch size, as where a class token is repeated for each sample."""
    return node.op in ("Expand", "Reshape") and None in node.attrs["shape"]


def fixed_batch_size(graph: Graph) -> int | None:
    """Return the batch size of a file if the user gave none; None if the batch stays open.

    A transposed convolution has its output size as an operand, which the schema cannot leave open.
    """
    kinds = (n.facts.kind for n in graph.nodes)
    return 1 if "transposed" in kinds or any(map(depends_on_batch, graph.nodes)) else None
