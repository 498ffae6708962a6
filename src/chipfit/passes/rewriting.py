"""Shared parts of rewrites: the records that they return, who reads a value, and whether it may change.

A pass of stage "rewrite" returns `Rewritten`, one of stage "adapt" `Adapted`; plain tuples of the same items will do.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import bias_or_zero, is_linear, on_axis_1, scale_inputs, scale_outputs, with_bias

NodeTest = Callable[[Graph, Node], bool]
Stats = Mapping[str, TensorStats]  #: value -> its statistics


class Rewritten(NamedTuple):
    """A changed graph."""

    graph: Graph
    notes: list[str]  #: one line for each rewrite, or refusal with its reason


class Adapted(NamedTuple):
    """A changed graph and the statistics of its values."""

    graph: Graph
    stats: dict[str, TensorStats]  #: without the histograms of values that changed
    notes: list[str]


@dataclass(slots=True)
class LinearReaders:
    """The linear operators that read a value, directly or through operators that a rewrite may cross."""

    crossed: list[Node] = field(default_factory=list)  #: operators between, in execution order
    ends: list[Node] = field(default_factory=list)  #: the linear operators, in execution order
    refusal: str = ""  #: why some reader is not behind a linear operator


class Readers:
    """Who reads each value and weight of a graph, as the graph was when this was made."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self._users = graph, graph.users()

    def of(self, name: str) -> list[Node]:
        """Return the nodes that read a value or weight, in order; a node that reads it twice appears twice."""
        return self._users.get(name, [])

    def only(self, value: str) -> Node | None:
        """Return the one node that reads `value`, once; None for several readers, or an output of the model."""
        readers = self.of(value)
        return readers[0] if len(readers) == 1 and value not in self.graph.outputs else None

    def after_identities(self, node: Node) -> tuple[str, list[Node]]:
        """Return the result of a node behind any Identity or Dropout that alone reads it, and its readers."""
        value = node.output
        while len(self.of(value)) == 1 and self.of(value)[0].facts.identity:
            value = self.of(value)[0].output
        return value, self.of(value)

    def why_fixed(self, *layers: Node) -> str:
        """Return why weights and biases of layers cannot be changed for these layers alone; "" when they can."""
        return self.why_shared(*(name for n in layers for name in (n.inputs[1], n.bias) if name is not None))

    def why_shared(self, *constants: str) -> str:
        """Return why constants cannot be changed for the one operator that reads them; "" when they can."""
        for name in constants:
            if len(self.of(name)) > 1:
                return f"'{name}' is read by several operators"
            if name in self.graph.outputs:
                return f"'{name}' is an output of the model"
        return ""

    def why_channels_fixed(self, layer: Node) -> str:
        """Return why a layer cannot be changed for each channel on axis 1 of its data; "" when it can."""
        elsewhere = f"the channels of '{layer.display_name}' are not on axis 1"
        return self.why_fixed(layer) or ("" if on_axis_1(self.graph, layer) else elsewhere)

    def linear_behind(self, value: str, crossable: Callable[[Node], bool]) -> LinearReaders:
        """Follow every reader of `value` to a linear operator with constant weights.

        Args:
            crossable: whether the rewrite may pass through an operator of one data input.
        """
        out, todo = LinearReaders(), [value]
        while todo:
            v = todo.pop()
            if v in self.graph.outputs:
                out.refusal = f"'{v}' is an output of the model"
            for n in self.of(v):
                if is_linear(self.graph, n) and n.inputs[0] == v:
                    out.ends.append(n)
                elif crossable(n) and self.graph.activations(n) == [v]:
                    out.crossed.append(n)
                    todo += n.outputs
                else:
                    out.refusal = f"{n.op} '{n.display_name}' reads it"
        order = {n.name: k for k, n in enumerate(self.graph.nodes)}
        for found in (out.crossed, out.ends):
            found.sort(key=lambda n: order[n.name])
        if not out.ends:
            out.refusal = out.refusal or "nothing reads it"
        return out


def scales_by_channel(node: Node) -> bool:
    """Check whether f(s x) = s f(x) holds with one s > 0 for each channel on axis 1."""
    by_channel = node.facts.by_channel or (node.op == "Pad" and tuple(node.attrs["padding"][1]) == (0, 0))
    return by_channel and node.facts.homogeneous


def adds_equal_shapes(graph: Graph, node: Node) -> bool:
    """Check whether a node adds two activations of one shape."""
    data = graph.activations(node)
    return node.op == "Add" and len(data) == 2 and graph.shape(data[0]) == graph.shape(data[1])


def channel_constants(graph: Graph, node: Node) -> tuple[str, ...]:
    """Return the constants that multiply the channels of a result by k, on axis 1, if they are multiplied by k [C].

    They are the scale and shift of a norm, a factor, or an addend, whose operand is multiplied too. Other operators
    have no such constants.
    """
    shape = graph.shape(node.output)
    if node.facts.norm == "channels":
        names, full = node.inputs[1:3], shape[1:2]
    elif node.op in ("Mul", "Add") and len(graph.activations(node)) == 1:
        names = tuple(i for i in node.inputs if i not in graph.values)
        full = (1, *shape[1:2], *[1] * len(shape[2:]))
    else:
        return ()
    found = tuple(i for i in names if i is not None)
    fits = all(graph.is_weight(i) and graph.is_float(i) and _padded(graph, i, len(full)) == full for i in found)
    return found if found[:1] == names[:1] and fits and len(shape) > 1 else ()


def _padded(graph: Graph, constant: str, rank: int) -> tuple[int, ...]:
    """Return the shape of a constant as it meets a value of this rank."""
    shape = tuple(graph.weights[constant].shape)
    return (1,) * (rank - len(shape)) + shape


def scale_between(graph: Graph, producers: Iterable[Node], readers: Iterable[Node], s: torch.Tensor) -> None:
    """Divide the channels of the results of producers by s [C], and multiply the input channels of readers by s.

    Producers are linear operators, embeddings, or have `channel_constants`; readers are linear operators.
    """
    for n in producers:
        if n.op == "Embedding":
            w = graph.weights[n.weight].detach()
            graph.weights[n.weight] = (w.double() / s).to(w.dtype)
        for name in channel_constants(graph, n):
            w = graph.weights[name].detach()
            graph.weights[name] = (w.double() / s.view(w.shape)).to(w.dtype)
        if not is_linear(graph, n):
            continue
        graph.weights[n.weight] = scale_outputs(n, graph.weights[n.weight].detach(), 1 / s)
        if n.bias:
            with_bias(graph, n, bias_or_zero(graph, n) / s)
    for n in readers:
        graph.weights[n.weight] = scale_inputs(n, graph.weights[n.weight].detach(), s)
