"""Write a Graph under a Plan as `.tflite`: the flatbuffer itself, with exactly the Plan's numbers.

A tensor has the name of the graph value whose codes (or floats) it holds; the float side of a quantized value is
`v/float`. Images lie channels last, those that go in and come out too; the permutations, by which a runtime finds the
model's own layout again, stand in the metadata entry "chipfit". Operators that the plan keeps in float are written in float, with QUANTIZE and DEQUANTIZE
at their borders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chipfit._version import __version__
from chipfit.engine.run import run
from chipfit.errors import ExportError, UnsupportedError
from chipfit.export.names import output_names
from chipfit.export.tflite.ops import FUSING, INTEGER, MOVING, WRITERS
from chipfit.files import write_atomically
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.passes.layout import natural
from chipfit.plan.record import Plan, TensorPlan
from chipfit.plan.relayout import relayout, same_numbers
from chipfit.quantizers.grids import dequantize, quantize

try:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema
except ImportError:  # an extra; `export_tflite` says which
    schema = None

#: codes of tensor types in the schema
_TYPE_OF = {
    "float32": 0,
    "float16": 1,
    "int32": 2,
    "uint8": 3,
    "int64": 4,
    "bool": 6,
    "int16": 7,
    "int8": 9,
    "float64": 10,
}
INT4 = 17
#: how the file calls a fused activation: operator and its attributes -> code
_FUSED = {("Relu",): 1, ("Relu6",): 3, ("Clamp", -1.0, 1.0): 2, ("Clamp", 0.0, 6.0): 3, ("Clamp", 0.0, None): 1}
#: operators that must know the batch when they are written
_STATIC_BATCH = frozenset({"TransposeConv1D", "TransposeConv2D"})


def export_tflite(
    graph: Graph, plan: Plan | None, path: str | Path, *, batch: int | None = None, keep_layout: bool = False
) -> Path:
    """Write the model to `path`.

    Args:
        graph, plan: what to write; without a plan the float network is written.
        path: the `.tflite` file; it appears complete or not at all.
        batch: a fixed batch size. When omitted the batch stays open (size 1 until it is resized), except in models
            with transposed convolutions, whose kernels need it: there it is fixed at 1.
        keep_layout: inputs and outputs lie as in the model (channels first in PyTorch), behind transpositions.

    Raises:
        UnsupportedError: operators or formats that the file cannot hold, all named at once; nothing is written.
        ExportError: the disk refuses the file.
    """
    if schema is None:
        raise ExportError(
            "The package that holds the schema of `.tflite` files is not installed",
            hint="pip install 'chipfit[litert]'",
        )
    plan = plan or Plan()
    if batch is None and any(n.op in _STATIC_BATCH for n in graph.nodes):
        batch = 1
    return write_atomically(Path(path), Writer(graph, plan, batch, keep_layout).write())


class _Refusal(Exception):
    """(what, why): one operator cannot be written. All are gathered into one error."""


def _unstorable(plan: Plan) -> list[tuple[str, str]]:
    """Tensors whose formats the file cannot hold."""
    grids = [(f"tensor '{t.name}' ({t.format})", t.grid) for t in plan.tensors.values() if t.grid is not None]
    return [(name, "the file holds signed integers only") for name, g in grids if g.kind != "int" or not g.signed] + [
        (name, f"the file has no scales per {g.per}") for name, g in grids if g.per not in ("tensor", "channel")
    ]


def _in_one(refused: Sequence[tuple[str, str]]) -> UnsupportedError:
    reasons: dict[str, list[str]] = {}
    for what, why in refused:
        reasons.setdefault(why, []).append(what)
    return UnsupportedError(
        "TensorFlow Lite cannot hold all of this model",
        got="; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items()),
        hint="replace these layers, export the part of the model without them, or quantize for a platform such as tflite_int8",
    )


class _Buffer:
    """Data of a tensor that start at a multiple of 16 bytes, as the schema demands; its own writer does not align."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def Pack(self, builder: Any) -> Any:  # noqa: N802 -- called by generated code
        at = None
        if self.data:
            builder.StartVector(1, len(self.data), 16)
            builder.head -= len(self.data)
            builder.Bytes[builder.head : builder.head + len(self.data)] = self.data
            at = builder.EndVector()
        schema.BufferStart(builder)
        if at is not None:
            schema.BufferAddData(builder, at)
        return schema.BufferEnd(builder)


