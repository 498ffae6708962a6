"""The places that the parts of a joined value take in it, and what constants behind the join have made of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from chipfit.engine.kernels import execute
from chipfit.graph.ir import Graph
from chipfit.graph.joins import Joins, rescaled_from

#: a value of more parts, such as one for each time step, is taken as one
MOST_PARTS = 32


@dataclass(frozen=True, slots=True)
class Gain:
    """A gain and an offset that constants give a part of an output."""

    times: float = 1.0  #: root mean square over the part's places
    plus: float = 0.0  #: mean


def part_labels(joins: Joins, value: str) -> Tensor | None:
    """Return which of `Joins.parts` each number of a value comes from; None if it is one part, or is not known.

    Returns:
        Indices, [1, ...]: of one sample; sizes that are open are 1.
    """
    found = joins.parts(value)
    if not 1 < len(found) <= MOST_PARTS:
        return None
    starts = {part: torch.full(_one_sample(joins.graph, part), k) for k, part in enumerate(found)}
    return _follow(joins, value, starts, rescale=False)


def part_gains(joins: Joins, value: str) -> dict[str, Gain] | None:
    """Return what constants behind the join make of each part of a value; None if that is not known."""
    labels, found = part_labels(joins, value), joins.parts(value)
    if labels is None:
        return {part: Gain() for part in found} if len(found) == 1 else None
    of_zero, of_one = (
        _follow(joins, value, {part: torch.full(_one_sample(joins.graph, part), x) for part in found}, rescale=True)
        for x in (0.0, 1.0)
    )
    if of_zero is None or of_one is None:
        return None
    places = {part: labels == k for k, part in enumerate(found)}
    times, plus = (of_one - of_zero).double(), of_zero.double()
    return {p: Gain(float(times[at].square().mean().sqrt()), float(plus[at].mean())) for p, at in places.items()}


def _one_sample(graph: Graph, value: str) -> list[int]:
    """Return the sizes of one sample of a value, where those that are open are 1."""
    return [1, *(1 if size is None else size for size in graph.shape(value)[1:])]


def _follow(joins: Joins, value: str, starts: Mapping[str, Tensor], rescale: bool) -> Tensor | None:
    """Return a value, computed from its parts; None if sizes are open, or axes have taken the batch's place.

    Args:
        rescale: whether constants are applied; otherwise only numbers are moved.
    """
    graph, producers, table = joins.graph, joins.producers, dict(starts)

    def operand(name: str | None) -> Tensor | None:
        if name is None or not graph.is_float(name):
            return None
        return graph.weights[name] if graph.is_weight(name) else compute(name)

    def compute(name: str) -> Tensor:
        if name not in table:
            node = producers[name]
            before = None if rescale else rescaled_from(graph, node)
            if before is not None:
                table[name] = compute(before)
            else:
                table.update(zip(node.outputs, execute(node, [operand(i) for i in node.inputs]), strict=False))
        return table[name]

    try:
        return compute(value)
    except (RuntimeError, TypeError, IndexError):
        return None
