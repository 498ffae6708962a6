"""The search that the error-based rules share: try smaller and smaller ranges, keep the one with the least error.

Errors are measured on raw values where there are few, else on histograms. A histogram bin is not taken for its centre:
the error is integrated over the bin, since an 8-bit step is hardly wider than a bin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.ranges.qparams import QParams, from_min_max, wide

#: tensors with more than ALL values, and more than FEW in each channel, are searched through histograms of BINS bins
ALL, FEW, BINS = 1 << 13, 64, 512
#: values held at once
CHUNK = 1 << 22
#: 4-byte numbers that each candidate of a channel needs: ends, scale, zero point, error
_TABLES = 16
#: ranges a little wider than the data may place the codes better
_WIDEST = 1.05


def _column(*factors: float) -> torch.Tensor:
    return torch.tensor(factors, dtype=torch.float64)[..., None]


#: power-of-two grids have few candidates: the full scale and its halvings, [10]
HALVINGS = torch.exp2(-torch.arange(10.0, dtype=torch.float64))
_COARSE = _column(1, 1.05, *(0.93**k for k in range(1, 33)), *(0.09 * 0.75**k for k in range(11)))
_FINE = _column(*(1 + k / 400 for k in range(-16, 17)))
_ENDS = _column(1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.13, 0.08, 0.05, 0.03)


@dataclass(frozen=True, slots=True)
class Sample:
    """The values in which a range is searched, for C channels at once (C = 1 per tensor), in the tensor's unit.

    Either raw values, or a histogram with bin borders `edges` and bin centres `values`. A histogram may have one value
    more than bins: exact zeros, whose error is 0 on every grid.
    """

    values: torch.Tensor  #: [C, N], float32
    weights: torch.Tensor | None  #: count or importance of each value, [C, N]; None: 1
    low: torch.Tensor  #: true extremes, float64 [C]
    high: torch.Tensor
    edges: torch.Tensor | None = None  #: ascending, float32 [C, bins + 1]
    smooth_low: torch.Tensor | None = None  #: moving averages of the extremes over batches, float64 [C]
    smooth_high: torch.Tensor | None = None
    statistic: Any = None  #: value of the statistic that the rule declares, where it is not in the fields above

    def chunks(self, per_channel: int) -> Iterator[Sample]:
        """Yield groups of channels such that `per_channel` values of each channel fit into bounded memory."""
        size = max(1, CHUNK // max(1, per_channel))
        whole: dict[str, Any] = {f: getattr(self, f) for f in self.__slots__ if f != "statistic"}
        for c in range(0, len(self.low), size):
            part: dict[str, Any] = {f: x if x is None else x[c : c + size] for f, x in whole.items()}
            yield Sample(**part, statistic=self.statistic)


#: error of K candidates on C channels, [K, C], from a sample and grids [K, C]
Error = Callable[[Sample, QParams, Grid], torch.Tensor]


@dataclass(frozen=True)
class ErrorRange:
    """The base of rules that minimize the mean |x - q|^p; a rule sets the exponent."""

    p: ClassVar[float]
    statistic: ClassVar[str] = ""  #: name of a registered statistic that it needs; see `registry.KINDS`

    def __call__(self, sample: Sample, grid: Grid) -> QParams:
        """Return QParams [C] for values [C, N] with weights and extremes."""
        return search(sample, grid, p=self.p)


def search(sample: Sample, grid: Grid, p: float) -> QParams:
    """Return QParams [C] of the range with the least mean |x - q|^p inside the full range.

    Power-of-two grids try the full scale and its halvings, other symmetric grids a line of factors of it; affine grids
    move both ends, independently if there is one channel. The result is never worse, by this error, than the full
    range.

    Args:
        sample: C channels.
        p: exponent, > 0.
    """
    affine = grid.zero == "any"
    columns = sample.values.shape[1]
    if sample.edges is None and columns > FEW and sample.values.numel() > ALL:
        if not grid.nearest:
            some = slice(None, None, -(-columns // BINS))
            weights = sample.weights[:, some] if sample.weights is not None else None
            sample = Sample(sample.values[:, some], weights, sample.low, sample.high)
        elif affine:
            sample = binned(sample)
        else:
            return join(_by_shared_bins(part, grid, p) for part in sample.chunks(2 * max(columns, BINS)))
    error = functools.partial(errors, p=p)
    if grid.pot:
        return best(sample, grid, error, HALVINGS[..., None])[0]
    if not (affine and len(sample.low) == 1 and bool(sample.low < 0) and bool(sample.high > 0)):
        _, f, _ = best(sample, grid, error, _COARSE)
        factors = torch.cat([torch.ones_like(f)[None], (f * _FINE).clamp_max(_WIDEST)])
        return best(sample, grid, error, factors)[0]
    low, high = _pairs(_ENDS, _ENDS)
    for width in (0.15, 0.04):
        _, f, g = best(sample, grid, error, low, high)
        step = torch.linspace(1 - width, 1 + width, 5, dtype=torch.float64)[..., None]
        low, high = _pairs((f * step).clamp_max(_WIDEST), (g * step).clamp_max(_WIDEST))
        one = torch.ones_like(low[:1])
        low, high = torch.cat([one, low]), torch.cat([one, high])
    return best(sample, grid, error, low, high)[0]


def errors(sample: Sample, q: QParams, grid: Grid, p: float) -> torch.Tensor:
    """Return the mean |x - q|^p of each candidate and channel, [K, C]; q.scale is [K, C]."""
    s, z = q.scale[..., None], q.zero_point[..., None]  # [K, C, 1]
    # the integral holds for rounding to nearest in equal steps
    if sample.edges is None or sample.weights is None or not grid.nearest:
        e = (sample.values - fake_quantize(sample.values, s, z, grid)).abs_().pow_(p)
        if sample.weights is None:
            return e.mean(-1, dtype=torch.float64)
        return (e.double() * sample.weights).sum(-1) / sample.weights.sum(-1)
    counts = sample.weights[:, : sample.edges.shape[1] - 1]
    density = counts / sample.edges.diff()  # exact zeros have no error
    return (_integral(sample.edges / s + z, grid, p).diff() * density).sum(-1) * q.scale ** (p + 1)


def _integral(u: torch.Tensor, grid: Grid, p: float) -> torch.Tensor:
    """Return the integral of |v - clip(round(v))|^p over v from the centre of the first code's cell up to u.

    Whole cells add 0.5^p / (p + 1) each, the last one sign(e) |e|^(p+1) / (p + 1) with e = u - code.
    """
    code = u.round().clamp_(grid.qmin, grid.qmax)
    e = u - code
    last = e.pow(3) if p == 2 else e.abs().pow_(p).mul_(e)
    return code.sub_(grid.qmin).mul_(0.5**p).add_(last).div_(p + 1)


def best(
    sample: Sample, grid: Grid, error: Error, low: torch.Tensor, high: torch.Tensor | None = None
) -> tuple[QParams, torch.Tensor, torch.Tensor]:
    """Return the candidate of each channel [C] with the least error, and its two factors. The first wins a tie.

    Args:
        error: (sample, qparams [K, C], grid) -> error of each candidate and channel [K, C].
        low, high: factors [K, 1 or C] of the sample's ends; high defaults to low.
    """
    channels = len(sample.low)
    low, high = (x.expand(-1, channels) for x in (low, low if high is None else high))
    parts, at = list[list[torch.Tensor]](), 0
    for part in sample.chunks(_TABLES * len(low)):
        lows, highs = (x[:, at : at + len(part.low)] for x in (low, high))
        at += len(part.low)
        at_once = max(1, CHUNK // max(1, part.values.numel()))  # candidates that fit into memory
        tried = from_min_max(lows * part.low, highs * part.high, grid)
        some = zip(tried.scale.split(at_once), tried.zero_point.split(at_once), strict=True)
        k = torch.cat([error(part, QParams(s, z), grid) for s, z in some]).argmin(0, keepdim=True)
        parts.append([x.gather(0, k)[0] for x in (tried.scale, tried.zero_point, lows, highs)])
    scale, zero, low, high = map(torch.cat, zip(*parts, strict=True))
    return QParams(scale, zero), low, high


def _pairs(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every row of a paired with every row of b; [K, C], [L, C] -> two of [K * L, C]."""
    return a.repeat_interleave(len(b), 0), b.repeat(len(a), 1)


