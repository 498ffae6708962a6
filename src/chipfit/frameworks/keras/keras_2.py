"""Functions of TensorFlow in `.h5` files of Keras 2, which are layers there (TFOpLambda, SlicingOpLambda).

They become layers that compute the function by keras.ops; no name of a file is looked up in TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import keras

from chipfit.errors import CaptureError, short_message
from chipfit.frameworks.keras.layers import registered
from chipfit.frameworks.keras.tensorflow import by_name, name_of_formula
from chipfit.frameworks.reading import Unreadable

_FUNCTIONS = ("TFOpLambda", "SlicingOpLambda")
_GETITEM = "__operators__.getitem"
HINT = (
    "open the file in the version of TensorFlow that wrote it, convert the model with tf.lite.TFLiteConverter without "
    "optimizations, and give chipfit the .tflite file"
)
#: keys of a table that stands for a tensor, by its place among the operands, or for the size of one of its axes
_OPERAND, _AXIS = "operand", "axis_of_operand"


@registered
class TensorFlowFunction(keras.layers.Layer):
    """A function of TensorFlow, computed by keras.ops.

    Args:
        function: its public name.
        first: its first argument, with {"operand": k} for the k-th operand of the layer.
        options: its other arguments by name.
    """

    def __init__(self, function: str, first: Any, options: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function, self.first, self.options = function, first, options

    def call(self, *operands: Any) -> Any:
        try:
            first, options = _with_operands(self.first, operands), _with_operands(self.options, operands)
            if self.function == _GETITEM:
                spec = options["slice_spec"]
                return first[tuple(_index(part) for part in (spec if isinstance(spec, list) else [spec]))]
            return by_name(self.function, first, {k: _type(v) for k, v in options.items()})
        except Exception as e:  # of keras.ops, for arguments that it does not take
            raise Unreadable(f"Layer '{self.name}', tf.{self.function}: {short_message(e)}") from None

    def get_config(self) -> dict[str, Any]:
        own = {"function": self.function, "first": self.first, "options": self.options}
        return {**super().get_config(), **own}


def failed_layer(e: Unreadable) -> str:
    """Return the layer that failed and why, without the text that Keras adds."""
    found = re.search(r"Layer '[^\n\x1b]*", str(e))
    return found[0] if found else str(e)


def _with_operands(value: Any, operands: Any) -> Any:
    if isinstance(value, dict):
        if _OPERAND in value:
            tensor = operands[value[_OPERAND]]
            return tensor.shape[value[_AXIS]] if _AXIS in value else tensor
        return {k: _with_operands(v, operands) for k, v in value.items()}
    return [_with_operands(v, operands) for v in value] if isinstance(value, (list, tuple)) else value


def _index(part: Any) -> Any:
    if isinstance(part, dict):
        return slice(*(part[k] for k in ("start", "stop", "step"))) if "start" in part else ...
    return part


def _type(value: Any) -> Any:
    """Return the name of a type that a file holds as text: "float32" for "<dtype: 'float32'>"."""
    found = re.fullmatch(r"<dtype: '(\w+)'>", value) if isinstance(value, str) else None
    return found[1] if found else value


def in_keras_3(config: Any, where: str) -> Any:
    """Return the configuration of a model with functions as layers of ours, and operands by name as Keras 3 has them.

    Raises:
        CaptureError: It has a function that nothing computes here.
    """
    names = _names(config)
    free = {name.replace("/", "_") + "_" * (name.replace("/", "_") in names): name for name in names if "/" in name}
    return _converted(_renamed(config, {old: new for new, old in free.items()}), where)


def _names(config: Any) -> set[str]:
    """Return the names of all layers."""
    if isinstance(config, list):
        return set[str]().union(*map(_names, config))
    if not isinstance(config, dict):
        return set()
    return _names([*config.values()]) | ({config["name"]} if isinstance(config.get("name"), str) else set())


def _renamed(config: Any, names: Mapping[str, str]) -> Any:
    if isinstance(config, dict):
        return {k: _renamed(v, names) for k, v in config.items()}
    if isinstance(config, list):
        return [_renamed(v, names) for v in config]
    return names.get(config, config) if isinstance(config, str) else config


def _converted(config: Any, where: str) -> Any:
    if isinstance(config, list):
        return [_converted(c, where) for c in config]
    if not isinstance(config, dict):
        return config
    out = {k: _converted(c, where) for k, c in config.items()}
    layers = out.get("layers")
    if isinstance(layers, list) and all(isinstance(c, dict) for c in layers):
        names, (shapes, sizes) = {str(c.get("name")) for c in layers}, _sizes(layers)
        kept = [c for c in layers if c.get("name") not in shapes and c.get("name") not in sizes]
        out["layers"] = [_layer(c, names, sizes, where) for c in kept]
    return out


def _sizes(layers: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, tuple[Any, int]]]:
    """Return the layers that are a tensor's shape, and those that are one size of it: the tensor, and the axis."""
    shapes, sizes = dict[str, Any](), dict[str, tuple[Any, int]]()
    for c in layers:
        nodes, function = c.get("inbound_nodes"), str((c.get("config") or {}).get("function", _GETITEM))
        if c.get("class_name") not in _FUNCTIONS or not isinstance(nodes, list) or not isinstance(nodes[0], list):
            continue
        first, options = _arguments(nodes[0])
        axis, of = options.get("slice_spec"), first[0] if isinstance(first, list) and first else None
        if name_of_formula(function) == "shape":
            shapes[str(c.get("name"))] = first
        elif function == _GETITEM and isinstance(axis, int) and isinstance(of, str) and of in shapes:
            sizes[str(c.get("name"))] = shapes[of], axis
    return shapes, sizes


