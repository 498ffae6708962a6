"""Weighted linear operators under one view: y = W x + b, whatever the convolution, its groups or its direction.

A weight seen *in groups* is [g, O/g, I/g, *kernel] for every operator: g groups, each of which takes I/g input
channels to O/g output channels. Linear has one group and no kernel.
"""

import math
from collections.abc import Sequence

import torch

from chipfit.graph.edit import new_name
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS

CONVS = frozenset(op for op, row in OPS.items() if row.kind == "conv")
TRANSPOSED = frozenset(op for op, row in OPS.items() if row.kind == "transposed")
LINEAR = frozenset(op for op, row in OPS.items() if row.kind)


def is_linear(graph: Graph, node: Node) -> bool:
    """A convolution or linear layer whose weight, and bias if any, are constants of the model."""
    return node.op in LINEAR and all(graph.is_weight(i) for i in node.inputs[1:] if i is not None)


def is_depthwise(graph: Graph, node: Node) -> bool:
    """A linear operator of which each output channel reads one of several input channels."""
    groups = node.attrs.get("groups", 1)
    return groups > 1 and is_linear(graph, node) and in_groups(node, graph.weights[node.weight]).shape[2] == 1


def channel_axis(node: Node) -> int:
    """Where a linear operator's data have their channels."""
    return -1 if node.op == "Linear" else 1


def on_axis_1(graph: Graph, node: Node) -> bool:
    """Whether the data of a linear operator have their channels there."""
    return node.op != "Linear" or len(graph.shape(node.data)) == 2


def in_groups(node: Node, w: torch.Tensor) -> torch.Tensor:
    """View of a weight as [g, O/g, I/g, *kernel]."""
    g = node.attrs.get("groups", 1)
    parts = w.reshape(g, w.shape[0] // g, *w.shape[1:])
    return parts.transpose(1, 2) if node.op in TRANSPOSED else parts


def from_groups(node: Node, w: torch.Tensor) -> torch.Tensor:
    """The inverse of `in_groups`."""
    parts = w.transpose(1, 2) if node.op in TRANSPOSED else w
    return parts.reshape(-1, *parts.shape[2:])


def scale_outputs(node: Node, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The weight that multiplies output channel o by k[o]; k [O]."""
    parts = in_groups(node, w)
    return from_groups(node, parts * k.to(w.dtype).view(parts.shape[0], -1, *[1] * (parts.dim() - 2)))


def scale_inputs(node: Node, w: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The weight that multiplies input channel i by k[i]; k [I]."""
    parts = in_groups(node, w)
    return from_groups(node, parts * k.to(w.dtype).view(parts.shape[0], 1, -1, *[1] * (parts.dim() - 3)))


def out_channels(node: Node, w: torch.Tensor) -> int:
    parts = in_groups(node, w)
    return parts.shape[0] * parts.shape[1]


def with_bias(graph: Graph, node: Node, bias: torch.Tensor) -> Node:
    """The node with this bias, [O], which is written to `graph.weights` under the name that the old one had."""
    w = node.weight
    name = node.bias or new_name(graph, w[: -len("weight")] + "bias" if w.endswith("weight") else w + ".bias")
    graph.weights[name] = bias.detach().to(graph.weights[w].dtype)
    if w in graph.trainable:
        graph.trainable.add(name)
    return node.with_(inputs=(*node.inputs[:2], name))


def bias_or_zero(graph: Graph, node: Node) -> torch.Tensor:
    """The bias, [O] float64; zeros where there is none."""
    name = node.bias
    if name is not None:
        return graph.weights[name].detach().double()
    w = graph.weights[node.weight]
    return torch.zeros(out_channels(node, w), dtype=torch.float64, device=w.device)


def products(graph: Graph, node: Node) -> float:
    """Multiplications of one sample; 0 of operators that have no sums of products.

    Every weight once for each position of the output (of the input, transposed); of two values, each number of the
    result as often as sums are long; attention has two such products.
    """
    if node.op in ("MatMul", "SDPA"):
        left, made = (math.prod(d or 1 for d in graph.shape(v)) for v in (node.data, node.output))
        inner, keys = (graph.shape(v or "")[k] or 1 for v, k in ((node.data, -1), (node.inputs[1], -2)))
        return float(made * inner if node.op == "MatMul" else (left + made) * keys)
    if not is_linear(graph, node):
        return 0.0
    value = graph.values[node.data if node.op.startswith("Transpose") else node.output]
    return float(graph.weights[node.weight].numel() * places(node, value.shape))


def places(node: Node, shape: Sequence[int | None]) -> int:
    """Positions of one sample of a value of this shape, each with all channels; an unknown size counts once."""
    return math.prod(int(p or 1) for p in (shape[2:] if node.op != "Linear" else shape[1:-1]))
