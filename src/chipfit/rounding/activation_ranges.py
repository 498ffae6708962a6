"""Ranges of activations by the effect of their errors on the network's outputs, not by the errors alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import Batch
from chipfit.decide.assignment import FEW_BITS
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import fake_quantize
from chipfit.quantizers.stored import Stored
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import Sample, search
from chipfit.rounding.fisher import importance
from chipfit.rounding.gptq import scale_bounds, scale_is_allowed

#: shares of the range on which its ends are tried
_LOWS, _HIGHS = torch.linspace(0, 1, 21).tolist(), torch.linspace(0.5, 1, 11).tolist()


def range_of_scores(stored: Stored, wanted: Iterable[Tensor], got: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of class scores [N, C] with the least KL(softmax(wanted) || softmax(rounded)).

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


def free_low_bit_activations(plan: Plan) -> list[str]:
    """Return the activations of few bits whose range the platform leaves free."""
    found = (t.name for t in plan.tensors.values() if t.role == "activation" and t.stored is not None)
    few = (n for n in found if plan[n].grid.bits <= FEW_BITS and plan[n].grid.nearest and not plan[n].scale.dim())
    return [n for n in few if n not in plan.zeros and scale_bounds(plan, n) is not None]


def with_weighted_ranges(
    graph: Graph, plan: Plan, stats: Mapping[str, TensorStats], batches: Iterable[Batch], seed: int = 0
) -> Plan:
    """Return the plan with ranges of the least sum of (g^2 + 0.3 mean g^2) (Q(x) - x)^2 for activations of few bits.

    g is the gradient of the loss at labels drawn from the float network's own outputs; its square is the cost of an
    error to second order. The second term keeps the few samples from deciding alone.

    Args:
        stats: of the float network; activations that are not among them stay as they are.
        batches: of graph inputs, of which the first `fisher.IMAGES` samples are taken.
    """
    names = [n for n in free_low_bit_activations(plan) if n in stats and stats[n].low < stats[n].high]
    if not names:
        return plan
    for n, weighed in importance(graph, plan.float_edges, names, stats, batches, seed).items():
        assert isinstance(weighed, Sample)  # of an activation
        q = search(weighed, plan[n].grid, p=2.0)
        if scale_is_allowed(plan, n, q.scale[0]):
            origin = "least squared error weighed by squared gradients"
            new = plan.tensors[n].with_(scale=q.scale[0], zero_point=q.zero_point[0], origin=origin)
            plan = replace(plan, tensors={**plan.tensors, n: new})
    return plan
