"""Range rules, which choose the part of a tensor's values that its grid covers; one rule a file."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.histogram import BINS, in_memory_order, without_outliers
from chipfit.errors import ConfigError, DataError, raise_bug, short_message
from chipfit.quantizers.grids import Grid, in_blocks
from chipfit.quantizers.pairs import scale_for_pairs
from chipfit.quantizers.tables import fit
from chipfit.ranges.qparams import QParams, finish_scale
from chipfit.ranges.search import Sample
from chipfit.registry import create, lookup

#: a registered name with or without settings, such as "lp(p=3)", or a rule itself: a function of a Sample of C channels
#: (values float32 [C, N], extremes float64 [C]) and a grid, which returns QParams (scale float32 [C], zero point int32
#: [C])
Rule = str | Callable[[Sample, Grid], QParams]

#: names of the same formulas in MCT and MQBench
ALIASES = dict(
    word.split("=")
    for word in """
        NOCLIPPING=no_clipping MSE=mse MAE=mae LP=lp KL=kl HMSE=hmse minmax=no_clipping MinMaxObserver=no_clipping
        EMAMinMaxObserver=smooth_min_max MSEObserver=mse ClipStdObserver=std KLDObserver=kl quantile=percentile
    """.split()
)

#: number of bin edges above which the bins of a histogram are merged in pairs
_EDGES = 768


def choose(
    source: TensorStats | torch.Tensor,
    grid: Grid,
    *,
    rule: Rule = "mse",
    axis: int | None = None,
    block: int | None = None,
    z_threshold: float | None = None,
    extras: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> QParams:
    """Choose scale and zero point of one tensor by a range rule.

    Args:
        source: calibration statistics, or the tensor itself.
        grid: the grid to place.
        rule: a registered name, a name of MCT or MQBench in `ALIASES`, or a rule itself.
        axis: channel axis for one range per channel; None for one range.
        block: elements along `axis` that share a range, if `source` is a tensor; None: the whole channel.
        z_threshold: first drop histogram bins more than this many standard deviations from the mean.
        extras: values of registered statistics if `source` is a tensor, as in `TensorStats.extras`.
        settings: fields of the rule.

    Raises:
        UnknownNameError: the rule or a setting does not exist.
        DataError: the values are not finite.
    """
    cache = source.cached_ranges if isinstance(source, TensorStats) and isinstance(rule, str) else {}
    key = grid, str(rule), axis, z_threshold, repr(sorted(settings.items()))
    if key in cache:
        return cache[key]
    place = rule_of(rule, **settings)
    statistic = _statistic(place)
    extra = (source.extras if isinstance(source, TensorStats) else extras).get(statistic)
    if block is not None and axis is not None and isinstance(source, torch.Tensor):
        parts = in_blocks(source, axis, block)
        if isinstance(extra, torch.Tensor):
            extra = in_blocks(extra, axis, block).flatten(0, -2)
        q = choose(parts.flatten(0, -2), grid, rule=rule, axis=0, extras={statistic: extra}, **settings)
        scale, zero = (p.view(parts.shape[:-1]).movedim(-1, axis).contiguous() for p in (q.scale, q.zero_point))
        return replace(q, scale=scale, zero_point=zero)
    sample = _sample(source, axis, z_threshold, extra)
    if not bool((sample.low.isfinite() & sample.high.isfinite()).all()):
        got = f"minimum {sample.low.min():g}, maximum {sample.high.max():g}"
        raise DataError("A range needs finite values", got=got)
    if grid.entries is not None and grid.table is None:
        q = _with_table(sample, grid, grid.entries)
    else:
        q = _apply(place, name_of(rule), sample, grid)
    q = replace(q, scale=q.scale[0], zero_point=q.zero_point[0]) if axis is None else q
    if grid.pair_limit is not None and isinstance(source, torch.Tensor):
        q = replace(q, scale=finish_scale(scale_for_pairs(source, q.scale, grid, axis), grid))
    cache[key] = q
    return q


def _with_table(sample: Sample, grid: Grid, entries: int) -> QParams:
    """Return the full range of a sample and a look-up table that is fitted to it, which makes clipping superfluous."""
    q: QParams = lookup("range", "no_clipping")()(sample, grid)
    in_steps = sample.values / q.scale[..., None]
    return replace(q, table=fit(in_steps, sample.weights, entries, grid.qmin, grid.qmax))


def _apply(place: Callable[[Sample, Grid], QParams], name: str, sample: Sample, grid: Grid) -> QParams:
    """Return the range that a rule chooses, and check it: the rule may be the user's."""
    try:
        q = place(sample, grid)
    except Exception as e:
        raise_bug(e)
        what = f"The range rule '{name}' fails: {short_message(e)}"
        raise ConfigError(what, allowed="a function of a sample and a grid") from e
    _check_returned(q, len(sample.low), name)
    return q


