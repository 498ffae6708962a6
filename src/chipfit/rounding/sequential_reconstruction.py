"""Sequential reconstruction: one pass over the network with a float and a quantized copy of the calibration samples.

Every node runs once on each copy. Weights, scale and bias of a linear operator are fitted in between, so that its
quantized inputs reproduce its float outputs: each operator repairs the errors of those before it. Scales of
activations are the plan's.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from chipfit.calibration.data import Batch
from chipfit.engine.kernels import execute
from chipfit.engine.run import done_after
from chipfit.errors import DataError, Interrupted
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear, with_bias
from chipfit.graph.placement import placed
from chipfit.passes.rewriting import Readers
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import fake_quantize
from chipfit.quantizers.stored import Stored
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.registry import option
from chipfit.rounding import gptq_solver
from chipfit.rounding.gptq_solver import scale_bounds, scale_is_allowed, weight_rows
from chipfit.rounding.moments import Moments, as_rows, from_rows, patches, positions, targets
from chipfit.rounding.outputs import is_scores
from chipfit.rounding.streams import MEMORY, Pick, SampleStreams, Stream

#: shares of the range of class scores on which its ends are tried
_LOWS, _HIGHS = torch.linspace(0, 1, 21).tolist(), torch.linspace(0.5, 1, 11).tolist()


@dataclass(frozen=True, kw_only=True)
class GptqSettings:
    """The options of a sequential reconstruction."""

    name: ClassVar[str] = "gptq"  #: of the method, in the origins of weights
    feedback: ClassVar[bool] = True  #: the error of a column moves to those behind it; False: nearest quantized values

    #: at least twice the weights of one output are used
    samples: int = option("rounding_samples", 4096, "output positions per operator, over all images")
    ridge: float | None = option("correct_weights", 0.1, "ridge for moving weights before rounding; None: they stay")
    residual: bool = option("repair_residual", True, "an operator before an addition repairs its other operand too")


def why_not_fitted(graph: Graph, plan: Plan, readers: Readers, node: Node) -> str | None:
    """Return why the weight of a node cannot be fitted: None if it can, "" if there is no quantized weight."""
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


def range_of_scores(stored: Stored, wanted: Iterable[Tensor], got: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of class scores [N, C] with the least KL(softmax(wanted) || softmax(rounded)).

    Low scores may be clipped, the highest may not.
    """
    p, x = (torch.cat(list(chunks)).cpu() for chunks in (wanted, got))  # the search has hundreds of small steps
    p = p.log_softmax(1)
    low, high = (float(v) for v in torch.aminmax(x))

    def loss(q: QParams) -> float:
        rounded = fake_quantize(x, q.scale, q.zero_point, stored.grid).log_softmax(1)
        return float((p.exp() * (p - rounded)).sum())

    tries = [from_min_max(low * a, high * b, stored.grid) for a in _LOWS for b in _HIGHS]
    best = min(tries, key=loss)
    return best.scale, best.zero_point


