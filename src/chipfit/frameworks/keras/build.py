"""Which layer of Keras says a canonical operator, channels last; None where none does and `kernels` computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from chipfit.frameworks.keras.read import Unreadable, same_padding
from chipfit.graph.ir import Graph, Node

layers = keras.layers
Plain = tuple[Any, dict[str, Any]]  #: class and settings
Weighted = tuple[
    Any, dict[str, Any], dict[str, str], str
]  #: class, settings, variable -> weight, operator that lays out the kernel


# ---------------------------------------------------------------- with weights


def _variables(node: Node, graph: Graph, *names: str, first: int = 1) -> dict[str, str] | None:
    """The weights from slot `first` on by these variable names; None when one of them is no constant."""
    given = node.inputs[first : first + len(names)]
    if any(i is not None and i not in graph.weights for i in given):
        return None
    return {v: i for v, i in zip(names, given, strict=False) if i is not None}


def padding_mode(node: Node, graph: Graph) -> str:
    """Keras's word for the padding of a convolution; "" where it has none."""
    if node.op.startswith("Transpose"):
        return node.config["padding"]
    padding = tuple((int(lo), int(hi)) for lo, hi in node.attrs["padding"])
    if not any(map(any, padding)):
        return "valid"
    kernel = graph.shape(node.inputs[1] or "")[2:]
    try:
        same = same_padding(
            graph.shape(node.inputs[0] or "")[1:-1],  # type: ignore[arg-type]
            kernel,  # type: ignore[arg-type]
            node.attrs["stride"],
            node.attrs["dilation"],
        )
    except Unreadable:
        return ""
    return "same" if same == padding else ""


