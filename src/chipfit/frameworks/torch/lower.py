"""From Graph and Plan to an `nn.Module` that simulates the chip and still trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from chipfit.engine import kernels as ops
from chipfit.engine.run import flatten_call, load_tree
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
    holds together. Batch norms that were folded keep their entries, frozen, which nothing reads; the weights before them
    hold the folded numbers. Batch norms that were not folded keep their statistics in training. Dropout is active in
    training mode.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        super().__init__()
        self._own_all(graph)
        self._prefix = "quant"
        while self._prefix in {name.partition(".")[0] for name in graph.weights}:
            self._prefix += "_"
        self._modules[self._prefix] = nn.Module()
        self._keys: dict[str, str] = {}  #: tensor -> its module under `quant`
        self._biases: dict[str, tuple[str, str]] = {}  #: bias -> modules that its scale is the product of
        self._rounded: set[str] = set()  #: tensors that pass through their quantizer
        self._build_quantizers(graph, plan)

        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._float_reads = frozenset(plan.float_edges)
        self._unrounded = frozenset(name for name, _ in plan.float_edges) & self._rounded
        self._nodes, self._free = tuple(graph.nodes), _last_reads(graph)
        self._in_spec, self._out_leaves = json.loads(graph.in_spec), json.loads(graph.out_spec)["leaves"]
        self._out_tree = _Tree(load_tree(json.loads(graph.out_spec)))
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

    def _build_quantizers(self, graph: Graph, plan: Plan) -> None:
        found = rounding(graph, plan)
        made: dict[str, str] = {}
        for owner in dict.fromkeys(found.owner.values()):
            t = plan.tensors[owner]
            made[owner] = self._add(owner, BiasQuantizer(t) if owner in found.products else FakeQuantizer(t))
        self._keys = {name: made[owner] for name, owner in found.owner.items()}
        self._biases = {bias: (self._keys[x], self._keys[w]) for bias, (x, w) in found.products.items()}
        self._rounded = found.rounded

    def _add(self, name: str, quantizer: nn.Module) -> str:
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
            from chipfit.errors import UnknownNameError

            raise UnknownNameError("quantized tensor", name, self._keys)
        return getattr(self._quant, self._keys[name])

    def set_mode(self, mode: str) -> None:
        """Switch every quantizer: "quantize", "bypass" for the float network after rewrites, or "observe".

        Raises:
            UnknownNameError: another word.
        """
        if mode not in FakeQuantizer.MODES:
            from chipfit.errors import UnknownNameError

            raise UnknownNameError("quantizer mode", mode, FakeQuantizer.MODES)
        for m in self._quant.children():
            m.mode = mode  # type: ignore[assignment]  # both kinds of quantizer have it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the original model."""
        outputs = self.run_flat(flatten_call(self._in_spec, args, kwargs))
        leaves = [outputs[x["output"]] if "output" in x else x["constant"] for x in self._out_leaves]
        return pytree.tree_unflatten(leaves, self._out_tree.spec)

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
        for node in self._nodes:
            xs: list[Any] = []
            for i in node.inputs:
                x = None if i is None else get(i)
                xs.append(floats[i] if i in floats and (i, node.name) in self._float_reads else x)
            f, args, attrs = ops.call(node, xs)
            if node.op == "Dropout":
                attrs = {**attrs, "training": self.training}
            elif "device" in attrs and inputs:  # a tensor made on the device of capture follows the model to another
                attrs = {**attrs, "device": inputs[0].device}
            out = f(*args, **attrs)
            del xs, args
            for name, x in zip(node.outputs, out if isinstance(out, (tuple, list)) else (out,), strict=False):
                put(name, x)
            for name in self._free[node.name]:
                if name not in keep:
                    floats.pop(name, None)
                    del env[name]
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


class _Tree:
    """A pytree spec that deep copies share: it is immutable, and copying one makes torch warn."""

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tree:
        return self


def _last_reads(graph: Graph) -> dict[str, list[str]]:
    """Node name -> values and weights that nobody reads after it."""
    free: dict[str, list[str]] = {n.name: [] for n in graph.nodes}
    last = {i: n.name for n in graph.nodes for i in n.inputs if i is not None}
    for value, node in last.items():
        if value not in graph.outputs:
            free[node].append(value)
    return free
