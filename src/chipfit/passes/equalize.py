"""Cross-layer equalization: scale channels between two linear operators so that both weights have equal ranges."""

import torch

from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import in_groups, is_linear
from chipfit.passes.rewriting import Readers, Rewritten, scale_between, scales_by_channel
from chipfit.registry import Repair, Setting, register

_SETTING = Setting("equalize", False, "channels between two linear operators get weights of equal range")

#: operators with channels on the last axis of their results
_ON_LAST_AXIS = ("Linear", "Embedding")


@register("pass", "equalize", stage="rewrite", after=("relu_bound",), setting=_SETTING, repair=Repair(True))
def equalize(graph: Graph, *, sweeps: int = 40, tolerance: float = 1e-3) -> Rewritten:
    """Scale channel i between two linear operators by 1 / s_i, s_i = sqrt(r1_i / r2_i), without changing the network.

    W1' = W1 / s, b1' = b1 / s, W2' = W2 s, with r1_i the largest |weight| of output channel i of the first operator,
    which may be an embedding, and r2_i the largest |weight| of input channel i over all readers. Pairs are visited
    repeatedly until every s is within 1 +- `tolerance`, at most `sweeps` times. A channel that is zero on one side
    keeps its scale.

    Source: Nagel et al. 2019, arXiv:1906.04721, eq. 11.
    """
    graph, notes = graph.copy(), list[str]()
    readers = Readers(graph)
    pairs: list[tuple[Node, list[Node]]] = []  # an operator, and the linear operators behind it
    for first in (n for n in graph.nodes if is_linear(graph, n) or _is_table(graph, n)):
        last_axis = first.op in _ON_LAST_AXIS
        found = readers.linear_behind(first.output, _elementwise if last_axis else scales_by_channel)
        own = (first.weight, first.bias) if is_linear(graph, first) else (first.weight,)
        why = found.refusal or readers.why_shared(*(i for i in own if i is not None)) or readers.why_fixed(*found.ends)
        if not why and any(last_axis != (end.op in _ON_LAST_AXIS) for end in found.ends):
            why = "their channels lie on different axes"
        if why:
            notes.append(f"'{first.display_name}' is not equalized: {why}")
        else:
            pairs.append((first, found.ends))
    touched: set[str] = set()
    for _ in range(sweeps):
        greatest_change = 0.0
        for first, ends in pairs:
            s = _scales(graph, first, ends)
            change = float((s - 1).abs().max())
            if change > tolerance:
                scale_between(graph, [first], ends, s)
                touched.add(first.name)
            greatest_change = max(greatest_change, change)
        if greatest_change <= tolerance:
            break
    for first, ends in pairs:
        if first.name in touched:
            notes.append(f"equalized '{first.display_name}' with {', '.join(repr(e.display_name) for e in ends)}")
    if not pairs and any((n.clip_range or (None, None))[1] is not None for n in graph.nodes):
        hint = "Settings(equalize_groups='always') scales channels through clipped activations"
        notes.append(f"warning: equalize changed nothing: every pair of layers is refused; {hint}")
    return Rewritten(graph, notes)


def _is_table(graph: Graph, n: Node) -> bool:
    """Check for an embedding whose rows are constants of the model."""
    return n.op == "Embedding" and graph.is_weight(n.weight) and graph.is_float(n.weight)


def _scales(graph: Graph, first: Node, ends: list[Node]) -> torch.Tensor:
    """Return s of eq. 11, [C] float64; 1 where a channel has no range on one side."""
    w = graph.weights[first.weight].detach().double()
    before = w.abs().amax(0) if first.op == "Embedding" else in_groups(first, w).abs().flatten(2).amax(2).flatten()
    after = torch.zeros_like(before)
    for end in ends:
        w = in_groups(end, graph.weights[end.weight].detach().double())
        after = torch.maximum(after, w.abs().transpose(1, 2).flatten(2).amax(2).flatten())
    live = (before > 0) & (after > 0)
    return torch.where(live, torch.sqrt(before / after), 1.0)


def _elementwise(node: Node) -> bool:
    """Check whether an operator commutes with a factor for each channel, whatever axis the channels are on."""
    return scales_by_channel(node) and (node.facts.layout == "elementwise" or node.facts.activation)
