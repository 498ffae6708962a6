"""Lowerings of canonical operators to Keras, channels last: to a layer where there is one, else to `keras.ops`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from chipfit.engine.curves import compute
from chipfit.frameworks.keras import padding as paddings
from chipfit.frameworks.keras.backend import KerasOps, dtype_here
from chipfit.frameworks.keras.kernel_layout import SLOPES, to_keras
from chipfit.frameworks.keras.recurrent_kernels import gru, lstm, rnn
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS, attribute_words, by_name, read_column, renamed, resolve
from chipfit.quantizers.dynamic import dynamic_quantize

layers = keras.layers
Kernel = Callable[..., Any]
Chosen = tuple[Any, dict[str, Any]]  #: class of a layer, and the arguments of its constructor except the name
#: function from (node, graph, the layer's variable -> weight) to a layer; None where no layer computes the node
Choose = Callable[[Node, Graph, dict[str, str]], Chosen | None]


@dataclass(frozen=True, slots=True)
class Lowering:
    """The computation of one canonical operator in Keras."""

    kernel: Kernel | None = None  #: function of inputs in order (None where absent) and attributes
    layer: Choose | None = None
    variables: str = ""  #: names of the layer's variables, in the order of the operator's slots for weights


def layer_of(node: Node, graph: Graph) -> tuple[Any, dict[str, Any], dict[str, str]] | None:
    """Return the Keras layer that computes a node: class, arguments, variable -> weight; None if there is none.

    A layer with variables needs weights of the graph for them; a layer without variables cannot read any.
    """
    lowering = LOWERINGS.get(node.op)
    if (
        lowering is None
        or lowering.layer is None
        or bool(lowering.variables) != any(i in graph.weights for i in node.inputs)
    ):
        return None
    variables = {}
    slots = [s for s in node.facts.slots if not s.startswith("in")]
    for slot, variable in zip(slots, lowering.variables.split(), strict=False):
        given = node.operand(slot.rstrip("?"))
        if given is not None and given in graph.weights:
            variables[variable] = given
        elif given is not None or not slot.endswith("?"):
            return None
    chosen = lowering.layer(node, graph, variables)
    return None if chosen is None else (*chosen, variables)


# ---------------------------------------------------------------- layers with weights


def padding_word(node: Node, graph: Graph) -> str:
    """Return "same" or "valid" for the padding of a convolution or pool, or "" if it is neither."""
    size, a = graph.shape(node.data)[1:-1], node.attrs
    kernel = a["kernel"] if "kernel" in a else graph.weights[node.weight].shape[2:]
    return paddings.word(a["padding"], size, kernel, a["stride"], a.get("dilation", (1,) * len(size)))


def _conv_settings(node: Node, graph: Graph, variables: dict[str, str]) -> dict[str, Any]:
    window, a = tuple(graph.weights[variables["kernel"]].shape[2:]), node.attrs
    settings = {"kernel_size": window, "strides": tuple(a["stride"]), "dilation_rate": tuple(a["dilation"])}
    return {**settings, "activation": None, "use_bias": "bias" in variables, "data_format": "channels_last"}


def _conv(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen:
    a, w = node.attrs, graph.weights[variables["kernel"]]
    config = {**_conv_settings(node, graph, variables), "padding": padding_word(node, graph) or "valid"}
    single_channel = node.layer_type == "DepthwiseConv2D" and w.shape[:2] == (1, 1)  # captured as Conv2D
    if (single_channel or node.op == "DepthwiseConv2D") and len(set(a["stride"])) == 1:  # TensorFlow needs equal ones
        return layers.DepthwiseConv2D, {**config, "depth_multiplier": w.shape[0] // a["groups"]}
    return _of_rank("Conv{}D", w.dim()), {**config, "filters": w.shape[0], "groups": a["groups"]}


def _transposed(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    """Choose a layer with the padding of the user's own layer, which the attributes do not determine."""
    if "output_padding" not in node.config:
        return None
    w, words = graph.weights[variables["kernel"]], {k: node.config[k] for k in ("padding", "output_padding")}
    config = {**_conv_settings(node, graph, variables), **words, "filters": w.shape[1]}
    return _of_rank("Conv{}DTranspose", w.dim()), config


def _of_rank(name: str, rank: int) -> Any:
    """Return the layer of this name for tensors of `rank` axes, batch and channels included."""
    return getattr(layers, name.format(rank - 2))


