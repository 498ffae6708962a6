"""Writer of ONNX files: a Graph under a Plan, with QuantizeLinear / DequantizeLinear and integer initialisers."""

import json
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from chipfit._version import __version__
from chipfit.engine.trees import batch_axes
from chipfit.errors import ExportError, UnsupportedError, first_line
from chipfit.export.io_spec import IOSpec, QuantizedIO, io_spec_of, output_names
from chipfit.export.onnx.builder import OnnxBuilder, refuse, tensor_type
from chipfit.export.onnx.opaque import opset_of, splice
from chipfit.export.onnx.ops import CONDITIONS, OPSETS, REFUSED, WRITERS
from chipfit.files import write_atomically
from chipfit.frameworks.onnx.live import live_nodes, reads_of
from chipfit.graph.edit import replace_values
from chipfit.graph.ir import OPAQUE, Graph, Node
from chipfit.graph.linear import CONVS
from chipfit.passes.decompose import RULES, decompose
from chipfit.passes.layout import same_numbers
from chipfit.plan.record import Plan

#: opset -> version of the file format that came with it, and the version of other opsets
_IR_VERSIONS, _IR_VERSION = {13: 7, 17: 8, 18: 8, 21: 10}, 10


def export_onnx(
    graph: Graph,
    plan: Plan | None,
    path: str | Path,
    *,
    opset: int | None = None,
    form: type[OnnxBuilder] = OnnxBuilder,
    **ends: Any,
) -> Path:
    """Write the model to `path`.

    Args:
        graph, plan: the model; without a plan the float network is written.
        path: the `.onnx` file; it appears complete or not at all.
        opset: ONNX operator set; the lowest that holds everything when omitted (13; 17 for layer norms, 18 for opaque
            operators, 21 for 4- and 16-bit integers).
        form: how quantizers are written.
        ends: see `chipfit.export.io_spec.io_spec_of`. The metadata entry "chipfit.io" has types, scales and zero
            points of quantized inputs and outputs; "chipfit.labels", "chipfit.mean" and "chipfit.std" are lists. All
            are JSON.

    Raises:
        UnsupportedError: operators or formats that ONNX cannot hold, all named at once; nothing is written.
        ConfigError: see `io_spec_of`.
        ExportError: the checker refuses the model or the disk refuses the file.
    """
    plan = plan or Plan()
    io = io_spec_of(graph, plan, **{"io": "float", **ends})
    lowest = lowest_opset(graph, plan, form)
    if opset is not None and opset < lowest:
        hint = "leave `opset` out"
        raise UnsupportedError(f"This model needs ONNX opset {lowest}", got=opset, allowed=f">= {lowest}", hint=hint)
    model = _model(_build(form(*_writable(graph, plan, form), opset or lowest), io), io)
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as e:  # the last: over 2 GB
        raise ExportError(f"The ONNX checker refuses the model: {first_line(e)}") from e
    return write_atomically(Path(path), model.SerializeToString())


def lowest_opset(graph: Graph, plan: Plan, form: type[OnnxBuilder] = OnnxBuilder) -> int:
    needed = [OPSETS[n.op] for n in graph.nodes if n.op in OPSETS]
    return max([form.opset_of_formats(plan), *needed, *(opset_of(n) for n in graph.nodes if n.op == OPAQUE)])


def _writable(graph: Graph, plan: Plan, form: type[OnnxBuilder]) -> tuple[Graph, Plan]:
    """Return the graph in operators that ONNX has, and its plan.

    Raises:
        UnsupportedError: ONNX has no form for some operators or grids.
    """
    without_form = {n.name for n in graph.nodes if n.op in CONDITIONS and not CONDITIONS[n.op](n)}
    graph, plan, reasons = decompose(graph, plan, WRITERS, besides=without_form)
    unknown = [n for n in graph.nodes if n.op != OPAQUE and n.op not in WRITERS]
    for n in unknown:
        if n.name in reasons:
            refuse(n, reasons[n.name])
    if unknown:
        got = ", ".join(f"{n.op} '{n.display_name}' ({REFUSED.get(n.op, 'unknown')})" for n in unknown)
        allowed = ", ".join(sorted({*WRITERS, *RULES}))
        hint = "replace them in the model, or export the part without them"
        raise UnsupportedError("These operators have no ONNX writer", got=got, allowed=allowed, hint=hint)
    form.check(graph, plan)
    return (in_convolutions(graph, plan) if form is OnnxBuilder else graph), plan


def _build(b: OnnxBuilder, io: IOSpec) -> OnnxBuilder:
    """Write every node of the graph, in order."""
    for name in b.graph.inputs:
        if name in io.inputs:
            b.quantized_input(name, io.inputs[name])
        else:
            b.publish(name, name)
    for n in b.graph.nodes:
        b.begin(n)
        names = splice(b, n) if n.op == OPAQUE else WRITERS[n.op](b, n, [b.read(i, n) for i in n.inputs])
        for value, name in zip(n.outputs, [names] if isinstance(names, str) else names, strict=False):
            b.publish(value, name)
    return b


