"""The Graph: what a network computes, independent of the framework that it was written in.

A graph is a list of nodes in execution order. Nodes read and write *values* by name. A value is an
activation, a graph input, or a weight; weights (parameters, buffers, constants) live in `Graph.weights` under
the names that the user's state dict gives them, so tied weights are one entry read by several nodes.

Layout is the source's own: PyTorch graphs are channels-first with OIHW kernels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from chipfit.errors import GraphError, UnknownNameError
from chipfit.operators.table import OpDef, facts_of
from chipfit.screen import Summary, SummaryRepr

#: quantizes the input of a dynamic kernel to a range found at each call; `decide` inserts it
DYNAMIC = "DynamicQuantize"
#: beginning of the reader's note that the model takes one number of samples only
FIXED_BATCH = "the batch size is fixed"
CPU = torch.device("cpu")
REQUANTIZE = "Requantize"  #: gives a quantized value another scale; `decide` inserts it
OPAQUE = "Opaque"  #: an operator without canonical name; attrs hold target, args, kwargs (see `Ref`)


@dataclass(frozen=True, slots=True)
class Ref:
    """A placeholder for `node.inputs[index]` inside the argument template of an opaque node."""

    index: int


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor (or Python integer) that flows through the graph."""

    name: str
    shape: tuple[int | None, ...]  #: None where the size is only known at run time (the batch, a length)
    dtype: str = "float32"  #: torch's name without "torch."; "int" for a Python integer such as a size


@dataclass(frozen=True, slots=True)
class Node:
    """An operator. Immutable: a rewrite replaces nodes."""

    name: str  #: unique in the graph, stable from run to run
    op: str  #: canonical operator (operators/table.py) or OPAQUE
    inputs: tuple[str | None, ...]  #: value names by slot; None for an absent optional one
    outputs: tuple[str, ...]  #: value names
    attrs: dict[str, Any] = field(default_factory=dict)  #: JSON-able attributes, defaults filled in
    layer: str = ""  #: path of the user's module that this came from ("layers.0.conv1")
    layer_type: str = ""  #: class name of that module ("Conv2d"), or of the function ("relu") without one
    source: str = ""  #: "file:line" in the user's code, when known
    #: the framework's own settings of that layer or call, for filters; JSON-able
    config: dict[str, Any] = field(default_factory=dict)
    composite: str = ""  #: name of the composite node that it is a part of; "" for others
    composite_op: str = ""  #: operator of that node
    #: number of the recurrent layer's step that it is a part of, as steps run; -1: what comes before the first
    step: int | None = None

    @property
    def facts(self) -> OpDef:
        """The facts about the operator with these attributes; `UNKNOWN` for an opaque node."""
        return facts_of(self.op, self.attrs)

    @property
    def clip_range(self) -> tuple[float | None, float | None] | None:
        """The least and greatest result of an operator that only clips, None for no bound; None for other operators."""
        ends = tuple(self.attrs.get(end) if isinstance(end, str) else end for end in self.facts.clips)
        return None if not ends else (ends[0], ends[1])

    @property
    def output(self) -> str:
        return self.outputs[0]

    @property
    def display_name(self) -> str:
        """The user's name for the node: its layer, or its own name."""
        return self.layer or self.name

    @property
    def called(self) -> str:
        """The operator, or what an opaque node calls: a function, or a layer by its class."""
        target: str = self.attrs["target"] if self.op == OPAQUE else self.op
        return self.layer_type if ":" in target else target

    def operand(self, slot: str) -> str | None:
        """Return the operand in a slot of the operator ("in0", "w", "b", "mask"); None if there is none."""
        at = self.facts.index(slot)
        return self.inputs[at] if at is not None and at < len(self.inputs) else None

    @property
    def data(self) -> str:
        """The first data operand.

        Raises:
            GraphError: it has none.
        """
        return self._present("in0", self.operand("in0") or next((i for i in self.inputs if i is not None), None))

    @property
    def weight(self) -> str:
        """The weight of an operator that requires one.

        Raises:
            GraphError: it has none.
        """
        return self._present("w", self.operand("w"))

    @property
    def weight_operand(self) -> str | None:
        """The operand that is or may be a weight: that in slot "w", or the second one of MatMul; None without one."""
        return self.operand("in1" if self.op == "MatMul" else "w")

    @property
    def bias(self) -> str | None:
        return self.operand("b")

    def _present(self, slot: str, name: str | None) -> str:
        if name is None:
            raise GraphError(f"{self.op} '{self.display_name}' has nothing in slot '{slot}'")
        return name

    def with_(self, **changes: Any) -> Node:
        return replace(self, **changes)

    def reading(self, others: Mapping[str, str]) -> Node:
        """Return the node with other operands: tensor -> the one that is read instead of it."""
        return self.with_(inputs=tuple(others.get(i or "", i) for i in self.inputs))


@dataclass(frozen=True, slots=True)
class Fold:
    """A batch norm that was folded into a weight; its tensors stay in `Graph.weights` under these names."""

    bias: str  #: of the layer, as folded
    gamma: str | None
    beta: str | None
    mean: str
    var: str
    eps: float
    biased: bool  #: the layer had a bias before
    checksum: int  #: of weight and bias after folding, see `folds.checksum`


@dataclass(frozen=True, slots=True)
class Removed:
    """A node that a rewrite took out of the graph."""

    node: Node  #: as it was, without inputs and attributes
    by: str  #: name of the node, or composite, that does its work or reads what it read; "" for none
    #: the other was made for its work, or does other work than before; else it changed at most its weights
    joined: bool
    same: bool  #: the value that it made is still there


