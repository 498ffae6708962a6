"""Copy weights that a graph shares with the user's model, so that later training of the model does not change them."""

from collections.abc import Mapping

import torch

from chipfit.graph.ir import Graph


def copy_captured_weights(graph: Graph, captured: Mapping[str, torch.Tensor]) -> Graph:
    """Copy every weight that still shares memory with a captured tensor; tied names stay tied."""
    graph = graph.copy()
    storages = {t.untyped_storage().data_ptr() for t in captured.values()}
    copies: dict[int, torch.Tensor] = {}
    for name, t in graph.weights.items():
        if t.untyped_storage().data_ptr() in storages:
            graph.weights[name] = copies.setdefault(id(t), t.detach().clone(memory_format=torch.preserve_format))
    return graph
