"""Writer of `.tflite` files: the flatbuffer itself, with exactly the Plan's scales, zero points and integers.

A tensor has the name of the graph value whose integers (or floats) it holds; the float side of a quantized value is
`v/float`. Images lie channels last, inputs and outputs included; the permutations back to the model's own layout stand
in the metadata entry "chipfit". Operators that the plan keeps in float are written in float, between DEQUANTIZE and
QUANTIZE.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit.engine.kernels import execute
from chipfit.engine.run import run
from chipfit.engine.trees import batch_axes
from chipfit.engine.types import dtype_of
from chipfit.errors import ExportError, UnsupportedError, first_line
from chipfit.export.io_spec import IOSpec, QuantizedIO, io_spec_of, output_names
from chipfit.export.tflite.batch import depends_on_batch, fixed_batch_size, keeps_states
from chipfit.export.tflite.builder import Refused, TfliteBuilder, code_type
from chipfit.export.tflite.file import TYPES, Quantization
from chipfit.export.tflite.metadata import labels_archive, metadata
from chipfit.export.tflite.ops import NO_FORM, OPERATORS, REFUSED, fused_code
from chipfit.files import write_atomically
from chipfit.frameworks import facts_of
from chipfit.graph.edit import drop_dead, replace_values
from chipfit.graph.ir import Graph, Node
from chipfit.graph.merged_batch import sizes_in_front
from chipfit.passes.decompose import RULES, decompose
from chipfit.passes.flattened import read_in_memory_order
from chipfit.passes.layout import apply_layout, natural_layout, same_numbers
from chipfit.plan.record import Plan
from chipfit.platform.load import load, names
from chipfit.registry import entries


def export_tflite(graph: Graph, plan: Plan | None, path: str | Path, **options: Any) -> Path:
    """Write the model to `path`, which appears complete or not at all; for options and errors see `content`.

    Raises:
        ExportError: the disk refuses the file.
    """
    return write_atomically(Path(path), content(graph, plan, **options))


def content(
    graph: Graph, plan: Plan | None, *, batch: int | None = None, keep_layout: bool = False, **ends: Any
) -> bytes:
    """Return the bytes of a `.tflite` file.

    Args:
        graph, plan: the model; without a plan the float network is written.
        batch: a fixed batch size. When omitted the batch stays open (size 1 until it is resized), except in models
            with transposed convolutions, or with shapes that are computed from it: there it is fixed at 1.
        keep_layout: inputs and outputs keep the model's layout (channels first in PyTorch), behind transpositions.
        ends: see `chipfit.export.io_spec.io_spec_of`. Quantized inputs and outputs have their scale and zero point in
            the file; labels, mean and std stand in the metadata that Android's libraries read.

    Raises:
        UnsupportedError: operators or formats that the file cannot hold, all named at once; open sizes beside the
            batch; or the batch has to be given.
        ConfigError: see `io_spec_of`.
    """
    axes = batch_axes(graph)
    open_sizes = {i: {k for k, s in enumerate(graph.shape(i)) if s is None} for i in graph.inputs}
    if unsized := [i for i, found in open_sizes.items() if found - {axes.get(i, 0)}]:
        what = "Only the batch size can be open in the file, and other sizes of this model are open"
        shown, hint = ", ".join(f"'{i}' {list(graph.shape(i))}" for i in unsized), "quantize with batches of one size"
        raise UnsupportedError(what, got=shown, hint=f"{hint}: pad, cut or resize them")
    if batch is None and (batch := fixed_batch_size(graph, plan or Plan())):
        across = [v.name for v in graph.values.values() if v.shape.count(None) > 1]
        if across:
            what = "The batch size must be fixed at 1, and this model compares samples with each other"
            raise UnsupportedError(what, got=", ".join(across[:8]), hint="pass `batch`, the number of them in a call")
    io = io_spec_of(graph, plan or Plan(), **ends)
    for q in (*io.inputs.values(), *io.outputs.values()):
        if q.type not in TYPES:
            raise UnsupportedError(
                "TensorFlow Lite lacks this integer type",
                got=f"io: {q.type}",
                allowed="int8, uint8, int16",
            )
    return Writer(graph, plan or Plan(), batch, keep_layout, io).write() + labels_archive(io.notes)


class Writer(TfliteBuilder):
    """The export of one graph."""

    def __init__(self, graph: Graph, plan: Plan, batch: int | None, keep_layout: bool, io: IOSpec) -> None:
        self.source, self.io = graph, io
        self.refused = _unstorable(graph, plan)  #: reasons why the file cannot be written
        found = concrete_sizes(graph, batch or 1)
        graph = _without_copies(_with_shapes(graph, found), plan)
        new, plan = apply_layout(graph, plan, "channels_last", change_io=not keep_layout)
        self.forms, self.flattened = new.layouts, read_in_memory_order(new, plan)
        sizes: dict[str, tuple[int, ...]] = {}
        for v in new.graph.values:
            old, form = new.copies.get(v) or (v, self.forms.get(v) or natural_layout(len(found[v])))
            sizes[v] = tuple(found[old][d] for d in form)
        grouped = [n.name for n in new.graph if n.facts.kind and n.op in RULES and n.attrs["groups"] > 1]
        grouped += [n.name for n in new.graph if n.op == "SDPA" and n.attrs["enable_gqa"]]
        grouped += [n.name for n in new.graph if n.op == "LSTM" and not keeps_states(new.graph, n)]
        grouped += [n.name for n in new.graph if n.attrs.get("mode") in ("cubic", "replicate")]
        if batch is None and plan.provenance.get("integer_only"):  # a TILE has no kernel there
            grouped += [n.name for n in new.graph if n.op == "Expand" and None in new.graph.shape(n.output)]
        alone = {op for op, row in OPERATORS.items() if row.alone}
        grouped += [n.name for n in new.graph if n.op in alone and not _has_codes(plan, n)]
        simple, plan, self.reasons = decompose(new.graph, plan, OPERATORS, grouped)
        _add_sizes(simple, sizes)
        super().__init__(simple, plan, sizes, batch)

    def write(self) -> bytes:
        g = self.graph
        groups = {n: group for group in self.plan.groups for n in group}
        nodes = {n.name: n for n in g.nodes}
        inputs = [self._input(name, own) for name, own in zip(g.inputs, self.source.inputs, strict=True)]
        for n in g.nodes:
            members = [nodes[m] for m in groups.get(n.name, (n.name,))]
            if n.name == members[-1].name:
                try:
                    self._kernel_group(members)
                except Refused as e:
                    self.refused.append(e.args)
        if self.refused:
            raise _all_in_one(self.refused, self.plan.platform)
        self.begin(Node("io", "", (), ()))
        outputs = [self._output(name, own) for name, own in zip(g.outputs, self.source.outputs, strict=True)]
        self.merge_picks(outputs)
        lines = self.drop_unread_lines(outputs)
        ins, outs = dict(zip(self.source.inputs, inputs)), dict(zip(output_names(self.source), outputs))
        notes = {"chipfit": json.dumps(self._notes(lines), default=str, separators=(",", ":")).encode()}
        if self.io.notes:
            shape = self.source.shape(self.source.inputs[0])
            channels = shape[-1 if facts_of(self.source.framework).channels_last else 1] if len(shape) == 4 else 0
            notes["TFLITE_METADATA"] = metadata(list(ins), list(outs), self.io.notes, channels or 0)
        return self.content(ins, outs, notes)

    def _input(self, name: str, own: str) -> int:
        """Add an input of floats, of the plan's integers, or of integers with another zero point."""
        io = self.io.inputs.get(own)
        self._add(name, raw=io is None)
        if io is None:
            self._quantize(name)
            return self.index[self.float_name(name)]
        if io.own:
            return self.index[name]
        x = self._shifted(name, io)
        self.op("QUANTIZE", [x], self.index[name])
        return x

    def _output(self, name: str, own: str) -> int:
        io = self.io.outputs.get(own)
        if name in self.graph.weights:
            return self._constant_output(name)
        if io is None:
            return self.read(name)
        if io.own:
            return self.index[name]
        y = self._shifted(name, io)
        self.op("QUANTIZE", [self.index[name]], y)
        return y

    def _shifted(self, name: str, io: QuantizedIO) -> int:
        """Add a tensor whose integers and zero point are the plan's, shifted."""
        qparams = Quantization(np.array(io.scale, np.float32), np.array(io.zero_point))
        shape, opened = self.sizes[name], self.open_shape(name)
        return self.tensor(f"{name}/{io.type}", shape, TYPES[io.type], qparams, open_shape=opened)

    def _kernel_group(self, members: Sequence[Node]) -> None:
        """Write one kernel: the head, and the activations fused into it."""
        tail = members[-1]
        integer = self._in_integers(members)
        for o in tail.outputs:
            self._add(o, raw=not integer or not self.plan.quantized(o))
        fused = self._fused(members)
        for n in members[:1] if fused else members:
            if n.op not in OPERATORS:
                self.refuse(n, self.reasons.get(n.name) or REFUSED.get(n.op, NO_FORM))
            row = OPERATORS[n.op]
            self.begin(n, row.kind, integer, fused)
            outs = [self.index[o if integer else self.float_name(o)] for o in tail.outputs]
            if n is not tail and not fused:
                outs = [self.temporary(self.sizes[n.output], outs[0], f"{n.output}/inner")]
                self.index[n.output] = outs[0]
            row.write(self, n, outs)
        if not integer:
            for o in tail.outputs:
                self._quantize(o)

    def _fused(self, members: Sequence[Node]) -> int:
        """Return the number of the activation that the head's kernel applies.

        That of NONE for weights in blocks: LiteRT's optimised kernel leaves it out.
        """
        head, w = members[0], self.plan.tensors.get(members[0].operand("w") or "")
        fuses = len(members) == 2 and head.op in OPERATORS and OPERATORS[head.op].fuses
        blocks = w is not None and w.stored is not None and w.stored.grid.per == "block"
        return fused_code(members[1]) if fuses and not blocks else 0

    def _in_integers(self, members: Sequence[Node]) -> bool:
        """Return whether a kernel can be written with integer operands and results."""
        (head, *others), plan = members, self.plan
        planned = plan.nodes.get(head.name)
        if head.op not in OPERATORS or not OPERATORS[head.op].integer or planned is None or planned.exec == "float":
            return False
        if any(m.clip_range is None for m in others):  # nothing quantizes what lies between
            return False
        made = {o for m in members for o in m.outputs}
        reads = [i for m in members for i in m.inputs if i is not None and i not in made and self.graph.is_float(i)]
        ends = [*reads, *(o for o in members[-1].outputs if self.graph.is_float(o))]
        if not reads or plan.before_rounding(made) or not all(plan.quantized(v) for v in ends):
            return False
        result = plan.stored(members[-1].output)
        if result is not None and not OPERATORS[head.op].accepts(result):
            return False
        return not OPERATORS[head.op].moves or all(same_numbers(plan, reads[0], v) for v in ends)

    def _add(self, name: str, raw: bool) -> None:
        """Add the tensors of a value: its integers if it is quantized, its float side if `raw`."""
        v, stored = self.graph.values[name], self.plan.stored(name)
        if v.dtype not in TYPES:
            self.refused.append((f"value '{name}'", f"the file has no type {v.dtype}"))
            v = replace(v, dtype="float32")
        shape, open_shape = self.sizes[name], self.open_shape(name)
        if raw:
            kind = TYPES["int32" if self.short and v.dtype == "int64" else v.dtype]
            self.tensor(self.float_name(name), shape, kind, open_shape=open_shape)
        if stored is not None:
            numbers = Quantization(stored.scale.numpy(), stored.zero_point.numpy())
            self.tensor(name, shape, code_type(self.plan.tensors[name]), numbers, open_shape=open_shape)

    def _quantize(self, name: str) -> None:
        """Quantize a value that was written in float."""
        if self.plan.quantized(name):
            self.op("QUANTIZE", [self.index[self.float_name(name)]], self.index[name])

    def _constant_output(self, name: str) -> int:
        """Add a copy of a constant: an operator must compute each output."""
        self.begin(Node("io", "", (), (name,)))
        shape = self.shape(name)
        y = self.tensor(f"{name}/output", shape, TYPES[str(self.graph.weights[name].dtype).removeprefix("torch.")])
        self.op("RESHAPE", [self.weight(name), self.ints(*shape)], y, newShape=list(shape))
        return y

    def _tensors_of(self, name: str) -> list[str]:
        """Return the tensors of the file that hold a value or weight."""
        return [n for n in (name, f"{name}/float", f"{name}/dequantized", f"{name}/output") if n in self.index]

    def _notes(self, lines: Sequence[str]) -> dict[str, Any]:
        """Return what a runtime needs to read and write every value in the model's own layout; `lines` are images."""
        values = self.source.values
        tensors = {v: self._tensors_of(v) for v in self.graph.values if v in values}
        batch_axis = {name: v.shape.index(None) for name, v in values.items() if None in v.shape}
        images = {n: list(c) for v, c in self.flattened.items() for n in self._tensors_of(v)}
        long = [n for v, ns in tensors.items() if self.short and values[v].dtype == "int64" for n in ns]
        inside = {n: k for v, k in sizes_in_front(self.source).items() for n in self._tensors_of(v)}
        forms = [self.forms.get(i) for i in self.source.inputs]
        notes = {
            "inputs": forms if any(forms) else [],
            "forms": {n: list(f) for v, f in self.forms.items() for n in tensors[v]},
            "batch_axis": {n: batch_axis[v] for v, ns in tensors.items() if batch_axis.get(v) for n in ns},  # others: 0
            "in_front": inside,
            "lines": lines,
            "images": images,
            "int64": long,
            "joined": self.joined,
            "kept": self.kept,
        }
        return {
            "platform": self.plan.platform,
            **{key: v for key, v in notes.items() if v},
            "outputs": [  # each with its batch axis in the model's own layout
                (self.forms.get(o) if o == own else None, batch_axis.get(own, 0))
                for o, own in zip(self.graph.outputs, self.source.outputs, strict=True)
            ],
            "provenance": self.plan.published_provenance,
        }


