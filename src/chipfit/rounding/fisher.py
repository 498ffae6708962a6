"""Gradients whose second moment is the Fisher information of a network's outputs.

They are of the loss at labels that are drawn from the network's own outputs: class scores give labels by their softmax,
other outputs are taken for means of normal distributions of their own spread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.engine.run import run
from chipfit.graph.ir import Graph, Node


def gradients(
    graph: Graph, batch: Sequence[Tensor], wanted: Collection[str], besides: Collection[str], random: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values, of `wanted` and `besides`, and the gradients of the sampled loss for those that outputs depend on."""
    kept: dict[str, Tensor] = {}

    def watch(name: str, x: Any) -> Any:
        if name in wanted and isinstance(x, Tensor) and x.is_floating_point():
            x = kept[name] = x.view_as(x) if x.requires_grad else x.detach().clone().requires_grad_()
        return x

    def hook(node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(watch(o, x) for o, x in zip(node.outputs, outputs, strict=False))

    weights = {k: w.detach() for k, w in graph.weights.items()}
    with torch.enable_grad():
        inputs = [watch(name, x.detach()) for name, x in zip(graph.inputs, batch, strict=True)]
        env = run(graph, inputs, hook=hook, weights=weights, keep=set(besides))
        floats = [env[o] for o in dict.fromkeys(graph.outputs) if graph.is_float(o)]
        loss = sum((_sampled(y, random) for y in floats if y.requires_grad), torch.zeros(()))
        found = torch.autograd.grad(loss, list(kept.values()), allow_unused=True) if loss.requires_grad else ()
    values = {k: x.detach() for k, x in {**env, **kept}.items() if isinstance(x, Tensor)}
    return values, {k: g.detach() for k, g in zip(kept, found, strict=False) if g is not None}


def _sampled(y: Tensor, random: torch.Generator) -> Tensor:
    """A loss whose gradient has the Fisher information of an output as its second moment."""
    if y.dim() == 2 and y.shape[1] > 1:
        labels = torch.multinomial(y.detach().softmax(1), 1, generator=random)[:, 0]
        return F.cross_entropy(y, labels, reduction="sum")
    noise = torch.randn(y.shape, generator=random) / y.detach().std().clamp_min(1e-12)
    return (y * noise).sum()
