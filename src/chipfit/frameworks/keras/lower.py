"""Build a Keras model that simulates the chip from a Graph and a Plan, train it, and read its numbers back."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch

from chipfit.engine.opaque import fill
from chipfit.engine.trees import ResultStructure
from chipfit.errors import PlanError, TrainingError, UnsupportedError
from chipfit.frameworks.keras.backend import dtype_here, in_float32, to_backend
from chipfit.frameworks.keras.kernel_layout import DEPTHWISE, SLOPES, to_canonical, to_keras
from chipfit.frameworks.keras.layers import (
    NORM_VARIABLES,
    KerasActivationQuantizationHolder,
    KerasBatchNormWrapper,
    KerasQuantizationWrapper,
    KerasQuantizer,
)
from chipfit.frameworks.keras.loading import PREFIX, new_operation
from chipfit.frameworks.keras.lowerings import LOWERINGS, CanonicalOperation, layer_of, padding_word
from chipfit.frameworks.keras.models import DeviceModel as DeviceModel
from chipfit.frameworks.keras.models import KerasScaleBounds, QuantizedModel, ScaleSlot, WeightSlot
from chipfit.frameworks.training import trained_plan
from chipfit.graph.edit import unique_name
from chipfit.graph.folds import refresh_checksums
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.passes.layout import apply_layout
from chipfit.plan.record import Plan
from chipfit.plan.sharing import share_quantizers
from chipfit.plan.training import Training, before_training, check_folds
from chipfit.quantizers.algorithm import revived
from chipfit.quantizers.algorithms.ste import STE
from chipfit.quantizers.scale_bounds import scale_growth
from chipfit.quantizers.stored import Stored

#: last word of an entry in a layer's configuration -> function that restores its object
_RESTORE: dict[str, Callable[[Any], Any]] = {
    "initializer": keras.initializers.get,
    "regularizer": keras.regularizers.get,
    "constraint": keras.constraints.get,
}


def lower(graph: Graph, plan: Plan, training: Training | None = None) -> QuantizedModel:
    """Build the trainable simulation of `graph` under `plan`, on the Keras backend of this process.

    Args:
        training: what trains the quantizers; None leaves their scales where they are.

    Raises:
        UnsupportedError: Keras has no counterpart of an operator, or an algorithm cannot train a tensor.
    """
    return Builder(graph, plan, training or Training()).build()


def _restorable(node: Node) -> dict[str, Any]:
    """Return the configuration of a user's layer without functions and classes that Keras cannot restore by name."""
    kept = {}
    for key, value in node.config.items():
        try:
            _RESTORE.get(key.rpartition("_")[2], bool)(value)
        except (TypeError, ValueError):
            if not key.endswith("initializer"):  # the weights are there
                what = f"The simulation trains without the {key} of '{node.layer}', which is not registered in Keras; "
                warnings.warn(what + "register it: @keras.saving.register_keras_serializable()", stacklevel=2)
        else:
            kept[key] = value
    return kept


