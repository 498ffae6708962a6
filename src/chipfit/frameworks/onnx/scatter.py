"""Readers of ScatterND and ScatterElements that replace elements at fixed places of one axis."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.read import reads
from chipfit.frameworks.reading import present, require

#: axis and places where every element is replaced
_WHOLE: tuple[int, list[int]] = (-1, [])


@reads("ScatterND")
def _scatter_nd(c: OnnxCall) -> Any:
    """Read indices that count the axes of x, all but one of them from 0 to the end."""
    x, index = c.operand(0), c.operand(1)
    pairs = zip(index.numbers, (m.shape for m in x.metas), strict=False)
    found = [_places_of(n, n.shape[:-1], shape[: n.shape[-1]]) for n, shape in pairs]
    return _replaced(c, found)


@reads("ScatterElements")
def _scatter_elements(c: OnnxCall) -> Any:
    """Read the same places of an axis for all elements of the other axes."""
    x, index, axis = c.operand(0), c.operand(1), c.attr("axis") % c.operand(0).rank
    found = []
    for n, m in zip(index.numbers, x.metas, strict=False):
        others = [k for k in range(n.ndim) if k != axis]
        require(n.size and all(n.shape[k] == m.shape[k] for k in others))
        places = n[tuple(slice(None) if k == axis else 0 for k in range(n.ndim))] % m.shape[axis]
        require((n % m.shape[axis] == np.expand_dims(places, others)).all())
        found.append(_part(axis, places, m.shape[axis]))
    return _replaced(c, found)


def _places_of(index: np.ndarray, sizes: Sequence[int], whole: Sequence[int]) -> tuple[int, list[int]]:
    """Return the axis along which indices [*sizes, axes] leave out elements, or change their order, and its places.

    Raises:
        Unreadable: They do so along several axes.
    """
    require(index.size and len(sizes) == len(whole))
    places = index % np.array(whole)
    lines = [np.moveaxis(places[..., k], k, 0).reshape(size, -1)[:, 0] for k, size in enumerate(sizes)]
    require(np.array_equal(places, np.stack(np.meshgrid(*lines, indexing="ij"), -1)))
    parts = [p for k, line in enumerate(lines) if (p := _part(k, line, whole[k])) != _WHOLE]
    require(len(parts) <= 1)
    return parts[0] if parts else _WHOLE


def _part(axis: int, places: np.ndarray, size: int) -> tuple[int, list[int]]:
    return _WHOLE if np.array_equal(places, np.arange(size)) else (axis, places.tolist())


def _replaced(c: OnnxCall, found: Sequence[tuple[int, list[int]]]) -> Any:
    """Read x with operand 2, or with one number, at the same places of one axis in all variants.

    Raises:
        Unreadable: The places differ between variants or occur twice, or elements are added to those of x.
    """
    x, new = c.operand(0), c.operand(2)
    require(found and all(f == found[0] for f in found) and c.attr("reduction") in (None, "none"))
    axis, places = found[0]
    if found[0] == _WHOLE:
        return new
    size = present(x.shape[axis])
    require(len({*places}) == len(places))
    numbers = {n.item() for every in new.numbers for n in every.reshape(-1)[:1]}
    if len(numbers) == 1 and all((n == next(iter(numbers))).all() for n in new.numbers):
        mask = torch.zeros(size, dtype=torch.bool).index_fill(0, torch.tensor(places), True)
        number = c.new_weight(torch.tensor(numbers.pop(), dtype=x.dtype), "number")
        return c.emit("Where", [c.new_weight(mask.reshape(-1, *[1] * (x.rank - axis - 1)), "places"), number, x])
    if places == list(range(places[0], places[0] + len(places))):
        before, after = (_span(c, x, axis, a, b) for a, b in ((0, places[0]), (places[-1] + 1, size)))
        return c.emit("Concat", [*before, new, *after], axis=axis)
    order = torch.arange(size)
    order[places] = size + torch.arange(len(places))
    return c.emit("Gather", [c.step("Concat", [x, new], axis=axis), c.new_weight(order, "order")], axis=axis)


def _span(c: OnnxCall, x: Operand, axis: int, start: int, end: int) -> list[Operand]:
    """Return a part of an axis; none of no elements."""
    if x.constant is not None and not x.name and start < end:
        return [c.builder.constants([x.constant.take(range(start, end), axis)])]
    return [c.step("Slice", [x], axis=axis, start=start, end=end, step=1)] if start < end else []
