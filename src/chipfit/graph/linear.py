"""Weighted linear operators in one form, y = W x + b: linear layers and convolutions, grouped or transposed.

A weight *in groups* is [g, O/g, I/g, *kernel] for every operator: g groups, each of which maps I/g input channels to
O/g output channels. Linear has one group and no kernel.
"""

import math
import re
from collections.abc import Sequence

import torch

from chipfit.graph.edit import new_name
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS

CONVS = frozenset(op for op, row in OPS.items() if row.kind == "conv")
TRANSPOSED = frozenset(op for op, row in OPS.items() if row.kind == "transposed")
LINEAR = frozenset(op for op, row in OPS.items() if row.kind)


def is_linear(graph: Graph, node: Node) -> bool:
    """Check for a convolution or linear layer whose weight, and bias if any, are constants of the model."""
    return node.op in LINEAR and all(graph.is_weight(i) for i in node.inputs[1:] if i is not None)


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Check for a linear operator whose output channels each read one of several input channels."""
    groups = node.attrs.get("groups", 1)
    return groups > 1 and is_linear(graph, node) and in_groups(node, graph.weights[node.weight]).shape[2] == 1


def channel_axis(node: Node) -> int:
    """Return the channel axis of a linear operator's data."""
    return -1 if node.facts.kind == "linear" else 1


def on_axis_1(graph: Graph, node: Node) -> bool:
    """Check whether the data of a linear operator have their channels on axis 1."""
    return node.facts.kind != "linear" or len(graph.shape(node.data)) == 2


def in_groups(node: Node, w: torch.Tensor) -> torch.Tensor:
    """Return a view of a weight as [g, O/g, I/g, *kernel]."""
    g = node.attrs.get("groups", 1)
    parts = w.reshape(g, w.shape[0] // g, *w.shape[1:])
    return parts.transpose(1, 2) if node.op in TRANSPOSED else parts


def from_groups(node: Node, w: torch.Tensor) -> torch.Tensor:
    """Invert `in_groups`."""
    parts = w.transpose(1, 2) if node.op in TRANSPOSED else w
    return parts.reshape(-1, *parts.shape[2:])


def scale_outputs(node: Node, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the weight with output channel o multiplied by k[o]; k is [O]."""
    parts = in_groups(node, w)
    return from_groups(node, parts * k.to(w.dtype).view(parts.shape[0], -1, *[1] * (parts.dim() - 2)))


def scale_inputs(node: Node, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the weight with input channel i multiplied by k[i]; k is [I]."""
    parts = in_groups(node, w)
    return from_groups(node, parts * k.to(w.dtype).view(parts.shape[0], 1, -1, *[1] * (parts.dim() - 3)))


def out_channels(node: Node, w: torch.Tensor) -> int:
    parts = in_groups(node, w)
    return parts.shape[0] * parts.shape[1]


def bias_name(graph: Graph, weight: str) -> str:
    """Return a free name for the bias of a layer without one, in the module of its weight."""
    module, dot, leaf = weight.rpartition(".")
    named = re.sub("weight|kernel", "bias", leaf)
    return new_name(graph, module + dot + (named if named != leaf else f"{leaf}_bias"))


def with_bias(graph: Graph, node: Node, bias: torch.Tensor) -> Node:
    """Return the node with this bias, [O], stored in `graph.weights` under the name of the old one or a new name."""
    w = node.weight
    name = node.bias or bias_name(graph, w)
    graph.weights[name] = bias.detach().to(graph.weights[w].dtype)
    if w in graph.trainable:
        graph.trainable.add(name)
    return node.with_(inputs=(*node.inputs[:2], name))


def bias_or_zero(graph: Graph, node: Node) -> torch.Tensor:
    """Return the bias, [O] float64; zeros if there is none."""
    name = node.bias
    if name is not None:
        return graph.weights[name].detach().double()
    w = graph.weights[node.weight]
    return torch.zeros(out_channels(node, w), dtype=torch.float64, device=w.device)


def multiplications(graph: Graph, node: Node) -> float:
    """Return the multiplications for one sample; 0 for operators without sums of products.

    Each weight counts once for each position of the output (of the input, for transposed convolutions), of a recurrent
    layer for each step. A product of two values counts the numbers of its result times the length of a sum; attention
    has two products.
    """
    if node.facts.recurrent or node.op == "SVDF":
        steps = graph.shape(node.data)[1] if len(graph.shape(node.data)) == 3 else 1
        weights = [graph.weights.get(node.operand(slot) or "") for slot in ("w", "r", "w_time")]
        return float((steps or 1) * sum(w.numel() for w in weights if w is not None))
    if node.op in ("MatMul", "SDPA"):
        left, made = graph.size(node.data), graph.size(node.output)
        inner, keys = (graph.shape(v or "")[k] or 1 for v, k in ((node.data, -1), (node.inputs[1], -2)))
        return float(made * inner if node.op == "MatMul" else (left + made) * keys)
    if not is_linear(graph, node):
        return 0.0
    shape = graph.shape(node.data if node.op.startswith("Transpose") else node.output)
    return float(graph.weights[node.weight].numel() * places(node, shape))


def places(node: Node, shape: Sequence[int | None]) -> int:
    """Return the positions of one sample of a value of this shape, each with all channels; unknown sizes count once."""
    return math.prod(int(p or 1) for p in (shape[2:] if node.facts.kind != "linear" else shape[1:-1]))
