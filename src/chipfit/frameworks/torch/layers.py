"""The user's layer in a quantized model: its class and settings, with the weights of the model."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from chipfit.graph.ir import Node
from chipfit.graph.linear import LINEAR, TRANSPOSED


def layer_like(node: Node | None, weights: Mapping[str, Tensor], rank: int | None = None) -> nn.Module:
    """Return the layer that a node comes from, with these weights.

    A layer of PyTorch has its class and settings, with the sizes, strides and padding that rewrites gave the node; a
    function that reads weights is the layer that computes it. A layer of another class, or one that these weights do
    not fit, is a plain module that holds them.

    Args:
        node: an operator that reads the weights; None if none does.
        weights: parameters and buffers by name; they are shared.
        rank: number of axes of the data, if it is known.
    """
    cls = getattr(nn, _class_name(node, rank), None) if node is not None else None
    made, settings = nn.Module(), _settings(node, weights) if node is not None else {}
    if isinstance(cls, type) and not issubclass(cls, nn.RNNBase):  # whose arguments are *args and **kwargs
        made = _whole(cls, settings, weights) or made
    for name, w in weights.items():
        made._parameters.pop(name, None)  # a user's layer may hold it as a buffer
        (made.register_parameter if isinstance(w, nn.Parameter) else made.register_buffer)(name, w)  # type: ignore[operator]  # either
    return made


def _class_name(node: Node, rank: int | None) -> str:
    """Return the name of the class of the layer that a node comes from, or would come from if it is a function."""
    if node.layer:
        return node.layer_type
    if node.op == "BatchNorm":
        return "" if rank is None else f"BatchNorm{max(rank - 2, 1)}d"
    return node.op.replace("TransposeConv", "ConvTranspose").replace("D", "d") if node.op in LINEAR else ""


def _whole(cls: type[nn.Module], settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module | None:
    """Return a layer of a class with these settings; None if it takes others, or has other weights."""
    try:
        inspect.signature(cls).bind(**settings)
    except TypeError:  # a user's class of the same name, or another way to compute it
        return None
    with torch.device("meta"):
        whole = cls(**settings)
    expected = {n: p.shape for n, p in (*whole.named_parameters(), *whole.named_buffers())}
    return whole if all(n in weights and weights[n].shape == shape for n, shape in expected.items()) else None


def _settings(node: Node, weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the constructor arguments of a layer of PyTorch."""
    settings, w = dict(node.config) if node.layer else {}, weights.get("weight")
    if node.op == "BatchNorm" and not node.layer:
        return {"num_features": len(weights["running_mean"]), "eps": node.attrs["eps"], "affine": w is not None}
    settings |= {"bias": "bias" in weights} if "bias" in settings or not node.layer else {}
    if w is None or node.op not in LINEAR:
        return settings
    if node.facts.kind == "linear":
        return {**settings, "out_features": w.shape[0], "in_features": w.shape[1]}
    groups = node.attrs["groups"]
    inputs, outputs = (w.shape[0], w.shape[1] * groups) if node.op in TRANSPOSED else (w.shape[1] * groups, w.shape[0])
    own = settings.get("padding_mode", "zeros") != "zeros"  # a node of its own pads
    padding = () if own else tuple(low for low, high in node.attrs["padding"] if low == high)
    sizes = {"in_channels": inputs, "out_channels": outputs, "kernel_size": tuple(w.shape[2:]), "groups": groups}
    rest = {k: node.attrs[k] for k in ("stride", "dilation")}
    return {**settings, **sizes, **rest, **({"padding": padding} if len(padding) == w.dim() - 2 else {})}
