"""Write a Graph under a Plan as `.tflite`: the flatbuffer itself, with exactly the Plan's numbers.

A tensor has the name of the graph value whose codes (or floats) it holds; the float side of a quantized value is
`v/float`. Images lie channels last, those that go in and come out too; the permutations, by which a runtime finds the
model's own layout again, stand in the metadata entry "chipfit". Operators that the plan keeps in float are written in
float, with QUANTIZE and DEQUANTIZE at their borders.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.engine.kernels import execute
from chipfit.engine.run import run
from chipfit.engine.types import dtype_of
from chipfit.errors import ExportError, UnsupportedError, first_line
from chipfit.export.io_spec import IOSpec, QuantizedIO, io_spec_of
from chipfit.export.names import output_names
from chipfit.export.tflite.batch import counts, fixed
from chipfit.export.tflite.builder import Refused, TfliteBuilder, code_type
from chipfit.export.tflite.file import TYPES, Numbers
from chipfit.export.tflite.metadata import attached, metadata
from chipfit.export.tflite.ops import NO_FORM, OPERATORS, REFUSED, fused_code
from chipfit.files import write_atomically
from chipfit.graph.edit import drop_dead
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import TRANSPOSED
from chipfit.passes.decompose import decompose
from chipfit.passes.layout import apply_layout, natural_layout, same_numbers
from chipfit.plan.record import Plan
from chipfit.platform.load import load, names
from chipfit.registry import entries


def export_tflite(graph: Graph, plan: Plan | None, path: str | Path, **options: Any) -> Path:
    """Write the model to `path`, which appears complete or not at all; options and errors as of `content`.

    Raises:
        ExportError: the disk refuses the file.
    """
    return write_atomically(Path(path), content(graph, plan, **options))


def content(
    graph: Graph, plan: Plan | None, *, batch: int | None = None, keep_layout: bool = False, **ends: Any
) -> bytes:
    """A `.tflite` file.

    Args:
        graph, plan: what to write; without a plan the float network is written.
        batch: a fixed batch size. When omitted the batch stays open (size 1 until it is resized), except in models
            with transposed convolutions, or with shapes that are computed from it: there it is fixed at 1.
        keep_layout: inputs and outputs lie as in the model (channels first in PyTorch), behind transpositions.
        ends: see `chipfit.export.io_spec.io_spec_of`. Quantized inputs and outputs have their scale and zero point in
            the file; labels, mean and std stand in the metadata that Android's libraries read.

    Raises:
        UnsupportedError: operators or formats that the file cannot hold, all named at once; open sizes beside the
            batch; or the batch has to be given.
        ConfigError: see `io_spec_of`.
    """
    if found := [i for i in graph.inputs if None in graph.shape(i)[1:]]:
        what = "The file holds one size of everything but the batch, and other sizes of this model are open"
        shown, hint = ", ".join(f"'{i}' {list(graph.shape(i))}" for i in found), "quantize with batches of one size"
        raise UnsupportedError(what, got=shown, hint=f"{hint}: pad, cut or resize them")
    if batch is None and (batch := fixed(graph)):
        across = [v.name for v in graph.values.values() if v.shape.count(None) > 1]
        if across:
            what = "The file holds one sample here, and this model compares samples with each other"
            raise UnsupportedError(what, got=", ".join(across[:8]), hint="pass `batch`, the number of them in a call")
    handed = io_spec_of(graph, plan or Plan(), **ends)
    for codes in (*handed.inputs.values(), *handed.outputs.values()):
        if codes.type not in TYPES:
            raise UnsupportedError("The file has no such codes", got=f"io: {codes.type}", allowed="int8, uint8, int16")
    return Writer(graph, plan or Plan(), batch, keep_layout, handed).write() + attached(handed.notes)


class Writer(TfliteBuilder):
    """One export."""

    def __init__(self, graph: Graph, plan: Plan, batch: int | None, keep_layout: bool, handed: IOSpec) -> None:
        self.source, self.handed = graph, handed
        self.refused = _unstorable(plan)  #: why the file cannot be written
        found = _sizes(graph, batch or 1)
        graph = _with_shapes(graph, found)
        new, plan = apply_layout(graph, plan, "channels_last", change_io=not keep_layout)
        self.forms = new.layouts
        sizes: dict[str, tuple[int, ...]] = {}
        for v in new.graph.values:
            old, form = new.copies.get(v) or (v, self.forms.get(v) or natural_layout(len(found[v])))
            sizes[v] = tuple(found[old][d] for d in form)
        grouped = [n.name for n in new.graph if n.op in TRANSPOSED and n.attrs["groups"] > 1]
        grouped += [n.name for n in new.graph if n.op == "SDPA" and n.attrs["enable_gqa"]]
        simple, plan, self.reasons = decompose(new.graph, plan, OPERATORS, grouped)
        _add_sizes(simple, sizes)
        super().__init__(simple, plan, sizes, batch)

    def write(self) -> bytes:
        g = self.graph
        groups = {n: group for group in self.plan.groups for n in group}
        nodes = {n.name: n for n in g.nodes}
        ends = [self._input(name, own) for name, own in zip(g.inputs, self.source.inputs, strict=True)]
        for n in g.nodes:
            members = [nodes[m] for m in groups.get(n.name, (n.name,))]
            if n.name == members[-1].name:
                try:
                    self._unit(members)
                except Refused as e:
                    self.refused.append(e.args)
        if self.refused:
            raise _in_one(self.refused)
        self.begin(Node("io", "", (), ()))
        outputs = [self._output(name, own) for name, own in zip(g.outputs, self.source.outputs, strict=True)]
        takes, gives = dict(zip(self.source.inputs, ends)), dict(zip(output_names(self.source), outputs))
        notes = {"chipfit": json.dumps(self._notes(), default=str).encode()}
        if self.handed.notes:
            shape = self.source.shape(self.source.inputs[0])
            channels = shape[-1 if self.source.framework == "keras" else 1] if len(shape) == 4 else 0
            notes["TFLITE_METADATA"] = metadata(list(takes), list(gives), self.handed.notes, channels or 0)
        return self.content(takes, gives, notes)

    def _input(self, name: str, own: str) -> int:
        """The tensor in which an input is handed over: floats, codes, or codes of another zero point."""
        codes = self.handed.inputs.get(own)
        self._add(name, raw=codes is None)
        if codes is None:
            self._quantize(name)
            return self.known[self.raw_name(name)]
        if codes.own:
            return self.known[name]
        x = self._handed(name, codes)
        self.op("QUANTIZE", [x], self.known[name])
        return x

    def _output(self, name: str, own: str) -> int:
        codes = self.handed.outputs.get(own)
        if name in self.graph.weights:
            return self._constant_output(name)
        if codes is None:
            return self.read(name)
        if codes.own:
            return self.known[name]
        y = self._handed(name, codes)
        self.op("QUANTIZE", [self.known[name]], y)
        return y

    def _handed(self, name: str, codes: QuantizedIO) -> int:
        """A tensor of codes that stand for the same reals as the plan's, shifted."""
        numbers = Numbers(np.array(codes.scale, np.float32), np.array(codes.zero_point))
        shape, opened = self.sizes[name], self.open_shape(name)
        return self.tensor(f"{name}/{codes.type}", shape, TYPES[codes.type], numbers, open_shape=opened)

    def _unit(self, members: Sequence[Node]) -> None:
        """One kernel: the head, and the activations that it may apply itself."""
        head, tail = members[0], members[-1]
        integer = self._in_integers(members)
        for o in tail.outputs:
            self._add(o, raw=not integer)
        fused = fused_code(members[1]) if len(members) == 2 and head.op in OPERATORS and OPERATORS[head.op].fuses else 0
        for n in members[:1] if fused else members:
            if n.op not in OPERATORS:
                self.refuse(n, self.reasons.get(n.name) or REFUSED.get(n.op, NO_FORM))
            row = OPERATORS[n.op]
            self.begin(n, row.kind, integer, fused)
            outs = [self.known[o if integer else self.raw_name(o)] for o in tail.outputs]
            if n is not tail and not fused:
                outs = [self.between(self.sizes[n.output], outs[0], f"{n.output}/inner")]
                self.known[n.output] = outs[0]
            row.write(self, n, outs)
        if not integer:
            for o in tail.outputs:
                self._quantize(o)

    def _in_integers(self, members: Sequence[Node]) -> bool:
        """Whether operands and results of a kernel are codes that its integer form may take."""
        (head, *others), plan = members, self.plan
        planned = plan.nodes.get(head.name)
        if head.op not in OPERATORS or not OPERATORS[head.op].integer or planned is None or planned.exec == "float":
            return False
        if any(
            m.op not in OPERATORS or not OPERATORS[m.op].clips for m in others
        ):  # it has no numbers for what lies between
            return False
        made = {o for m in members for o in m.outputs}
        reads = [i for m in members for i in m.inputs if i is not None and i not in made and self.graph.is_float(i)]
        ends = [*reads, *members[-1].outputs]
        if not reads or plan.before_rounding(made) or not all(plan.quantized(v) for v in ends):
            return False
        return not OPERATORS[head.op].moves or all(same_numbers(plan, reads[0], v) for v in ends)

    def _add(self, name: str, raw: bool) -> None:
        """Add the tensors of a value: its codes when it is quantized, its float side when `raw`."""
        v, stored = self.graph.values[name], self.plan.stored(name)
        if v.dtype not in TYPES:
            self.refused.append((f"value '{name}'", f"the file has no type {v.dtype}"))
            v = replace(v, dtype="float32")
        shape, open_shape = self.sizes[name], self.open_shape(name)
        if raw:
            self.tensor(self.raw_name(name), shape, TYPES[v.dtype], open_shape=open_shape)
        if stored is not None:
            numbers = Numbers(stored.scale.numpy(), stored.zero_point.numpy())
            self.tensor(name, shape, code_type(self.plan.tensors[name]), numbers, open_shape=open_shape)

    def _quantize(self, name: str) -> None:
        """QuantizedIO of a value that was written in float."""
        if self.plan.quantized(name):
            self.op("QUANTIZE", [self.known[self.raw_name(name)]], self.known[name])

    def _constant_output(self, name: str) -> int:
        """A copy: an output must be made by an operator."""
        shape = self.shape(name)
        y = self.tensor(f"{name}/output", shape, TYPES[str(self.graph.weights[name].dtype).removeprefix("torch.")])
        self.op("RESHAPE", [self.weight(name), self.ints(*shape)], y, newShape=list(shape))
        return y

    def _notes(self) -> dict[str, Any]:
        """What a runtime needs to take and give every value in the model's own layout."""
        values = self.source.values
        held = {
            v: [n for n in (v, f"{v}/float", f"{v}/dequantized") if n in self.known]
            for v in self.graph.values
            if v in values
        }
        batch_axis = {name: v.shape.index(None) for name, v in values.items() if None in v.shape}
        inside = {n: k for v, k in _in_front(self.source).items() for n in held.get(v, ())}
        return {
            **({"in_front": inside} if inside else {}),
            "platform": self.plan.platform,
            "inputs": [self.forms.get(i) for i in self.source.inputs],
            "forms": {n: list(f) for v, f in self.forms.items() for n in held[v]},
            "batch_axis": {n: batch_axis[v] for v, ns in held.items() if v in batch_axis for n in ns},
            "outputs": [  # each with its batch axis in the model's own layout
                (self.forms.get(o) if o == own else None, batch_axis.get(own, 0))
                for o, own in zip(self.graph.outputs, self.source.outputs, strict=True)
            ],
            "provenance": self.plan.provenance,
        }


