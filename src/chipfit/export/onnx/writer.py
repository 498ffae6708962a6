"""Write a Graph under a Plan as ONNX with QuantizeLinear / DequantizeLinear and real integer initialisers."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from chipfit._version import __version__
from chipfit.errors import ExportError, UnsupportedError, first_line
from chipfit.export.io_spec import IOSpec, QuantizedIO, io_spec_of
from chipfit.export.names import output_names
from chipfit.export.onnx.builder import OnnxBuilder, refuse, tensor_type
from chipfit.export.onnx.opaque import splice
from chipfit.export.onnx.ops import REFUSED, WRITERS
from chipfit.files import write_atomically
from chipfit.graph.ir import OPAQUE, Graph
from chipfit.passes.decompose import RULES, SMOOTH, decompose
from chipfit.plan.record import Plan

_LEAST = 13
_NEEDS = {"LayerNorm": 17, OPAQUE: 18}  #: operators that need a later opset
_NEEDS_4_AND_16_BITS = 21
#: opset -> version of the file format that came with it; later ones for the others
_IR_VERSIONS, _IR_VERSION = {13: 7, 17: 8, 18: 8, 21: 10}, 10


def export_onnx(graph: Graph, plan: Plan | None, path: str | Path, *, opset: int | None = None, **ends: Any) -> Path:
    """Write the model to `path`.

    Args:
        graph, plan: what to write; without a plan the float network is written.
        path: the `.onnx` file; it appears complete or not at all.
        opset: ONNX operator set; the least that holds everything when omitted (13; 17 for layer norms, 18 for
            opaque operators, 21 for 4- and 16-bit codes).
        ends: see `chipfit.export.io_spec.io_spec_of`. The metadata entry "chipfit.io" has scales and zero points of
            quantized inputs and outputs; "chipfit.labels", "chipfit.mean" and "chipfit.std" are lists. All are JSON.

    Raises:
        UnsupportedError: operators or formats that ONNX cannot hold, all named at once; nothing is written.
        ConfigError: see `io_spec_of`.
        ExportError: the checker refuses the model or the disk refuses the file.
    """
    plan = plan or Plan()
    handed = io_spec_of(graph, plan, **ends)
    least = _least_opset(graph, plan)
    if opset is not None and opset < least:
        hint = "leave `opset` out"
        raise UnsupportedError(f"This model needs ONNX opset {least}", got=opset, allowed=f">= {least}", hint=hint)
    model = _model(_written(*_held(graph, plan), handed, opset or least), handed)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as e:  # the last: over 2 GB
        raise ExportError(f"The ONNX checker refuses the model: {first_line(e)}") from e
    return write_atomically(Path(path), model.SerializeToString())


def _least_opset(graph: Graph, plan: Plan) -> int:
    bits = {t.stored.grid.bits for t in plan.tensors.values() if t.stored is not None}
    if any(b <= 4 or 8 < b <= 16 for b in bits):
        return _NEEDS_4_AND_16_BITS
    return max([_LEAST, *(_NEEDS[n.op] for n in graph.nodes if n.op in _NEEDS)])


def _held(graph: Graph, plan: Plan) -> tuple[Graph, Plan]:
    """The same in operators and grids that ONNX holds.

    Raises:
        UnsupportedError: it holds some in no way.
    """
    bare = {  # ONNX asks for a weight; it knows one beta and no threshold
        n.name
        for n in graph.nodes
        if (n.op == "LayerNorm" and n.operand("w") is None)
        or (n.op == "Softplus" and (n.attrs["beta"] != 1.0 or n.attrs["threshold"] < SMOOTH))
    }
    graph, plan, reasons = decompose(graph, plan, WRITERS, besides=bare)
    unknown = [n for n in graph.nodes if n.op != OPAQUE and n.op not in WRITERS]
    for n in unknown:
        if n.name in reasons:
            refuse(n, reasons[n.name])
    if unknown:
        got = ", ".join(f"{n.op} '{n.who}' ({REFUSED.get(n.op, 'unknown')})" for n in unknown)
        allowed = ", ".join(sorted({*WRITERS, *RULES}))
        hint = "replace them in the model, or export the part without them"
        raise UnsupportedError("These operators have no ONNX writer", got=got, allowed=allowed, hint=hint)
    kinds = {t.stored.grid.kind for t in plan.tensors.values() if t.stored is not None} - {"int"}
    if kinds:
        hint = "export JSON encodings (`.json`) for this platform"
        raise UnsupportedError("ONNX holds integer grids only", got=", ".join(sorted(kinds)), hint=hint)
    return graph, plan


def _written(graph: Graph, plan: Plan, handed: IOSpec, opset: int) -> OnnxBuilder:
    """Every node of the graph, in order."""
    builder = OnnxBuilder(graph, plan, opset)
    for name in graph.inputs:
        if name in handed.inputs:
            builder.take(name, handed.inputs[name])
        else:
            builder.publish(name, name)
    for n in graph.nodes:
        builder.begin(n)
        made = (
            splice(builder, n) if n.op == OPAQUE else WRITERS[n.op](builder, n, [builder.read(i, n) for i in n.inputs])
        )
        for value, name in zip(n.outputs, [made] if isinstance(made, str) else made, strict=False):
            builder.publish(value, name)
    return builder


def _model(builder: OnnxBuilder, handed: IOSpec) -> onnx.ModelProto:
    g = builder.graph
    outputs = output_names(g)
    for i, (value, name) in enumerate(zip(g.outputs, outputs, strict=True)):
        source = builder.weight(value, True) if value in g.weights else builder.ready[value]
        if value in handed.outputs:
            source = builder.give(value, handed.outputs[value])
        builder.nodes.append(helper.make_node("Identity", [source], [name], name=f"output_{i}"))
    nodes = _used(builder.nodes, outputs)
    needed = {i for n in nodes for i in n.input}
    takes = [_info(g, n, n, handed.inputs.get(n)) for n in g.inputs]
    gives = [_info(g, name, value, handed.outputs.get(value)) for name, value in zip(outputs, g.outputs, strict=True)]
    constants = [t for k, t in builder.initialisers.items() if k in needed]
    graph = helper.make_graph(nodes, "chipfit", takes, gives, constants)
    version = _IR_VERSIONS.get(builder.opset, _IR_VERSION)
    opsets = [
        helper.make_opsetid("", builder.opset),
        *(helper.make_opsetid(d, 1) for d in sorted({n.domain for n in nodes} - {""})),
    ]
    made_by = {"producer_name": "chipfit", "producer_version": __version__}
    model = helper.make_model(graph, opset_imports=opsets, ir_version=version, **made_by)
    notes = {f"chipfit.{key}": json.dumps(value, default=str) for key, value in handed.notes.items()}
    if handed.inputs or handed.outputs:
        given = {name: handed.outputs[v]._asdict() for v, name in zip(g.outputs, outputs) if v in handed.outputs}
        taken = {name: codes._asdict() for name, codes in handed.inputs.items()}
        notes["chipfit.io"] = json.dumps({"inputs": taken, "outputs": given})
    provenance = json.dumps(builder.plan.provenance, default=str)
    helper.set_model_props(
        model, {"chipfit.platform": builder.plan.platform, "chipfit.provenance": provenance, **notes}
    )
    return model


def _used(nodes: list[onnx.NodeProto], outputs: Collection[str]) -> list[onnx.NodeProto]:
    """Nodes that an output depends on, in order."""
    live, kept = set(outputs), []
    for n in reversed(nodes):
        if live.intersection(n.output):
            live.update(n.input)
            kept.append(n)
    return kept[::-1]


def _info(g: Graph, name: str, value: str, codes: QuantizedIO | None = None) -> onnx.ValueInfoProto:
    """Type and shape of an input or output; sizes that only the run tells have names."""
    if value in g.weights:
        w = g.weights[value]
        return helper.make_tensor_value_info(name, tensor_type(str(w.dtype).removeprefix("torch.")), list(w.shape))
    v = g.values[value]
    kind = tensor_type(codes.type if codes else v.dtype)
    follows = all(g.values[i].shape[:1] in ((), (None,)) for i in g.inputs) and None not in v.shape[1:]
    if value in g.outputs and value not in g.inputs and not follows:  # its first axis may be another than the inputs'
        dims = [f"{name}_{k}" if s is None else s for k, s in enumerate(v.shape)]
    else:
        dims = [("batch" if k == 0 else f"{value}_{k}") if s is None else s for k, s in enumerate(v.shape)]
    return helper.make_tensor_value_info(name, kind, dims)
