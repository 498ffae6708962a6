"""What depends on no input of the model is computed once: its result is a weight.

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

#: elements that a result may always have; a larger one that is also larger than all that it is made of may have an
#: eighth of the model's, so that files do not grow by what is cheap to compute
_LEAST, _SHARE = 1 << 16, 8


@register("pass", "fold_constants", stage="rewrite")
def fold_constants(graph: Graph) -> Rewritten:
    """Replace every operator whose operands are all weights by its result, as the engine computes it.

    The weight of a layer that was computed from others is named as if the layer had it: "layer.weight". It is trained
    in their place if one of them was a parameter; they stay in `graph.weights`, unread, as those of folded batch norms
    do. What draws random numbers stays, and so do the model's outputs.
    """
    graph, notes = graph.copy(), list[str]()
    limit = max(_LEAST, sum(w.numel() for w in graph.weights.values()) // _SHARE)
    found: dict[str, torch.Tensor] = {}  # value -> its constant
    trained = set(graph.trainable)  # weights and values that come from parameters
    rest: list[Node] = []
    for n in graph.nodes:
        given = [i for i in n.inputs if i is not None]
        table = {i: found[i] if i in found else graph.weights.get(i) for i in given}
        outs = _compute(graph, n, table)
        grown = sum(o.numel() for o in outs)
        if not outs or grown > max(limit, sum(t.numel() for t in table.values() if t is not None)):
            rest.append(n)
            if outs:
                notes.append(f"'{n.who}' depends on no input and is computed all the same: it has {grown} elements")
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
                notes.append(f"'{names[i]}' of '{n.who}' depends on no input: computed once")
    for value in found:
        graph.values.pop(value, None)
    graph.nodes = [n.with_(inputs=tuple(names.get(i or "", i) for i in n.inputs)) for n in rest]
    return Rewritten(graph, notes)


def _compute(graph: Graph, n: Node, table: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The results of a node; none where it must stay, or one is no tensor."""
    if n.op == "Dropout" or not set(n.outputs).isdisjoint(graph.outputs):
        return ()
    if any(t is None for t in table.values()) or (n.op == OPAQUE and not repeatable(n.attrs["target"])):
        return ()
    with torch.no_grad():
        outs = execute(n, [None if i is None else table[i].detach() for i in n.inputs])
    return tuple(o.contiguous() for o in outs) if all(isinstance(o, torch.Tensor) for o in outs) else ()


def _name(graph: Graph, n: Node, slot: str, value: str) -> str:
    """The layer's weight or bias; anything else keeps its name."""
    kind = {"w": "weight", "b": "bias"}.get(slot)
    return new_name(graph, f"{n.layer}.{kind}") if kind and n.layer else value
