"""After training: bring weights and scales of a trained Keras simulation back into Graph and Plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import torch

from chipfit.errors import PlanError
from chipfit.frameworks.keras.homes import Home
from chipfit.frameworks.keras.lower import Builder, QuantizedModel
from chipfit.frameworks.keras.weights import to_canonical
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import retrained, rounding


def numbers(model: Any) -> Iterator[np.ndarray]:
    """Everything that training may change."""
    return (np.ascontiguousarray(keras.ops.convert_to_numpy(w)) for w in model.weights)


def read_back(model: Any, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

    Tied tensors stay tied; bias scales follow from their input and weight scales.

    Args:
        model: what `lower(graph, plan)` returned, trained since, or loaded from a file that it was saved to.
        graph, plan: those that it was made from; neither is changed.

    Raises:
        PlanError: `model` is not a lowered one of this graph, or training has driven a scale to zero, below it, or to a
            number that is not finite.
    """
    if not isinstance(model, QuantizedModel):
        raise PlanError(
            f"A {type(model).__name__} is not a quantized model",
            hint="pass Result.model, or what keras.saving.load_model made of it",
        )
    builder = Builder(graph, plan)
    if [x.name for x in builder.build().layers] != [x.name for x in model.layers]:
        raise PlanError("The model was made from another graph or plan", got=model.name)
    new, scales = graph.copy(), _scales(model, builder)
    new.weights.update(_weights(model, graph, builder))
    products, tensors = builder.rounding.products, dict(plan.tensors)
    scales |= {name: scales[o] for name, o in rounding(graph, plan).owner.items() if name not in scales and o in scales}
    for name, t in plan.tensors.items():
        if t.quantized and name in builder.rounding.owner:
            factors = [scales[i].reshape(builder.plan[i].scale.shape) for i in products.get(name, (name,))]
            tensors[name] = retrained(t, torch.stack(torch.broadcast_tensors(*factors)).prod(0))
    return new, replace(plan, tensors=tensors)


def _weights(model: Any, graph: Graph, builder: Builder) -> dict[str, torch.Tensor]:
    """The weights of `graph` as they are now, in its layout; constants that the builder rearranged are put back."""
    found = {}
    for name, (home, *_) in builder.homes.items():
        now = _number(home.variable_in(model), home)
        source, form = builder.relaid.copies.get(name, (name, None))
        if form is not None:
            now = now.reshape(builder.graph.weights[name].shape).permute([form.index(d) for d in range(len(form))])
        old = graph.weights[source]
        found[source] = now.reshape(old.shape).to(old.dtype).clone(memory_format=torch.preserve_format)
    return found


def _scales(model: Any, builder: Builder) -> dict[str, torch.Tensor]:
    """The scale of every quantized tensor that has one of its own or shares that of another."""
    found: dict[str, torch.Tensor] = {}
    for s in builder.scales:
        home = next((h for h in builder.homes.get(s.tensor, ()) if h.layer == s.layer), Home(s.layer, s.variable))
        found[s.tensor] = _number(s.quantizer_in(model).scale, home)
        found.setdefault(builder.relaid.copies.get(s.tensor, (s.tensor, None))[0], found[s.tensor])
    return found | {name: found[owner] for name, owner in builder.rounding.owner.items() if owner in found}


def _number(variable: Any, home: Home) -> torch.Tensor:
    """A Keras variable in the canonical layout."""
    value = torch.from_numpy(keras.ops.convert_to_numpy(variable).copy())
    return to_canonical(home.layout, value) if value.dim() else value
