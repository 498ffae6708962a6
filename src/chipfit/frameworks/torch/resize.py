"""The user's own module with weights of other sizes."""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from chipfit.engine.run import first_deviation
from chipfit.engine.trees import flatten_inputs
from chipfit.errors import raise_bug
from chipfit.frameworks.torch.plain_call import in_float32
from chipfit.graph.ir import Graph

#: classes of layers -> attributes that hold sizes of their weight: attribute -> axis
_SIZES: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], dict[str, int]], ...] = (
    (nn.Linear, {"out_features": 0, "in_features": 1}),
    (nn.Embedding, {"num_embeddings": 0, "embedding_dim": 1}),
    (nn.modules.batchnorm._NormBase, {"num_features": 0}),
    (nn.GroupNorm, {"num_channels": 0}),
    (nn.PReLU, {"num_parameters": 0}),
)


def resized_module(model: nn.Module, graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> nn.Module | None:
    """Return a copy of a module, in evaluation mode, with the weights of a graph, which may have other sizes.

    Returns:
        None if the copy fails or computes something else than the graph, as where its code fixes sizes.
    """
    made = copy.deepcopy(model).eval()
    groups = {n.layer: n.attrs["groups"] for n in graph.nodes if "groups" in n.attrs}
    done: dict[int, torch.Tensor] = {}
    for name, w in graph.weights.items():
        path, _, leaf = name.rpartition(".")
        try:
            module = made.get_submodule(path)
        except AttributeError:  # a constant of the code
            continue
        for table in (module._parameters, module._buffers):
            old = table.get(leaf)
            if old is not None:
                if id(old) not in done:
                    new = w.detach().to(old.device, old.dtype).clone()
                    done[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                table[leaf] = done[id(old)]  # type: ignore[assignment]  # a parameter where there was one
        _set_sizes(module, groups.get(path))
    return made if _computes(made, graph, args, kwargs) else None


def _set_sizes(module: nn.Module, groups: int | None) -> None:
    """Set the attributes of a layer that state the sizes of its weight."""
    w = getattr(module, "weight", None)
    w = getattr(module, "running_mean", None) if w is None else w
    if isinstance(module, nn.modules.conv._ConvNd) and groups is not None and w is not None:
        module.groups = groups
        first, second = w.shape[:2]
        sizes = (first, second * groups) if module.transposed else (second * groups, first)
        module.in_channels, module.out_channels = sizes
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and w is not None:
        module.normalized_shape = tuple(w.shape)
    for kind, sizes_of in _SIZES:
        if isinstance(module, kind) and isinstance(w, torch.Tensor):
            for attribute, axis in sizes_of.items():
                setattr(module, attribute, w.shape[axis])


def _computes(model: nn.Module, graph: Graph, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a module computes what a graph does."""
    given = tuple(args)[: json.loads(graph.in_spec)["args"]], dict(kwargs)  # without a label
    there = pytree.tree_map_only(torch.Tensor, lambda x: x.to(graph.device), given)
    try:
        with torch.no_grad():
            out = model(*there[0], **there[1])
    except Exception as e:  # the user's code may raise anything
        raise_bug(e)
        return False
    wanted = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
    if len(wanted) != len(graph.outputs):
        return False
    call = pytree.tree_map_only(torch.Tensor, in_float32, there)
    exact = all(p.dtype == torch.float32 for p in model.parameters())
    return first_deviation(graph, flatten_inputs(graph, *call), wanted, 1e-3 if exact else 0.05) is None
