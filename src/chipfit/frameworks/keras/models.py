"""The Keras models that chipfit makes: the trainable simulation of the chip, and the device for evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from chipfit.engine.trees import Results, flatten_call
from chipfit.errors import PlanError, TrainingError
from chipfit.frameworks.keras.backend import KerasOps, forward, to_backend, to_torch
from chipfit.frameworks.keras.bounds import ScaleBounds
from chipfit.graph.ir import Graph


@keras.saving.register_keras_serializable(package="chipfit")
class QuantizedModel(keras.Model):
    """A model as the chip computes it, in float: every stored tensor is rounded to its grid.

    A Functional model with the inputs and outputs of the original one. Layers keep their names; those with rounded
    weights are in a `KerasQuantizationWrapper`, stored results pass through a `KerasActivationQuantizationHolder`.
    """

    #: what holds in each step; None in what `keras.models.clone_model` makes, which cannot train
    bounds: ScaleBounds | None = None
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

    def _held(self) -> ScaleBounds:
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


class DeviceModel(keras.Model):
    """Takes and returns what the original model does; what it returns is what the device would.

    Where the runtime itself computes in float, at the operators in `float_operators`, the last bit is the runtime's.
    It has no weights and gives no gradients; `predict` and `evaluate` run it eagerly.
    """

    def __init__(self, graph: Graph, run_flat: Callable[[Sequence[torch.Tensor]], list[Any]], floats: Sequence[str]):
        super().__init__(name="device")
        self.float_operators = tuple(floats)
        self._graph, self.run_flat, self.built = graph, run_flat, True
        self.compile(run_eagerly=True)

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Same inputs and result as the original model."""
        spec, given = json.loads(self._graph.in_spec), keras.tree.map_structure(to_torch, inputs)
        packed = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        flat = flatten_call(spec, () if spec["kwargs"] else packed, given if spec["kwargs"] else {})
        outs = Results(self._graph)(self.run_flat([x.detach().cpu() for x in flat]))
        return keras.tree.map_structure(to_backend, outs)
