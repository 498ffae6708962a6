"""Construction of a Graph by a framework's reader: unique names, nodes with outputs, attempts that can be undone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph, Node, Value

#: operators of numbers that are logical ones of booleans -> the end of their name
_LOGICAL = {"Mul": "And", "Add": "Or"}

Outputs = Sequence[tuple[Sequence[int | None], str]]  #: shape and dtype of each output


@dataclass(frozen=True, slots=True)
class Origin:
    """The user's layer that the nodes being read belong to."""

    path: str = ""
    kind: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    source: str = ""


class GraphBuilder:
    """A Graph under construction."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.names: set[str] = set()  #: of nodes, values and weights
        self._counts: dict[str, int] = {}  #: name -> the last number behind it

    def fresh(self, wanted: str) -> str:
        """Reserve and return an unused name like `wanted`."""
        name = unique_name(wanted, self.names, self._counts)
        self.names.add(name)
        return name

    def value(self, name: str, shape: Sequence[int | None], dtype: str) -> Value:
        """Add a value under exactly this name."""
        self.names.add(name)
        self.graph.values[name] = Value(name, tuple(shape), dtype)
        return self.graph.values[name]

    def emit(
        self, origin: Origin, name: str, op: str, inputs: Sequence[str | None], attrs: dict[str, Any], outs: Outputs
    ) -> list[Value]:
        """Append a node; a single output has the node's name, several outputs a number behind it.

        Args:
            inputs: by slot; None for an absent one.
            outs: shape and dtype of each output.
        """
        op = f"Logical{_LOGICAL[op]}" if op in _LOGICAL and outs[0][1] == "bool" else op
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
        """Return the current state, for `forget`."""
        return len(self.graph.nodes), len(self.graph.weights)

    def forget(self, mark: tuple[int, int]) -> set[str]:
        """Remove the nodes and weights since `mark`; return their names, which are free again."""
        graph, (nodes, weights) = self.graph, mark
        gone = {o for n in graph.nodes[nodes:] for o in (n.name, *n.outputs)} | set(list(graph.weights)[weights:])
        for name in gone:
            graph.values.pop(name, None)
            graph.weights.pop(name, None)
        self.names -= gone
        self._counts.clear()
        graph.trainable -= gone
        del graph.nodes[nodes:]
        return gone
