"""The batch size of a file."""

from chipfit.graph import states
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan


def depends_on_batch(node: Node) -> bool:
    """Return whether a node's target shape holds the batch size, as where a class token is repeated for each sample."""
    return node.op in ("Expand", "Reshape") and None in node.attrs["shape"]


def keeps_states(graph: Graph, node: Node) -> bool:
    """Return whether a node is written as a kernel that keeps its states in tensors of the file."""
    return node.op == "LSTM" and states.keeps_states(graph, node)


def takes_one_sample(node: Node) -> bool:
    """Return whether the kernel of a node computes one sample only."""
    return node.op == "DetectionPostProcess"


def fixed_batch_size(graph: Graph, plan: Plan) -> int | None:
    """Return the batch size of a file if the user gave none; None if the batch stays open.

    A transposed convolution has its output size as an operand, which the schema cannot leave open; states lie in
    tensors of one size.
    """
    kinds = (n.facts.kind for n in graph.nodes)
    fixed = any(depends_on_batch(n) or keeps_states(graph, n) or takes_one_sample(n) for n in graph.nodes)
    return 1 if "transposed" in kinds or fixed else None
