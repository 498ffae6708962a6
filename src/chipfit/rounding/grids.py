"""The grid of class scores: what a softmax makes of them counts, not their squared error."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.stored import Stored
from chipfit.ranges.qparams import QParams, from_min_max

#: shares of the range on which its ends are tried
_LOWS, _HIGHS = torch.linspace(0, 1, 21).tolist(), torch.linspace(0.5, 1, 11).tolist()


def logits(stored: Stored, wanted: Iterable[Tensor], got: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
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
