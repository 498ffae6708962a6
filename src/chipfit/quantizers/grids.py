"""Quantization grids, the finite sets of numbers that a tensor may take, and quantization to them.

Quantized values are also called codes: integers, or indices into a table. Each grid has a rounding rule, by default
half to even; values are divided by the scale, and the zero point is added after rounding, as in ONNX QuantizeLinear.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from chipfit.quantizers.rounding import round_by_rule
from chipfit.quantizers.tables import boundaries, constant

#: least and greatest power of two among scales, which are float32
SCALES = 2.0**-149, 2.0**127
#: values that are quantized at once: temporaries of larger tensors would need fresh memory
AT_ONCE = 1 << 17


def all_codes(bits: int, signed: bool) -> tuple[int, int]:
    """Return the lowest and the highest code of a width: in two's complement, or unsigned."""
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def in_16_bits(scale: torch.Tensor) -> torch.Tensor:
    """Return the nearest numbers with 16 significant bits."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.round(mantissa * 2.0**16), exponent - 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The quantization grid of one tensor, with all choices of its format made (including signedness)."""

    bits: int  #: width of a stored code
    qmin: int  #: lowest code
    qmax: int  #: highest code
    zero: int | Literal["any"] | tuple[int, ...] = 0  #: zero point: fixed, "any", or one of a set
    pot: bool = False  #: the scale must be a power of two
    bf16: bool = False  #: the scale must be a bfloat16
    per: Literal["tensor", "channel", "block", "row"] = "tensor"  #: what shares one scale
    kind: Literal["int", "offset", "lut", "log", "float"] = "int"  #: all except "int" store indices into `table`
    scale_min: float | None = None  #: least scale that the hardware represents
    scale_max: float | None = field(default=None, repr=False)  #: greatest scale, at which numbers beyond saturate
    #: greatest magnitude of the sum of two neighbours, see `quantizers.pairs`; not in the text, which checkpoints hold
    pair_limit: int | None = field(default=None, repr=False)
    #: the scale has 16 significant bits, so that its products with 8-bit integers are exact in float32
    short_scale: bool = field(default=False, repr=False)
    entries: int | None = None  #: "lut": size of the table that is fitted to each tensor
    table: tuple[float, ...] | None = None  #: entries, ascending, in units of the scale; codes are indices into it
    rounding: str = "half_even"  #: rule of `rounding.ROUNDINGS`; a table uses the nearest entry

    @property
    def nearest(self) -> bool:
        """Return whether steps are equal, and floats are rounded to the nearest one."""
        return self.table is None and self.rounding.startswith("half")

    @property
    def signed(self) -> bool:
        return self.qmin < 0

    @property
    def symmetric(self) -> bool:
        """Return whether the zero point is fixed, so that one number, the threshold, gives the range."""
        return self.zero != "any"

    @property
    def levels(self) -> int:
        return self.qmax - self.qmin + 1 if self.table is None else len(self.table)

    @property
    def ends(self) -> tuple[float, float]:
        """Lowest and highest value in units of the scale, before the zero point is subtracted."""
        return (self.table[0], self.table[-1]) if self.kind == "offset" and self.table else (self.qmin, self.qmax)

    @property
    def file_bits(self) -> int:
        """Width of the smallest integer type in files that holds the codes."""
        return next((b for b in (4, 8, 16) if self.bits <= b), 32)

    @property
    def file_ends(self) -> tuple[int, int]:
        """Lowest and highest value of that type, where it saturates."""
        return all_codes(self.file_bits, self.signed)

    @property
    def dtype(self) -> torch.dtype:
        """Smallest torch integer type that holds every code."""
        if self.kind != "int":
            indices = 1 << self.bits if self.table is None else len(self.table)  # 0 may be an entry besides all codes
            return torch.uint8 if indices <= 256 else torch.int32
        for d in (torch.int8, torch.uint8, torch.int16, torch.int32):
            if torch.iinfo(d).min <= self.qmin and self.qmax <= torch.iinfo(d).max:
                return d
        return torch.int64


