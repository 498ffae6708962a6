"""Write a Graph under a Plan as ONNX with QuantizeLinear / DequantizeLinear and real integer initialisers.

Names: graph value `v` is `v` before its quantizer, its codes are `v_q`; inputs keep the names of the model's arguments. Scales and zero
points of activations are rank 0, as integer kernels demand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from chipfit._version import __version__
from chipfit.errors import ExportError, UnsupportedError
from chipfit.export.names import output_names
from chipfit.export.onnx.opaque import splice
from chipfit.export.onnx.ops import WRITERS
from chipfit.files import write_atomically
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import quantize

_TYPES = {
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int16": TensorProto.INT16,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
    "int": TensorProto.INT64,
}


def export_onnx(graph: Graph, plan: Plan | None, path: str | Path, *, opset: int | None = None) -> Path:
    """Write the model to `path`.

    Args:
        graph, plan: what to write; without a plan the float network is written.
        path: the `.onnx` file; it appears complete or not at all.
        opset: ONNX operator set; the least that holds everything when omitted (13; 17 for layer norms, 18 for
            opaque operators, 21 for 4- and 16-bit codes).

    Raises:
        UnsupportedError: operators or formats that ONNX cannot hold, all named at once; nothing is written.
        ExportError: the checker refuses the model or the disk refuses the file.
    """
    plan = plan or Plan()
    least = _least_opset(graph, plan)
    if opset is not None and opset < least:
        raise UnsupportedError(
            f"This model needs ONNX opset {least}", got=opset, allowed=f">= {least}", hint="leave `opset` out"
        )
    model = Writer(graph, plan, opset or least).write()
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as e:  # the checker's own errors have no common base
        raise ExportError(f"The ONNX checker refuses the model: {str(e).splitlines()[0]}") from e
    return write_atomically(Path(path), model.SerializeToString())


def _least_opset(graph: Graph, plan: Plan) -> int:
    least = 13
    if any(n.op == "LayerNorm" for n in graph.nodes):
        least = 17
    if any(n.op == OPAQUE for n in graph.nodes):
        least = 18
    bits = {t.grid.bits for t in plan.tensors.values() if t.grid is not None}
    return 21 if any(b <= 4 or 8 < b <= 16 for b in bits) else least  # 4- and 16-bit integers


class Writer:
    """State of one export: nodes and initialisers so far, and under which name each value is known."""

    def __init__(self, graph: Graph, plan: Plan, opset: int) -> None:
        self.graph, self.plan, self.opset = graph, plan, opset
        self.nodes: list[onnx.NodeProto] = []
        self.initialisers: dict[str, onnx.TensorProto] = {}
        self.floats: dict[str, str] = {}  #: value -> ONNX name before its quantizer
        self.ready: dict[str, str] = {}  #: value -> ONNX name after its quantizer
        self.node: Node | None = None
        self._count = 0
        self._pending: dict[str, Callable[[str], str]] = {}
        self.example_values: dict[str, Any] | None = None  #: filled when an opaque operator needs examples
        grouped = {n: g for g in plan.groups for n in g}
        self.inner = {graph.node(n).output for n, g in grouped.items() if n != g[-1]}

    # ---- pieces that operator writers use

    def fresh(self, hint: str) -> str:
        self._count += 1
        return f"{self.node.name if self.node else 'io'}/{hint}_{self._count}"

    def op(self, kind: str, inputs: Sequence[str | None], **attrs: Any) -> str:
        """Add a node with one output; returns its name."""
        return self.op_many(kind, inputs, 1, **attrs)[0]

    def op_many(self, kind: str, inputs: Sequence[str | None], outputs: int, **attrs: Any) -> list[str]:
        ins = [i or "" for i in inputs]
        axes = attrs.pop("axes_", None)
        if axes is not None:
            if kind == "ReduceSum" or self.opset >= 18:
                ins.append(self.const(np.array(axes, np.int64)))
            else:
                attrs["axes"] = axes
        while ins and not ins[-1]:
            ins.pop()
        names = [self.fresh(kind) for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, ins, names, name=names[0], **attrs))
        return names

    def const(self, value: Any) -> str:
        """A constant initialiser."""
        name = self.fresh("const")
        self.initialisers[name] = numpy_helper.from_array(
            np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value), name
        )
        return name

    def type_of(self, dtype: str) -> int:
        return _TYPES[dtype]

    def refuse(self, node: Node, why: str) -> None:
        raise UnsupportedError(f"{node.op} '{node.who}' cannot be written to ONNX: {why}", where=node.source)

    def mover(self, kind: str, inputs: Sequence[str], value: str | None, name: str) -> str:
        """An operator that moves codes, between quantizers of the value that it moves, so that runtimes keep it in integers."""
        y = self.op(kind, inputs)
        t = self.plan.tensors.get(value or "")
        if t is not None and t.quantized and (value, name) not in self.plan.float_edges:
            y = self._qdq(y, t)
        return y

    def defer(self, value: str, finish: Callable[[str], str]) -> None:
        """Apply `finish` to `value` once its quantizer is written."""
        self._pending[value] = finish

    # ---- the walk

    def write(self) -> onnx.ModelProto:
        unknown = [n for n in self.graph.nodes if n.op != OPAQUE and n.op not in WRITERS]
        if unknown:
            raise UnsupportedError(
                "These operators have no ONNX writer",
                got=", ".join(f"{n.op} '{n.who}'" for n in unknown),
                allowed=", ".join(sorted(WRITERS)),
                hint="replace them in the model, or export the part without them",
            )
        kinds = {t.grid.kind for t in self.plan.tensors.values() if t.grid is not None} - {"int"}
        if kinds:
            raise UnsupportedError(
                "ONNX holds integer grids only",
                got=", ".join(sorted(kinds)),
                hint="export JSON encodings (`.json`) for this platform",
            )
        for name in self.graph.inputs:
            self._publish(name, name)
        for n in self.graph.nodes:
            self.node = n
            outs = splice(self, n) if n.op == OPAQUE else WRITERS[n.op](self, n, [self._read(i, n) for i in n.inputs])
            for value, name in zip(n.outputs, [outs] if isinstance(outs, str) else outs, strict=False):
                if n.name and value not in self._pending and any(p in n.inputs for p in self._pending):
                    source = next(p for p in n.inputs if p in self._pending)
                    assert source is not None
                    self._pending[value] = self._pending.pop(source)
                self._publish(value, name)
        self.node = None
        return self._model()

    def _read(self, name: str | None, node: Node) -> str | None:
        if name is None:
            return None
        raw = (name, node.name) in self.plan.float_edges or name in self.inner
        if name in self.graph.weights:
            return self._weight(name, raw)
        return self.floats[name] if raw else self.ready[name]

    def _weight(self, name: str, raw: bool) -> str:
        t = self.plan.tensors.get(name)
        key = f"{name}\0{raw}"
        if key in self.ready:
            return self.ready[key]
        w = self.graph.weights[name].detach().cpu()
        if raw or t is None or not t.quantized:
            if name not in self.initialisers:
                self.initialisers[name] = numpy_helper.from_array(w.contiguous().numpy(), name)
            self.ready[key] = name
            return name
        assert t.grid is not None and t.scale is not None and t.zero_point is not None
        codes = quantize(w, t.scale, t.zero_point, t.grid, t.axis)
        kind = _code_type(t)
        self.initialisers[f"{name}_q"] = _codes(f"{name}_q", codes.numpy(), kind)
        scale, zero = self._params(t, kind)
        attrs = {} if t.axis is None or t.scale.dim() == 0 else {"axis": t.axis}
        self.ready[key] = self.op("DequantizeLinear", [f"{name}_q", scale, zero], **attrs)
        return self.ready[key]

    def _params(self, t: TensorPlan, kind: int) -> tuple[str, str]:
        """Initialisers of scale and zero point, one pair per tensor."""
        assert t.scale is not None and t.zero_point is not None
        scale, zero = f"{t.name}_scale", f"{t.name}_zero_point"
        if scale not in self.initialisers:
            self.initialisers[scale] = numpy_helper.from_array(t.scale.numpy().astype(np.float32), scale)
            self.initialisers[zero] = _codes(zero, t.zero_point.numpy(), kind)
        return scale, zero

    def _qdq(self, x: str, t: TensorPlan, code_name: str | None = None) -> str:
        scale, zero = self._params(t, _code_type(t))
        q = code_name or self.fresh("q")
        self.nodes.append(helper.make_node("QuantizeLinear", [x, scale, zero], [q], name=q))
        return self.op("DequantizeLinear", [q, scale, zero])

    def _publish(self, value: str, name: str) -> None:
        """Make a value known under an ONNX name, behind its quantizer when it has one."""
        name = self._rename(name, value)
        finish = None if value in self.inner else self._pending.pop(value, None)
        self.floats[value] = self.ready[value] = name
        t = self.plan.tensors.get(value)
        if value in self.inner:
            return
        if t is None or not t.quantized:
            if finish:
                self.floats[value] = self.ready[value] = finish(name)
            return
        if finish:
            self.floats[value] = finish(name)
            self.ready[value] = self._qdq(finish(self._qdq(name, t)), t, f"{value}_q")
        else:
            self.ready[value] = self._qdq(name, t, f"{value}_q")

    def _rename(self, name: str, value: str) -> str:
        """Give an ONNX tensor the name of the graph value that it holds; returns its name."""
        if name in ("", value):
            return name
        for k in range(len(self.nodes) - 1, -1, -1):
            if name in self.nodes[k].output:
                for n in self.nodes[k:]:
                    n.input[:] = [value if i == name else i for i in n.input]
                    n.output[:] = [value if o == name else o for o in n.output]
                return value
        return name

    def _model(self) -> onnx.ModelProto:
        g = self.graph
        outputs = []
        for i, (value, name) in enumerate(zip(g.outputs, output_names(g), strict=True)):
            source = self._weight(value, True) if value in g.weights else self.ready[value]
            self.nodes.append(helper.make_node("Identity", [source], [name], name=f"output_{i}"))
            outputs.append(self._info(name, value))
        graph = helper.make_graph(
            self._used_nodes([o.name for o in outputs]),
            "chipfit",
            [self._info(n, n) for n in g.inputs],
            outputs,
        )
        needed = {i for n in graph.node for i in n.input}
        graph.initializer.extend(t for k, t in self.initialisers.items() if k in needed)
        version = {13: 7, 17: 8, 18: 8, 21: 10}.get(self.opset, 10)
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", self.opset)],
            ir_version=version,
            producer_name="chipfit",
            producer_version=__version__,
        )
        helper.set_model_props(
            model,
            {
                "chipfit.platform": self.plan.platform,
                "chipfit.provenance": json.dumps(self.plan.provenance, default=str),
            },
        )
        return model

    def _used_nodes(self, wanted: Sequence[str]) -> list[onnx.NodeProto]:
        """Nodes that an output depends on, in order."""
        live, kept = set(wanted), []
        for n in reversed(self.nodes):
            if live.intersection(n.output):
                live.update(n.input)
                kept.append(n)
        return kept[::-1]

    def _info(self, name: str, value: str) -> onnx.ValueInfoProto:
        g = self.graph
        if value in g.weights:
            return helper.make_tensor_value_info(
                name, _TYPES[str(g.weights[value].dtype).removeprefix("torch.")], list(g.weights[value].shape)
            )
        v = g.values[value]
        dims = [s if s is not None else ("batch" if k == 0 else f"{value}_{k}") for k, s in enumerate(v.shape)]
        known = None if value in g.outputs and value not in g.inputs and any(d is None for d in v.shape[1:]) else dims
        if value in g.outputs and known is not None and v.shape and v.shape[0] is None and not _follows_batch(g):
            known = [f"{name}_{k}" if s is None else s for k, s in enumerate(v.shape)]
        return helper.make_tensor_value_info(name, _TYPES[v.dtype], known)


def _follows_batch(g: Graph) -> bool:
    return all(not g.values[i].shape or g.values[i].shape[0] is None for i in g.inputs)


def _code_type(t: TensorPlan) -> int:
    assert t.grid is not None
    if t.role == "bias":
        return TensorProto.INT32
    bits, signed = t.grid.bits, t.grid.signed
    if bits <= 4:
        return TensorProto.INT4 if signed else TensorProto.UINT4
    if bits <= 8:
        return TensorProto.INT8 if signed else TensorProto.UINT8
    if bits <= 16:
        return TensorProto.INT16 if signed else TensorProto.UINT16
    return TensorProto.INT32


def _codes(name: str, codes: np.ndarray, kind: int) -> onnx.TensorProto:
    if kind in (TensorProto.INT4, TensorProto.UINT4):
        return helper.make_tensor(name, kind, codes.shape, codes.reshape(-1).tolist())
    return numpy_helper.from_array(codes.astype(helper.tensor_dtype_to_np_dtype(kind)), name)


def example_inputs(graph: Graph) -> list[torch.Tensor]:
    """Inputs of the right shapes: the captured example, or zeros and small integers for a loaded graph."""
    if graph.example:
        return list(graph.example)
    out = []
    for name in graph.inputs:
        v = graph.values[name]
        shape = [2 if s is None else s for s in v.shape]
        dtype = getattr(torch, v.dtype)
        out.append(torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype))
    return out