def _layer(
    config: dict[str, Any], names: Collection[str], sizes: Mapping[str, tuple[Any, int]], where: str
) -> dict[str, Any]:
    kind, own, nodes, name = (config.get(k) for k in ("class_name", "config", "inbound_nodes", "name"))
    if kind == "TensorFlowOpLayer":
        raise CaptureError(f"Layer '{name}' is an operator of TensorFlow 2.3 or older", where=where, hint=HINT)
    if not isinstance(nodes, list) or not all(isinstance(n, list) for n in nodes):
        return config
    if kind not in _FUNCTIONS or not isinstance(own, dict):
        return {**config, "inbound_nodes": [_with_tensors(n, names) for n in nodes]}
    function = str(own.get("function", _GETITEM))
    if function != _GETITEM and not name_of_formula(function):
        what = f"Layer '{name}' is a function of TensorFlow without a reader"
        raise CaptureError(what, where=where, got=f"tf.{function}", hint=HINT)
    calls, made = [], list[dict[str, Any]]()
    for node in nodes:
        tensors: list[Any] = []
        parts = zip(("first", "options"), _arguments(node), strict=True)
        made.append({k: _without_tensors(v, names, sizes, tensors) for k, v in parts})
        calls.append({"args": [_tensor(t) for t in tensors], "kwargs": {}})
    if any(m != made[0] for m in made[1:]) or not made:
        raise CaptureError(f"Layer '{name}' is called with different options", where=where, hint=HINT)
    given = {k: own[k] for k in ("name", "trainable", "dtype") if k in own} | {"function": function, **made[0]}
    registration = {"module": None, "registered_name": keras.saving.get_registered_name(TensorFlowFunction)}
    layer = {"class_name": TensorFlowFunction.__name__, "config": given, **registration}
    return {**config, **layer, "inbound_nodes": calls}


def _arguments(node: list[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the first argument, with [layer, call, result] for tensors, and the options of a call."""
    single = bool(node) and isinstance(node[0], str)
    calls = [node] if single else node
    options = calls[0][3] if calls and len(calls[0]) > 3 else {}
    first = [c[2] if c[0] == "_CONSTANT_VALUE" else c[:3] for c in calls]
    return first[0] if single else first, options


def _is_tensor(value: Any, names: Collection[str]) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and value[0] in names


def _without_tensors(
    value: Any, names: Collection[str], sizes: Mapping[str, tuple[Any, int]], tensors: list[Any]
) -> Any:
    """Return an argument with tables for its tensors, which are appended to `tensors`, and for their sizes."""
    if _is_tensor(value, names):
        of, axis = sizes.get(value[0], (value, None))
        tensors.append(of)
        return {_OPERAND: len(tensors) - 1} | ({} if axis is None else {_AXIS: axis})
    if isinstance(value, dict):
        return {k: _without_tensors(v, names, sizes, tensors) for k, v in value.items()}
    return [_without_tensors(v, names, sizes, tensors) for v in value] if isinstance(value, list) else value


def _tensor(history: Any) -> dict[str, Any]:
    config = {"shape": [None], "dtype": "float32", "keras_history": history}
    return {"class_name": "__keras_tensor__", "config": config}


def _with_tensors(node: list[Any], names: Collection[str]) -> Any:
    """Return a call of a layer that takes tensors by name, such as attention; others stay as they are."""
    named = node[0][3] if len(node) == 1 and isinstance(node[0], list) and len(node[0]) == 4 else {}
    if not isinstance(named, dict) or not any(_is_tensor(v, names) for v in named.values()):
        return node
    options = {k: _tensor(v) if _is_tensor(v, names) else v for k, v in named.items()}
    return {"args": [_tensor(node[0][:3])], "kwargs": options}
