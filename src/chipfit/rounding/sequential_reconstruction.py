"""One walk through the network with two streams of images: the float one and the quantized one.

For every node: run it on the float stream; where it is linear, fit weights, scales and bias to what the quantized
stream brings it and what the float one wants of it; run it on the quantized stream. So each operator repairs what those
before it have lost, and no node runs twice. Scales of activations are the plan's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from chipfit.calibration.batch_cache import MemoryLimit
from chipfit.engine.kernels import execute
from chipfit.engine.run import done_after
from chipfit.errors import DataError, Interrupted
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import bias_or_zero, is_linear, with_bias
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.stored import Stored
from chipfit.rounding import activation_ranges, gptq
from chipfit.rounding.moments import Moments, as_rows, from_rows, patches, positions, targets
from chipfit.rounding.scale_bounds import scale_bounds, scale_is_allowed, weight_rows
from chipfit.rounding.streams import MEMORY, Pick, Stream, chunks, is_elementwise


@dataclass(frozen=True, kw_only=True)
class GptqSettings:
    """The options of a sequential reconstruction."""

    name: ClassVar[str] = "gptq"  #: of the method, in the origins of weights
    feedback: ClassVar[bool] = True  #: the error of a column moves to those behind it; False: nearest quantized values

    samples: int = 4096  #: output positions per operator, of all samples; twice K at least
    ridge: float | None = 0.1  #: of the least squares that correct weights before they are rounded; None: no correction
    residual: bool = True  #: an operator before an addition also repairs the error of the other operand


@dataclass
class Reconstructed:
    """What a walk decided."""

    graph: Graph  #: with weights that lie on their grids, and new biases
    tensors: dict[str, TensorPlan] = field(default_factory=dict)  #: weights and activations with new scales
    notes: list[str] = field(default_factory=list)
    spilled: int = 0  #: bytes that were kept on disk


@torch.inference_mode()
def reconstruct(
    graph: Graph,
    plan: Plan,
    batches: Iterable[Sequence[Tensor]],
    settings: GptqSettings = GptqSettings(),
    searched: Collection[str] = (),
    *,
    seed: int = 0,
    memory: int = MEMORY,
) -> Reconstructed:
    """Round the weights of every linear operator that the plan stores in codes, or of those until Ctrl-C.

    Args:
        batches: of graph inputs; they are read once.
        searched: class scores among these get a grid of their own where the platform leaves it free.

    Raises:
        DataError: no batch at all.
    """
    walker = _Reconstruction(graph.copy(), plan, settings, searched, seed, memory)
    walker.read(batches)
    out = Reconstructed(walker.graph)
    for k, (node, done) in enumerate(zip(list(graph.nodes), done_after(graph), strict=True)):
        try:
            walker.step(k, node, out)
        except KeyboardInterrupt:
            out.notes.append(f"{Interrupted.NOTE}: '{node.who}' and what follows it take their nearest codes")
            break
        for name in done:
            walker.free(name)
    out.spilled = walker.budget.spilled
    return out


def why_not_fitted(graph: Graph, plan: Plan, readers: Readers, node: Node) -> str | None:
    """Why the weight of a node is not fitted: "" for one that has none to fit, None for one that is."""
    if not is_linear(graph, node) or (node.weight, node.name) in plan.float_edges:
        return ""
    stored = plan.stored(node.weight)
    if stored is None:
        return ""
    if stored.grid.table is None and not stored.grid.nearest:
        return f"the chip rounds weights by {stored.grid.rounding}"
    if graph.is_weight(node.data):
        return "it reads no data"
    return readers.why_fixed(node) or None


class _Reconstruction:
    def __init__(
        self, graph: Graph, plan: Plan, settings: GptqSettings, searched: Collection[str], seed: int, memory: int
    ) -> None:
        self.graph, self.settings = graph, settings
        self.plan = replace(plan, tensors=dict(plan.tensors))
        self.original, self.readers = graph.weights, Readers(graph)
        graph.weights = dict(graph.weights)
        self.budget = MemoryLimit(memory)
        self.floats: dict[str, Stream] = {}
        self.codes: dict[str, Stream] = {}
        self.rounded: dict[str, Any] = {}  #: weights as the chip stores them
        self.random = torch.Generator().manual_seed(seed)
        self.images = self.chunks = 0
        self.raw = {value for value, _ in plan.float_edges}  #: which some reader takes before it is rounded
        free = {n for n in graph.outputs if n in searched and plan.quantized(n) and n not in plan.zeros}
        self.open = {n for n in free if scale_bounds(plan, n) is not None and not self.readers.of(n)}

    def read(self, batches: Iterable[Sequence[Tensor]]) -> None:
        """The graph's inputs, in chunks; a batch whose inputs do not agree on its size stays whole."""
        for name in self.graph.inputs:
            self._new(name)
        for batch in batches:
            for inputs in chunks(self.graph, batch):
                self.chunks += 1
                self.images += max((len(x) if x.dim() else 0 for x in inputs), default=0)
                for name, x in zip(self.graph.inputs, inputs, strict=True):
                    self.floats[name].append(x)
                    self.codes[name].append(x)
        if not self.images:
            raise DataError("There is no calibration data", allowed="one batch at least")

    def step(self, index: int, node: Node, out: Reconstructed) -> None:
        """One node on both streams."""
        for o in node.outputs:
            self._new(o)
        why = why_not_fitted(self.graph, self.plan, self.readers, node)
        moments = None if why is not None else Moments.empty(as_rows(node, self._weight(node)))
        for k in range(self.chunks):
            results = execute(node, [self._float(i, k) for i in node.inputs])
            if moments is not None:
                self._sum(node, moments, results[0], k)
            for o, y in zip(node.outputs, results, strict=False):
                self.floats[o].append(y)
        if moments is not None:
            node = self._fit(node, moments, out)
            self.graph.nodes[index] = node
        elif why:
            out.notes.append(f"the weight of '{node.who}' is rounded to the nearest code: {why}")
        for k in range(self.chunks):
            results = execute(node, [self._quantized(i, node, k) for i in node.inputs])
            for o, y in zip(node.outputs, results, strict=False):
                self.codes[o].append(y)
        for o in node.outputs:
            self.settle(o, out)

    def settle(self, name: str, out: Reconstructed) -> None:
        """Choose the grid of class scores where the platform leaves it open, and keep their codes."""
        if name not in self.open or not activation_ranges.are_low_bit_scores(self.codes[name][0], self.plan[name].grid):
            return
        stream = self.codes[name]
        scale, zero = activation_ranges.range_of_scores(self.plan[name], self.floats[name], stream)
        if scale_is_allowed(self.plan, name, scale):
            origin = "least divergence of the class probabilities"
            new = self.plan.tensors[name].with_(scale=scale, zero_point=zero, origin=origin)
            out.tensors[name] = self.plan.tensors[name] = new

    def free(self, name: str) -> None:
        for streams in (self.floats, self.codes):
            if name in streams:
                streams.pop(name).free()

    def _new(self, name: str) -> None:
        self.floats[name] = Stream(self.budget, expected=self.chunks or None)
        rounded = name not in self.raw and name not in self.open  # nothing reads the codes of what is open
        self.codes[name] = Stream(self.budget, self.plan.stored(name) if rounded else None, self.chunks or None)

    def _float(self, name: str | None, k: int) -> Any:
        if name is None:
            return None
        return self.floats[name][k] if name in self.floats else self.original[name]

    def _quantized(self, name: str | None, node: Node, k: int) -> Any:
        """What a node reads on the chip: codes, unless it is a raw edge."""
        if name is None:
            return None
        stored = self._read_as(name, node)
        if name not in self.codes:
            return self._stored_weight(name, stored)
        stream = self.codes[name]
        x = stream[k]
        return stored.round(x) if stored is not None and stream.stored is None else x

    def _read_as(self, name: str, node: Node) -> Stored | None:
        return None if (name, node.name) in self.plan.float_edges else self.plan.stored(name)

    def _picked(self, name: str, node: Node, k: int, pick: Pick) -> Tensor:
        """What is picked of that."""
        stored, stream = self._read_as(name, node), self.codes[name]
        if stored is None or stream.stored is not None:
            return stream.part(k, pick)
        return (
            stored.round(stream.part(k, pick)) if is_elementwise(stored) else pick(self._quantized(name, node, k), 0.0)
        )

    def _stored_weight(self, name: str, stored: Stored | None) -> Any:
        """A constant as the chip has it; biases stay as they are, since their scale follows from the weights'."""
        w = self.graph.weights[name]
        if stored is None or self.plan.tensors[name].role == "bias":
            return w
        if name not in self.rounded:
            self.rounded[name] = stored.round(w.detach())
        return self.rounded[name]

    def _weight(self, node: Node) -> Tensor:
        return self.original[node.weight].detach().float()

    def _sum(self, node: Node, moments: Moments, y: Tensor, k: int) -> None:
        """Add one chunk to the moments."""
        w = self._weight(node)
        most = -(-max(self.settings.samples, 2 * moments.x.shape[1]) // self.images)
        where = positions(node, y, most, self.random)
        t = targets(node, y, where)
        other = self._other(node) if self.settings.residual else None
        if other is not None and self.floats[other[0]].chunks[k].shape == y.shape:

            def pick(x: Tensor, zero: float) -> Tensor:
                return targets(node, x, where)

            t = t + self.floats[other[0]].part(k, pick) - self._picked(*other, k, pick)
        x = self._picked(node.data, node, k, lambda x, zero: patches(node, x, w, where, zero))
        moments.add(x.float(), t)

    def _other(self, node: Node) -> tuple[str, Node] | None:
        """Where an addition alone reads this result: its other operand, if that is there already, and itself."""
        total = self.readers.only(node.output)
        if total is None or total.op != "Add":
            return None
        there = (i for i in total.inputs if i in self.codes and i != node.output and self.codes[i].chunks)
        return next(((i, total) for i in there), None)

    def _fit(self, node: Node, moments: Moments, out: Reconstructed) -> Node:
        """Weights, scales and bias of one operator; returns the node, with a bias where it had none."""
        plan, name = self.plan, node.weight
        w = self._weight(node)
        rows, bias = as_rows(node, w), bias_or_zero(self.graph, node).float()
        bias = bias.view(rows.shape[:2])
        takes = node.bias is not None
        h, c = moments.centred() if takes else moments.about(bias)
        if self.settings.ridge is not None:
            rows = gptq.corrected_weights(rows, h, c, self.settings.ridge)
        stored = plan[name]
        q, entries, inverted = gptq.round_rows(rows, h, weight_rows(plan, node, w), spread=self.settings.feedback)
        if moments.count < rows.shape[2]:
            few = f"{moments.count} positions for {rows.shape[2]} weights of one output"
            out.notes.append(f"warning: '{node.who}' is fitted to {few}: more images make it better")
        if not inverted:
            out.notes.append(f"the weight of '{node.who}' is rounded to the nearest code: its moments are singular")
        self.graph.weights[name] = self.rounded[name] = from_rows(node, q, w)
        scale = entries.view(stored.scale.shape).to(torch.float32)
        origin = f"{self.settings.name} over {moments.count} positions"
        out.tensors[name] = plan.tensors[name] = plan.tensors[name].with_(scale=scale, origin=origin)
        if takes:
            x, t = moments.means()
            node = with_bias(self.graph, node, (t - (q @ x.unsqueeze(2))[..., 0]).flatten())
        return node
