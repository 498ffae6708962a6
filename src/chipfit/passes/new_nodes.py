"""The nodes that replace a composite operator, while its rule makes them."""

from collections.abc import Container, Sequence
from typing import Any, NoReturn

import torch

from chipfit.engine.shapes import Shape, broadcast
from chipfit.graph.edit import unique_name
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.formulas import compute
from chipfit.operators.table import OPS


class Refusal(Exception):
    """The reason why a rule does not apply to a node."""


class NewNodes:
    """The nodes that replace one composite, in the order in which a rule creates them."""

    def __init__(
        self,
        graph: Graph,
        node: Node,
        holds: Container[str],
        taken: set[str],
        constants: dict[Any, str],
        integers: bool = False,
    ) -> None:
        self.graph, self.node, self.holds, self.integers = graph, node, holds, integers
        self._taken, self._constants = taken, constants
        self.channels_last = graph.data_format == "channels_last"
        self.nodes: list[Node] = []
        self.step = node.step  #: of the nodes to come

    def __call__(self, op: str, *inputs: str | float | None, gives: Shape | None = None, **attrs: Any) -> str:
        """Add a node; return the name of its value, which has the dtype of the composite's result.

        Args:
            inputs: names; numbers become constants.
            gives: shape of the value; by default the broadcast shape of the operands.
        """
        shared = not OPS[op].moves  # whatever is moved together shares one scale
        names = tuple(self.constant(torch.tensor(i), shared=shared) if isinstance(i, float) else i for i in inputs)
        shape = broadcast([self.shape(i) for i in names if i is not None]) if gives is None else gives
        return self._add(op, names, [shape], attrs)[0]

    def formula(self, formula: str, **operands: Any) -> str:
        """Add the nodes of a formula, see `operators.formulas`; return the name of its value."""
        name: str = compute(formula, lambda op, x, **attrs: self(op, *x, **attrs), **operands)
        return name

    def several(self, op: str, x: str, *, gives: Sequence[Shape], **attrs: Any) -> list[str]:
        """Add a node with one operand and several results, of these shapes; return their names."""
        return self._add(op, (x,), gives, attrs)

    def _add(
        self, op: str, inputs: tuple[str | None, ...], shapes: Sequence[Shape], attrs: dict[str, Any]
    ) -> list[str]:
        """Add a node; a single result has its name, several have a number behind it."""
        at = OPS[op].index("in0") if OPS[op].moves else None  # what moves has the type of its operand
        source = None if at is None else self.graph.values.get(inputs[at] or "")
        name, dtype = self._name(op.lower()), (source or self.graph.values[self.node.output]).dtype
        dtype = attrs.get("dtype", "bool" if OPS[op].condition else dtype)
        results = [name] if len(shapes) == 1 else [self._name(f"{op.lower()}_{k}") for k in range(len(shapes))]
        for result, shape in zip(results, shapes, strict=True):
            self.graph.values[result] = Value(result, shape, dtype)
        whole = self.node.composite or self.node.name, self.node.composite_op or self.node.op
        part = self.node.with_(name=name, op=op, inputs=tuple(inputs), outputs=tuple(results), attrs=attrs)
        self.nodes.append(part.with_(composite=whole[0], composite_op=whole[1], step=self.step))
        return results

    def reshape(self, x: str, shape: Shape) -> str:
        return self("Reshape", x, gives=shape, shape=tuple(-1 if s is None else s for s in shape))

    def transpose(self, x: str, perm: Sequence[int]) -> str:
        shape = self.shape(x)
        return self("Transpose", x, gives=tuple(shape[d] for d in perm), perm=tuple(perm))

    def constant(self, value: torch.Tensor, of: Sequence[str | None] = (), shared: bool = True) -> str:
        """Return a weight with this value.

        Args:
            of: weights that it was computed from; it is not shared, and trains, if one of them does.
            shared: among all composites.
        """
        trains = not self.graph.trainable.isdisjoint(i for i in of if i is not None)
        if trains or not shared:
            name = self._name("weight" if trains else "constant")
            self.graph.weights[name] = value.detach().clone()
            self.graph.trainable |= {name} if trains else set()
            return name
        key = (value.dtype, value.shape, value.numpy().tobytes())
        if key not in self._constants:
            # two words: `X_1`, where `X` is taken, would be read as a copy of X
            self._constants[key] = self._name("constant" if self.integers else "float_constant")
            self.graph.weights[self._constants[key]] = value
        return self._constants[key]

    def shape(self, name: str) -> Shape:
        return self.graph.shape(name)

    def size(self, name: str, axis: int) -> int:
        """Return a size; refuse the rule if it is only known at run time."""
        size = self.shape(name)[axis]
        return self.refuse("a size of it is only known at run time") if size is None else size

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return all sizes but the batch."""
        return tuple(self.size(name, k) for k in range(1, len(self.shape(name))))

    def refuse(self, why: str) -> NoReturn:
        raise Refusal(why)

    def require(self, condition: object, why: str) -> None:
        """Refuse the rule if a condition under which it holds is false."""
        if not condition:
            self.refuse(why)

    def named(self, results: str | Sequence[str]) -> list[Node]:
        """Return the nodes; the last has the composite's name, and results have the names of its results."""
        own = dict(zip([results] if isinstance(results, str) else results, self.node.outputs, strict=True))
        for name in own:
            del self.graph.values[name]
        *first, last = (n.reading(own).with_(outputs=tuple(own.get(o, o) for o in n.outputs)) for n in self.nodes)
        return [*first, last.with_(name=self.node.name)]

    def _name(self, what: str) -> str:
        name = unique_name(f"{self.node.name}/{what}", self._taken)
        self._taken.add(name)
        return name
