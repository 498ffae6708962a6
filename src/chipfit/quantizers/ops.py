"""The functions in which training formulas are written, so that one formula serves torch and Keras.

A formula receives them as `ops`: `TorchOps` here, `KerasOps` in `frameworks.keras.backend`. Besides the functions below
it may use abs, clip, exp, floor, log2, max (of all), maximum, mean, minimum, reshape, round, sign, sqrt, sum, tanh,
trunc and where, which are the same in torch and `keras.ops`.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.rounding import ROUNDINGS, round_by_rule
from chipfit.quantizers.tables import boundaries, constant

#: bound of x / s before rounding, above which no code lies; it keeps infinities from becoming inf - inf
_MOST = 2.0**40


class TorchOps:
    """The functions for torch tensors: those below, and all of torch."""

    @staticmethod
    def stop_gradient(x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def constant(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
        """Return a tensor [N] with the dtype and device of `like`."""
        return constant(tuple(values), like)

    @staticmethod
    def traced(x: torch.Tensor) -> bool:
        """Return whether x is symbolic, without values yet."""
        return False

    @staticmethod
    def size(x: torch.Tensor) -> int:
        """Return the number of elements."""
        return x.numel()

    @staticmethod
    def sort(x: torch.Tensor) -> torch.Tensor:
        return x.sort().values

    @staticmethod
    def power(x: Any, y: Any) -> torch.Tensor:
        return torch.pow(x, y)

    @staticmethod
    def entry(table: torch.Tensor, edges: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return table[k] for each x in (edges[k-1], edges[k]]; table [N], edges [N-1], both ascending."""
        return table[torch.bucketize(x.contiguous(), edges)]

    @staticmethod
    def fake_quantize(
        x: torch.Tensor, s: torch.Tensor, z: torch.Tensor, grid: Grid, clip_first: bool = False
    ) -> torch.Tensor:
        """Return `fake_quantize`, computed in few passes over memory when eager."""
        compiled = torch.compiler.is_compiling() or torch.compiler.is_exporting()
        # a file of TorchScript holds no function of Python
        compiled = compiled or torch.jit.is_tracing()  # type: ignore[no-untyped-call]  # torch has no types
        if compiled or grid.table is not None:  # plain operators, which a compiler fuses
            slow: torch.Tensor = fake_quantize(TorchOps, x, s, z, grid, clip_first)
            return slow
        return _FakeQuantize.apply(x, s, z, grid, clip_first)  # type: ignore[no-untyped-call, no-any-return]  # torch has no types


# not by `__getattr__` of a metaclass, which torch.compile of torch 2.11 does not ask
for _name in torch.__all__:
    if _name not in vars(TorchOps) and inspect.isroutine(getattr(torch, _name)):
        setattr(TorchOps, _name, staticmethod(getattr(torch, _name)))


def ste(ops: Any, x: Any, y: Any) -> Any:
    """Return exactly y, with the gradient of x: a straight-through estimator (Bengio et al. 2013, arXiv:1308.3432).

    x must be finite.
    """
    return ops.stop_gradient(y) + (x - ops.stop_gradient(x))


def clamp(ops: Any, x: Any, low: Any, high: Any) -> Any:
    """Clip x to numbers or tensors low and high, with gradient 1 of x at both ends on every backend."""
    return ops.where(x < low, low, ops.where(x > high, high, x))


def scale_gradient(ops: Any, x: Any, factor: Any) -> Any:
    """Return x with its gradient multiplied by `factor`."""
    fixed = ops.stop_gradient(x)
    return fixed + (x - fixed) * factor


def fake_quantize(ops: Any, x: Any, s: Any, z: Any, grid: Grid, clip_first: bool = False) -> Any:
    """Return y = (clip(round(x / s) + z) - z) s, or the nearest table entry times s, with gradients for training.

    The gradient of x is 1 inside the grid and 0 outside. That of s is round(x / s) - x / s inside and the clipped code
    minus z outside, as in LSQ (Esser et al. 2020, arXiv:1902.08153, eq. 3); that of z is 0 inside and -s outside (LSQ+,
    Bhalgat et al. 2020, arXiv:2004.09576, eq. 4).

    Args:
        x: floats [*dims].
        s: scale > 0, broadcasts against x.
        z: zero point, integers in the dtype of s, broadcasts against x.
        clip_first: inside is qmin < x / s + z < qmax, as in LSQ; otherwise qmin <= round(x / s) + z <= qmax, as in TQT
            (Jain et al. 2020, arXiv:1903.08066, eqs. 6 to 8), in torch and in MQBench: half a step more at each end.
            Without effect on look-up tables, inside which is between the outer entries.
    """
    if grid.table is None:
        v = ops.clip(x / s, -_MOST, _MOST)
        q = v + ops.stop_gradient(ROUNDINGS[grid.rounding](v, ops) - v) + z  # exact, see `rounding`
        low, high = float(grid.qmin), float(grid.qmax)
        if clip_first:
            return (ops.where(v <= low - z, low, ops.where(v >= high - z, high, q)) - z) * s
        return (clamp(ops, q, low, high) - z) * s
    v = clamp(ops, x / s, grid.table[0], grid.table[-1])
    edges = boundaries(grid.table, grid.kind == "log")
    entry = ops.entry(ops.constant(grid.table, v), ops.constant(edges, v), ops.stop_gradient(v))
    return ste(ops, v, entry) * s


class _FakeQuantize(torch.autograd.Function):
    """A fast `fake_quantize` for integer grids, with hand-written gradients; tests compare the two."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, s: torch.Tensor, z: torch.Tensor, grid: Grid, clip_first: bool
    ) -> torch.Tensor:
        q = x / s  # the only new float tensor: memory costs more than arithmetic
        low, high = float(grid.qmin) - z, float(grid.qmax) - z
        inside = q.gt(low).logical_and_(q.lt(high)) if clip_first and any(ctx.needs_input_grad) else None
        q = round_by_rule(q, grid.rounding)
        if inside is None and any(ctx.needs_input_grad):
            inside = q.ge(low).logical_and_(q.le(high))
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
        if of_s and s.numel() == 1:  # s times each gradient: y - x inside, y outside
            grad_s = ((_dot(grad, y) - _dot(grad_x, x)) / s).reshape(s.shape)
        elif of_s:
            grad_s = (y * grad).sub_(x * grad_x).sum_to_size(s.shape) / s
        if of_z:
            grad_z = -(grad * ~inside * s).sum_to_size(z.shape)
        return grad_x if of_x else None, grad_s, grad_z, None, None


def _dot(a: Any, b: Any) -> torch.Tensor:
    """Return the dot product of tensors of equal shape, in memory order."""
    order = sorted(range(a.dim()), key=a.stride, reverse=True)
    return torch.dot(a.permute(order).reshape(-1), b.permute(order).reshape(-1))