def _by_shared_bins(sample: Sample, grid: Grid, p: float) -> QParams:
    """Search ranges of a symmetric grid for many channels at once.

    Counted in bins of x / (full scale), all channels share one table of errors by factor and bin. The error of every
    factor on every channel is then one matrix product, [C, BINS] @ [BINS, K].
    """
    full = from_min_max(sample.low, sample.high, grid)
    z = int(full.zero_point[0])
    first, last = grid.qmin - z, grid.qmax - z
    counts, zeros = count(sample.values, full.scale * first, full.scale * (last - first), weights=sample.weights)
    if first <= 0 < last:  # exact zeros have no error: their mass must not spread over a bin
        at = min(int(-first * BINS / (last - first)), BINS - 1)
        counts[:, at] -= zeros
    factors, table = _error_table(grid, z, p)
    k = (counts @ table).argmin(1)  # [C]
    chosen = from_min_max(sample.low * factors[k], sample.high * factors[k], grid).scale
    # values may lie on a lattice (as ternary weights do), which a histogram does not show: the true error decides
    worse = _true_error(sample, chosen, z, grid, p) > _true_error(sample, full.scale, z, grid, p)
    return QParams(torch.where(worse, full.scale, chosen), full.zero_point)


@functools.lru_cache(maxsize=16)
def _error_table(grid: Grid, z: int, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return factors of the full scale [K], and the error of each factor in each bin, float32 [BINS, K]."""
    if grid.pot:
        factors = HALVINGS
    else:
        lines = torch.linspace(1, _WIDEST, 6), torch.linspace(0.99, 0.2, 80), 0.2 * torch.logspace(-0.04, -1.6, 40)
        factors = torch.cat(lines).double()
    edges, f = torch.linspace(grid.qmin - z, grid.qmax - z, BINS + 1, dtype=torch.float64), factors[..., None]
    table = _integral(edges / f + z, grid, p).diff() * f ** (p + 1)
    return factors, table.T.float().contiguous()


def _true_error(sample: Sample, scale: torch.Tensor, z: int, grid: Grid, p: float) -> torch.Tensor:
    """Return the norm |x - q|_p of each row, [C]."""
    u = sample.values / scale[..., None]
    e = torch.round(u).clamp_(grid.qmin - z, grid.qmax - z).sub_(u)
    if sample.weights is not None:
        e.mul_(sample.weights.pow(1 / p))
    norm: torch.Tensor = torch.linalg.vector_norm(e, p, dim=1)
    return norm * scale


def binned(sample: Sample) -> Sample:
    """Return raw values as one histogram per channel between its own extremes."""

    def span(s: Sample) -> torch.Tensor:
        return (s.high - s.low).clamp_min(2.0**-100)  # [C]

    at = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
    edges = (sample.low[..., None] + span(sample)[..., None] * at).float()
    parts = sample.chunks(max(sample.values.shape[1], BINS))
    counts = torch.cat([count(s.values, s.low, span(s), weights=s.weights)[0] for s in parts])
    return Sample((edges[:, 1:] + edges[:, :-1]) / 2, counts, sample.low, sample.high, edges)


def count(
    rows: torch.Tensor, start: torch.Tensor, span: torch.Tensor, bins: int = BINS, weights: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count values [C, N] in bins over [start, start + span]: float32 [C, bins], and exact zeros per row [C].

    Args:
        weights: count of each value, [C, N]; None: 1.
    """
    channels = len(rows)
    per_unit = (bins / wide(span)).float()[..., None]
    offset = (-wide(start) * per_unit[:, 0]).float()[..., None]
    index = torch.addcmul(offset, rows, per_unit).clamp_(0, bins - 1).to(torch.int32)
    index += torch.arange(channels, dtype=torch.int32, device=rows.device)[..., None] * bins
    flat = None if weights is None else weights.reshape(-1)
    counts = torch.bincount(index.reshape(-1), flat, minlength=channels * bins).view(channels, bins).float()
    if weights is not None:
        return counts, (weights * (rows == 0)).sum(1).float()
    # usually there are none, and to check that is ten times faster than to count the zeros of each row
    none = int(rows.count_nonzero()) == rows.numel()
    return counts, counts.new_zeros(channels) if none else rows.shape[1] - rows.count_nonzero(1).float()


def join(parts: Iterable[QParams]) -> QParams:
    """Concatenate the channels of several results."""
    scales, zero_points = zip(*((q.scale, q.zero_point) for q in parts), strict=True)
    return QParams(torch.cat(scales), torch.cat(zero_points))
