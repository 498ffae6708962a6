"""The Keras models that chipfit makes: the trainable simulation of the chip, and the device for evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from chipfit.engine.trees import ResultStructure, flatten_call
from chipfit.errors import PlanError, TrainingError
from chipfit.frameworks.keras.backend import KerasOps, forward, to_backend, to_torch
from chipfit.frameworks.keras.bounds import ScaleBounds
from chipfit.graph.ir import Graph


@keras.saving.register_keras_serializable(package="chipfit")
class QuantizedModel(keras.Model):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    It is a Functional model with the inputs and outputs of the original one. Layers keep their names. Layers with
    rounded weights are in a `KerasQuantizationWrapper`; stored results pass through a
    `KerasActivationQuantizationHolder`.
    """

    #: conditions on each step; None in a clone of `keras.models.clone_model`, which cannot train
    bounds: ScaleBounds | None = None
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

    def _require_bounds(self) -> ScaleBounds:
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
            ScaleBounds.from_config(model, config["bounds"]).attach(model)
        return model

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights, as every Keras model does.

        Raises:
            PlanError: The checkpoint is of another plan.
        """
        try:
            super().load_weights(*args, **kwargs)
        except ValueError as error:  # Keras puts the error of the first layer between empty lines
            if not (why := str(error).partition(":\n\n")[2].partition("\n\n")[0]):
                raise
            raise PlanError(f"This checkpoint is of another plan: {why}", where=self.name) from error

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

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Run the model on inputs in the structure of the original model's."""
        spec, given = json.loads(self._graph.in_spec), keras.tree.map_structure(to_torch, inputs)
        packed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        flat = flatten_call(spec, () if spec["kwargs"] else packed, given if spec["kwargs"] else {})
        outs = ResultStructure(self._graph)(self.run_flat([x.detach().cpu() for x in flat]))
        return keras.tree.map_structure(to_backend, outs)
