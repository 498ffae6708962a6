"""The loss in the network's outputs of each number of bits of each tensor, from one forward and one backward pass.

To second order, a small error d in a value costs d' F d / 2, where F, the Fisher information of the outputs, is the
mean of g g' over gradients g, see `rounding.fisher`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from chipfit.calibration.data import Batch, empty_data_error
from chipfit.decide.scales import qparams_of_range
from chipfit.decision import Decision
from chipfit.graph.ir import Node
from chipfit.graph.linear import is_linear, places
from chipfit.graph.placement import placed
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.ranges import choose
from chipfit.rounding.fisher import IMAGES, first_samples, gradients, split_float_readers
from chipfit.rounding.gptq_solver import round_rows, weight_rows
from chipfit.rounding.method import default_method, fits_weights
from chipfit.rounding.moments import Moments, as_rows, patches, positions, targets

#: output positions per operator
SAMPLES = 4096

#: tensor -> width in bits -> loss, in nats for class scores
Losses = dict[str, dict[int, float]]


@dataclass(frozen=True)
class RoundingModel:
    """The way in which tensors will be rounded, on which their losses depend."""

    fitted: bool = False  #: weights are rounded by a method that fits them to their inputs
    means: bool = True  #: no correction removes the mean error of rounded weights

    @classmethod
    def of(cls, d: Decision, corrections: Collection[str]) -> RoundingModel:
        """Return how tensors are rounded where a decision is followed by these corrections."""
        method = d.settings.rounding or default_method([1], "mse")  # what few bits ask for
        fitted, means = "rounding" in corrections and fits_weights(method), not corrections
        return cls(fitted, means)


NEAREST = RoundingModel()


@dataclass
class OperatorStatistics:
    """The sums collected for one linear operator: moments of its inputs, squared gradients of each output channel.

    What changes at random from position to position meets the gradients one by one, a mean error their sum.
    """

    node: Node
    weight: Tensor  #: float32
    rows: Tensor  #: the weight as [g, O/g, K]
    moments: Moments
    gradients: Tensor  #: sum over positions of squares, [g, O/g]
    together: Tensor  #: sum over samples of squares of sums over positions, [g, O/g]

    @classmethod
    def of(cls, node: Node, w: Tensor) -> OperatorStatistics:
        """Return empty sums for an operator with this weight."""
        rows = as_rows(node, w)
        return cls(node, w, rows, Moments.empty(rows), *rows.new_zeros(2, *rows.shape[:2]))

    def add(self, x: Tensor, y: Tensor, g: Tensor, random: torch.Generator) -> None:
        """Add inputs, outputs and gradients of the outputs of one batch."""
        where = positions(self.node, y, -(-SAMPLES // IMAGES), random)
        self.moments.add(patches(self.node, x, self.weight, where), targets(self.node, y, where))
        everywhere = torch.arange(places(self.node, g.shape), device=g.device)
        t = targets(self.node, g, everywhere)
        self.gradients += t.square().sum(2)
        self.together += t.view(*t.shape[:2], -1, len(everywhere)).sum(3).square().sum(2)


def losses(
    d: Decision,
    plan: Plan,
    batches: Iterable[Batch],
    widths: Mapping[str, Collection[int]],
    rounding: RoundingModel = NEAREST,
) -> Losses:
    """Return the loss that rounding each tensor alone to so many bits adds to the outputs.

    Args:
        d: the decision that the plan follows, with statistics for ranges at other widths.
        plan: how tensors are stored; other widths have grids of the same kind.
        batches: of graph inputs, of which the first `IMAGES` samples are taken.
        widths: tensors, weights of linear operators or activations, and the bits to try.
        rounding: of what the losses are.

    Raises:
        DataError: no batch at all.
    """
    graph, random = d.graph, torch.Generator().manual_seed(d.seed)
    table = {k: w.detach() for k, w in placed(graph).weights.items()}
    linear = (n for n in graph.nodes if is_linear(graph, n) and n.weight in widths and not graph.is_weight(n.data))
    operators = [OperatorStatistics.of(n, table[n.weight].float()) for n in linear]
    grids = {name: _at_widths(d, plan[name], name, bits) for name, bits in widths.items() if name not in table}
    out: Losses = {name: dict.fromkeys(bits, 0.0) for name, bits in widths.items()}
    split, codes = split_float_readers(graph, plan.float_edges, grids)
    wanted, inputs = {s.node.output for s in operators}, {s.node.data for s in operators}
    there, terms, count = placed(split), _Terms(out), 0

    def weigh_rounding(name: str, x: Tensor, g: Tensor) -> None:
        for b, stored in grids[name].items():
            terms.add(name, b, (g * (stored.round(x) - x)).square().sum())

    consumers = {codes[name]: partial(weigh_rounding, name) for name in grids}
    for batch in first_samples(batches):
        count += max(len(x) if x.dim() else 1 for x in batch)
        values, found = gradients(split, batch, wanted, inputs, random, there, consumers)
        for s in (s for s in operators if s.node.output in found):
            s.add(values[s.node.data], values[s.node.output], found[s.node.output], random)
        terms.read()
    if not count:
        raise empty_data_error()
    for s in (s for s in operators if s.moments.count):
        name, mean, h = s.node.weight, s.moments.means()[0], s.moments.centred()[0]
        for b in widths[name]:
            e = _weight_error(d, plan, s, h, b, rounding.fitted)
            terms.add(name, b, (((e @ h) * e).sum(2) * s.gradients).sum())
            if rounding.means:
                terms.add(name, b, ((e @ mean.unsqueeze(2))[..., 0].square() * s.together).sum())
    terms.read()
    return {name: {b: v / count for b, v in row.items()} for name, row in out.items()}


class _Terms:
    """Terms d' F d of losses, which are read from the device together."""

    def __init__(self, losses: Losses) -> None:
        self.losses, self.waiting = losses, list[tuple[str, int, Tensor]]()

    def add(self, name: str, bits: int, term: Tensor) -> None:
        """Add a term, [], of the loss of a tensor with so many bits."""
        self.waiting.append((name, bits, term))

    def read(self) -> None:
        """Add the terms to the losses."""
        numbers = torch.stack([term for *_, term in self.waiting]).tolist() if self.waiting else []
        for (name, bits, _), number in zip(self.waiting, numbers, strict=True):
            self.losses[name][bits] += 0.5 * number
        self.waiting.clear()


