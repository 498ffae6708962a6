"""How far a quantized network is from the float one on given images, as one number to compare plans by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from chipfit.engine.kernels import execute
from chipfit.engine.run import done_after, run
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan


def rounded_run(graph: Graph, plan: Plan, inputs: Sequence[Tensor]) -> dict[str, Any]:
    """The outputs of a network as a plan rounds it, by name: each operator reads codes, or what was before them."""
    env: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
    rounded: dict[str, Any] = {}

    def read(name: str | None, reader: str = "") -> Any:
        if name is None:
            return None
        x = env[name] if name in env else graph.weights[name].detach()
        if not plan.quantized(name) or (name, reader) in plan.float_edges:
            return x
        if name not in rounded:
            rounded[name] = plan[name].round(x)
        return rounded[name]

    for node, done in zip(graph.nodes, done_after(graph), strict=True):
        env.update(zip(node.outputs, execute(node, [read(i, node.name) for i in node.inputs]), strict=False))
        for name in done:
            env.pop(name, None)
            rounded.pop(name, None)
    return {name: read(name) for name in graph.outputs}


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
