"""Change the layout of spatial operators: channels first (N, C, ...) or channels last (N, ..., C).

Only activations are rearranged. Weights keep their canonical layout (OIHW kernels and so on), and the inputs and
outputs of the model keep theirs unless `change_io` allows otherwise. Terms used below:

layout: the permutation p in which a value is held, held = natural.permute(p). Operators that work in any layout compute
    in that of their operands with renamed axes, so that transpositions appear only where a layout changes.
pending: the result of a Transpose of the model that has become another layout of its operand. The Transpose is written
    after all if an operator needs the value in its natural layout; otherwise it is removed.
kept transposes: Transpose nodes that stay operators, because their result has another grid than their operand.
float edges: (value, reader) pairs whose reader uses the value before it is quantized. A rearranged copy made for such a
    reader is neither shared nor quantized.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from chipfit.graph.edit import new_name
from chipfit.graph.ir import Graph, Node, Value
from chipfit.operators.table import OPS
from chipfit.plan.record import NodePlan, Plan

Layout = tuple[int, ...]
Edges = Collection[tuple[str, str]]  #: (value, node that reads it)


@dataclass(frozen=True, slots=True)
class LayoutChange:
    """A graph in another layout, and where each of its values comes from."""

    graph: Graph
    layouts: dict[str, Layout] = field(default_factory=dict)  #: value -> its layout, if not the natural one
    #: inserted value or constant -> (the original that it rearranges, its layout)
    copies: dict[str, tuple[str, Layout]] = field(default_factory=dict)
    float_edges: set[tuple[str, str]] = field(default_factory=set)  #: those of inserted nodes and values


def change_layout(
    graph: Graph,
    target: str,
    float_edges: Edges = frozenset(),
    kept_transposes: Collection[str] = frozenset(),
    *,
    change_io: bool = False,
) -> LayoutChange:
    """Return the network with its spatial operators in the `target` layout ("channels_first" or "channels_last").

    Args:
        float_edges: (value, node) pairs whose node reads the value before it is quantized.
        kept_transposes: names of Transpose nodes that must stay.
        change_io: allow inputs in the target layout where that saves transpositions, and leave outputs in the layout in
            which they are computed. Otherwise transpositions at inputs and outputs keep the model's layout.
    """
    if graph.data_format == target:
        return LayoutChange(graph.copy())

    def changed(inputs: Mapping[str, Layout]) -> LayoutChange:
        return _LayoutChanger(graph, target, float_edges, kept_transposes, inputs, change_io).run()

    inputs = dict[str, Layout]()
    new = changed(inputs)
    for name in graph.inputs if change_io else ():
        layout = _target_layout(target, rank := len(graph.shape(name)))
        if layout == natural_layout(rank):
            continue
        more = {**inputs, name: layout}
        if _transpositions(other := changed(more)) < _transpositions(new):
            new, inputs = other, more
    return new


def apply_layout(graph: Graph, plan: Plan, target: str, *, change_io: bool = False) -> tuple[LayoutChange, Plan]:
    """Change the layout of a graph that has a plan; inserted values are stored like the values that they rearrange."""
    read_in_float = {v for v, _ in plan.float_edges}  # these hold more than their operand in another order
    moved = [n for n in graph.nodes if n.op in ("Transpose", "Reshape") and n.data in graph.values]
    kept_transposes = {n.name for n in moved if n.output in read_in_float or not same_numbers(plan, n.data, n.output)}
    kept_transposes |= {name for group in plan.groups for name in group}  # what a kernel outputs, moved, is stored
    new = change_layout(graph, target, plan.float_edges, kept_transposes, change_io=change_io)
    tensors, nodes = dict(plan.tensors), dict(plan.nodes)
    made = new.graph.producers()
    for name, (source, layout) in new.copies.items():
        quantized = plan.quantized(source) and (source, name) not in new.float_edges
        if quantized:
            t = plan.tensors[source].with_(name=name)
            if t.axis is not None and source in graph.weights:  # a constant, which got leading axes of size 1
                t = t.with_(axis=layout.index(t.axis + len(layout) - graph.weights[source].dim()))
            tensors[name] = t
        if n := made.get(name):
            nodes[name] = NodePlan(name=name, op=n.op, layer=n.display_name, exec="follow" if quantized else "float")
    return new, replace(plan, tensors=tensors, nodes=nodes, float_edges=plan.float_edges | frozenset(new.float_edges))


def same_numbers(plan: Plan, a: str, b: str) -> bool:
    """Check whether two values share grid, scale and zero point, or are both float."""
    x, y = plan.stored(a), plan.stored(b)
    return x is y if x is None or y is None else x.same_numbers(y)


def _transpositions(new: LayoutChange) -> int:
    return sum(n.op == "Transpose" for n in new.graph.nodes)


def _target_layout(target: str, rank: int) -> Layout:
    """Return the target layout of a tensor of this rank, relative to the other layout."""
    if rank < 3:
        return natural_layout(rank)
    return (0, *range(2, rank), 1) if target == "channels_last" else (0, rank - 1, *range(1, rank - 1))


def natural_layout(rank: int) -> Layout:
    return tuple(range(rank))


def keeps_memory_order(shape: Sequence[int | None], perm: Layout) -> bool:
    """Check whether permuting a tensor of this shape leaves its memory as it is: only axes of size 1 move."""
    kept = [d for d in perm if shape[d] != 1]
    return kept == sorted(kept)


def moved_units(graph: Graph, node: Node) -> Layout | None:
    """Return the permutation that a Reshape is, which moves axes of size 1 and no other; None if it is none."""
    if node.data in graph.weights:
        return None
    before, after = graph.shape(node.data), graph.shape(node.output)
    kinds = [([d for d, n in enumerate(s) if n == 1], [d for d, n in enumerate(s) if n != 1]) for s in (before, after)]
    (units, others), (new_units, new_others) = kinds
    same = [before[d] for d in others] == [after[d] for d in new_others]
    if len(before) != len(after) or before == after or not same or before.count(None) > 1:
        return None
    source = dict(zip([*new_units, *new_others], [*units, *others], strict=True))
    return tuple(source[d] for d in range(len(after)))


def remove_axes(layout: Layout, axes: Collection[int]) -> Layout:
    """Return the layout that remains when `axes` (natural numbering) are removed."""
    left = [d for d in layout if d not in axes]
    return tuple(sorted(left).index(d) for d in left)


class _LayoutChanger:
    """A pass over the nodes in execution order, with a method for each value of `OpDef.layout`."""

    def __init__(
        self,
        graph: Graph,
        target: str,
        float_edges: Edges,
        kept_transposes: Collection[str],
        inputs: Mapping[str, Layout],
        free_outputs: bool,
    ) -> None:
        self.source, self.target, self.float_edges, self.kept_transposes = graph, target, float_edges, kept_transposes
        self.result = LayoutChange(graph.copy())
        self.out = self.result.graph
        self.out.nodes, self.out.data_format = [], target
        self.free_outputs = free_outputs  # outputs may stay in the layout in which they are held
        self.held: dict[str, tuple[str, Layout]] = {i: (i, self.order(i)) for i in graph.inputs}
        for i, layout in inputs.items():
            self.held[i] = i, layout
            self.out.values[i] = replace(graph.values[i], shape=tuple(graph.shape(i)[d] for d in layout))
            self.note_layout(i, layout)
        self.pending: dict[str, Node] = {}  # by value
        self.made: dict[tuple[str, Layout, bool], str] = {}

    def run(self) -> LayoutChange:
        for node in self.source.nodes:
            _RULES[node.facts.layout](self, node)
        self.out.outputs = [self.result_of(o) for o in self.source.outputs]
        for name in self.pending:
            del self.out.values[name]
        return self.result

    def result_of(self, name: str) -> str:
        if name in self.out.weights or (self.free_outputs and self.held[name][0] == name):
            return name
        return self.read(name, self.order(name))

    # ---- pieces

    def rank(self, name: str) -> int:
        return len(self.source.shape(name))

    def order(self, name: str) -> Layout:
        """Return the natural layout of a value."""
        return natural_layout(self.rank(name))

    def wanted(self, name: str) -> Layout:
        """Return the layout in which spatial operators read and write a value."""
        return _target_layout(self.target, self.rank(name))

    def layout(self, name: str) -> Layout:
        """Return the layout in which a value is held; the natural one for weights."""
        return self.held[name][1] if name in self.held else self.order(name)

    def read(self, name: str, layout: Layout, node: str = "") -> str:
        """Return a value that holds `name` in `layout`; rearrange it when needed."""
        in_float = (name, node) in self.float_edges
        if name in self.source.weights:
            return self.constant(name, layout, in_float, node)
        tensor, have = self.held[name]
        if have == layout:
            return tensor
        key = (name, layout, in_float)
        if key not in self.made:
            self.made[key] = self.rearranged(name, layout, in_float)
        if in_float and self.made[key] != name:
            self.result.float_edges.add((self.made[key], node))
        return self.made[key]

    def rearranged(self, name: str, layout: Layout, in_float: bool) -> str:
        """Append a node that brings a value into `layout`, the pending Transpose or a new one; return its value."""
        tensor, have = self.held[name]
        shape = self.out.values[tensor].shape
        perm = tuple(have.index(d) for d in layout)
        moved = tuple(shape[d] for d in perm)
        if keeps_memory_order(shape, perm) and shape.count(None) <= 1:
            op, attrs = "Reshape", {"shape": tuple(-1 if s is None else s for s in moved)}
        else:
            op, attrs = "Transpose", {"perm": perm}
        own = self.pending.pop(name, None)
        new = name if own else self.fresh(name, layout)
        like = own or next((n for n in self.source.nodes if name in n.outputs), Node("", "", (), ()))
        how = Node(own.name if own else new, op, (tensor,), (new,), attrs, like.layer, like.layer_type)
        self.out.nodes.append(how)
        self.out.values[new] = replace(self.source.values[name], name=new, shape=moved)
        if own:
            self.held[name] = (name, layout)
            self.note_layout(name, layout)
        else:
            self.result.copies[new] = name, layout
            if in_float:
                self.result.float_edges.add((tensor, new))
        return new

    def constant(self, name: str, layout: Layout, in_float: bool, node: str) -> str:
        """Return a new weight that holds a constant operand, broadcast to the rank of `layout` and rearranged."""
        w = self.source.weights[name]
        if layout == natural_layout(len(layout)) or w.numel() == 1:
            return name
        new = self.made.get((name, layout, False)) or self.fresh(name, layout)
        self.made[name, layout, False] = new
        self.out.weights[new] = w.reshape((1,) * (len(layout) - w.dim()) + tuple(w.shape)).permute(layout).contiguous()
        self.result.copies[new] = name, layout
        if in_float:
            self.result.float_edges.add((new, node))
        return new

    def fresh(self, name: str, layout: Layout) -> str:
        return new_name(self.out, f"{name}_t{''.join(map(str, layout))}")

    def note_layout(self, name: str, layout: Layout) -> None:
        if layout != natural_layout(len(layout)):
            self.result.layouts[name] = layout

    def emit(self, node: Node, inputs: Sequence[str | None], layouts: Sequence[Layout], **attrs: object) -> None:
        """Append the node with new inputs and attributes; its outputs are held in `layouts`."""
        self.out.nodes.append(node.with_(inputs=tuple(inputs), attrs={**node.attrs, **attrs}))
        for name, layout in zip(node.outputs, layouts, strict=True):
            self.held[name] = (name, layout)
            v = self.source.values[name]
            self.out.values[name] = Value(name, tuple(v.shape[d] for d in layout) if v.shape else v.shape, v.dtype)
            self.note_layout(name, layout)

    def operands(self, node: Node, layout: Callable[[str], Layout]) -> list[str | None]:
        """Return all operands, each in the layout that `layout` gives for its name."""
        return [None if i is None else self.read(i, layout(i), node.name) for i in node.inputs]

    def agreed(self, node: Node, rank: int) -> Layout:
        """Return the layout of a rearranged operand of full rank, else the natural layout."""
        full = [self.layout(i) for i in self.source.activations(node) if self.rank(i) == rank]
        return next((f for f in full if f != natural_layout(rank)), natural_layout(rank))

    def as_held(self, node: Node) -> tuple[str, Layout]:
        """Return the data operand in the layout in which it is held, and that layout."""
        layout = self.layout(node.data)
        return self.read(node.data, layout, node.name), layout

    # ---- kinds of operators

    def natural(self, node: Node) -> None:
        """Read and write everything in the natural layout."""
        self.emit(node, self.operands(node, self.order), [self.order(o) for o in node.outputs])

    def spatial(self, node: Node, **attrs: object) -> None:
        def layout(name: str) -> Layout:
            return self.wanted(name) if name == node.data else self.order(name)

        self.emit(node, self.operands(node, layout), [self.wanted(o) for o in node.outputs], **attrs)

    def elementwise(self, node: Node) -> None:
        rank = self.rank(node.output)
        lower = any(0 < self.rank(i) < rank for i in self.source.activations(node))  # would have to be broadcast first
        layout = natural_layout(rank) if lower else self.agreed(node, rank)

        def of(name: str) -> Layout:
            return layout if self.rank(name) == rank or name in self.source.weights else self.order(name)

        self.emit(node, self.operands(node, of), [layout])

    def ranges(self, node: Node) -> None:
        """Find ranges of rows in the natural layout, of channels in that of the graph, others in any."""
        by_layout = {"row": self.natural, "block": self.natural, "pixel": self.spatial}
        by_layout.get(node.attrs["per"], self.elementwise)(node)

    def concat(self, node: Node) -> None:
        rank = self.rank(node.output)
        layout = self.agreed(node, rank)
        self.emit(node, self.operands(node, lambda _: layout), [layout], axis=layout.index(node.attrs["axis"] % rank))

    def on_axes(self, node: Node) -> None:
        """Handle an operator that works on one axis or several, which its results keep or lose."""
        given = node.attrs.get("axes", [node.attrs.get("axis")])
        if None in given:
            return self.natural(node)
        x, layout = self.as_held(node)
        axes = {a % len(layout) for a in given}
        here = tuple(sorted(layout.index(a) for a in axes))
        how = {"axes": here} if "axes" in node.attrs else {"axis": min(here)}
        after = layout if self.rank(node.outputs[0]) == len(layout) else remove_axes(layout, axes)
        self.emit(node, [x], [after] * len(node.outputs), **how)

    along = remove_axis = reduce = arg_max = on_axes

    def size(self, node: Node) -> None:
        x, layout = self.as_held(node)
        self.emit(node, [x], [()], axis=layout.index(node.attrs["axis"] % len(layout)))

    def squeeze(self, node: Node) -> None:
        axes = {a % self.rank(node.data) for a in node.attrs["axes"]}
        if self.rank(node.output) != self.rank(node.data) - len(axes):  # some of them are not of size 1 and stay
            return self.natural(node)
        self.on_axes(node)

    def pad(self, node: Node) -> None:
        padding = node.attrs["padding"]
        if node.attrs["mode"] != "constant":  # the engine reflects trailing axes only
            return self.spatial(node, padding=tuple(padding[d] for d in self.wanted(node.output)))
        x, layout = self.as_held(node)
        self.emit(node, [x], [layout], padding=tuple(padding[d] for d in layout))

    def tile(self, node: Node) -> None:
        if len(node.attrs["repeats"]) != self.rank(node.data):
            return self.natural(node)
        x, layout = self.as_held(node)
        self.emit(node, [x], [layout], repeats=tuple(node.attrs["repeats"][d] for d in layout))

    def roll(self, node: Node) -> None:
        x, layout = self.as_held(node)
        self.emit(node, [x], [layout], axes=tuple(layout.index(a % len(layout)) for a in node.attrs["axes"]))

    def reshape(self, node: Node) -> None:
        """Read the operand as it lies in memory if that is the natural order.

        One that only moves axes of size 1 is a Transpose.
        """
        perm = moved_units(self.source, node)
        if perm is not None and node.name not in self.kept_transposes:
            return self.relabel(node, perm)
        layout = self.layout(node.data)
        if node.data in self.source.weights or not keeps_memory_order(self.source.shape(node.data), layout):
            return self.natural(node)
        self.emit(node, [self.read(node.data, layout, node.name)], [self.order(node.output)])

    def transpose(self, node: Node) -> None:
        """Relabel the axes: the result is the operand in another layout."""
        if node.data in self.source.weights or node.name in self.kept_transposes:
            return self.natural(node)
        self.relabel(node, [d % self.rank(node.data) for d in node.attrs["perm"]])

    def relabel(self, node: Node, perm: Sequence[int]) -> None:
        tensor, layout = self.held[node.data]
        self.held[node.output] = (tensor, tuple(perm.index(d) for d in layout))
        self.pending[node.output] = node


#: `OpDef.layout` -> the method that handles it
_RULES: dict[str, Callable[[_LayoutChanger, Node], None]] = {
    row.layout: getattr(_LayoutChanger, row.layout) for row in OPS.values()
}


def keep_constant_names(graph: Graph, copies: Mapping[str, tuple[str, object]]) -> None:
    """Give the rearranged copy of a constant the constant's name if only the copy is read."""
    users = graph.users()
    for copy, (original, _) in copies.items():
        if copy not in graph.weights or original in users or sum(o == original for o, _ in copies.values()) > 1:
            continue
        graph.weights[original] = graph.weights.pop(copy)
        graph.nodes = [n.reading({copy: original}) for n in graph.nodes]