def rule_of(rule: Rule, **settings: Any) -> Callable[[Sample, Grid], QParams]:
    """Return the rule of a name; a rule itself unchanged.

    Raises:
        UnknownNameError: the rule or a setting does not exist.
        ConfigError: the object is not a rule, or a setting is out of bounds.
    """
    if not isinstance(rule, str):
        if isinstance(rule, type) or not callable(rule) or not _has_two_parameters(rule):
            allowed = "the name of a rule, or a function of a sample and a grid"
            raise ConfigError("A range rule must be a name or a function", got=repr(rule)[:120], allowed=allowed)
        return rule
    return create("range", rule, **settings)  # type: ignore[no-any-return]


def _check_returned(q: Any, channels: int, rule: str) -> None:
    """Raise a DataError if the result of a rule is not a scale and a zero point for each channel."""
    if not isinstance(q, QParams):
        raise DataError(f"The range rule '{rule}' returned no range", got=repr(q)[:120], allowed="QParams")
    for name, x, dtype in (("scale", q.scale, torch.float32), ("zero point", q.zero_point, torch.int32)):
        if not isinstance(x, torch.Tensor) or x.dtype != dtype or x.shape != (channels,):
            what = f"The range rule '{rule}' returned a {name} of another shape or type"
            got = f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            allowed = f"{dtype}[{channels}], one for each row of sample.values"
            raise DataError(what, got=got, allowed=allowed, hint="use chipfit.ranges.qparams.from_min_max")
    if not bool((q.scale.isfinite() & (q.scale > 0)).all()):
        got, allowed = f"{float(q.scale.min()):g} to {float(q.scale.max()):g}", "finite numbers above 0"
        raise DataError(f"The range rule '{rule}' returned a scale that is not positive", got=got, allowed=allowed)


def _has_two_parameters(rule: Callable[..., Any]) -> bool:
    try:
        inspect.signature(rule).bind(None, None)
    except (TypeError, ValueError):  # a C function without a signature is not a rule
        return False
    return True


def statistic_of(rule: Rule) -> str:
    """Return the name of the statistic that a rule declares in its attribute `statistic`; "" if none."""
    return _statistic(rule_of(rule))


def _statistic(place: Callable[[Sample, Grid], QParams]) -> str:
    return str(getattr(place, "statistic", ""))


def needs_histogram(rule: Rule) -> bool:
    """Return whether a rule looks at more than extremes: its attribute `histogram`, True where it has none."""
    return bool(getattr(rule_of(rule), "histogram", True))


def name_of(rule: Rule) -> str:
    """Return the name of a rule in plans."""
    return rule if isinstance(rule, str) else getattr(rule, "__name__", repr(rule))


