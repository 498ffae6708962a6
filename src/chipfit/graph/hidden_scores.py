"""Find scores, of a softmax or a maximum, some of which a selection replaces by a large negative number."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from chipfit.graph.ir import Graph, Node

#: takes the place of a hidden score; unlike -inf it gives finite numbers for a row whose scores are all hidden
HIDDEN_SCORE = -1e30
#: no network computes scores this small: such a number only hides
ALWAYS_HIDES = -1e4
#: in front of a softmax, a number this small hides too where all others are 0 (e^-32 = 1e-14)
HIDES_IN_SOFTMAX = -32.0
#: rows without calibration samples may have scores that are smaller by so much
_ROOM = 2.0


def is_visible(x: torch.Tensor) -> torch.Tensor:
    """Return where numbers are values, of which float32 holds the squares; -inf and the least float only hide."""
    return x.abs() < 1e18


class HiddenScores(NamedTuple):
    """Scores of one operator, after selections that hide some."""

    reader: Node  #: Softmax, LogSoftmax or ReduceMax
    axes: tuple[int, ...]  #: over which it compares scores, counted from the end
    selections: tuple[Node, ...]
    fills: tuple[str, ...]  #: constants that hide scores
    values: tuple[str, ...]  #: scores with hidden ones among them

    def bounded(self, x: torch.Tensor, bits: int) -> torch.Tensor:
        """Return scores with numbers in place of hidden ones that do the same where results have some bits.

        A softmax gives 0 to scores that are smaller than the largest one by d: e^-d < 2^-(bits + 1), half a step. A
        maximum ignores what is not larger than all others.
        """
        softmax = self.reader.op != "ReduceMax"
        tops = x.amax(self.axes) if softmax else x
        visible = torch.where(tops <= ALWAYS_HIDES, math.inf, tops).amin()
        below = (bits + 1) * math.log(2) + _ROOM if softmax else 0.0
        return torch.maximum(x, (torch.where(torch.isinf(visible), 0.0, visible) - below).to(x.dtype))


def split_mask(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return where a mask, which is added to scores, keeps them, bool, and its bias there; None if it hides none."""
    mask = mask.detach()
    hidden = mask <= ALWAYS_HIDES
    if not bool(mask.masked_fill(mask <= HIDES_IN_SOFTMAX, 0.0).any()):
        hidden = mask <= HIDES_IN_SOFTMAX
    return (~hidden, mask.masked_fill(hidden, 0.0)) if bool(hidden.any()) else None


def leading_to(graph: Graph, reader: Node, ops: Collection[str]) -> Iterator[Node]:
    """Yield the nodes of some operators from which a node has its data, moved at most; the nearest first.

    The search ends at outputs of the model, which show masks as they are.
    """
    producers, waiting = graph.producers(), [reader.data]
    while waiting:
        n = producers.get(waiting.pop())
        if n is None or n.output in graph.outputs or not (n.op in ops or n.facts.moves):
            continue
        if n.op in ops:
            yield n
        waiting += [i for i in n.inputs if i is not None and i in graph.values and graph.is_float(i)]


def hidden_scores(graph: Graph) -> list[HiddenScores]:
    """Return the scores that selections with a constant hide, in front of each softmax and maximum."""
    found = (_in_front_of(graph, n) for n in graph.nodes if n.facts.softmax or n.op == "ReduceMax")
    return [h for h in found if h.selections]


def _in_front_of(graph: Graph, reader: Node) -> HiddenScores:
    producers, value, shape = graph.producers(), reader.data, graph.shape(reader.data)
    axes = reader.attrs["axes"] if reader.op == "ReduceMax" else (reader.attrs["axis"],)
    axes = tuple(a % len(shape) - len(shape) for a in axes)
    selections, fills, values, between = list[Node](), list[str](), list[str](), list[str]()
    while (n := producers.get(value)) is not None and value not in graph.outputs and _keeps_rows(graph, n, shape, axes):
        between.append(value)
        fill = fill_of(graph, n)
        if fill is not None:
            selections.append(n)
            fills.append(fill)
            values, between = values + between, []
            value = next(i for i in n.inputs[1:] if i is not None and i != fill)
        elif n.facts.view and n.facts.moves:
            value = n.data
        else:
            break
    return HiddenScores(reader, axes, tuple(selections), tuple(fills), tuple(values))


def _keeps_rows(graph: Graph, n: Node, shape: tuple[int | None, ...], axes: tuple[int, ...]) -> bool:
    """Check whether the axes of a result, counted from the end, are those of the scores."""
    return graph.shape(n.output)[min(axes) :] == shape[min(axes) :] and len(graph.shape(n.output)) >= -min(axes)


def fill_of(graph: Graph, n: Node) -> str | None:
    """Return the constant by which a selection hides scores; None if it hides none."""
    constants = [i for i in n.inputs[1:] if i is not None and i in graph.weights] if n.op == "Where" else []
    if len(constants) != 1 or constants[0] in graph.trainable:
        return None
    w = graph.weights[constants[0]]
    return constants[0] if w.numel() == 1 and float(w) <= ALWAYS_HIDES else None
