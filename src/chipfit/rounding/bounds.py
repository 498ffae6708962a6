"""Between which bounds the scale of a weight may move without another tensor's having to."""

from __future__ import annotations

import torch
from torch import Tensor

from chipfit.graph.ir import Node
from chipfit.plan.record import Plan
from chipfit.rounding.fit import Rows
from chipfit.rounding.moments import as_rows

#: solved scales keep this much inside their bounds in log2: two roundings to float32
_MARGIN = 4e-6


def rows_of(plan: Plan, node: Node, w: Tensor) -> Rows:
    """How the weight `w` of `node` is stored, with what its scale may become."""
    stored = plan[node.weight]

    def spread(p: Tensor) -> Tensor:
        shape = [1] * w.dim()
        if p.dim():
            shape[stored.axis or 0] = -1
        return as_rows(node, p.view(shape).expand(w.shape))

    scale, zero = spread(stored.scale), spread(stored.zero_point)
    ids = spread(torch.arange(stored.scale.numel()).view(stored.scale.shape))
    free = not _held(plan, node.weight) and bool((ids == ids[..., :1]).all())
    flat = stored.scale.reshape(-1)
    low, high = _limits(plan, node.weight, flat) if free else (flat, flat)
    if stored.grid.scale_min is not None:
        low = low.clamp_min(stored.grid.scale_min)
    return Rows(stored.grid, scale, zero, ids[..., 0] if free else None, low, high)


def _held(plan: Plan, name: str) -> bool:
    """Others have its scale, or its scale has rules beyond bounds."""
    tied = any(name in group for group in plan.ties)
    return tied or name in plan.fixed or any(name == weight for weight, _ in plan.sums)


def _limits(plan: Plan, name: str, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest value of each entry of a scale [entries] while all other scales stay."""
    low = torch.full_like(scale, torch.finfo(torch.float32).tiny)
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