def _dense(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen:
    units = graph.weights[variables["kernel"]].shape[0]
    return layers.Dense, {"units": units, "activation": None, "use_bias": "bias" in variables}


def _norm(node: Node, graph: Graph, variables: dict[str, str], *, layer: str) -> Chosen:
    a = node.attrs
    config = {"epsilon": a["eps"], "scale": "gamma" in variables, "center": "beta" in variables}
    axes = list(range(-len(a["normalized_shape"]), 0)) if "normalized_shape" in a else -1
    return getattr(layers, layer), {**config, "axis": axes, **{k: a[k] for k in ("groups",) if k in a}}


def _rms_norm(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    if not variables or node.attrs["eps"] is None or len(node.attrs["normalized_shape"]) != 1:
        return None
    return layers.RMSNormalization, {"axis": -1, "epsilon": node.attrs["eps"]}


def _embedding(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen:
    rows, width = graph.weights[variables["embeddings"]].shape
    return layers.Embedding, {"input_dim": rows, "output_dim": width, "mask_zero": False}  # masks are operands


def _prelu(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen:
    slopes, rank = to_keras(SLOPES, graph.weights[variables["alpha"]]), len(graph.shape(node.output))
    sizes = (1,) * (rank - 1 - slopes.dim()) + tuple(slopes.shape)
    shared = [axis for axis, size in enumerate(sizes, 1) if size == 1]
    return layers.PReLU, {"shared_axes": shared or None}


# ---------------------------------------------------------------- layers without


def _layer(cls: Any, attrs: Mapping[str, str] | None = None, fixed: Mapping[str, Any] | None = None) -> Choose:
    """Return a function that always chooses one layer.

    Args:
        attrs: attribute of the operator -> argument of the layer.
        fixed: further arguments of the layer.
    """
    settings, names = dict(fixed or {}), attrs or {}
    return lambda node, graph, variables: (cls, settings | {s: node.attrs[a] for a, s in names.items()})


def _merge(node: Node, graph: Graph, variables: dict[str, str], *, layer: str) -> Chosen | None:
    """Choose a layer if all operands have one rank and the result is float."""
    ranks = {len(graph.shape(i or "")) for i in node.inputs}
    return (getattr(layers, layer), {}) if len(ranks) == 1 and graph.is_float(node.output) else None


def _gelu(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    return (layers.Activation, {"activation": "gelu"}) if node.attrs["approximate"] == "none" else None


def _concatenate(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    return (layers.Concatenate, {"axis": node.attrs["axis"]}) if len(node.inputs) > 1 else None


def _pool(node: Node, graph: Graph, variables: dict[str, str], *, layer: str) -> Chosen | None:
    a, word = node.attrs, padding_word(node, graph)
    if a["ceil_mode"] or set(a.get("dilation", (1,))) != {1} or not word:
        return None
    uneven = any(lo != hi for lo, hi in a["padding"])  # Keras on torch repeats the edge
    if "count_include_pad" in a and word == "same" and (a["count_include_pad"] or uneven):
        return None
    config = {"pool_size": tuple(a["kernel"]), "strides": tuple(a["stride"]), "padding": word}
    return _of_rank(f"{layer}{{}}D", len(a["kernel"]) + 2), {**config, "data_format": "channels_last"}


def _global_average(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen:
    cls = _of_rank("GlobalAveragePooling{}D", len(graph.shape(node.output)))
    return cls, {"keepdims": True, "data_format": "channels_last"}


def _reshape(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    """Choose a layer if the batch keeps its size."""
    (_, *old), new = graph.shape(node.data) or (None,), graph.shape(node.output)
    if not new or None in (*old, *new[1:]) or math.prod(old) != math.prod(new[1:]):  # type: ignore[arg-type]
        return None
    if node.attrs["shape"][0] not in (-1, new[0]):
        return None
    return (layers.Flatten, {}) if len(new) == 2 else (layers.Reshape, {"target_shape": new[1:]})


def _permute(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    first, *rest = node.attrs["perm"]
    return (layers.Permute, {"dims": tuple(rest)}) if first == 0 and rest else None


def _zeros(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    a, pairs = node.attrs, [tuple(p) for p in node.attrs["padding"]]
    if len(pairs) != 4 or (a["mode"], a["value"]) != ("constant", 0):
        return None
    if any((*pairs[0], *pairs[-1])) or min(map(min, pairs)) < 0:
        return None
    return layers.ZeroPadding2D, {"padding": tuple(pairs[1:3]), "data_format": "channels_last"}


def _upsampling(node: Node, graph: Graph, variables: dict[str, str]) -> Chosen | None:
    a, scale = node.attrs, node.attrs["scale"] or ()
    if (
        len(scale) != 2
        or a["align_corners"]
        or a["mode"] in ("cubic", "linear_corner")
        or any(s != int(s) for s in scale)
    ):
        return None
    config = {"size": tuple(int(s) for s in scale), "interpolation": _INTERPOLATION[a["mode"]]}
    return layers.UpSampling2D, {**config, "data_format": "channels_last"}


_INTERPOLATION = {"nearest": "nearest", "nearest_exact": "nearest", "linear": "bilinear", "cubic": "bicubic"}


# ---------------------------------------------------------------- kernels


def _spatial(x: Any) -> tuple[int, ...]:
    return tuple(range(1, len(x.shape) - 1))


def _max_pool(x: Any, *, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    x = ops.pad(x, [(0, 0), *padding, (0, 0)], constant_values=-math.inf)
    return ops.max_pool(x, kernel, stride, "valid", "channels_last")


def _avg_pool(x: Any, *, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, count_include_pad: bool) -> Any:
    pairs = [(0, 0), *padding, (0, 0)]
    ones = ops.pad(ops.ones_like(x), pairs, constant_values=float(count_include_pad))
    means, share = (ops.average_pool(v, kernel, stride, "valid", "channels_last") for v in (ops.pad(x, pairs), ones))
    return means / share


def _pad(x: Any, *, padding: Any, mode: str, value: float) -> Any:
    if mode == "constant":
        return ops.pad(x, padding, constant_values=value)
    # Keras has other names for other modes on each backend: select elements by index
    for axis, (lo, hi) in enumerate(padding):
        if lo or hi:
            last = x.shape[axis] - 1
            i = np.arange(-lo, last + 1 + hi)
            index = {"replicate": i.clip(0, last), "reflect": last - abs(last - abs(i))}
            x = ops.take(x, index[mode], axis)
    return x


def _resize(x: Any, *, mode: str, size: Any, scale: Any, align_corners: bool) -> Any:
    if size is None:
        size = [math.floor(n * s) for n, s in zip(x.shape[1:-1], scale, strict=True)]
    row = len(x.shape) == 3  # one spatial axis as an image of one row
    flat, sizes = (x[:, None], (1, *size)) if row else (x, tuple(size))
    y = ops.image.resize(flat, sizes, interpolation=_INTERPOLATION[mode], data_format="channels_last")
    return y[:, 0] if row else y


def _depth_to_space(x: Any, *, block: int) -> Any:
    """Move channels [C, block, block] of a pixel to the [block, block] pixels that replace it."""
    samples, height, width, channels = ops.shape(x)
    parts = ops.reshape(x, (samples, height, width, channels // block**2, block, block))
    turned = ops.transpose(parts, (0, 1, 4, 2, 5, 3))
    return ops.reshape(turned, (samples, height * block, width * block, channels // block**2))


def _space_to_depth(x: Any, *, block: int) -> Any:
    """Move [block, block] pixels to channels [C, block, block] of the pixel that replaces them."""
    samples, height, width, channels = ops.shape(x)
    parts = ops.reshape(x, (samples, height // block, block, width // block, block, channels))
    turned = ops.transpose(parts, (0, 1, 3, 5, 2, 4))
    return ops.reshape(turned, (samples, height // block, width // block, channels * block**2))


def _attention(
    q: Any, k: Any, v: Any, mask: Any = None, *, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    scores = ops.matmul(q * (scale or 1 / math.sqrt(q.shape[-1])), ops.swapaxes(k, -1, -2))
    if is_causal:
        scores = ops.where(ops.tril(ops.ones(scores.shape[-2:], "bool")), scores, -math.inf)
    if mask is not None:
        boolean = keras.backend.standardize_dtype(mask.dtype) == "bool"
        scores = ops.where(mask, scores, -math.inf) if boolean else scores + mask
    return ops.matmul(ops.softmax(scores, axis=-1), v)


def _size(x: Any, *, axis: int) -> Any:
    """Return a vector as long as an axis: in symbolic calls an open size is not a number."""
    return x[tuple(slice(None) if k == axis else 0 for k in range(len(x.shape)))]


def _expand(x: Any, *sizes: Any, shape: Any) -> Any:
    have, left = [1] * (len(shape) - len(x.shape)) + list(ops.shape(x)), iter(sizes)
    wanted = [h if s == -1 else ops.shape(next(left))[0] if s is None else s for h, s in zip(have, shape, strict=True)]
    return ops.broadcast_to(ops.reshape(x, have), wanted)


def _top_k(x: Any, *, k: int | None, axis: int, largest: bool) -> Any:
    y = ops.moveaxis(x if largest else -x, axis, -1)
    values, indices = (ops.moveaxis(v, -1, axis) for v in ops.top_k(y, y.shape[-1] if k is None else k))
    return (values if largest else -values), ops.cast(indices, dtype_here("int64"))


def _strided_slice(x: Any, *, axis: int, start: int, end: int | None, step: int) -> Any:
    index: list[Any] = [slice(None)] * len(x.shape)
    index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _linear(x: Any, w: Any, b: Any = None) -> Any:
    y = ops.matmul(x, ops.transpose(w))
    return y if b is None else y + b


def _roll(x: Any, *, shifts: Any, axes: Any) -> Any:
    for s, a in zip(shifts, axes, strict=True):
        x = ops.roll(x, s, a)
    return x


def _split(x: Any, *, axis: int, sizes: Sequence[int]) -> Any:
    at = [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)]
    return ops.split(x, at, axis)


def _clamp(x: Any, *, min: float | None, max: float | None) -> Any:
    return ops.clip(x, -math.inf if min is None else min, math.inf if max is None else max)


def _unsqueeze(x: Any, *, axes: Any) -> Any:
    for a in axes:
        x = ops.expand_dims(x, a)
    return x


def _normalize(x: Any, w: Any, b: Any, axes: Sequence[int], eps: float) -> Any:
    mean, variance = ops.moments(x, tuple(axes), keepdims=True)
    y = (x - mean) * ops.rsqrt(variance + eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def _divide(x: Any, y: Any) -> Any:
    """Divide; integers towards zero."""
    if "int" not in keras.backend.standardize_dtype(x.dtype):
        return ops.divide(x, y)
    return ops.sign(x) * ops.sign(y) * ops.floor_divide(ops.abs(x), ops.abs(y))


def _layer_norm(x: Any, w: Any = None, b: Any = None, *, normalized_shape: Any, eps: float) -> Any:
    return _normalize(x, w, b, range(-len(normalized_shape), 0), eps)


def _curve(x: Any, *, steps: str) -> Any:
    def kernel(op: str) -> Kernel:
        found = LOWERINGS[op].kernel
        assert found is not None  # every element-wise operator has one
        return found

    return compute(steps, x, kernel, float)


_LAYERS: dict[str, Choose] = by_name(
    *(_conv, _transposed, _dense, _norm, _rms_norm, _embedding, _prelu, _merge, _gelu, _concatenate, _pool),
    *(_global_average, _reshape, _permute, _zeros, _upsampling),
)
_KERNELS: dict[str, Kernel] = {
    "squared_difference": lambda x, y: ops.square(x - y),
    "mish": lambda x: x * ops.tanh(ops.softplus(x)),
    "prelu": lambda x, w: ops.maximum(x, 0.0) + w * ops.minimum(x, 0.0),
    "gelu": lambda x, *, approximate: ops.gelu(x, approximate == "tanh"),
    "softplus": lambda x, *, beta, threshold: ops.softplus(x * beta) / beta,
    "embedding": lambda w, index: ops.take(w, index, 0),
    "instance_norm": lambda x, w=None, b=None, *, eps: _normalize(x, w, b, _spatial(x), eps),
    "reduce_l2": lambda x, *, axes, keepdims: ops.sqrt(ops.sum(ops.square(x), axes, keepdims)),
    "global_avg_pool": lambda x: ops.mean(x, _spatial(x), keepdims=True),
    "concat": lambda *xs, axis: ops.concatenate(xs, axis),
    "stack": lambda *xs, axis: ops.stack(xs, axis),
    "select": lambda x, *, axis, index: ops.take(x, index if index >= 0 else x.shape[axis] + index, axis),
    "cast": lambda x, *, dtype: ops.cast(x, dtype_here(dtype)),
    "dynamic_quantize": lambda x, **attrs: dynamic_quantize(KerasOps, x, **attrs),
    "identity": lambda x, **attrs: x,
    **by_name(
        *(_clamp, _curve, _divide, _linear, _attention, lstm, gru, rnn, _layer_norm, _max_pool, _avg_pool, _pad),
        *(_resize, _depth_to_space, _space_to_depth, _split, _unsqueeze, _expand, _size, _top_k, _strided_slice, _roll),
    ),
}
LOWERINGS: dict[str, Lowering] = {}


def _enter_cell(
    op: str,
    name: str | Kernel | None = None,
    layer: str = "",
    attrs: str = "",
    fixed: Mapping[str, Any] | None = None,
    choose: str = "",
    variables: str = "",
) -> None:
    """Enter a cell of the table of operators.

    Args:
        name: a function, or its name in `_KERNELS` or keras.ops; None if only a layer computes the operator.
        layer: the layer that computes the operator whatever its attributes.
        attrs: "attribute=argument" words: the arguments of `layer`, or without one those arguments of the function
            that are not called like the attribute.
        fixed: further arguments of the layer.
        choose: function of `_LAYERS` that chooses the layer.
        variables: see `Lowering`.
    """
    words = {ours: theirs for ours, theirs, _ in attribute_words(attrs)}
    kernel: Kernel | None = name if callable(name) or name is None else _KERNELS.get(name) or getattr(ops, name)
    if layer:
        LOWERINGS[op] = Lowering(kernel, _layer(getattr(layers, layer), words, fixed))
    else:
        kernel = renamed(kernel, words) if kernel is not None and words else kernel
        LOWERINGS[op] = Lowering(kernel, resolve(choose, _LAYERS) if choose else None, variables)


read_column("lowering", _enter_cell, LOWERINGS)


@keras.saving.register_keras_serializable(package="chipfit")
class CanonicalOperation(keras.layers.Layer):
    """One canonical operator as a layer, for operators without a layer of Keras.

    Args:
        op: name of the operator.
        settings: attributes of the operator.
        slots: one entry for each input of the operator: "x" for the next tensor of the call, "-" for an absent input,
            or for a weight its dtype, whether it is trainable, and its shape: ["float32", true, 3, 4]. The weight of
            slot k is named wk.
    """

    def __init__(self, op: str, settings: dict[str, Any], slots: Sequence[Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.op, self.settings, self.slots = op, settings, list(slots)

    def build(self, input_shape: Any = None) -> None:
        self.slot_weights = [
            None if isinstance(s, str) else self._weight(f"w{k}", *s) for k, s in enumerate(self.slots)
        ]
        self.built = True

    def _weight(self, name: str, dtype: str, trainable: bool, *shape: int) -> Any:
        given = {"dtype": dtype_here(dtype), "trainable": trainable, "shape": shape}
        return self.add_weight(name=name, initializer="zeros", **given)

    def call(self, inputs: Any) -> Any:
        given = iter(inputs if isinstance(inputs, (list, tuple)) else [inputs])
        operands = [
            next(given) if s == "x" else None if s == "-" else keras.ops.convert_to_tensor(w)
            for s, w in zip(self.slots, self.slot_weights, strict=True)
        ]
        while operands and operands[-1] is None:
            operands.pop()
        if OPS[self.op].steep:  # rounding makes zeros, at which an infinite slope would spoil every gradient
            x = operands[-1]
            operands[-1] = ops.where(ops.equal(x, 0), ops.stop_gradient(x), x)
        kernel: Any = LOWERINGS[self.op].kernel  # `lower` makes such a layer only for operators with a kernel
        return kernel(*operands, **{k: tuples_of(v) for k, v in self.settings.items()})

    def compute_output_spec(self, inputs: Any) -> Any:
        # Keras runs a call on a batch of its own choice, whose elements may not fill the new shape
        return self.call(inputs) if self.op == "Reshape" else super().compute_output_spec(inputs)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "op": self.op, "settings": self.settings, "slots": self.slots}


def tuples_of(x: Any) -> Any:
    """Convert lists, which JSON and Keras make of tuples, back to tuples."""
    return tuple(tuples_of(v) for v in x) if isinstance(x, (list, tuple)) else x
