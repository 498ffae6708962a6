"""The error of a part of a joined tensor on the grid that all parts share, relative to the part's own variance.

Scores between 0 and 1 beside pixels up to 640 keep two of 256 levels, which the error of the whole does not show.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.histogram import Histogram
from chipfit.decide.assignment import Assignment
from chipfit.engine.parts import Gain, part_gains
from chipfit.graph.joins import Joins
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.noise import decibels
from chipfit.ranges import choose
from chipfit.ranges.qparams import QParams


@dataclass(frozen=True, slots=True)
class PartOnGrid:
    """A part of a joined tensor as the tensor's grid represents it."""

    name: str
    levels: float  #: of the grid between the least and the greatest number of the part
    noise: float  #: mean squared error over the variance
    own_noise: float  #: on a grid of its own


def parts_on_grid(
    joins: Joins, assignment: Assignment, stats: Mapping[str, TensorStats], value: str, q: QParams, grid: Grid
) -> list[PartOnGrid]:
    """Return the parts of a joined value on its grid; none that is constant or has no statistics.

    Args:
        q, grid: the value's scale and zero point, and its grid.
    """
    out = []
    for name, gain in ((part_gains(joins, value) or {}) if grid.kind == "int" else {}).items():
        seen, slot = stats.get(name), assignment.tensors.get(name)
        if seen is not None and seen.low < seen.high and gain.times > 0:
            own = grid if slot is None else slot.grid(signed=seen.low < 0)
            on = _before_gain(q, gain)
            levels = (seen.high - seen.low) / float(on.scale)
            out.append(PartOnGrid(name, levels, _noise(seen, on, grid), _noise(seen, choose(seen, own), own)))
    return out


def on_dictated_scale(value: str, seen: TensorStats, q: QParams, grid: Grid) -> PartOnGrid:
    """Return a value on a grid whose scale the hardware dictates; rounding errors are relative to its mean square.

    A scale of 1/256 keeps a softmax that is sure of one class, and loses one that spreads over a thousand. Values
    beyond the grid do not count: a user's chip may saturate on purpose.
    """
    levels = (seen.high - seen.low) / float(q.scale)
    if seen.histogram is None or not bool(seen.histogram.counts.any()):
        return PartOnGrid(value, levels, 0.0, 0.0)
    x, p = seen.histogram.centers.clamp(*q.bounds(grid)), seen.histogram.counts
    rounded = fake_quantize(x, q.scale, q.zero_point, grid)
    own = (squared_errors(seen.histogram, choose(seen, grid), grid) * p).sum()
    power = max(float((x.square() * p).sum()), 1e-30)
    return PartOnGrid(value, levels, float(((x - rounded).square() * p).sum()) / power, float(own) / power)


def _before_gain(q: QParams, gain: Gain) -> QParams:
    """Return the grid that rounds a part as `q` rounds times * part + plus."""
    return QParams(q.scale / gain.times, q.zero_point + gain.plus / q.scale)


def describe(part: PartOnGrid) -> str:
    """Return a clause on a part that a joined tensor's grid would lose."""
    return f"'{part.name}' would keep {part.levels:.3g} levels of one grid, {decibels(1.0, part.noise):.1f} dB"


def squared_errors(seen: Histogram, q: QParams, grid: Grid) -> Tensor:
    """Return the mean squared error of the values in each bin of a histogram on a grid."""
    x, (low, high) = seen.centers, q.bounds(grid)
    clipped = (x - x.clamp(low, high)).square()
    return torch.where(clipped > 0, clipped, float(q.scale) ** 2 / 12)


def _noise(seen: TensorStats, q: QParams, grid: Grid) -> float:
    """Return the mean squared error of a value on a grid over its variance; without a histogram, of uniform values."""
    if seen.histogram is None or not bool(seen.histogram.counts.any()):
        return (float(q.scale) / (seen.high - seen.low)) ** 2
    x, p = seen.histogram.centers, seen.histogram.counts / seen.histogram.counts.sum()
    least = (2 * seen.histogram.reach / p.numel()) ** 2 / 12  # the variance in one bin
    variance = float((x.square() * p).sum() - (x * p).sum().square())
    return float((squared_errors(seen.histogram, q, grid) * p).sum()) / max(variance, least)
