"""Operators that join values into one tensor, and the parts of such a tensor, which may differ in magnitude.

A constant behind the join changes the magnitude of each part, as in a head that turns shares of an image into pixels.
"""

from collections.abc import Collection

from chipfit.graph.ir import REQUANTIZE, Graph, Node


def is_join(node: Node) -> bool:
    """Check for an operator whose result holds all numbers of any number of operands, as of Concat."""
    return node.facts.moves and node.facts.slots == ("ins*",)


def moved_from(graph: Graph, node: Node) -> str | None:
    """Return the only float operand of an operator that moves its numbers or copies them; None for other operators."""
    moves = node.op == REQUANTIZE or node.facts.moves
    data = [i for i in node.inputs if i is not None and graph.is_float(i)]
    return data[0] if moves and len(data) == 1 and not is_join(node) else None


def rescaled_from(graph: Graph, node: Node) -> str | None:
    """Return the operand that an operator multiplies, divides or shifts by a constant, number by number; or None."""
    data = graph.activations(node) if "eltwise" in node.facts.groups else []
    if len(data) != 1 or (node.op == "Div" and data[0] != node.inputs[0]):  # a reciprocal is another function
        return None
    return data[0] if graph.is_float(data[0]) and graph.shape(data[0]) == graph.shape(node.output) else None


class Joins:
    """The parts that values of a graph are joined of; each value is looked up once."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.producers = graph, graph.producers()
        self._parts: dict[str, list[str]] = {}

    def parts(self, value: str) -> list[str]:
        """Return the values that a value is joined of, behind operators that move numbers or apply a constant to each.

        A value that is not joined has one part: itself, or what it rearranges.
        """
        found, left = self._parts, [value]
        while left:
            here = left[-1]
            before, whole = _read_of(self.graph, here, self.producers.get(here))
            if new := [v for v in before if v not in found]:
                left += new
                continue
            joined = [*dict.fromkeys(p for v in before for p in found[v])]
            found[left.pop()] = joined if whole or len(joined) > 1 else [here]
        return found[value]

    def makes_parts(self, node: Node) -> bool:
        """Check for an operator that joins parts, or applies constants to joined ones, and so needs a wider grid."""
        rescales = rescaled_from(self.graph, node) is not None
        return is_join(node) or (rescales and len(self.parts(node.output)) > 1)


def _read_of(graph: Graph, value: str, node: Node | None) -> tuple[list[str], bool]:
    """Return what an operator joins, moves or applies a constant to, and whether its result holds the same numbers."""
    if node is None:
        return [], False
    if is_join(node):
        return [i for i in node.inputs if i is not None and graph.is_float(i)], True
    if (moved := moved_from(graph, node)) is not None:
        return [moved], graph.size(moved) == graph.size(value)
    before = rescaled_from(graph, node)
    return ([] if before is None else [before]), False


def output_joins(graph: Graph, also: Collection[str] = ()) -> list[Node]:
    """Return the operators that join or rescale parts of an output of the model, behind operators that move numbers.

    Args:
        also: results whose operators are returned, too, if they are an output.
    """
    joins, left, out = Joins(graph), [*graph.outputs], dict[str, Node]()
    while left:
        node = joins.producers.get(left.pop())
        if node is None or node.name in out:
            continue
        if joins.makes_parts(node):
            out[node.name] = node
            left += graph.activations(node)
        elif node.output in also:
            out[node.name] = node
        elif before := moved_from(graph, node):
            left.append(before)
    return [n for n in graph.nodes if n.name in out]
