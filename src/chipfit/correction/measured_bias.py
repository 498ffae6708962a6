"""Measured bias correction: shift each linear operator's bias by the mean error of its outputs on a few samples.

Operators are corrected in the order in which they run, so that the error of each is measured behind the corrected ones.
A third of the samples is held out: the biases are not fitted to them, and their errors decide whether to correct.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chipfit.calibration.collect import valid_tokens, without_padding
from chipfit.calibration.data import Batch, IndivisibleBatch
from chipfit.correction.bias import quantized_linear
from chipfit.graph.data_sizes import with_comparable_outputs
from chipfit.graph.folds import bias_is_free, move_beta
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import channel_axis, is_linear, with_bias
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.quantizers.stored import Stored
from chipfit.rounding.compare import (
    QuantizedRun,
    Reference,
    RoundedWeights,
    count_samples,
    rounded_once,
    rounded_outputs,
)
from chipfit.rounding.outputs import OutputErrors

#: name of the correction in a plan's provenance
NAME = "measured_bias"
#: one sample in so many is held out
_HELD_OUT = 3
#: fewest positions of a single sample whose mean is taken for that of all samples
_POSITIONS = 16


class Samples(NamedTuple):
    """Samples of the calibration data: biases are fitted to some, and judged on others, which are held out."""

    fit: tuple[Batch, ...]
    held: tuple[Batch, ...]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "Samples":
        """Split samples evenly; batches that cannot be cut go to either part whole."""
        fit, held = list[Batch](), list[Batch]()
        for k, batch in enumerate(batches):
            count = len(batch[0]) if batch[0].dim() else 1
            if isinstance(batch, IndivisibleBatch) or count < 2 or any(not x.dim() or len(x) != count for x in batch):
                (held if k % _HELD_OUT == 1 else fit).append(batch)
                continue
            chosen = torch.arange(count) % _HELD_OUT == 1  # on the CPU: the inputs may lie on several devices
            fit.append([x[~chosen] for x in batch])
            held.append([x[chosen] for x in batch])
        return cls(tuple(fit), tuple(held))


class MeanReference(Reference):
    """A float reference with the mean outputs of linear operators on the samples to which biases are fitted."""

    def __init__(self, graph: Graph, samples: Samples) -> None:
        self.samples = samples
        batches = [inputs_on(graph.device, batch) for batch in (*samples.fit, *samples.held)]
        self._valid = [valid_tokens(graph, batch) for batch in batches]
        self._counts = [1 if isinstance(b, IndivisibleBatch) or not b[0].dim() else len(b[0]) for b in (*samples.fit,)]
        #: output of an operator -> means of each batch, [samples, C], and the number of positions of a sample
        self.means = dict[str, list[tuple[Tensor, int]]]()
        super().__init__(graph, batches, self._record_means)

    def errors_of_means(self, node: Node, values: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Return means in float less means of other outputs of an operator, [samples, C], and positions of a sample."""
        rows = [a - self._means(node, y, k)[0] for k, (y, (a, _)) in enumerate(zip(values, self.means[node.output]))]
        return torch.cat(rows), self.means[node.output][0][1]

    def _record_means(self, node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        if node.bias and is_linear(self.graph, node):
            seen = self.means.setdefault(node.output, [])
            if len(seen) < len(self.samples.fit):
                seen.append(self._means(node, outputs[0], len(seen)))
        return outputs

    def _means(self, node: Node, y: Tensor, k: int) -> tuple[Tensor, int]:
        y = without_padding(y, self._valid[k])  # [1, positions, ...] where padding is left out
        count = self._counts[k] if y.dim() > 1 and len(y) % self._counts[k] == 0 else 1
        last = y.movedim(channel_axis(node) if y.dim() > 1 else 0, -1)
        rows = last.reshape(count, -1, last.shape[-1])
        return rows.mean(1), rows.shape[1]


@dataclass(frozen=True, eq=False)
class MeasuredBiases:
    """The biases that a few samples suggest for one plan, and the errors of the outputs with and without them."""

    reference: MeanReference
    tensors: Mapping[str, TensorPlan]  #: of the plan
    biases: Mapping[str, Tensor]  #: by the name of the node, [O]
    before: Sequence[OutputErrors]  #: of each batch
    after: Sequence[OutputErrors]  #: with these biases

    @property
    def held(self) -> tuple[OutputErrors, OutputErrors]:
        """Errors of held-out samples, without and with the biases."""
        first = len(self.reference.samples.fit)
        return OutputErrors.merged(self.before[first:]), OutputErrors.merged(self.after[first:])

    @property
    def improves(self) -> bool:
        """True if the biases reduce the errors of the outputs on held-out samples."""
        before, after = self.held
        return bool(self.biases) and after.sqnr_db > before.sqnr_db

    @property
    def errors(self) -> OutputErrors:
        """Errors of all samples, with the biases if they improve the outputs."""
        return OutputErrors.merged(self.after if self.improves else self.before)

    def is_valid_for(self, graph: Graph, plan: Plan) -> bool:
        """Return whether the measurement was made with this network and these tensors."""
        same = plan.tensors.keys() == self.tensors.keys()
        return graph is self.reference.graph and same and all(t is self.tensors[k] for k, t in plan.tensors.items())

    def applied(self, graph: Graph) -> Graph:
        """Return the network with these biases."""
        graph = graph.copy()
        for node in (n for n in graph.nodes if n.name in self.biases):
            move_beta(graph, node.weight, self.biases[node.name])
            with_bias(graph, node, self.biases[node.name])
        return graph

    @property
    def note(self) -> str:
        """The reason for the correction, for the plan."""
        before, after = (errors.sqnr_db for errors in self.held)
        samples = count_samples(self.reference.samples.held)
        how = f"on {samples} held-out samples outputs have {after:.1f} dB, {before:.1f} dB without"
        return f"{len(self.biases)} biases corrected by the measured mean errors of their layers: {how}"


def measure_biases(
    reference: MeanReference,
    graph: Graph,
    plan: Plan,
    rounded: RoundedWeights | None = None,
    *,
    before: Sequence[OutputErrors] | None = None,
    move: bool = True,
) -> MeasuredBiases:
    """Return b' = b + mean of (y - y') over samples and positions for every linear operator with quantized weights.

    y is the output in float, y' the one of the network as the plan quantizes it, with corrected biases in all operators
    before. The mean shrinks by the share of its square that differences between samples explain (James and Stein 1961).

    Args:
        graph: computes in float what the network of the reference computes, value by value.
        rounded: as in `Reference.errors`.
        before: errors without these biases; None: measure them.
        move: False: measure the errors, and suggest no biases.
    """
    weights: RoundedWeights = {} if rounded is None else rounded
    before = reference.errors_of_batches(graph, plan, weights) if before is None else before
    if not move or not reference.samples.held:
        return MeasuredBiases(reference, plan.tensors, {}, before, before)
    there, rounding = placed(with_comparable_outputs(graph)), rounded_once(graph, plan, weights)
    quantized = quantized_linear(graph, plan, sized=False)
    moves = [n for n, why in quantized if not why and n.output in reference.means and bias_is_free(graph, n.weight)]
    movable = {n.name for n in moves}
    biases = dict[str, Tensor]()
    with torch.inference_mode():
        flows = [QuantizedRun(there, plan, batch, rounding=rounding) for batch in reference.batches]
        for node, *_ in zip(*(flow.steps() for flow in flows), strict=True):
            if node.name in movable:
                values = [flow.env[node.output] for flow in flows]
                by = _shrunk(*reference.errors_of_means(node, values[: len(reference.samples.fit)]))
                bias = there.weights[node.bias or ""]
                biases[node.name] = _within_grid(bias, bias + by.to(bias.dtype), plan.stored(node.bias))
                step = _as_stored(biases[node.name], plan, node) - _as_stored(bias, plan, node)
                shape = [-1 if d == channel_axis(node) % y.dim() else 1 for y in values[:1] for d in range(y.dim())]
                for flow, y in zip(flows, values, strict=True):
                    flow.env[node.output] = y + step.view(shape).to(y.dtype)
        after = [reference.errors_of(k, rounded_outputs(plan, flow.outputs)) for k, flow in enumerate(flows)]
    here = dict(zip(biases, (b.clone() for b in on_cpu([*biases.values()])), strict=True))
    return MeasuredBiases(reference, plan.tensors, here, before, after)


def _shrunk(errors: Tensor, positions: int) -> Tensor:
    """Return the mean [C] of errors [samples, C], shrunk by the share that is due to chance."""
    mean = errors.mean(0)
    if len(errors) < 2:
        return mean if positions >= _POSITIONS else torch.zeros_like(mean)
    chance = errors.var(0).sum() / len(errors)
    return mean * (1 - chance / mean.square().sum().clamp_min(torch.finfo(mean.dtype).tiny)).clamp(0, 1)


def _within_grid(bias: Tensor, moved: Tensor, stored: Stored | None) -> Tensor:
    """Return the moved bias; channels whose moved bias exceeds the grid keep the old one."""
    if stored is None:
        return moved
    scale, zero_point = stored.numbers_on(moved.device)
    codes = ROUNDINGS[stored.grid.rounding](moved / scale) + zero_point
    return torch.where((codes >= stored.grid.qmin) & (codes <= stored.grid.qmax), moved, bias)


def _as_stored(bias: Tensor, plan: Plan, node: Node) -> Tensor:
    stored = plan.stored(node.bias)
    return bias if stored is None else stored.round(bias)
