"""Files of Keras 2 with layers of the package mct_quantizers, which has none for Keras 3.

A file is an archive of the model's configuration (JSON) and its weights (HDF5), in the form that Keras 2.13 and later
read. Layers lie in the order of the Keras 3 model of the same structure, as both sort them by depth in the same way.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from chipfit.errors import UnsupportedError
from chipfit.files import write_atomically
from chipfit.frameworks.keras.layers import KerasActivationQuantizationHolder, KerasQuantizationWrapper
from chipfit.frameworks.keras.lower import Builder
from chipfit.frameworks.keras.lowerings import layer_of, tuples_of
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rounded import with_rounded_weights
from chipfit.plan.record import Plan
from chipfit.plan.training import Training
from chipfit.quantizers.mctq import VERSION, Quantizer, activation_quantizer, weights_quantizer

_WINDOW = "pool_size strides padding data_format"
_CONV = "kernel_size strides padding data_format dilation_rate activation use_bias"
#: class of a layer -> its settings in Keras 2, each as "theirs=ours" or one word where both have one name
_SETTINGS = {
    **{f"Conv{n}D": f"filters groups {_CONV}" for n in (1, 2, 3)},
    **{f"Conv{n}DTranspose": f"filters output_padding {_CONV}" for n in (1, 2, 3)},
    **{f"{kind}Pooling{n}D": _WINDOW for kind in ("Max", "Average") for n in (1, 2, 3)},
    **{f"GlobalAveragePooling{n}D": "keepdims data_format" for n in (1, 2, 3)},
    **dict.fromkeys("Add Subtract Multiply Maximum Minimum Identity".split(), ""),
    "DepthwiseConv2D": f"depth_multiplier {_CONV}",
    "Dense": "units activation use_bias",
    "BatchNormalization": "axis momentum epsilon center scale",
    "LayerNormalization": "axis epsilon center scale",
    "GroupNormalization": "groups axis epsilon center scale",
    "Embedding": "input_dim output_dim",
    "PReLU": "shared_axes",
    "ReLU": "max_value negative_slope threshold",
    "LeakyReLU": "alpha=negative_slope",
    "ELU": "alpha",
    "Softmax": "axis",
    "Activation": "activation",
    "Concatenate": "axis",
    "Flatten": "data_format",
    "Reshape": "target_shape",
    "Permute": "dims",
    "ZeroPadding1D": "padding",
    "ZeroPadding2D": "padding data_format",
    "UpSampling2D": "size data_format interpolation",
    "Dropout": "rate",
    "Rescaling": "scale offset",
}
#: activation -> its name in Keras 2; those that Keras 2 computes otherwise are missing
_ACTIVATIONS = {a: a for a in "elu exponential gelu linear relu selu sigmoid softmax softplus softsign tanh".split()}
_ACTIVATIONS |= {"silu": "swish", "swish": "swish"}
#: name of a variable in Keras 3 -> that in Keras 2, by class of its layer
VARIABLES = {("DepthwiseConv2D", "kernel"): "depthwise_kernel"}
#: operators with a constant that are a Rescaling: number -> scale and offset
_RESCALED: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "Mul": lambda c: (c, 0.0),
    "Add": lambda c: (1.0, c),
    "Sub": lambda c: (1.0, -c),
    "Div": lambda c: (1 / c, 0.0),
}
PLACE = "mct_quantizers.keras"  #: package of the layers and quantizers
_HINT = "export an `.onnx` file with format='mctq', or a `.keras` file with format='fake'"


def save(graph: Graph, plan: Plan, path: Path) -> Path:
    """Write a `.keras` file of Keras 2, for `mct_quantizers.keras_load_quantized_model`.

    Weights and biases are rounded; inputs and outputs are lists in the order of the model's.

    Raises:
        UnsupportedError: Keras 2 has no layer for an operator, or the package no quantizer for a tensor.
    """
    start, plan = with_rounded_weights(graph, plan, ("activation", "weight"))
    builder = _Builder(*_with_a_layer_for_each_bias(_with_equal_biases_once(start), plan), Training())
    archive = _Archive(builder, builder.build())
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, data in archive.files().items():
            file.writestr(zipfile.ZipInfo(name), data)
    return write_atomically(path, content.getvalue())


def _with_equal_biases_once(graph: Graph) -> Graph:
    """Return the graph in which calls of one layer add one bias; for chips with integer biases each has its own."""
    out, first = graph.copy(), dict[Any, str]()
    for k, n in enumerate(graph.nodes):
        bias = n.bias if n.bias in graph.weights else None
        if bias is not None:
            values = graph.weights[bias].detach().numpy()
            name = first.setdefault((n.inputs[1], values.tobytes()), bias)
            out.nodes[k] = n.reading({bias: name})
    return out


def _with_a_layer_for_each_bias(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return the network with a copy of a layer for calls that add another bias than its first call, and its plan."""
    out, tensors, layers = graph.copy(), dict(plan.tensors), dict[str, dict[str, str]]()
    for k, n in enumerate(graph.nodes):
        weight, bias = n.operand("w"), n.bias
        if weight not in graph.weights or bias not in graph.weights:
            continue
        copies = layers.setdefault(weight, {})
        own = copies.setdefault(bias, f"{weight}_{n.name}" if copies else weight)
        if own not in out.weights:
            out.weights[own] = graph.weights[weight].clone()
            out.trainable |= {own} if weight in graph.trainable else set()
            tensors[own] = replace(plan.tensors[weight], name=own)
        out.nodes[k] = n.reading({weight: own})
    return out, replace(plan, tensors=tensors)


