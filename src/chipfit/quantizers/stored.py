"""How a quantized tensor is stored: a grid with numbers, as one value that is right or is not made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from chipfit.errors import PlanError
from chipfit.quantizers.grids import SCALES, Grid, dequantize, fake_quantize, quantize, shape_for
from chipfit.quantizers.rounding import ROUNDINGS


def _fault(grid: Grid) -> str:
    """What is wrong with a grid; "" where nothing is."""
    if not 1 <= grid.bits <= 64 or not grid.qmin < grid.qmax:
        return "it has no codes"
    wide = grid.qmin < -(1 << grid.bits - 1) or grid.qmax >= 1 << grid.bits or grid.qmax - grid.qmin >= 1 << grid.bits
    if grid.kind == "int" and grid.bits > 1 and wide:  # binary codes stand for -1 and +1
        return "its codes are wider than its bits"
    if grid.table is not None and not all(a < b for a, b in zip(grid.table, grid.table[1:])):
        return "its table does not increase"
    if grid.scale_min is not None and not SCALES[0] <= grid.scale_min <= SCALES[1]:
        return "its least scale is none"
    return ""


def per_output(scale: torch.Tensor, outputs: int) -> torch.Tensor:
    """A weight's scales for every output channel: groups of a transposed convolution share those of their channels."""
    return scale.repeat(outputs // scale.numel()) if scale.dim() and outputs > scale.numel() else scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stored:
    """Format, grid, scale and zero point of one tensor.

    Raises:
        PlanError: a scale that is not finite and positive, a zero point that is no code of the grid, or shapes that do
            not fit each other.
    """

    format: str  #: format name in the platform
    grid: Grid
    scale: torch.Tensor  #: float32, [] or [C]; where blocks share one, as many axes as the tensor
    zero_point: torch.Tensor  #: int32, same shape as scale
    #: channel axis when scale is [C], or along which blocks lie; a bias, which has one axis, may leave it out
    axis: int | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise a PlanError where the numbers are none that a chip could use; a tensor can be written in place."""
        s, z, grid = self.scale, self.zero_point, self.grid
        blocks = grid.per == "block"
        if s.shape != z.shape or (s.dim() > 1) is not blocks or (blocks and self.axis is None):
            shapes = f"scale {list(s.shape)}, zero point {list(z.shape)}"
            allowed = "both [], or both [C] along an axis, or of blocks along one"
            raise PlanError("Scale and zero point do not fit", got=shapes, allowed=allowed)
        if not bool((torch.isfinite(s) & (s > 0)).all()):
            raise PlanError("A scale is not positive", got=float(s.min()), allowed="finite numbers above 0")
        if s.dtype != torch.float32 or z.dtype != torch.int32:
            got = f"scale {s.dtype}, zero point {z.dtype}"
            raise PlanError("Scale or zero point is of another type", got=got, allowed="float32 and int32")
        if fault := _fault(grid):
            raise PlanError(f"A grid is malformed: {fault}", got=repr(grid)[:80])
        if grid.rounding not in ROUNDINGS:
            raise PlanError("A rounding is not known", got=repr(grid.rounding), allowed=", ".join(ROUNDINGS))
        if grid.kind == "int" and z.numel() and not grid.qmin <= int(z.min()) <= int(z.max()) <= grid.qmax:
            codes = f"{grid.qmin}..{grid.qmax}"
            raise PlanError("A zero point is not a code of its grid", got=z.reshape(-1)[:8].tolist(), allowed=codes)

    def with_(self, **changes: Any) -> Stored:
        return replace(self, **changes)

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Reals [*dims] to codes; see `grids.quantize`."""
        return quantize(x, self.scale, self.zero_point, self.grid, self.axis)

    def dequantize(self, q: torch.Tensor) -> torch.Tensor:
        """Codes [*dims] to the reals that they stand for; see `grids.dequantize`."""
        if self.grid.table is not None:
            entries = torch.tensor(self.grid.table, dtype=self.scale.dtype)[q.long()]
            return entries * shape_for(self.scale, q, self.axis)
        return dequantize(q, self.scale, self.zero_point, self.axis)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Reals [*dims] to the nearest ones that the grid holds; see `grids.fake_quantize`."""
        return fake_quantize(x, self.scale, self.zero_point, self.grid, self.axis)

    def same_numbers(self, other: Stored) -> bool:
        """The same codes stand for the same reals, whatever the format is called."""
        same = (self.grid, self.axis) == (other.grid, other.axis)
        return same and torch.equal(self.scale, other.scale) and torch.equal(self.zero_point, other.zero_point)
