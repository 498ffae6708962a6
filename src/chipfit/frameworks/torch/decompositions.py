"""Operators of ATen that are read as the simpler ones that compute them."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from chipfit.files import package_data
from chipfit.frameworks.torch.program import aten_name
from chipfit.graph.einsum import as_product

#: operators that are read after their decomposition
DECOMPOSED = frozenset(package_data("chipfit.frameworks.torch", "aten.yaml")["decomposed"].split())
_LONGEST = 512  #: axis along which running reductions are computed for each place by itself


def decomposition_of(op: Any, default: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
    """Return a function that computes an operator by simpler ones, or None if the operator is read as it is.

    The function returns NotImplemented for arguments with which the operator is read as it is, too.

    Args:
        default: the decomposition of the tracer.
    """
    if (name := aten_name(op)) not in DECOMPOSED:
        return None
    own = _OWN.get(name)
    if not op._can_decompose():
        return own or default or torch._decomp.decomposition_table.get(op)
    usual = default or op.decompose  # no tracer can leave it whole
    if own is None:
        return usual

    def own_or_usual(*args: Any, **kwargs: Any) -> Any:
        made = own(*args, **kwargs)
        return usual(*args, **kwargs) if made is NotImplemented else made

    return own_or_usual


def _einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Any:
    """Compute an einsum as one matrix product where it is one; PyTorch's decomposition adds axes of size 1."""
    product = as_product(equation) if len(operands) == 2 else None
    if product is None or operands[0].shape[product.left[-1]] != operands[1].shape[product.right[-2]]:
        return NotImplemented
    a, b = (_permuted(x, perm) for x, perm in zip(operands, product, strict=False))
    return _permuted(a @ b, product.result)


def _permuted(x: Tensor, perm: Sequence[int]) -> Tensor:
    return x if list(perm) == sorted(perm) else x.permute(*perm)


def _bucketize(x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    """Count the boundaries below each number."""
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _searchsorted(
    boundaries: Tensor,
    x: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Count the boundaries below each number, of its own row where there are several rows."""
    x = torch.as_tensor(x, device=boundaries.device)
    boundaries = boundaries if sorter is None else boundaries.gather(-1, sorter)
    boundaries, x = boundaries.unsqueeze(-2) if boundaries.dim() > 1 else boundaries, x.unsqueeze(-1)
    below = boundaries <= x if right or side == "right" else boundaries < x
    count = below.long().sum(-1)
    return count.int() if out_int32 else count


def _up_to(x: Tensor, dim: int, neutral: float) -> tuple[Tensor, Tensor]:
    """Return, for each place along an axis, made the last one, all elements up to there; and what is one of them."""
    rows = x.transpose(dim, -1).unsqueeze(-2)
    place = torch.arange(rows.shape[-1], device=x.device)
    kept = place.unsqueeze(1) >= place
    return torch.where(kept, rows, neutral), kept


def _is_short(x: Tensor, dim: int) -> bool:
    """Return whether an axis is short enough for as many copies of x as it has elements."""
    return x.dim() > 0 and x.shape[dim] <= _LONGEST


def _cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
    if not _is_short(x, dim):
        return NotImplemented
    return _up_to(x if dtype is None else x.to(dtype), dim, 1)[0].prod(-1).transpose(dim, -1)


def _logcumsumexp(x: Tensor, dim: int) -> Any:
    return _up_to(x, dim, -math.inf)[0].logsumexp(-1).transpose(dim, -1) if _is_short(x, dim) else NotImplemented


def _cummax(x: Tensor, dim: int) -> Any:
    return _extreme(x, dim, Tensor.amax, lambda limits: limits.min)


def _cummin(x: Tensor, dim: int) -> Any:
    return _extreme(x, dim, Tensor.amin, lambda limits: limits.max)


def _extreme(x: Tensor, dim: int, reduce: Callable[..., Tensor], neutral: Callable[[Any], float]) -> Any:
    """Return the extreme element up to each place, and the last place where it stands."""
    if x.dtype is torch.bool or not _is_short(x, dim):
        return NotImplemented
    rows, kept = _up_to(x, dim, neutral((torch.finfo if x.is_floating_point() else torch.iinfo)(x.dtype)))
    found = reduce(rows, -1)
    place = torch.arange(rows.shape[-1], device=x.device)
    where = torch.where(kept & (rows == found.unsqueeze(-1)), place, -1).amax(-1)
    return found.transpose(dim, -1), where.transpose(dim, -1)


def _quantile(
    x: Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Any:
    """Sort, and interpolate between the two elements around a share of all."""
    if isinstance(q, Tensor) or not x.dim():
        return NotImplemented
    axis, shape = 0 if dim is None else dim, [1] * x.dim()
    rows = (x.flatten() if dim is None else x).sort(axis)[0]
    place = q * (rows.shape[axis] - 1)
    low = math.floor(place)
    shares = {"lower": 0.0, "higher": math.ceil(place - low), "nearest": round(place) - low, "midpoint": 0.5}
    share = shares.get(interpolation, place - low) if place > low else 0
    y = rows.select(axis, low)
    y = y + (rows.select(axis, low + 1) - y) * share if share else y
    return y if not keepdim else y.view(shape) if dim is None else y.unsqueeze(dim)


def _hits(x: Tensor, dim: int, index: Tensor) -> Tensor | None:
    """Return whether each index, on axis 0, is each place on an axis of x; None if they are too many."""
    size = x.shape[dim] if x.dim() else 0
    if not isinstance(size, int) or not 0 < size * max(index.numel(), 1) <= _LONGEST**2:
        return None
    return index.reshape(-1, 1) % size == torch.arange(size, device=x.device)


def _index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Any:
    """Select one number at places of an axis."""
    if (hits := _hits(x, dim, index)) is None:
        return NotImplemented
    mask = hits.any(0).view([-1 if k == dim % x.dim() else 1 for k in range(x.dim())])
    return torch.where(mask, torch.as_tensor(value, dtype=x.dtype, device=x.device), x)


def _index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Any:
    """Add a product with ones where an element is added to a place."""
    hits = _hits(x, dim, index) if x.is_floating_point() and index.dim() == 1 else None
    if hits is None:
        return NotImplemented
    added = (source.movedim(dim, -1) @ hits.to(x.dtype)).movedim(-1, dim)
    return x + (added if alpha == 1 else alpha * added)


#: operator -> its decomposition, where PyTorch has none, or one of more parts
_OWN: dict[str, Callable[..., Any]] = {
    "einsum": _einsum,
    "bucketize": _bucketize,
    "searchsorted": _searchsorted,
    "cumprod": _cumprod,
    "cummax": _cummax,
    "cummin": _cummin,
    "logcumsumexp": _logcumsumexp,
    "quantile": _quantile,
    "index_fill": _index_fill,
    "index_add": _index_add,
    "msort": lambda x: x.sort(0)[0],
}