class _Builder(Builder):
    """A model of layers that Keras 2 has, under construction."""

    def _operation(self, op: str, settings: dict[str, Any], slots: Sequence[Any], name: str) -> Any:
        pads = settings.get("padding", ())
        zeros = op == "Pad" and (settings["mode"], settings["value"]) == ("constant", 0.0)
        if zeros and len(pads) in (3, 4) and not any((*pads[0], *pads[-1])):
            made = tuples_of(pads[1:3] if len(pads) == 4 else pads[1])
            return getattr(keras.layers, f"ZeroPadding{len(pads) - 2}D")(made, name=self._unique(name))
        raise _refused(f"{op} '{name}'")

    def _call_layer(self, node: Node, data: list[Any]) -> Any:
        if layer_of(node, self.graph) is not None:
            return super()._call_layer(node, data)
        numbers = [
            self.graph.weights[i].detach().numpy() for i in node.inputs if i is not None and i in self.graph.weights
        ]
        first = node.inputs[0] not in self.graph.weights
        if node.op not in _RESCALED or len(data) != 1 or len(numbers) != 1 or not (first or node.op in ("Mul", "Add")):
            raise _refused(f"{node.op} '{node.display_name}'")
        scale, offset = (np.asarray(v).tolist() for v in _RESCALED[node.op](numbers[0]))
        return keras.layers.Rescaling(scale, offset, name=self._unique(node.name))(data[0])


