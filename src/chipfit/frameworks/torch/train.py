"""After training: bring weights and scales of a trained simulation back into Graph and Plan."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from chipfit.errors import PlanError, UnsupportedError
from chipfit.frameworks.torch.lower import QuantizedModule
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.graph.folds import refresh_checksums
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import with_trained_numbers
from chipfit.plan.training import check_deployable, check_folds, deployed_weight

Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModule, rate: float, steps: int, probabilities: bool) -> Step:
    """A function that takes one step on flat inputs and labels [N], and returns the loss; none where that is no number.

    Cross-entropy; stochastic gradient descent with momentum 0.9, whose rate falls to 0 along a cosine.

    Args:
        steps: how many there will be.
        probabilities: the model ends with a softmax.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        model.train()
        model.begin()
        out = model.run_flat(inputs)[0]
        loss = torch.nn.functional.cross_entropy(out.clamp_min(1e-12).log() if probabilities else out, labels)
        if math.isfinite(value := loss.item()):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        return value

    return step


def state_arrays(model: torch.nn.Module) -> Iterator[np.ndarray]:
    """Everything that training may change, on the way; what is on no device has no numbers."""
    for t in model.state_dict().values():
        if not t.is_meta:
            yield t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def lowered(model: torch.nn.Module) -> QuantizedModule:
    """The model, where it is a quantized one of PyTorch.

    Raises:
        PlanError: it is none.
    """
    if not isinstance(model, QuantizedModule):
        hint = "unwrap it first, for example `.module` of DistributedDataParallel"
        raise PlanError(f"A {type(model).__name__} is not a quantized model of PyTorch", hint=hint)
    return model


def read_back(model: torch.nn.Module, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

    Tied tensors stay tied; bias scales follow from their input and weight scales.

    Args:
        model: what `lower(graph, plan)` returned, trained or loaded since.
        graph, plan: those that it was made from; neither is changed.

    Raises:
        PlanError: `model` is not a lowered one, or training has driven a scale to zero, below it, or to a number that
            is not finite.
        UnsupportedError: what an algorithm has trained cannot be deployed.
    """
    model = lowered(model)
    shares: list[Any] = [q.share for q in model._quant.children()]
    if (low := min(shares, default=1.0)) < 1:
        what = "What was trained cannot be deployed: it is not rounded all the way yet"
        raise UnsupportedError(what, got=f"a share of {low:g}", hint="`finish()` the schedule, and train on")
    check_folds(model.bn_fold)
    model.settle()  # a step that nobody has computed since
    new = graph.copy()
    copies: dict[int, torch.Tensor] = {}
    for name, old in graph.weights.items():
        now = model.weight(name)
        if id(now) not in copies:
            copies[id(now)] = now.detach().to(device=old.device, dtype=old.dtype, copy=True)
        new.weights[name] = copies[id(now)]
    with torch.no_grad():
        for node in (n for n in graph.nodes if model.bn_fold and n.operand("w") in graph.folds):
            both = zip((node.weight, node.bias or ""), model.folded(node.weight), strict=True)
            new.weights |= {name: t.to(graph.weights[name]) for name, t in both}
    tensors = dict(plan.tensors)
    with torch.no_grad():
        for name, t in plan.tensors.items():
            quantizer = model.quantizer_of(name) if t.quantized else None
            if isinstance(quantizer, FakeQuantizer):
                check_deployable(quantizer.algorithm, t)
                tensors[name] = with_trained_numbers(t, *quantizer.numbers(), quantizer.learned())
                if name in new.weights and t.role == "weight":
                    new.weights[name] = deployed_weight(new.weights[name], quantizer.reals(new.weights[name]), t, plan)
            elif quantizer is not None:
                tensors[name] = with_trained_numbers(t, model.scale(name))
    if model.bn_fold:
        refresh_checksums(new)
    return new, replace(plan, tensors=tensors)
