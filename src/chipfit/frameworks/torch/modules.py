"""Quantizer modules: fake quantization that trains, with the numerics of `quantizers.grids`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from chipfit.plan import TensorPlan
from chipfit.quantizers.grids import Grid


class _FakeQuantize(torch.autograd.Function):
    """Straight-through fake quantization with one temporary: gradients pass inside the range and stop outside."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, qmin: int, qmax: int) -> torch.Tensor:
        q = torch.round(x / scale).add_(zero)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            ctx.save_for_backward(x, scale, zero)
            ctx.bounds = qmin, qmax
        return q.clamp_(qmin, qmax).sub_(zero).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        x, scale, zero = ctx.saved_tensors
        qmin, qmax = ctx.bounds
        v = x / scale
        q = torch.round(v)
        inside = (q + zero >= qmin) & (q + zero <= qmax)
        grad_scale = None
        if ctx.needs_input_grad[1]:  # LSQ, Esser et al. 2020, arXiv:1902.08153, eq. 3
            local = torch.where(inside, q - v, (q + zero).clamp(qmin, qmax) - zero)
            grad_scale = (grad * local).sum_to_size(scale.shape)
        return grad * inside, grad_scale, None, None, None


class FakeQuantizer(nn.Module):
    """Rounds a tensor to the grid of its plan: y = (clip(round(x / s) + z) - z) s.

    `scale` is a parameter (frozen until `requires_grad_()`), `zero_point` a buffer. `mode` is a plain attribute:
    "quantize" or "bypass".
    """

    def __init__(self, plan: TensorPlan) -> None:
        super().__init__()
        assert plan.grid is not None and plan.scale is not None and plan.zero_point is not None  # lower() asks for quantized tensors only
        self.scale = nn.Parameter(plan.scale.clone(), requires_grad=False)
        self.register_buffer("zero_point", plan.zero_point.clone())
        self.grid: Grid = plan.grid
        self.axis = plan.axis
        self.tensor = plan.name
        self.mode = "quantize"

    def extra_repr(self) -> str:
        return f"{self.tensor}, {self.grid.bits} bit, codes {self.grid.qmin}..{self.grid.qmax}, axis={self.axis}, mode={self.mode}"

    def _along(self, p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if self.axis is None or p.dim() == 0:
            return p
        shape = [1] * x.dim()
        shape[self.axis] = -1
        return p.view(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: reals [*dims]. Returns reals on the grid, same shape and dtype."""
        if self.mode == "bypass":
            return x
        return self._round(x, self.scale)

    def _round(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        s = self._along(scale, x).to(x.dtype) if x.dtype is torch.float64 else self._along(scale, x)
        z = self._along(self.zero_point, x).to(s.dtype)  # type: ignore[arg-type]  # a buffer is a tensor
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            v = x.to(s.dtype) / s
            r = v + (torch.round(v) - v).detach()
            return ((torch.clamp(r + z, self.grid.qmin, self.grid.qmax) - z) * s).to(x.dtype)
        return _FakeQuantize.apply(x.to(s.dtype), s, z, self.grid.qmin, self.grid.qmax).to(x.dtype)


class BiasQuantizer(FakeQuantizer):
    """An int32 bias at s_in * s_w: its scale follows the two quantizers that it is derived from, also in training."""

    def __init__(self, plan: TensorPlan, of_input: FakeQuantizer, of_weight: FakeQuantizer) -> None:
        super().__init__(plan)
        self._sources = [of_input, of_weight]  # a list, so that they are registered once, under their own names
        del self.scale

    @property
    def scale(self) -> torch.Tensor:  # type: ignore[override]
        s = self._sources[0].scale * self._sources[1].scale
        return s if self.zero_point.dim() == s.dim() else s.expand(self.zero_point.shape)  # type: ignore[union-attr]

    def __deepcopy__(self, memo: dict[int, Any]) -> BiasQuantizer:
        import copy

        new = BiasQuantizer.__new__(BiasQuantizer)
        memo[id(self)] = new
        nn.Module.__init__(new)
        new._buffers["zero_point"] = copy.deepcopy(self.zero_point, memo)
        new.grid, new.axis, new.tensor, new.mode, new.training = self.grid, self.axis, self.tensor, self.mode, self.training
        new._sources = [copy.deepcopy(s, memo) for s in self._sources]
        return new
