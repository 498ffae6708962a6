"""Grids: the finite sets of numbers that a stored tensor may take, and the arithmetic between reals and codes.

Rounding is the grid's own, half to even unless a platform says otherwise; division is a true division by the scale,
and the zero point is added after rounding, as ONNX QuantizeLinear specifies.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from chipfit.quantizers.rounding import by_rule
from chipfit.quantizers.tables import boundaries

#: the least and the greatest power of two that a scale, a float32, can be
SCALES = 2.0**-149, 2.0**127
#: reals that are made into codes at once: larger tensors would be written to fresh memory on the way
_AT_ONCE = 1 << 17


def all_codes(bits: int, signed: bool) -> tuple[int, int]:
    """Lowest and highest code of so many bits: of two's complement, or from 0."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The codes of one tensor after every choice of its format is made (signedness included)."""

    bits: int  #: width of a stored code
    qmin: int  #: lowest code
    qmax: int  #: highest code
    zero: int | Literal["any"] | tuple[int, ...] = 0  #: the zero point: fixed, "any", or one of a set
    pot: bool = False  #: the scale must be a power of two
    bf16: bool = False  #: the scale must be a bfloat16
    per: Literal["tensor", "channel", "block", "row"] = "tensor"  #: what shares one scale
    kind: Literal["int", "offset", "lut", "log", "float"] = "int"  #: all but "int" store indices into `table`
    scale_min: float | None = None  #: least scale that the hardware represents
    entries: int | None = None  #: "lut": size of the table that is fitted to each tensor
    table: tuple[float, ...] | None = None  #: ascending, in units of the scale; codes are then indices into it
    rounding: str = "half_even"  #: of `rounding.ROUNDINGS`; on a table the nearest entry is taken

    @property
    def nearest(self) -> bool:
        """Codes lie in equal steps, and a real takes the nearest one."""
        return self.table is None and self.rounding.startswith("half")

    @property
    def signed(self) -> bool:
        return self.qmin < 0

    @property
    def symmetric(self) -> bool:
        """The zero point is fixed, so that one number, the threshold, says the range."""
        return self.zero != "any"

    @property
    def levels(self) -> int:
        return self.qmax - self.qmin + 1 if self.table is None else len(self.table)

    @property
    def ends(self) -> tuple[float, float]:
        """What the lowest and the highest code stand for, in units of the scale, before the zero point."""
        return (self.table[0], self.table[-1]) if self.kind == "offset" and self.table else (self.qmin, self.qmax)

    @property
    def file_bits(self) -> int:
        """The width of the least integer type of files that holds the codes."""
        return next((b for b in (4, 8, 16) if self.bits <= b), 32)

    @property
    def file_ends(self) -> tuple[int, int]:
        """The codes at which that type saturates; a narrower grid has others."""
        return all_codes(self.file_bits, self.signed)

    @property
    def dtype(self) -> torch.dtype:
        """The smallest torch integer type that holds every code."""
        if self.kind != "int":
            indices = 1 << self.bits if self.table is None else len(self.table)  # zero may come on top of all codes
            return torch.uint8 if indices <= 256 else torch.int32
        for d in (torch.int8, torch.uint8, torch.int16, torch.int32):
            if torch.iinfo(d).min <= self.qmin and self.qmax <= torch.iinfo(d).max:
                return d
        return torch.int64


def shape_for(p: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Scales or zero points [C] in a shape that meets x along its channel axis; a single one as it is.

    Those of blocks along the axis have all axes of x: each stands for as many numbers as a block has.
    """
    if axis is None or p.dim() == 0:
        return p
    if p.dim() > 1:
        return p.repeat_interleave(x.shape[axis] // p.shape[axis], axis)
    shape = [1] * x.dim()
    shape[axis] = -1
    return p.view(shape)


def in_blocks(x: Tensor, axis: int, block: int) -> Tensor:
    """A tensor as [*others, blocks, block]: the blocks of so many numbers that lie along an axis."""
    last = x.movedim(axis, -1)
    return last.reshape(*last.shape[:-1], -1, block)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axis: int | None = None) -> Tensor:
    """Round reals to codes: q = clip(round(x / s) + z, qmin, qmax).

    Args:
        x: reals [*dims] in the tensor's own unit u.
        scale: s > 0 in u per code, shape [] or [C] along `axis`, or of x with blocks along `axis`.
        zero_point: the code of 0.0, integer, same shape as scale.
        grid: bounds of the codes.
        axis: the channel axis of x when scale is [C].

    Returns:
        Codes of dtype `grid.dtype`, shape [*dims], rounded as the grid says. On a grid with a table, indices into it.

    Source: Jacob et al. 2018, arXiv:1712.05877, eq. 1; ONNX QuantizeLinear.
    >>> g = Grid(bits=4, qmin=-8, qmax=7)
    >>> quantize(torch.tensor([-9.0, -0.75, 0.25, 0.5]), torch.tensor(0.5), torch.tensor(0), g).tolist()
    [-8, -2, 0, 1]
    """
    s, z = shape_for(scale, x, axis), shape_for(zero_point, x, axis)
    if grid.table is not None:
        return _index(x / s, grid.table, grid.kind).to(grid.dtype)
    if s.numel() == 1 and x.numel() > _AT_ONCE and x.device.type == "cpu":
        codes = torch.empty_like(x, dtype=grid.dtype)
        if codes.stride() == x.stride():
            s, z = s.flatten(), z.flatten()
            parts = (torch.split(_as_stored(v), _AT_ONCE) for v in (x, codes))
            for part, its in zip(*parts, strict=True):
                its.copy_(_codes(part, s, z, grid))
            return codes
    return _codes(x, s, z, grid).to(grid.dtype)


def _codes(x: Tensor, s: Tensor, z: Tensor, grid: Grid) -> Tensor:
    return by_rule(x / s, grid.rounding).add_(z).clamp_(grid.qmin, grid.qmax)


def _as_stored(x: Tensor) -> Tensor:
    """All numbers of a tensor without gaps, [count], as they lie in memory."""
    return x.as_strided((x.numel(),), (1,))


def _index(v: Tensor, table: tuple[float, ...], kind: str) -> Tensor:
    """The entries of a table that values in units of the scale take."""
    edges = boundaries(table, kind == "log").to(device=v.device, dtype=v.dtype)
    return torch.bucketize(v.contiguous(), edges)


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None = None) -> Tensor:
    """The reals that integer codes stand for: x = (q - z) * s, float32.

    Shapes and units as in `quantize`. The subtraction is done in int32 as ONNX DequantizeLinear does; of codes that
    float32 holds, in that, to the same end.
    """
    s, z = shape_for(scale, q, axis), shape_for(zero_point, q, axis)
    if q.dtype.itemsize < 4 and scale.dtype == torch.float32:
        return q.to(torch.float32).sub_(z) * s
    return (q.to(torch.int32) - z.to(torch.int32)).to(scale.dtype) * s


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axis: int | None = None) -> Tensor:
    """Quantize and dequantize: the nearest real that the grid holds. Shapes and units as in `quantize`."""
    s, z = shape_for(scale, x, axis), shape_for(zero_point, x, axis)
    if grid.table is not None:
        return torch.tensor(grid.table, dtype=x.dtype, device=x.device)[_index(x / s, grid.table, grid.kind)] * s
    return (torch.clamp(by_rule(x / s, grid.rounding) + z, grid.qmin, grid.qmax) - z) * s