def _in_front(graph: Graph) -> dict[str, int]:
    """Values in whose batch axis others lie in front of the samples, [L, N] in one, and how many elements."""
    found: dict[str, int] = {}
    for n in graph.nodes:
        carried = max((found[i] for i in n.inputs if i in found), default=1)
        shapes = [graph.shape(n.data), graph.shape(n.output)] if n.op == "Reshape" else []
        if shapes and all(None in s for s in shapes):
            before, after = (math.prod(s or 1 for s in shape[: shape.index(None)]) for shape in shapes)
            carried = max(carried * before // after, 1)
        if carried > 1:
            found |= {o: carried for o in n.outputs if None in graph.shape(o)}
    return found


def _unstorable(plan: Plan) -> list[tuple[str, str]]:
    """Tensors whose formats the file cannot hold."""
    grids = [(f"tensor '{t.name}' ({t.format})", t.grid) for t in plan.tensors.values() if t.grid is not None]
    return [(name, "the file holds signed integers only") for name, g in grids if g.kind != "int" or not g.signed] + [
        (name, "the file has no scales per row") for name, g in grids if g.per == "row"
    ]


def _in_one(refused: Sequence[tuple[str, str]]) -> UnsupportedError:
    reasons: dict[str, list[str]] = {}
    for what, why in refused:
        reasons.setdefault(why, []).append(what)
    got = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    hint = "replace these layers, export the part of the model without them, or quantize for a platform such as "
    return UnsupportedError("TensorFlow Lite cannot hold all of this model", got=got, hint=hint + _platform())


def _platform() -> str:
    """Of the built-in platforms that are proved by such files, the one on which most others build."""
    loading = {name for name, e in entries("runtime").items() if e.declares.suffix == ".tflite"}
    return Counter(p.extends for p in map(load, names()) if p.extends and loading & {*p.runtimes}).most_common(1)[0][0]


def _with_shapes(graph: Graph, sizes: Mapping[str, tuple[int, ...]]) -> Graph:
    """The graph for one batch size, in which shapes that are computed from it are known."""
    if not any(map(counts, graph.nodes)):
        return graph
    graph = graph.copy()
    graph.nodes = [
        n.with_(inputs=n.inputs[:1], attrs={"shape": sizes[n.output]}) if counts(n) else n for n in graph.nodes
    ]
    drop_dead(graph)
    return graph


def _sizes(graph: Graph, batch: int) -> dict[str, tuple[int, ...]]:
    """Concrete sizes of every value, by running the network once on zeros."""
    found: dict[str, tuple[int, ...]] = {}

    def note(node: Node, outs: tuple[Any, ...]) -> tuple[Any, ...]:
        for name, x in zip(node.outputs, outs, strict=False):
            found[name] = tuple(getattr(x, "shape", ()))
        return outs

    inputs = []
    for k, name in enumerate(graph.inputs):
        v = graph.values[name]
        like = graph.example[k].shape if graph.example else [1] * len(v.shape)
        known = [batch, *v.shape[1:]] if v.shape[:1] == (None,) else v.shape
        found[name] = tuple(other if s is None else s for s, other in zip(known, like, strict=True))
        inputs.append(torch.zeros(found[name], dtype=dtype_of(v.dtype)))
    try:
        with torch.inference_mode():
            run(graph, inputs, hook=note)
    except RuntimeError as e:
        hint = "choose another `batch`"
        raise ExportError(f"The model does not run on a batch of {batch}: {first_line(e)}", hint=hint) from e
    return found


def _add_sizes(graph: Graph, sizes: dict[str, tuple[int, ...]]) -> None:
    """The sizes of what composites became: simple operators, to which the layout means nothing, and convolutions."""
    for n in graph.nodes:
        if n.output not in sizes and n.op in TRANSPOSED:
            sizes[n.output] = tuple(sizes[n.data][0] if s is None else s for s in graph.shape(n.output))
        elif n.output not in sizes:
            operands = [graph.weights[i] if i in graph.weights else torch.zeros(sizes[i or ""]) for i in n.inputs]
            sizes[n.output] = tuple(execute(n, operands)[0].shape)