class Writer:
    """State of one export: tensors and operators so far, and where each value is."""

    def __init__(self, graph: Graph, plan: Plan, batch: int | None, keep_layout: bool) -> None:
        self.source = graph
        self.batch = batch
        sizes = _sizes(graph, batch or 1)
        new, self.plan = relayout(graph, plan, "channels_last", borders=not keep_layout)
        self.graph, self.forms = new.graph, new.forms
        self.sizes: dict[str, tuple[int, ...]] = {}
        for v in self.graph.values:
            old, form = new.copies.get(v) or (v, self.forms.get(v) or natural(len(sizes[v])))
            self.sizes[v] = tuple(sizes[old][d] for d in form)
        self.tensors: list[Any] = []
        self.buffers: list[Any] = [_Buffer()]
        self.operators: list[Any] = []
        self.codes: list[Any] = []
        self.known: dict[str, int] = {}  #: tensor name -> index
        self.constants: dict[Any, int] = {}
        self.node = Node("io", "", (), ())
        self.refused = _unstorable(plan)  #: why the file cannot be written
        self.integer = False  #: the operator at hand is written in integers
        self.fused = 0  #: code of the activation that the operator at hand applies itself
        self._count = 0

    # ---- pieces that operator writers use

    def refuse(self, node: Node, why: str) -> None:
        raise _Refusal(f"{node.op if node.op != OPAQUE else node.attrs['target']} '{node.who}'", why)

    def shape(self, name: str | None) -> tuple[int, ...]:
        """Concrete sizes of a value (batch 1 where it is open) or weight, in the file's layout."""
        assert name is not None
        return tuple(self.graph.weights[name].shape) if name in self.graph.weights else self.sizes[name]

    def open_shape(self, name: str) -> list[int]:
        """Sizes of a value with -1 where it is open."""
        known = self.graph.values[name].shape
        return [s if n is not None or self.batch else -1 for s, n in zip(self.sizes[name], known, strict=True)]

    def read(self, name: str | None, node: Node | None = None) -> int:
        """The tensor of an operand: codes when the operator runs in integers, else floats."""
        assert name is not None
        node = node or self.node
        t = self.plan.tensors.get(name)
        quantized = t is not None and t.quantized
        if name in self.graph.weights:
            return self.weight(name)
        if self.integer and quantized:
            return self.known[name]
        if quantized and (name, node.name) not in self.plan.float_edges:
            return self._dequantized(name)
        return self.known[f"{name}/float" if quantized else name]

    def weight(
        self,
        name: str,
        change: Callable[[np.ndarray], np.ndarray] = np.ascontiguousarray,
        axis: int = 0,
        scale: Any = None,
    ) -> int:
        """A weight as a constant tensor, rearranged by `change`.

        Args:
            axis: where `change` brings the channel axis of per-channel scales.
            scale: one number or one per channel, in place of the plan's of the same value.
        """
        t = self.plan.tensors.get(name)
        quantized = t is not None and t.quantized and (name, self.node.name) not in self.plan.float_edges
        w = self.graph.weights[name].detach().cpu()
        if not quantized:
            return self.constant(change(w.contiguous().numpy()), name)
        assert t is not None and t.grid is not None and t.scale is not None and t.zero_point is not None
        q = quantize(w, t.scale, t.zero_point, t.grid, t.axis)
        if not self.integer:
            return self.constant(change(dequantize(q, t.scale, t.zero_point, t.axis).numpy()), f"{name}/float")
        kind = code_type(t)
        scale = t.scale.reshape(-1).numpy() if scale is None else scale
        zero = t.zero_point.reshape(-1)[: len(scale)].numpy()
        return self.constant(
            change(q.numpy()), name, kind=kind, scale=scale, zero=zero, axis=axis if t.axis is not None else 0
        )

    def constant(
        self, value: Any, name: str = "", *, kind: int | None = None, scale: Any = None, zero: Any = None, axis: int = 0
    ) -> int:
        """A constant tensor; equal ones are stored once."""
        a = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
        kind = _TYPE_OF[a.dtype.name] if kind is None else kind
        key = (name, kind, a.shape, a.tobytes(), None if scale is None else np.asarray(scale).tobytes())
        if key not in self.constants:
            data = _packed(a) if kind == INT4 else a.astype(_NUMPY[kind])
            self.constants[key] = self.tensor(
                self._unique(name or f"{self.node.name}/const"), a.shape, kind, scale, zero, axis, data.tobytes()
            )
        return self.constants[key]

    def ints(self, *values: int) -> int:
        return self.constant(np.array(values, np.int32))

    def scalar(self, value: float) -> int:
        return self.constant(np.array(value, np.float32))

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        kind: int,
        scale: Any = None,
        zero: Any = None,
        axis: int = 0,
        data: Any = None,
        open_shape: Sequence[int] | None = None,
    ) -> int:
        """Add a tensor; returns its index."""
        t = schema.TensorT()
        t.name, t.shape, t.type, t.buffer, t.hasRank = name.encode(), np.array(shape, np.int32), kind, 0, True
        if open_shape is not None and -1 in open_shape:
            t.shapeSignature = np.array(open_shape, np.int32)
        if data is not None:
            self.buffers.append(_Buffer(data))
            t.buffer = len(self.buffers) - 1
        if scale is not None:
            p = schema.QuantizationParametersT()
            p.scale = np.atleast_1d(np.asarray(scale, np.float32))
            p.zeroPoint = np.broadcast_to(np.atleast_1d(np.asarray(zero, np.int64)), p.scale.shape).copy()
            p.quantizedDimension = axis
            t.quantization = p
        self.tensors.append(t)
        self.known[name] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def between(self, shape: Sequence[int], like: int | None = None, *, name: str = "") -> int:
        """A tensor inside an operator's writing: float, or of the type and with the numbers of the tensor `like`."""
        k = self.tensor(self._unique(name or f"{self.node.name}/part"), shape, _TYPE_OF["float32"])
        if like is not None:
            self.tensors[k].type, self.tensors[k].quantization = (
                self.tensors[like].type,
                self.tensors[like].quantization,
            )
        return k

    def op(
        self, kind: str, inputs: Sequence[int], outputs: int | Sequence[int], options: str = "", **settings: Any
    ) -> None:
        """Add an operator; `options` is the schema's name of its option table without "Options"."""
        outs = [outputs] if isinstance(outputs, int) else list(outputs)
        o = schema.OperatorT()
        o.opcodeIndex = self._code(kind, self._version(kind, [*inputs, *outs]))
        o.inputs, o.outputs = np.array(inputs, np.int32), np.array(outs, np.int32)
        if options:
            o.builtinOptionsType = getattr(schema.BuiltinOptions, f"{options}Options")
            o.builtinOptions = getattr(schema, f"{options}OptionsT")()
            for key, value in settings.items():
                if not hasattr(o.builtinOptions, key):
                    raise AttributeError(f"{options}Options has no field {key}")
                setattr(o.builtinOptions, key, value)
        self.operators.append(o)

    # ---- the walk

    def write(self) -> bytes:
        g, plan = self.graph, self.plan
        groups = {n: group for group in plan.groups for n in group}
        nodes = {n.name: n for n in g.nodes}
        for name in g.inputs:
            self._value(name, raw=True)
            self._publish(name, raw=True)
        for n in g.nodes:
            members = [nodes[m] for m in groups.get(n.name, (n.name,))]
            if n.name == members[-1].name:
                try:
                    self._unit(members)
                except _Refusal as e:
                    self.refused.append(e.args)
        if self.refused:
            raise _in_one(self.refused)
        self.node, self.integer = Node("io", "", (), ()), False
        outputs = [self._constant_output(o) if o in g.weights else self.read(o) for o in g.outputs]
        return self._model([self.known[self._raw_name(i)] for i in g.inputs], outputs)

    def _unit(self, members: Sequence[Node]) -> None:
        """One kernel: the head, and the activations that it may apply itself."""
        head, tail, plan = members[0], members[-1], self.plan
        made = {o for m in members for o in m.outputs}
        reads = [i for m in members for i in m.inputs if i is not None and i not in made and self.graph.is_float(i)]
        integer = plan.nodes.get(head.name) is not None and plan.nodes[head.name].exec != "float" and head.op in INTEGER
        integer = integer and bool(reads) and all(plan.quantized(i) for i in reads)
        integer = integer and all(plan.quantized(o) for o in tail.outputs)
        integer = integer and (
            head.op not in MOVING or all(same_numbers(plan, reads[0], v) for v in (*reads, *tail.outputs))
        )
        for o in tail.outputs:
            self._value(o, raw=not integer)
        code = _fused_code(members[1]) if len(members) == 2 and head.op in FUSING else 0
        for n in members[:1] if code else members:
            self.node, self.integer, self.fused = n, integer, code
            if n.op not in WRITERS:
                self.refuse(n, "it has no TensorFlow Lite form here")
            outs = [self.known[o if integer else self._raw_name(o)] for o in tail.outputs]
            if n is not tail and not code:
                outs = [self.between(self.sizes[n.output], outs[0], name=f"{n.output}/inner")]
                self.known[n.output] = outs[0]
            WRITERS[n.op](self, n, outs)
        if not integer:
            for o in tail.outputs:
                self._publish(o, raw=True)

    def _raw_name(self, value: str) -> str:
        return f"{value}/float" if self.plan.quantized(value) else value

    def _value(self, name: str, raw: bool) -> None:
        """Add the tensors of a value: its codes when it is quantized, its float side when `raw`."""
        v = self.graph.values[name]
        if v.dtype not in _TYPE_OF:
            self.refused.append((f"value '{name}'", f"the file has no type {v.dtype}"))
            v = replace(v, dtype="float32")
        shape, open_shape = self.sizes[name], self.open_shape(name)
        t = self.plan.tensors.get(name)
        if raw:
            self.tensor(self._raw_name(name), shape, _TYPE_OF[v.dtype], open_shape=open_shape)
        if t is not None and t.quantized:
            assert t.scale is not None and t.zero_point is not None
            self.tensor(name, shape, code_type(t), t.scale.numpy(), t.zero_point.numpy(), open_shape=open_shape)

    def _publish(self, name: str, raw: bool) -> None:
        """Quantize a value that was written in float."""
        if self.plan.quantized(name) and raw:
            self.op("QUANTIZE", [self.known[f"{name}/float"]], self.known[name], "Quantize")

    def _dequantized(self, name: str) -> int:
        key = f"{name}/dequantized"
        if key not in self.known:
            self.tensor(key, self.sizes[name], _TYPE_OF["float32"], open_shape=self.open_shape(name))
            self.op("DEQUANTIZE", [self.known[name]], self.known[key], "Dequantize")
        return self.known[key]

    def _constant_output(self, name: str) -> int:
        y = self.tensor(
            f"{name}/output", self.shape(name), _TYPE_OF[str(self.graph.weights[name].dtype).removeprefix("torch.")]
        )
        self.op(
            "RESHAPE", [self.weight(name), self.ints(*self.shape(name))], y, "Reshape", newShape=list(self.shape(name))
        )
        return y

    def _unique(self, name: str) -> str:
        while name in self.known:
            self._count += 1
            name = f"{name.rpartition('#')[0] or name}#{self._count}"
        return name

    # ---- the file

    def _version(self, kind: str, tensors: Sequence[int]) -> int:
        types = {self.tensors[t].type for t in tensors if t >= 0}
        column = 3 if INT4 in types else 2 if _TYPE_OF["int16"] in types else 1 if _TYPE_OF["int8"] in types else 0
        return _VERSIONS.get(kind, _DEFAULT_VERSIONS)[column]

    def _code(self, kind: str, version: int) -> int:
        number = getattr(schema.BuiltinOperator, kind)
        for k, c in enumerate(self.codes):
            if (c.builtinCode, c.version) == (number, version):
                return k
        c = schema.OperatorCodeT()
        c.builtinCode, c.deprecatedBuiltinCode, c.version = number, min(number, 127), version
        self.codes.append(c)
        return len(self.codes) - 1

    def _model(self, inputs: list[int], outputs: list[int]) -> bytes:
        used = {int(i) for o in self.operators for i in (*o.inputs, *o.outputs)} | {*inputs, *outputs}
        keep = sorted(i for i in used if i >= 0)  # an operator written on behalf of a fused one leaves tensors behind
        new = {old: k for k, old in enumerate(keep)} | {-1: -1}
        for o in self.operators:
            o.inputs, o.outputs = (np.array([new[int(i)] for i in ids], np.int32) for ids in (o.inputs, o.outputs))
        g = schema.SubGraphT()
        g.name, g.tensors, g.operators = b"main", [self.tensors[i] for i in keep], self.operators
        g.inputs, g.outputs = (
            np.array([new[i] for i in inputs], np.int32),
            np.array([new[i] for i in outputs], np.int32),
        )
        m = schema.ModelT()
        m.version, m.description, m.operatorCodes, m.subgraphs = 3, f"chipfit {__version__}".encode(), self.codes, [g]
        self.buffers.append(_Buffer(json.dumps(self._notes(), default=str).encode()))
        entry = schema.MetadataT()
        entry.name, entry.buffer = b"chipfit", len(self.buffers) - 1
        m.metadata, m.buffers = [entry], self.buffers
        m.signatureDefs = [
            _signature(list(zip(self.source.inputs, g.inputs)), list(zip(output_names(self.source), g.outputs)))
        ]
        builder = flatbuffers.Builder(1024)
        builder.Finish(m.Pack(builder), file_identifier=b"TFL3")
        return bytes(builder.Output())

    def _notes(self) -> dict[str, Any]:
        """What a runtime needs to take and give every value in the model's own layout."""
        values = self.source.values
        names = {
            v: [n for n in (v, f"{v}/float", f"{v}/dequantized") if n in self.known]
            for v in self.graph.values
            if v in values
        }
        return {
            "platform": self.plan.platform,
            "inputs": [self.forms.get(i) for i in self.source.inputs],
            "forms": {n: list(f) for v, f in self.forms.items() for n in names[v]},
            "batch_axis": {
                n: values[v].shape.index(None) for v, ns in names.items() if None in values[v].shape for n in ns
            },
            "provenance": self.plan.provenance,
        }


