"""The device as an `nn.Module`, for evaluation."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from chipfit.engine.trees import Results, flatten_call
from chipfit.graph.ir import Graph


class DeviceModel(nn.Module):
    """Takes and returns what the original model does; what it returns is what the device would.

    Where the runtime itself computes in float, at the operators in `float_operators`, the last bit is the runtime's.
    It has no parameters and gives no gradients.
    """

    def __init__(self, graph: Graph, run_flat: Callable[[Sequence[torch.Tensor]], list[Any]], floats: Sequence[str]):
        super().__init__()
        self.float_operators = tuple(floats)
        self._in_spec, self._results, self.run_flat = json.loads(graph.in_spec), Results(graph), run_flat
        self._types = [getattr(torch, graph.values[i].dtype) for i in graph.inputs]
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the original model, on the inputs' device."""
        flat = flatten_call(self._in_spec, args, kwargs)
        outs = self.run_flat([x.detach().to("cpu", kind) for x, kind in zip(flat, self._types, strict=True)])
        return self._results([x.to(flat[0].device) if flat and isinstance(x, torch.Tensor) else x for x in outs])

    def extra_repr(self) -> str:
        return f"in float: {', '.join(self.float_operators) or 'nothing'}"


device = DeviceModel
