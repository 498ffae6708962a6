"""Turn a network over sequences into one of a single step, with the states of its layers as inputs and outputs.

The states of recurrent layers are their own, that of a causal convolution is the steps that it reads again. Axis 1 of
what depends on the sequence is removed. Every operator on the way must compute each step by itself. Of a
recurrent layer that is decomposed into steps, the last step is taken; what it reads of the step before is the state.
"""

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from chipfit.errors import UnsupportedError
from chipfit.graph.decomposed_steps import places_in_steps
from chipfit.graph.edit import drop_dead, new_name
from chipfit.graph.ir import Graph, Node, Value

_MOVES = ("Transpose", "Squeeze", "Unsqueeze")
#: further operators that compute each step by itself, if the axis of steps is none of theirs
_PER_STEP = tuple("Linear Dropout Identity Cast BatchNorm Concat Split Slice Select".split())
_HINT = "write the step as a model of its own, with its states as arguments and results"


@dataclass(frozen=True)
class OneStep:
    """A network of one step."""

    graph: Graph
    states: list[tuple[str, str]]  #: (input, the output that is its next value)
    stored: dict[str, str]  #: new value -> the value of the network over sequences with whose numbers it is stored


def one_step(graph: Graph, rounded: Container[str] = ()) -> OneStep:
    """Return the network of one step.

    Args:
        graph: over inputs [N, T, ...]; it is not changed.
        rounded: values that are stored in integers.

    Raises:
        UnsupportedError: a layer runs backwards or joins several steps, or no layer has a state.
    """
    builder = _Steps(graph, rounded)
    for n in graph.nodes:
        builder.add(n)
    if not builder.states:
        raise UnsupportedError(
            "The network has no recurrent layer or convolution over several steps, whose state a step would keep",
            hint=_HINT,
        )
    return OneStep(builder.finished(), builder.states, builder.stored)


class _Unrolled:
    """The steps of recurrent layers that are decomposed."""

    def __init__(self, graph: Graph) -> None:
        self.last: dict[str, int] = {}  #: layer -> number of its last step
        self._at, self._outputs = dict[str, Any](), dict[Any, tuple[str, ...]]()
        for n, layer, step, place in places_in_steps(graph):
            self.last[layer] = max(step, self.last.get(layer, -1))
            self._outputs[layer, step, place] = n.outputs
            self._at |= {o: (layer, step, place, k) for k, o in enumerate(n.outputs)}
        self.parts = {n.name for n in graph.nodes if n.composite in self.last}
        self.made: dict[str, Node] = {}  #: value of a step that is left out -> its node

    def next_value(self, name: str) -> str | None:
        """Return what the next step makes in the place of a value; None if it is not of the step before the last."""
        if name not in self._at:
            return None
        layer, step, place, k = self._at[name]
        found = self._outputs.get((layer, step + 1, place))
        return found[k] if found is not None and step + 1 == self.last[layer] else None


