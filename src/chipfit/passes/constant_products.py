"""Turn products with a constant matrix into linear layers: x W = Linear(x, W^T)."""

from chipfit.graph.edit import new_name
from chipfit.graph.ir import Graph, Node
from chipfit.passes.collapse_linear import with_constant
from chipfit.passes.rewriting import Readers, Rewritten
from chipfit.registry import register


@register("pass", "constant_products", stage="rewrite", after=("fold_constants",))
def constant_products(graph: Graph) -> Rewritten:
    """Replace MatMul(x, W) by Linear(x, W^T), and a vector that is added to its result by the bias.

    Chips have integer weights in linear layers, and many have none in products. Both compute the same sums. What else
    reads the matrix keeps it.
    """
    graph, notes, turned = graph.copy(), list[str](), dict[str, str]()
    for node in [n for n in graph.nodes if _is_linear_layer(graph, n)]:
        matrix = node.inputs[1] or ""
        if matrix not in turned:
            turned[matrix] = _transposed(graph, matrix)
        linear = node.with_(op="Linear", inputs=(node.data, turned[matrix]))
        graph.nodes[graph.nodes.index(node)] = linear
        notes.append(f"'{node.display_name}', a product with a constant matrix, became a linear layer")
    for matrix, name in turned.items():
        if others := Readers(graph).of(matrix):
            which = f"weight '{matrix}' of '{others[0].layer}' is read along its other axis too"
            notes.append(f"{which}, from a copy of its own, '{name}'")
        elif matrix not in graph.outputs:
            del graph.weights[matrix]
            graph.trainable.discard(matrix)
    return Rewritten(_with_biases(graph, set(turned.values())), notes)


def _is_linear_layer(graph: Graph, node: Node) -> bool:
    """Return whether a node multiplies data by a constant matrix."""
    if node.op != "MatMul" or graph.is_weight(node.data) or not graph.is_weight(node.inputs[1]):
        return False
    matrix = node.inputs[1] or ""
    return graph.weights[matrix].dim() == 2 and graph.is_float(matrix) and len(graph.shape(node.data)) > 1


def _transposed(graph: Graph, matrix: str) -> str:
    """Enter the transpose of a weight; return its name."""
    name = new_name(graph, f"{matrix}_t")
    graph.weights[name] = graph.weights[matrix].detach().t().contiguous()
    graph.trainable |= {name} if matrix in graph.trainable else set()
    return name


def _with_biases(graph: Graph, weights: set[str]) -> Graph:
    """Move constants that are added to the results of linear layers with these weights into biases."""
    readers = Readers(graph)
    for node in [n for n in graph.nodes if n.facts.kind == "linear" and n.weight in weights]:
        add = readers.only(node.output)
        merged = None if add is None else with_constant(readers, node, add)
        if add is not None and merged is not None:
            graph.nodes[graph.nodes.index(node)] = merged.with_(outputs=add.outputs)
            graph.nodes.remove(add)
            del graph.values[node.output]
    return graph
