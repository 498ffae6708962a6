"""Second-moment correction: each output channel of a linear operator gets its mean and spread in float back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from chipfit.calibration.data import empty_data_error
from chipfit.correction.bias import quantized_linear
from chipfit.engine.run import run
from chipfit.graph.ir import CPU, Graph, Node
from chipfit.graph.linear import bias_or_zero, channel_axis, scale_outputs, with_bias
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan
from chipfit.registry import Setting, register

#: channels with a smaller spread, as a share of the largest of the layer, stay unchanged
_LEAST_SPREAD = 1e-4


_SETTING = Setting(
    "correct_second_moment", False, "each output channel gets its mean and spread in float back; reads the data twice"
)


@register("correction", "second_moment", stage="correct", needs=("batches",), setting=_SETTING)
def correct_second_moment(
    graph: Graph, plan: Plan, batches: Iterable[Sequence[torch.Tensor]], *, limit: float = 2.0
) -> tuple[Graph, list[str]]:
    """Compute W' = k W, b' = k (b - m_q) + m, k = s / s_q for every output channel of a linear operator.

    m and s are its mean and standard deviation in float, m_q and s_q those in the network with rounded weights. While
    these are measured, each output is normalised to its moments in float, as a batch norm with re-estimated statistics
    would do, so that later operators have corrected inputs.

    Args:
        batches: of graph inputs, as for `calibration.collect`.
        limit: k stays in [1 / limit, limit].

    Returns:
        The graph with new weights and biases, whose scales are to be chosen again, and one note per correction or
        refusal.

    Raises:
        DataError: no batch at all.
    """
    graph, notes, nodes = graph.copy(), list[str](), dict[str, Node]()
    readers = Readers(graph)
    for node, why in quantized_linear(graph, plan):
        why = why or readers.why_fixed(node)
        if why:
            notes.append(f"'{node.display_name}' keeps its second moment: {why}")
        else:
            nodes[node.output] = node
    measured = _Measurement(graph, plan, nodes, limit)
    for batch in batches:
        measured.add(batch)
    if not measured.batches:
        raise empty_data_error()
    for output, node in nodes.items():
        in_float, rounded = measured.moments[output]
        k = _ratio(in_float, rounded, limit)
        bias = k * (bias_or_zero(graph, node) - rounded.mean) + in_float.mean
        graph.weights[node.weight] = scale_outputs(node, graph.weights[node.weight].detach(), k)
        with_bias(graph, node, bias)
        by = f"{float(k.min()):.3g} to {float(k.max()):.3g}"
        notes.append(f"corrected the second moment of '{node.display_name}' by {by}")
    return graph, notes


class _Measurement:
    """Moments of the outputs of linear operators, in float and in the network with rounded weights.

    Args:
        nodes: the operators, by their outputs.
    """

    def __init__(self, graph: Graph, plan: Plan, nodes: Mapping[str, Node], limit: float) -> None:
        self.device, self.placed, self.nodes, self.limit = graph.device, placed(graph), nodes, limit
        names, own = {n.weight for n, _ in quantized_linear(graph, plan)}, self.placed.weights
        #: all weights, those of linear operators rounded to their grids
        self.weights = own | {name: plan[name].round(own[name].detach()) for name in names}
        #: output -> its moments in float, and with rounded weights
        self.moments = {o: (_Moments(), _Moments()) for o in nodes}
        self.batches = 0
        self._floats: Mapping[str, torch.Tensor] = {}  #: outputs of the batch in float
        self._pending: list[tuple[str, _Moments, _Moments]] = []  #: moments of the batch, perhaps on a device

    @torch.inference_mode()
    def add(self, batch: Sequence[torch.Tensor]) -> None:
        """Add the moments of one batch."""
        inputs = inputs_on(self.device, batch)
        self._floats = run(self.placed, inputs, keep=set(self.nodes))
        run(self.placed, inputs, weights=self.weights, hook=self._normalize)
        for output, *new in _in_float64(self._pending):
            for total, more in zip(self.moments[output], new, strict=True):
                total.merge(more)
        self._pending.clear()
        self.batches += 1

    def _normalize(self, node: Node, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Measure the output of an operator, and return it normalized to its moments in float."""
        if node.output not in self.nodes:
            return outputs
        axis = channel_axis(node)
        (y,), reference = outputs, self._floats[node.output]
        rounded, in_float = (_Moments.of(x, axis) for x in (y, reference))
        self._pending.append((node.output, in_float, rounded))
        shape = [1] * y.dim()
        shape[axis] = -1
        k = _ratio(in_float, rounded, self.limit)
        return (((y - rounded.mean.view(shape)) * k.view(shape) + in_float.mean.view(shape)).to(y.dtype),)


@dataclass(slots=True)
class _Moments:
    """Streaming mean and variance per channel, merged as in Chan et al. 1979."""

    count: int = 0
    mean: torch.Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(()))  #: sum of squared distances from the mean

    @classmethod
    def of(cls, x: torch.Tensor, axis: int) -> _Moments:
        """Return the moments of a tensor with channels along `axis`, in float64 on the CPU, else in float32."""
        rows = (x.double() if x.device == CPU else x.float()).movedim(axis, 0).flatten(1)
        return cls(rows.shape[1], rows.mean(1), rows.var(1, correction=0) * rows.shape[1])

    def merge(self, other: _Moments) -> None:
        total = self.count + other.count
        distance = other.mean - self.mean
        self.squares = self.squares + other.squares + distance.square() * (self.count * other.count / total)
        self.mean = self.mean + distance * (other.count / total)
        self.count = total

    @property
    def std(self) -> torch.Tensor:
        return (self.squares / self.count).sqrt()


def _in_float64(pending: Sequence[tuple[str, _Moments, _Moments]]) -> Iterator[tuple[str, _Moments, _Moments]]:
    """Yield moments in float64 on the CPU; those of a device are read together."""
    parts = on_cpu([x for _, *both in pending for m in both for x in (m.mean, m.squares)])
    numbers = (x.double() for x in parts)
    for output, *both in pending:
        in_float, rounded = (_Moments(m.count, next(numbers), next(numbers)) for m in both)
        yield output, in_float, rounded


def _ratio(in_float: _Moments, rounded: _Moments, limit: float) -> torch.Tensor:
    """Return k [C]; 1 for channels that hardly vary."""
    live = (in_float.std > _LEAST_SPREAD * in_float.std.max()) & (rounded.std > _LEAST_SPREAD * rounded.std.max())
    return torch.where(live, in_float.std / rounded.std, 1.0).clamp(1 / limit, limit)
