"""Operators of torch on complex numbers as pairs of real ones, where torch has no gradient or no ONNX form for them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chipfit.operators.table import enters

#: name of an operator -> function that takes the operator and its arguments, and runs in its place
_ON_PAIRS: dict[str, Callable[..., Any]] = {}
_on_pairs = enters(_ON_PAIRS)


@functools.cache
def on_pairs(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return a function that runs in an operator's place; None if torch can do all with the operator itself."""
    function = _ON_PAIRS.get(op._schema.name.partition("::")[2])
    return functools.partial(function, op) if function else None


def _pairs(x: Any) -> Any:
    """Return complex numbers [*dims] as reals [*dims, 2]; all else as it is."""
    return torch.view_as_real(x.resolve_conj()) if isinstance(x, Tensor) and x.is_complex() else x


def _numbers(out: Any) -> Any:
    """Return pairs, or several tensors of pairs, as complex numbers."""
    return [*map(_numbers, out)] if isinstance(out, (tuple, list)) else torch.view_as_complex(out.contiguous())


@_on_pairs("slice_scatter select_scatter select unsqueeze split split_with_sizes unbind index_select")
def _along_axis(op: Any, x: Tensor, *args: Any, **named: Any) -> Any:
    """Run an operator along an axis, counted from the first one: the last is that of the pairs."""
    if not x.is_complex():
        return op(x, *args, **named)
    order = [a.name for a in op._schema.arguments[1:]]
    given = {"dim": 0, **dict(zip(order, args, strict=False)), **named}
    given["dim"] = range(x.dim() + op._schema.name.endswith("unsqueeze"))[given["dim"]]
    return _numbers(op(_pairs(x), **{k: _pairs(v) for k, v in given.items()}))


@_on_pairs("expand")
def _expand(op: Any, x: Tensor, size: Any, **named: Any) -> Any:
    return _numbers(op(_pairs(x), [*size, 2], **named)) if x.is_complex() else op(x, size, **named)


@_on_pairs("copy")
def _copy(op: Any, x: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    """Return values in the shape and type of another tensor; torch has no gradient for reals, either."""
    return _expand(Tensor.expand, src.to(x, non_blocking=non_blocking), x.shape).clone()


@_on_pairs("zeros_like")
def _zeros_like(op: Any, x: Tensor, **named: Any) -> Any:
    if not x.is_complex() or named.get("dtype") is not None:
        return op(x, **named)
    return _numbers(op(_pairs(x), **named | {"memory_format": torch.contiguous_format}))


@_on_pairs("zeros")
def _zeros(op: Any, size: Any, **named: Any) -> Any:
    dtype = named.get("dtype")
    if dtype is None or not dtype.is_complex:
        return op(size, **named)
    return _numbers(op([*size, 2], **named | {"dtype": dtype.to_real()}))
