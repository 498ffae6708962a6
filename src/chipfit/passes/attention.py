"""Fuse products and a softmax into one attention operator, on chips that have one.

    softmax(scale q k^T + mask) v,  softmax over the last axis

A factor may scale the scores, q or k; masks may be added to scores, or replace them by large negative numbers; axes in
front of the last two may be merged and split again, as products of three axes (`bmm`) require. Neither scores nor
attention weights may have another reader. `decompose` is the inverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chipfit.engine.shapes import Shape, broadcast
from chipfit.graph.edit import drop_dead, new_name, replace_node
from chipfit.graph.ir import Graph, Node, Value
from chipfit.passes.rewriting import NodeTest, Readers, Rewritten
from chipfit.registry import register

#: a mask may as well add a number up to this one as replace a score by it: in float32 the sum is that number
_LEAST_SCORE = -1e9


class _Refusal(Exception):
    """The reason why a softmax is not part of attention; empty if there are no products around it."""


@dataclass(frozen=True, slots=True)
class _Mask:
    """A mask of the scores."""

    lead: Shape  #: shape of the masked scores without the last two axes
    term: str  #: the value that is added, or the condition under which scores are replaced
    fill: float | None = None  #: the number that replaces scores
    kept: bool = False  #: scores are replaced where the condition does not hold


@dataclass(frozen=True, slots=True)
class _Scores:
    """The scores scale q k^T + masks."""

    product: Node
    scale: float = 1.0
    masks: tuple[_Mask, ...] = ()


@register("pass", "attention", stage="rewrite", after=("fold_constants",), needs=("listed",))
def attention(graph: Graph, listed: NodeTest) -> Rewritten:
    """Replace written-out attention by SDPA, if the platform names that operator.

    A row whose scores are all replaced gives the mean of v, as before, if its scores differ by less than 32. Dropout
    of the attention weights, which does nothing in inference, is removed.

    Args:
        listed: whether the platform's rule for a node names its operator.

    Returns:
        The graph, and one note per new operator, or refusal and its reason.
    """
    notes = list[str]()
    for softmax in graph.nodes:
        if softmax.op != "Softmax" or not listed(graph, softmax.with_(op="SDPA", attrs={})):
            continue
        parts = _Attention(graph.copy())
        try:
            made = parts.replace_by_sdpa(softmax)
        except _Refusal as e:
            notes += [f"attention at '{softmax.display_name}' stays in its parts: {e}"] if str(e) else []
            continue
        if listed(parts.graph, made):
            graph = parts.graph
            drop_dead(graph)
            notes.append(f"the products and the softmax of '{made.display_name}' became one SDPA")
    return Rewritten(graph, notes)


class _Attention:
    """The parts of attention around one softmax, and their replacement by the operator."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.readers, self.producers = graph, Readers(graph), graph.producers()
        self.new: list[Node] = []  #: nodes to insert in front of the operator

    def replace_by_sdpa(self, softmax: Node) -> Node:
        """Replace everything from q k^T to the product with v by SDPA; return that node.

        Raises:
            _Refusal: the parts are not attention.
        """
        shape = self.graph.shape(softmax.output)
        scores, last = self._scores(softmax.data), self._product_behind(softmax.output)
        if scores is None and last is None:
            raise _Refusal
        if scores is None:
            raise _Refusal("its scores are not a product, scaled and masked, that the softmax alone reads")
        if last is None:
            raise _Refusal("its weights are not read by one product alone")
        if softmax.attrs["axis"] % len(shape) != len(shape) - 1:
            raise _Refusal("its softmax is over another axis")
        return self._replace(scores, last, max((m.lead for m in scores.masks), key=len, default=shape[:-2]))

    # ---------------------------------------------------------------- matching

    def _product_behind(self, value: str) -> Node | None:
        """Return the product with v if it alone reads the attention weights, else None."""
        n = self.readers.only(value)
        if n is not None and (n.facts.identity or self._reshapes_leading_axes(n)):
            return self._product_behind(n.output)
        return n if n is not None and n.op == "MatMul" and n.inputs[0] == value else None

    def _scores(self, value: str) -> _Scores | None:
        """Match a value as scores; return None if it is something else."""
        n = self._sole_producer(value)
        if n is None or n.op == "MatMul":
            return None if n is None else _Scores(n)
        if n.op == "Identity" or self._reshapes_leading_axes(n):
            return self._scores(n.data)
        if factor := self._factor(n):
            found = self._scores(factor[1])
            return None if found is None or found.masks else replace(found, scale=found.scale * factor[0])
        for inner, mask in self._masks(n):
            found = self._scores(inner) if self.graph.shape(inner) == self.graph.shape(value) else None
            if found is not None:
                return replace(found, masks=(*found.masks, mask))
        return None

    def _sole_producer(self, value: str) -> Node | None:
        """Return the node that computes a value, if the value is read once, else None."""
        n = self.producers.get(value)
        once = n is not None and len(n.outputs) == 1 and self.readers.only(value) is not None
        return n if once else None

    def _reshapes_leading_axes(self, n: Node) -> bool:
        """Check whether a node only merges or splits axes in front of the last two."""
        if n.op != "Reshape":
            return False
        before, after = self.graph.shape(n.data), self.graph.shape(n.output)
        rows = before[-2:] if min(len(before), len(after)) > 2 else (None,)
        return None not in rows and rows == after[-2:] and max(before.count(None), after.count(None)) < 2

    def _factor(self, n: Node) -> tuple[float, str] | None:
        """Return (c, x) of a node that computes c x with a number c, else None."""
        if n.op not in ("Mul", "Div"):
            return None
        a, b = (i or "" for i in n.inputs)
        for x, c in ((a, b), (b, a)) if n.op == "Mul" else ((a, b),):
            number = self._number(c)
            if number and self.graph.shape(x) == self.graph.shape(n.output):
                return number if n.op == "Mul" else 1 / number, x
        return None

    def _number(self, name: str) -> float | None:
        """Return the number in a constant of one element, else None."""
        w = self.graph.weights.get(name)
        if w is None or w.numel() != 1 or not w.is_floating_point() or name in self.graph.trainable:
            return None
        return float(w)

    def _masks(self, n: Node) -> list[tuple[str, _Mask]]:
        """Return the ways in which a node may add one more mask to scores: (scores, mask) pairs."""
        lead = self.graph.shape(n.output)[:-2]
        if n.op == "Add":
            a, b = (i or "" for i in n.inputs)
            return [(x, _Mask(lead, term)) for x, term in ((a, b), (b, a)) if self.graph.is_float(term)]
        if n.op == "Where":
            condition, a, b = (i or "" for i in n.inputs)
            fills = ((a, self._number(b), True), (b, self._number(a), False))
            return [(x, _Mask(lead, condition, c, kept)) for x, c, kept in fills if c is not None and c <= _LEAST_SCORE]
        return []

    # ---------------------------------------------------------------- replacement

    def _replace(self, scores: _Scores, last: Node, lead: Shape) -> Node:
        """Replace the parts by SDPA on operands whose shapes begin with `lead`; return that node.

        Args:
            last: the product with v.

        Raises:
            _Refusal: an operand cannot be brought into this shape.
        """
        graph, shape, first = self.graph, self.graph.shape, scores.product
        operands = [(i or "", n) for n, i in (*((first, i) for i in first.inputs), (last, last.inputs[1]))]
        if any(i in graph.weights for i, _ in operands):
            raise _Refusal("an operand is a constant")
        if not lead or any(shape(i)[:-2] != shape(n.output)[:-2] for i, n in operands):
            raise _Refusal("the axes in front of its operands differ")
        self.last = last
        q, q_factor = self._without_factors(first, 0)
        kt, k_factor = self._without_factors(first, 1)
        ins = [self._with_lead(x, lead) for x in (q, self._transposed(kt), operands[2][0])]
        mask, causal = self._mask([self._term(m, lead) for m in scores.masks], *shape(first.output)[-2:])
        attrs = {"is_causal": causal, "scale": scores.scale * q_factor * k_factor, "enable_gqa": False}
        made = last.with_(op="SDPA", inputs=(*ins, mask) if mask else tuple(ins), attrs=attrs)
        view: list[Node] = []
        if lead != shape(last.output)[:-2]:
            y = Value(new_name(graph, f"{last.name}_sdpa"), (*lead, *shape(last.output)[-2:]), self._dtype)
            view = [last.with_(op="Reshape", inputs=(y.name,), attrs=_shape_attrs(shape(last.output)))]
            made, graph.values[y.name] = made.with_(name=y.name, outputs=(y.name,)), y
        replace_node(graph, last, *self.new, made, *view)
        return made

    def _without_factors(self, product: Node, at: int) -> tuple[str, float]:
        """Return operand `at` of q k^T without the factors in front of it, and the product of these factors.

        Factors in front of views, which only move numbers, are removed from the graph.
        """
        operand = value = product.inputs[at] or ""
        scale, reader = 1.0, product
        while (n := self._sole_producer(value)) is not None:
            if factor := self._factor(n):
                scale, value = scale * factor[0], factor[1]
                if reader is product:
                    operand = value
                else:
                    other = reader.with_(inputs=(value, *reader.inputs[1:]))
                    replace_node(self.graph, reader, other)
                    self.producers[other.output] = reader = other
            elif n.facts.view and n.facts.moves and n.inputs[0] == n.data:
                reader, value = n, n.data
            else:
                break
        return operand, scale

    def _transposed(self, value: str) -> str:
        """Return the value with its last two axes swapped."""
        n = self.producers.get(value)
        axes = [*range(len(self.graph.shape(value)))]
        if n is not None and n.op == "Transpose":
            value, axes = n.data, [a % len(axes) for a in n.attrs["perm"]]
        perm = (*axes[:-2], axes[-1], axes[-2])
        if list(perm) == sorted(perm):
            return value
        return self._add("Transpose", tuple(self.graph.shape(value)[a] for a in perm), value, perm=perm)

    def _with_lead(self, value: str, lead: Shape) -> str:
        """Return the value with the sizes `lead` in front of its last two axes."""
        shape, n = self.graph.shape(value), self.producers.get(value)
        wanted = (*lead, *shape[-2:])
        if shape == wanted:
            return value
        if n is not None and self._reshapes_leading_axes(n) and self.graph.shape(n.data) == wanted:
            return n.data
        if wanted.count(None) > 1:
            raise _Refusal("several sizes of its operands are only known at run time")
        return self._add("Reshape", wanted, value, **_shape_attrs(wanted))

    def _mask(self, terms: Sequence[str], rows: int | None, columns: int | None) -> tuple[str | None, bool]:
        """Return the sum of all masks, None without masks, and whether the one mask is causal instead."""
        if len(terms) == 1 and rows and rows == columns and self._is_causal(terms[0], rows):
            return None, True
        total = terms[0] if terms else None
        for term in terms[1:]:
            shapes = [self.graph.shape(t) for t in (total or "", term)]
            total = self._add("Add", broadcast(shapes), total or "", term)
        return total, False

    def _term(self, mask: _Mask, lead: Shape) -> str:
        """Return the addend of a mask, for scores with the sizes `lead` in front of the last two."""
        term = mask.term if mask.fill is None else self._filling(mask, mask.fill)
        if mask.lead == lead:
            return term
        if self.graph.shape(term)[:-2] != mask.lead:
            raise _Refusal("its masks are of different ranks")
        return self._with_lead(term, lead)

    def _filling(self, mask: _Mask, fill: float) -> str:
        """Return the addend that has `fill` where a mask replaces scores, and 0 elsewhere."""
        numbers, condition = (0.0, fill) if mask.kept else (fill, 0.0), self.graph.weights.get(mask.term)
        if condition is not None:
            return self._constant(torch.where(condition.bool(), *numbers))
        values = (self._constant(torch.tensor(number)) for number in numbers)
        return self._add("Where", self.graph.shape(mask.term), mask.term, *values)

    def _is_causal(self, term: str, size: int) -> bool:
        """Check whether a mask is a constant that hides later positions and no others."""
        w = self.graph.weights.get(term)
        if w is None or w.numel() != size * size or tuple(w.shape[-2:]) != (size, size) or term in self.graph.trainable:
            return False
        later = torch.ones(size, size, dtype=torch.bool).triu(1)
        w = w.detach().reshape(size, size)
        return bool((w[later] <= _LEAST_SCORE).all() and (w[~later] == 0).all())

    def _constant(self, value: torch.Tensor) -> str:
        name = new_name(self.graph, f"{self.last.name}.mask")
        self.graph.weights[name] = value
        return name

    @property
    def _dtype(self) -> str:
        return self.graph.values[self.last.output].dtype

    def _add(self, op: str, gives: Shape, /, *inputs: str, **attrs: Any) -> str:
        """Add a node in front of the operator; return its value."""
        name = new_name(self.graph, f"{self.last.name}_{op.lower()}")
        self.graph.values[name] = Value(name, gives, self._dtype)
        self.new.append(self.last.with_(name=name, op=op, inputs=inputs, outputs=(name,), attrs=attrs))
        return name


def _shape_attrs(shape: Shape) -> dict[str, Any]:
    """Return the attributes of a Reshape to a shape with at most one open size."""
    return {"shape": tuple(-1 if s is None else s for s in shape)}
