"""After training: bring weights and scales of a trained simulation back into Graph and Plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from chipfit.errors import PlanError
from chipfit.frameworks.torch.lower import QuantizedModule
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import retrained


def numbers(model: torch.nn.Module) -> Iterator[np.ndarray]:
    """Everything that training may change, on the way; what is on no device has no numbers."""
    for t in model.state_dict().values():
        if not t.is_meta:
            yield t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def read_back(model: torch.nn.Module, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

    Tied tensors stay tied; bias scales follow from their input and weight scales.

    Args:
        model: what `lower(graph, plan)` returned, trained or loaded since.
        graph, plan: those that it was made from; neither is changed.

    Raises:
        PlanError: `model` is not a lowered one, or training has driven a scale to zero, below it, or to a number that
            is not finite.
    """
    if not isinstance(model, QuantizedModule):
        raise PlanError(
            f"A {type(model).__name__} is not a quantized model",
            hint="unwrap it first, for example `.module` of DistributedDataParallel",
        )
    new = graph.copy()
    copies: dict[int, torch.Tensor] = {}
    for name, old in graph.weights.items():
        now = model.weight(name)
        if id(now) not in copies:
            copies[id(now)] = now.detach().to(device=old.device, dtype=old.dtype, copy=True)
        new.weights[name] = copies[id(now)]
    tensors = dict(plan.tensors)
    for name, t in plan.tensors.items():
        if t.quantized:
            tensors[name] = retrained(t, model.scale(name))
    return new, replace(plan, tensors=tensors)
