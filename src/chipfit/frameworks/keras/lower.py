"""From Graph and Plan to a Keras model that simulates the chip and still trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import keras
import torch

from chipfit.engine.opaque import fill
from chipfit.engine.trees import Results
from chipfit.errors import PlanError, TrainingError, UnsupportedError
from chipfit.frameworks.keras.backend import dtype_here, forward
from chipfit.frameworks.keras.bounds import Bounds
from chipfit.frameworks.keras.canonical import CanonicalOperation
from chipfit.frameworks.keras.forms import FORMS, layer_of, padding_word
from chipfit.frameworks.keras.homes import Home, Scale
from chipfit.frameworks.keras.layers import (
    NORM,
    KerasActivationQuantizationHolder,
    KerasBatchNormWrapper,
    KerasQuantizationWrapper,
    KerasQuantizer,
)
from chipfit.frameworks.keras.opaque import PREFIX, fresh
from chipfit.frameworks.keras.ops import KerasOps
from chipfit.frameworks.keras.weights import DEPTHWISE, to_keras
from chipfit.graph.builder import unique
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.graph.ops import OPS
from chipfit.passes.relayout import relayout
from chipfit.plan.record import Plan
from chipfit.plan.sharing import rounding
from chipfit.plan.training import Training, starting
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.stored import Stored


@keras.saving.register_keras_serializable(package="chipfit")
class QuantizedModel(keras.Model):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    A Functional model with the inputs and outputs of the original one. Layers keep their names; those with rounded
    weights are in a `KerasQuantizationWrapper`, stored results pass through a `KerasActivationQuantizationHolder`.
    """

    #: what holds in each step; None in what `keras.models.clone_model` makes, which cannot train
    bounds: Bounds | None = None
    train_function: Any  #: of Keras
    _stepping = False  #: one of Keras's own steps runs, which is checked when it is done
    _steps = 0  #: of other loops

    def make_train_function(self, force: bool = False) -> Any:
        """As of every Keras model; a step raises a TrainingError where it leaves a scale or weight that is no number,
        naming layer and step.

        Raises:
            PlanError: the model does not know what holds in a step.
        """
        before = self.train_function
        super().make_train_function(force)
        if (step := self.train_function) is before:
            return step
        bounds = self._held()
        bounds.freeze()

        def checked(*args: Any) -> Any:
            self._stepping = True
            try:
                out = step(*args)
            finally:
                self._stepping = False
            try:
                with keras.StatelessScope(state_mapping=self._after(out)):
                    bounds.check(self.trainable_variables, int(self.optimizer.iterations))
            except TrainingError:
                self._keep(out)
                raise
            return out

        self.train_function = checked
        return checked

    def _after(self, out: Any) -> list[tuple[Any, Any]]:
        """Variables and what a step has made of them, where the backend has not written it into them yet."""
        if keras.backend.backend() != "jax":
            return []
        kinds = self.trainable_variables, self.non_trainable_variables, self.optimizer.variables
        return [pair for vs, now in zip(kinds, out[1][:3], strict=True) for pair in zip(vs, now, strict=True)]

    def _keep(self, out: Any) -> None:
        """Let variables hold what a step has made of them: JAX has given away the memory of what they were."""
        if keras.backend.backend() == "jax":
            kinds = "trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"
            self._jax_state, self._jax_state_synced = dict(zip(kinds, out[1], strict=True)), False
            self.jax_state_sync()

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """As of every Keras model.

        Raises:
            PlanError: as of `make_train_function`.
            TrainingError: in a loop that runs eagerly, a step has left a scale or weight that is no number.
        """
        trains = self.trainable_variables if training and not self._stepping else ()
        if trains and not any(KerasOps.traced(v.value) for v in trains[:1]):
            self._steps += 1
            self._held().check(trains, self._steps)
        return super().call(inputs, training=training, mask=mask)

    def _held(self) -> Bounds:
        if self.bounds is None:
            hint = "copy.deepcopy(model), or save and load it; clone_model leaves out what layers do not hold"
            raise PlanError("This model does not know the rules that hold while it trains", where=self.name, hint=hint)
        return self.bounds

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **({"bounds": self.bounds.to_config()} if self.bounds else {})}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> QuantizedModel:
        model: QuantizedModel = super().from_config({k: v for k, v in config.items() if k != "bounds"}, custom_objects)
        if "bounds" in config:
            Bounds.from_config(model, config["bounds"]).attach(model)
        return model

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """As of every Keras model.

        Raises:
            PlanError: numbers do not fit; they are of another plan.
        """
        try:
            super().load_weights(*args, **kwargs)
        except ValueError as error:  # of Keras, with that of the first layer between empty lines
            if not (why := str(error).partition(":\n\n")[2].partition("\n\n")[0]):
                raise
            raise PlanError(f"This checkpoint is of another plan: {why}", where=self.name) from error

    def run_flat(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Torch tensors in the order of the graph's inputs to torch tensors in the order of its outputs."""
        return keras.tree.flatten(forward(self, keras.tree.pack_sequence_as(self._inputs_struct, list(inputs))))


def lower(graph: Graph, plan: Plan, training: Training | None = None) -> QuantizedModel:
    """The trainable simulation of `graph` under `plan`, on the Keras backend of this process.

    Args:
        training: what trains the quantizers; None leaves their scales where they are.

    Raises:
        UnsupportedError: an operator has no Keras form, or an algorithm cannot train a tensor.
    """
    return Builder(graph, plan, training or Training()).build()


class Builder:
    """One model under construction. The same graph and plan give the same layers with the same names."""

    def __init__(self, graph: Graph, plan: Plan, training: Training) -> None:
        if training.bn_sync:
            raise UnsupportedError("Keras models have no bn_sync", hint="train in one process")
        self.training = training
        apart, plan = starting(graph, plan, training)
        self._folds = graph.folds if training.bn_fold else {}
        self._planned = graph.weights if training.bn_fold != -1 else apart.weights
        self.relaid, self.plan = relayout(apart, plan, "channels_last")
        self.graph = self.relaid.graph
        self.rounding = rounding(self.graph, self.plan)
        self.homes: dict[str, list[Home]] = {}
        self.scales: list[Scale] = []
        self._names: set[str] = set()
        self._layers: dict[str, Any] = {}  #: what distinguishes a layer with weights -> the layer
        self._holders: dict[str, KerasActivationQuantizationHolder] = {}  #: by owner of the quantizer
        self._scale_of: dict[str, Any] = {}  #: owner -> its scale as a symbolic tensor
        #: owners whose scale biases need
        self._followed = {self.rounding.owner[x] for x, _ in self.rounding.products.values()}
        self._raw: dict[str, Any] = {}  #: value -> symbolic tensor before its quantizer
        self._ready: dict[str, Any] = {}  #: the same after it
        self._biases = self._biases_by_layer()

    def build(self) -> QuantizedModel:
        """The model.

        Raises:
            UnsupportedError: an operator has no Keras form.
        """
        g = self.graph
        inputs = {}
        for name in g.inputs:
            value = g.values[name]
            inputs[name] = keras.Input(value.shape[1:], dtype=dtype_here(value.dtype), name=self._unique(name))
        for name, x in inputs.items():
            self._put(name, x)
        for node in g.nodes:
            outs = self._node(node)
            for name, x in zip(node.outputs, outs if isinstance(outs, (list, tuple)) else [outs], strict=True):
                self._put(name, x)
        spec = json.loads(g.in_spec)
        given = list(inputs.values())
        struct = inputs if spec["kwargs"] else given if spec["packed"] else given[0]
        outputs = Results(g)([self._output(o) for o in g.outputs])
        model = QuantizedModel(struct, outputs, name=self._unique("quantized"))
        self._set_weights(model)
        self.bounds_of(model).attach(model)
        return model

    def bounds_of(self, model: Any) -> Bounds:
        """What holds in each step of training of this model, or of one that was made like it."""
        return Bounds(model, self.scales, self.rounding.limits)

    # ---- values

    def _put(self, name: str, x: Any) -> None:
        self._raw[name] = self._ready[name] = x
        if name not in self.rounding.rounded:
            return
        owner = self.rounding.owner[name]
        if owner not in self._holders:
            stored, called = self.plan[owner], self._unique(f"{name}_holder")
            shape = self._channels(name, stored)
            quantizer = self._quantizer(owner, stored, shape, self.graph.shape(name), _clean(name))
            followed = owner in self._followed
            self._holders[owner] = KerasActivationQuantizationHolder(quantizer, gives_scale=followed, name=called)
            self.scales.append(Scale(owner, self.plan.layer_of(owner), called))
        y = self._holders[owner](x)
        self._ready[name], self._scale_of[owner] = y if owner in self._followed else (y, None)

    def _quantizer(
        self, tensor: str, stored: Stored, shape: tuple[int, ...], of: tuple[int | None, ...], name: str
    ) -> KerasQuantizer:
        """The quantizer of a tensor; its scale has `shape`, the tensor the shape `of`, both in Keras's layout."""
        t, stored = self.plan.tensors[tensor], self.rounding.start(self.plan, tensor)
        channels = [d for d, size in enumerate(shape) if size > 1]
        here = stored.with_(axis=channels[0] if channels else len(shape) - 1) if shape else stored
        found = None if tensor in self.rounding.fixed else self.training.algorithm(t)
        algorithm = (found or STE()).for_tensor(here, t.role, of)
        x = self._planned[tensor] if tensor in self._folds else self.graph.weights.get(tensor)
        if tensor in self.rounding.products:  # its scale comes with each call
            stored = stored.with_(scale=torch.ones(()), zero_point=torch.zeros((), dtype=torch.int32))
        # a name of its own: Keras on torch forgets to reset gradients of variables whose paths are the same
        return KerasQuantizer.of(stored, algorithm, x, shape, name=self._unique(f"{name}_quantizer"))

    def _channels(self, name: str, stored: Stored) -> tuple[int, ...]:
        """The shape in which the scale of a value broadcasts against it."""
        if not stored.scale.dim():
            return ()
        shape = [1] * len(self.graph.shape(name))
        form = self.relaid.forms.get(name)
        axis = (stored.axis or 0) % len(shape)
        shape[form.index(axis) if form else axis] = len(stored.scale)
        return tuple(shape)

    def _read(self, name: str, node: Node) -> Any:
        return (self._raw if (name, node.name) in self.plan.float_edges else self._ready)[name]

    def _output(self, name: str) -> Any:
        if name in self.graph.weights:
            hint = "leave it out of the outputs"
            raise UnsupportedError(f"The output '{name}' of the model is a constant", hint=hint)
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
        chosen = layer_of(node, self.graph)
        layer = chosen[0](**chosen[1], name=self._unique(node.name)) if chosen else self._canonical(node)
        return layer(data if len(data) > 1 else data[0])

    def _canonical(self, node: Node) -> CanonicalOperation:
        if node.op not in FORMS or FORMS[node.op].kernel is None:
            hint = "export or verify the result, which needs no Keras model"
            raise UnsupportedError(f"{node.op} '{node.who}' has no Keras form", hint=hint)
        slots: list[Any] = []
        for i in node.inputs:
            w = self.graph.weights.get(i or "")
            kind = [] if w is None else [str(w.dtype).removeprefix("torch."), i in self.graph.trainable, *w.shape]
            slots.append("-" if i is None else "x" if w is None else kind)
        return CanonicalOperation(node.op, _jsonable(node.attrs), slots, name=self._unique(node.name))

    def _weighted(self, node: Node, data: list[Any]) -> Any:
        """A call of a layer with weights, wrapped where some are rounded; all uses of its weights share it."""
        key = self._key(node)
        if key not in self._layers:
            self._layers[key] = self._wrapped(node, self._biases[key])
        bias, extra = self._bias(node), {}
        if use := self._biases[key].index(bias):
            extra["use"] = use
        if bias in self.rounding.products:
            extra["input_scale"] = self._scale_of[self.rounding.owner[self.rounding.products[bias][0]]]
        if _kind(node) == "conv" and not padding_word(node, self.graph):
            zeros = {"padding": [(0, 0), *node.attrs["padding"], (0, 0)], "mode": "constant", "value": 0.0}
            data = [CanonicalOperation("Pad", zeros, ["x"], name=self._unique(f"{node.name}_padding"))(data[0])]
        return self._layers[key](data if len(data) > 1 else data[0], **extra)

    def _wrapped(self, node: Node, biases: list[str | None]) -> Any:
        """The layer of a node with weights, wrapped where some are rounded; where its numbers go is noted for later."""
        chosen, layout = layer_of(node, self.graph), ""
        if chosen is None:
            inner = self._canonical(node)
            variables = {f"w{k}": i for k, i in enumerate(node.inputs) if i is not None and i in self.graph.weights}
        else:
            cls, config, variables = chosen
            own = node.config if node.layer_type == cls.__name__ else {}  # initialisers and the like stay the user's
            inner = cls.from_config({**own, **config, "name": self._unique(node.name)})
            layout = DEPTHWISE if cls is keras.layers.DepthwiseConv2D else _kind(node)
        groups = node.attrs.get("groups", 1)
        quantizers, follows = {}, ""
        for variable, weight in variables.items():
            home = Home(inner.name, variable, layout=layout if variable == "kernel" else "", groups=groups)
            self.homes.setdefault(weight, []).append(home)
            if weight not in self.rounding.rounded or (weight, node.name) in self.plan.float_edges:
                continue
            shape: tuple[int, ...] = ()
            value = to_keras(home.layout, self.graph.weights[weight].detach(), groups)
            if weight in self.rounding.products:
                follows = next(v for v, w in variables.items() if w == self.rounding.products[weight][1])
            else:
                stored = self.plan[weight]
                if stored.scale.dim():
                    shape = self._broadcast(weight, stored.axis or 0, len(stored.scale), home.layout, groups)
                self.scales.append(Scale(weight, self.plan.layer_of(weight), inner.name, variable))
            called = f"{inner.name}_{variable}"
            quantizers[variable] = self._quantizer(weight, self.plan[weight], shape, tuple(value.shape), called)
        for use, bias in enumerate(biases[1:], 1):
            self.homes.setdefault(bias or "", []).append(Home(inner.name, "bias", use))
        if node.operand("w") in self._folds:
            return self._with_norm(node, inner, layout, quantizers, follows, len(biases))
        if not quantizers and len(biases) == 1:
            return inner
        return KerasQuantizationWrapper(inner, quantizers, follows, len(biases), name=inner.name)

    def _with_norm(
        self, node: Node, inner: Any, layout: str, quantizers: dict[str, Any], follows: str, uses: int
    ) -> KerasBatchNormWrapper:
        """The wrapper of a layer whose batch norm trains."""
        fold, axis, groups = self._folds[node.weight], OPS[node.op].weight_axis, node.attrs.get("groups", 1)
        factor = self._broadcast(node.weight, axis, len(self.graph.weights[fold.mean]), layout, groups)
        names = dict(zip(NORM, (fold.gamma, fold.beta, fold.mean, fold.var), strict=True))
        for variable, name in names.items():
            if name is not None:
                if name in self.homes:
                    raise UnsupportedError(f"'{name}' is of several layers", hint="train with bn_fold=0")
                self.homes[name] = [Home(inner.name, variable)]
        trains = [v for v, there in (("gamma", fold.gamma), ("beta", fold.beta), ("bias", fold.biased)) if there]
        how: dict[str, Any] = {
            "bn_fold": self.training.bn_fold,
            "epsilon": fold.eps,
            "bn_momentum": self.training.bn_momentum,
        }
        how |= {"trains": trains, "factor": factor}
        return KerasBatchNormWrapper(inner, quantizers, follows, uses, **how, name=inner.name)

    def _opaque(self, node: Node) -> Any:
        if not node.attrs["target"].startswith(PREFIX):
            raise UnsupportedError(f"'{node.attrs['target']}' of '{node.who}' has no Keras form")
        variables, args, kwargs = node.attrs["args"]
        operation = fresh(node.attrs["target"], self._unique(node.name))
        w, names = self.graph.weights, [i for i in node.inputs if i is not None]
        given = [w[i].numpy() if i in w else self._read(i, node) for i in names]
        for k, ref in enumerate(variables):
            self.homes.setdefault(node.inputs[ref.index] or "", []).append(Home(operation.name, str(k)))
        return keras.tree.flatten(operation(*fill(args, given), **fill(kwargs, given)))

    # ---- the same weights, used again

    def _key(self, node: Node) -> str:
        """The same for nodes that can be calls of one layer.

        They compute the same of the same weights, but of other data. Their biases may differ where these are float or
        have scales that follow from the data, as one wrapper holds several; a bias with a scale of its own is the same.
        """
        bias = self._bias(node)
        weights = [i for i in node.inputs if i is not None and i in self.graph.weights and i != bias]
        raw = [(i, node.name) in self.plan.float_edges for i in node.inputs]
        kind = bias
        if bias in self.rounding.products:
            kind = "follows"
        elif bias and bias not in self.rounding.rounded:
            kind = "float"
        return json.dumps([node.op, weights or node.name, kind, raw, _jsonable(node.attrs)], sort_keys=True)

    def _biases_by_layer(self) -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for n in self.graph.nodes:
            if n.op != OPAQUE and any(i in self.graph.weights for i in n.inputs):
                biases = found.setdefault(self._key(n), [])
                if self._bias(n) not in biases:
                    biases.append(self._bias(n))
        return found

    def _bias(self, node: Node) -> str | None:
        return node.bias if _kind(node) else None

    # ---- numbers

    def _broadcast(self, weight: str, axis: int, count: int, layout: str, groups: int) -> tuple[int, ...]:
        """The shape in which so many numbers along an axis of a weight broadcast against the Keras variable."""
        shape = [1] * self.graph.weights[weight].dim()
        shape[axis] = count
        return tuple(to_keras(layout, torch.zeros(shape), groups).shape)

    def _set_weights(self, model: Any) -> None:
        for weight, homes in self.homes.items():
            for home in homes:
                variable = home.variable_in(model)
                value = to_keras(home.layout, self.graph.weights[weight].detach(), home.groups)
                variable.assign(value.reshape(tuple(variable.shape)).numpy())

    def _unique(self, name: str) -> str:
        found = unique(_clean(name), self._names)
        self._names.add(found)
        return found


def _clean(name: str) -> str:
    return name.replace("/", "_")  # which Keras keeps for paths


def _kind(node: Node) -> str:
    return OPS[node.op].kind if node.op in OPS else ""


def _jsonable(attrs: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(attrs))
