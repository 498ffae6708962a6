"""Quantization parameters: the scale and zero point of a grid that holds a given range."""

import math
from dataclasses import dataclass

import torch

from chipfit.quantizers.grids import Grid, in_16_bits

#: least and greatest scale: kernels multiply scales by each other and by 2^20, which must not overflow or vanish in
#: float32; `finish_scale` raises smaller scales, larger ones are refused when scales are decided
LEAST_SCALE, GREATEST_SCALE = 2.0**-24, 2.0**100
#: upper end of the range if calibration saw only 0: with a tiny scale, ratios to the scales of neighbours would be too
#: large for kernels, and any other value would be clipped
HIGH_IF_ALL_ZERO = 1.0


@dataclass(frozen=True, slots=True)
class QParams:
    """The quantization parameters of a tensor, [] or per channel [C]: float32 scale and int32 zero point."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    table: tuple[float, ...] | None = None  #: entries of a grid whose look-up table is fitted to this tensor

    def bounds(self, grid: Grid) -> tuple[float, float]:
        """Return the least and the greatest value on the grid, over all channels."""
        low = (grid.ends[0] - self.zero_point).double() * self.scale.double()
        high = (grid.ends[1] - self.zero_point).double() * self.scale.double()
        return float(low.min()), float(high.max())


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in float64; on an accelerator, which may have none, in float32."""
    return x.double() if x.device.type == "cpu" else x.float()


def finish_scale(scale: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return a legal float32 scale near `scale`: within the hardware's limits and, where the grid demands it, the
    next power of two, the nearest number of 8 (bfloat16) or 16 significant bits or, for a logarithmic grid, the next
    power of the ratio of its entries.
    """
    least = max(LEAST_SCALE, grid.scale_min or 0.0)
    scale = wide(scale).clamp(least, grid.scale_max)
    if grid.pot:
        scale = torch.exp2(torch.ceil(torch.log2(scale) - 1e-9))
    elif grid.bf16:
        scale = scale.bfloat16()
    elif grid.short_scale:
        scale = in_16_bits(scale)
    elif grid.kind == "log" and grid.table is not None:
        # codes are logarithms in units of `step`; the hardware multiplies by adding them, also to that of the scale
        step = math.log2(grid.table[-1] / grid.table[-2])
        scale = torch.exp2(torch.ceil(torch.log2(scale) / step - 1e-6) * step)
    return scale.to(torch.float32)


def from_min_max(low: torch.Tensor | float, high: torch.Tensor | float, grid: Grid) -> QParams:
    """Return the parameters of least scale with which the grid contains [low, high] and 0.

    If all channels are 0, the range is [0, `HIGH_IF_ALL_ZERO`].

    Args:
        low, high: ends of the range as real values, [] or [C]; widened to contain 0.
        grid: affine if its zero point is free, else symmetric about the zero point that it prescribes or allows.

    Affine: s = (high - low) / (qmax - qmin), z = round(qmin - low / s). Jacob et al. 2018, arXiv:1712.05877, eq. 1.
    Symmetric: the least s with low >= (qmin - z) s and high <= (qmax - z) s.
    """
    lo = wide(torch.as_tensor(low, dtype=None if isinstance(low, torch.Tensor) else torch.float64)).clamp_max(0.0)
    hi = wide(torch.as_tensor(high, dtype=None if isinstance(high, torch.Tensor) else torch.float64)).clamp_min(0.0)
    hi = torch.where((lo == hi).all(), HIGH_IF_ALL_ZERO, hi)
    if isinstance(grid.zero, str):  # "any"
        scale = finish_scale((hi - lo) / (grid.qmax - grid.qmin), grid)
        zero = torch.clamp(torch.round(grid.qmin - lo / wide(scale)), grid.qmin, grid.qmax)
        return QParams(scale, zero.to(torch.int32))
    z = grid.zero if isinstance(grid.zero, int) else _pick(grid.zero, lo)
    least, most = grid.ends  # in units of the scale, as z is
    for_high = hi / (most - z) if most > z else torch.zeros_like(hi)
    for_low = lo / (least - z) if least < z else torch.zeros_like(lo)
    scale = finish_scale(torch.maximum(for_high, for_low), grid)
    return QParams(scale, torch.full_like(scale, z, dtype=torch.int32))


def _pick(allowed: tuple[int, ...], low: torch.Tensor) -> int:
    """Return the lowest allowed zero point if no value is negative, else the highest."""
    return min(allowed) if float(low.min()) >= 0 else max(allowed)
