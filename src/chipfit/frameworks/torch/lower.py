"""From Graph and Plan to an `nn.Module` that simulates the chip and still trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from chipfit.errors import DataError
from chipfit.frameworks.torch import ops
from chipfit.frameworks.torch.modules import BiasQuantizer, FakeQuantizer
from chipfit.graph.ir import Graph
from chipfit.graph.run import load_tree
from chipfit.plan import Plan


def lower(graph: Graph, plan: Plan) -> QuantizedModule:
    """The trainable simulation of `graph` under `plan`; in eval mode, as it came from calibration."""
    return QuantizedModule(graph, plan)


class QuantizedModule(nn.Module):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    It takes and returns what the original model does. Parameters and buffers have the original state-dict names;
    quantizers live under `quant.`. Batch norms that were folded keep their entries, which nothing reads; those that
    were not folded keep their statistics in training. Dropout is active in training mode.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        super().__init__()
        used = {i for n in graph.nodes for i in n.inputs if i is not None} | set(graph.outputs)
        for name, tensor in graph.weights.items():
            self._own(name, tensor.detach().clone(), name in graph.trainable, name in used)
        self.quant = nn.Module()
        self._quantizers: dict[str, str] = {}
        for t in plan.tensors.values():
            if t.quantized and t.role != "bias":
                self._add(t.name, FakeQuantizer(t))
        for n in graph.nodes:
            bias = n.inputs[2] if len(n.inputs) > 2 else None
            t = plan.tensors.get(bias or "")
            if t is not None and t.quantized and t.role == "bias":
                x, w = (getattr(self.quant, self._quantizers[i or ""]) for i in n.inputs[:2])
                self._add(t.name, BiasQuantizer(t, x, w))
        self._graph = _Program(graph, plan)
        self._in_spec, self._out_spec = json.loads(graph.in_spec), json.loads(graph.out_spec)
        self.eval()

    def _own(self, name: str, tensor: torch.Tensor, trainable: bool, used: bool) -> None:
        """Register a tensor under its dotted name."""
        *path, leaf = name.split(".")
        module: nn.Module = self
        for p in path:
            if p not in module._modules:
                module.add_module(p, nn.Module())
            module = module._modules[p]  # type: ignore[assignment]  # just made sure that it is there
        if trainable:
            module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=used))
        else:
            module.register_buffer(leaf, tensor)

    def _add(self, name: str, quantizer: FakeQuantizer) -> None:
        key = "".join(c if c.isalnum() or c == "_" else "_" for c in name)
        while key in self.quant._modules:
            key += "_"
        self.quant.add_module(key, quantizer)
        self._quantizers[name] = key

    def _weight(self, name: str) -> torch.Tensor:
        thing: Any = self
        for p in name.split("."):
            thing = getattr(thing, p)
        return thing

    def set_mode(self, mode: str) -> None:
        """Switch every quantizer: "quantize", or "bypass" for the float network after rewrites."""
        for m in self.quant.children():
            if isinstance(m, FakeQuantizer):
                m.mode = mode

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same arguments and result as the original model."""
        outputs = self.run_flat(self._flatten(args, kwargs))
        leaves = [outputs[x["output"]] if "output" in x else x["constant"] for x in self._out_spec["leaves"]]
        return pytree.tree_unflatten(leaves, load_tree(self._out_spec))

    def _flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        spec = self._in_spec
        if set(kwargs) == set(spec["kwargs"]):
            kwargs = {k: kwargs[k] for k in spec["kwargs"]}
        leaves = pytree.tree_leaves((args, kwargs))
        if len(leaves) != spec["leaves"]:
            raise DataError(
                "The model was captured with other inputs",
                got=f"{len(args)} positional and {sorted(kwargs)} keyword arguments",
                allowed=f"{spec['args']} positional and {spec['kwargs']} keyword arguments",
            )
        return [leaves[i] for i in spec["tensors"]]

    def run_flat(self, inputs: Sequence[torch.Tensor], keep: Sequence[str] = ()) -> list[Any]:
        """Run on flat inputs; returns the outputs, then the values named in `keep` (quantized where they are)."""
        program = self._graph
        floats: dict[str, Any] = {}  # before the quantizer
        env: dict[str, Any] = {}  # after it

        def put(name: str, x: Any) -> None:
            floats[name] = x
            key = self._quantizers.get(name)
            env[name] = getattr(self.quant, key)(x) if key is not None else x

        for name, x in zip(program.inputs, inputs, strict=True):
            put(name, x)
        for name in program.weights:
            put(name, self._weight(name))
        for node, takes_float in program.steps:
            xs = [None if i is None else floats[i] if f else env[i] for i, f in zip(node.inputs, takes_float, strict=True)]
            f, args, attrs = ops.call(node, xs)
            if node.op == "Dropout":
                attrs = {**attrs, "training": self.training}
            out = f(*args, **attrs)
            for name, x in zip(node.outputs, out if isinstance(out, (tuple, list)) else (out,), strict=False):
                put(name, x)
            for name in program.free[node.name]:
                if name not in keep:
                    del floats[name], env[name]
        return [env[n] for n in (*program.outputs, *keep)]


class _Program:
    """The graph as the module runs it: nodes, which inputs skip their quantizer, and what to free after each."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.inputs, self.outputs = list(graph.inputs), list(graph.outputs)
        self.weights = sorted({i for n in graph.nodes for i in n.inputs if i in graph.weights} | {o for o in graph.outputs if o in graph.weights})
        self.steps = [(n, tuple((i, n.name) in plan.float_edges for i in n.inputs)) for n in graph.nodes]
        last = {i: n.name for n in graph.nodes for i in n.inputs if i is not None and i not in graph.weights}
        self.free: dict[str, list[str]] = {n.name: [] for n in graph.nodes}
        for value, node in last.items():
            if value not in graph.outputs:
                self.free[node].append(value)
