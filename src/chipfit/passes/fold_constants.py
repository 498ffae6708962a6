"""Fold constants: compute values that depend on no input of the model once, and store them as weights.

Reparametrized and standardised weights, position tables and masks become plain constants, which chips store.
"""

from typing import Any

import torch

from chipfit.engine.kernels import execute
from chipfit.engine.opaque import repeatable
from chipfit.graph.edit import new_name
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register

#: a result of at most this many elements is always folded; a larger one that is also larger than its operands may have
#: an eighth of the elements of all weights, so that files do not grow by values that are cheap to compute
_LEAST, _SHARE = 1 << 16, 8


@register("pass", "fold_constants", stage="rewrite")
def fold_constants(graph: Graph) -> Rewritten:
    """Replace every operator whose operands are all weights by its result, as the engine computes it.

    A folded weight of a layer is named "layer.weight", as if the layer had it. It is trainable if one of the weights
    that it was computed from was; these stay in `graph.weights`, unread. Operators that draw random numbers stay, and
    operators that compute outputs of the model.
    """
    graph, notes = graph.copy(), list[str]()
    limit = max(_LEAST, sum(w.numel() for w in graph.weights.values()) // _SHARE)
    found: dict[str, torch.Tensor] = {}  # value -> its constant
    trained = set(graph.trainable)  # weights and values that depend on parameters
    rest: list[Node] = []
    for n in graph.nodes:
        given = [i for i in n.inputs if i is not None]
        table = {i: found[i] if i in found else graph.weights.get(i) for i in given}
        outs = _compute(graph, n, table)
        grown = sum(o.numel() for o in outs)
        if not outs or grown > max(limit, sum(t.numel() for t in table.values() if t is not None)):
            rest.append(n)
            if outs:
                notes.append(
                    f"'{n.display_name}' depends on no input and is computed all the same: it has {grown} elements"
                )
            continue
        found.update(zip(n.outputs, outs, strict=True))
        trained.update(n.outputs if trained.intersection(given) else ())
    names: dict[str, str] = {}
    for n in rest:
        for slot, i in graph.slots(n):
            if i in found and i not in names:
                names[i] = _name(graph, n, slot, i)
                graph.weights[names[i]] = found[i]
                graph.trainable.update({names[i]} if i in trained and found[i].is_floating_point() else ())
                notes.append(f"'{names[i]}' of '{n.display_name}' depends on no input: computed once")
    for value in found:
        graph.values.pop(value, None)
    graph.nodes = [n.with_(inputs=tuple(names.get(i or "", i) for i in n.inputs)) for n in rest]
    return Rewritten(graph, notes)


def _compute(graph: Graph, n: Node, table: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the results of a node; () if the node must stay, or a result is not a tensor."""
    if n.op == "Dropout" or not set(n.outputs).isdisjoint(graph.outputs):
        return ()
    if any(t is None for t in table.values()) or (n.op == OPAQUE and not repeatable(n.attrs["target"])):
        return ()
    with torch.no_grad():
        outs = execute(n, [None if i is None else table[i].detach() for i in n.inputs])
    return tuple(o.contiguous() for o in outs) if all(isinstance(o, torch.Tensor) for o in outs) else ()


def _name(graph: Graph, n: Node, slot: str, value: str) -> str:
    """Return the name of a folded value: the layer's weight or bias, else the name of the value."""
    kind = {"w": "weight", "b": "bias"}.get(slot)
    return new_name(graph, f"{n.layer}.{kind}") if kind and n.layer else value