def _conv(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "kernel", "bias")
    if variables is None or "kernel" not in variables:
        return None
    a, w = node.attrs, graph.weights[variables["kernel"]]
    n = w.dim() - 2
    config = {
        "kernel_size": tuple(w.shape[2:]),
        "strides": tuple(a["stride"]),
        "dilation_rate": tuple(a["dilation"]),
        "activation": None,
        "padding": padding_mode(node, graph) or "valid",
        "use_bias": "bias" in variables,
        "data_format": "channels_last",
    }
    if node.op == "DepthwiseConv2D" and len(set(a["stride"])) == 1:  # TensorFlow knows no other
        return layers.DepthwiseConv2D, {**config, "depth_multiplier": w.shape[0] // a["groups"]}, variables, node.op
    cls = (layers.Conv1D, layers.Conv2D, layers.Conv3D)[n - 1]
    return cls, {**config, "filters": w.shape[0], "groups": a["groups"]}, variables, f"Conv{n}D"


def _transposed(node: Node, graph: Graph) -> Weighted | None:
    """With the user's own words for the padding, which no number here tells."""
    variables = _variables(node, graph, "kernel", "bias")
    if not variables or "output_padding" not in node.config:
        return None
    w, n = graph.weights[variables["kernel"]], len(node.attrs["stride"])
    config = {
        "filters": w.shape[1],
        "kernel_size": tuple(w.shape[2:]),
        "strides": tuple(node.attrs["stride"]),
        "dilation_rate": tuple(node.attrs["dilation"]),
        "padding": node.config["padding"],
        "output_padding": node.config["output_padding"],
        "activation": None,
        "use_bias": "bias" in variables,
        "data_format": "channels_last",
    }
    return (layers.Conv1DTranspose, layers.Conv2DTranspose, layers.Conv3DTranspose)[n - 1], config, variables, node.op


def _dense(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "kernel", "bias")
    if variables is None or "kernel" not in variables:
        return None
    units = graph.weights[variables["kernel"]].shape[0]
    return layers.Dense, {"units": units, "activation": None, "use_bias": "bias" in variables}, variables, node.op


def _batch_norm(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "gamma", "beta", "moving_mean", "moving_variance")
    if variables is None:
        return None
    settings = {"axis": -1, "epsilon": node.attrs["eps"], "scale": "gamma" in variables, "center": "beta" in variables}
    return layers.BatchNormalization, settings, variables, ""


def _layer_norm(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "gamma", "beta")
    if variables is None:
        return None
    axes = list(range(-len(node.attrs["normalized_shape"]), 0))
    settings = {
        "axis": axes,
        "epsilon": node.attrs["eps"],
        "scale": "gamma" in variables,
        "center": "beta" in variables,
    }
    return layers.LayerNormalization, settings, variables, ""


def _group_norm(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "gamma", "beta")
    if variables is None:
        return None
    settings = {
        "groups": node.attrs["groups"],
        "axis": -1,
        "epsilon": node.attrs["eps"],
        "scale": "gamma" in variables,
        "center": "beta" in variables,
    }
    return layers.GroupNormalization, settings, variables, ""


def _rms_norm(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "scale")
    if not variables or node.attrs["eps"] is None or len(node.attrs["normalized_shape"]) != 1:
        return None
    return layers.RMSNormalization, {"axis": -1, "epsilon": node.attrs["eps"]}, variables, ""


def _embedding(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "embeddings", first=0)
    if not variables:
        return None
    rows, width = graph.weights[variables["embeddings"]].shape
    return layers.Embedding, {"input_dim": rows, "output_dim": width}, variables, ""


def _prelu(node: Node, graph: Graph) -> Weighted | None:
    variables = _variables(node, graph, "alpha")
    if not variables:
        return None
    rank = len(graph.shape(node.output))
    shared = list(range(1, rank if graph.weights[variables["alpha"]].numel() == 1 else rank - 1))
    return layers.PReLU, {"shared_axes": shared or None}, variables, ""


WEIGHTED: dict[str, Callable[[Node, Graph], Weighted | None]] = {
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D", "DepthwiseConv2D"), _conv),
    **dict.fromkeys(("TransposeConv1D", "TransposeConv2D", "TransposeConv3D"), _transposed),
    "Linear": _dense,
    "BatchNorm": _batch_norm,
    "LayerNorm": _layer_norm,
    "GroupNorm": _group_norm,
    "RMSNorm": _rms_norm,
    "Embedding": _embedding,
    "PRelu": _prelu,
}


# ---------------------------------------------------------------- without


def _pool(node: Node, graph: Graph) -> Plain | None:
    a, n = node.attrs, len(node.attrs["kernel"])
    padding = tuple((int(lo), int(hi)) for lo, hi in a["padding"])
    some = any(map(any, padding))
    try:
        same = same_padding(graph.shape(node.inputs[0] or "")[1:-1], a["kernel"], a["stride"], (1,) * n)
    except Unreadable:
        same = ()
    if (
        a["ceil_mode"]
        or set(a.get("dilation", (1,))) != {1}
        or (some and (padding != same or a.get("count_include_pad")))
    ):
        return None
    if node.op == "AvgPool" and any(lo != hi for lo, hi in padding):
        return None  # Keras on torch repeats the edge there
    kinds = {"MaxPool": (layers.MaxPooling1D, layers.MaxPooling2D, layers.MaxPooling3D)}
    cls = kinds.get(node.op, (layers.AveragePooling1D, layers.AveragePooling2D, layers.AveragePooling3D))[n - 1]
    return cls, {
        "pool_size": tuple(a["kernel"]),
        "strides": tuple(a["stride"]),
        "padding": "same" if some else "valid",
        "data_format": "channels_last",
    }


def _global_average(node: Node, graph: Graph) -> Plain:
    kinds = (layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalAveragePooling3D)
    return kinds[len(graph.shape(node.output)) - 3], {"keepdims": True, "data_format": "channels_last"}


def _merge(cls: type) -> Callable[[Node, Graph], Plain | None]:
    def make(node: Node, graph: Graph) -> Plain | None:
        ranks = {len(graph.shape(i or "")) for i in node.inputs}
        return (cls, {}) if len(ranks) == 1 and graph.is_float(node.output) else None

    return make


def _reshape(node: Node, graph: Graph) -> Plain | None:
    """Where the batch stays what it is."""
    old, new = graph.shape(node.inputs[0] or ""), graph.shape(node.output)
    if (
        not new
        or None in (*old[1:], *new[1:])
        or math.prod(old[1:]) != math.prod(new[1:])  # type: ignore[arg-type]
        or node.attrs["shape"][0] not in (-1, new[0])
    ):
        return None
    return (layers.Flatten, {}) if len(new) == 2 else (layers.Reshape, {"target_shape": new[1:]})


def _permute(node: Node, graph: Graph) -> Plain | None:
    first, *rest = node.attrs["perm"]
    return (layers.Permute, {"dims": tuple(rest)}) if first == 0 and rest else None


def _zeros(node: Node, graph: Graph) -> Plain | None:
    a, pairs = node.attrs, [tuple(p) for p in node.attrs["padding"]]
    if (
        len(pairs) != 4
        or (a["mode"], a["value"]) != ("constant", 0)
        or any(map(any, (pairs[0], pairs[-1])))
        or min(map(min, pairs)) < 0
    ):
        return None
    return layers.ZeroPadding2D, {"padding": tuple(pairs[1:3]), "data_format": "channels_last"}


def _up(node: Node, graph: Graph) -> Plain | None:
    scale = node.attrs["scale"] or ()
    if (
        len(scale) != 2
        or node.attrs["align_corners"]
        or node.attrs["mode"] == "cubic"
        or any(s != int(s) for s in scale)
    ):
        return None
    interpolation = {"nearest": "nearest", "linear": "bilinear"}[node.attrs["mode"]]
    return layers.UpSampling2D, {
        "size": tuple(int(s) for s in scale),
        "interpolation": interpolation,
        "data_format": "channels_last",
    }


_ACTIVATIONS = {
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Swish": "silu",
    "Selu": "selu",
    "Exp": "exponential",
    "HardSigmoid": "hard_sigmoid",
}

#: operator -> layer and settings, without the name
LAYERS: dict[str, Callable[[Node, Graph], Plain | None]] = {
    **dict.fromkeys(_ACTIVATIONS, lambda node, graph: (layers.Activation, {"activation": _ACTIVATIONS[node.op]})),
    "Relu": lambda node, graph: (layers.ReLU, {}),
    "Relu6": lambda node, graph: (layers.ReLU, {"max_value": 6.0}),
    "LeakyRelu": lambda node, graph: (layers.LeakyReLU, {"negative_slope": node.attrs["negative_slope"]}),
    "Elu": lambda node, graph: (layers.ELU, {"alpha": node.attrs["alpha"]}),
    "Softmax": lambda node, graph: (layers.Softmax, {"axis": node.attrs["axis"]}),
    "Gelu": lambda node, graph: (
        (layers.Activation, {"activation": "gelu"}) if node.attrs["approximate"] == "none" else None
    ),
    "Add": _merge(layers.Add),
    "Sub": _merge(layers.Subtract),
    "Mul": _merge(layers.Multiply),
    "Max": _merge(layers.Maximum),
    "Min": _merge(layers.Minimum),
    "Concat": lambda node, graph: (layers.Concatenate, {"axis": node.attrs["axis"]}) if len(node.inputs) > 1 else None,
    "MaxPool": _pool,
    "AvgPool": _pool,
    "GlobalAvgPool": _global_average,
    "Reshape": _reshape,
    "Transpose": _permute,
    "Pad": _zeros,
    "Resize": _up,
    "Dropout": lambda node, graph: (layers.Dropout, {"rate": node.attrs["p"]}),
    **dict.fromkeys(("Identity", "Requantize"), lambda node, graph: (layers.Identity, {})),
}
