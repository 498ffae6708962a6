"""Readers of ScatterND and ScatterElements that replace elements at fixed places."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.read import reads
from chipfit.frameworks.reading import Part, parts_of, present, require


@reads("ScatterND")
def _scatter_nd(c: OnnxCall) -> Any:
    """Read indices that count the first axes of x."""
    x, index = c.operand(0), c.operand(1)
    pairs = zip(index.numbers, (m.shape for m in x.metas), strict=False)
    return _replaced_in_all(c, [parts_of(n, n.shape[:-1], shape[: n.shape[-1]]) for n, shape in pairs])


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
        found.append([] if np.array_equal(places, np.arange(m.shape[axis])) else [(axis, places.tolist())])
    return _replaced_in_all(c, found)


def _replaced_in_all(c: OnnxCall, found: Sequence[list[Part]]) -> Any:
    """Read x with operand 2, or with one number, at the same places in all variants of the sizes.

    Raises:
        Unreadable: The places differ between variants or occur twice, or elements are added to those of x.
    """
    x, new = c.operand(0), c.operand(2)
    require(found and all(f == found[0] for f in found) and c.attr("reduction") in (None, "none"))
    require(all(x.shape[axis] is not None and len({*places}) == len(places) for axis, places in found[0]))
    numbers = {k for n in new.numbers for k in np.unique(n).tolist()}
    if not found[0] or len(numbers) != 1:
        return _replaced(c, x, found[0], new, c.emit)
    parts = dict(found[0])
    mask = torch.zeros([present(x.shape[k]) if k in parts else 1 for k in range(x.rank)], dtype=torch.bool)
    mask[np.ix_(*(parts.get(k, [0]) for k in range(x.rank)))] = True
    number = c.new_weight(torch.tensor(numbers.pop(), dtype=x.dtype), "number")
    return c.emit("Where", [c.new_weight(mask, "places"), number, x])


def _replaced(c: OnnxCall, x: Operand, parts: Sequence[Part], new: Operand, append: Callable[..., Operand]) -> Operand:
    """Return x with other values in a part of it; `append` appends the last node."""
    if not parts:
        return new
    (axis, places), *rest = parts
    size, start, end = present(x.shape[axis]), places[0], places[-1] + 1
    if places == list(range(start, end)):
        if rest:
            new = _replaced(c, _span(c, x, axis, start, end)[0], rest, new, c.step)
        before, after = _span(c, x, axis, 0, start), _span(c, x, axis, end, size)
        return append("Concat", [*before, new, *after], axis=axis)
    if rest:
        own = c.step("Gather", [x, c.new_weight(torch.tensor(places), "places")], axis=axis)
        new = _replaced(c, own, rest, new, c.step)
    order = torch.arange(size)
    order[places] = size + torch.arange(len(places))
    return append("Gather", [c.step("Concat", [x, new], axis=axis), c.new_weight(order, "order")], axis=axis)


def _span(c: OnnxCall, x: Operand, axis: int, start: int, end: int) -> list[Operand]:
    """Return a part of an axis; none of no elements."""
    if x.constant is not None and not x.name and start < end:
        return [c.builder.constants([x.constant.take(range(start, end), axis)])]
    return [c.step("Slice", [x], axis=axis, start=start, end=end, step=1)] if start < end else []
