"""Turn a network over sequences into one of a single step, with the states of recurrent layers as inputs and outputs.

Axis 1 of what depends on the sequence is removed. Every operator on the way must compute each step by itself.
"""

from dataclasses import replace
from typing import Any, NoReturn

from chipfit.errors import UnsupportedError
from chipfit.graph.edit import drop_dead, new_name
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.table import OPS
from chipfit.passes.recurrent import RECURRENT

_MOVES = ("Transpose", "Squeeze", "Unsqueeze")
#: further operators that compute each step by itself, if the axis of steps is none of theirs
_PER_STEP = tuple("Linear Dropout Identity Cast LayerNorm RMSNorm Softmax LogSoftmax Concat Split Slice".split())
_HINT = "write the step as a model of its own, with its states as arguments and results"


def one_step(graph: Graph) -> tuple[Graph, list[tuple[str, str]]]:
    """Return the network of one step, and its states: (input, the output that is its next value).

    Args:
        graph: over inputs [N, T, ...]; it is not changed.

    Raises:
        UnsupportedError: a layer runs backwards or joins several steps, or no layer has a state.
    """
    builder = _Steps(graph)
    for n in graph.nodes:
        builder.add(n)
    if not builder.states:
        raise UnsupportedError("The network has no recurrent layer, whose state a step would keep", hint=_HINT)
    return builder.finished(), builder.states


class _Steps:
    """The network of one step in the making."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.out, self.states = graph, graph.copy(), list[tuple[str, str]]()
        self.out.nodes, self.renamed = [], dict[str, str]()
        self.timed: dict[str, int] = {}  #: value -> its axis of steps
        for name in graph.inputs:
            if len(graph.shape(name)) > 1:
                self._without_steps(name, 1)

    def add(self, n: Node) -> None:
        """Add the step of a node."""
        axes = {self.timed[i] for i in n.inputs if i in self.timed}
        if len(axes) > 1:
            self._refuse(n, "its operands have their steps on different axes")
        before, n = n, n.with_(inputs=tuple(self.renamed.get(i or "", i) for i in n.inputs))
        if not axes:
            self.out.nodes.append(n)
        elif n.op in RECURRENT:
            self._add_recurrent(before, n)
        elif n.op == "Select" and self._takes_last(before):
            self._rename(n, None)
        elif n.op in _MOVES:
            self._add_move(before, n, *axes)
        else:
            self.out.nodes.append(n.with_(attrs=self._attributes(before)))
            for o in n.outputs:
                self._without_steps(o, *axes)

    def _takes_last(self, n: Node) -> bool:
        axis, index, size = n.attrs["axis"], n.attrs["index"], self.graph.shape(n.data)[self.timed[n.data]]
        return axis % len(self.graph.shape(n.data)) == self.timed[n.data] and index in (-1, (size or 0) - 1)

    def _rename(self, n: Node, axis: int | None) -> None:
        """Let the readers of a node read its operand; its result has its steps on `axis`, or none."""
        self.renamed[n.output] = n.data
        del self.out.values[n.output]
        if axis is not None:
            self.timed[n.output] = axis

    def _add_recurrent(self, before: Node, n: Node) -> None:
        """Add one step of a recurrent layer, with inputs and outputs for its states."""
        count = 2 if n.op == "LSTM" else 1
        if n.attrs["reverse"]:
            self._refuse(n, "it runs from the last step to the first")
        if self.timed[before.data] != 1 or any(n.inputs[5:]):
            self._refuse(n, "it has an initial state, or its samples do not come first")
        y, last, *cell = n.outputs
        size, inputs = self.graph.shape(n.inputs[2] or "")[1], [*n.inputs, *[None] * (5 + count - len(n.inputs))]
        for k, result in enumerate((y, *cell)):
            name = new_name(self.out, f"{n.name}_state" if k == 0 else f"{n.name}_cell")
            self.out.values[name] = Value(name, (None, size), self.graph.values[y].dtype)
            self.out.inputs.append(name)
            inputs[5 + k] = name
            self.states.append((name, result))
        self.out.nodes.append(n.with_(inputs=tuple(inputs), outputs=(y, *cell)))
        self.renamed[last] = y
        del self.out.values[last]
        self._without_steps(y, 1)

    def _add_move(self, before: Node, n: Node, axis: int) -> None:
        """Add a change of the order or the number of axes, without the axis of steps; nothing where none is left."""
        rank, key = len(self.graph.shape(before.data)), "perm" if n.op == "Transpose" else "axes"
        given = [a % (rank + len(n.attrs[key]) * (n.op == "Unsqueeze")) for a in n.attrs[key]]
        if n.op == "Transpose":
            moved = given.index(axis)
            left = [a - (a > axis) for a in given if a != axis]
        elif n.op == "Squeeze":
            moved = axis - sum(a < axis for a in given)
            left = [a - (a > axis) for a in given if a != axis]
        else:
            moved = [a for a in range(rank + len(given)) if a not in given][axis]
            left = [a - (a > moved) for a in given]
        if len(left) != len(given) - (n.op == "Transpose"):
            self._refuse(n, "it removes the axis of steps")
        if n.op == "Transpose" and left == sorted(left):
            self._rename(n, moved)
        else:
            self.out.nodes.append(n.with_(attrs={key: tuple(left)}))
            self._without_steps(n.output, moved)

    def _without_steps(self, name: str, axis: int) -> None:
        v = self.graph.values[name]
        self.timed[name] = axis
        self.out.values[name] = replace(v, shape=(*v.shape[:axis], *v.shape[axis + 1 :]))

    def _attributes(self, n: Node) -> dict[str, Any]:
        """Return the attributes of a node for operands without the axis of steps.

        Raises:
            UnsupportedError: the node joins several steps.
        """
        timed = next(i for i in n.inputs if i in self.timed)
        rank, axis = len(self.graph.shape(timed)), self.timed[timed]
        layout = OPS[n.op].layout if n.op in OPS else ""
        if layout not in ("elementwise", "along") and n.op not in _PER_STEP:
            self._refuse(n, "it may join several steps")
        for i in n.inputs if n.op != "Linear" else ():
            shape = self.graph.shape(i) if i is not None and i not in self.timed else ()
            if len(shape) >= rank - axis and shape[len(shape) - (rank - axis)] != 1:
                self._refuse(n, f"'{i}' differs from step to step")
        attrs = dict(n.attrs)
        for key in ("axis", "axes"):
            if key in attrs:
                given = attrs[key] if isinstance(attrs[key], tuple) else (attrs[key],)
                if axis in (a % rank for a in given):
                    self._refuse(n, "it works along the axis of steps")
                found = tuple(a % rank - (a % rank > axis) for a in given)
                attrs[key] = found if isinstance(attrs[key], tuple) else found[0]
        if len(attrs.get("normalized_shape", ())) >= rank - axis:
            self._refuse(n, "it works along the axis of steps")
        return attrs

    def _refuse(self, n: Node, why: str) -> NoReturn:
        raise UnsupportedError(f"{n.op} '{n.display_name}' cannot run one step at a time: {why}", hint=_HINT)

    def finished(self) -> Graph:
        """Return the network, with the next states behind its outputs."""
        out = self.out
        out.outputs = [self.renamed.get(o, o) for o in out.outputs] + [result for _, result in self.states]
        drop_dead(out)
        return out
