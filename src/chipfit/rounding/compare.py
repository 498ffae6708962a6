"""Loss of a quantized network against the float one on given samples, to compare plans by."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chipfit.calibration.collect import valid_tokens
from chipfit.calibration.data import Batch, IndivisibleBatch, empty_data_error
from chipfit.decide.insertions import without_insertions
from chipfit.engine.kernels import execute
from chipfit.engine.run import Hook, done_after, run
from chipfit.graph.data_sizes import with_comparable_outputs
from chipfit.graph.ir import Graph, Node
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.plan.record import Plan
from chipfit.quantizers.stored import Stored
from chipfit.rounding.outputs import OutputErrors, is_scores, parts_of

#: rounded weights by name, where the network runs, with the weight of the graph and how it is stored
RoundedWeights = dict[str, tuple[Tensor, Stored | None, Tensor]]
#: a network, and how it is quantized
Planned = tuple[Graph, Plan]
#: share of the samples that is held out for a comparison
HELD_OUT = 1 / 8


def run_quantized(
    graph: Graph, plan: Plan, inputs: Sequence[Tensor], rounding: Callable[[str, Tensor], Tensor] | None = None
) -> dict[str, Any]:
    """Return the outputs of a network as a plan quantizes it, by name; `rounding` as in `QuantizedRun`."""
    return rounded_outputs(plan, QuantizedRun(graph, plan, inputs, rounding=rounding).finish())


def rounded_outputs(plan: Plan, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return outputs, by name, as a plan stores them."""
    return {name: plan[name].round(x) if plan.quantized(name) else x for name, x in values.items()}


class QuantizedRun:
    """A run of a network as a plan quantizes it, whole or node by node.

    Args:
        weights: replace those of the graph.
        done: tensors, weights included, that are rounded already.
        rounding: (name, tensor) -> rounded tensor; unless given, as the plan stores it.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        inputs: Sequence[Tensor],
        weights: Mapping[str, Tensor] | None = None,
        done: Collection[str] = (),
        rounding: Callable[[str, Tensor], Tensor] | None = None,
    ) -> None:
        self.graph, self.plan, self.done, self.rounding = graph, plan, done, rounding
        self.env: dict[str, Any] = dict(zip(graph.inputs, inputs, strict=True))
        self._table = graph.weights if weights is None else weights
        self._rounded: dict[str, Any] = {}

    def steps(self) -> Iterator[Node]:
        """Execute the nodes in order and yield each one, while the values that only it reads are still there."""
        for node, over in zip(self.graph.nodes, done_after(self.graph), strict=True):
            self._execute(node)
            yield node
            for name in over:
                self.env.pop(name, None)
                self._rounded.pop(name, None)

    def finish(self) -> dict[str, Any]:
        """Execute all nodes, and return the outputs of the network by name, before they are rounded themselves."""
        for _ in self.steps():
            pass
        return self.outputs

    def _execute(self, node: Node) -> None:
        operands = [self._read(i, node.name) for i in node.inputs]
        self.env.update(zip(node.outputs, execute(node, operands), strict=False))

    @property
    def outputs(self) -> dict[str, Any]:
        """The outputs of the network, before they are rounded themselves."""
        return {name: self.env[name] if name in self.env else self._table[name] for name in self.graph.outputs}

    def _read(self, name: str | None, reader: str) -> Any:
        if name is None:
            return None
        x, plan = self.env[name] if name in self.env else self._table[name], self.plan
        if name in self.done or not plan.quantized(name) or (name, reader) in plan.float_edges:
            return x
        if name not in self._rounded:
            own = self.rounding
            self._rounded[name] = own(name, x) if own is not None else plan[name].round(x.detach())
        return self._rounded[name]


class Reference:
    """The outputs of the float network on some batches, and the errors of other networks against them.

    Args:
        hook: called in the run in float, as by `engine.run`.
    """

    def __init__(self, graph: Graph, batches: Iterable[Batch], hook: Hook | None = None) -> None:
        graph = with_comparable_outputs(graph)
        self.graph, self.batches = graph, [inputs_on(graph.device, batch) for batch in batches]
        there = placed(without_insertions(graph))  # dynamic quantization is an error of the other networks
        with torch.inference_mode():
            self._wanted = [self._parts(run(there, batch, hook=hook), batch) for batch in self.batches]
        votes = Counter(name for parts in self._wanted for name, y in parts.items() if is_scores(y))
        self._scores = {name for name, count in votes.items() if 2 * count > len(self._wanted)}

    def loss(self, graph: Graph, plan: Plan) -> float:
        """Return the loss of a graph as a plan quantizes it, see `outputs`; 0 if all outputs are equal."""
        return self.errors(graph, plan).loss

    def errors(self, graph: Graph, plan: Plan, rounded: RoundedWeights | None = None) -> OutputErrors:
        """Return the errors of a graph as a plan quantizes it, over all batches; `rounded` as below."""
        return OutputErrors.merged(self.errors_of_batches(graph, plan, rounded))

    def errors_of_batches(self, graph: Graph, plan: Plan, rounded: RoundedWeights | None = None) -> list[OutputErrors]:
        """Return the errors of a graph as a plan quantizes it, batch by batch.

        Args:
            rounded: weights that a measurement of another plan has rounded; those that are stored alike are taken.
        """
        there = placed(with_comparable_outputs(graph))
        rounding = rounded_once(graph, plan, {} if rounded is None else rounded)
        with torch.inference_mode():
            runs = (run_quantized(there, plan, batch, rounding) for batch in self.batches)
            return [self.errors_of(k, values) for k, values in enumerate(runs)]

    def errors_of(self, k: int, values: Mapping[str, Any]) -> OutputErrors:
        """Return the errors of the outputs that another network has for batch k."""
        out = OutputErrors()
        out.add(self._wanted[k], self._parts(values, self.batches[k]), self._scores)
        return out

    def _parts(self, values: Mapping[str, Any], batch: Batch) -> dict[str, Tensor]:
        """Return the parts of outputs, as the float network joins them, on the CPU: errors are summed in float64."""
        found = parts_of(self.graph, values, valid_tokens(self.graph, batch))
        return dict(zip(found, on_cpu([*found.values()]), strict=True))


def rounded_once(graph: Graph, plan: Plan, weights: RoundedWeights) -> Callable[[str, Tensor], Tensor]:
    """Return a rounding for `QuantizedRun` that takes a weight from `weights` where it is there, stored alike."""

    def rounding(name: str, x: Tensor) -> Tensor:
        if name not in graph.weights:
            return plan[name].round(x)
        w, found, stored = graph.weights[name], weights.get(name), plan.stored(name)
        if found is None or found[0] is not w or found[1] is not stored:
            found = weights[name] = w, stored, plan[name].round(x)
        return found[2]

    return rounding


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
        whole = left >= size or isinstance(batch, IndivisibleBatch)
        cut = not whole and all(x.dim() and len(x) == len(batch[0]) for x in batch)
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
        raise empty_data_error()
    samples = count_samples(batches)
    first = limit_samples(batches, samples - int(samples * HELD_OUT) if guard else samples)
    whole, last = batches[len(first) - 1], first[-1]
    cut = [] if last is whole else [[x[len(y) :] for x, y in zip(whole, last, strict=True)]]
    return first, [*cut, *batches[len(first) :]]