class Builder:
    """One model under construction. Equal graphs and plans give equal layers with equal names."""

    def __init__(self, graph: Graph, plan: Plan, training: Training) -> None:
        if training.bn_sync:
            raise UnsupportedError("Keras models have no bn_sync", hint="train in one process")
        self.training = training
        unfolded, plan = before_training(graph, plan, training)
        self._folds = graph.folds if training.bn_fold else {}
        self._planned = graph.weights if training.bn_fold != -1 else unfolded.weights
        self.converted, self.plan = apply_layout(unfolded, plan, "channels_last")
        self.graph = self.converted.graph
        self.sharing = share_quantizers(self.graph, self.plan)
        #: without states that nobody reads, whose quantizers would not be part of the model
        self._rounded = self.sharing.rounded & {*self.graph.outputs, *self.graph.users()}
        self.weight_slots: dict[str, list[WeightSlot]] = {}
        self.scales: list[ScaleSlot] = []
        self._names: set[str] = set()
        self._layers: dict[str, Any] = {}  #: key of nodes that share a layer -> the layer
        self._holders: dict[str, KerasActivationQuantizationHolder] = {}  #: by owner of the quantizer
        self._scale_of: dict[str, Any] = {}  #: owner -> its scale as a symbolic tensor
        #: owners whose scale is a factor of the scale of a bias
        self._bias_factors = {self.sharing.owner[x] for x, _ in self.sharing.products.values()}
        self._unquantized: dict[str, Any] = {}  #: value -> symbolic tensor before its quantizer
        self._quantized: dict[str, Any] = {}  #: value -> symbolic tensor after its quantizer
        self._biases = self._biases_by_layer()

    @in_float32()
    def build(self) -> QuantizedModel:
        """Build the model.

        Raises:
            UnsupportedError: Keras has no counterpart of an operator.
        """
        g = self.graph
        inputs = {}
        for name in g.inputs:
            value = g.values[name]
            inputs[name] = keras.Input(value.shape[1:], dtype=dtype_here(value.dtype), name=self._unique(name))
        for name, x in inputs.items():
            self._add_value(name, x)
        for node in g.nodes:
            outs = self._node(node)
            for name, x in zip(node.outputs, outs if isinstance(outs, (list, tuple)) else [outs], strict=True):
                self._add_value(name, x)
        spec = json.loads(g.in_spec)
        given = list(inputs.values())
        struct = inputs if spec["kwargs"] else given if spec["packed"] else given[0]
        outputs = ResultStructure(g)([self._output(o) for o in g.outputs])
        return self._assemble(struct, outputs)

    def _assemble(self, inputs: Any, outputs: Any) -> QuantizedModel:
        model = QuantizedModel(inputs, outputs, name=self._unique("quantized"))
        self._set_weights(model)
        self.bounds_of(model).attach(model)
        return model

    def bounds_of(self, model: Any) -> KerasScaleBounds:
        """Return the bounds of this model, or of a model with equal layers."""
        return KerasScaleBounds(model, self.scales, self.sharing.limits)

    # ---- values

    def _add_value(self, name: str, x: Any) -> None:
        self._unquantized[name] = self._quantized[name] = x
        if name not in self._rounded:
            return
        owner = self.sharing.owner[name]
        if owner not in self._holders:
            stored, holder = self.plan[owner], self._unique(f"{name}_holder")
            shape = self._channels(name, stored)
            quantizer = self._quantizer(owner, stored, shape, self.graph.shape(name), _clean(name))
            gives_scale = owner in self._bias_factors
            self._holders[owner] = KerasActivationQuantizationHolder(quantizer, gives_scale, name=holder)
            self.scales.append(ScaleSlot(owner, self.plan.layer_of(owner), holder))
        y = self._holders[owner](x)
        self._quantized[name], self._scale_of[owner] = y if owner in self._bias_factors else (y, None)

    def _quantizer(
        self,
        tensor: str,
        stored: Stored,
        shape: tuple[int, ...],
        of: tuple[int | None, ...],
        name: str,
        layout: str = "",
    ) -> KerasQuantizer:
        """Create the quantizer of a tensor of shape `of`, whose scale has `shape`; both are in Keras's layout."""
        t, stored = self.plan.tensors[tensor], self.sharing.start(self.plan, tensor)
        channels = [d for d, size in enumerate(shape) if size > 1]
        in_layout = stored.with_(axis=channels[0] if channels else len(shape) - 1) if shape else stored
        if stored.scale.dim() > 1:  # one scale per block
            scale, zero = (to_keras(layout, p) for p in (stored.scale, stored.zero_point))
            in_layout = stored = stored.with_(scale=scale, zero_point=zero)
        chosen = None if tensor in self.sharing.fixed else self.training.algorithm(t)
        algorithm = (chosen or STE()).for_tensor(in_layout, t.role, of)
        x = self._planned[tensor] if tensor in self._folds else self.graph.weights.get(tensor)
        stored = stored if chosen is None else revived(stored, x)
        if tensor in self.sharing.products:  # its scale is an argument of each call
            stored = stored.with_(scale=torch.ones(()), zero_point=torch.zeros((), dtype=torch.int32))
        # a unique name: Keras on torch does not reset gradients of variables with equal paths
        return KerasQuantizer.from_stored(stored, algorithm, x, shape, name=self._unique(f"{name}_quantizer"))

    def _channels(self, name: str, stored: Stored) -> tuple[int, ...]:
        """Return the shape in which the scale of a value broadcasts against it."""
        if not stored.scale.dim():
            return ()
        shape = [1] * len(self.graph.shape(name))
        layout = self.converted.layouts.get(name)
        axis = (stored.axis or 0) % len(shape)
        shape[layout.index(axis) if layout else axis] = len(stored.scale)
        return tuple(shape)

    def _read(self, name: str, node: Node) -> Any:
        return (self._unquantized if (name, node.name) in self.plan.float_edges else self._quantized)[name]

    def _output(self, name: str) -> Any:
        if name in self.graph.weights:
            hint = "leave it out of the outputs"
            raise UnsupportedError(f"The output '{name}' of the model is a constant", hint=hint)
        if self._quantized[name] is not self._unquantized.get(name) or name not in self.graph.inputs:
            return self._quantized[name]
        return keras.layers.Identity(name=self._unique(f"{name}_output"))(self._quantized[name])

    # ---- nodes

    def _node(self, node: Node) -> Any:
        if node.op == OPAQUE:
            return self._opaque(node)
        data = [self._read(i, node) for i in node.inputs if i is not None and i not in self.graph.weights]
        if len(data) < sum(i is not None for i in node.inputs):
            return self._call_layer(node, data)
        chosen = layer_of(node, self.graph)
        layer = chosen[0](**chosen[1], name=self._unique(node.name)) if chosen else self._canonical(node)
        return layer(data if len(data) > 1 else data[0])

    def _canonical(self, node: Node) -> Any:
        if node.op not in LOWERINGS or LOWERINGS[node.op].kernel is None:
            hint = "export or verify the result, which needs no Keras model"
            raise UnsupportedError(f"{node.op} '{node.display_name}' has no Keras form", hint=hint)
        slots: list[Any] = []
        for i in node.inputs:
            w = self.graph.weights.get(i or "")
            kind = [] if w is None else [str(w.dtype).removeprefix("torch."), i in self.graph.trainable, *w.shape]
            slots.append("-" if i is None else "x" if w is None else kind)
        return self._operation(node.op, _jsonable(node.attrs), slots, node.name)

    def _operation(self, op: str, settings: dict[str, Any], slots: Sequence[Any], name: str) -> Any:
        """Return a function of data that computes an operator."""
        return CanonicalOperation(op, settings, slots, name=self._unique(name))

    def _call_layer(self, node: Node, data: list[Any]) -> Any:
        """Call the layer of a node with weights; all nodes with its weights share the layer."""
        key = self._key(node)
        if key not in self._layers:
            self._layers[key] = self._layer_with_weights(node, self._biases[key])
        bias, extra = self._bias(node), {}
        if use := self._biases[key].index(bias):
            extra["use"] = use
        if bias in self.sharing.products:
            extra["input_scale"] = self._scale_of[self.sharing.owner[self.sharing.products[bias][0]]]
        if _kind(node) == "conv" and not padding_word(node, self.graph):
            zeros = {"padding": [(0, 0), *node.attrs["padding"], (0, 0)], "mode": "constant", "value": 0.0}
            data = [self._operation("Pad", zeros, ["x"], f"{node.name}_padding")(data[0])]
        y = self._layers[key](data if len(data) > 1 else data[0], **extra)
        if getattr(self._layers[key], "gives_scale", ""):
            y, self._scale_of[node.weight] = y
        return y

    def _layer_with_weights(self, node: Node, biases: list[str | None]) -> Any:
        """Create the layer of a node with weights, in a wrapper if any is rounded; enter the slots of its numbers."""
        inner, variables, layout = self._float_layer(node)
        groups = node.attrs.get("groups", 1)
        quantizers, follows = {}, ""
        for variable, weight in variables.items():
            own_layout = {"kernel": layout, "alpha": SLOPES}.get(variable, "")
            slot = WeightSlot(inner.name, variable, layout=own_layout, groups=groups)
            self.weight_slots.setdefault(weight, []).append(slot)
            if weight not in self.sharing.rounded or (weight, node.name) in self.plan.float_edges:
                continue
            if weight in self.sharing.products:
                follows = next(v for v, w in variables.items() if w == self.sharing.products[weight][1])
            quantizers[variable] = self._weight_quantizer(weight, slot)
        for use, bias in enumerate(biases[1:], 1):
            self.weight_slots.setdefault(bias or "", []).append(WeightSlot(inner.name, "bias", use))
        if node.operand("w") in self._folds:
            return self._with_norm(node, inner, layout, quantizers, follows, len(biases))
        if not quantizers and len(biases) == 1:
            return inner
        moved = next((v for v, w in variables.items() if w in self._bias_factors and v in quantizers), "")
        return KerasQuantizationWrapper(inner, quantizers, follows, len(biases), moved, name=inner.name)

    def _float_layer(self, node: Node) -> tuple[Any, dict[str, str], str]:
        """Create the layer of a node without quantizers; return it, variable -> weight, and the kernel's layout."""
        chosen = layer_of(node, self.graph)
        if chosen is None:
            weights = {f"w{k}": i for k, i in enumerate(node.inputs) if i is not None and i in self.graph.weights}
            return self._canonical(node), weights, ""
        cls, config, variables = chosen
        own = _restorable(node) if node.layer_type == cls.__name__ else {}  # so that constraints stay
        layout = DEPTHWISE if cls is keras.layers.DepthwiseConv2D else _kind(node)
        return cls.from_config({**own, **config, "name": self._unique(node.name)}), variables, layout

    def _weight_quantizer(self, weight: str, slot: WeightSlot) -> Any:
        """Create the quantizer of a weight; enter the slot of its scale unless it is a product of other scales."""
        stored, shape = self.plan[weight], tuple[int, ...]()
        value = to_keras(slot.layout, self.graph.weights[weight].detach(), slot.groups)
        if weight not in self.sharing.products:
            if stored.scale.dim() > 1:
                shape = tuple(to_keras(slot.layout, stored.scale, slot.groups).shape)
            elif stored.scale.dim():
                shape = self._broadcast(weight, stored.axis or 0, len(stored.scale), slot.layout, slot.groups)
            self.scales.append(ScaleSlot(weight, self.plan.layer_of(weight), slot.layer, slot.variable))
        return self._quantizer(weight, stored, shape, tuple(value.shape), f"{slot.layer}_{slot.variable}", slot.layout)

    def _with_norm(
        self, node: Node, inner: Any, layout: str, quantizers: dict[str, Any], follows: str, uses: int
    ) -> KerasBatchNormWrapper:
        """Create the wrapper of a layer whose batch norm trains."""
        fold, axis, groups = self._folds[node.weight], node.facts.weight_axis, node.attrs.get("groups", 1)
        factor = self._broadcast(node.weight, axis, len(self.graph.weights[fold.mean]), layout, groups)
        names = dict(zip(NORM_VARIABLES, (fold.gamma, fold.beta, fold.mean, fold.var), strict=True))
        for variable, name in names.items():
            if name is not None:
                if name in self.weight_slots:
                    raise UnsupportedError(f"'{name}' belongs to several layers", hint="train with bn_fold=0")
                self.weight_slots[name] = [WeightSlot(inner.name, variable)]
        trains = [v for v, exists in (("gamma", fold.gamma), ("beta", fold.beta), ("bias", fold.biased)) if exists]
        settings: dict[str, Any] = {
            "bn_fold": self.training.bn_fold,
            "epsilon": fold.eps,
            "bn_momentum": self.training.bn_momentum,
        }
        wrapped = inner, quantizers, follows, uses
        return KerasBatchNormWrapper(*wrapped, **settings, trains=trains, factor=factor, name=inner.name)

    def _opaque(self, node: Node) -> Any:
        if not node.attrs["target"].startswith(PREFIX):
            raise UnsupportedError(f"'{node.called}' of '{node.display_name}' has no Keras form")
        variables, args, kwargs = node.attrs["args"]
        operation = new_operation(node.attrs["target"], self._unique(node.name))
        w, names = self.graph.weights, [i for i in node.inputs if i is not None]
        given = [w[i].numpy() if i in w else self._read(i, node) for i in names]
        for k, ref in enumerate(variables):
            self.weight_slots.setdefault(node.inputs[ref.index] or "", []).append(WeightSlot(operation.name, str(k)))
        return keras.tree.flatten(operation(*fill(args, given), **fill(kwargs, given)))

    # ---- the same weights, used again

    def _key(self, node: Node) -> str:
        """Return a key that is equal for nodes that can be calls of one layer.

        Such nodes have equal operators, attributes and weights. Their biases may differ if these are float or have
        scales that follow from the data: one wrapper holds several biases.
        """
        bias = self._bias(node)
        weights = [i for i in node.inputs if i is not None and i in self.graph.weights and i != bias]
        raw = [(i, node.name) in self.plan.float_edges for i in node.inputs]
        how = [weights or node.name, self._bias_key(bias), raw, _jsonable(node.attrs)]
        return json.dumps([node.op, *how], sort_keys=True)

    def _bias_key(self, bias: str | None) -> str | None:
        """Return a key that is equal for biases which one layer may have."""
        if bias in self.sharing.products:
            return "follows"
        return "float" if bias and bias not in self.sharing.rounded else bias

    def _biases_by_layer(self) -> dict[str, list[str | None]]:
        by_layer: dict[str, list[str | None]] = {}
        for n in self.graph.nodes:
            if n.op != OPAQUE and any(i in self.graph.weights for i in n.inputs):
                biases = by_layer.setdefault(self._key(n), [])
                if self._bias(n) not in biases:
                    biases.append(self._bias(n))
        return by_layer

    def _bias(self, node: Node) -> str | None:
        return node.bias if _kind(node) else None

    # ---- numbers

    def _broadcast(self, weight: str, axis: int, count: int, layout: str, groups: int) -> tuple[int, ...]:
        """Return the shape in which `count` numbers along an axis of a weight broadcast against the Keras variable."""
        shape = [1] * self.graph.weights[weight].dim()
        shape[axis] = count
        return tuple(to_keras(layout, torch.zeros(shape), groups).shape)

    def _set_weights(self, model: Any) -> None:
        for weight, weight_slots in self.weight_slots.items():
            for slot in weight_slots:
                variable = slot.variable_in(model)
                value = to_keras(slot.layout, self.graph.weights[weight].detach(), slot.groups)
                variable.assign(value.reshape(tuple(variable.shape)).numpy())

    def _unique(self, name: str) -> str:
        name = unique_name(_clean(name), self._names)
        self._names.add(name)
        return name