class _Archive:
    """The files in an archive of a model."""

    def __init__(self, builder: Builder, model: Any) -> None:
        self.plan, self.model = builder.plan, model
        #: (layer, variable, "" for a holder) -> tensor of the plan
        self.tensors = {(s.layer, s.variable): s.tensor for s in builder.scales}

    def files(self) -> dict[str, bytes]:
        weights = io.BytesIO()
        with h5py.File(weights, "w") as store:
            store.create_group("vars")  # of the model itself
            counts = Counter[str]()
            for layer in self.model.layers:
                self._write_weights(store, layer, counts)
        metadata = {"keras_version": "2.15.0", "date_saved": "2024-01-01@00:00:00"}
        texts = {"metadata.json": metadata, "config.json": self._config()}
        files = {name: json.dumps(text).encode() for name, text in texts.items()}
        return files | {"model.weights.h5": weights.getvalue()}

    # ---- configuration

    def _config(self) -> dict[str, Any]:
        layers = [{**self._layer(x), "name": x.name, "inbound_nodes": self._calls(x)} for x in self.model.layers]
        inputs, outputs = ([self._reference(t) for t in ends] for ends in (self.model.inputs, self.model.outputs))
        config = {"name": self.model.name, "trainable": True, "layers": layers}
        config |= {"input_layers": inputs, "output_layers": outputs}
        return {"module": "keras", "class_name": "Model", "config": config, "registered_name": None}

    def _reference(self, tensor: Any) -> list[Any]:
        operation, at, index = tensor._keras_history
        return [operation.name, at, index]

    def _calls(self, layer: Any) -> list[Any]:
        if isinstance(layer, keras.layers.InputLayer):
            return []
        return [[[*self._reference(t), {}] for t in node.input_tensors] for node in layer._inbound_nodes]

    def _layer(self, layer: Any) -> dict[str, Any]:
        """Return a layer as Keras 2 reads it."""
        config: dict[str, Any] = {"name": layer.name, "trainable": True, "dtype": "float32"}
        if isinstance(layer, KerasActivationQuantizationHolder):
            quantizer = activation_quantizer(*self._stored(layer.name, ""))
            config |= {"activation_holder_quantizer": _quantizer("Activation", quantizer), "mctq_version": VERSION}
            return _own("activation_quantization_holder", "KerasActivationQuantizationHolder", config)
        if isinstance(layer, KerasQuantizationWrapper):
            quantizers = {self._variable(layer, name): self._weights(layer, name) for name in layer.weights_quantizers}
            config |= {"layer": self._layer(layer.layer), "weights_quantizer": quantizers, "mctq_version": VERSION}
            return _own("quantize_wrapper", "KerasQuantizationWrapper", config)
        kind = type(layer).__name__
        if isinstance(layer, keras.layers.InputLayer):
            config = {"batch_input_shape": layer.batch_shape, "dtype": layer.dtype, "name": layer.name}
        elif kind not in _SETTINGS or not type(layer).__module__.startswith("keras."):
            raise _refused(f"{kind} '{layer.name}'")
        else:
            config |= _settings(layer, kind)
        return {"module": "keras.layers", "class_name": kind, "config": config, "registered_name": None}

    def _variable(self, wrapper: Any, name: str) -> str:
        return VARIABLES.get((type(wrapper.layer).__name__, name), name)

    def _stored(self, layer: str, variable: str) -> tuple[str, Any]:
        tensor = self.tensors[layer, variable]
        return tensor, self.plan[tensor]

    def _weights(self, wrapper: Any, name: str) -> dict[str, Any]:
        """Return the quantizer of a weight, whose axes are those of Keras."""
        tensor, stored = self._stored(wrapper.name, name)
        shape = wrapper.weights_quantizers[name].shape
        axes = [k for k, size in enumerate(shape) if size > 1] or [len(shape) - 1]
        if len(axes) > 1:
            what = f"'{tensor}' has scales along two axes, for which mct_quantizers has no quantizer in Keras"
            raise UnsupportedError(what, hint=_HINT)
        rank = len(wrapper.weight_of(name).shape)
        quantizer = weights_quantizer(tensor, stored.with_(axis=axes[0]) if stored.scale.dim() else stored, rank)
        settings = {**quantizer.settings, "per_channel": bool(quantizer.settings["per_channel"]), "input_rank": rank}
        return _quantizer("Weights", quantizer._replace(settings=settings))

    # ---- weights

    def _write_weights(self, store: Any, layer: Any, counts: Counter[str]) -> None:
        """Write the variables of a layer in the order of Keras 2; a wrapper holds those that it quantizes."""
        kind = type(layer).__name__
        name = snake_case(kind)
        number = f"_{counts[name]}" if counts[name] else ""
        counts[name] += 1
        place = f"layers/{name}{number}"
        step = np.int32(-1)  # a counter of training steps, which the package's layers have
        if isinstance(layer, KerasQuantizationWrapper):
            inner = [v for v in layer.layer.weights if v.name not in layer.weights_quantizers]
            _write(store, f"{place}/layer/vars", map(_numbers, inner))
            _write(store, f"{place}/vars", [*(_numbers(layer.weight_of(v)) for v in layer.weights_quantizers), step])
        elif isinstance(layer, KerasActivationQuantizationHolder):
            _write(store, f"{place}/vars", [step])
        else:
            _write(store, f"{place}/vars", map(_numbers, layer.weights))


def _settings(layer: Any, kind: str) -> dict[str, Any]:
    """Return the settings of a layer in Keras 2."""
    ours = layer.get_config()
    found = {theirs: ours[own or theirs] for theirs, _, own in (w.partition("=") for w in _SETTINGS[kind].split())}
    if "activation" in found:
        if found["activation"] not in _ACTIVATIONS:
            raise _refused(f"{kind} '{layer.name}' with the activation {found['activation']}")
        found["activation"] = _ACTIVATIONS[found["activation"]]
    return found


def _quantizer(target: str, quantizer: Quantizer) -> dict[str, Any]:
    """Return a quantizer of the package as Keras saves it."""
    kind, numbers, settings = quantizer
    words = snake_case(kind) if not kind.isupper() else kind.lower().replace("lut", "lut_")
    name = f"{target}{kind}InferableQuantizer"
    if "signed" in settings:
        settings = {**settings, "signed": bool(settings["signed"])}
    config = {**settings, **{k: [float(x) for x in v] for k, v in numbers.items()}}
    folder = f"quantizers.{target.lower()}_inferable_quantizers.{target.lower()}_{words}_inferable_quantizer"
    return _own(folder, name, config)


def _own(module: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return an object of the package as Keras saves it."""
    return {"module": f"{PLACE}.{module}", "class_name": name, "config": config, "registered_name": name}


def _write(store: Any, place: str, values: Any) -> None:
    group = store.create_group(place)
    for k, value in enumerate(values):
        group[str(k)] = value


def _numbers(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def snake_case(name: str) -> str:
    """Return the name of a class as Keras names groups of weights: "re_lu" for ReLU."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()


def _refused(what: str) -> UnsupportedError:
    return UnsupportedError(f"Keras 2 has no layer for {what}", allowed=", ".join(sorted(_SETTINGS)), hint=_HINT)
