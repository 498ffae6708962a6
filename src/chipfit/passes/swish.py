"""Join x * sigmoid(x) into SiLU, on chips with a kernel for it: one result is rounded instead of two."""

from chipfit.graph.edit import drop_dead, replace_node
from chipfit.graph.ir import Graph
from chipfit.operators.table import OPS
from chipfit.passes.rewriting import NodeTest, Readers, Rewritten
from chipfit.registry import register

_GATE = "Sigmoid"
_SWISH = next(op for op, row in OPS.items() if row.gate == _GATE)


@register("pass", "swish", stage="rewrite", needs=("in_integers",))
def swish(graph: Graph, in_integers: NodeTest) -> Rewritten:
    """Replace the product of a value with its sigmoid by SiLU, unless the platform computes only the parts in integers.

    A sigmoid that something else reads as well stays.

    Args:
        in_integers: whether the platform has an integer kernel for a node.
    """
    readers, makers = Readers(graph), graph.producers()
    graph, notes = graph.copy(), list[str]()
    for n in [n for n in graph.nodes if n.op == "Mul"]:
        for gate, x in (n.inputs, n.inputs[::-1]):
            s = makers.get(gate or "")
            if s is None or s.op != _GATE or s.inputs != (x,) or readers.only(s.output) is None:
                continue
            whole = n.with_(op=_SWISH, inputs=(x,), attrs={})
            if in_integers(graph, whole) or not (in_integers(graph, n) or in_integers(graph, s)):
                replace_node(graph, n, whole)
                notes.append(f"'{n.display_name}' times '{s.display_name}' became SiLU")
            break
    drop_dead(graph)
    return Rewritten(graph, notes)
