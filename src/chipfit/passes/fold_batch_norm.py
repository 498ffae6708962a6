"""Fold batch norms into convolutions: W' = W g / sqrt(var + eps), b' = (b - mean) g / sqrt(var + eps) + beta."""

import torch

from chipfit.graph.folds import batch_norm_terms, checksum
from chipfit.graph.ir import Fold, Graph, Node
from chipfit.graph.linear import LINEAR, TRANSPOSED, bias_name, bias_or_zero, scale_outputs
from chipfit.passes.rewriting import Readers, Rewritten
from chipfit.registry import register


@register("pass", "fold_batch_norm", stage="rewrite", after=("fold_constants",))
def fold_batch_norm(graph: Graph) -> Rewritten:
    """Fold every inference batch norm that follows a weighted operator into that operator's weights.

    Identities between them are left out. A weight read by several operators is folded once, and only if the same batch
    norm follows each of them. The tensors of batch norms stay in `graph.weights`, unread, so that the state dict keeps
    its names.

    Source: Jacob et al. 2018, arXiv:1712.05877, eq. 14.
    """
    graph = graph.copy()
    readers, producers, notes = Readers(graph), graph.producers(), list[str]()
    followers: dict[str, Node] = {}  # node name -> the batch norm that follows it
    between: dict[str, list[Node]] = {}  # name of a batch norm -> identities before it
    refused: dict[str, str] = {}  # name of a batch norm in the model -> why it stays
    for bn in graph.nodes:
        if bn.op == "BatchNorm":
            before, between[bn.name] = producers.get(bn.data), []
            while before is not None and before.op == "Identity" and readers.only(before.output) is not None:
                between[bn.name].append(before)
                before = producers.get(before.data)
            why = _refusal(readers, before, bn)
            if before is None or why:
                refused[bn.display_name] = why
            else:
                followers[before.name] = bn

    folded: dict[str, str] = {}  # weight -> name of its folded bias
    new: dict[str, Node | None] = {}  # node name -> its replacement; None for a node that is removed
    for node in graph.nodes:
        if node.name not in followers:
            continue
        bn, weight = followers[node.name], node.weight
        sharing = readers.of(weight) + (readers.of(node.bias) if node.bias else [])
        if any(r.name not in followers or _key(followers[r.name]) != _key(bn) for r in sharing):
            refused[bn.display_name] = f"weight '{weight}' is also read elsewhere, folding would change that reader"
            continue
        if weight not in folded:
            folded[weight] = _fold(graph, node, bn)
            notes.append(f"folded batch norm '{bn.display_name}' into '{node.display_name}'")
        new[node.name] = node.with_(inputs=(node.data, weight, folded[weight]), outputs=bn.outputs)
        new |= dict.fromkeys((n.name for n in (bn, *between[bn.name])), None)
        for n in (node, *between[bn.name]):
            del graph.values[n.output]
    graph.nodes = [m for n in graph.nodes if (m := new.get(n.name, n)) is not None]
    notes += [f"batch norm '{name}' does not fold backwards: {why}" for name, why in refused.items()]
    return Rewritten(graph, notes)


def _key(bn: Node) -> tuple:
    return (*bn.inputs[1:], bn.attrs["eps"])


def _refusal(readers: Readers, node: Node | None, bn: Node) -> str:
    """Return why a batch norm cannot be folded into `node`; "" if it can."""
    graph = readers.graph
    if node is None or node.op not in LINEAR:
        return f"it follows {'the input' if node is None else node.op}, which has no weights"
    if not graph.is_weight(node.weight) or any(i is not None and not graph.is_weight(i) for i in bn.inputs[1:]):
        return "a weight or statistic is computed at run time"
    if readers.only(node.output) is None:
        return f"the output of '{node.display_name}' is also read elsewhere"
    if node.facts.kind == "linear" and len(graph.shape(node.output)) != 2:
        return "its channel axis is not the axis of the linear layer's outputs"
    return ""


def _fold(graph: Graph, node: Node, bn: Node) -> str:
    """Replace weight and bias in `graph.weights`; return the name of the bias."""
    w_name, b_name = node.weight, node.bias or bias_name(graph, node.weight)
    w, bias = graph.weights[w_name].detach(), bias_or_zero(graph, node)
    k, mean, beta = batch_norm_terms(graph, bn)  # [C_out]
    new_b = (bias - mean) * k + beta
    if node.op in TRANSPOSED:
        new_w = scale_outputs(node, w, k)
    else:
        # written straight into the layout in which CPUs convolve fastest: no temporary of the weight's size
        new_w = torch.empty_like(w, memory_format=torch.channels_last if w.dim() == 4 else torch.preserve_format)
        torch.mul(w, k.to(w.dtype).view(-1, *[1] * (w.dim() - 1)), out=new_w)
    graph.weights[w_name] = new_w.to(w.dtype)
    graph.weights[b_name] = new_b.to(w.dtype)
    if w_name in graph.trainable:
        graph.trainable.add(b_name)
    scale, shift, average, spread = bn.inputs[1:5]
    if average is not None and spread is not None:
        check = checksum(graph.weights[w_name], graph.weights[b_name])
        given = bn.attrs["eps"], node.bias is not None, check
        graph.folds[w_name] = Fold(b_name, scale, shift, average, spread, *given)
    return b_name