def _signature(inputs: Sequence[tuple[str, Any]], outputs: Sequence[tuple[str, Any]]) -> Any:
    s = schema.SignatureDefT()
    s.signatureKey, s.subgraphIndex = b"serving_default", 0
    s.inputs, s.outputs = [], []
    for table, pairs in ((s.inputs, inputs), (s.outputs, outputs)):
        for name, index in pairs:
            t = schema.TensorMapT()
            t.name, t.tensorIndex = name.encode(), int(index)
            table.append(t)
    return s


def _fused_code(act: Node) -> int:
    """The file's code of an activation; 0 when it has none."""
    key = (act.op, act.attrs["min"], act.attrs["max"]) if act.op == "Clamp" else (act.op,)
    return _FUSED.get(key, 0)


_NUMPY = {code: np.dtype(name) for name, code in _TYPE_OF.items()}


def code_type(t: TensorPlan) -> int:
    """The file's type of a tensor's codes."""
    assert t.grid is not None
    if t.role == "bias":
        return _TYPE_OF["int64" if t.grid.bits > 32 else "int32"]
    bits = t.grid.bits
    return INT4 if bits <= 4 else _TYPE_OF["int8" if bits <= 8 else "int16" if bits <= 16 else "int32"]


def _packed(codes: np.ndarray) -> np.ndarray:
    """Two 4-bit codes a byte, the first in the low half."""
    flat = codes.reshape(-1).astype(np.int8)
    flat = np.append(flat, np.int8(0)) if flat.size % 2 else flat
    return ((flat[0::2] & 15) | ((flat[1::2] & 15) << 4)).astype(np.uint8)


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
        like = graph.example[k].shape if graph.example else ()
        shape = [
            batch if i == 0 and s is None else s if s is not None else like[i] if like else 1
            for i, s in enumerate(v.shape)
        ]
        inputs.append(torch.zeros(shape, dtype=getattr(torch, v.dtype)))
        found[name] = tuple(shape)
    try:
        with torch.inference_mode():
            run(graph, inputs, hook=note)
    except RuntimeError as e:
        raise ExportError(
            f"The model does not run on a batch of {batch}: {str(e).splitlines()[0]}", hint="choose another `batch`"
        ) from e
    return found


