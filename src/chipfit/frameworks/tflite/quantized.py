"""Read a quantized `.tflite` file into a Graph and the Plan that its scales and zero points amount to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema

import chipfit.frameworks.tflite.recurrent  # noqa: F401 -- registers readers
from chipfit.engine.run import first_deviation, run
from chipfit.errors import CaptureError, DataError
from chipfit.frameworks.quantized import QuantizedFile, original_of, stored_as, tie_moved
from chipfit.frameworks.tflite.capture import inputs_of
from chipfit.frameworks.tflite.model import WIDE, Facts, Operator, Tensor, TfliteModel
from chipfit.frameworks.tflite.read import Call, Reading
from chipfit.frameworks.tflite.variables import packed
from chipfit.graph.check import check
from chipfit.graph.ir import DYNAMIC, FIXED_BATCH, REQUANTIZE, Graph, Node, Value
from chipfit.passes.layout import LayoutChange, apply_layout, keep_constant_names
from chipfit.plan.record import NodePlan, Plan, Role, TensorPlan
from chipfit.quantizers.stored import Stored

_WEIGHTS = "Only weights of the file are integers"
_AT_RUN_TIME = f"{_WEIGHTS}: kernels of {{}} quantize their input at run time, which is not simulated"
_IN_FLOAT = f"{_WEIGHTS}, which it dequantizes: no operator computes with integers that could be compared"
#: operators whose kernels find integers at run time, for each row or sample of their input; XNNPACK computes a
#: convolution of single pixels as a linear layer
_DYNAMIC = {"FULLY_CONNECTED": "row", "CONV_2D": "sample", "DEPTHWISE_CONV_2D": "sample"}
_FOUND = {"qmin": -128, "qmax": 127, "affine": True, "block": 1}
#: operators beside those that move numbers whose kernels keep the grid of their operand
_KEEP = ("AvgPool", "Pad", "Resize")


def activation_types(model: TfliteModel) -> set[str]:
    """Return the types of the integers that the file computes; that of floats if only weights are integers."""
    return {t.kind for t in model.quantized if not t.is_constant} or {"FLOAT32"}


def read_quantized(model: TfliteModel, platform: str, example: Any = None) -> QuantizedFile:
    """Read a quantized file with the integers that it holds.

    Args:
        platform: name of the platform whose arithmetic the file is for.
        example: a batch of data, which gives the sizes that the file leaves open.

    Raises:
        CaptureError: Nothing in the file is quantized, or an operator has no reader.
    """
    if not model.quantized:
        half = "weights of float16" if any(t.kind == "FLOAT16" for t in model.tensors) else None
        hint = "chipfit.quantize(file, data) quantizes a float file"
        raise CaptureError("The file is not quantized", where=model.where, got=half, hint=hint)
    with model.session():
        if not model.unrunnable:
            shapes = [[max(d, 1) for d in t.signature] for t in model.inputs]
            if example is not None and any(d < 0 for t in model.inputs for d in t.signature[1:]):
                shapes = [[1, *x.shape[1:]] for x in inputs_of(model, [example], {})]
            model.run([np.zeros(shape, np.float32) for shape in shapes])
        facts = model.facts()
        if not model.unrunnable and any(t.signature[:1] == (-1,) for t in model.inputs):
            try:
                model.run([np.zeros([2, *shape[1:]][: len(shape)], np.float32) for shape in shapes])
            except CaptureError:  # its operators take one sample alone, though its inputs are open
                for t in model.inputs:
                    t.signature = (*t.shape[:1], *t.signature[1:])
    with model.content.opened():
        try:
            reading, moved, plan = _read(model, facts, model.opens, platform)
            opened = model.streams or not model.opens or _is_separate(model, facts, moved.graph)
        except CaptureError:  # it takes the batch apart, or cannot be read at all
            opened = False
        if not opened:
            reading, moved, plan = _read(model, facts, False, platform)
            moved.graph.notes.append(f"{FIXED_BATCH}: the file computes one sample at a time")
    graph = moved.graph
    forms = {n: [int(d) for d in np.argsort(p)] for n, p in moved.layouts.items()}
    notes: dict[str, Any] = {"platform": platform, "forms": forms, "stream": model.streams, "provenance": {}}
    notes["outputs"] = [[None, 0]] * len(graph.outputs)
    names = reading.names()
    notes["joined"] = {name: [names[k] for k in indices] for name, indices in reading.parts.items()}
    copies = {copy: source for copy, (source, _) in moved.copies.items() if {copy, source} <= graph.weights.keys()}
    notes["joined"] |= {copy: [source] for copy, source in copies.items()}  # with other axes for some readers
    content, runtime = _named(model, facts, names, notes), "tflm" if model.unrunnable else None
    steps = model.steps if model.states else None
    return QuantizedFile(graph, plan, content, not_simulated=_not_simulated(model), runtime=runtime, steps=steps)


def _not_simulated(model: TfliteModel) -> str:
    """Return why a file has no integers to compare; "" if it has some."""
    if any(not t.is_constant for t in model.quantized):
        return ""
    held = {t.index for t in model.quantized}
    dynamic = {op.kind for op in model.operators if op.kind != "DEQUANTIZE" and not held.isdisjoint(op.inputs)}
    others = sorted(dynamic - {*_DYNAMIC})
    return _AT_RUN_TIME.format(", ".join(others)) if others else "" if dynamic else _IN_FLOAT


def _read(
    model: TfliteModel, facts: Facts, open_batch: bool, platform: str
) -> tuple[_QuantizedReading, LayoutChange, Plan]:
    """Return what was read, its graph with channels first, and the plan of its integers."""
    reading = _QuantizedReading(model, facts, open_batch)
    graph = reading.graph()
    live = {n.name for n in graph.nodes}
    plan = Plan(
        tensors={k: t for k, t in reading.stored.items() if k in graph.values or k in graph.weights},
        nodes={n.name: reading.node_plan(n) for n in graph.nodes},
        groups=tuple(g for g in reading.groups if live.issuperset(g)),
        platform=platform,
        rewrites=tuple(graph.notes),
    )
    moved, plan = apply_layout(graph, plan, "channels_first")
    keep_constant_names(moved.graph, moved.copies)
    check(moved.graph, blame="layout")
    return reading, moved, plan


def _is_separate(model: TfliteModel, facts: Facts, graph: Graph) -> bool:
    """Return whether a graph with an open batch computes of two samples what it computes of each by itself."""
    floats = {k: w.float() if w.dtype == torch.float64 else w for k, w in graph.weights.items()}  # of biases
    graph, rng = replace(graph, weights=floats), torch.Generator().manual_seed(0)
    shapes = [facts.shapes[t.index] for t in model.inputs]
    two = [torch.rand([2, *shape[1:]][: len(shape)], generator=rng) for shape in shapes]
    two = [(x * 256).to(getattr(torch, t.dtype)) for t, x in zip(model.inputs, two, strict=True)]
    try:
        with torch.inference_mode():
            each = [run(graph, [x[k : k + 1] if x.dim() else x for x in two], keep=graph.outputs) for k in range(2)]
            want = [torch.cat([found[o] for found in each]) for o in graph.outputs]
    except (RuntimeError, LookupError, DataError):
        return False
    return first_deviation(graph, two, want) is None


class _QuantizedReading(Reading):
    """The graph of a quantized file while it is read, and what is stored how."""

    one_value_each = True

    def __init__(self, model: TfliteModel, facts: Facts, open_batch: bool) -> None:
        super().__init__(model, facts, open_batch)
        self.stored: dict[str, TensorPlan] = {}
        self.groups: list[tuple[str, ...]] = []
        self._first: dict[str, int] = {}  #: value -> the tensor with its integers
        self.parts: dict[str, list[int]] = {}  #: weight -> the tensors that it holds one after another

    def graph(self) -> Graph:
        for t in self.model.inputs:
            if t.scale is not None:
                self._keep(t.name, t)
        return super().graph()

    def numbers(self, weight: torch.Tensor) -> torch.Tensor:
        return weight  # biases stay in float64, which holds all integers of 32 bits

    def joined(self, wanted: str, indices: Sequence[int]) -> str:
        name, tensors = super().joined(wanted, indices), [self.model.tensors[k] for k in indices]
        self.parts[name] = [*indices]
        grids = [(t.scale, t.zero) for t in tensors if t.scale is not None and t.scale.size == 1]
        if len(grids) == len(tensors):
            sizes = [t.shape[0] for t in tensors]
            scale, zero = (np.repeat([float(v.ravel()[0]) for v in vs], sizes) for vs in zip(*grids, strict=True))
            role: Role = "bias" if tensors[0].kind in WIDE else "weight"
            stored = stored_as(tensors[0].kind.lower(), scale, zero, 0)
            self.stored[name] = TensorPlan(name=name, role=role, stored=stored, origin="the file")
        return name

    def rounded(self, c: Call, x: Value) -> Value:
        """Return the data in floats of a layer with integer weights as integers that its kernel finds at run time."""
        if c.tensor(1).scale is None or c.tensor(0).scale is not None:
            return x
        by_pixel = c.op.kind == "CONV_2D" and (*c.dims(1)[1:3], c.option("strideH"), c.option("strideW")) == (1,) * 4
        per = "pixel" if by_pixel else _DYNAMIC[c.op.kind]
        return c.part(DYNAMIC, [x], x.shape, kind=x.dtype, called=f"{c.name}/rounded", **_FOUND, per=per)

    def record_grid(self, name: str, index: int) -> None:
        if self.model.tensors[index].scale is not None:
            self._keep(name, self.model.tensors[index])

    def _read(self, op: Operator) -> None:
        tensors = self.model.tensors
        if op.kind == "QUANTIZE" and op.inputs[0] in self.values and tensors[op.inputs[0]].scale is None:
            value = self.values[op.inputs[0]]
            self.values[op.outputs[0]] = value
            self._keep(value.name, tensors[op.outputs[0]])
            return
        before = len(self.builder.graph.nodes)
        if op.kind == "QUANTIZE" and op.inputs[0] in self.values:
            self.values[op.outputs[0]] = Call(self, op).emit(REQUANTIZE, [self.values[op.inputs[0]]])
        else:
            super()._read(op)
        new = self.builder.graph.nodes[before:]
        for index in op.outputs:
            if index in self.values and tensors[index].scale is not None:
                self._keep(self.values[index].name, tensors[index])
        self._inner(new)

    def _keep(self, name: str, t: Tensor) -> None:
        if name not in self.stored:
            self._first[name] = t.index
            self.stored[name] = TensorPlan(name=name, role="activation", stored=_stored(t), origin="the file")

    def _inner(self, new: list[Node]) -> None:
        """Store what lies between the nodes of one operator: moved numbers as their operand; fused sums nowhere."""
        for n in new:
            self._weights_of(n)
        tie_moved(self.builder.graph, new, self.stored)
        for at, n in enumerate(new[:-1]):
            if n.op == "LSTM":  # it writes the integers that are moved behind it
                self.groups.append(tuple(m.name for m in new[at:]))
        clips = [n for n in new if n.clip_range is not None and n.name != new[0].name]
        if clips:
            at = new.index(clips[0])
            self.groups.append((new[at - 1].name, clips[0].name))

    def _weights_of(self, n: Node) -> None:
        """Store the constants of an operator as the file has them, with the axis of channels that the graph has."""
        graph, tensors = self.builder.graph, {name: self.model.tensors[k] for (k, _), name in self._weights.items()}
        for slot, name in zip(n.facts.slots, n.inputs, strict=False):
            if name not in tensors or name in self.stored or tensors[name].scale is None:
                continue
            role: Role = "bias" if slot.startswith("b") else "weight"
            axis = n.facts.weight_axis % max(graph.weights[name].dim(), 1) if role == "weight" else 0
            stored = _stored(tensors[name], axis)
            self.stored[name] = TensorPlan(name=name, role=role, stored=stored, origin="the file")

    def node_plan(self, n: Node) -> NodePlan:
        """Return where an operator runs: in integers if its operands and its result are integers."""
        if n.op == DYNAMIC:
            return NodePlan(name=n.name, op=n.op, layer=n.layer, exec="float", why="its range is found when it runs")
        graph, group = self.builder.graph, next((g for g in self.groups if n.name in g), ())
        data = [i for i in n.inputs if i is not None and graph.is_float(i)]
        result = group[-1] if group else n.name
        out = next(m for m in graph.nodes if m.name == result).output
        fused = bool(group) and n.name != group[0]
        if self._rounds(next((m for m in graph.nodes if group and m.name == group[0]), n)):
            return NodePlan(name=n.name, op=n.op, layer=n.layer, exec="int", group=group[-1] if group else "")
        held = all(i in self.stored for i in data) or fused
        if not held or (graph.is_float(out) and out not in self.stored):
            weights = n.facts.weighted and any(self.stored[i].role == "weight" for i in n.inputs if i in self.stored)
            why = "the file has floats here" + (", which its kernel may quantize at run time" if weights else "")
            return NodePlan(name=n.name, op=n.op, layer=n.layer, exec="float", why=why)
        first = self.stored.get(data[0]) if data else None
        same = first is not None and out in self.stored and _same(first, self.stored[out])
        follows = same and (n.facts.moves or n.op in _KEEP)
        group_name = group[-1] if group else ""
        return NodePlan(name=n.name, op=n.op, layer=n.layer, exec="follow" if follows else "int", group=group_name)

    def _rounds(self, n: Node) -> bool:
        """Return whether the kernel of a layer quantizes its input at run time."""
        return any(m.op == DYNAMIC and m.output in n.inputs for m in self.builder.graph.nodes)

    def names(self) -> dict[int, str]:
        """Return the name of every tensor: that of the value or weight which it holds."""
        out = {index: name for name, index in self._first.items()}
        out |= {index: name for (index, _), name in self._weights.items()}
        taken = {*out.values()}
        for t in self.model.tensors:
            if t.index not in out:
                value = self.values.get(t.index)
                wanted = t.name if value is None else value.name
                alike = wanted in taken or (value is None and original_of(wanted) in taken)  # but no copy of it
                out[t.index] = f"{wanted}/file_{t.index}" if alike else wanted
                taken.add(out[t.index])
        return out


def _same(a: TensorPlan, b: TensorPlan) -> bool:
    return a.stored is not None and b.stored is not None and a.stored.same_numbers(b.stored)


def _stored(t: Tensor, axis: int = 0) -> Stored:
    assert t.scale is not None
    shape = (-1,) if t.scale.size > 1 else ()
    zero = np.broadcast_to(t.zero, t.scale.shape).reshape(shape)
    return stored_as(t.kind.lower(), t.scale.reshape(shape), zero, axis)


def _named(model: TfliteModel, facts: Facts, names: dict[int, str], notes: dict[str, Any]) -> bytes:
    """Return the file with other names of tensors, with notes, and with sizes of inputs that its operators take."""
    with model.content.opened():
        table = model.table()
        for k, t in enumerate(table.subgraphs[0].tensors):
            t.name = names[k].encode()
        for t in model.inputs:
            held = table.subgraphs[0].tensors[t.index]
            held.shape = np.array(facts.shapes[t.index], np.int32)
            held.shapeSignature = np.array(t.signature, np.int32)
        entry, content = schema.MetadataT(), schema.BufferT()
        content.data = np.frombuffer(json.dumps(notes).encode(), np.uint8)
        table.buffers.append(content)
        entry.name, entry.buffer = b"chipfit", len(table.buffers) - 1
        table.metadata = [*(m for m in table.metadata or () if m.name != b"chipfit"), entry]
        return packed(table)
