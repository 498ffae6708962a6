"""Grids of activations from what the quantized stream brings, counted by what its readers make of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.histogram import Histogram
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import channel_axis, in_groups, is_linear
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.stored import Stored
from chipfit.ranges import Rule, choose
from chipfit.ranges.qparams import QParams, from_min_max

#: scale and zero point
QNumbers = tuple[Tensor, Tensor]
#: values of a chunk that are counted
SAMPLE = 30_000
#: shares of the range on which the logits' ends are tried
_LOWS, _HIGHS = torch.linspace(0, 1, 21).tolist(), torch.linspace(0.5, 1, 11).tolist()


def gains(graph: Graph, readers: Iterable[Node], weights: dict[str, Tensor]) -> Tensor | None:
    """What linear readers make of an error in each channel: the sum of squared weights that read it, [C].

    None where no linear operator reads it along one axis of channels.
    """
    total, axes = None, set()
    for n in readers:
        if is_linear(graph, n) and not graph.is_weight(n.data):
            w = in_groups(n, weights[n.weight].detach().float())  # [g, O/g, I/g, *kernel]
            part = w.square().flatten(3).sum(3).sum(1) if w.dim() > 3 else w.square().sum(1)
            axes.add(channel_axis(n))
            total = part.flatten() if total is None else total + part.flatten()
    return total if len(axes) == 1 else None


def found(name: str, grid: Grid, chunks: Iterable[Tensor], gain: Tensor | None, axis: int, rule: Rule) -> QNumbers:
    """Scale and zero point of an activation by a range rule over its stream.

    Args:
        chunks: the values before they are rounded.
        gain: of each channel along `axis`, see `gains`.
    """
    stats, histogram = TensorStats(name), Histogram()
    for x in chunks:
        step = -(-x.numel() // SAMPLE) | 1  # odd: images have even widths
        low, high = (float(v) for v in torch.aminmax(x))
        stats.low, stats.high = min(stats.low, low), max(stats.high, high)
        counted = None
        if gain is not None and gain.numel() == x.shape[axis]:
            rows = x.movedim(axis, -1).reshape(-1, gain.numel())[::step]  # all channels of some positions
            counted, values = gain.expand_as(rows).reshape(-1), rows.reshape(-1)
        else:
            values = x.reshape(-1)[::step]
        stats.batches += 1
        histogram.add(values.float(), max(-low, high), counted)
    stats.histogram, stats.smooth_low, stats.smooth_high = histogram, stats.low, stats.high
    q = choose(stats, grid, rule=rule)
    return q.scale, q.zero_point


def logits(stored: Stored, wanted: Iterable[Tensor], got: Iterable[Tensor]) -> QNumbers:
    """Scale and zero point of class scores [N, C] with the least KL(softmax(wanted) || softmax(rounded)).

    Low scores may be clipped, the highest may not.
    """
    p, x = torch.cat(list(wanted)).log_softmax(1), torch.cat(list(got))
    low, high = (float(v) for v in torch.aminmax(x))

    def loss(q: QParams) -> float:
        rounded = fake_quantize(x, q.scale, q.zero_point, stored.grid).log_softmax(1)
        return float((p.exp() * (p - rounded)).sum())

    tries = [from_min_max(low * a, high * b, stored.grid) for a in _LOWS for b in _HIGHS]
    best = min(tries, key=loss)
    return best.scale, best.zero_point


def is_scores(x: Tensor, grid: Grid) -> bool:
    """Scores of classes, on a grid of few codes."""
    return x.dim() == 2 and x.shape[1] > 1 and grid.table is None and grid.bits < 8
