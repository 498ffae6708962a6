"""How far a quantized network is from the float one on given images, as one number to compare plans by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from chipfit.engine.run import run
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan


def rounded_run(graph: Graph, plan: Plan, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """The outputs of a network whose stored tensors are rounded, by name."""

    def stored(name: str, x: Any) -> Any:
        return plan[name].round(x) if plan.quantized(name) else x

    def hook(node: Node, outs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(stored(o, x) for o, x in zip(node.outputs, outs, strict=False))

    weights = {name: stored(name, w.detach()) for name, w in graph.weights.items()}
    return run(graph, [stored(n, x) for n, x in zip(graph.inputs, inputs, strict=True)], hook=hook, weights=weights)


class Reference:
    """The float network's outputs on some batches, and the loss of others on the same.

    Class scores, [N, C] of at least two classes, are compared by the mean of KL(softmax(float) || softmax(other)) in
    nats; other outputs by the energy of what differs, as a share of their own.
    """

    def __init__(self, graph: Graph, batches: Iterable[Sequence[Tensor]]) -> None:
        self.batches = list(batches)
        with torch.inference_mode():
            self._wanted = [run(graph, batch) for batch in self.batches]

    def loss(self, graph: Graph, plan: Plan) -> float:
        """Of a graph as a plan rounds it; 0 where nothing differs."""
        totals: dict[str, tuple[float, float]] = {}
        with torch.inference_mode():
            for batch, wanted in zip(self.batches, self._wanted, strict=True):
                got = rounded_run(graph, plan, batch)
                for name in wanted:
                    if graph.is_float(name):
                        part, whole = totals.get(name, (0.0, 0.0))
                        more, of = _distance(wanted[name].double(), got[name].double())
                        totals[name] = part + more, whole + of
        return sum(part / whole if whole else part for part, whole in totals.values())


def _distance(wanted: Tensor, got: Tensor) -> tuple[float, float]:
    """What differs, and of how much."""
    if wanted.dim() == 2 and wanted.shape[1] > 1:
        p, q = wanted.log_softmax(1), got.log_softmax(1)
        return float((p.exp() * (p - q)).sum()), float(len(wanted))
    return float((got - wanted).square().sum()), float(wanted.square().sum())
