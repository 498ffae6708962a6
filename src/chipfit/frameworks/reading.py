"""Parts that all readers share: the exception of a call that they cannot read, conditions, and integers by axis."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from chipfit.engine.shapes import results_of
from chipfit.errors import short_message
from chipfit.graph.builder import Outputs
from chipfit.graph.ir import Graph, Node
from chipfit.operators.formulas import compute

T = TypeVar("T")
#: an axis and places on it
Part = tuple[int, list[int]]


class Unreadable(Exception):
    """A call has no canonical equivalent."""


def require(condition: object, why: str = "") -> None:
    """Check a condition under which a call has a canonical equivalent.

    Raises:
        Unreadable: The condition is false, for the reason `why`.
    """
    if not condition:
        raise Unreadable(why)


def present(x: T | None) -> T:
    """Return an operand, an attribute or a size that a call must have.

    Raises:
        Unreadable: It is None.
    """
    if x is None:
        raise Unreadable
    return x


def per_axis(value: int | Sequence[int], n: int) -> tuple[int, ...]:
    """Return one integer for each of n axes.

    >>> per_axis(3, 2), per_axis([3], 2), per_axis((1, 2), 2)
    ((3, 3), (3, 3), (1, 2))
    """
    values = tuple(map(int, value)) if isinstance(value, Sequence) else (int(value),)
    return values * n if len(values) == 1 else values


def inferred(graph: Graph, op: str, inputs: Sequence[str | None], attrs: dict[str, Any]) -> Outputs:
    """Return shape and dtype of each result of a node that is read; see `results_of`.

    Raises:
        Unreadable: The engine does not compute it.
    """
    try:
        return results_of(graph, op, inputs, attrs)
    except (RuntimeError, LookupError) as e:
        raise Unreadable(short_message(e)) from e


def steps_from_zero(step: Callable[..., T], ones: T, one: T) -> T:
    """Append 0, 1, 2 ..., as many as there are ones, by `step(op, operands)`: the running sum of ones, minus one."""
    result: T = compute("cumsum(ones, axis=0) - one", step, ones=ones, one=one)
    return result


def running_sum(c: Any, x: T, axis: int, rank: int, backwards: T | None, exclusive: bool) -> T:
    """Append the sums of the elements up to each one of an axis, by the nodes of a call `c`.

    Args:
        backwards: indices that reverse the axis, for sums from its end.
        exclusive: leave each element out of its own sum.
    """
    x = x if backwards is None else c.step("Gather", [x, backwards], axis=axis)
    x = shifted(c, x, axis, rank, 1, 0.0) if exclusive else x
    y: T = compute("cumsum(x, axis=axis)", c.emit if backwards is None else c.step, x=x, axis=axis)
    return y if backwards is None else c.emit("Gather", [y, backwards], axis=axis)


def shifted(c: Any, x: T, axis: int, rank: int, by: int, value: float) -> T:
    """Append a shift along an axis towards its end; `value` fills the free places."""
    left = c.step("Slice", [x], axis=axis, start=0, end=-by, step=1)
    padding = tuple((by if k == axis else 0, 0) for k in range(rank))
    result: T = c.step("Pad", [left], padding=padding, mode="constant", value=value)
    return result


def parts_of(index: np.ndarray, sizes: Sequence[int], whole: Sequence[int]) -> list[Part]:
    """Return the axes along which indices [*sizes, axes] leave out elements, or change their order, and their places.

    Raises:
        Unreadable: The places on one axis depend on those on another.
    """
    require(index.size and len(sizes) == len(whole))
    places = index % np.array(whole)
    lines = [np.moveaxis(places[..., k], k, 0).reshape(size, -1)[:, 0] for k, size in enumerate(sizes)]
    require(np.array_equal(places, np.stack(np.meshgrid(*lines, indexing="ij"), -1)))
    changed = [k for k, line in enumerate(lines) if not np.array_equal(line, np.arange(whole[k]))]
    return [(k, lines[k].tolist()) for k in changed]


def chunk_sizes(length: int, each: int, most: int = 1 << 30) -> list[int]:
    """Return the sizes of at most so many chunks of `each` elements, of which the last may have fewer.

    >>> chunk_sizes(5, 2)
    [2, 2, 1]
    """
    require(each > 0 and length <= most * each)
    return [min(each, length - k) for k in range(0, length, each)]


def split_padding(
    padding: Sequence[tuple[int, int]], sizes: Sequence[int | None]
) -> tuple[list[tuple[int, int, int]], tuple[tuple[int, int], ...]]:
    """Return (axis, start, end) of what negative padding keeps, and the padding that is left.

    Along an axis of open size, padding stays as it is.

    >>> split_padding([(0, 0), (-1, 2)], [8, 5])
    ([(1, 1, 5)], ((0, 0), (0, 2)))
    """
    ends = list(enumerate(zip(padding, sizes, strict=True)))
    cuts = [(k, max(-a, 0), n - max(-b, 0)) for k, ((a, b), n) in ends if min(a, b) < 0 and n is not None]
    rest = (((a, b) if n is None else (max(a, 0), max(b, 0))) for _, ((a, b), n) in ends)
    return cuts, tuple(rest)


def padded(
    c: Any, x: T, padding: Sequence[tuple[int, int]], sizes: Sequence[int | None], mode: str, value: float = 0.0
) -> T:
    """Pad an operand by the nodes of a call `c`: negative padding cuts it, and "circular" joins slices of it.

    Args:
        sizes: of its axes; None where a size is open.
    """
    if mode == "circular":  # which no file format has
        axes = [axis for axis, ends in enumerate(padding) if any(ends)]
        require(all(end >= 0 for ends in padding for end in ends))
        for axis in axes:
            low, high = padding[axis]
            before = [c.step("Slice", [x], axis=axis, start=-low, end=None, step=1)] if low else []
            behind = [c.step("Slice", [x], axis=axis, start=0, end=high, step=1)] if high else []
            x = (c.emit if axis == axes[-1] else c.step)("Concat", [*before, x, *behind], axis=axis)
        return x
    cuts, rest = split_padding(padding, sizes)
    for axis, start, end in cuts:
        x = c.step("Slice", [x], axis=axis, start=start, end=end, step=1)
    return x if cuts and not any(map(any, rest)) else c.emit("Pad", [x], padding=rest, mode=mode, value=value)


def mixes_samples(graph: Graph) -> bool:
    """Return whether a layer computes one sample, along the only open axis, from others: it holds steps, or tokens."""

    def mixes(n: Node) -> bool:
        data = n.operand("in0")
        shape = graph.shape(data) if data in graph.values else ()
        axis = 1 if n.facts.recurrent else -2 if n.op == "SDPA" else n.attrs["axis"] if n.facts.softmax else None
        return axis is not None and len(shape) > 2 and shape.count(None) == 1 and shape[axis] is None

    return any(mixes(n) for n in graph.nodes)