#: operator -> version of its kernel for float, int8, int16 codes, and 4-bit weights
_DEFAULT_VERSIONS = (1, 2, 3, 2)
_VERSIONS: dict[str, tuple[int, int, int, int]] = {
    "CONV_2D": (1, 3, 4, 5),
    "DEPTHWISE_CONV_2D": (1, 3, 5, 6),
    "FULLY_CONNECTED": (5, 5, 7, 5),
    "TRANSPOSE_CONV": (3, 3, 4, 3),
    "ADD": (1, 2, 3, 2),
    "SUB": (1, 2, 5, 2),
    "MUL": (1, 2, 4, 2),
    "DEQUANTIZE": (2, 2, 3, 2),
    "QUANTIZE": (1, 1, 2, 1),
    "LEAKY_RELU": (1, 2, 2, 2),
    "RELU": (1, 2, 3, 2),
    "BATCH_MATMUL": (1, 2, 3, 2),
    "STRIDED_SLICE": (1, 2, 4, 2),
    "EXP": (1, 2, 2, 2),
    "LOG": (1, 2, 2, 2),
    "TILE": (1, 2, 2, 2),
    "MEAN": (1, 2, 3, 2),
    "RESIZE_BILINEAR": (3, 3, 4, 3),
    "RESIZE_NEAREST_NEIGHBOR": (3, 3, 4, 3),
    "GATHER": (1, 2, 4, 2),
    **dict.fromkeys(
        (
            "RESHAPE",
            "GELU",
            "HARD_SWISH",
            "SQUARED_DIFFERENCE",
            "ELU",
            "PRELU",
            "DIV",
            "POW",
            "FLOOR",
            "ROUND",
            "SIN",
            "COS",
            "CEIL",
            "NEG",
            "CAST",
            "ABS",
            "CUMSUM",
            "CONV_3D",
            "DEPTH_TO_SPACE",
            "SPACE_TO_DEPTH",
            "SELECT_V2",
            "UNPACK",
            "RELU_0_TO_1",
            "RELU_N1_TO_1",
            "BROADCAST_TO",
        ),
        (1, 1, 1, 1),
    ),
}
