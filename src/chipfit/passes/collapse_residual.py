"""Merge conv(x) + x into one convolution: add 1 to the centre tap of each channel's own kernel."""

from typing import Any

import torch

from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import from_groups, in_groups, is_linear
from chipfit.passes.rewriting import Readers, Rewritten
from chipfit.registry import Setting, register

_SETTING = Setting("collapse_residual", False, "conv(x) + x becomes one convolution")


@register("pass", "collapse_residual", stage="rewrite", after=("collapse_linear",), setting=_SETTING)
def collapse_residual(graph: Graph) -> Rewritten:
    """Rewrite W x + x as (W + I) x, where I has a 1 at the tap that reads the output's own position.

    The operator must keep shape and channels and have stride 1; it may have groups. Only the addition reads its result.
    """
    graph, notes = graph.copy(), list[str]()
    readers = Readers(graph)
    for node in list(graph.nodes):
        fits = node.facts.kind in ("conv", "linear") and is_linear(graph, node)
        add = readers.only(node.output) if fits else None
        if add is None or add.op != "Add" or set(add.inputs) != {node.inputs[0], node.output}:
            continue
        tap = _centre(node)
        why = "no tap of its kernel reads the output's own position" if tap is None else readers.why_fixed(node)
        if not why and graph.shape(node.output) != graph.shape(node.inputs[0] or ""):
            why = "the shapes differ"
        if why:
            notes.append(f"'{node.display_name}' keeps its residual addition '{add.name}': {why}")
            continue
        name = node.weight
        parts = in_groups(node, graph.weights[name].detach().clone())  # [g, C/g, C/g, *kernel]
        diagonal = torch.arange(parts.shape[1], device=parts.device)
        index: tuple[Any, ...] = (slice(None), diagonal, diagonal, *(tap or ()))
        parts[index] += 1
        graph.weights[name] = from_groups(node, parts)
        graph.nodes[graph.nodes.index(node)] = node.with_(outputs=add.outputs)
        graph.nodes.remove(add)
        del graph.values[node.output]
        notes.append(f"collapsed the residual addition '{add.name}' into '{node.display_name}'")
    return Rewritten(graph, notes)


def _centre(node: Node) -> tuple[int, ...] | None:
    """Return the tap that reads the output's own position; () for Linear, None if no tap does."""
    if node.facts.kind == "linear":
        return ()
    a = node.attrs
    if any(s != 1 for s in a["stride"]) or any(low % d for (low, _), d in zip(a["padding"], a["dilation"])):
        return None
    return tuple(low // d for (low, _), d in zip(a["padding"], a["dilation"]))
