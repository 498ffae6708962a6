"""Decomposition of recurrent layers into their steps, which integer kernels compute.

The product with the operand is one linear layer over all steps; each step adds the product with the state. Weights
are the layer's own, read once a step.
"""

from collections.abc import Iterator, Sequence

import torch

from chipfit.engine.shapes import Shape
from chipfit.graph.ir import Node
from chipfit.passes.new_nodes import NewNodes

#: a recurrent layer with more steps stays whole: each step becomes about ten operators
MOST_STEPS = 512


class _Layer:
    """One layer whose steps are being made.

    Raises:
        Refusal: the number of steps is only known at run time, or too large.
    """

    def __init__(self, new: NewNodes, n: Node) -> None:
        self.new, self.n = new, n
        x, self.r = n.data, n.operand("r") or ""
        self.b, self.rb, self.h = (n.operand(k) for k in ("b", "rb", "h"))
        self.size = new.size(self.r, 1)
        self.samples = new.shape(x)[0]
        self.one_step = len(new.shape(x)) == 2
        self.count = 1 if self.one_step else new.size(x, 1)
        why = f"it has {self.count} steps, and at most {MOST_STEPS} are computed one by one"
        new.require(self.count <= MOST_STEPS, why)
        self.valid = self.valid_steps()
        new.require(not (self.valid and n.operand("mask")), "it has both lengths and a mask")
        self.mask = self.valid or n.operand("mask")

    def products(self, bias: str | None) -> list[str]:
        """Return the product of each step's operand with the weight, in the order in which the steps run."""
        new, wide = self.new, self.new.size(self.n.weight, 0)
        inputs = [self.n.data, self.n.weight, *([bias] if bias else [])]
        y = new("Linear", *inputs, gives=(*new.shape(self.n.data)[:-1], wide))
        if self.one_step:
            return [y]
        steps = self.new.several("Unstack", y, gives=[(self.samples, wide)] * self.count, axis=1)
        return steps[::-1] if self.n.attrs["reverse"] else steps

    def state(self, slot: str, steps: list[str]) -> str | None:
        """Return the state before the first of several steps: zeros where none is given, as all steps are alike."""
        given = self.n.operand(slot)
        if given is not None or len(steps) < 2:
            return given
        self.new.step, gives = -1, (self.samples, self.size)
        some = self.new("Slice", steps[0], gives=gives, axis=1, start=0, end=self.size, step=1)
        return self.new("Mul", some, self.new.constant(torch.tensor(0.0), shared=False), gives=gives)

    def numbered(self, steps: list[str]) -> Iterator[tuple[int, str]]:
        """Yield steps with their numbers, which the nodes that are made meanwhile have."""
        for t, step in enumerate(steps):
            self.new.step = t
            yield t, step
        self.new.step = None

    def masked(self, t: int, new: str, old: str | None) -> str:
        """Return the next state of the step that runs as number `t`: the old one where the mask is false."""
        if self.mask is None:
            return new
        at = self.count - 1 - t if self.n.attrs["reverse"] else t
        column = self.new("Slice", self.mask, gives=(self.samples, 1), axis=1, start=at, end=at + 1, step=1)
        before = 0.0 if old is None else old
        return self.new("Where", column, new, before, gives=(self.samples, self.size))

    def valid_steps(self) -> str | None:
        """Return the condition [N, T] that a step is within its sequence; None without lengths."""
        lengths = self.n.operand("lengths")
        if lengths is None:
            return None
        steps = self.new.constant(torch.arange(self.count, dtype=torch.int64)[None])
        column = self.new("Unsqueeze", lengths, gives=(self.samples, 1), axes=(1,))
        return self.new("Less", steps, column, gives=(self.samples, self.count))

    def product(self, h: str, weight: str = "", bias: str | None = None) -> str:
        """Return the product of a state with the recurrent weight, or another one."""
        weight = weight or self.r
        gives = (self.samples, self.new.size(weight, 0))
        return self.new("Linear", h, weight, *([bias] if bias else []), gives=gives)

    def split(self, x: str, parts: Sequence[int]) -> list[str]:
        """Return ranges of columns of x, so many states wide each."""
        sizes = tuple(p * self.size for p in parts)
        return self.new.several("Split", x, gives=[(self.samples, s) for s in sizes], axis=1, sizes=sizes)

    def joint_bias(self) -> str | None:
        """Return the sum of both biases."""
        both = [i for i in (self.b, self.rb) if i is not None]
        if len(both) < 2:
            return both[0] if both else None
        known = self.new.graph.weights
        if not known.keys() >= {*both}:
            return self.new("Add", *both)
        one, other = (known[i].detach() for i in both)
        return self.new.constant(one + other, of=both)

    def results(self, states: list[str]) -> list[str]:
        """Return the states of all steps, in the order of the operand, and the last one; of one step only that."""
        if self.one_step:
            return states
        one: Shape = (self.samples, 1, self.size)
        steps = [self.new("Unsqueeze", h, gives=one, axes=(1,)) for _, h in self.numbered(states)]
        y = steps[0]
        if len(steps) > 1:
            steps = steps[::-1] if self.n.attrs["reverse"] else steps
            y = self.new("Concat", *steps, gives=(self.samples, self.count, self.size), axis=1)
        if self.valid is not None:
            wide = self.new("Unsqueeze", self.valid, gives=(self.samples, self.count, 1), axes=(2,))
            y = self.new("Where", wide, y, 0.0, gives=self.new.shape(y))
        return [y, states[-1]]


