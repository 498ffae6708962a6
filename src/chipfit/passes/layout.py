"""Change the layout of spatial operators: channels first (N, C, ...) or channels last (N, ..., C).

Only activations are rearranged. Weights keep their canonical layout (OIHW kernels and so on), and the model keeps the
layout of its own inputs and outputs unless its borders are given up too. The words below:

form: the permutation p in which a value is held, held = natural.permute(p). Operators that do not care compute in the
    form at hand with their axes renamed, so that transpositions appear only where a form really changes.
pending: the result of a Transpose of the model's own that has become nothing but another form of its operand. The node
    is written after all when somebody reads the value as the model has it; otherwise it is gone.
solid: a Transpose that must stay an operator, because its result is stored with other numbers than its operand.
raw: a reader takes the value before it is quantized. What is rearranged for it is neither shared nor quantized.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chipfit.graph.builder import unique
from chipfit.graph.ir import Graph, Node, Value
from chipfit.graph.ops import OPS

Form = tuple[int, ...]
Edges = Collection[tuple[str, str]]  #: (value, node that reads it)


@dataclass(frozen=True, slots=True)
class Rearranged:
    """What `rearrange` did."""

    graph: Graph
    forms: dict[str, Form] = field(default_factory=dict)  #: value -> its form, where it is not the natural one
    #: inserted value or constant -> the one that it rearranges, and the form in which it holds it
    copies: dict[str, tuple[str, Form]] = field(default_factory=dict)
    raw: set[tuple[str, str]] = field(default_factory=set)  #: raw edges that inserted nodes have


def rearrange(
    graph: Graph, target: str, raw: Edges = frozenset(), solid: Collection[str] = frozenset(), *, borders: bool = False
) -> Rearranged:
    """The same network with its spatial operators in `target` layout ("channels_first" or "channels_last").

    Args:
        graph: its values may have a quantized and a raw side.
        raw: (value, node) edges that read the raw side.
        solid: names of Transpose nodes.
        borders: inputs may be held rearranged where that spares transpositions, outputs stay as they are made; else
            transpositions stand at the borders.
    """
    if graph.data_format == target:
        return Rearranged(graph.copy())
    entries: dict[str, Form] = {}
    new = _Walk(graph, target, raw, solid, entries, borders).run()
    for name in graph.inputs if borders else ():
        form = _layout(target, len(graph.shape(name)))
        other = _Walk(graph, target, raw, solid, {**entries, name: form}, borders).run()
        if _transpositions(other) < _transpositions(new):
            new, entries = other, {**entries, name: form}
    return new


def _transpositions(new: Rearranged) -> int:
    return sum(n.op == "Transpose" for n in new.graph.nodes)


def _layout(target: str, rank: int) -> Form:
    """The target layout of a tensor of this rank, seen from the other one."""
    if rank < 3:
        return natural(rank)
    return (0, *range(2, rank), 1) if target == "channels_last" else (0, rank - 1, *range(1, rank - 1))


def natural(rank: int) -> Form:
    return tuple(range(rank))


def moves_nothing(shape: Sequence[int | None], perm: Form) -> bool:
    """Whether permuting a tensor of this shape leaves its memory as it is: only axes of size 1 change places."""
    kept = [d for d in perm if shape[d] != 1]
    return kept == sorted(kept)


def without(form: Form, axes: Collection[int]) -> Form:
    """The form that remains when natural `axes` are removed."""
    left = [d for d in form if d not in axes]
    return tuple(sorted(left).index(d) for d in left)


class _Walk:
    """One pass over the nodes in execution order; a method for each `layout` that an operator may have."""

    def __init__(
        self, graph: Graph, target: str, raw: Edges, solid: Collection[str], entries: Mapping[str, Form], loose: bool
    ) -> None:
        self.source, self.target, self.raw_edges, self.solid = graph, target, raw, solid
        self.result = Rearranged(graph.copy())
        self.out = self.result.graph
        self.out.nodes, self.out.data_format = [], target
        self.loose = loose  # outputs may stay as they are held
        self.held: dict[str, tuple[str, Form]] = {i: (i, self.order(i)) for i in graph.inputs}
        for i, form in entries.items():
            self.held[i] = i, form
            self.out.values[i] = replace(graph.values[i], shape=tuple(graph.shape(i)[d] for d in form))
            self.note_form(i, form)
        self.pending: dict[str, Node] = {}  # by value
        self.made: dict[tuple[str, Form, bool], str] = {}

    def run(self) -> Rearranged:
        for node in self.source.nodes:
            _RULES[OPS[node.op].layout if node.op in OPS else "natural"](self, node)
        self.out.outputs = [self.result_of(o) for o in self.source.outputs]
        for name in self.pending:
            del self.out.values[name]
        return self.result

    def result_of(self, name: str) -> str:
        if name in self.out.weights or (self.loose and self.held[name][0] == name):
            return name
        return self.read(name, self.order(name))

    # ---- pieces

    def rank(self, name: str) -> int:
        return len(self.source.shape(name))

    def order(self, name: str) -> Form:
        """The natural form of a value."""
        return natural(self.rank(name))

    def wanted(self, name: str) -> Form:
        """The form in which spatial operators take and give a value."""
        return _layout(self.target, self.rank(name))

    def form(self, name: str) -> Form:
        """The form in which a value is held; natural for weights."""
        return self.held[name][1] if name in self.held else self.order(name)

    def read(self, name: str, form: Form, node: str = "") -> str:
        """The name under which `name` can be read in `form`; rearranges it when needed."""
        raw = (name, node) in self.raw_edges
        if name in self.source.weights:
            return self.constant(name, form, raw, node)
        tensor, have = self.held[name]
        if have == form:
            return tensor
        key = (name, form, raw)
        if key not in self.made:
            self.made[key] = self.rearranged(name, form, raw)
        if raw and self.made[key] != name:
            self.result.raw.add((self.made[key], node))
        return self.made[key]

    def rearranged(self, name: str, form: Form, raw: bool) -> str:
        """A new node that brings a value into `form`: the pending one, or one of its own."""
        tensor, have = self.held[name]
        shape = self.out.values[tensor].shape
        perm = tuple(have.index(d) for d in form)
        moved = tuple(shape[d] for d in perm)
        if moves_nothing(shape, perm) and shape.count(None) <= 1:
            op, attrs = "Reshape", {"shape": tuple(-1 if s is None else s for s in moved)}
        else:
            op, attrs = "Transpose", {"perm": perm}
        own = self.pending.pop(name, None)
        new = name if own else self.fresh(name, form)
        like = own or next((n for n in self.source.nodes if name in n.outputs), Node("", "", (), ()))
        how = Node(own.name if own else new, op, (tensor,), (new,), attrs, like.layer, like.layer_type)
        self.out.nodes.append(how)
        self.out.values[new] = replace(self.source.values[name], name=new, shape=moved)
        if own:
            self.held[name] = (name, form)
            self.note_form(name, form)
        else:
            self.result.copies[new] = name, form
            if raw:
                self.result.raw.add((tensor, new))
        return new

    def constant(self, name: str, form: Form, raw: bool, node: str) -> str:
        """A constant operand, broadcast to the rank of `form` and rearranged as a new weight."""
        w = self.source.weights[name]
        if form == natural(len(form)) or w.numel() == 1:
            return name
        new = self.made.get((name, form, False)) or self.fresh(name, form)
        self.made[name, form, False] = new
        self.out.weights[new] = w.reshape((1,) * (len(form) - w.dim()) + tuple(w.shape)).permute(form).contiguous()
        self.result.copies[new] = name, form
        if raw:
            self.result.raw.add((new, node))
        return new

    def fresh(self, name: str, form: Form) -> str:
        return unique(f"{name}_t{''.join(map(str, form))}", {*self.out.values, *self.out.weights})

    def note_form(self, name: str, form: Form) -> None:
        if form != natural(len(form)):
            self.result.forms[name] = form

    def emit(self, node: Node, inputs: Sequence[str | None], forms: Sequence[Form], **attrs: object) -> None:
        """Append the node with other inputs and attributes; its outputs are held in `forms`."""
        self.out.nodes.append(node.with_(inputs=tuple(inputs), attrs={**node.attrs, **attrs}))
        for name, form in zip(node.outputs, forms, strict=True):
            self.held[name] = (name, form)
            v = self.source.values[name]
            self.out.values[name] = Value(name, tuple(v.shape[d] for d in form) if v.shape else v.shape, v.dtype)
            self.note_form(name, form)

    def operands(self, node: Node, form: Callable[[str], Form]) -> list[str | None]:
        """All operands, each in the form that it should have."""
        return [None if i is None else self.read(i, form(i), node.name) for i in node.inputs]

    def agreed(self, node: Node, rank: int) -> Form:
        """The form that the operands of full rank have, where one of them is rearranged; else the natural one."""
        full = [self.form(i) for i in self.source.activations(node) if self.rank(i) == rank]
        return next((f for f in full if f != natural(rank)), natural(rank))

    def as_held(self, node: Node) -> tuple[str, Form]:
        """The data operand in the form at hand."""
        form = self.form(node.data)
        return self.read(node.data, form, node.name), form

    def on_axes(self, node: Node, keeps: bool) -> None:
        """Works on one axis, or on several, which its results keep or lack."""
        x, form = self.as_held(node)
        axes = {a % len(form) for a in node.attrs.get("axes", [node.attrs.get("axis")])}
        here = tuple(sorted(form.index(a) for a in axes))
        how = {"axes": here} if "axes" in node.attrs else {"axis": min(here)}
        self.emit(node, [x], [form if keeps else without(form, axes)] * len(node.outputs), **how)

    # ---- kinds of operators

    def natural(self, node: Node) -> None:
        """Everything in the natural form."""
        self.emit(node, self.operands(node, self.order), [self.order(o) for o in node.outputs])

    def spatial(self, node: Node, **attrs: object) -> None:
        def form(name: str) -> Form:
            return self.wanted(name) if name == node.data else self.order(name)

        self.emit(node, self.operands(node, form), [self.wanted(o) for o in node.outputs], **attrs)

    def elementwise(self, node: Node) -> None:
        rank = self.rank(node.output)
        lower = any(0 < self.rank(i) < rank for i in self.source.activations(node))  # would have to be broadcast first
        form = natural(rank) if lower else self.agreed(node, rank)

        def of(name: str) -> Form:
            return form if self.rank(name) == rank or name in self.source.weights else self.order(name)

        self.emit(node, self.operands(node, of), [form])

    def concat(self, node: Node) -> None:
        rank = self.rank(node.output)
        form = self.agreed(node, rank)
        self.emit(node, self.operands(node, lambda _: form), [form], axis=form.index(node.attrs["axis"] % rank))

    def along(self, node: Node) -> None:
        self.on_axes(node, keeps=True)

    def remove_axis(self, node: Node) -> None:
        self.on_axes(node, keeps=False)

    def arg_max(self, node: Node) -> None:
        (self.natural if node.attrs["axis"] is None else self.reduce)(node)

    def size(self, node: Node) -> None:
        x, form = self.as_held(node)
        self.emit(node, [x], [()], axis=form.index(node.attrs["axis"] % len(form)))

    def reduce(self, node: Node) -> None:
        self.on_axes(node, keeps=node.attrs["keepdims"])

    def squeeze(self, node: Node) -> None:
        axes = {a % self.rank(node.data) for a in node.attrs["axes"]}
        if self.rank(node.output) != self.rank(node.data) - len(axes):  # some of them are not of size 1 and stay
            return self.natural(node)
        self.on_axes(node, keeps=False)

    def pad(self, node: Node) -> None:
        padding = node.attrs["padding"]
        if node.attrs["mode"] != "constant":  # the engine reflects trailing axes only
            return self.spatial(node, padding=tuple(padding[d] for d in self.wanted(node.output)))
        x, form = self.as_held(node)
        self.emit(node, [x], [form], padding=tuple(padding[d] for d in form))

    def tile(self, node: Node) -> None:
        if len(node.attrs["repeats"]) != self.rank(node.data):
            return self.natural(node)
        x, form = self.as_held(node)
        self.emit(node, [x], [form], repeats=tuple(node.attrs["repeats"][d] for d in form))

    def roll(self, node: Node) -> None:
        x, form = self.as_held(node)
        self.emit(node, [x], [form], axes=tuple(form.index(a % len(form)) for a in node.attrs["axes"]))

    def reshape(self, node: Node) -> None:
        """Reads its operand as it lies in memory where that is the natural order."""
        form = self.form(node.data)
        if node.data in self.source.weights or not moves_nothing(self.source.shape(node.data), form):
            return self.natural(node)
        self.emit(node, [self.read(node.data, form, node.name)], [self.order(node.output)])

    def transpose(self, node: Node) -> None:
        """Only a relabelling: the result is what the operand holds, under another form."""
        if node.data in self.source.weights or node.name in self.solid:
            return self.natural(node)
        perm = [d % self.rank(node.data) for d in node.attrs["perm"]]
        tensor, form = self.held[node.data]
        self.held[node.output] = (tensor, tuple(perm.index(d) for d in form))
        self.pending[node.output] = node


#: by the `layout` of an operator
_RULES: dict[str, Callable[[_Walk, Node], None]] = {row.layout: getattr(_Walk, row.layout) for row in OPS.values()}