def _clean(name: str) -> str:
    return name.replace("/", "_").replace(".", "_")  # Keras reserves "/" for paths, and torch "." in its parameters


def _kind(node: Node) -> str:
    return node.facts.kind


def _jsonable(attrs: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(attrs))


Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModel, rate: float, steps: int, probabilities: bool) -> Step:
    """Return a function that trains one step and returns the loss, as in `frameworks.torch.lower`.

    A step is not skipped if its loss is not finite.
    """
    schedule = keras.optimizers.schedules.CosineDecay(rate, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=not probabilities)
    model.compile(optimizer=keras.optimizers.SGD(schedule, momentum=0.9), loss=loss)

    def step(inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        given = keras.tree.pack_sequence_as(model._inputs_struct, [to_backend(x) for x in inputs])
        return float(model.train_on_batch(given, labels.numpy()))

    return step


def state_arrays(model: Any) -> Iterator[np.ndarray]:
    """Yield everything that training may change."""
    return (np.ascontiguousarray(keras.ops.convert_to_numpy(w)) for w in model.weights)


def read_back(model: Any, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

    Tied tensors stay tied; bias scales follow from their input and weight scales.

    Args:
        model: result of `lower(graph, plan)`, trained since, or loaded from a file.
        graph, plan: the graph and plan that the model was made from; they are not changed.

    Raises:
        PlanError: `model` was not made from this graph.
        TrainingError: Training left a scale that is not positive and finite.
        UnsupportedError: An algorithm trained something that cannot be deployed.
    """
    if not isinstance(model, QuantizedModel):
        hint = "pass Result.model, or what keras.saving.load_model made of it"
        raise PlanError(f"A {type(model).__name__} is not a quantized model", hint=hint)
    bn_fold = next((x.bn_fold for x in model.layers if isinstance(x, KerasBatchNormWrapper)), 0)
    check_folds(bn_fold)
    builder = Builder(graph, plan, Training(bn_fold=bn_fold))
    made = builder.build()
    if [x.name for x in made.layers] != [x.name for x in model.layers]:
        raise PlanError("The model was made from another graph or plan", got=model.name)
    for s in builder.scales:
        s.quantizer_in(model).check_grid(s.quantizer_in(made).grid)
    builder.bounds_of(model).enforce()  # after a step that no forward pass has followed
    new, trained = graph.copy(), _trained_numbers(model, builder, graph, plan)
    new.weights.update(_weights(model, graph, builder))
    rounded = _weights(model, graph, builder, rounded=True)
    plan = trained_plan(new, plan, trained, lambda name: rounded.get(name, new.weights[name]))
    if bn_fold:
        refresh_checksums(new)
    for name, most in plan.sums:
        stored = plan.stored(name)
        if stored is not None and scale_growth(stored, new.weights[name], most) is not None:
            raise TrainingError(
                f"The quantized values of '{name}' add up to more than {most:g}", where=plan.tensors[name].layer
            )
    return new, plan


def _weights(model: Any, graph: Graph, builder: Builder, rounded: bool = False) -> dict[str, torch.Tensor]:
    """Return the current weights of `graph`, in its layout; constants that the builder rearranged are put back.

    Args:
        rounded: return the tensors that algorithms round in place of the weights.
    """
    quantizers = {(s.layer, s.variable): s.quantizer_in(model) for s in builder.scales} if rounded else {}
    weights = {}
    for name, (slot, *_) in builder.weight_slots.items():
        now, layer = slot.variable_in(model), model.get_layer(slot.layer)
        if isinstance(layer, KerasBatchNormWrapper) and slot.variable in ("kernel", "bias"):
            now = layer.folded()[slot.variable == "bias"]
        if (slot.layer, slot.variable) in quantizers:
            now = quantizers[slot.layer, slot.variable].reals(keras.ops.convert_to_tensor(now))
        now = _to_tensor(now, slot)
        source, form = builder.converted.copies.get(name, (name, None))
        if form is not None:
            now = now.reshape(builder.graph.weights[name].shape).permute([form.index(d) for d in range(len(form))])
        old = graph.weights[source]
        weights[source] = now.reshape(old.shape).to(old.dtype).clone(memory_format=torch.preserve_format)
    return weights


def _trained_numbers(model: Any, builder: Builder, graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return scale, zero point and quantizer of every quantized tensor, with scales in the shapes of the plan."""
    numbers: dict[str, Any] = {}
    for s in builder.scales:
        slot = next(
            (h for h in builder.weight_slots.get(s.tensor, ()) if h.layer == s.layer), WeightSlot(s.layer, s.variable)
        )
        quantizer = s.quantizer_in(model)
        scale, zero_point = (_to_tensor(p, slot) for p in quantizer.numbers())
        numbers[s.tensor] = scale, zero_point, quantizer
        numbers.setdefault(builder.converted.copies.get(s.tensor, (s.tensor, None))[0], numbers[s.tensor])
    for owners in (builder.sharing.owner, share_quantizers(graph, plan).owner):
        numbers |= {name: numbers[o] for name, o in owners.items() if name not in numbers and o in numbers}
    shaped = {
        name: (*(p.reshape(stored.scale.shape) for p in numbers[name][:2]), numbers[name][2])
        for name in set(builder.sharing.owner) - set(builder.sharing.products)
        if (stored := plan.stored(name)) is not None
    }
    for bias, factors in builder.sharing.products.items():
        scales = torch.broadcast_tensors(*(numbers[i][0].reshape(builder.plan[i].scale.shape) for i in factors))
        shaped[bias] = torch.stack(scales).prod(0), None, None
    return shaped


def _to_tensor(variable: Any, slot: WeightSlot) -> torch.Tensor:
    """Return a Keras variable in the canonical layout."""
    value = torch.from_numpy(keras.ops.convert_to_numpy(variable).copy())
    return to_canonical(slot.layout, value) if value.dim() else value