def first_names(names: Collection[str], most: int = 3) -> str:
    """Return the first names in quotes, and the number of the others.

    >>> first_names(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    return ", ".join(f"'{name}'" for name in [*names][:most]) + f" and {len(names) - most} more" * (len(names) > most)


class SequentialReconstruction(SampleStreams):
    """A pass over a network that rounds the weights of all linear operators that a plan quantizes.

    Args:
        graph: the network with float weights; it stays as it is.
        searched: class scores among these get a range of their own where the platform leaves it free.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        settings: GptqSettings,
        searched: Collection[str],
        seed: int,
        memory: int = MEMORY,
    ) -> None:
        super().__init__(replace(plan, tensors=dict(plan.tensors)), memory)
        self.start, self.graph, self.settings, self.readers = graph, placed(graph).copy(), settings, Readers(graph)
        self.original = dict(self.graph.weights)  #: those of `graph` are replaced
        self.tensors: dict[str, TensorPlan] = {}  #: weights and activations with new scales
        self.notes: list[str] = []
        self._few: dict[str, str] = {}  #: layers with fewer positions than weights of one output, and how many
        self.rounded: dict[str, Any] = {}  #: weights as the chip stores them
        self.random = torch.Generator().manual_seed(seed)
        self.samples = 0
        free = {n for n in graph.outputs if n in searched and plan.quantized(n) and n not in plan.zeros}
        #: outputs whose range is still to be chosen; nothing reads their quantized values
        self.open = {n for n in free if scale_bounds(plan, n) is not None and not self.readers.of(n)}
        self.raw |= self.open

    @torch.inference_mode()
    def run(self, batches: Iterable[Batch]) -> Self:
        """Round the weights of all operators; after Ctrl-C, of those done until then. Then `graph` is on the CPU.

        Args:
            batches: of graph inputs; they are read once.

        Raises:
            DataError: there is no batch.
        """
        for inputs in self.read_inputs(self.graph, batches):
            self.samples += max((len(x) if x.dim() else 0 for x in inputs), default=0)
        if not self.samples:
            raise DataError("There is no calibration data", allowed="one batch at least")
        for k, (node, done) in enumerate(zip(list(self.graph.nodes), done_after(self.graph), strict=True)):
            try:
                self.step(k, node)
            except KeyboardInterrupt:
                rest = f"'{node.display_name}' and what follows it take their nearest codes"
                self.notes.append(f"{Interrupted.NOTE}: {rest}")
                break
            self.free(done)
        if self._few:
            few = next(iter(self._few.values()))
            where = f"weights are fitted to few positions in {first_names(self._few)}"
            self.notes.append(f"warning: {where} ({few}): more images improve the fit")
        new = {name: w.cpu() for name, w in self.graph.weights.items() if w is not self.original.get(name)}
        self.graph = replace(self.start, weights={**self.start.weights, **new}, trainable=self.graph.trainable)
        return self

    def step(self, index: int, node: Node) -> None:
        """Run one node on both streams, and fit its weight in between."""
        for o in node.outputs:
            self.floats[o] = Stream(self.memory, expected=self.chunks)
            self.quantized[o] = self.quantized_stream(o, self.chunks)
        why = why_not_fitted(self.graph, self.plan, self.readers, node)
        moments = None if why is not None else Moments.empty(as_rows(node, self._weight(node)))
        for k in range(self.chunks):
            results = execute(node, [self._float(i, k) for i in node.inputs])
            if moments is not None:
                self._add_to_moments(node, moments, results[0], k)
            for o, y in zip(node.outputs, results, strict=False):
                self.floats[o].append(y)
        if moments is not None:
            node = self.graph.nodes[index] = self.fit(node, moments)
        elif why:
            self.notes.append(f"the weight of '{node.display_name}' is rounded to the nearest code: {why}")
        for k in range(self.chunks):
            results = execute(node, [self._quantized(i, node, k) for i in node.inputs])
            for o, y in zip(node.outputs, results, strict=False):
                self.quantized[o].append(y)
        for o in self.open.intersection(node.outputs):
            self._choose_score_range(o)

    def fit(self, node: Node, moments: Moments) -> Node:
        """Fit weight, scale and bias of one operator; returns the node with its new bias."""
        plan, name, settings = self.plan, node.weight, self.settings
        w, stored = self._weight(node), plan[name]
        rows = as_rows(node, w)
        h, c = moments.with_fixed_bias(rows.new_zeros(rows.shape[:2])) if node.bias is None else moments.centred()
        if settings.ridge is not None:
            rows = gptq_solver.corrected_weights(rows, h, c, settings.ridge)
        q, entries, inverted = gptq_solver.round_rows(rows, h, weight_rows(plan, node, w), feedback=settings.feedback)
        if moments.count < rows.shape[2]:
            self._few[node.display_name] = f"{moments.count} positions for {rows.shape[2]} weights of one output"
        if not inverted:
            why = "its moments are singular"
            self.notes.append(f"the weight of '{node.display_name}' is rounded to the nearest code: {why}")
        if stored.grid.pair_limit is not None:  # whose scale stays
            q = as_rows(node, stored.round(from_rows(node, q, w)))
        self.graph.weights[name] = self.rounded[name] = from_rows(node, q, w)
        origin = f"{settings.name} over {moments.count} positions"
        self._replan(name, origin, scale=entries.view(stored.scale.shape).to(torch.float32).cpu())
        if node.bias is None:
            return node
        x, t = moments.means()
        return with_bias(self.graph, node, (t - (q @ x.unsqueeze(2))[..., 0]).flatten())

    def _replan(self, name: str, origin: str, **numbers: Tensor) -> None:
        """Give a tensor of the plan another scale or zero point."""
        self.tensors[name] = self.plan.tensors[name] = self.plan.tensors[name].with_(origin=origin, **numbers)

    def _choose_score_range(self, name: str) -> None:
        """Choose the range of class scores [N, C] below 8 bits where the platform leaves it free."""
        stored, x = self.plan[name], self.quantized[name]
        if stored.grid.table is not None or stored.grid.bits >= 8 or not is_scores(self.floats[name][0]):
            return
        scale, zero = range_of_scores(stored, self.floats[name], x)
        if scale_is_allowed(self.plan, name, scale):
            self._replan(name, "least divergence of the class probabilities", scale=scale, zero_point=zero)

    def _float(self, name: str | None, k: int) -> Any:
        if name is None:
            return None
        return self.floats[name][k] if name in self.floats else self.original[name]

    def _quantized(self, name: str | None, node: Node, k: int) -> Any:
        """Return an operand of a node as the chip has it, for one chunk; biases stay in float.

        The scale of a bias follows from that of the weights.
        """
        if name is None:
            return None
        stored = self._stored_for(name, node)
        if name in self.quantized:
            x = self.quantized[name][k]
            return stored.round(x) if stored is not None and self.quantized[name].stored is None else x
        w = self.graph.weights[name]
        if stored is None or self.plan.tensors[name].role == "bias":
            return w
        if name not in self.rounded:
            self.rounded[name] = stored.round(w.detach())
        return self.rounded[name]

    def _stored_for(self, name: str, node: Node) -> Stored | None:
        return None if (name, node.name) in self.plan.float_edges else self.plan.stored(name)

    def _selected(self, name: str, node: Node, k: int, pick: Pick) -> Tensor:
        """Return the numbers that `pick` takes of a quantized operand."""
        stream = self.quantized[name]
        if stream.stored is None and self._stored_for(name, node) is not None:  # kept in float for another reader
            return pick(self._quantized(name, node, k), 0.0)
        return stream.part(k, pick)

    def _weight(self, node: Node) -> Tensor:
        return self.original[node.weight].detach().float()

    def _add_to_moments(self, node: Node, moments: Moments, y: Tensor, k: int) -> None:
        """Add the inputs and the wanted outputs of one chunk, at positions drawn at random."""
        w = self._weight(node)
        most = -(-max(self.settings.samples, 2 * moments.x.shape[1]) // self.samples)
        where = positions(node, y, most, self.random)
        t = targets(node, y, where)
        other = self._other_operand(node) if self.settings.residual else None
        if other is not None and self.floats[other[0]].chunks[k].shape == y.shape:

            def pick(x: Tensor, zero: float) -> Tensor:
                return targets(node, x, where)

            t = t + self.floats[other[0]].part(k, pick) - self._selected(*other, k, pick)
        x = self._selected(node.data, node, k, lambda x, zero: patches(node, x, w, where, zero))
        moments.add(x.float(), t)

    def _other_operand(self, node: Node) -> tuple[str, Node] | None:
        """Return the other operand of the addition that alone reads an output, if it is known, and the addition."""
        total = self.readers.only(node.output)
        if total is None or total.op != "Add":
            return None
        known = (i for i in total.inputs if i in self.quantized and i != node.output and self.quantized[i].chunks)
        return next(((i, total) for i in known), None)