Users = dict[str, list[Node]]  #: value or weight -> the nodes that read it


@dataclass(slots=True, repr=False)
class Graph(SummaryRepr):
    """A network as data. Treat as immutable outside `passes/`; `copy()` before a rewrite."""

    nodes: list[Node]
    inputs: list[str]  #: value names, flat, in call order
    outputs: list[str]  #: value names, flat; the same value may appear twice
    values: dict[str, Value]  #: every non-weight value
    weights: dict[str, torch.Tensor]  #: by the user's state-dict name
    trainable: set[str] = field(default_factory=set)  #: the weights that are nn.Parameters
    in_spec: str = ""  #: JSON of the pytree (args, kwargs) of the model's inputs
    out_spec: str = ""  #: JSON of the pytree that the model returns
    data_format: str = "channels_first"
    framework: str = "torch"  #: folder of `frameworks` that captured it and builds the trainable model
    example: tuple[Any, ...] = ()  #: flat example inputs (tensors), used to re-trace; never serialised
    folds: dict[str, Fold] = field(default_factory=dict)  #: weight -> the batch norm that is folded into it
    notes: list[str] = field(default_factory=list)  #: notes of the reader, copied to `Plan.rewrites`
    #: path of a layer that holds others, or that the user wrote -> its class, and its settings for filters
    outer_layers: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    #: name -> a node that a rewrite took out, see `removed.remember_removed`
    removed: dict[str, Removed] = field(default_factory=dict)
    #: where the model was; weights are on the CPU, and `placement.placed` brings them there; never serialised
    device: torch.device = field(default=CPU, compare=False)

    def copy(self) -> Graph:
        """Return a copy whose nodes, values and weight table can be edited; tensors are shared and never modified."""
        edited = ("nodes", "inputs", "outputs", "values", "weights", "trainable", "folds")
        return replace(self, **{name: copy.copy(getattr(self, name)) for name in edited})

    def _summary(self) -> Summary:
        def shown(value: str) -> str:
            return f"{value} {list(self.values[value].shape)} {self.values[value].dtype}"

        count, what = sum(w.numel() for w in self.weights.values()), f"Graph of {self.framework}"
        known = {"inputs": ", ".join(map(shown, self.inputs)), "outputs": ", ".join(map(shown, self.outputs))}
        known |= {"weights": f"{count:,} numbers in {len(self.weights)} tensors", "notes": "; ".join(self.notes)}
        rows = [(n.display_name, n.op, shown(n.outputs[0]) if n.outputs else "") for n in self.nodes]
        title = f"{what}: {len(self.nodes)} operators"
        return Summary(title, known, ("layer", "operator", "result"), rows, "graph.nodes")

    def node(self, name: str) -> Node:
        for n in self.nodes:
            if n.name == name:
                return n
        raise UnknownNameError("node", name, [n.name for n in self.nodes])

    def nodes_in(self, layer: str) -> list[Node]:
        """Return the nodes of a layer and of all layers inside it, by its path."""
        return [n for n in self.nodes if n.layer == layer or n.layer.startswith((f"{layer}.", f"{layer}/"))]

    def drop_empty_layers(self) -> None:
        """Remove the outer layers without nodes."""
        paths = self.layer_paths()
        self.outer_layers = {path: layer for path, layer in self.outer_layers.items() if path in paths}

    def layer_paths(self) -> set[str]:
        """Return the paths of layers with nodes, and of the layers around them."""
        paths = set[str]()
        for path in (n.layer for n in self.nodes):
            while path and path not in paths:
                paths.add(path)
                path = path[: max(path.rfind("."), path.rfind("/"), 0)]
        return paths

    def producers(self) -> dict[str, Node]:
        """Return value name -> the node that writes it."""
        return {o: n for n in self.nodes for o in n.outputs}

    def users(self) -> Users:
        """Return value or weight name -> its readers in order; a node that reads it twice appears twice."""
        out: Users = {}
        for n in self.nodes:
            for i in n.inputs:
                if i is not None:
                    out.setdefault(i, []).append(n)
        return out

    def is_weight(self, name: str | None) -> bool:
        return name is not None and name in self.weights

    def activations(self, node: Node) -> list[str]:
        """Return the inputs of `node` that are not weights, in slot order."""
        return [i for i in node.inputs if i is not None and i not in self.weights]

    def slots(self, node: Node) -> list[tuple[str, str]]:
        """Return (slot, tensor) of every operand: "in0", "in1", ... for data, "w" and "b" for weights."""
        named = [(node.facts.slot(k), i) for k, i in enumerate(node.inputs) if i is not None]
        weight = node.weight_operand if self.is_weight(node.weight_operand) else None
        return [("w" if slot == "in1" and i == weight else slot, i) for slot, i in named]

    def shape(self, name: str) -> tuple[int | None, ...]:
        return tuple(self.weights[name].shape) if name in self.weights else self.values[name].shape

    def size(self, name: str) -> int:
        """Return the count of numbers of a value or weight; an open size counts once."""
        return math.prod(d or 1 for d in self.shape(name))

    def is_float(self, name: str) -> bool:
        if name in self.weights:
            return self.weights[name].is_floating_point()
        return self.values[name].dtype in ("float32", "float16", "bfloat16", "float64")

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        new = self.copy()
        new.weights = {k: copy.deepcopy(v, memo) for k, v in self.weights.items()}
        return new