def _sample(source: TensorStats | torch.Tensor, axis: int | None, z_threshold: float | None, extra: Any) -> Sample:
    """Return what a rule searches: values or a histogram, with the value `extra` of the statistic that it declares."""
    if isinstance(source, torch.Tensor) and isinstance(extra, torch.Tensor) and source.shape == extra.shape:
        weights = sample_of_tensor(extra.contiguous(), axis).values
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, 1.0)  # if all are 0, every value counts once
        return replace(sample_of_tensor(source.contiguous(), axis), weights=weights)  # both in one order of memory
    sample = sample_of_stats(source, z_threshold) if isinstance(source, TensorStats) else sample_of_tensor(source, axis)
    if not isinstance(extra, Sample):
        return replace(sample, statistic=extra)
    if z_threshold is None or extra.weights is None:
        return extra
    low, high = sample.low, sample.high
    kept = (extra.values >= low.unsqueeze(1)) & (extra.values <= high.unsqueeze(1))
    return replace(extra, weights=extra.weights * kept, low=extra.low.maximum(low), high=extra.high.minimum(high))


def sample_of_tensor(x: torch.Tensor, axis: int | None) -> Sample:
    """Return all values of a tensor, as one row or one row a channel."""
    x = x.detach().float()
    if x.numel() == 0:
        raise DataError("A range needs at least one value", got=f"shape {list(x.shape)}")
    if axis is None:
        rows = in_memory_order(x)[None]
    else:
        axis %= x.dim()
        # in memory order, without a copy
        inner = sorted((d for d in range(x.dim()) if d != axis), key=x.stride, reverse=True)
        rows = x.permute(axis, *inner).reshape(x.shape[axis], -1)
    low, high = torch.aminmax(rows, dim=1)
    return Sample(rows, None, low.double(), high.double())


def sample_of_stats(stats: TensorStats, z_threshold: float | None) -> Sample:
    """Return the occupied bins of a histogram as a sample: their centres, counts and edges, and exact zeros apart.

    Values without a histogram are their extremes.
    """
    low, high = (torch.tensor([v], dtype=torch.float64) for v in (stats.low, stats.high))
    smooth = [torch.tensor([v], dtype=torch.float64) for v in (stats.smooth_low, stats.smooth_high)]
    hist = stats.histogram
    if hist is None or not bool(hist.counts.any()):
        return Sample(torch.stack([low, high], 1).float(), None, low, high, None, *smooth)
    counts, edges = hist.counts, hist.edges
    if z_threshold is not None:
        counts = without_outliers(hist.centers, counts, z_threshold)
    used = counts.nonzero()[:, 0]
    first, last = int(used[0]), int(used[-1]) + 1
    low, high = low.maximum(edges[first]), high.minimum(edges[last])
    zeros = float(hist.zeros) if counts[BINS // 2] > 0 else 0.0
    if zeros:
        counts = counts.clone()
        counts[BINS // 2] -= zeros
    edges, counts = edges[first : last + 1].clone(), counts[first:last]
    least = 0.01 * (edges[1] - edges[0])  # the density of a very narrow bin would be inexact
    edges[0] = edges[0].maximum(low[0].minimum(edges[1] - least))
    edges[-1] = edges[-1].minimum(high[0].maximum(edges[-2] + least))
    edges, counts = _merged_bins(edges, counts)
    values = torch.cat([(edges[1:] + edges[:-1]) / 2, edges.new_zeros(1)])
    weights = torch.cat([counts, counts.new_tensor([zeros])])
    return Sample(values[None], weights[None].float(), low, high, edges[None], *smooth)


def _merged_bins(edges: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one bin of each run of empty bins, and of each pair of bins in dense histograms.

    Returns:
        Edges, float32 [B + 1], and counts, [B].
    """
    keep = torch.ones(len(edges), dtype=torch.bool)
    keep[1:-1] = (counts[1:] > 0) | (counts[:-1] > 0)
    if keep.sum() > _EDGES:
        keep[1:-1:2] = False
    total = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[keep]
    return edges[keep].float(), total.diff()
