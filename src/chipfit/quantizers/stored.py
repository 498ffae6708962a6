"""The record of how a quantized tensor is stored: a grid with scale and zero point, checked when it is created."""

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from chipfit.errors import PlanError
from chipfit.quantizers.grids import SCALES, Grid, dequantize, fake_quantize, quantize, shape_for
from chipfit.quantizers.pairs import bounded_codes
from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.quantizers.tables import constant


def _fault(grid: Grid) -> str:
    """Return the fault of a grid, as the end of a message; "" if it is valid."""
    if not 1 <= grid.bits <= 64 or not grid.qmin < grid.qmax:
        return "it has no codes"
    wide = grid.qmin < -(1 << grid.bits - 1) or grid.qmax >= 1 << grid.bits or grid.qmax - grid.qmin >= 1 << grid.bits
    if grid.kind == "int" and grid.bits > 1 and wide:  # binary codes stand for -1 and +1
        return "its codes are wider than its bits"
    if grid.pair_limit is not None and not (grid.pair_limit > 0 and grid.kind == "int" and grid.zero == 0):
        return "pairs are bounded on integer grids with zero point 0, by a positive number"
    if grid.table is not None and not all(a < b for a, b in zip(grid.table, grid.table[1:])):
        return "its table does not increase"
    if grid.scale_min is not None and not SCALES[0] <= grid.scale_min <= SCALES[1]:
        return "its least scale is not a positive float32"
    return ""


def scales_per_output(scale: torch.Tensor, outputs: int) -> torch.Tensor:
    """Return a weight's scales for every output channel; groups of a transposed convolution share their scales."""
    return scale.repeat(outputs // scale.numel()) if scale.dim() and outputs > scale.numel() else scale


#: tensor -> device -> version of its scale and zero point, and their copies on the device
_COPIES: MutableMapping[Any, dict[torch.device, tuple[Any, Tensor, Tensor]]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Stored:
    """The format, grid, scale and zero point of one tensor.

    Raises:
        PlanError: a scale is not finite and positive, a zero point is not a code of the grid, or shapes differ.
    """

    format: str  #: format name in the platform
    grid: Grid
    scale: torch.Tensor  #: float32, [] or [C], or one for each block with all axes of the tensor
    zero_point: torch.Tensor  #: int32, same shape as scale
    #: channel axis if scale is [C], or the axis along which blocks lie; optional for a bias, which has one axis
    axis: int | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raise a PlanError if the numbers are not valid, also after tensors were changed in place."""
        s, z, grid = self.scale, self.zero_point, self.grid
        blocks = grid.per == "block"
        if s.shape != z.shape or (s.dim() > 1) is not blocks or (blocks and self.axis is None):
            shapes = f"scale {list(s.shape)}, zero point {list(z.shape)}"
            allowed = "both [], or both [C] along an axis, or one for each block along an axis"
            raise PlanError("Shapes of scale and zero point do not match", got=shapes, allowed=allowed)
        if not bool((torch.isfinite(s) & (s > 0)).all()):
            raise PlanError("A scale is not positive", got=float(s.min()), allowed="finite numbers above 0")
        if s.dtype != torch.float32 or z.dtype != torch.int32:
            got = f"scale {s.dtype}, zero point {z.dtype}"
            raise PlanError("Scale or zero point has the wrong type", got=got, allowed="float32 and int32")
        if fault := _fault(grid):
            raise PlanError(f"A grid is malformed: {fault}", got=repr(grid)[:80])
        if grid.rounding not in ROUNDINGS:
            raise PlanError("The rounding rule is not known", got=repr(grid.rounding), allowed=", ".join(ROUNDINGS))
        if grid.kind == "int" and z.numel() and not grid.qmin <= int(z.min()) <= int(z.max()) <= grid.qmax:
            codes = f"{grid.qmin}..{grid.qmax}"
            raise PlanError("A zero point is not a code of its grid", got=z.reshape(-1)[:8].tolist(), allowed=codes)

    def with_(self, **changes: Any) -> Self:
        return replace(self, **changes)

    def numbers_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return scale and zero point on a device. They are copied once, and again after a change in place."""
        numbers = self.scale, self.zero_point
        if self.scale.device == device:
            return numbers
        version = [None if p.is_inference() else p._version for p in numbers]
        copies = _COPIES.setdefault(self, {})
        if device not in copies or copies[device][0] != version:
            with torch.inference_mode(False):  # a copy made in inference mode could not be used in training later
                copies[device] = version, self.scale.to(device), self.zero_point.to(device)
        return copies[device][1:]

    def quantize(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize floats [*dims]; see `grids.quantize`, and `quantizers.pairs` for weights bounded in pairs."""
        q = quantize(x, *self.numbers_on(x.device), self.grid, self.axis)
        limit = self.grid.pair_limit
        return q if limit is None else bounded_codes(q, limit, self.axis)

    def dequantize(self, q: torch.Tensor) -> torch.Tensor:
        """Dequantize codes [*dims]; see `grids.dequantize`."""
        scale, zero_point = self.numbers_on(q.device)
        if self.grid.table is not None:
            return constant(self.grid.table, scale)[q.long()] * shape_for(scale, q, self.axis)
        return dequantize(q, scale, zero_point, self.axis)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize floats [*dims]; see `grids.fake_quantize`."""
        if self.grid.pair_limit is not None:
            return self.dequantize(self.quantize(x)).to(x.dtype)
        return fake_quantize(x, *self.numbers_on(x.device), self.grid, self.axis)

    def same_numbers(self, other: Self) -> bool:
        """Return whether grid, axis, scale and zero point are equal, whatever the format's name."""
        same = (self.grid, self.axis) == (other.grid, other.axis)
        return same and torch.equal(self.scale, other.scale) and torch.equal(self.zero_point, other.zero_point)
