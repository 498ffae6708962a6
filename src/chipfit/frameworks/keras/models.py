"""The Keras models that chipfit makes: the trainable simulation, with its bounds on scales, and the device."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras import ops

from chipfit.engine.trees import ResultStructure, flatten_call
from chipfit.errors import PlanError, TrainingError
from chipfit.frameworks.keras.backend import KerasOps, forward, to_backend, to_torch
from chipfit.frameworks.keras.layers import (
    NORM_VARIABLES,
    KerasBatchNormWrapper,
    KerasQuantizationWrapper,
    KerasQuantizer,
)
from chipfit.frameworks.training import ScaleBounds, check_numbers
from chipfit.graph.ir import Graph
from chipfit.plan.json_codec import FromJson, record_to_json
from chipfit.quantizers.scale_bounds import SLACK, ScaleBound, clip_to_bounds
from chipfit.validation import check_value


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The place of a weight of the graph in the model."""

    layer: str
    variable: str  #: its name, or its index in an opaque layer
    use: int = 0  #: index of the bias of a wrapper
    layout: str = ""  #: layout in Keras, see `kernel_layout`; "" if unchanged
    groups: int = 1  #: groups of a depthwise convolution

    def variable_in(self, model: Any) -> Any:
        """Return the Keras variable."""
        layer = model.get_layer(self.layer)
        if isinstance(layer, KerasQuantizationWrapper):
            if self.use:
                return layer.bias(self.use)
            if self.variable in NORM_VARIABLES and isinstance(layer, KerasBatchNormWrapper):
                return getattr(layer, self.variable)
            layer = layer.layer
        if self.variable.isdigit():
            return [*layer.trainable_variables, *layer.non_trainable_variables][int(self.variable)]
        return next(v for v in layer.variables if v.name == self.variable)


@dataclass(frozen=True, slots=True)
class ScaleSlot:
    """The place of the scale of a planned tensor in the model."""

    tensor: str
    user_layer: str
    layer: str
    variable: str = ""  #: variable of a wrapper; "" in a holder

    def quantizer_in(self, model: Any) -> KerasQuantizer:
        """Return the quantizer that has the scale."""
        layer = model.get_layer(self.layer)
        return layer.weights_quantizers[self.variable] if self.variable else layer.activation_holder_quantizer