class _Steps:
    """The network of one step in the making."""

    def __init__(self, graph: Graph, rounded: Container[str] = ()) -> None:
        self.graph, self.out, self.states = graph, graph.copy(), list[tuple[str, str]]()
        self.rounded, self.stored, self.unrolled = rounded, dict[str, str](), _Unrolled(graph)
        self.out.nodes, self.renamed = [], dict[str, str]()
        self.timed: dict[str, int] = {}  #: value -> its axis of steps
        self.surplus: dict[str, tuple[int, int]] = {}  #: value -> how many zeros it has before and behind the steps
        self.wide: set[str] = set()  #: values that keep the axis of steps, of size 1
        self.narrow: dict[str, str] = {}  #: such a value -> the same without the axis
        for name in graph.inputs:
            if len(graph.shape(name)) > 1:
                self._without_steps(name, 1)

    def add(self, n: Node) -> None:
        """Add the step of a node."""
        if self._is_taken_apart(n):
            return
        n = n.with_(inputs=tuple(self._state(n, i) for i in n.inputs))
        axes = {self.timed[i] for i in n.inputs if i in self.timed}
        if len(axes) > 1:
            self._refuse(n, "its operands have their steps on different axes")
        if axes and self._add_window(n, *axes):
            return
        before, n = n, n.with_(inputs=tuple(self._narrow(self.renamed.get(i or "", i)) for i in n.inputs))
        if not axes:
            self.out.nodes.append(n)
        elif n.facts.recurrent:
            self._add_recurrent(before, n)
        elif n.op == "Select" and self._takes_last(before):
            self._rename(n, None)
        elif n.op in _MOVES:
            self._add_move(before, n, *axes)
        elif n.op == "Reshape" and self._keeps_steps(before):
            sizes = tuple(-1 if s is None else s for s in self.graph.shape(n.output))
            self.out.nodes.append(n.with_(attrs={"shape": (sizes[0], *sizes[2:])}))
            self._without_steps(n.output, 1)
        else:
            self.out.nodes.append(n.with_(attrs=self._attributes(before)))
            for o in n.outputs:
                self._without_steps(o, self._axis_of_result(before, *axes))

    def _keeps_steps(self, n: Node) -> bool:
        """Return whether a change of shape is one of the axes behind that of steps."""
        old, new = self.graph.shape(n.data), self.graph.shape(n.output)
        return self.timed[n.data] == 1 and old[:2] == new[:2] and None not in new[2:]

    def _axis_of_result(self, n: Node, axis: int) -> int:
        """Return the axis of steps of a result that may lack axes of its operand."""
        if n.op == "Select" or not n.attrs.get("keepdims", True):
            rank, given = len(self.graph.shape(n.data)), n.attrs.get("axes", (n.attrs.get("axis"),))
            return axis - sum(a % rank < axis for a in given)
        return axis

    def _is_taken_apart(self, n: Node) -> bool:
        """Return whether a node belongs to another step than the last, or joins or separates steps; leave it out."""
        if n.name not in self.unrolled.parts:
            return False
        data = self.renamed.get(n.data, n.data)
        if n.op == "Unstack":
            for o in n.outputs[:-1]:
                self.unrolled.made[o] = n
            self.renamed[n.outputs[-1]] = data
        elif n.step is not None and n.step < self.unrolled.last[n.composite]:
            self.unrolled.made |= dict.fromkeys(n.outputs, n)
        elif n.op == "Unsqueeze":
            self.renamed[n.output] = data
        elif n.op == "Concat":
            last = n.inputs[-1] or ""
            self.renamed[n.output], self.timed[n.output] = self.renamed.get(last, last), 1
        else:
            return False
        for o in n.outputs:
            self.out.values.pop(o)
        return True

    def _state(self, n: Node, name: str | None) -> str | None:
        """Return the input that holds a value of the step before; other operands as they are."""
        made = self.unrolled.made.get(name or "")
        if made is None or name is None:
            return name
        following = self.unrolled.next_value(name)
        if following is None or n.composite != made.composite:
            self._refuse(n, f"it reads '{name}', which is of another step than the last")
        known = {o: i for i, o in self.states}
        if following not in known:
            what = "cell" if any(i.startswith(f"{n.composite}_state") for i, _ in self.states) else "state"
            known[following] = self._add_state(f"{n.composite}_{what}", self.graph.values[name], following)
            self.stored[known[following]] = name
        return known[following]

    def _add_state(self, wanted: str, like: Value, following: str) -> str:
        name = new_name(self.out, wanted)
        self.out.values[name] = replace(like, name=name)
        self.out.inputs.append(name)
        self.states.append((name, following))
        return name

    # ------------------------------------------------------------------------- causal convolutions

    def _add_window(self, n: Node, axis: int) -> bool:
        """Add a node that reads several steps, or that keeps the axis of steps, of size 1; return whether it is one.

        Zeros may be added to the steps before a convolution, or by it and cut off again behind it.
        """
        if n.op == "Pad":
            self._add_padding(n, axis)
            return True
        before, behind = self.surplus.get(n.data, (0, 0))
        if n.op == "Slice" and (before or behind) and n.attrs["axis"] % len(self.graph.shape(n.data)) == axis:
            left = -(n.attrs["end"] or 0) if (n.attrs["end"] or 0) <= 0 else self._size(n.data, axis) - n.attrs["end"]
            if n.attrs["start"] != before or left != behind or n.attrs["step"] != 1:
                self._refuse(n, "it does not cut off the zeros that were added to the steps")
            self._rename(n, axis)
            return True
        if n.facts.kind == "conv" and "output_padding" not in n.attrs and axis >= 2:
            self._add_convolution(n, axis, before, behind)
            return True
        if any(i in self.surplus for i in n.inputs):
            self._refuse(n, "it reads zeros that were added to the steps")
        if "kernel" in n.attrs and axis >= 2 and self._is_alone(n, axis - 2):
            self._add_wide(n, axis)
            return True
        timed = [self.renamed.get(i, i) for i in n.inputs if i in self.timed]
        alone = n.op == "BatchNorm" or n.facts.layout == "elementwise"
        if not alone or not self.wide.issuperset(timed):
            return False
        self._attributes(n)
        self.out.nodes.append(n.reading(self.renamed))
        for o in n.outputs:
            self._keep_axis(o, axis)
        return True

    def _add_padding(self, n: Node, axis: int) -> None:
        padding = list(n.attrs["padding"])
        added, padding[axis] = padding[axis], (0, 0)
        if any(added) and (n.attrs["mode"] != "constant" or n.attrs["value"] != 0 or n.data in self.surplus):
            self._refuse(n, "it adds other steps than zeros")
        self.surplus |= {n.output: added} if any(added) else {}
        if any(map(any, padding)):
            self._add_wide(n, axis, padding=tuple(padding))
        else:
            self._rename(n, axis)

    def _add_wide(self, n: Node, axis: int, **attrs: Any) -> None:
        """Add a node that works along other axes than that of steps, which it keeps."""
        x = self._widened(n, self.renamed.get(n.data, n.data), axis)
        self.out.nodes.append(n.with_(inputs=(x, *n.inputs[1:]), attrs={**n.attrs, **attrs}))
        self._keep_axis(n.output, axis)

    def _widened(self, n: Node, x: str, axis: int) -> str:
        """Return a value with the axis of steps, of size 1."""
        if x in self.wide:
            return x
        shape = (*self.out.shape(x)[:axis], 1, *self.out.shape(x)[axis:])
        return self._move(n, "Unsqueeze", (x,), shape, axes=(axis,))

    def _add_convolution(self, n: Node, axis: int, before: int, behind: int) -> None:
        """Add a convolution over the steps so far; the last inputs are a state."""
        k, weight = axis - 2, self.graph.shape(n.weight)
        reach = ((weight[axis] or 0) - 1) * n.attrs["dilation"][k]
        (low, high), x = n.attrs["padding"][k], self.renamed.get(n.data, n.data)
        if n.attrs["stride"][k] != 1 or before + low < reach:
            self._refuse(n, "it skips steps" if n.attrs["stride"][k] != 1 else "it reads later steps, or begins later")
        if before + low > reach or (behind + high not in (0, reach)):
            self._refuse(n, "it adds more zeros to the steps than it reads")
        x = self._widened(n, x, axis)
        if reach:
            x = self._with_ring(n, x, axis, reach)
        padding = tuple((0, 0) if j == k else p for j, p in enumerate(n.attrs["padding"]))
        self.out.nodes.append(n.with_(inputs=(x, *n.inputs[1:]), attrs={**n.attrs, "padding": padding}))
        self._keep_axis(n.output, axis)
        if behind + high:
            self.surplus[n.output] = 0, behind + high

    def _with_ring(self, n: Node, x: str, axis: int, reach: int) -> str:
        """Return a step behind the last ones, which are the state."""
        shape, value = self.out.shape(x), self.graph.values[n.data]
        ring = self._add_state(f"{n.name}_state", replace(value, shape=(*shape[:axis], reach, *shape[axis + 1 :])), "")
        self.stored[ring] = n.data
        longer = (*shape[:axis], reach + 1, *shape[axis + 1 :])
        both = self._move(n, "Concat", (ring, x), longer, axis=axis)
        cut = {"axis": axis, "start": 1, "end": reach + 1, "step": 1}
        self.states[-1] = ring, self._move(n, "Slice", (both,), self.out.shape(ring), **cut)
        return both

    def _move(self, n: Node, op: str, inputs: tuple[str, ...], shape: tuple[int | None, ...], **attrs: Any) -> str:
        """Add a node that moves numbers of the operand of `n`; return its result."""
        name = new_name(self.out, f"{n.name}_{op.lower()}")
        self.out.values[name] = replace(self.graph.values[n.data], name=name, shape=shape)
        self.out.nodes.append(Node(name, op, inputs, (name,), attrs, layer=n.layer))
        self.stored[name] = n.data
        return name

    def _is_alone(self, n: Node, k: int) -> bool:
        """Return whether a window covers one step at a time, along spatial axis k."""
        return (n.attrs["kernel"][k], n.attrs["stride"][k], n.attrs["padding"][k]) == (1, 1, (0, 0))

    def _keep_axis(self, name: str, axis: int) -> None:
        v = self.graph.values[name]
        self.timed[name], self.out.values[name] = axis, replace(v, shape=(*v.shape[:axis], 1, *v.shape[axis + 1 :]))
        self.wide.add(name)

    def _narrow(self, name: str | None) -> str | None:
        """Return a value without the axis of steps, where it has one of size 1."""
        if name is None or name not in self.wide:
            return name
        if name not in self.narrow:
            axis, v = self.timed[name], self.out.values[name]
            result = self.narrow[name] = new_name(self.out, f"{name}_step")
            self.out.values[result] = replace(v, name=result, shape=(*v.shape[:axis], *v.shape[axis + 1 :]))
            self.out.nodes.append(Node(result, "Squeeze", (name,), (result,), {"axes": (axis,)}))
            self.stored[result] = name
        return self.narrow[name]

    def _size(self, name: str, axis: int) -> int:
        return self.graph.shape(name)[axis] or 0

    def _takes_last(self, n: Node) -> bool:
        axis, index, size = n.attrs["axis"], n.attrs["index"], self.graph.shape(n.data)[self.timed[n.data]]
        return axis % len(self.graph.shape(n.data)) == self.timed[n.data] and index in (-1, (size or 0) - 1)

    def _rename(self, n: Node, axis: int | None) -> None:
        """Let the readers of a node read its operand; its result has its steps on `axis`, or none."""
        self.renamed[n.output] = self.renamed.get(n.data, n.data)
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
        like = Value("", (None, size), self.graph.values[y].dtype)
        integer = any(v in self.rounded for v in cell)  # its kernel rounds the states themselves
        state, rounds = y, not integer and any(v in self.rounded for v in (y, last))
        if rounds:  # readers get it rounded, the next step as it is
            state = new_name(self.out, f"{n.name}_float")
            self.out.values[state] = replace(like, name=state)
        for k, (what, result) in enumerate(zip(("state", "cell"), (state, *cell))):
            name = inputs[5 + k] = self._add_state(f"{n.name}_{what}", like, result)
            self.stored |= {name: result} if integer else {}
        self.out.nodes.append(n.with_(inputs=tuple(inputs), outputs=(state, *cell)))
        self._without_steps(y, 1)
        if rounds:
            copies = (
                Node(new_name(self.out, f"{v}_rounded"), "Identity", (state,), (v,), layer=n.layer) for v in (y, last)
            )
            self.out.nodes += copies
        else:
            self.renamed[last] = y
            del self.out.values[last]

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
        by_step = n.facts.layout in ("elementwise", "along", "reduce") or n.facts.norm == "vectors" or n.facts.softmax
        if not by_step and n.op not in _PER_STEP:
            self._refuse(n, "it may join several steps")
        for i in n.inputs if n.op not in ("Linear", "BatchNorm") else ():
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
        if len(attrs.get("normalized_shape", ())) >= rank - axis or (n.op == "BatchNorm" and axis == 1):
            self._refuse(n, "it works along the axis of steps")
        return attrs

    def _refuse(self, n: Node, why: str) -> NoReturn:
        raise UnsupportedError(f"{n.op} '{n.display_name}' cannot run one step at a time: {why}", hint=_HINT)

    def finished(self) -> Graph:
        """Return the network, with the next states behind its outputs."""
        out = self.out
        if any(o in self.surplus for o in out.outputs):
            raise UnsupportedError("An output has zeros that were added to the steps", hint=_HINT)
        out.outputs = [self._narrow(self.renamed.get(o, o)) or o for o in out.outputs] + [
            result for _, result in self.states
        ]
        drop_dead(out)
        return out
