"""Loss of a quantized network against the float one on given samples, to compare plans by."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.collect import valid_tokens
from chipfit.calibration.data import Batch, Whole, no_data
from chipfit.engine.kernels import execute
from chipfit.engine.run import done_after, run
from chipfit.graph.ir import Graph
from chipfit.graph.placement import on_cpu, placed
from chipfit.plan.record import Plan
from chipfit.quantizers.stored import Stored
from chipfit.rounding.outputs import OutputErrors, parts_of

#: rounded weights by name, where the network runs, with the weight of the graph and how it is stored
RoundedWeights = dict[str, tuple[Tensor, Stored | None, Tensor]]
#: a network, and how it is quantized
Planned = tuple[Graph, Plan]
#: share of the samples that is held out for a comparison
HELD_OUT = 1 / 8


def run_quantized(
    graph: Graph, plan: Plan, inputs: Sequence[Tensor], rounding: Callable[[str, Tensor], Tensor] | None = None
) -> dict[str, Any]:
    """Return the outputs of a network as a plan quantizes it, by name; `rounding` as in `unrounded_outputs`."""
    found = unrounded_outputs(graph, plan, inputs, rounding=rounding)
    return {name: plan[name].round(x) if plan.quantized(name) else x for name, x in found.items()}


def unrounded_outputs(
    graph: Graph,
    plan: Plan,
    inputs: Sequence[Tensor],
    weights: Mapping[str, Tensor] | None = None,
    done: Collection[str] = (),
    rounding: Callable[[str, Tensor], Tensor] | None = None,
) -> dict[str, Any]:
    """Return the outputs of a network as a plan quantizes it, before these outputs are rounded themselves.

    Args:
        weights: replace those of the graph.
        done: tensors, weights included, that are rounded already.
        rounding: (name, tensor) -> rounded tensor; unless given, as the plan stores it.
    """
    env: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
    table = graph.weights if weights is None else weights
    rounded: dict[str, Any] = {}

    def read(name: str | None, reader: str) -> Any:
        if name is None:
            return None
        x = env[name] if name in env else table[name]
        if name in done or not plan.quantized(name) or (name, reader) in plan.float_edges:
            return x
        if name not in rounded:
            rounded[name] = rounding(name, x) if rounding is not None else plan[name].round(x.detach())
        return rounded[name]

    for node, over in zip(graph.nodes, done_after(graph), strict=True):
        env.update(zip(node.outputs, execute(node, [read(i, node.name) for i in node.inputs]), strict=False))
        for name in over:
            env.pop(name, None)
            rounded.pop(name, None)
    return {name: env[name] if name in env else table[name] for name in graph.outputs}


class Reference:
    """The outputs of the float network on some batches, and the errors of other networks against them.

    Args:
        batches: on the device of the graph.
    """

    def __init__(self, graph: Graph, batches: Iterable[Batch]) -> None:
        self.graph, self.batches = graph, list(batches)
        there = placed(graph)
        with torch.inference_mode():
            self._wanted = [self._parts(run(there, batch), batch) for batch in self.batches]

    def loss(self, graph: Graph, plan: Plan) -> float:
        """Return the loss of a graph as a plan quantizes it, see `outputs`; 0 if all outputs are equal."""
        return self.errors(graph, plan).loss

    def errors(self, graph: Graph, plan: Plan, rounded: RoundedWeights | None = None) -> OutputErrors:
        """Return the errors of a graph as a plan quantizes it.

        Args:
            rounded: weights that a measurement of another plan has rounded; those that are stored alike are taken.
        """
        out, weights, there = OutputErrors(), {} if rounded is None else rounded, placed(graph)

        def rounding(name: str, x: Tensor) -> Tensor:  # weights are rounded once
            if name not in graph.weights:
                return plan[name].round(x)
            w, found, stored = graph.weights[name], weights.get(name), plan.stored(name)
            if found is None or found[0] is not w or found[1] is not stored:
                found = weights[name] = w, stored, plan[name].round(x)
            return found[2]

        with torch.inference_mode():
            for batch, wanted in zip(self.batches, self._wanted, strict=True):
                out.add(wanted, self._parts(run_quantized(there, plan, batch, rounding), batch))
        return out

    def _parts(self, values: Mapping[str, Any], batch: Batch) -> dict[str, Tensor]:
        """Return the parts of outputs, as the float network joins them, on the CPU: errors are summed in float64."""
        found = parts_of(self.graph, values, valid_tokens(self.graph, batch))
        return dict(zip(found, on_cpu([*found.values()]), strict=True))


def compare_plans(graph: Graph, held: Sequence[Batch], before: Planned, after: Planned) -> tuple[bool, str]:
    """Return whether the second of two plans loses no more than the first on some batches, and a text with both losses.

    Args:
        graph: the float network.
    """
    reference = Reference(graph, held)
    was, now = reference.loss(*before), reference.loss(*after)
    return (
        now <= was,
        f"on {count_samples(held)} held-out images the loss to the float model is {now:.4g}, {was:.4g} without",
    )


def without_weight_rounding(plan: Plan) -> Plan:
    """Return the plan with all weights in float."""
    floats = {k: t if t.role == "activation" else t.with_(stored=None) for k, t in plan.tensors.items()}
    return replace(plan, tensors=floats)


def count_samples(batches: Iterable[Batch]) -> int:
    """Return the number of samples."""
    return sum(len(b[0]) if b[0].dim() else 1 for b in batches)


def limit_samples(batches: Iterable[Batch], most: float) -> list[Batch]:
    """Return the batches that hold the first samples; the last is cut where its tensors agree on their size."""
    left, out = most, list[Batch]()
    for batch in batches:
        size = count_samples([batch])
        cut = left < size and not isinstance(batch, Whole) and all(x.dim() and len(x) == len(batch[0]) for x in batch)
        out.append([x[: int(left)] for x in batch] if cut else batch)
        left -= size
        if left <= 0:
            break
    return out


def split_holdout(batches: list[Batch], guard: bool = True) -> tuple[list[Batch], list[Batch]]:
    """Split calibration data into batches to fit to and the last samples, which are held out for a comparison.

    Nothing is held out without a guard, or where a batch cannot be cut.

    Raises:
        DataError: there is no batch.
    """
    if not batches:
        raise no_data()
    samples = count_samples(batches)
    first = limit_samples(batches, samples - int(samples * HELD_OUT) if guard else samples)
    whole, last = batches[len(first) - 1], first[-1]
    cut = [] if last is whole else [[x[len(y) :] for x, y in zip(whole, last, strict=True)]]
    return first, [*cut, *batches[len(first) :]]