def _has_codes(plan: Plan, n: Node) -> bool:
    """Check that a node of one operand is planned in integers, and that operand and result are."""
    planned = plan.nodes.get(n.name)
    computed = planned is not None and planned.exec != "float" and not plan.before_rounding({n.output})
    return computed and plan.quantized(n.data) and plan.quantized(n.output)


#: role of tensors in look-up tables -> reason against the file, and the formats that hold the plan
MANY = 6  #: tensors of one reason that a refusal names
_SIGNED_ONLY = "the file holds signed integers only"
_SYMMETRIC = "integer kernels take weights whose zero point is 0"
_TABLES = {
    "activation": ("its results are integers, not codes of a table", "export JSON encodings (`.json`)"),
    "weight": ("the file holds integers, not codes of a table", "export `.onnx` or JSON encodings (`.json`)"),
    "bias": ("the file holds integers, not codes of a table", "export JSON encodings (`.json`)"),
}


def _unstorable(graph: Graph, plan: Plan) -> list[tuple[str, str]]:
    """Return (tensor, reason) for formats that the file cannot hold."""
    found = []
    in_integers = (n for n in graph if (planned := plan.nodes.get(n.name)) and planned.exec != "float")
    weights = {w for n in in_integers if n.facts.kind and (w := n.operand("w")) and plan.quantized(n.data)}
    for t in plan.tensors.values():
        if t.grid is None:
            continue
        name = f"tensor '{t.name}' ({t.format})"
        if t.grid.table is not None:
            found.append((name, _TABLES[t.role][0]))
        elif t.grid.kind != "int" or not t.grid.signed:
            found.append((name, _SIGNED_ONLY))
        elif t.name in weights and t.zero_point is not None and bool(t.zero_point.any()):
            found.append((name, _SYMMETRIC))
        if t.grid.per == "row":
            found.append((name, "the file has no scales per row"))
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:MANY]) + (f" and {len(names) - MANY} more" if len(names) > MANY else "")


