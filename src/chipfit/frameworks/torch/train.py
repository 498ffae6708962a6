"""Training of a simulation: steps of a classifier, and Graph and Plan with the trained numbers."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from chipfit.errors import PlanError, UnsupportedError
from chipfit.frameworks.torch.lower import QuantizedModule
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.frameworks.training import trained_tensor_plan
from chipfit.graph.folds import refresh_checksums
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.plan.sharing import with_trained_numbers
from chipfit.plan.training import check_folds, deployed_weight

Step = Callable[[Sequence[torch.Tensor], torch.Tensor], float]


def stepper(model: QuantizedModule, rate: float, steps: int, probabilities: bool) -> Step:
    """Return a function that trains one step on flat inputs and labels [N], and returns the loss.

    The loss is cross-entropy; the optimizer is gradient descent with momentum 0.9 and a learning rate that falls to 0
    along a cosine. A step whose loss is not finite is skipped.

    Args:
        steps: number of steps of the whole training.
        probabilities: whether the model ends with a softmax.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def step(inputs: Sequence[torch.Tensor], labels: torch.Tensor) -> float:
        model.train()
        model.begin_step()
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
    """Yield the bytes of everything that training may change; tensors on the meta device have none."""
    for t in model.state_dict().values():
        if not t.is_meta:
            yield t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def as_quantized_module(model: torch.nn.Module) -> QuantizedModule:
    """Return the model with its type.

    Raises:
        PlanError: The model is not a quantized model of PyTorch.
    """
    if not isinstance(model, QuantizedModule):
        hint = "unwrap it first, for example `.module` of DistributedDataParallel"
        raise PlanError(f"A {type(model).__name__} is not a quantized model of PyTorch", hint=hint)
    return model


def read_back(model: torch.nn.Module, graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """Return Graph and Plan with the numbers that `model` holds now, ready to be exported, verified or saved.

    Tied tensors stay tied; bias scales follow from their input and weight scales.

    Args:
        model: result of `lower(graph, plan)`, trained or loaded since.
        graph, plan: the graph and plan that the model was made from; they are not changed.

    Raises:
        PlanError: `model` was not made by `lower`, or training left a scale that is not positive and finite.
        UnsupportedError: An algorithm trained something that cannot be deployed.
    """
    model = as_quantized_module(model)
    if (share := min((q.share for q in model.quantizers), default=1.0)) < 1:
        what = "The trained model cannot be deployed: it is not fully rounded yet"
        raise UnsupportedError(what, got=f"a share of {share:g}", hint="`finish()` the schedule, and train on")
    check_folds(model.bn_fold)
    model.enforce_bounds()  # after an optimizer step that no forward pass has followed
    new = graph.copy()
    copies: dict[int, torch.Tensor] = {}
    for name, old in graph.weights.items():
        now = model.weight(name)
        if id(now) not in copies:
            copies[id(now)] = now.detach().to(device=old.device, dtype=old.dtype, copy=True)
        new.weights[name] = copies[id(now)]
    with torch.no_grad():
        for node in (n for n in graph.nodes if model.bn_fold and n.operand("w") in graph.folds):
            folded = zip((node.weight, node.bias or ""), model.folded(node.weight), strict=True)
            new.weights |= {name: t.to(graph.weights[name]) for name, t in folded}
    tensors = dict(plan.tensors)
    with torch.no_grad():
        for name, t in plan.tensors.items():
            quantizer = model.quantizer_of(name) if t.quantized else None
            if isinstance(quantizer, FakeQuantizer):
                tensors[name] = trained_tensor_plan(t, *quantizer.numbers(), quantizer)
                if name in new.weights and t.role == "weight":
                    new.weights[name] = deployed_weight(new.weights[name], quantizer.reals(new.weights[name]), t, plan)
            elif quantizer is not None:
                tensors[name] = with_trained_numbers(t, model.scale(name))
    if model.bn_fold:
        refresh_checksums(new)
    return new, replace(plan, tensors=tensors)
