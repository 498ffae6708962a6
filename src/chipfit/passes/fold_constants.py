"""Fold constants: compute values that depend on no input of the model once, and store them as weights.

Weights computed by reparametrization or standardisation, position tables and masks become plain constants.
"""

from typing import Any

import torch

from chipfit.engine.kernels import execute
from chipfit.engine.opaque import repeatable
from chipfit.engine.shapes import broadcast
from chipfit.graph.edit import drop_dead, new_name
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register

#: results of at most this many elements are always folded
_ALWAYS_FOLDED = 1 << 16
#: larger ones are folded if they have no more elements than the operands, or than this share of all weights; the others
#: would make files larger although they are cheap to compute
_SHARE_OF_WEIGHTS = 1 / 8


@register("pass", "fold_constants", stage="rewrite")
def fold_constants(graph: Graph) -> Rewritten:
    """Replace every operator that depends on weights alone by its result, as the engine computes it.

    A result that a layer reads as its weight or bias is named "layer.weight" or "layer.bias", any other keeps its name.
    It is trainable if one of the weights that it was computed from is; those weights stay in `graph.weights`, even if
    nothing reads them. Operators that draw random numbers, compute model outputs or have large results are not folded.
    A constant that is repeated for each sample is read as it is where all readers broadcast it.
    """
    graph, notes = graph.copy(), list[str]()
    limit = max(_ALWAYS_FOLDED, int(_SHARE_OF_WEIGHTS * sum(w.numel() for w in graph.weights.values())))
    folded: dict[str, torch.Tensor] = {}  # value -> its constant
    trainable = set(graph.trainable)  # weights, and values computed from them
    kept: list[Node] = []
    for n in graph.nodes:
        operands = [i for i in n.inputs if i is not None]
        constants = {i: folded[i] if i in folded else graph.weights.get(i) for i in operands}
        outs = _compute(graph, n, constants)
        size = sum(o.numel() for o in outs)
        if not outs or size > max(limit, sum(t.numel() for t in constants.values() if t is not None)):
            kept.append(n)
            if outs:
                why = f"{size} elements are too many to store"
                notes.append(f"'{n.display_name}' depends on no input, but is computed in every run: {why}")
            continue
        folded.update(zip(n.outputs, outs, strict=True))
        trainable.update(n.outputs if trainable.intersection(operands) else ())
    names: dict[str, str] = {}
    for n in kept:
        for slot, i in graph.slots(n):
            if i in folded and i not in names:
                names[i] = _name(graph, n, slot, i)
                graph.weights[names[i]] = folded[i]
                graph.trainable.update({names[i]} if i in trainable and folded[i].is_floating_point() else ())
                notes.append(f"'{names[i]}' of '{n.display_name}' depends on no input: computed once")
    for value in folded:
        graph.values.pop(value, None)
    graph.nodes = [n.reading(names) for n in kept]
    for n in [n for n in graph.nodes if n.op == "Expand" and n.data in graph.weights and n.output not in graph.outputs]:
        _defer_repetition(graph, n)
    return Rewritten(graph, notes)


def _defer_repetition(graph: Graph, expand: Node) -> None:
    """Let readers broadcast a constant themselves; if one cannot, repeat the constant right before its first reader.

    What it is joined with is computed by then, and its format is known.
    """
    readers = [n for n in graph.nodes if expand.output in n.inputs]
    read = {n.name: n.with_(inputs=tuple(expand.data if i == expand.output else i for i in n.inputs)) for n in readers}
    broadcasting = (
        n.facts.layout == "elementwise"
        and broadcast([graph.shape(i) for i in n.inputs if i is not None]) == graph.shape(n.output)
        for n in read.values()
    )
    if all(broadcasting):
        graph.nodes = [read.get(n.name, n) for n in graph.nodes if n.name != expand.name]
        graph.values.pop(expand.output)
        drop_dead(graph)
    else:
        graph.nodes.remove(expand)
        graph.nodes.insert(graph.nodes.index(readers[0]), expand)


def _compute(graph: Graph, n: Node, constants: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the results of a node from its operands' `constants`; () if it must stay, or a result is not a tensor."""
    if n.op == "Dropout" or not set(n.outputs).isdisjoint(graph.outputs):
        return ()
    if any(t is None for t in constants.values()) or (n.op == OPAQUE and not repeatable(n.attrs["target"])):
        return ()
    with torch.no_grad():
        outs = execute(n, [None if i is None else constants[i].detach() for i in n.inputs])
    return tuple(o.contiguous() for o in outs) if all(isinstance(o, torch.Tensor) for o in outs) else ()


def _name(graph: Graph, n: Node, slot: str, value: str) -> str:
    """Return the name of a folded value that node `n` reads: "layer.weight", "layer.bias", or its own."""
    kind = {"w": "weight", "b": "bias"}.get(slot)
    return new_name(graph, f"{n.layer}.{kind}") if kind and n.layer else value
