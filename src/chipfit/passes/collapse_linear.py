"""Merge two consecutive linear operators: conv -> 1x1 conv, Linear -> Linear, and a constant added to either."""

import math

import torch

from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import CONVS, bias_or_zero, channel_axis, is_linear, with_bias
from chipfit.passes.rewriting import Readers, Rewritten
from chipfit.registry import Setting, register

_SETTING = Setting("collapse_linear", False, "two linear operators in a row become one")


@register("pass", "collapse_linear", stage="rewrite", after=("duplicate_shared_biases",), setting=_SETTING)
def collapse_linear(graph: Graph) -> Rewritten:
    """Merge W2 (W1 x + b1) + b2 into (W2 W1) x + (W2 b1 + b2), and (W x + b) + c into W x + (b + c).

    The second operator must be a 1x1 convolution of stride 1 without padding or groups, or Linear after Linear; the
    first may have any kernel, stride and padding. A pair whose product has more parameters than its factors stays.
    """
    graph, notes = graph.copy(), dict[str, None]()
    while _collapse_one(graph, notes):
        pass
    return Rewritten(graph, list(notes))


def _collapse_one(graph: Graph, notes: dict[str, None]) -> bool:
    """Merge the first pair that can be merged; return False if there is none."""
    readers = Readers(graph)
    for first in graph.nodes:
        second = readers.only(first.output) if is_linear(graph, first) else None
        if second is None:
            continue
        merged = with_constant(readers, first, second) or _with_product(readers, first, second, notes)
        if merged is not None:
            notes[f"collapsed '{second.display_name}' into '{first.display_name}'"] = None
            graph.nodes[graph.nodes.index(first)] = merged.with_(outputs=second.outputs)
            graph.nodes.remove(second)
            del graph.values[first.output]
            return True
    return False


def _with_product(readers: Readers, first: Node, second: Node, notes: dict[str, None]) -> Node | None:
    """Return `first` with the product of both weights."""
    graph = readers.graph
    fits = first.facts.kind in ("conv", "linear") and second.op == first.op and second.inputs[0] == first.output
    if not fits or not is_linear(graph, second):
        return None
    w1, w2 = (graph.weights[n.weight] for n in (first, second))
    if math.prod(w2.shape[2:]) > 1:
        return None  # the second kernel is larger than 1x1
    why = readers.why_fixed(first, second)
    if first.op in CONVS:
        a = second.attrs
        if first.attrs["groups"] > 1 or a["groups"] > 1:
            why = "one of them has groups"
        elif any(s != 1 for s in a["stride"]) or any(p for pair in a["padding"] for p in pair):
            why = "the second has stride or padding"
    product = w2.shape[0] * math.prod(w1.shape[1:])
    if not why and product > w1.numel() + w2.numel():
        why = f"{product} parameters instead of {w1.numel() + w2.numel()}"
    if why:
        notes[f"'{first.display_name}' and '{second.display_name}' do not collapse: {why}"] = None
        return None
    outer = w2.detach().double().flatten(1)  # [O2, O1]
    bias = outer @ bias_or_zero(graph, first) + bias_or_zero(graph, second)
    weight = torch.tensordot(outer, w1.detach().double(), 1)  # [O2, I, *kernel]
    graph.weights[first.weight] = weight.to(w1.dtype)
    return first if first.bias is None and second.bias is None else with_bias(graph, first, bias)


def with_constant(readers: Readers, first: Node, add: Node) -> Node | None:
    """Return `first` with the constant that `add` adds to its result in its bias."""
    graph, other = readers.graph, next((i for i in add.inputs if i != first.output), None)
    adds = add.op == "Add" or (add.op == "Sub" and add.inputs[0] == first.output)
    if not adds or not graph.is_weight(other):
        return None
    constant, shape = graph.weights[other or ""].detach().double(), graph.shape(first.output)
    axis = channel_axis(first) % len(shape)
    padded = [1] * (len(shape) - constant.dim()) + list(constant.shape)
    bias = bias_or_zero(graph, first)
    others = [size for k, size in enumerate(padded) if k != axis]
    per_channel = len(padded) == len(shape) and set(others) <= {1} and padded[axis] in (1, len(bias))
    if not per_channel or not graph.is_float(other or "") or readers.why_fixed(first):
        return None
    bias = bias + (constant if add.op == "Add" else -constant).reshape(-1)
    return with_bias(graph, first, bias)