def _all_in_one(refused: Sequence[tuple[str, str]], platform: str) -> UnsupportedError:
    """Return one error with all reasons; its hint names another platform if the one in use has no such runtime."""
    reasons: dict[str, list[str]] = {}
    for what, why in refused:
        reasons.setdefault(why, []).append(what)
    got = "; ".join(f"{_few(names)}: {why}" for why, names in reasons.items())
    hint = "replace these layers, or export the part of the model without them"
    of_tables = next((formats for why, formats in _TABLES.values() if why in reasons), "")
    loading = {name for name, e in entries("runtime").items() if e.declares.suffix == ".tflite"}
    fitting = [p for p in map(load, names()) if loading & {*p.runtimes}]
    if of_tables:
        hint = of_tables
    elif platform not in {p.name for p in fitting}:
        base = Counter(p.extends for p in fitting if p.extends).most_common(1)[0][0]  # of most of these platforms
        only_formats = set(reasons) <= {_SIGNED_ONLY, _SYMMETRIC}
        hint = f"{'' if only_formats else f'{hint}, or '}quantize for a platform such as {base}"
    return UnsupportedError("TensorFlow Lite cannot hold all of this model", got=got, hint=hint)


def _without_copies(graph: Graph, plan: Plan) -> Graph:
    """Return the graph without operators that copy the integers of a value, such as dropouts."""
    raw = {value for value, _ in plan.float_edges}
    grouped, same = {name for group in plan.groups for name in group}, dict[str, str]()
    for n in graph.nodes:
        if n.op not in OPERATORS or not OPERATORS[n.op].same or n.name in grouped or n.data not in graph.values:
            continue
        equal = plan.quantized(n.output) and same_numbers(plan, n.data, n.output)
        if equal and n.output not in graph.outputs and raw.isdisjoint((n.data, n.output)):
            same[n.output] = same.get(n.data, n.data)
    return replace_values(graph, same) if same else graph


