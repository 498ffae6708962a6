"""The statistic "importance": how much an error in each weight or activation changes the network's outputs.

To second order, errors d cost sum h d^2 / 2 plus mixed terms. h is the diagonal of the Fisher information of the
outputs, the mean over samples of squared gradients, see `rounding.fisher`; it needs no labels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import Batch
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_linear, places
from chipfit.ranges.search import Sample
from chipfit.registry import register
from chipfit.rounding.fisher import first_samples, gradients, split_float_readers
from chipfit.rounding.moments import as_rows, from_rows, patches, targets

#: share of the mean squared gradient that is added to every activation's, so that few images alone do not decide
_FLOOR = 0.3
_BINS = 2048
#: numbers held at once
CHUNK = 1 << 24


@register("statistic", "importance")
def importance(
    graph: Graph,
    edges: Collection[tuple[str, str]],
    names: Collection[str],
    stats: Mapping[str, TensorStats],
    batches: Iterable[Batch],
    seed: int = 0,
) -> dict[str, Tensor | Sample]:
    """Return squared gradients of weights, and of activations as histograms, from one forward and backward pass.

    Args:
        edges: (value, node) pairs where the node reads the float value, as in `Plan.float_edges`.
        names: weights of linear operators, and activations; others are ignored.
        stats: calibration statistics of the float network, for the ranges of activations.
        batches: of graph inputs; the first `fisher.IMAGES` samples are used.

    Returns:
        For a weight: the sum over samples of (dL/dw)^2, in the weight's shape, divided by its mean. For an activation:
        a histogram over its range of (dL/dx)^2 + 0.3 times its mean, without exact zeros, which every grid contains.
        Tensors on which no output depends are missing.
    """
    spread = [n for n in names if n in stats and stats[n].low < stats[n].high]
    split, codes = split_float_readers(graph, edges, spread)
    linear = (n for n in split.nodes if is_linear(split, n) and n.weight in names and not split.is_weight(n.data))
    readers = [n for n in linear if (n.weight, n.name) not in edges]
    weights = {n.weight: torch.zeros_like(as_rows(n, graph.weights[n.weight].detach().float())) for n in readers}
    counts, random = {n: torch.zeros(_BINS) for n in spread}, torch.Generator().manual_seed(seed)
    wanted = {*codes.values(), *(n.output for n in readers)}
    for batch in first_samples(batches) if wanted else ():
        values, found = gradients(split, batch, wanted, {n.data for n in readers}, random)
        for n in (n for n in readers if n.output in found):
            weights[n.weight] += _squares(n, values[n.data], found[n.output], graph.weights[n.weight])
        for name in (name for name in spread if codes[name] in found):
            x, weight = values[codes[name]].flatten(), found[codes[name]].flatten().square()
            weight = (weight + _FLOOR * weight.mean()) * (x != 0)
            begin, width = stats[name].low, (stats[name].high - stats[name].low) / _BINS
            place = torch.sub(x, begin).div_(width).clamp_(0, _BINS - 1)
            counts[name] += torch.bincount(place.to(torch.int32), weight, _BINS)  # 7 times faster than histogram
    out: dict[str, Tensor | Sample] = {}
    for n in (n for n in readers if bool(weights[n.weight].any())):
        out[n.weight] = from_rows(n, weights[n.weight] / weights[n.weight].mean(), graph.weights[n.weight])
    for name in (name for name in spread if bool(counts[name].any())):
        ends = stats[name].low, stats[name].high
        low, high = (torch.tensor([v], dtype=torch.float64) for v in ends)
        edge = torch.linspace(*ends, _BINS + 1)[None]
        out[name] = Sample((edge[:, 1:] + edge[:, :-1]) / 2, counts[name][None], low, high, edge)
    return out


def _squares(node: Node, x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """Return the squared gradients of W: sum over samples n of (sum over positions p of g[n, p] x[n, p]')^2."""
    where, shape = torch.arange(places(node, g.shape)), as_rows(node, w).shape
    at_once = max(1, CHUNK // max(shape.numel(), shape[0] * shape[2] * len(where)))
    out = torch.zeros(shape)
    for some, slopes in zip(x.split(at_once), g.split(at_once), strict=True):
        reads = patches(node, some, w, where).unflatten(2, (len(some), -1))  # [g, K, n, P]
        made = targets(node, slopes, where).unflatten(2, (len(some), -1))  # [g, O/g, n, P]
        out += (made.transpose(1, 2) @ reads.permute(0, 2, 3, 1)).square_().sum(1)
    return out
