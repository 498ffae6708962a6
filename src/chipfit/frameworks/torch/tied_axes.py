"""Sizes of the inputs that stay open: the batch, and those in which the example calls differ."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

Place = tuple[int, int]  #: index among the leaves of a call, axis


@dataclass(frozen=True, slots=True)
class TiedAxes:
    """Axes of inputs that have one size, which may vary."""

    places: tuple[Place, ...]
    old: int  #: in the example
    new: int  #: for which the model is watched, too
    is_batch: bool = False

    def resized(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of the example with the other size, by leaving rows out or repeating them."""
        out = list(leaves)
        for i, axis in self.places:
            out[i] = out[i].index_select(axis, torch.arange(self.new, device=out[i].device) % self.old)
        return out

    def doubled(self, leaves: Sequence[Any]) -> tuple["TiedAxes", list[Any]]:
        """Return the example with a size of 2 in place of 1, which tracers take for a constant."""
        twice = TiedAxes(self.places, self.old, 2).resized(leaves)
        return TiedAxes(self.places, 2, 3, self.is_batch), twice


def batch_places(sizes: Sequence[TiedAxes]) -> tuple[Place, ...]:
    """Return the places of the batch; none where samples depend on each other, because one input has two such axes."""
    places = next((s.places for s in sizes if s.is_batch), ())
    return places if len(dict(places)) == len(places) else ()


def varied_axes(x: Any, others: Sequence[Any]) -> list[int]:
    """Return the axes in which one of these tensors has another size than `x`."""
    shapes = [y.shape for y in (x, *others)] if isinstance(x, torch.Tensor) else []
    return [k for k, sizes in enumerate(zip(*shapes, strict=False)) if len(set(sizes)) > 1]


def ways(calls: Sequence[Any], axis: int = 0) -> Iterator[tuple[TiedAxes, ...]]:
    """Yield the ways in which sizes of the inputs may belong together; the batch comes first.

    The batch is one axis of the first input, 0 or 1, and of the inputs with as many rows there. If its size differs
    among the calls, other axes that have its size in all of them may belong to it: axis 1 of a recurrent state, both
    axes of an adjacency matrix. If no call varies it, the model may also fix it, and the last way leaves it out. Other
    sizes are open if calls differ in them; axes of several inputs share one if they are equal in all calls, axes of one
    input never do.

    Args:
        calls: the example, then further calls of equal structure.
        axis: of the batch; 1 in a model whose steps come first, for which some way must leave it open.
    """
    example, *others = [pytree.tree_leaves(call) for call in calls]
    sizes: dict[Place, tuple[int, ...]] = {
        (i, k): tuple(leaves[i].shape[k] for leaves in (example, *others))
        for i, x in enumerate(example)
        if isinstance(x, torch.Tensor)
        for k in range(x.dim())
    }
    first = next((p for p, s in sizes.items() if p[1] == axis and s[0] > 0), None)
    if first is None:
        if axis == 0:
            yield tuple(_varied(example, others, sizes, ()))
        return
    batch = sizes[first]
    for places in _batches(first, [p for p, s in sizes.items() if s == batch], len(set(batch)) > 1):
        rest = _varied(example, others, sizes, places)
        yield (TiedAxes(tuple(places), batch[0], _another(batch), True), *rest) if places else tuple(rest)


def _batches(first: Place, equal: list[Place], varies: bool) -> list[list[Place]]:
    """Return the sets of places that may be the batch, of all places that have its size; an empty one: it is fixed."""
    rows = [p for p in equal if p[1] == first[1]]
    if first[1] == 1:
        return [rows]
    if not varies:
        return [rows, []]
    have_rows, columns = {i for i, _ in rows}, dict(reversed([p for p in equal if p[1] > 0]))
    states = [(i, axis) for i, axis in columns.items() if i not in have_rows]
    inner = {**dict(rows), **{i: axis for i, axis in columns.items() if axis == 1 and i != first[0]}}
    out: list[list[Place]] = []
    for places in (rows, sorted([*rows, *states]), sorted(inner.items()), equal):
        if places not in out:
            out.append(places)
    return out


def _another(sizes: tuple[int, ...]) -> int:
    """Return another size than the first one, above 1 because tracers take an open size as 2 or more."""
    given = next((s for s in sizes if s > 1 and s != sizes[0]), None)
    return given or (2 if sizes[0] > 2 else sizes[0] + 1)


def _varied(example: Any, others: Any, sizes: dict[Place, tuple[int, ...]], taken: Sequence[Place]) -> list[TiedAxes]:
    places: dict[Any, list[Place]] = {}
    for i, x in enumerate(example):
        own = Counter[tuple[int, ...]]()
        for axis in varied_axes(x, [leaves[i] for leaves in others]):
            if (i, axis) not in taken:
                own[sizes[i, axis]] += 1
                places.setdefault((sizes[i, axis], own[sizes[i, axis]]), []).append((i, axis))
    return [TiedAxes(tuple(at), s[0], next(n for n in s if n != s[0])) for (s, _), at in places.items()]
