"""Collapse functions of each element of one tensor into one Curve, on chips that look such functions up in a table.

x / (1 + |x|) of 8-bit integers is a table of 256 entries, whatever its operators are. The result is rounded once, and
the chip needs no kernel for any of them.
"""

from collections.abc import Container, Iterable

from chipfit.engine.curves import CURVE, ELEMENTWISE, Step, text_of
from chipfit.graph.edit import drop_dead, replace_node
from chipfit.graph.ir import DYNAMIC, REQUANTIZE, Graph, Node
from chipfit.operators.table import OPS
from chipfit.passes.composites import open_composites
from chipfit.passes.rewriting import NodeTest, Readers, Rewritten
from chipfit.registry import register

#: element-wise operators that are not functions of numbers alone, or end in another type
_OTHERS = frozenset({"Cast", CURVE, "Dropout", "Identity", DYNAMIC, REQUANTIZE})
#: operators whose kernel is the look-up of a table itself: others around them cost nothing there
_LOOKED_UP = frozenset({"Sqrt"})
#: kernels that take no longer than the look-up of a table
_FEW = 3


#: passes that leave less to look up
_AFTER = ("collapse_linear", "masks", "unit_length")
_NEEDS = ("listed", "in_integers", "integer_operators")


@register("pass", "curves", stage="rewrite", after=_AFTER, needs=_NEEDS)
def curves(graph: Graph, listed: NodeTest, in_integers: NodeTest, integer_operators: Container[str]) -> Rewritten:
    """Replace element-wise operators without an integer kernel other than a table, with others around them, by a Curve.

    Operators around them join where the whole still has one operand: its other operands are single numbers.

    Args:
        listed: whether the platform's rule for a node names its operator.
        in_integers: whether the platform has an integer kernel for a node.
        integer_operators: the operators with integer kernels.
    """
    if CURVE not in integer_operators:
        return Rewritten(graph, [])
    found, notes, graph = _Regions(graph), list[str](), graph.copy()
    for n in found.graph.nodes:
        whole = in_integers(graph, n)
        if n.name in found.taken or not found.fits(n) or (whole and n.op not in _LOOKED_UP):
            continue
        if _opens(graph, n, in_integers, integer_operators):
            continue
        region = found.around(n)
        if len(region) <= whole:
            continue
        curve = found.curve_of(region)
        if listed(graph, curve) and in_integers(graph, curve):
            replace_node(graph, region[-1], curve)
            notes.append(f"'{n.display_name}' became a table ({', '.join(m.op for m in region)})")
    drop_dead(graph)
    return Rewritten(graph, notes)


def _opens(graph: Graph, n: Node, in_integers: NodeTest, integer_operators: Container[str]) -> bool:
    """Check that a composite becomes a few parts with integer kernels, none of which is a table itself."""
    alone = graph.copy()
    alone.nodes, alone.outputs = [n], [n.output]
    opened, wholes = open_composites(alone, in_integers, integer_operators)
    return bool(wholes) and len(opened.nodes) <= _FEW and all(m.op != CURVE for m in opened.nodes)


class _Regions:
    """Finds functions of one value among the nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.producers, self.readers = graph, graph.producers(), Readers(graph)
        self.order = {n.name: k for k, n in enumerate(graph.nodes)}
        self.taken = set[str]()  #: nodes of regions

    def fits(self, n: Node | None) -> bool:
        """Check that a node computes each element from values and fixed numbers."""
        if n is None or n.op not in OPS or OPS[n.op].layout != ELEMENTWISE or n.op in _OTHERS or n.name in self.taken:
            return False
        constants = [self.graph.weights.get(i) for i in n.inputs if i in self.graph.weights]
        numbers = all(w is not None and w.numel() == 1 and w.is_floating_point() for w in constants)
        return len(n.outputs) == 1 and numbers and self.graph.trainable.isdisjoint(map(str, n.inputs))

    def around(self, seed: Node) -> list[Node]:
        """Return the nodes of a function of one value that contains a node, in order; none if there is no such."""
        region = self._closed({seed.name: seed})
        while region is not None and (larger := self._behind(region) or self._before(region)):
            region = larger
        nodes = sorted((region or {}).values(), key=self._place)
        if not nodes or any(
            self.graph.values[v].dtype != "float32" for v in (*self._operands(nodes), nodes[-1].output)
        ):
            return []
        self.taken |= {n.name for n in nodes}
        return nodes

    def _place(self, n: Node) -> int:
        return self.order[n.name]

    def _closed(self, region: dict[str, Node]) -> dict[str, Node] | None:
        """Return a region with the nodes in front that make it a function of one value; None if they cannot."""
        region = dict(region)
        while len(operands := self._operands(region.values())) > 1:
            made = [n for v in operands if (n := self.producers.get(v)) is not None]
            last = max(made, key=self._place, default=None)  # others may depend on it
            if last is None or not self._joins(last, region):
                return None
            region[last.name] = last
        return region if operands else None

    def _behind(self, region: dict[str, Node]) -> dict[str, Node] | None:
        """Return a region with the one node that reads its result."""
        end = max(region.values(), key=self._place).output
        readers = {n.name: n for n in self.readers.of(end)}
        if len(readers) != 1 or end in self.graph.outputs or not self.fits(*readers.values()):
            return None
        return self._closed(region | readers)

    def _before(self, region: dict[str, Node]) -> dict[str, Node] | None:
        """Return a region with the node in front, of one operand; activations stay with the kernels that apply them."""
        before = self.producers.get(self._operands(region.values())[0])
        if before is None or before.op not in OPS or OPS[before.op].activation:
            return None
        one = len(self._operands([before])) == 1
        return {**region, before.name: before} if one and self._joins(before, region) else None

    def _operands(self, nodes: Iterable[Node]) -> list[str]:
        """Return the values that nodes read and do not compute."""
        nodes = list(nodes)
        made = {n.output for n in nodes} | self.graph.weights.keys()
        return list(dict.fromkeys(i for n in nodes for i in n.inputs if i is not None and i not in made))

    def _joins(self, n: Node, region: dict[str, Node]) -> bool:
        """Check that a node in front of a region fits, and that only the region reads it."""
        inside = n.output not in self.graph.outputs and all(r.name in region for r in self.readers.of(n.output))
        return inside and self.fits(n)

    def curve_of(self, region: list[Node]) -> Node:
        """Return the Curve that computes a region."""
        (x,), names, steps = self._operands(region), dict[str, str](), list[Step]()
        names[x] = "0"
        for k, n in enumerate(region, 1):
            weights = self.graph.weights
            operands = (names[i] if i in names else float(weights[i]) for i in n.inputs if i is not None)
            steps.append(Step(n.op, tuple(operands), n.attrs))
            names[n.output] = str(k)
        return region[-1].with_(op=CURVE, inputs=(x,), attrs={"steps": text_of(steps)})
