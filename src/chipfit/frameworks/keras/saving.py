"""Fake-quantized networks as models of Keras, which load without chipfit: layers, and functions of `keras.ops`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from chipfit.errors import UnsupportedError
from chipfit.files import folder_beside, write_atomically
from chipfit.frameworks.keras.lower import Builder
from chipfit.frameworks.keras.lowerings import LOWERINGS, layer_of, tuples_of
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rounded import round_with, with_rounded_weights
from chipfit.plan.record import Plan
from chipfit.plan.training import Training


def save(graph: Graph, plan: Plan, path: Path) -> Path:
    """Write the fake-quantized network as a `.keras` file.

    Raises:
        UnsupportedError: another suffix, or Keras has no counterpart of an operator; see also `with_rounded_weights`.
    """
    if path.suffix != ".keras":
        raise UnsupportedError("Keras cannot write this suffix", got=path.suffix, allowed=".keras, .onnx, .tflite")
    model = FloatBuilder(*with_rounded_weights(graph, plan), Training()).build()
    with folder_beside(path) as folder:
        model.save(folder / path.name)
        return write_atomically(path, (folder / path.name).read_bytes())


class FloatBuilder(Builder):
    """A model of Keras's own layers and functions under construction, in which functions round results."""

    def _assemble(self, inputs: Any, outputs: Any) -> Any:
        for operation in _operations(outputs):
            if not isinstance(operation, keras.layers.Layer):  # else its name may be that of a layer
                operation.name = self._unique(type(operation).__name__.lower())
        model = keras.Model(inputs, outputs, name=self._unique("quantized"))
        self._set_weights(model)
        return model

    def _bias_key(self, bias: str | None) -> str | None:
        return bias  # a layer of Keras has one bias

    def _add_value(self, name: str, x: Any) -> None:
        self._unquantized[name] = self._quantized[name] = x
        if name in self.sharing.rounded:
            stored = self.plan[name]
            shape = self._channels(name, stored)
            self._quantized[name] = round_with(_call, x, name, stored, lambda p: p.reshape(shape))

    def _operation(self, op: str, settings: dict[str, Any], slots: Sequence[Any], name: str) -> Any:
        kernel: Any = LOWERINGS[op].kernel
        given = {k: tuples_of(v) for k, v in settings.items()}
        return lambda data: kernel(*(data if isinstance(data, list) else [data]), **given)

    def _call_layer(self, node: Node, data: list[Any]) -> Any:
        if layer_of(node, self.graph) is not None:
            return super()._call_layer(node, data)
        rest = iter(data)
        operands = [
            None if i is None else self._constant(i) if self.graph.is_weight(i) else next(rest) for i in node.inputs
        ]
        return self._canonical(node)(operands)

    def _constant(self, name: str) -> Any:
        return self.graph.weights[name].detach().numpy()


def _call(op: str, x: Any, other: Any = None, **attrs: Any) -> Any:
    """Apply an operator to a symbolic tensor and perhaps another one, or numbers."""
    if isinstance(other, torch.Tensor):
        other = other.item() if other.dim() == 0 else other.numpy().astype(np.float32)
    kernel: Any = LOWERINGS[op].kernel
    return kernel(x, **attrs) if other is None else kernel(x, other)


def _operations(outputs: Any) -> Iterator[Any]:
    """Yield the operations that symbolic tensors come from, each once."""
    todo, seen = [*keras.tree.flatten(outputs)], set[int]()
    while todo:
        operation, at, _ = todo.pop()._keras_history
        node = operation._inbound_nodes[at]
        if id(node) not in seen:
            seen.add(id(node))
            todo += node.input_tensors
            if id(operation) not in seen:
                seen.add(id(operation))
                yield operation