class KerasScaleBounds(ScaleBounds):
    """The bounds of one model. As the constraint of one of its variables, they are enforced in each optimizer step.

    Args:
        model: the model whose layers have the quantizers.
        scales: the places of the scales.
        limits: bounds of the platform, over the tensors that own quantizers.
    """

    def __init__(self, model: Any, scales: Sequence[ScaleSlot], limits: Sequence[ScaleBound]) -> None:
        self.scales = tuple(scales)
        layers = {s.tensor: s.user_layer for s in scales}
        quantizers = {s.tensor: s.quantizer_in(model) for s in scales}
        super().__init__(quantizers, limits, layers, {s.tensor for s in scales if s.variable})
        self._bounded = {t: quantizers[t] for x in self.bounds for t, _ in x.terms}
        self._trainable = [t for t in self.moves() if t in self._bounded]
        self._constants: dict[str, dict[str, np.ndarray]] = {}
        self._last = None
        for t in self._trainable[-1:]:
            self._last = getattr(quantizers[t], next(iter(quantizers[t].trainable_parameters())))

    def to_config(self) -> dict[str, Any]:
        """Return the JSON from which `from_config` creates equal bounds."""
        return {"scales": [[*astuple(s)] for s in self.scales], "limits": [record_to_json(x) for x in self.bounds]}

    @classmethod
    def from_config(cls, model: Any, config: Any) -> KerasScaleBounds:
        """Create the bounds of a model with the layers of the original one.

        Raises:
            PlanError: A bound is malformed.
        """
        limits = check_value(list[FromJson[ScaleBound]], config["limits"], PlanError, "the bounds", json=True)
        return cls(model, [ScaleSlot(*s) for s in config["scales"]], limits)

    def freeze(self) -> None:
        """Copy numbers that do not train: JAX removes these variables while it compiles a step."""
        self._constants = {
            t: {n: ops.convert_to_numpy(v) for n in q.input_names if not (v := getattr(q, n)).trainable}
            for t, q in self._bounded.items()
        }

    def attach(self, model: Any) -> None:
        """Attach the bounds to a model, whose optimizers call them after changing all variables."""
        model.bounds = self
        if self._last is not None:
            self._last.constraint = self

    def __call__(self, _: Any) -> Any:
        self.project()
        return ops.convert_to_tensor(self._last)

    def project(self) -> None:
        """Project scales into the platform's bounds."""
        log = {t: self._log(t) for t in self._bounded}
        new = clip_to_bounds(KerasOps, self.bounds, log, self._trainable, self.pot)
        for t in self._trainable:
            self.quantizers[t].rescale(ops.where(new[t] == log[t], 1.0, ops.power(2.0, new[t] - log[t])))

    def _log(self, t: str) -> Any:
        """Return log2 of the current scale, [] or [C]."""
        q = self.quantizers[t]
        p = {n: self._constants.get(t, {}).get(n, getattr(q, n)) for n in q.input_names}
        s = q.algorithm.numbers(KerasOps, {n: ops.convert_to_tensor(v) for n, v in p.items()}, q.grid)[0]
        return ops.log2(ops.reshape(s, (-1,) if math.prod(q.shape) > 1 else ()))

    def enforce(self) -> None:
        """Check all scales, and project them into the bounds, outside of a step.

        Raises:
            TrainingError: A scale is not positive and finite, or the scales that train cannot satisfy a bound.
        """
        self.check(())
        self.freeze()
        self.project()
        log = {t: ops.convert_to_numpy(self._log(t)).astype("float64") for t in self._bounded}
        for x in self.bounds:
            total: Any = sum(e * log[t] for t, e in x.terms)
            if np.any(total < x.low - 2 * SLACK) or np.any(total > x.high + 2 * SLACK):
                raise self.unsatisfied(x, None)

    def check(self, weights: Any, step: int | None = None) -> None:
        """Check that scales are positive and finite, and weights finite.

        Raises:
            TrainingError: They are not; names layer and step.
        """
        scales = [ops.reshape(q.numbers()[0], (-1,)) for q in self.quantizers.values()]
        largest = [ops.reshape(ops.max(ops.abs(v)), (1,)) for v in weights]
        now = ops.convert_to_numpy(ops.concatenate([*scales, *largest])) if scales or largest else np.ones(1)
        if bool(np.all(np.isfinite(now))) and bool(np.all(now[: len(now) - len(largest)] > 0)):
            return
        named = {v.path: to_torch(ops.convert_to_tensor(v)) for v in weights}
        check_numbers(step, named, dict(zip(self.layers, map(to_torch, scales), strict=True)), self.layers.__getitem__)