def lstm(new: NewNodes, n: Node) -> list[str]:
    """c' = f c + i g, h' = o tanh(c').

    Source: Hochreiter and Schmidhuber 1997 with forget gates, as in PyTorch's `nn.LSTM`.
    """
    layer, states = _Layer(new, n), list[str]()
    steps = layer.products(layer.joint_bias())
    h, c = layer.state("h", steps), layer.state("c", steps)
    for t, step in layer.numbered(steps):
        gates = step if h is None else new("Add", step, layer.product(h))
        of = dict(zip(n.attrs["gates"], layer.split(gates, (1, 1, 1, 1)), strict=True))
        i, f, o = (new("Sigmoid", of[k]) for k in "ifo")
        added = new.formula("i * tanh(g)", i=i, g=of["g"])
        cell = added if c is None else new.formula("f * c + added", f=f, c=c, added=added)
        if (clip := n.attrs["cell_clip"]) is not None:
            cell = new("Clamp", cell, min=-clip, max=clip)
        h, c = layer.masked(t, new.formula("o * tanh(c)", o=o, c=cell), h), layer.masked(t, cell, c)
        states.append(h)
    assert c is not None
    return [*layer.results(states), c]


def gru(new: NewNodes, n: Node) -> list[str]:
    """h' = n + z (h - n), with n = tanh(x W + b + r (h R + rb)), or tanh(x W + b + (r h) R + rb).

    Source: Cho et al. 2014 (arXiv 1406.1078), equations 5 to 8, and PyTorch's `nn.GRU`.
    """
    new.require(sorted(n.attrs["gates"][:2]) == ["r", "z"], "its gates stand in another order")
    layer, states = _Gru(new, n), list[str]()
    steps = layer.products(layer.b if layer.after else layer.joint_bias())
    h = layer.state("h", steps)
    for t, step in layer.numbered(steps):
        h = layer.masked(t, layer.next(h, *layer.split(step, (2, 1))), h)
        states.append(h)
    return layer.results(states)


class _Gru(_Layer):
    """A GRU; what belongs to the gates comes before what belongs to the candidate."""

    def __init__(self, new: NewNodes, n: Node) -> None:
        super().__init__(new, n)
        self.after: bool = n.attrs["reset_after"]
        self._parts: dict[str, list[str]] = {}  #: weight -> its parts

    def next(self, h: str | None, x_gates: str, x_new: str) -> str:
        """Return the next state, given the products with the operand."""
        new, resets = self.new, self._reset_after if self.after else self._reset_before
        update, candidate = resets(h, x_gates, x_new)
        next_state = "n - z * n" if h is None else "n + z * (h - n)"  # n + z (0 - n) without a state
        return new.formula(next_state, n=candidate, z=update, h=h)

    def _reset_after(self, h: str | None, x_gates: str, x_new: str) -> tuple[str, str]:
        """Return update gate and candidate of a layer that resets the product with the state."""
        h_parts = self.parts(self.rb) if h is None else self.split(self.product(h, bias=self.rb), (2, 1))
        reset, update = self._gates(x_gates, *h_parts[:1])
        candidate = "tanh(x + reset * h)" if h_parts else "tanh(x)"
        return update, self.new.formula(candidate, x=x_new, reset=reset, h=h_parts[-1] if h_parts else None)

    def _reset_before(self, h: str | None, x_gates: str, x_new: str) -> tuple[str, str]:
        """Return update gate and candidate of a layer that resets the state before the product."""
        if h is None:
            return self._gates(x_gates)[1], self.new.formula("tanh(x)", x=x_new)
        of_gates, of_candidate = self.parts(self.r)
        reset, update = self._gates(x_gates, self.product(h, of_gates))
        product = self.product(self.new("Mul", reset, h), of_candidate)
        return update, self.new.formula("tanh(x + product)", x=x_new, product=product)

    def _gates(self, *addends: str) -> list[str]:
        """Return reset and update gate."""
        both = self.split(self.new("Sigmoid", self._sum(*addends)), (1, 1))
        return [both[self.n.attrs["gates"].index(k)] for k in "rz"]

    def _sum(self, first: str, *others: str) -> str:
        return self.new("Add", first, *others) if others else first

    def parts(self, weight: str | None) -> list[str]:
        """Return the rows of gates and candidate of a weight; nothing if there is none."""
        if weight is not None and weight not in self._parts:
            sizes, known = (2 * self.size, self.size), self.new.graph.weights.get(weight)
            if known is None:
                gives = [(s, *self.new.shape(weight)[1:]) for s in sizes]
                self._parts[weight] = self.new.several("Split", weight, gives=gives, axis=0, sizes=sizes)
            else:
                rows = known.detach().split(sizes)
                self._parts[weight] = [self.new.constant(p.clone(), of=(weight,)) for p in rows]
        return self._parts[weight] if weight is not None else []


def rnn(new: NewNodes, n: Node) -> list[str]:
    """h' = tanh(x W + b + h R + rb), or the ReLU of it. Source: Elman 1990."""
    layer, states = _Layer(new, n), list[str]()
    activation = f"{n.attrs['activation']}(x)"  # "tanh" or "relu"
    steps = layer.products(layer.joint_bias())
    h = layer.state("h", steps)
    for t, step in layer.numbered(steps):
        y = step if h is None else new("Add", step, layer.product(h))
        h = layer.masked(t, new.formula(activation, x=y), h)
        states.append(h)
    return layer.results(states)
