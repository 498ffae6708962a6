"""Channels of a network that can be removed, and those that go only together.

Each value of the graph has labels along one axis at most: those of its channels. Operators pass labels on: sums tie the
labels of their operands, concatenations join them, a depthwise convolution gives its outputs those of its inputs.
Operators that only move numbers run on the labels themselves. Channels that an operator without a rule reads must stay,
as those of inputs and outputs of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from chipfit.channel_pruning.labels import FIXED, Labels
from chipfit.channel_pruning.resize import Axis, Kept, resized
from chipfit.engine.kernels import execute
from chipfit.engine.run import run
from chipfit.graph.ir import CPU, Graph, Node
from chipfit.graph.linear import TRANSPOSED, channel_axis, is_linear
from chipfit.graph.placement import inputs_on
from chipfit.operators.table import OPS

#: classes of channels that are tried one by one on an operator that moves numbers
_TRIALS = 4


@dataclass
class Channels:
    """The units of a network: channels that are removed together."""

    graph: Graph
    units: dict[Axis, Tensor]  #: axis -> the unit of each channel, [C] int64; `FIXED` for what must stay
    producers: dict[str, Axis]  #: linear operator -> the axis of its weight with its output channels
    sinks: dict[str, Axis]  #: operator that sums over channels -> the axis of its data with them
    fixed: dict[str, str]  #: linear operator -> why none of its output channels can be removed

    @property
    def removable(self) -> list[int]:
        """All units that can be removed."""
        return sorted({u for a in self.producers.values() for u in self.units[a].tolist()} - {FIXED})


def channels_of(graph: Graph) -> Channels:
    """Return the units of a network; the graph needs its example inputs."""
    return _Reader(graph).read()


@dataclass
class _Reader:
    graph: Graph
    labels: Labels = field(default_factory=Labels)
    at: dict[str, tuple[int, Tensor]] = field(default_factory=dict)  #: value -> axis and labels along it
    of_weights: dict[Axis, Tensor] = field(default_factory=dict)
    producers: dict[str, Axis] = field(default_factory=dict)
    sinks: dict[str, Axis] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    integers: dict[str, Any] = field(default_factory=dict)

    def read(self) -> Channels:
        self._measure()
        for node in self.graph.nodes:
            self._rule(node)(node)
        for name in self.graph.outputs:
            self._hold([name], "it is an output of the model")
        axes = {(name, axis): labels for name, (axis, labels) in self.at.items()} | self.of_weights
        units = {axis: self.labels.roots(labels) for axis, labels in axes.items()}
        producers = {n: a for n, a in self.producers.items() if bool((units[a] != FIXED).any())}
        fixed = {n: self.labels.why_fixed(self.of_weights[a]) for n, a in self.producers.items() if n not in producers}
        return Channels(self.graph, units, producers, self.sinks, fixed)

    def _measure(self) -> None:
        """Record the shape of every value on the example inputs, and the integers that operators compute."""

        def see(name: str, x: Any) -> None:
            if isinstance(x, Tensor):
                self.shapes[name] = tuple(x.shape)
            if not (isinstance(x, Tensor) and x.is_floating_point()):
                self.integers[name] = x

        def hook(node: Node, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
            for name, x in zip(node.outputs, outputs, strict=False):
                see(name, x)
            return outputs

        example = inputs_on(CPU, self.graph.example)
        for name, x in zip(self.graph.inputs, example, strict=True):
            see(name, x)
        with torch.no_grad():
            run(self.graph, example, hook=hook)

    # ---- labels of operands

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.graph.weights[name].shape) if name in self.graph.weights else self.shapes.get(name, ())

    def _hold(self, names: Sequence[str | None], why: str) -> None:
        """Let all channels of these values and weights stay."""
        for name in names:
            found = [self.at[name][1]] if name in self.at else []
            found += [labels for (w, _), labels in self.of_weights.items() if w == name]
            for labels in found:
                self.labels.fix(labels, why)

    def _tie(self, first: Tensor, second: Tensor) -> None:
        self.labels.tie(first.tolist(), second.tolist(), "they are combined with channels that must stay")

    def _give_weight(self, name: str | None, axis: int, labels: Tensor) -> None:
        """Give labels to an axis of a weight, and tie them to those that it has."""
        if name is None:
            return
        if name not in self.graph.weights:  # a bias or slope that is computed
            self._hold([name], "it is read as a parameter")
            return self.labels.fix(labels, f"'{name}' is computed")
        key = (name, axis % self.graph.weights[name].dim())
        if key in self.of_weights:
            self._tie(self.of_weights[key], labels)
        else:
            self.of_weights[key] = labels

    def _labels(self, name: str, axis: int) -> Tensor:
        """Return the labels along an axis of a value: `FIXED` ones if it has none there."""
        shape = self._shape(name)
        axis %= len(shape)
        if name in self.at and self.at[name][0] == axis:
            return self.at[name][1]
        self._hold([name], "its channels are on another axis")
        return torch.full((shape[axis],), FIXED)

    def _give(self, name: str, axis: int, labels: Tensor) -> None:
        """Give labels to an axis of a value; a value of one channel keeps it."""
        shape = self._shape(name)
        axis %= max(len(shape), 1)
        if not shape or shape[axis] != len(labels) or len(labels) == 1:
            self.labels.fix(labels, f"'{name}' does not have them on one axis")
        elif bool((labels != FIXED).any()):
            self.at[name] = axis, labels

    # ---- rules of operators

    def _rule(self, node: Node) -> Any:
        row = OPS.get(node.op)
        data = [i for i in node.inputs if i is not None]
        if is_linear(self.graph, node) and not self.graph.is_weight(node.data):
            return self._linear
        if row is None or (not any(i in self.at for i in data) and node.op != "Embedding"):
            return self._unknown
        named = {
            "Softmax": self._softmax,
            "MatMul": self._mat_mul,
            "SDPA": self._attention,
            "Embedding": self._embedding,
            "Pad": self._pad,
        }
        if node.op in named:
            return named[node.op]
        if row.norm:
            by_channel = self._group_norm if "groups" in row.attrs else self._norm_by_channel
            return self._norm_over_last if row.norm == "vectors" else by_channel
        if row.layout == "elementwise":
            return self._elementwise
        if row.by_channel:
            return self._by_channel
        if row.layout == "reduce":
            return self._reduce
        return self._moved if row.moves else self._unknown

    def _unknown(self, node: Node) -> None:
        if node.op != "Size":
            self._hold(node.inputs, f"'{node.display_name}' ({node.called}) reads them")

    def _linear(self, node: Node) -> None:
        """Sum over input channels: they are the sink's; the outputs are new channels, or follow the groups."""
        w = self.graph.weights[node.weight]
        out_axis, in_axis = (1, 0) if node.op in TRANSPOSED else (0, 1)
        x, groups = self._labels(node.data, channel_axis(node)), node.attrs.get("groups", 1)
        axis = channel_axis(node) % len(self._shape(node.data))
        if groups == 1:
            y = self.labels.new(w.shape[out_axis])
            self._give_weight(node.weight, in_axis, x)
            self._give_weight(node.weight, out_axis, y)
            self.producers[node.name], self.sinks[node.name] = (node.weight, out_axis), (node.data, axis)
        else:
            y = self._grouped(node, w, x, groups, axis)
        self._give_weight(node.bias, 0, y)
        self._give(node.output, channel_axis(node), y)

    def _grouped(self, node: Node, w: Tensor, x: Tensor, groups: int, axis: int) -> Tensor:
        """Return the labels of the outputs of a grouped convolution, whose groups all lose channels at one place."""
        each = len(x) // groups
        many = w.shape[1] if node.op in TRANSPOSED else w.shape[0] // groups
        if each == 1:  # a depthwise convolution loses whole groups
            y = x.repeat_interleave(many)
            self._give_weight(node.weight, 0, x if node.op in TRANSPOSED else y)
            return y
        self._tie_groups(x, groups)
        made = self.labels.new(many)
        y = made.repeat(groups)
        rows, columns = (x, made) if node.op in TRANSPOSED else (y, x[:each])
        self._give_weight(node.weight, 0, rows)
        self._give_weight(node.weight, 1, columns)
        out_axis = 1 if node.op in TRANSPOSED else 0
        self.producers[node.name], self.sinks[node.name] = (node.weight, out_axis), (node.data, axis)
        return y

    def _tie_groups(self, labels: Tensor, groups: int) -> None:
        by_group = labels.view(groups, -1)
        for other in by_group[1:]:
            self._tie(by_group[0], other)

    def _norm_by_channel(self, node: Node) -> None:
        x = self._labels(node.data, 1)
        for name in node.inputs[1:]:
            self._give_weight(name, 0, x)
        self._give(node.output, 1, x)

    def _group_norm(self, node: Node) -> None:
        self._tie_groups(self._labels(node.data, 1), node.attrs["groups"])
        self._norm_by_channel(node)

    def _norm_over_last(self, node: Node) -> None:
        axis, x = self.at[node.data]
        last = len(self._shape(node.data)) - 1
        if axis > last - len(node.attrs["normalized_shape"]):
            if axis != last or len(node.attrs["normalized_shape"]) > 1:
                return self._unknown(node)
            for name in node.inputs[1:]:
                self._give_weight(name, 0, x)
        self._give(node.output, axis, x)

    def _softmax(self, node: Node) -> None:
        self._give(node.output, *self.at[node.data])

    def _by_channel(self, node: Node) -> None:
        """Pass on channels on axis 1; weights have them on axis 0, or one entry."""
        axis, x = self.at[node.data]
        if axis != 1 or len(self._shape(node.output)) != len(self._shape(node.data)):
            return self._unknown(node)
        for name in node.inputs[1:]:
            if name is not None and self._shape(name)[:1] != (1,):
                self._give_weight(name, 0, x)
        self._give(node.output, axis, x)

    def _pad(self, node: Node) -> None:
        axis, x = self.at[node.data]
        padding = list(node.attrs["padding"])
        if any(padding[axis - len(self._shape(node.data))]) if len(padding) > 1 else True:
            return self._unknown(node)
        self._give(node.output, axis, x)

    def _reduce(self, node: Node) -> None:
        axis, x = self.at[node.data]
        rank = len(self._shape(node.data))
        axes = {a % rank for a in node.attrs["axes"] or range(rank)}
        if axis in axes:
            return self._unknown(node)
        self._give(node.output, axis - (0 if node.attrs["keepdims"] else sum(a < axis for a in axes)), x)

    def _elementwise(self, node: Node) -> None:
        """Tie the channels of all operands; an operand of one channel is read by all."""
        rank = len(self._shape(node.output))
        places = {i: rank - len(self._shape(i)) + self.at[i][0] for i in node.inputs if i is not None and i in self.at}
        axis = next(iter(places.values()))
        first = self.at[next(iter(places))][1]
        if any(a != axis for a in places.values()):
            return self._unknown(node)
        for name in (i for i in node.inputs if i is not None):
            shape = self._shape(name)
            own = axis - (rank - len(shape))
            if name in places:
                self._tie(first, self.at[name][1])
            elif own >= 0 and shape[own] > 1:
                if name not in self.graph.weights:
                    return self._unknown(node)
                self._give_weight(name, own, first)
        self._give(node.output, axis, first)

    def _mat_mul(self, node: Node) -> None:
        """Sum over the last axis of the first operand; other axes of either stay axes of the result."""
        a, b = (i or "" for i in node.inputs[:2])
        ranks = [len(self._shape(i)) for i in (a, b)]
        if min(ranks) < 2 or (b in self.graph.weights and ranks[1] != 2):
            return self._unknown(node)
        if b in self.graph.weights:
            x, y = self._labels(a, -1), self.labels.new(self._shape(b)[-1])
            self._give_weight(b, -2, x)
            self._give_weight(b, -1, y)
            self.producers[node.name], self.sinks[node.name] = (b, 1), (a, ranks[0] - 1)
            return self._give(node.output, -1, y)
        places = [self.at[i][0] - len(self._shape(i)) if i in self.at else None for i in (a, b)]
        if places == [-1, -2]:
            self._tie(self.at[a][1], self.at[b][1])
            self.sinks[node.name] = (a, self.at[a][0])
        elif places == [-2, None] or places == [None, -1]:
            name, axis = (a, -2) if places[1] is None else (b, -1)
            self._give(node.output, axis, self.at[name][1])
        else:
            self._unknown(node)

    def _attention(self, node: Node) -> None:
        """Sum over channels of queries and keys, if the scale does not follow from their number."""
        q, k, v = (i or "" for i in node.inputs[:3])
        rank = len(self._shape(q))
        axes = [self.at[i][0] - rank if i in self.at else None for i in (q, k, v)]
        if axes[:2] == [-1, -1] and node.attrs["scale"] is not None:
            self._tie(self.at[q][1], self.at[k][1])
            self.sinks[node.name] = (q, rank - 1)
        else:
            self._hold([q, k], f"'{node.display_name}' scales by their number")
        if axes[2] == -1:
            self._give(node.output, -1, self.at[v][1])
        else:
            self._hold([v], f"'{node.display_name}' reads them")

    def _embedding(self, node: Node) -> None:
        if node.weight not in self.graph.weights:
            return self._unknown(node)
        y = self.labels.new(self._shape(node.weight)[1])
        self._give_weight(node.weight, 1, y)
        self._give(node.output, -1, y)

    # ---- operators that move numbers

    def _moved(self, node: Node) -> None:
        """Run the operator on labels; its result keeps those along the axis with most units."""
        if any(i in self.graph.weights and self.graph.is_float(i) for i in node.inputs if i is not None):
            return self._unknown(node)
        full = {i: self._full(i) for i in node.inputs if i is not None}
        try:
            results = execute(node, [None if i is None else full[i] for i in node.inputs])
        except (RuntimeError, TypeError):
            return self._unknown(node)
        found = dict(zip(node.outputs, results, strict=False))
        for name, made in found.items():
            if isinstance(made, Tensor) and made.dtype == torch.int64:
                self._settle(name, made)
        if not self._survives_removal(node):
            self._hold([*node.inputs, *node.outputs], f"'{node.display_name}' ({node.called}) depends on their places")

    def _full(self, name: str) -> Any:
        """Return the labels of a value in its shape; integers of the example as they are."""
        if name in self.integers or name in self.graph.weights:
            return self.integers.get(name, self.graph.weights.get(name))
        shape = self._shape(name)
        if name not in self.at:
            return torch.full(shape, FIXED)
        axis, labels = self.at[name]
        return labels.view([-1 if k == axis else 1 for k in range(len(shape))]).expand(shape)

    def _settle(self, name: str, made: Tensor) -> None:
        """Give a result its labels along one axis; those at one place of that axis are tied."""
        axes = [k for k in range(made.dim()) if bool((made != made.narrow(k, 0, 1)).any())]
        if not axes:
            return self.labels.fix(made, f"'{name}' holds one of them") if made.numel() else None
        best = axes[0] if len(axes) == 1 else max(axes, key=lambda k: (self._units(made, k), k))
        rows = made.movedim(best, 0).reshape(made.shape[best], -1)
        if len(axes) > 1:
            for column in rows.unique(dim=1).unbind(1):
                self._tie(rows[:, 0], column)
        self._give(name, best, rows[:, 0].clone())

    def _units(self, made: Tensor, axis: int) -> int:
        """Return the number of units that remain if the labels at one place of an axis are tied."""
        trial = Labels()
        rows = made.movedim(axis, 0).reshape(made.shape[axis], -1)
        found, places = rows.unique(return_inverse=True)
        labels = trial.new(len(found)).tolist()
        for row in places:
            own = row.unique().add(1).tolist()
            trial.tie(own[:1] * len(own), own)
        return len({trial.root(k) for k in labels})

    def _survives_removal(self, node: Node) -> bool:
        """Check that the operator gives what it should when units are removed from its operands, one by one."""
        values = [i for i in (*node.inputs, *node.outputs) if i in self.at]
        units = {i: self.labels.roots(self.at[i][1]) for i in values if i is not None}
        every = sorted({int(u) for found in units.values() for u in found.unique()} - {FIXED})
        for unit in every[:: max(1, len(every) // _TRIALS)]:
            kept = {i: found != unit for i, found in units.items()}
            if not all(bool(k.any()) for k in kept.values()):
                continue
            sizes = {i: Kept(self.at[i][0], len(self._shape(i)), k) for i, k in kept.items()}
            ins = [None if i is None else self._kept(i, sizes) for i in node.inputs]
            try:
                made = execute(resized(node, sizes), ins)
            except (RuntimeError, TypeError, ValueError):
                return False
            for name, got in zip(node.outputs, made, strict=False):
                want = self._kept(name, sizes)
                if got.shape != want.shape or bool((self.labels.roots(got) != self.labels.roots(want)).any()):
                    return False
        return True

    def _kept(self, name: str, sizes: dict[str, Kept]) -> Any:
        whole = self._full(name)
        return whole.index_select(sizes[name].axis, sizes[name].mask.nonzero()[:, 0]) if name in sizes else whole