def shape_for(p: Tensor, x: Tensor, axis: int | None) -> Tensor:
    """Return scales or zero points, [], [C] or one a block, in a shape that broadcasts against x.

    Scales of blocks have all axes of x; each is repeated for the elements of its block.
    """
    if axis is None or p.dim() == 0:
        return p
    if p.dim() > 1:
        return p.repeat_interleave(x.shape[axis] // p.shape[axis], axis)
    shape = [1] * x.dim()
    shape[axis] = -1
    return p.view(shape)


def in_blocks(x: Tensor, axis: int, block: int) -> Tensor:
    """Return x as [*others, blocks, block], where blocks lie along `axis`."""
    last = x.movedim(axis, -1)
    return last.reshape(*last.shape[:-1], -1, block)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axis: int | None = None) -> Tensor:
    """Quantize floats: q = clip(round(x / s) + z, qmin, qmax), or the index of the nearest entry of the grid's table.

    Args:
        x: floats [*dims], in the tensor's unit u.
        scale: s > 0 in u per step, [] or [C] along `axis`, or with all axes of x, one for each block along `axis`.
        zero_point: code of 0.0, integer, same shape as scale.
        axis: channel axis of x if scale is [C].

    Returns:
        Quantized values of dtype `grid.dtype`, [*dims].

    Source: Jacob et al. 2018, arXiv:1712.05877, eq. 1; ONNX QuantizeLinear.
    >>> g = Grid(bits=4, qmin=-8, qmax=7)
    >>> quantize(torch.tensor([-9.0, -0.75, 0.25, 0.5]), torch.tensor(0.5), torch.tensor(0), g).tolist()
    [-8, -2, 0, 1]
    """
    s, z = shape_for(scale, x, axis), shape_for(zero_point, x, axis)
    if grid.table is not None:
        return _index(x / s, grid.table, grid.kind).to(grid.dtype)
    if s.numel() == 1 and x.numel() > AT_ONCE and x.device.type == "cpu":
        codes = torch.empty_like(x, dtype=grid.dtype)
        if codes.stride() == x.stride():
            s, z = s.flatten(), z.flatten()
            parts = (torch.split(_as_stored(v), AT_ONCE) for v in (x, codes))
            for part, its in zip(*parts, strict=True):
                its.copy_(_codes(part, s, z, grid))
            return codes
    return _codes(x, s, z, grid).to(grid.dtype)


def _codes(x: Tensor, s: Tensor, z: Tensor, grid: Grid) -> Tensor:
    return round_by_rule(x / s, grid.rounding).add_(z).clamp_(grid.qmin, grid.qmax)


def _as_stored(x: Tensor) -> Tensor:
    """Return the elements of a dense tensor in memory order, [count]."""
    return x.as_strided((x.numel(),), (1,))


def _index(v: Tensor, table: tuple[float, ...], kind: str) -> Tensor:
    """Return the indices of the table entries nearest to values in units of the scale."""
    return torch.bucketize(v.contiguous(), constant(boundaries(table, kind == "log"), v))


def dequantize(q: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None = None) -> Tensor:
    """Dequantize integers: x = (q - z) * s, float32; shapes and units as in `quantize`.

    ONNX DequantizeLinear subtracts in int32; for codes that float32 holds exactly, float32 gives the same result.
    """
    s, z = shape_for(scale, q, axis), shape_for(zero_point, q, axis)
    if q.dtype.itemsize < 4 and scale.dtype == torch.float32:
        return q.to(torch.float32).sub_(z) * s
    return (q.to(torch.int32) - z.to(torch.int32)).to(scale.dtype) * s


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid, axis: int | None = None) -> Tensor:
    """Quantize and dequantize floats; shapes and units as in `quantize`."""
    s, z = shape_for(scale, x, axis), shape_for(zero_point, x, axis)
    if grid.table is not None:
        return constant(grid.table, x)[_index(x / s, grid.table, grid.kind)] * s
    codes = round_by_rule(x / s, grid.rounding)
    if codes.requires_grad:
        return (torch.clamp(codes + z, grid.qmin, grid.qmax) - z) * s
    return codes.add_(z).clamp_(grid.qmin, grid.qmax).sub_(z).mul_(s)  # memory traffic dominates
