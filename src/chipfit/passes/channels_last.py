"""Store the weights of 2-D convolutions in channels-last memory: same numbers and shapes, faster on CPUs."""

import torch

from chipfit.graph.ir import Graph
from chipfit.graph.linear import LINEAR
from chipfit.passes.rewriting import Rewritten
from chipfit.registry import register


@register("pass", "channels_last", stage="rewrite", after=("add_missing_bias",))
def channels_last(graph: Graph) -> Rewritten:
    """Change the memory format of convolution weights; values and shapes stay as they are."""
    graph = graph.copy()
    for n in graph.nodes:
        w = graph.weights.get(n.weight) if n.op in LINEAR else None
        if w is not None and w.dim() == 4:
            graph.weights[n.weight] = w.contiguous(memory_format=torch.channels_last)
    return Rewritten(graph, [])
