"""The functions that training formulas are written in: what torch and `keras.ops` both provide, under Keras's names.

A formula takes them as `ops`: `TorchOps` here, `KerasOps` in `frameworks.keras.backend`. Besides those below it may use
abs, clip, exp, floor, log2, max (of all), maximum, minimum, reshape, round, sign, sqrt, tanh, trunc and where, which
are alike.
"""

from collections.abc import Sequence
from typing import Any

import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.rounding import ROUNDINGS, by_rule
from chipfit.quantizers.tables import boundaries

#: codes are told apart below this; an infinity must not become inf - inf
_MOST = 2.0**40


class _Alike(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(torch, name)


class TorchOps(metaclass=_Alike):
    """The functions on torch tensors."""

    @staticmethod
    def stop_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def constant(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
        """A tensor [N] of the dtype and on the device of another."""
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    @staticmethod
    def traced(x: torch.Tensor) -> bool:
        """Whether x stands for values that are not known yet."""
        return False

    @staticmethod
    def size(x: torch.Tensor) -> int:
        """How many numbers x holds."""
        return x.numel()

    @staticmethod
    def sum(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        return x.sum() if axis is None else x.sum(axis, keepdim=keepdims)

    @staticmethod
    def mean(x: torch.Tensor, axis: Any = None, keepdims: bool = False) -> torch.Tensor:
        return x.mean() if axis is None else x.mean(axis, keepdim=keepdims)

    @staticmethod
    def sort(x: torch.Tensor) -> torch.Tensor:
        return x.sort().values

    @staticmethod
    def power(x: Any, y: Any) -> torch.Tensor:
        return torch.pow(x, y)

    @staticmethod
    def entry(table: torch.Tensor, edges: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """table[k] for each x in (edges[k-1], edges[k]]; table [N], edges [N-1], both ascending."""
        return table[torch.bucketize(x.contiguous(), edges)]

    @staticmethod
    def fake_quantize(x: torch.Tensor, s: torch.Tensor, z: torch.Tensor, grid: Grid) -> torch.Tensor:
        """See `fake_quantize`; eager, in a few passes over memory."""
        compiled = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        if compiled or grid.table is not None:  # plain operators, which the compiler fuses
            slow: torch.Tensor = fake_quantize(TorchOps, x, s, z, grid)
            return slow
        return _FakeQuantize.apply(x, s, z, grid)  # type: ignore[no-untyped-call, no-any-return]  # torch has no types


def ste(ops: Any, x: Any, y: Any) -> Any:
    """The value y, exactly, with the gradient of x: a straight-through estimator (Bengio et al. 2013, arXiv:1308.3432).

    x must be finite.
    """
    return ops.stop_gradient(y) + (x - ops.stop_gradient(x))


def clamp(ops: Any, x: Any, low: Any, high: Any) -> Any:
    """x between low and high, with gradient 1 at both ends on every backend; numbers or tensors, which take theirs."""
    return ops.where(x < low, low, ops.where(x > high, high, x))


def gradient_times(ops: Any, x: Any, factor: Any) -> Any:
    """x, whose gradient is multiplied."""
    fixed = ops.stop_gradient(x)
    return fixed + (x - fixed) * factor


def fake_quantize(ops: Any, x: Any, s: Any, z: Any, grid: Grid) -> Any:
    """y = (clip(round(x / s) + z) - z) s, which trains: the nearest entry of the table times s, where there is one.

    The gradient of x is 1 where its code is inside the grid and 0 outside. That of s is round(x / s) - x / s inside and
    the clipped code minus z outside, as in LSQ (Esser et al. 2020, arXiv:1902.08153, eq. 3); that of z is 0 inside and
    -s outside (LSQ+, Bhalgat et al. 2020, arXiv:2004.09576, eq. 4).

    Args:
        x: reals [*dims].
        s: scale > 0, broadcasts against x.
        z: zero point, integers in the dtype of s, broadcasts against x.
    """
    if grid.table is None:
        v = ops.clip(x / s, -_MOST, _MOST)
        q = v + ops.stop_gradient(ROUNDINGS[grid.rounding](v, ops) - v) + z  # exact, see `rounding`
        return (clamp(ops, q, float(grid.qmin), float(grid.qmax)) - z) * s
    v = clamp(ops, x / s, grid.table[0], grid.table[-1])
    edges = boundaries(grid.table, grid.kind == "log").tolist()
    entry = ops.entry(ops.constant(grid.table, v), ops.constant(edges, v), ops.stop_gradient(v))
    return ste(ops, v, entry) * s


class _FakeQuantize(torch.autograd.Function):
    """`fake_quantize` on integer grids with its gradients by hand; tests hold one against the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor, grid: Grid) -> torch.Tensor:
        q = by_rule(x / s, grid.rounding)  # the one new tensor of reals: fetching memory costs more than arithmetic
        low, high = float(grid.qmin) - z, float(grid.qmax) - z
        inside = q.ge(low).logical_and_(q.le(high)) if any(ctx.needs_input_grad) else None
        y = torch.clamp(q, low, high, out=q).mul_(s)
        if inside is not None:
            of_s = ctx.needs_input_grad[1]
            ctx.save_for_backward(inside, s, z, x if of_s else None, y if of_s else None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        inside, s, z, x, y = ctx.saved_tensors
        of_x, of_s, of_z = ctx.needs_input_grad[:3]
        grad_s = grad_z = None
        grad_x = torch.where(inside, grad, grad.new_zeros(())) if of_x or of_s else None
        if of_s and s.numel() == 1:  # s times the factor of each: y - x inside, y outside
            grad_s = ((_dot(grad, y) - _dot(grad_x, x)) / s).reshape(s.shape)
        elif of_s:
            grad_s = (y * grad).sub_(x * grad_x).sum_to_size(s.shape) / s
        if of_z:
            grad_z = -(grad * ~inside * s).sum_to_size(z.shape)
        return grad_x if of_x else None, grad_s, grad_z, None


def _dot(a: Any, b: Any) -> torch.Tensor:
    """The sum of products of tensors of one shape, in the order in which they lie in memory."""
    order = sorted(range(a.dim()), key=a.stride, reverse=True)
    return torch.dot(a.permute(order).reshape(-1), b.permute(order).reshape(-1))
