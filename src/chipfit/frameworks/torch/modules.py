"""Quantizer modules: fake quantization that trains, with the numerics of `quantizers.grids`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.rounding import ROUNDINGS
from chipfit.quantizers.stored import Stored


class _FakeQuantize(torch.autograd.Function):
    """Straight-through fake quantization with one temporary: gradients pass inside the range and stop outside."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, qmin: int, qmax: int, rounding: str
    ) -> torch.Tensor:
        q = ROUNDINGS[rounding](x / scale).add_(zero)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, scale, zero)
            ctx.grid = qmin, qmax, rounding
        return q.clamp_(qmin, qmax).sub_(zero).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, scale, zero = ctx.saved_tensors
        qmin, qmax, rounding = ctx.grid
        v = x / scale
        q = ROUNDINGS[rounding](v)
        inside = (q + zero >= qmin) & (q + zero <= qmax)
        grad_scale = None
        if ctx.needs_input_grad[1]:  # LSQ, Esser et al. 2020, arXiv:1902.08153, eq. 3
            local = torch.where(inside, q - v, (q + zero).clamp(qmin, qmax) - zero)
            grad_scale = (grad * local).sum_to_size(scale.shape)
        return grad * inside, grad_scale, None, None, None, None


def fake_quantize_ste(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, grid: Grid, axis: int | None = None
) -> torch.Tensor:
    """`grids.fake_quantize` with a straight-through gradient for x and the LSQ gradient for scale.

    Computed in float32, or float64 where x is, and returned in the dtype of x. Shapes and units as in `grids.quantize`.
    """
    shape = [1] * x.dim()
    if axis is not None and scale.dim():
        shape[axis] = -1
        scale, zero_point = scale.view(shape), zero_point.view(shape)
    s = scale.to(torch.promote_types(scale.dtype, x.dtype))
    z = zero_point.to(s.dtype)
    if grid.table is not None:
        return _nearest_entry(x.to(s.dtype), s, grid, grid.table).to(x.dtype)
    if not (torch.compiler.is_compiling() or torch.compiler.is_exporting()):
        return _FakeQuantize.apply(x.to(s.dtype), s, z, grid.qmin, grid.qmax, grid.rounding).to(x.dtype)
    # plain operators, which the compiler fuses; the first clamp keeps an infinity from becoming inf - inf
    v = (x.to(s.dtype) / s).clamp(-(2.0**40), 2.0**40)
    rounded = v + (ROUNDINGS[grid.rounding](v) - v).detach()  # exact, see `rounding`
    return ((torch.clamp(rounded + z, grid.qmin, grid.qmax) - z) * s).to(x.dtype)


def _nearest_entry(x: torch.Tensor, s: torch.Tensor, grid: Grid, table: Sequence[float]) -> torch.Tensor:
    """The nearest entry of the table times s; straight through for x inside the table, d/ds = entry - x/s."""
    v = (x / s).clamp(table[0], table[-1])
    entry = fake_quantize(v.detach(), torch.ones_like(s), torch.zeros_like(s), grid)
    return (v + (entry - v).detach()) * s


class FakeQuantizer(nn.Module):
    """Rounds a tensor to the grid of its plan: y = (clip(round(x / s) + z) - z) s.

    `scale` is a parameter (frozen until `requires_grad_()`), `zero_point` a buffer. `mode` is a plain attribute:
    "quantize", "bypass" (the identity), or "observe" (the identity, keeping the least and greatest value in `seen`).
    """

    MODES = ("quantize", "bypass", "observe")

    zero_point: torch.Tensor

    def __init__(self, tensor: str, stored: Stored) -> None:
        super().__init__()
        self.scale = nn.Parameter(stored.scale.clone(), requires_grad=False)
        self.register_buffer("zero_point", stored.zero_point.clone())
        self.tensor, self.grid, self.axis = tensor, stored.grid, stored.axis
        self.mode = "quantize"
        self.seen: tuple[float, float] | None = None
        #: rounds in our place, see FrameworkInfo.apply
        self.function: Callable[[torch.Tensor], torch.Tensor] | None = None

    def extra_repr(self) -> str:
        codes = f"codes {self.grid.qmin}..{self.grid.qmax}"
        return f"{self.tensor}, {self.grid.bits} bit, {codes}, axis={self.axis}, mode={self.mode}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FakeQuantizer:
        """`.half()` and `.bfloat16()` leave scales in float32: rounding them would move every code."""
        before = self.scale.detach()
        super()._apply(fn, recurse)
        if torch.finfo(self.scale.dtype).bits < 32:
            self.scale.data = before.to(self.scale.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: reals [*dims]. Returns reals on the grid, same shape and dtype."""
        if self.mode == "quantize":
            if self.function is not None:
                return self.function(x)
            return fake_quantize_ste(x, self.scale, self.zero_point, self.grid, self.axis)
        if self.mode == "observe" and x.numel():
            low, high = (float(v) for v in x.detach().aminmax())
            self.seen = (low, high) if self.seen is None else (min(low, self.seen[0]), max(high, self.seen[1]))
        return x


class BiasQuantizer(nn.Module):
    """Rounds a bias to int32 at s_in * s_w, taken from the live quantizers, so that it follows scales in training."""

    def __init__(self, tensor: str, stored: Stored) -> None:
        super().__init__()
        self.tensor, self.grid = tensor, stored.grid
        self.mode = "quantize"

    def extra_repr(self) -> str:
        return f"{self.tensor}, {self.grid.bits} bit at input scale x weight scale, mode={self.mode}"

    def forward(self, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """b: [C]. scale: s_in * s_w, [] or [C]. Returns reals on the grid, [C]."""
        if self.mode != "quantize":
            return b
        return fake_quantize_ste(b, scale, torch.zeros_like(scale), self.grid, 0)