@keras.saving.register_keras_serializable(package="chipfit")
class QuantizedModel(keras.Model):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    It is a Functional model with the inputs and outputs of the original one. Layers keep their names. Layers with
    rounded weights are in a `KerasQuantizationWrapper`; stored results pass through a
    `KerasActivationQuantizationHolder`.
    """

    #: conditions on each step; None in a clone of `keras.models.clone_model`, which cannot train
    bounds: KerasScaleBounds | None = None
    #: JSON data of the caller that are saved with the model, or a function that returns them
    origin: dict[str, Any] | Callable[[], dict[str, Any]] | None = None
    train_function: Any  #: set by Keras
    _stepping = False  #: a step of Keras's own loop runs, which is checked after it
    _steps = 0  #: steps of other loops

    def make_train_function(self, force: bool = False) -> Any:
        """Make the function of a step, as every Keras model does, with a check of the numbers that it leaves.

        The function raises a TrainingError if a scale or weight is not finite; the error names layer and step.

        Raises:
            PlanError: The model has no bounds.
        """
        before = self.train_function
        super().make_train_function(force)
        if (step := self.train_function) is before:
            return step
        bounds = self._require_bounds()
        bounds.freeze()

        def checked(*args: Any) -> Any:
            self._stepping = True
            try:
                out = step(*args)
            finally:
                self._stepping = False
            try:
                with keras.StatelessScope(state_mapping=self._values_after(out)):
                    bounds.check(self.trainable_variables, int(self.optimizer.iterations))
            except TrainingError:
                self._keep_values(out)
                raise
            return out

        self.train_function = checked
        return checked

    def _values_after(self, out: Any) -> list[tuple[Any, Any]]:
        """Return (variable, value) after a step, if the backend has not assigned the values yet (JAX)."""
        if keras.backend.backend() != "jax":
            return []
        kinds = self.trainable_variables, self.non_trainable_variables, self.optimizer.variables
        return [pair for vs, now in zip(kinds, out[1][:3], strict=True) for pair in zip(vs, now, strict=True)]

    def _keep_values(self, out: Any) -> None:
        """Assign the values after a step: JAX has reused the memory of the values before it."""
        if keras.backend.backend() == "jax":
            kinds = "trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"
            self._jax_state, self._jax_state_synced = dict(zip(kinds, out[1], strict=True)), False
            self.jax_state_sync()

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Run the model; in an eager training loop, first check the numbers that the last step left.

        Raises:
            PlanError: The model has no bounds.
            TrainingError: A scale or weight is not finite.
        """
        trains = self.trainable_variables if training and not self._stepping else ()
        if trains and not any(KerasOps.traced(v.value) for v in trains[:1]):
            self._steps += 1
            self._require_bounds().check(trains, self._steps)
        return super().call(inputs, training=training, mask=mask)

    def _require_bounds(self) -> KerasScaleBounds:
        if self.bounds is None:
            hint = "copy.deepcopy(model), or save and load it; clone_model leaves out what layers do not hold"
            raise PlanError("This model does not know the rules that hold while it trains", where=self.name, hint=hint)
        return self.bounds

    def get_config(self) -> dict[str, Any]:
        origin = self.origin() if callable(self.origin) else self.origin
        own = {"bounds": self.bounds.to_config() if self.bounds else None, "origin": origin}
        return {**super().get_config(), **{name: value for name, value in own.items() if value}}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> QuantizedModel:
        inner = {k: v for k, v in config.items() if k not in ("bounds", "origin")}
        model: QuantizedModel = super().from_config(inner, custom_objects)
        model.origin = config.get("origin")
        if "bounds" in config:
            KerasScaleBounds.from_config(model, config["bounds"]).attach(model)
        return model

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights, as every Keras model does.

        Raises:
            PlanError: The checkpoint belongs to another plan.
        """
        try:
            super().load_weights(*args, **kwargs)
        except ValueError as error:  # Keras puts the error of the first layer between empty lines
            if not (why := str(error).partition(":\n\n")[2].partition("\n\n")[0]):
                raise
            raise PlanError(f"This checkpoint belongs to another plan: {why}", where=self.name) from error

    def run_flat(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the model on torch tensors in the order of the graph's inputs; return its outputs in order."""
        return keras.tree.flatten(forward(self, keras.tree.pack_sequence_as(self._inputs_struct, list(inputs))))


class DeviceModel(keras.Model):
    """A model that takes the inputs of the original one and returns the device's results.

    The runtime computes `float_operators` in float, so that their last bit may differ on a device. The model has no
    weights and no gradients; `predict` and `evaluate` run it eagerly.
    """

    def __init__(self, graph: Graph, run_flat: Callable[[Sequence[torch.Tensor]], list[Any]], floats: Sequence[str]):
        super().__init__(name="device")
        self.float_operators = tuple(floats)
        self._graph, self.run_flat, self.built = graph, run_flat, True
        self.compile(run_eagerly=True)

    def __reduce__(self) -> Any:
        return DeviceModel, (self._graph, self.run_flat, self.float_operators)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Run the model on inputs in the structure of the original model's."""
        spec, given = json.loads(self._graph.in_spec), keras.tree.map_structure(to_torch, inputs)
        packed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        flat = flatten_call(spec, () if spec["kwargs"] else packed, given if spec["kwargs"] else {})
        outs = ResultStructure(self._graph)(self.run_flat([x.detach().cpu() for x in flat]))
        return keras.tree.map_structure(to_backend, outs)
