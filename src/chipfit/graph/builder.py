"""A Graph while a framework's reader writes it: fresh names, nodes with their outputs, attempts that can be undone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph, Node, Value

Forms = Sequence[tuple[Sequence[int | None], str]]  #: shape and dtype of each output


@dataclass(frozen=True, slots=True)
class Origin:
    """The user's layer that the nodes being read belong to."""

    path: str = ""
    kind: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    source: str = ""


class GraphBuilder:
    """The growing Graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: set[str] = set()  #: of nodes, values and weights

    def fresh(self, wanted: str) -> str:
        """A name like `wanted` that nothing has, taken from now on."""
        name = unique_name(wanted, self.names)
        self.names.add(name)
        return name

    def value(self, name: str, shape: Sequence[int | None], dtype: str) -> Value:
        """Enter a value under exactly this name."""
        self.names.add(name)
        self.graph.values[name] = Value(name, tuple(shape), dtype)
        return self.graph.values[name]

    def emit(
        self, origin: Origin, name: str, op: str, inputs: Sequence[str | None], attrs: dict[str, Any], outs: Forms
    ) -> list[Value]:
        """Append a node; one output has the node's name, several a number behind it.

        Args:
            inputs: by slot; absent ones at the end may be None.
            outs: of each output.
        """
        name = self.fresh(name)
        names = [name] if len(outs) == 1 else [self.fresh(f"{name}.{i}") for i in range(len(outs))]
        values = [self.value(n, *out) for n, out in zip(names, outs, strict=True)]
        slots = list(inputs)
        while slots and slots[-1] is None:
            slots.pop()
        node = Node(name, op, tuple(slots), tuple(names), attrs, origin.path, origin.kind, origin.source, origin.config)
        self.graph.nodes.append(node)
        return values

    def mark(self) -> tuple[int, int]:
        """Where the draft stands, for `forget`."""
        return len(self.graph.nodes), len(self.graph.weights)

    def forget(self, mark: tuple[int, int]) -> set[str]:
        """Take back the nodes and weights since `mark`; returns their names, which are free again."""
        graph, (nodes, weights) = self.graph, mark
        gone = {o for n in graph.nodes[nodes:] for o in (n.name, *n.outputs)} | set(list(graph.weights)[weights:])
        for name in gone:
            graph.values.pop(name, None)
            graph.weights.pop(name, None)
        self.names -= gone
        graph.trainable -= gone
        del graph.nodes[nodes:]
        return gone
