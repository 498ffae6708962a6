"""What each width of each tensor costs in the network's outputs, from one forward and one backward pass.

To second order, a small error d in a value costs d' F d / 2, where F, the Fisher information of the outputs, is the
mean of g g' over gradients g of the loss at labels that are drawn from the network's own outputs: class scores give
labels by their softmax, other outputs are taken for means of normal distributions of their own spread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import no_data
from chipfit.engine.run import run
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.ranges import choose
from chipfit.rounding import fit
from chipfit.rounding.bounds import rows_of
from chipfit.rounding.moments import Moments, as_rows, patches, positions, targets

#: images that are enough for a ranking, and how many go through the network at a time
IMAGES, CHUNK = 128, 32
#: output positions per operator
SAMPLES = 4096

#: tensor -> width in bits -> loss, in nats for class scores
Losses = dict[str, dict[int, float]]


@dataclass
class _Seen:
    """Of one linear operator: moments of its inputs, and squared gradients of each output channel, summed."""

    node: Node
    rows: Tensor  #: the weight, [g, O/g, K]
    moments: Moments
    gradients: Tensor  #: [g, O/g]

    def add(self, x: Tensor, y: Tensor, g: Tensor, w: Tensor, random: torch.Generator) -> None:
        """Inputs, outputs, and the gradients of the outputs, of one batch."""
        where = positions(self.node, y, -(-SAMPLES // IMAGES), random)
        self.moments.add(patches(self.node, x, w, where), targets(self.node, y, where))
        everywhere = torch.arange(g[0, 0].numel() if self.node.op != "Linear" else g[0].numel() // g.shape[-1])
        self.gradients += targets(self.node, g, everywhere).square().sum(2)


def losses(
    graph: Graph,
    plan: Plan,
    batches: Iterable[Sequence[Tensor]],
    widths: Mapping[str, Collection[int]],
    stats: Mapping[str, TensorStats],
    seed: int = 0,
) -> Losses:
    """The loss that rounding each tensor alone to so many bits adds to the outputs.

    Args:
        graph, plan: the float network, and how its tensors are stored; other widths have grids of the same kind.
        batches: of graph inputs, of which the first `IMAGES` samples are taken.
        widths: tensors, weights of linear operators or activations, and the bits to try.
        stats: of activations, for their ranges at other widths.

    Raises:
        DataError: no batch at all.
    """
    random = torch.Generator().manual_seed(seed)
    table = {k: w.detach() for k, w in graph.weights.items()}
    seen = []
    for n in graph.nodes:
        if is_linear(graph, n) and n.weight in widths and not graph.is_weight(n.data):
            rows = as_rows(n, table[n.weight].float())
            seen.append(_Seen(n, rows, Moments.of(rows), rows.new_zeros(rows.shape[:2])))
    grids = {
        name: {b: _activation(plan[name], b, stats.get(name)) for b in bits}
        for name, bits in widths.items()
        if name not in table
    }
    out: Losses = {name: dict.fromkeys(bits, 0.0) for name, bits in widths.items()}
    count = 0
    for batch in few(batches):
        count += max(len(x) if x.dim() else 1 for x in batch)
        outputs = {s.node.output for s in seen}
        values, gradients = _backward(graph, batch, outputs | grids.keys(), {s.node.data for s in seen}, random)
        for s in seen:
            if s.node.output in gradients:
                y, g = values[s.node.output], gradients[s.node.output]
                s.add(values[s.node.data], y, g, table[s.node.weight].float(), random)
        for name, choices in grids.items():
            if name in gradients:
                x, g = values[name], gradients[name]
                for b, stored in choices.items():
                    out[name][b] += 0.5 * float((g * (stored.round(x) - x)).square().sum())
    if not count:
        raise no_data()
    for s in seen:
        name = s.node.weight
        if s.moments.count:
            h, _ = s.moments.centred()
            for b in widths[name]:
                error = _weight_error(plan, s, table[name].float(), h, b)
                out[name][b] += 0.5 * float((error * s.gradients).sum())
    return {name: {b: v / count for b, v in row.items()} for name, row in out.items()}


def _weight_error(plan: Plan, s: _Seen, w: Tensor, h: Tensor, bits: int) -> Tensor:
    """(q - w) H (q - w)' of every row, [g, O/g], for weights that are rounded to the nearest of so many bits.

    Better rounding loses less, but of every width alike: it leads to the same choice.
    """
    name = s.node.weight
    there = plan.tensors[name].with_(grid=at_width(plan[name].grid, bits))
    free = replace(plan, tensors={**plan.tensors, name: there}, limits=())
    q, *_ = fit.rounded(s.rows, h, rows_of(free, s.node, w), spread=False, candidates=(0.89, 1.0, 1.15))
    d = q - s.rows
    return ((d @ h) * d).sum(2)


def at_width(grid: Grid, bits: int) -> Grid:
    """A grid of the same kind with codes of another width."""
    narrow, half = grid.qmin == -grid.qmax, 1 << bits - 1
    low, high = (narrow - half, half - 1) if grid.signed else (0, 2 * half - 1)
    return replace(grid, bits=bits, qmin=low, qmax=high)


def _activation(stored: Stored, bits: int, stats: TensorStats | None) -> Stored:
    """An activation at another width, with the range that suits it."""
    if bits == stored.grid.bits or stats is None:
        return stored
    grid = at_width(stored.grid, bits)
    q = choose(stats, grid)
    return stored.with_(grid=grid, scale=q.scale, zero_point=q.zero_point)


def few(batches: Iterable[Sequence[Tensor]]) -> Iterable[list[Tensor]]:
    """The first `IMAGES` samples, in chunks."""
    left = IMAGES
    for batch in batches:
        sizes = {len(x) if x.dim() else 0 for x in batch}
        if len(sizes) > 1 or 0 in sizes:
            yield list(batch)
            left -= 1
        else:
            for parts in zip(*(x[:left].split(CHUNK) for x in batch), strict=True):
                yield list(parts)
            left -= sizes.pop()
        if left <= 0:
            return


def _backward(
    graph: Graph, batch: Sequence[Tensor], wanted: Collection[str], besides: Collection[str], random: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values, of `wanted` and `besides`, and the gradients of the sampled loss for those that outputs depend on."""
    kept: dict[str, Tensor] = {}

    def watch(name: str, x: Any) -> Any:
        if name in wanted and isinstance(x, Tensor) and x.is_floating_point():
            x = kept[name] = x if x.requires_grad else x.detach().clone().requires_grad_()
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
