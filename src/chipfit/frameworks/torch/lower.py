"""From Graph and Plan to an `nn.Module` that simulates the chip and still trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from chipfit.engine.kernels import call
from chipfit.engine.run import done_after
from chipfit.engine.trees import Results, flatten_call
from chipfit.errors import UnknownNameError
from chipfit.frameworks.torch.modules import BiasQuantizer, FakeQuantizer
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import rounding


def lower(graph: Graph, plan: Plan) -> QuantizedModule:
    """The trainable simulation of `graph` under `plan`; in eval mode, as it came from calibration."""
    return QuantizedModule(graph, plan)


class QuantizedModule(nn.Module):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    It takes and returns what the original model does. Parameters and buffers have the original state-dict names;
    quantizers live under `quant.` (`quant_.` where the model has a `quant` of its own), one for all tensors that a tie
    holds together. Batch norms that were folded keep their entries, frozen, which nothing reads; the weights before
    them hold the folded numbers. Batch norms that were not folded keep their statistics in training. Dropout is active
    in training mode.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        super().__init__()
        self._own_all(graph)
        taken = {name.partition(".")[0] for name in graph.weights}
        self._prefix = "quant"
        while self._prefix in taken:  # a name in state dicts, which `builder.unique` would number
            self._prefix += "_"
        self._modules[self._prefix] = nn.Module()
        found = rounding(graph, plan)
        made = {
            owner: self._add(owner, (BiasQuantizer if owner in found.products else FakeQuantizer)(owner, plan[owner]))
            for owner in dict.fromkeys(found.owner.values())
        }
        #: tensor -> its module under `quant`
        self._keys = {name: made[owner] for name, owner in found.owner.items()}
        #: bias -> modules that its scale is the product of
        self._biases = {bias: (self._keys[x], self._keys[w]) for bias, (x, w) in found.products.items()}
        self._rounded = found.rounded  #: tensors that pass through their quantizer

        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._float_reads = frozenset(plan.float_edges)
        self._unrounded = frozenset(name for name, _ in plan.float_edges) & self._rounded
        self._nodes, self._done = tuple(graph.nodes), done_after(graph)
        self._in_spec, self._results = json.loads(graph.in_spec), Results(graph)
        self.eval()

    # ---- construction

    def _own_all(self, graph: Graph) -> None:
        """Register every weight under its dotted name; entries that were tied stay one tensor."""
        made: dict[int, torch.Tensor] = {}
        used = {i for n in graph.nodes for i in n.inputs} | set(graph.outputs)
        live = {id(t) for name, t in graph.weights.items() if name in used}
        for name, tensor in graph.weights.items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for p in path:
                # not add_module: the user's names may be names of our methods
                module = module._modules.setdefault(p, nn.Module())  # type: ignore[assignment]  # entries are modules
            own = made.get(id(tensor))
            if own is None:
                own = tensor.detach().clone()
                if name in graph.trainable:
                    own = nn.Parameter(own, requires_grad=id(tensor) in live)
                made[id(tensor)] = own
            table: dict[str, Any] = module._parameters if isinstance(own, nn.Parameter) else module._buffers
            table[leaf] = own

    def _add(self, name: str, quantizer: nn.Module) -> str:
        """Register a quantizer; returns its key."""
        key = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        while hasattr(self._quant, key):  # taken, or an attribute of nn.Module
            key += "_"
        self._quant.add_module(key, quantizer)
        return key

    # ---- use

    @property
    def _quant(self) -> nn.Module:
        return self._modules[self._prefix]  # type: ignore[return-value]  # set in __init__

    def quantizer_of(self, name: str) -> FakeQuantizer | BiasQuantizer:
        """The quantizer of one value or weight, by its name in the Graph and the Plan.

        Raises:
            UnknownNameError: the tensor is not quantized.
        """
        if name not in self._keys:
            raise UnknownNameError("quantized tensor", name, self._keys)
        return getattr(self._quant, self._keys[name])

    def set_mode(self, mode: str) -> None:
        """Switch every quantizer: "quantize", "bypass" for the float network after rewrites, or "observe".

        Raises:
            UnknownNameError: another word.
        """
        if mode not in FakeQuantizer.MODES:
            raise UnknownNameError("quantizer mode", mode, FakeQuantizer.MODES)
        for m in self._quant.children():
            m.mode = mode  # type: ignore[assignment]  # both kinds of quantizer have it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the original model."""
        return self._results(self.run_flat(flatten_call(self._in_spec, args, kwargs)))

    def run_flat(self, inputs: Sequence[torch.Tensor], keep: Sequence[str] = ()) -> list[Any]:
        """Run on flat inputs; returns the outputs, then the values named in `keep` (quantized where they are)."""
        floats: dict[str, Any] = {}  # before the quantizer, where someone reads that
        env: dict[str, Any] = {}  # after it

        def put(name: str, x: Any) -> None:
            if name in self._unrounded:
                floats[name] = x
            env[name] = self._round(name, x) if name in self._rounded else x

        def get(name: str) -> Any:
            if name not in env:
                put(name, self.weight(name))
            return env[name]

        for name, given in zip(self._inputs, inputs, strict=True):
            put(name, given)
        for node, done in zip(self._nodes, self._done, strict=True):
            xs: list[Any] = []
            for i in node.inputs:
                x = None if i is None else get(i)
                xs.append(floats[i] if i in floats and (i, node.name) in self._float_reads else x)
            f, args, attrs = call(node, xs)
            if node.op == "Dropout":
                attrs = {**attrs, "training": self.training}
            elif "device" in attrs and inputs:  # a tensor made on the device of capture follows the model to another
                attrs = {**attrs, "device": inputs[0].device}
            out = f(*args, **attrs)
            del xs, args
            for name, x in zip(node.outputs, out if isinstance(out, (tuple, list)) else (out,), strict=False):
                put(name, x)
            for name in done:
                if name not in keep:
                    floats.pop(name, None)
                    env.pop(name, None)
        return [get(n) for n in (*self._outputs, *keep)]

    def scale(self, name: str) -> torch.Tensor:
        """The scale of a quantized tensor as it is now; that of a bias follows from its input and its weight."""
        if name in self._biases:
            of_input, of_weight = (getattr(self._quant, k).scale for k in self._biases[name])
            return of_input * of_weight
        return self.quantizer_of(name).scale  # type: ignore[return-value,union-attr]  # the other kind of bias has one

    def _round(self, name: str, x: torch.Tensor) -> torch.Tensor:
        quantizer = getattr(self._quant, self._keys[name])
        return quantizer(x, self.scale(name)) if name in self._biases else quantizer(x)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter or buffer by its name in the Graph."""
        *path, leaf = name.split(".")
        module: Any = self
        for p in path:
            module = module._modules[p]
        return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]
