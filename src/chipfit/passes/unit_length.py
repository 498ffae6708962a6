"""Fuse the operators that scale vectors to length 1 into one L2 normalisation, on chips that have one."""

import math
from typing import NamedTuple

from chipfit.graph.edit import drop_dead, replace_node
from chipfit.graph.ir import Graph, Node
from chipfit.passes.rewriting import NodeTest, Rewritten
from chipfit.registry import register

#: largest lower bound of a length that a kernel without a bound may leave out: shorter vectors are noise in 8 bits
_MAX_EPS = 1e-6
#: lower bound given to a length that has none, as `torch.nn.functional.normalize` has it
_DEFAULT_EPS = 1e-12


@register("pass", "unit_length", stage="rewrite", after=("fold_constants",), needs=("listed",))
def unit_length(graph: Graph, listed: NodeTest) -> Rewritten:
    """Replace x / |x| and x rsqrt(sum x^2), along one axis, by L2Norm, if the platform names that operator.

    The length may have a lower bound of at most 1e-6. `decompose` is the inverse.

    Args:
        listed: whether the platform's rule for a node names its operator.
    """
    graph, notes = graph.copy(), list[str]()
    lengths = _Lengths(graph)
    for n in list(graph.nodes):
        found = lengths.divided_by(n)
        if found is None or found.eps > _MAX_EPS:
            continue
        attrs = {"axis": found.axis, "eps": max(found.eps, _DEFAULT_EPS)}
        fused = n.with_(op="L2Norm", inputs=(found.of,), attrs=attrs)
        if listed(graph, fused):
            replace_node(graph, n, fused)
            notes.append(f"the length of '{found.of}' and its quotient '{n.display_name}' became one L2Norm")
    drop_dead(graph)
    return Rewritten(graph, notes)


class _Length(NamedTuple):
    """The length of a value along one axis."""

    of: str
    axis: int
    eps: float = 0.0  #: its lower bound


class _Lengths:
    """A search for lengths of vectors, and their squares, among the values of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.producers = graph, graph.producers()

    def divided_by(self, n: Node) -> _Length | None:
        """Return the length of its operand by which a node divides it; None for every other node."""
        found: dict[str | None, _Length | None] = {}  # operand -> the length that divides it
        if n.op == "Div":
            found = {n.data: self._length(n.inputs[1])}
        elif n.op == "Mul":
            found = {x: self._length_in_reciprocal(y) for x, y in (n.inputs, n.inputs[::-1])}
        return next((length for x, length in found.items() if length is not None and length.of == x), None)

    def _length_in_reciprocal(self, value: str | None) -> _Length | None:
        n = self.producers.get(value or "")
        return self._length(n.data, squared=True) if n is not None and n.op == "Rsqrt" else None

    def _length(self, value: str | None, squared: bool = False) -> _Length | None:
        """Match a value as a length, perhaps bounded and expanded; `squared`: as the square of one."""
        n = self.producers.get(value or "")
        if n is None:
            return None
        if n.op == "Expand":
            return self._length(n.data, squared)
        if n.op == "Sqrt" and not squared:
            return self._length(n.data, squared=True)
        bound = self._bound(n)
        if bound is not None:
            inner = self._length(n.data, squared)
            least = math.sqrt(bound) if squared else bound
            return None if inner is None else inner._replace(eps=max(inner.eps, least))
        reduced = n.op in ("Sum", "ReduceL2") and n.attrs["keepdims"] and len(n.attrs["axes"]) == 1
        if not reduced or squared != (n.op == "Sum"):
            return None
        of = n.data if n.op == "ReduceL2" else self._squared(n.data)
        return None if of is None else _Length(of, n.attrs["axes"][0] % len(self.graph.shape(of)))

    def _squared(self, value: str) -> str | None:
        """Return x if a value is x times x, else None."""
        n = self.producers.get(value)
        return n.data if n is not None and n.op == "Mul" and n.inputs[0] == n.inputs[1] else None

    def _bound(self, n: Node) -> float | None:
        """Return the lower bound that a node sets for its operand; None if it does something else."""
        if n.op == "Clamp" and n.attrs["max"] is None:
            return max(float(n.attrs["min"]), 0.0)
        constant = self.graph.weights.get(n.inputs[1] or "") if n.op == "Max" and len(n.inputs) == 2 else None
        return max(float(constant), 0.0) if constant is not None and constant.numel() == 1 else None
