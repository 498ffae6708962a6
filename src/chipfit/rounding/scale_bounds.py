"""Bounds between which the scale of a tensor may move while all other scales stay."""

from __future__ import annotations

import torch
from torch import Tensor

from chipfit.graph.ir import Node
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import shape_for
from chipfit.rounding.gptq import WeightRows
from chipfit.rounding.moments import as_rows

#: distance of solved scales from their bounds in log2, for two roundings to float32
_MARGIN = 4e-6


def weight_rows(plan: Plan, node: Node, w: Tensor) -> WeightRows:
    """Return how the weight `w` of `node` is stored, as rows, with the bounds of its scale."""
    stored = plan[node.weight]

    def spread(p: Tensor) -> Tensor:
        return as_rows(node, shape_for(p, w, stored.axis or 0).expand(w.shape))

    scale, zero = spread(stored.scale), spread(stored.zero_point)
    ids = spread(torch.arange(stored.scale.numel()).view(stored.scale.shape))
    bounds = scale_bounds(plan, node.weight)
    free = bounds is not None and bool((ids == ids[..., :1]).all())
    low, high = bounds if bounds is not None and free else (stored.scale.reshape(-1),) * 2
    return WeightRows(stored.grid, scale, zero, ids[..., 0] if free else None, low, high)


def scale_bounds(plan: Plan, name: str) -> tuple[Tensor, Tensor] | None:
    """Return the least and greatest value of each entry of a scale [entries] while all other scales stay.

    Returns:
        None if other tensors share this scale, or rules other than bounds hold for it.
    """
    tied = any(name in group for group in plan.ties)
    if tied or name in plan.fixed or any(name == weight for weight, _ in plan.sums):
        return None
    scale = plan[name].scale.reshape(-1)
    low = torch.full_like(scale, plan[name].grid.scale_min or torch.finfo(torch.float32).tiny)
    high = torch.full_like(scale, 2.0**100)
    for limit in plan.limits:
        exponents = dict(limit.terms)
        e = exponents.pop(name, 0)
        if not e or not all(plan.quantized(t) for t in exponents):
            continue
        rest = sum((x * torch.log2(plan[t].scale.double()) for t, x in exponents.items()), torch.zeros(()))
        ends = [(limit.low + _MARGIN - rest) / e, (limit.high - _MARGIN - rest) / e]
        below, above = ends if e > 0 else ends[::-1]
        per_entry = rest.dim() == 0 or rest.shape == scale.shape
        low = torch.maximum(low, torch.exp2(below if per_entry else below.max()).to(scale.dtype))
        high = torch.minimum(high, torch.exp2(above if per_entry else above.min()).to(scale.dtype))
    return torch.minimum(low, scale), torch.maximum(high, scale)


def scale_is_allowed(plan: Plan, name: str, scale: Tensor) -> bool:
    """Return whether a tensor may have this scale while all others stay."""
    bounds = scale_bounds(plan, name)
    return bounds is not None and bool(((scale >= bounds[0]) & (scale <= bounds[1])).all())
