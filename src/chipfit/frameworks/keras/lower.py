"""From Graph and Plan to a Keras model that simulates the chip and still trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch

from chipfit.engine.opaque import fill
from chipfit.engine.trees import unflatten_outputs
from chipfit.errors import UnsupportedError
from chipfit.frameworks.keras.backend import dtype_here, forward
from chipfit.frameworks.keras.build import LAYERS, WEIGHTED, padding_mode
from chipfit.frameworks.keras.kernels import KERNELS, CanonicalOperation
from chipfit.frameworks.keras.layers import KerasActivationQuantizationHolder, KerasQuantizationWrapper, KerasQuantizer
from chipfit.frameworks.keras.opaque import PREFIX, fresh
from chipfit.frameworks.keras.weights import to_keras
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.graph.linear import LINEAR
from chipfit.plan.record import Plan, TensorPlan
from chipfit.plan.relayout import relayout
from chipfit.plan.sharing import rounding


@keras.saving.register_keras_serializable(package="chipfit")
class QuantizedModel(keras.Model):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    A Functional model with the inputs and outputs of the original one. Layers keep their names; those with rounded weights are
    in a `KerasQuantizationWrapper`, stored results pass through a `KerasActivationQuantizationHolder`.
    """

    def run_flat(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Torch tensors in the order of the graph's inputs to torch tensors in the order of its outputs."""
        return keras.tree.flatten(forward(self, keras.tree.pack_sequence_as(self._inputs_struct, list(inputs))))


def lower(graph: Graph, plan: Plan) -> QuantizedModel:
    """The trainable simulation of `graph` under `plan`, on the Keras backend of this process.

    Raises:
        UnsupportedError: an operator has no Keras form.
    """
    return Builder(graph, plan).build()


@dataclass(frozen=True, slots=True)
class Home:
    """Where a weight of the graph lives in the model."""

    layer: str
    variable: str  #: its name; the number of it in an opaque layer
    use: int = 0  #: which of a wrapper's biases
    op: str = ""  #: the operator that says how Keras lays it out; "": as it is
    groups: int = 1  #: of a depthwise convolution

    def variable_in(self, model: Any) -> Any:
        """The Keras variable."""
        layer = model.get_layer(self.layer)
        if isinstance(layer, KerasQuantizationWrapper):
            if self.use:
                return layer.bias(self.use)
            layer = layer.layer
        if self.variable.isdigit():
            return [*layer.trainable_variables, *layer.non_trainable_variables][int(self.variable)]
        return next(v for v in layer.variables if v.name == self.variable)


@dataclass(frozen=True, slots=True)
class Scale:
    """Where the scale of a planned tensor lives in the model."""

    tensor: str
    layer: str
    variable: str = ""  #: of a wrapper; "" in a holder

    def quantizer_in(self, model: Any) -> KerasQuantizer:
        layer = model.get_layer(self.layer)
        return layer.weights_quantizers[self.variable] if self.variable else layer.activation_holder_quantizer


class Builder:
    """One model under construction. The same graph and plan give the same layers with the same names."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.relaid, self.plan = relayout(graph, plan, "channels_last")
        self.graph = self.relaid.graph
        self.rounding = rounding(self.graph, self.plan)
        self.homes: dict[str, list[Home]] = {}
        self.scales: list[Scale] = []
        self._names: set[str] = set()
        self._layers: dict[str, Any] = {}  #: what distinguishes a layer with weights -> the layer
        self._holders: dict[str, KerasActivationQuantizationHolder] = {}  #: by owner of the quantizer
        self._scale_of: dict[str, Any] = {}  #: owner -> its scale as a symbolic tensor
        self._followed = {
            self.rounding.owner[x] for x, _ in self.rounding.products.values()
        }  #: owners whose scale biases need
        self._raw: dict[str, Any] = {}  #: value -> symbolic tensor before its quantizer
        self._ready: dict[str, Any] = {}  #: the same after it
        self._biases = self._biases_by_layer()

    def build(self) -> QuantizedModel:
        """The model.

        Raises:
            UnsupportedError: an operator has no Keras form.
        """
        g = self.graph
        inputs = {
            n: keras.Input(g.values[n].shape[1:], dtype=dtype_here(g.values[n].dtype), name=self._unique(n))
            for n in g.inputs
        }
        for name, x in inputs.items():
            self._put(name, x)
        for node in g.nodes:
            outs = self._node(node)
            for name, x in zip(node.outputs, outs if isinstance(outs, (list, tuple)) else [outs], strict=True):
                self._put(name, x)
        spec = json.loads(g.in_spec)
        struct = (
            dict(inputs) if spec["kwargs"] else list(inputs.values()) if spec["packed"] else next(iter(inputs.values()))
        )
        model = QuantizedModel(
            struct, unflatten_outputs(g, [self._output(o) for o in g.outputs]), name=self._unique("quantized")
        )
        self._set_numbers(model)
        return model

    # ---- values

    def _put(self, name: str, x: Any) -> None:
        self._raw[name] = self._ready[name] = x
        if name not in self.rounding.rounded:
            return
        owner = self.rounding.owner[name]
        if owner not in self._holders:
            t, called = self.plan.tensors[owner], self._unique(f"{name}_holder")
            quantizer = KerasQuantizer.of(t, self._channels(name, t), name=f"{self._clean(name)}_quantizer")
            self._holders[owner] = KerasActivationQuantizationHolder(
                quantizer, gives_scale=owner in self._followed, name=called
            )
            self.scales.append(Scale(owner, called))
        y = self._holders[owner](x)
        self._ready[name], self._scale_of[owner] = y if owner in self._followed else (y, None)

    def _channels(self, name: str, t: TensorPlan) -> tuple[int, ...]:
        """The shape in which the scale of a value broadcasts against it."""
        assert t.scale is not None
        if not t.scale.dim():
            return ()
        shape = [1] * len(self.graph.shape(name))
        form = self.relaid.forms.get(name)
        axis = (t.axis or 0) % len(shape)
        shape[form.index(axis) if form else axis] = t.scale.shape[0]
        return tuple(shape)

    def _read(self, name: str, node: Node) -> Any:
        return (self._raw if (name, node.name) in self.plan.float_edges else self._ready)[name]

    def _output(self, name: str) -> Any:
        if name in self.graph.weights:
            raise UnsupportedError(
                f"The output '{name}' of the model is a constant", hint="leave it out of the outputs"
            )
        if self._ready[name] is not self._raw.get(name) or name not in self.graph.inputs:
            return self._ready[name]
        return keras.layers.Identity(name=self._unique(f"{name}_output"))(self._ready[name])

    # ---- nodes

    def _node(self, node: Node) -> Any:
        if node.op == OPAQUE:
            return self._opaque(node)
        data = [self._read(i, node) for i in node.inputs if i is not None and i not in self.graph.weights]
        if len(data) < sum(i is not None for i in node.inputs):
            return self._weighted(node, data)
        layer = LAYERS[node.op](node, self.graph) if node.op in LAYERS else None
        if layer is None:
            return self._canonical(node)(data if len(data) > 1 else data[0])
        cls, config = layer
        return cls(**config, name=self._unique(node.name))(data if len(data) > 1 else data[0])

    def _canonical(self, node: Node) -> CanonicalOperation:
        if node.op not in KERNELS:
            raise UnsupportedError(
                f"{node.op} '{node.who}' has no Keras form",
                hint="export or verify the result, which needs no Keras model",
            )
        slots: list[Any] = []
        for i in node.inputs:
            w = self.graph.weights.get(i or "")
            kind = [] if w is None else [str(w.dtype).removeprefix("torch."), i in self.graph.trainable, *w.shape]
            slots.append("-" if i is None else "x" if w is None else kind)
        return CanonicalOperation(node.op, _jsonable(node.attrs), slots, name=self._unique(node.name))

    def _weighted(self, node: Node, data: list[Any]) -> Any:
        """A layer with weights, in a wrapper where some of them are rounded; one layer however often its weights are used."""
        key = self._key(node)
        if key not in self._layers:
            self._layers[key] = self._wrapped(node, self._biases[key])
        bias, extra = _bias(node), {}
        if use := self._biases[key].index(bias):
            extra["use"] = use
        if bias in self.rounding.products:
            extra["input_scale"] = self._scale_of[self.rounding.owner[self.rounding.products[bias][0]]]
        if node.op in WEIGHTED and "padding" in node.attrs and not padding_mode(node, self.graph):
            pairs = [(0, 0), *node.attrs["padding"], (0, 0)]
            zeros = CanonicalOperation(
                "Pad",
                {"padding": pairs, "mode": "constant", "value": 0.0},
                ["x"],
                name=self._unique(f"{node.name}_padding"),
            )
            data = [zeros(data[0])]
        return self._layers[key](data if len(data) > 1 else data[0], **extra)

    def _wrapped(self, node: Node, biases: list[str | None]) -> Any:
        found = WEIGHTED[node.op](node, self.graph) if node.op in WEIGHTED else None
        if found is None:
            inner, op = self._canonical(node), ""
            variables = {f"w{k}": i for k, i in enumerate(node.inputs) if i is not None and i in self.graph.weights}
        else:
            cls, config, variables, op = found
            own = (
                node.config if node.layer_type == cls.__name__ else {}
            )  # initialisers, regularisers and the like stay the user's
            inner = cls.from_config({**own, **config, "name": self._unique(node.name)})
        groups = node.attrs.get("groups", 1)
        quantizers, follows = {}, ""
        for variable, weight in variables.items():
            home = Home(inner.name, variable, op=op if variable == "kernel" else "", groups=groups)
            self.homes.setdefault(weight, []).append(home)
            if weight not in self.rounding.rounded or (weight, node.name) in self.plan.float_edges:
                continue
            t, shape = self.plan.tensors[weight], ()
            if weight in self.rounding.products:
                follows = next(v for v, w in variables.items() if w == self.rounding.products[weight][1])
            else:
                shape = self._numbers(t.scale, t, home).shape
                self.scales.append(Scale(weight, inner.name, variable))
            quantizers[variable] = KerasQuantizer.of(t, shape, name=f"{variable}_quantizer")
        for use, bias in enumerate(biases[1:], 1):
            self.homes.setdefault(bias or "", []).append(Home(inner.name, "bias", use))
        if not quantizers and len(biases) == 1:
            return inner
        return KerasQuantizationWrapper(inner, quantizers, follows, len(biases), name=inner.name)

    def _opaque(self, node: Node) -> Any:
        if not node.attrs["target"].startswith(PREFIX):
            raise UnsupportedError(f"'{node.attrs['target']}' of '{node.who}' has no Keras form")
        variables, args, kwargs = node.attrs["args"]
        operation = fresh(node.attrs["target"], self._unique(node.name))
        given = [
            self.graph.weights[i].numpy() if i in self.graph.weights else self._read(i, node)
            for i in node.inputs
            if i is not None
        ]
        for k, ref in enumerate(variables):
            self.homes.setdefault(node.inputs[ref.index] or "", []).append(Home(operation.name, str(k)))
        return keras.tree.flatten(operation(*fill(args, given), **fill(kwargs, given)))

    # ---- the same weights, used again

    def _key(self, node: Node) -> str:
        """The same for nodes that can be calls of one layer: they differ in their data and, where it follows the data, in their bias."""
        bias = _bias(node)
        weights = [i for i in node.inputs if i is not None and i in self.graph.weights and i != bias]
        raw = [(i, node.name) in self.plan.float_edges for i in node.inputs]
        kind = (
            "follows"
            if bias in self.rounding.products
            else "float"
            if bias and bias not in self.rounding.rounded
            else bias
        )
        return json.dumps([node.op, weights or node.name, kind, raw, _jsonable(node.attrs)], sort_keys=True)

    def _biases_by_layer(self) -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for n in self.graph.nodes:
            if n.op != OPAQUE and any(i in self.graph.weights for i in n.inputs):
                biases = found.setdefault(self._key(n), [])
                if _bias(n) not in biases:
                    biases.append(_bias(n))
        return found

    # ---- numbers

    def _numbers(self, p: torch.Tensor | None, t: TensorPlan, home: Home) -> np.ndarray:
        """Scale or zero point of a weight in the form in which it broadcasts against the Keras variable."""
        assert p is not None  # a quantized tensor has both
        if p.dim():
            shape = [1] * self.graph.weights[t.name].dim()
            shape[t.axis or 0] = -1
            p = p.reshape(shape)
            p = to_keras(home.op, p, home.groups) if home.op else p
        return p.numpy()

    def _set_numbers(self, model: Any) -> None:
        for weight, homes in self.homes.items():
            for home in homes:
                variable = home.variable_in(model)
                value = to_keras(home.op, self.graph.weights[weight].detach(), home.groups)
                variable.assign(value.reshape(tuple(variable.shape)).numpy())
        for s in self.scales:
            t, quantizer = self.plan.tensors[s.tensor], s.quantizer_in(model)
            at = [h for h in self.homes.get(s.tensor, ()) if (h.layer, h.variable) == (s.layer, s.variable)]
            numbers = [
                self._numbers(p, t, at[0]) if at else p.numpy() for p in (t.scale, t.zero_point) if p is not None
            ]
            quantizer.set(*(n.reshape(quantizer.shape) for n in numbers))

    # ---- names

    def _clean(self, name: str) -> str:
        return name.replace("/", "_")  # which Keras keeps for paths

    def _unique(self, name: str) -> str:
        base = name = self._clean(name)
        k = 1
        while name in self._names:
            name, k = f"{base}_{k}", k + 1
        self._names.add(name)
        return name


def _bias(node: Node) -> str | None:
    return node.inputs[2] if node.op in LINEAR and len(node.inputs) > 2 else None


def _jsonable(attrs: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(attrs))
