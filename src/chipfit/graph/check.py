"""The invariants of a Graph, checked after every pass."""

from chipfit.errors import GraphError
from chipfit.graph.ir import OPAQUE, Graph
from chipfit.operators.table import OPS


def check(graph: Graph, blame: str = "") -> None:
    """Check that a graph is consistent.

    Names are unique, every value is written once and before it is read, inputs fit the operator's slots.

    Raises:
        GraphError: naming the node and the pass, `blame`, that broke it.
    """
    where = f"after pass '{blame}'" if blame else ""
    known = set(graph.inputs) | set(graph.weights)
    names: set[str] = set()
    for n in graph.nodes:
        if n.name in names:
            raise GraphError(f"Two nodes are named '{n.name}'", where=where)
        names.add(n.name)
        if n.op != OPAQUE and n.op not in OPS:
            raise GraphError(f"Node '{n.name}' has the unknown operator '{n.op}'", where=where)
        for i in n.inputs:
            if i is not None and i not in known:
                raise GraphError(f"Node '{n.name}' reads '{i}' before it is written", where=where)
        slots = n.facts.slots
        least = sum(not s.endswith(("?", "*")) for s in slots)
        if len(n.inputs) < least or (len(n.inputs) > len(slots) and not any(s.endswith("*") for s in slots)):
            allowed = " ".join(slots)
            raise GraphError(f"Node '{n.name}' ({n.op}) has {len(n.inputs)} inputs", where=where, allowed=allowed)
        for o in n.outputs:
            if o in known:
                raise GraphError(f"Value '{o}' is written twice, again by '{n.name}'", where=where)
            if o not in graph.values:
                raise GraphError(f"Value '{o}' of node '{n.name}' has no shape", where=where)
            known.add(o)
    for o in graph.outputs:
        if o not in known:
            raise GraphError(f"Output '{o}' is never written", where=where)