def _weight_error(d: Decision, plan: Plan, s: OperatorStatistics, h: Tensor, bits: int, fitted: bool) -> Tensor:
    """Return q - w, [g, O/g, K], for weights rounded to nearest with so many bits.

    Fitted weights have the scales with the least error in the outputs. Their fitted values would lose less, but at all
    widths, so that the choice of widths is not affected.
    """
    w, name, stored = s.weight, s.node.weight, plan[s.node.weight]
    grid = at_width(stored.grid, bits)
    blocks = stored.grid.per == "block"  # scales per block are not fitted
    if fitted and not blocks:
        free = replace(plan, tensors={**plan.tensors, name: plan.tensors[name].with_(grid=grid)}, limits=())
        q, *_ = round_rows(s.rows, h, weight_rows(free, s.node, w), feedback=False, candidates=(0.89, 1.0, 1.15))
        return q - s.rows
    if bits != stored.grid.bits:
        size = w.shape[stored.axis or 0] // stored.scale.shape[stored.axis or 0] if blocks else None
        extras = d.stats[name].extras if name in d.stats else {}
        found = choose(
            d.graph.weights[name].detach().float(),
            grid,
            rule=d.rules.weight_rule,
            axis=stored.axis,
            block=size,
            extras=extras,
        )
        stored = replace(stored, grid=grid, scale=found.scale, zero_point=found.zero_point)
    return as_rows(s.node, stored.round(w)) - s.rows


def at_width(grid: Grid, bits: int) -> Grid:
    """Return a grid of the same kind with other bits."""
    narrow = grid.qmin == -grid.qmax
    half = max(1 << bits - 1, 1 + narrow)  # one bit of a symmetric grid stands for the signs
    low, high = (narrow - half, half - 1) if grid.signed else (0, 2 * half - 1)
    return replace(grid, bits=bits, qmin=low, qmax=high)


def _at_widths(d: Decision, stored: Stored, name: str, widths: Iterable[int]) -> dict[int, Stored]:
    """Return how an activation is stored with each number of bits, with a range of its own if its values are known."""
    out, wanted = dict.fromkeys(widths, stored), d.assignment.tensors.get(name)  # None in a loaded result
    ends = None if wanted is None else wanted.range
    for bits in out if name in d.stats or ends else ():
        if bits != stored.grid.bits:
            grid = at_width(stored.grid, bits)
            q = qparams_of_range(ends, grid) if ends else choose(d.stats[name], grid, rule=d.rules.rule)
            out[bits] = replace(stored, grid=grid, scale=q.scale, zero_point=q.zero_point)
    return out
