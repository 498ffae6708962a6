"""MCT's input scaling: inputs are multiplied so that they fill their quantization range, and the first weights divided.

A range whose end t is a power of two, less one step, is seldom filled: the largest input m is below it. The network for
inputs x t / m has the weights W m / t behind them, so that it computes what it did, and its input has all codes.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chipfit.calibration.data import iterate
from chipfit.frameworks import framework_of, part
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rewriting import Readers
from chipfit.result import Result

#: share by which float32 may round an input above the end of its range
_ROUNDING = 1e-6


@dataclass(frozen=True)
class ScaledInput:
    """A factor for the input of a network, and the layers whose weights are divided by it."""

    factor: float = 1.0
    layers: Sequence[Node] = ()
    refusal: str = ""  #: why inputs cannot be scaled

    @classmethod
    def of(cls, graph: Graph, result: Result) -> "ScaledInput":
        """Return the factor that fills the range of the input of a quantized network; `graph` has no rewrites yet."""
        plan, stats = result.plan, result.decision.stats
        if len(graph.inputs) > 1:
            return cls(refusal="the network has several inputs, and one number scales them all")
        (name,) = graph.inputs
        if not plan.quantized(name) or name not in stats:
            return cls(refusal=f"'{name}' is not quantized")
        readers = Readers(graph)
        found = readers.linear_behind(name, lambda n: n.facts.homogeneous)
        if why := found.refusal or readers.why_fixed(*found.ends):
            return cls(refusal=why)
        grid, step, seen = plan[name].grid, float(plan[name].scale), stats[name]
        room = [code * step / x for code, x in ((grid.qmin, seen.low), (grid.qmax, seen.high)) if code * x > 0]
        factor = min(room, default=1.0) * (1 - _ROUNDING)
        return cls(factor, found.ends) if grid.pot and grid.symmetric and factor > 1 else cls()  # it is filled

    def data(self, generator: Callable[[], Any]) -> Callable[[], Iterator[Any]]:
        """Return a generator function of scaled batches."""
        return lambda: map(self.batch, iterate(generator))

    def batch(self, batch: Any) -> Any:
        """Return a batch, a tensor or a list or table of one, multiplied by the factor."""
        if isinstance(batch, Mapping):
            return {name: x * self.factor for name, x in batch.items()}
        if isinstance(batch, (list, tuple)):
            return [x * self.factor for x in batch]
        return batch * self.factor

    def model(self, model: Any) -> Any:
        """Return a copy of a model for scaled inputs; None where a weight is not that of one of its layers."""
        divide = {"torch": self._torch, "keras": self._keras}.get(framework_of(model))
        return None if divide is None else divide(model)

    def _torch(self, model: torch.nn.Module) -> torch.nn.Module | None:
        model = copy.deepcopy(model)
        named = list(model.named_parameters(remove_duplicate=False))
        parameters, uses = dict(named), Counter(id(p) for _, p in named)
        if any(uses[id(parameters.get(node.weight))] != 1 for node in self.layers):
            return None
        with torch.no_grad():
            for node in self.layers:
                parameters[node.weight].div_(self.factor)
        return model

    def _keras(self, model: Any) -> Any:
        keras = part("keras", "replacing")
        kernels = {node.layer: node.weight.rpartition("/")[2] for node in self.layers}
        done = list[str]()

        def choose(layer: Any) -> tuple[Any, Mapping[str, Any]] | None:
            name = kernels.get(layer.name)
            if name is None:
                return None
            done.append(layer.name)
            weights = keras.weights_of(layer)
            return type(layer).from_config(layer.get_config()), {**weights, name: weights[name] / self.factor}

        copied = keras.with_other_layers(model, choose)
        return copied if sorted(done) == sorted(kernels) else None