def _model(b: OnnxBuilder, io: IOSpec) -> onnx.ModelProto:
    g, names = b.graph, output_names(b.graph, {*b.graph.values, *b.graph.weights})
    for i, (value, name) in enumerate(zip(g.outputs, names, strict=True)):
        source = b.weight(value, True) if value in g.weights else b.after_quantizer[value]
        if value in io.outputs:
            source = b.quantized_output(value, io.outputs[value])
        if not source:  # nodes of ONNX hold no such values, see `opaque`
            hint = "return torch.view_as_real(...) of complex numbers, or their magnitudes"
            got = g.values[value].dtype
            raise UnsupportedError(f"Output '{name}' has no ONNX form", got=got, allowed="real numbers", hint=hint)
        b.nodes.append(helper.make_node("Identity", [source], [name], name=f"output_{i}"))
    nodes = live_nodes(b.nodes, names)
    read = {i for n in nodes for i in reads_of(n)}
    inputs = [value_info(g, n, n, io.inputs.get(n)) for n in g.inputs]
    outputs = [value_info(g, name, value, io.outputs.get(value)) for name, value in zip(names, g.outputs, strict=True)]
    constants = [t for k, t in b.initialisers.items() if k in read]
    graph = helper.make_graph(nodes, "chipfit", inputs, outputs, constants)
    domains = sorted({n.domain for n in nodes} - {""})
    opsets = [helper.make_opsetid("", b.opset), *(helper.make_opsetid(d, 1) for d in domains)]
    version = _IR_VERSIONS.get(b.opset, _IR_VERSION)
    producer = {"producer_name": "chipfit", "producer_version": __version__}
    model = helper.make_model(graph, opset_imports=opsets, ir_version=version, **producer)
    notes = {f"chipfit.{key}": json.dumps(value, default=str) for key, value in io.notes.items()}
    if io.inputs or io.outputs:
        out = {name: io.outputs[v]._asdict() for v, name in zip(g.outputs, names) if v in io.outputs}
        notes["chipfit.io"] = json.dumps({"inputs": {k: q._asdict() for k, q in io.inputs.items()}, "outputs": out})
    provenance = json.dumps(b.plan.published_provenance, default=str)
    helper.set_model_props(model, {"chipfit.platform": b.plan.platform, "chipfit.provenance": provenance, **notes})
    return model


def value_info(g: Graph, name: str, value: str, io: QuantizedIO | None = None) -> onnx.ValueInfoProto:
    """Return type and shape of an input or output; open sizes have names."""
    if value in g.weights:
        w = g.weights[value]
        return helper.make_tensor_value_info(name, tensor_type(str(w.dtype).removeprefix("torch.")), list(w.shape))
    v = g.values[value]
    kind = tensor_type(io.type if io else v.dtype)
    batch = batch_axes(g)
    batched = all(batch.get(i) == 0 or not g.shape(i) for i in g.inputs) and None not in v.shape[1:]
    if value in g.outputs and value not in g.inputs and not batched:  # its first axis may be another than the inputs'
        dims = [f"{name}_{k}" if s is None else s for k, s in enumerate(v.shape)]
    else:
        axis = batch.get(value, 0 if value not in g.inputs else None)
        dims = [("batch" if k == axis else f"{value}_{k}") if s is None else s for k, s in enumerate(v.shape)]
    return helper.make_tensor_value_info(name, kind, dims)


def in_convolutions(graph: Graph, plan: Plan) -> Graph:
    """Return the graph with each Pad that only convolutions read as their padding; integers are padded by zero points.

    The Pad adds zeros along the spatial axes alone, and keeps scale and zero point.
    """
    users, raw = graph.users(), {v for v, _ in plan.float_edges}
    grouped = {name for group in plan.groups for name in group[1:]}
    folded: dict[str, Node] = {}  #: result of a Pad -> the Pad
    for n in graph.nodes:
        readers = users.get(n.output, [])
        convs = all(r.op in CONVS and r.data == n.output and r.inputs.count(n.output) == 1 for r in readers)
        fits = n.op == "Pad" and readers and convs and n.name not in grouped and n.output not in graph.outputs
        if fits and _adds_zeros(n) and raw.isdisjoint((n.data, n.output)) and same_numbers(plan, n.data, n.output):
            folded[n.output] = n
    if not folded:
        return graph
    graph = graph.copy()
    graph.nodes = [_padded(n, folded[n.data]) if n.op in CONVS and n.data in folded else n for n in graph.nodes]
    return replace_values(graph, {value: pad.data for value, pad in folded.items()})


def _adds_zeros(n: Node) -> bool:
    ends = n.attrs["padding"]
    plain = n.attrs["mode"] == "constant" and n.attrs["value"] == 0 and not any((*ends[0], *ends[1]))
    return plain and min(end for pair in ends for end in pair) >= 0


def _padded(n: Node, pad: Node) -> Node:
    both = zip(n.attrs["padding"], pad.attrs["padding"][2:], strict=True)
    padding = tuple((a + c, b + d) for (a, b), (c, d) in both)
    return n.with_(attrs={**n.attrs, "padding": padding})
