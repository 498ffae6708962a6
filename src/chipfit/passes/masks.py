"""Replace masks that are added to scores by selections, on chips that select quantized values.

    softmax(s + mask)  becomes  softmax(where(kept, s, -1e30))

The grid of a sum would have to hold the mask, which leaves few steps for scores. A selection moves quantized values,
and the number that hides scores saturates at the least one; see `graph.hidden_scores`.
"""

from dataclasses import replace
from typing import Any

import torch

from chipfit.engine.shapes import broadcast
from chipfit.engine.types import dtype_of
from chipfit.graph.edit import drop_dead, new_name, replace_node
from chipfit.graph.hidden_scores import ALWAYS_HIDES, HIDDEN_SCORE, HIDES_IN_SOFTMAX, fill_of, leading_to, split_mask
from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.rewriting import NodeTest, Rewritten
from chipfit.registry import register


@register("pass", "masks", stage="rewrite", after=("attention",), needs=("in_integers",))
def masks(graph: Graph, in_integers: NodeTest) -> Rewritten:
    """Turn the masks of scores into selections, if the platform computes selection and softmax in integers.

    A mask is a constant of zeros, perhaps with a bias, and large negative numbers; or such numbers chosen by a
    condition; or an affine function of integers that are 0 or 1, as (1 - m) * -1e4; or a sum of masks.

    Args:
        in_integers: whether the platform has an integer kernel for a node.
    """
    graph, notes = graph.copy(), list[str]()
    select = _Selections(graph)
    for n in [n for n in graph.nodes if n.facts.softmax or n.op in ("ReduceMax", "SDPA")]:
        like = n.with_(op="Where", inputs=(n.data,) * 3, attrs={})
        scores = n.with_(op="Softmax", inputs=(n.data,), attrs={"axis": -1}) if n.op == "SDPA" else n
        if not (in_integers(graph, like) and in_integers(graph, scores)):
            continue
        if n.op == "SDPA":
            made = not in_integers(graph, n) and select.in_attention(n)
        else:
            found = [select.instead_of(m) for m in leading_to(graph, n, ("Add", "Sub", "Where"))]
            made = any(found)
            select.with_finite_fills(n)
        notes += [f"the mask of '{n.display_name}' became a selection"] if made else []
    drop_dead(graph)
    return Rewritten(graph, notes)


