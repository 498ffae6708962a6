"""Parts that the trainable simulations of all frameworks share: checks, bounds on scales, and numbers for the plan."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from chipfit.errors import TrainingError
from chipfit.graph.extremes import is_finite
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import with_trained_numbers
from chipfit.plan.training import check_deployable, deployed_weight
from chipfit.quantizers.scale_bounds import ScaleBound


def training_error(what: str, layer: str, step: int | None) -> TrainingError:
    """Return the error of a step, or None for the end of training, that leaves invalid numbers in a layer."""
    when = "After training" if step is None else f"In step {step} of training"
    hint = "lower the learning rate, or look at the loss and the data of the step before"
    return TrainingError(f"{when}, {what}", where=layer, hint=hint)


@torch.no_grad()
def check_numbers(
    step: int | None,
    weights: Mapping[str, torch.Tensor],
    scales: Mapping[str, torch.Tensor],
    layer_of: Callable[[str], str],
) -> None:
    """Check that scales are positive and weights are finite.

    Args:
        layer_of: function from the name of a scale to its layer; the name of a weight contains its layer.

    Raises:
        TrainingError: They are not; names layer and step.
    """
    for name, s in scales.items():
        if (wrong := s[~((s > 0) & (s < math.inf))].reshape(-1)).numel():
            raise training_error(f"the scale of '{name}' is {float(wrong[0]):g}", layer_of(name), step)
    for name, w in weights.items():
        if not is_finite(w):
            layer = name.rpartition("/" if "/" in name else ".")[0]
            raise training_error(f"'{name}' holds NaN or infinite numbers", layer, step)


class ScaleBounds:
    """The platform's bounds on the scales of a simulation, which hold while it trains.

    Args:
        quantizers: the quantizers with a scale of their own, by the tensor that owns them.
        limits: the bounds; those over other tensors are left out.
        layers: tensor -> the user's layer.
        weights: tensors that are weights.
    """

    def __init__(
        self,
        quantizers: Mapping[str, Any],
        limits: Sequence[ScaleBound],
        layers: Mapping[str, str],
        weights: Collection[str],
    ) -> None:
        self.quantizers, self.layers, self._weights = quantizers, layers, weights
        self.bounds = [x for x in limits if all(t in quantizers for t, _ in x.terms)]
        self.pot = {t for t, q in quantizers.items() if q.grid.pot}

    def moves(self) -> list[str]:
        """Return the tensors whose scales train, in the order in which they move: scales of channels, weights first."""
        found = [t for t, q in self.quantizers.items() if q.trainable_parameters()]
        return sorted(found, key=lambda t: (not len(self.quantizers[t].scale.shape), t not in self._weights))

    def unsatisfied(self, bound: ScaleBound, step: int | None) -> TrainingError:
        """Return the error for a bound that remains violated; it names the layer of a scale that trains."""
        moves = self.moves()
        layer = next((self.layers[t] for t, _ in bound.terms if t in moves), "") or bound.terms[0][0]
        return training_error(f"the scales that train cannot satisfy the platform's rule {bound}", layer, step)


def trained_plan(
    graph: Graph,
    plan: Plan,
    trained: Mapping[str, tuple[torch.Tensor, torch.Tensor | None, Any]],
    rounded: Callable[[str], torch.Tensor],
) -> Plan:
    """Return the plan with trained numbers; a weight that its algorithm transforms becomes the transformed one.

    Args:
        graph: graph with the trained weights, some of which are replaced.
        trained: scale, zero point and quantizer by tensor; the last two are None for a bias whose scale follows.
        rounded: function from the name of a weight to the tensor that its algorithm rounds.

    Raises:
        UnsupportedError: An algorithm trained something that cannot be deployed.
    """
    tensors = dict(plan.tensors)
    for name, t in plan.tensors.items():
        if t.stored is None or name not in trained:
            continue
        scale, zero_point, quantizer = trained[name]
        if quantizer is None:
            tensors[name] = with_trained_numbers(t, scale)
            continue
        check_deployable(quantizer.algorithm, t)
        tensors[name] = with_trained_numbers(t, scale, zero_point, quantizer.trained_grid())
        if t.role == "weight":
            graph.weights[name] = deployed_weight(graph.weights[name], rounded(name), t, plan)
    return replace(plan, tensors=tensors)
