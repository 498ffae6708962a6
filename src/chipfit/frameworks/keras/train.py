"""Training of a Keras simulation: steps of a classifier, and Graph and Plan with the trained numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import torch

from chipfit.errors import PlanError, TrainingError
from chipfit.frameworks.keras.backend import to_backend
from chipfit.frameworks.keras.kernel_layout import to_canonical
from chipfit.frameworks.keras.layers import KerasBatchNormWrapper, KerasQuantizer
from chipfit.frameworks.keras.lower import Builder
from chipfit.frameworks.keras.models import QuantizedModel
from chipfit.frameworks.keras.weight_slots import WeightSlot
from chipfit.frameworks.training import trained_tensor_plan
from chipfit.graph.folds import refresh_checksums
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import share_quantizers, with_trained_numbers
from chipfit.plan.training import Training, check_folds, deployed_weight
from chipfit.quantizers.scale_bounds import scale_growth

Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModel, rate: float, steps: int, probabilities: bool) -> Step:
    """Return a function that trains one step and returns the loss, as in `frameworks.torch.train`.

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
    new, trained = graph.copy(), _trained_numbers(model, builder)
    new.weights.update(_weights(model, graph, builder))
    if bn_fold:
        refresh_checksums(new)
    products, tensors = builder.sharing.products, dict(plan.tensors)
    owners = share_quantizers(graph, plan).owner
    trained |= {name: trained[o] for name, o in owners.items() if name not in trained and o in trained}
    for name, t in plan.tensors.items():
        if name in products:
            factors = [trained[i][0].reshape(builder.plan[i].scale.shape) for i in products[name]]
            tensors[name] = with_trained_numbers(t, torch.stack(torch.broadcast_tensors(*factors)).prod(0))
        elif t.stored is not None and name in builder.sharing.owner:
            scale, zero_point, quantizer = trained[name]
            scale, zero_point = (p.reshape(t.stored.scale.shape) for p in (scale, zero_point))
            tensors[name] = trained_tensor_plan(t, scale, zero_point, quantizer)
            if t.role == "weight":
                new.weights[name] = deployed_weight(graph.weights[name], new.weights[name], t, plan)
    for name, most in plan.sums:
        stored = tensors[name].stored
        if stored is not None and scale_growth(stored, new.weights[name], most) is not None:
            raise TrainingError(
                f"The quantized values of '{name}' add up to more than {most:g}", where=plan.tensors[name].layer
            )
    return new, replace(plan, tensors=tensors)


def _weights(model: Any, graph: Graph, builder: Builder) -> dict[str, torch.Tensor]:
    """Return the current weights of `graph`, in its layout; constants that the builder rearranged are put back.

    Where an algorithm rounds another tensor in place of a weight, the weight becomes that tensor.
    """
    quantizers = {(s.layer, s.variable): s.quantizer_in(model) for s in builder.scales}
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


def _trained_numbers(model: Any, builder: Builder) -> dict[str, tuple[torch.Tensor, torch.Tensor, KerasQuantizer]]:
    """Return scale, zero point and quantizer of every quantized tensor with a scale of its own or of a tied tensor."""
    numbers: dict[str, tuple[torch.Tensor, torch.Tensor, KerasQuantizer]] = {}
    for s in builder.scales:
        slot = next(
            (h for h in builder.weight_slots.get(s.tensor, ()) if h.layer == s.layer), WeightSlot(s.layer, s.variable)
        )
        quantizer = s.quantizer_in(model)
        scale, zero_point = (_to_tensor(p, slot) for p in quantizer.numbers())
        numbers[s.tensor] = scale, zero_point, quantizer
        numbers.setdefault(builder.converted.copies.get(s.tensor, (s.tensor, None))[0], numbers[s.tensor])
    return numbers | {name: numbers[owner] for name, owner in builder.sharing.owner.items() if owner in numbers}


def _to_tensor(variable: Any, slot: WeightSlot) -> torch.Tensor:
    """Return a Keras variable in the canonical layout."""
    value = torch.from_numpy(keras.ops.convert_to_numpy(variable).copy())
    return to_canonical(slot.layout, value) if value.dim() else value
