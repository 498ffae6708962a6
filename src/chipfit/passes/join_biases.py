"""Join the two biases of an LSTM for kernels that add one."""

from chipfit.graph.edit import new_name
from chipfit.graph.ir import Graph
from chipfit.passes.rewriting import NodeTest, Rewritten
from chipfit.registry import register


@register("pass", "join_biases", stage="rewrite", after=("undone_moves",), needs=("in_integers", "listed"))
def join_biases(graph: Graph, in_integers: NodeTest, listed: NodeTest) -> Rewritten:
    """Replace the biases b and rb of each LSTM by b + rb, where the platform has a kernel for the result."""
    graph = graph.copy()
    for k, n in enumerate(graph.nodes):
        both = [i for i in n.inputs[3:5] if i is not None and graph.is_weight(i)] if n.op == "LSTM" else []
        joint = n.with_(inputs=(*n.inputs[:3], *both[:1], None, *n.inputs[5:]))
        if len(both) < 2 or not (in_integers(graph, joint) or (listed(graph, joint) and not listed(graph, n))):
            continue
        name = new_name(graph, f"{n.name}/bias")
        b, rb = (graph.weights[i].detach() for i in both)
        graph.weights[name] = b + rb
        graph.trainable |= {name} if graph.trainable.intersection(both) else set()
        graph.nodes[k] = joint.with_(inputs=(*n.inputs[:3], name, None, *n.inputs[5:]))
    return Rewritten(graph, [])
