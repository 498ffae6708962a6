"""Range rules: which part of a tensor's values a grid covers. One rule a file; `choose` applies one by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges.qparams import QParams
from chipfit.ranges.search import Sample
from chipfit.registry import lookup

if TYPE_CHECKING:
    from chipfit.calibration.collect import TensorStats

#: names of the same formulas elsewhere
ALIASES = {
    "NOCLIPPING": "no_clipping", "MSE": "mse", "MAE": "mae", "LP": "lp", "KL": "kl",
    "MinMaxObserver": "no_clipping", "MSEObserver": "mse", "LPNormObserver": "lp", "KLDObserver": "kl",
    "QuantileObserver": "percentile", "minmax": "no_clipping",
}  # fmt: skip

#: columns of a weight matrix that a search looks at; the extremes always come from all of them
_COLUMNS = {True: 256, False: 4096}


def choose(
    source: TensorStats | torch.Tensor, grid: Grid, *, rule: str = "mse", axis: int | None = None, z_threshold: float | None = None,
    **settings: Any,
) -> QParams:  # fmt: skip
    """Scale and zero point of one tensor by a named rule.

    Args:
        source: calibration statistics, or the tensor itself.
        grid: the codes to place.
        rule: a registered name, or one of the predecessors' names in `ALIASES`.
        axis: channel axis for one range per channel; None for one range.
        z_threshold: drop histogram bins further than this many standard deviations from the mean first.
        settings: fields of the rule.

    Raises:
        UnknownNameError: no such rule.
    """
    sample = _of_tensor(source, axis, grid.bits >= 8) if isinstance(source, torch.Tensor) else _of_stats(source, z_threshold)
    q = lookup("range", ALIASES.get(rule, rule))(**settings)(sample, grid)
    return QParams(q.scale[0], q.zero_point[0]) if axis is None else q


def _of_tensor(x: torch.Tensor, axis: int | None, fine: bool) -> Sample:
    rows = x.detach().float().reshape(1, -1) if axis is None else x.detach().float().movedim(axis, 0).reshape(x.shape[axis], -1)
    low, high = torch.aminmax(rows, dim=1)
    limit = _COLUMNS[fine] if axis is not None else 1 << 16
    step = -(-rows.shape[1] // limit)
    return Sample(rows[:, ::step], None, low.double(), high.double())


def _of_stats(stats: TensorStats, z_threshold: float | None) -> Sample:
    low, high = torch.tensor([stats.low], dtype=torch.float64), torch.tensor([stats.high], dtype=torch.float64)
    if stats.histogram is None:
        ends = torch.tensor([[stats.low, stats.high]], dtype=torch.float32)
        return Sample(ends, None, low, high)
    centers, counts = stats.histogram.centers, stats.histogram.counts
    if z_threshold is not None:
        from chipfit.calibration.histogram import without_outliers

        counts = without_outliers(centers.double(), counts, z_threshold)
        kept = centers[counts > 0].double()
        low, high = low.maximum(kept.min()), high.minimum(kept.max())
    used = counts > 0
    values = stats.histogram.points[used].clamp(stats.low, stats.high)
    return Sample(values.unsqueeze(0), counts[used].unsqueeze(0), low, high)
