"""Second-moment correction: each output channel of a linear operator gets its mean and spread in float back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from chipfit.calibration.data import no_data
from chipfit.correction.bias import quantized_linear
from chipfit.engine.run import run
from chipfit.graph.ir import CPU, Graph, Node
from chipfit.graph.linear import bias_or_zero, channel_axis, scale_outputs, with_bias
from chipfit.graph.placement import inputs_on, on_cpu, placed
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan
from chipfit.registry import Setting, register

#: channels with a smaller spread, as a share of the largest of the layer, stay unchanged
_LEAST = 1e-4


_DOES = "each output channel gets its mean and spread in float back; reads the data twice"
_SETTING = Setting("correct_second_moment", False, _DOES)


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
        raise no_data()
    for output, node in nodes.items():
        wanted, here = measured.moments[output]
        k = _ratio(wanted, here, limit)
        bias = k * (bias_or_zero(graph, node) - here.mean) + wanted.mean
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
        rounded = {n.weight for n, _ in quantized_linear(graph, plan)}
        own = self.placed.weights
        self.weights = own | {name: plan[name].round(own[name].detach()) for name in rounded}
        #: output -> its moments in float, and with rounded weights
        self.moments = {o: (_Moments(), _Moments()) for o in nodes}
        self.batches = 0
        self._floats: Mapping[str, torch.Tensor] = {}  #: outputs of the batch in float
        self._unread: list[tuple[str, _Moments, _Moments]] = []  #: moments of the batch, perhaps on a device

    @torch.inference_mode()
    def add(self, batch: Sequence[torch.Tensor]) -> None:
        """Add the moments of one batch."""
        inputs = inputs_on(self.device, batch)
        self._floats = run(self.placed, inputs, keep=set(self.nodes))
        run(self.placed, inputs, weights=self.weights, hook=self._normalize)
        for output, *new in _read(self._unread):
            for total, more in zip(self.moments[output], new, strict=True):
                total.merge(more)
        self._unread.clear()
        self.batches += 1

    def _normalize(self, node: Node, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Measure the output of an operator, and return it normalized to its moments in float."""
        if node.output not in self.nodes:
            return outputs
        axis = channel_axis(node)
        (y,), reference = outputs, self._floats[node.output]
        here, wanted = (_Moments.of(x, axis) for x in (y, reference))
        self._unread.append((node.output, wanted, here))
        shape = [1] * y.dim()
        shape[axis] = -1
        k = _ratio(wanted, here, self.limit)
        return (((y - here.mean.view(shape)) * k.view(shape) + wanted.mean.view(shape)).to(y.dtype),)


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


def _read(seen: Sequence[tuple[str, _Moments, _Moments]]) -> Iterator[tuple[str, _Moments, _Moments]]:
    """Yield moments in float64 on the CPU; those of a device are read together."""
    parts = on_cpu([x for _, *both in seen for m in both for x in (m.mean, m.squares)])
    numbers = (x.double() for x in parts)
    for output, *both in seen:
        wanted, here = (_Moments(m.count, next(numbers), next(numbers)) for m in both)
        yield output, wanted, here


def _ratio(wanted: _Moments, here: _Moments, limit: float) -> torch.Tensor:
    """Return k [C]; 1 for channels that hardly vary."""
    live = (wanted.std > _LEAST * wanted.std.max()) & (here.std > _LEAST * here.std.max())
    return torch.where(live, wanted.std / here.std, 1.0).clamp(1 / limit, limit)