def _with_shapes(graph: Graph, sizes: Mapping[str, tuple[int, ...]]) -> Graph:
    """Return the graph for one batch size, with the shapes that depend on it."""
    if not any(map(depends_on_batch, graph.nodes)):
        return graph
    graph = graph.copy()
    graph.nodes = [
        n.with_(inputs=n.inputs[:1], attrs={"shape": sizes[n.output]}) if depends_on_batch(n) else n
        for n in graph.nodes
    ]
    drop_dead(graph)
    return graph


def concrete_sizes(graph: Graph, batch: int) -> dict[str, tuple[int, ...]]:
    """Return concrete sizes of every value, from one run of the network on samples of its example, or on ones."""
    found: dict[str, tuple[int, ...]] = {}

    def note(node: Node, outs: tuple[Any, ...]) -> tuple[Any, ...]:
        for name, x in zip(node.outputs, outs, strict=False):
            found[name] = tuple(getattr(x, "shape", ()))
        return outs

    inputs, axes = [], batch_axes(graph)
    for example, name in enumerate(graph.inputs):
        v = graph.values[name]
        x = graph.example[example] if graph.example else torch.ones([1] * len(v.shape), dtype=dtype_of(v.dtype))
        known = [batch if k == axes.get(name) else s for k, s in enumerate(v.shape)]
        found[name] = tuple(other if s is None else s for s, other in zip(known, x.shape, strict=True))
        for axis, size in enumerate(found[name]):
            x = x.index_select(axis, torch.arange(size) % max(1, x.shape[axis])) if size != x.shape[axis] else x
        inputs.append(x.to(dtype_of(v.dtype)))
    try:
        with torch.inference_mode():
            run(graph, inputs, hook=note)
    except RuntimeError as e:
        hint = "choose another `batch`"
        raise ExportError(f"The model does not run on a batch of {batch}: {first_line(e)}", hint=hint) from e
    return found


def _add_sizes(graph: Graph, sizes: dict[str, tuple[int, ...]]) -> None:
    """Add the sizes of decomposed operators: simple ones, for which layout does not matter, and products."""
    for n in graph.nodes:
        if n.output not in sizes and n.facts.kind:
            sizes[n.output] = tuple(sizes[n.data][0] if s is None else s for s in graph.shape(n.output))
        elif n.output not in sizes:
            kinds = {i: dtype_of(graph.values[i].dtype) for i in n.inputs if i in graph.values}
            operands = [graph.weights.get(i or "") for i in n.inputs]
            operands = [
                torch.zeros(sizes[i or ""], dtype=kinds[i or ""]) if w is None else w
                for i, w in zip(n.inputs, operands, strict=True)
            ]
            sizes |= {o: tuple(x.shape) for o, x in zip(n.outputs, execute(n, operands), strict=True)}
