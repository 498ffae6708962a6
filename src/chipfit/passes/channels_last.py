"""Store the weights of 2-D convolutions in channels-last memory: same numbers and shapes, faster on CPUs."""

from __future__ import annotations

import torch

from chipfit.graph.ir import Graph


def channels_last(graph: Graph) -> tuple[Graph, list[str]]:
    """Change the memory format of convolution weights; nothing that can be observed but speed."""
    graph = graph.copy()
    for n in graph.nodes:
        w = n.inputs[1] if n.op in ("Conv2D", "DepthwiseConv2D", "TransposeConv2D") else None
        if w is not None and w in graph.weights:
            graph.weights[w] = graph.weights[w].contiguous(memory_format=torch.channels_last)
    return graph, []