class _Selections:
    """Replaces masks in a graph, which it edits, by conditions."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.producers = graph, graph.producers()
        self.new: list[Node] = []  #: nodes to insert in front of `node`
        self.node = Node("", "", (), ())  #: the node that is being replaced

    def in_attention(self, n: Node) -> bool:
        """Replace the float mask of an attention operator by a condition; return whether it has become one.

        A constant mask stays: its decomposition makes a selection of it.
        """
        mask = n.operand("mask")
        if mask is None or not self.graph.is_float(mask) or self.graph.is_weight(mask):
            return False
        kept = self._condition_for(n, mask, 1.0)
        return kept is not None and self._replace(n.with_(inputs=(*n.inputs[:3], kept)))

    def instead_of(self, n: Node) -> bool:
        """Replace a sum of scores and a mask by a selection; return whether it has become one."""
        if n.op == "Where":
            return self._instead_of_choice(n)
        a, b = (i or "" for i in n.inputs)
        for scores, mask, sign in ((a, b, 1.0), (b, a, 1.0)) if n.op == "Add" else ((a, b, -1.0),):
            if self.graph.shape(scores) != self.graph.shape(n.output) or not self.graph.is_float(mask):
                continue
            w = self.graph.weights.get(mask)
            if w is None:
                kept, bias = self._condition_for(n, mask, sign), torch.zeros(1)
            elif mask in self.graph.trainable or (parts := split_mask(sign * w)) is None or not parts[0].any():
                kept = None
            else:
                self.node, self.new = n, []
                kept, bias = self._constant(parts[0]), parts[1]
            if kept is not None:
                biased = self._add("Add", scores, self._constant(bias)) if bool(bias.any()) else scores
                hidden = self._constant(torch.tensor(HIDDEN_SCORE))
                return self._replace(n.with_(op="Where", inputs=(kept, biased, hidden), attrs={}))
        return False

    def _instead_of_choice(self, n: Node) -> bool:
        """Replace a choice between scores and the scores less a large number by one between scores and that number."""
        for x, scores in (n.inputs[1:], n.inputs[:0:-1]):
            made = self.producers.get(x or "")
            if made is None or made.op not in ("Add", "Sub") or scores not in made.inputs:
                continue
            number = self._number(made.inputs[made.inputs[0] == scores])
            if number is not None and (number if made.op == "Add" else -number) <= ALWAYS_HIDES:
                self.node, self.new = n, []
                hidden = self._constant(torch.tensor(HIDDEN_SCORE))
                return self._replace(n.reading({x or "": hidden}))
        return False

    def with_finite_fills(self, reader: Node) -> None:
        """Replace the constants, perhaps infinite, by which selections hide scores in front of a node."""
        for n in leading_to(self.graph, reader, ("Where",)):
            if fill := fill_of(self.graph, n):
                self.node, self.new = n, []
                hidden = self._constant(torch.tensor(HIDDEN_SCORE))
                self._replace(n.reading({fill: hidden}))

    def _replace(self, n: Node) -> bool:
        replace_node(self.graph, self.node, *self.new, n)
        return True

    # ---------------------------------------------------------------- conditions

    def _condition_for(self, n: Node, mask: str, sign: float) -> str | None:
        """Return the condition under which sign * mask is 0, if it hides a score otherwise; else None."""
        self.node, self.new = n, []
        kept = self._condition(mask, sign, 0.0)
        if kept is None:
            for m in self.new:
                del self.graph.values[m.output]
        return kept

    def _condition(self, value: str, times: float, plus: float) -> str | None:
        """Return the condition under which times * value + plus is 0, if it hides a score otherwise; else None."""
        made = self.producers.get(value)
        if value in self.graph.weights:
            parts = split_mask(self.graph.weights[value] * times + plus)
            return None if parts is None or bool(parts[1].any()) else self._constant(parts[0])
        if not self.graph.is_float(value):  # a condition, or integers that are 0 or 1
            return self._when(value, times + plus, plus)
        if made is None:
            return None
        first, last = made.inputs[0] or "", made.inputs[-1] or ""
        match made.op, [self._number(i) for i in made.inputs]:
            case "Where", [_, float(a), float(b)]:
                return self._when(first, times * a + plus, times * b + plus)
            case "Add" | "Min", [None, None] if plus == 0:
                both = [self._condition(i, times, 0.0) for i in (first, last)]
                return None if None in both else self._add("LogicalAnd", *map(str, both))
            case "Max", [_, float(c)] if times * c + plus <= HIDES_IN_SOFTMAX:
                return self._condition(first, times, plus)
            case "Cast", _:
                return self._condition(first, times, plus)
            case "Add", [None, float(c)]:
                return self._condition(first, times, plus + times * c)
            case "Add", [float(c), None]:
                return self._condition(last, times, plus + times * c)
            case "Sub", [None, float(c)]:
                return self._condition(first, times, plus - times * c)
            case "Sub", [float(c), None]:
                return self._condition(last, -times, plus + times * c)
            case "Mul", [None, float(c)]:
                return self._condition(first, times * c, plus)
            case "Mul", [float(c), None]:
                return self._condition(last, times * c, plus)
            case "Expand", _ if (inner := self._condition(first, times, plus)) is not None:
                sizes = [s or 1 for s in self.graph.shape(value)]
                return self._add("LogicalAnd", inner, self._constant(torch.ones(sizes, dtype=torch.bool)))
            case _ if made.facts.moves and first == made.data:
                inner = self._condition(first, times, plus)
                if inner is not None and self.graph.shape(inner) == self.graph.shape(first):
                    return self._add(made.op, inner, *map(str, made.inputs[1:]), gives=value, **made.attrs)
        return None

    def _when(self, value: str, one: float, zero: float) -> str | None:
        """Return the condition that a value, a condition or integers that are 0 or 1, keeps a score.

        Args:
            one, zero: the mask where the value is 1, or holds, and where it is 0.
        """
        kept = [abs(x) < 1e-6 for x in (one, zero)]
        if kept[0] == kept[1] or min(one, zero) > HIDES_IN_SOFTMAX or value not in self.graph.values:
            return None
        dtype = self.graph.values[value].dtype
        if dtype == "bool":
            return value if kept[0] else self._add("LogicalNot", value)
        return self._add("Equal", value, self._constant(torch.tensor(int(kept[0]), dtype=dtype_of(dtype))))

    def _number(self, name: str | None) -> float | None:
        """Return the number that all elements of a constant are, else None."""
        made = self.producers.get(name or "")
        if made is not None and made.op in ("Expand", "Reshape"):
            return self._number(made.data)
        w = self.graph.weights.get(name or "")
        if w is None or not w.numel() or name in self.graph.trainable or bool((w != w.flatten()[0]).any()):
            return None
        return float(w.flatten()[0])

    # ---------------------------------------------------------------- new nodes

    def _constant(self, value: torch.Tensor) -> str:
        name = new_name(self.graph, f"{self.node.name}.mask")
        self.graph.weights[name] = value
        return name

    def _add(self, op: str, *inputs: str, gives: str = "", **attrs: Any) -> str:
        """Add a node in front of the replaced one; return its value, a condition unless it is a sum.

        Args:
            gives: a value of the same shape; by default the operands are broadcast.
        """
        name = new_name(self.graph, f"{self.node.name}_{op.lower()}")
        shape = self.graph.shape(gives) if gives else broadcast([self.graph.shape(i) for i in inputs])
        dtype = self.graph.values[self.node.output].dtype if op == "Add" else "bool"
        self.graph.values[name] = Value(name, shape, dtype)
        self.new.append(replace(self.node, name=name, op=op, inputs=inputs, outputs=(name,), attrs=attrs))
        return name
