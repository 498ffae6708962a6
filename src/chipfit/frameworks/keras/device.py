"""The device as a Keras model, for evaluation."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from chipfit.engine.trees import Results, flatten_call
from chipfit.frameworks.keras.backend import to_backend, to_torch
from chipfit.graph.ir import Graph


class DeviceModel(keras.Model):
    """Takes and returns what the original model does; what it returns is what the device would.

    Where the runtime itself computes in float, at the operators in `float_operators`, the last bit is the runtime's.
    It has no weights and gives no gradients; `predict` and `evaluate` run it eagerly.
    """

    def __init__(self, graph: Graph, run_flat: Callable[[Sequence[torch.Tensor]], list[Any]], floats: Sequence[str]):
        super().__init__(name="device")
        self.float_operators = tuple(floats)
        self._graph, self.run_flat, self.built = graph, run_flat, True
        self.compile(run_eagerly=True)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Same inputs and result as the original model."""
        spec, given = json.loads(self._graph.in_spec), keras.tree.map_structure(to_torch, inputs)
        packed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        flat = flatten_call(spec, () if spec["kwargs"] else packed, given if spec["kwargs"] else {})
        outs = Results(self._graph)(self.run_flat([x.detach().cpu() for x in flat]))
        return keras.tree.map_structure(to_backend, outs)


device = DeviceModel
