"""Opaque operators in ONNX: PyTorch's own exporter translates each to a small graph, which is spliced in."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import torch
from onnx import numpy_helper

from chipfit.engine.examples import example_inputs
from chipfit.engine.kernels import execute
from chipfit.engine.opaque import resolve_target
from chipfit.engine.process import TRACING, quiet
from chipfit.engine.run import run
from chipfit.errors import UnsupportedError, first_line
from chipfit.export.onnx.builder import OnnxBuilder
from chipfit.graph.ir import OPAQUE, Graph, Node

#: values between opaque nodes that ONNX does not have: every node that reads them computes them again
_INSIDE = ("int", "complex32", "complex64", "complex128")


_REFUSALS = torch.onnx.OnnxExporterError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError


class Region(torch.nn.Module):
    """An opaque node, with all nodes that compute integers, complex numbers or constants for it, as one function."""

    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__()
        producers = graph.producers()
        members: dict[str, Node] = {}
        inputs: dict[str, None] = {}

        def visit(n: Node) -> None:
            members[n.name] = n
            for i in n.inputs:
                if i is None or i in graph.weights:
                    continue
                p = producers.get(i)
                constant = p is not None and p.op == OPAQUE and not any(p.inputs)
                if p is None or not (graph.values[i].dtype in _INSIDE or constant):
                    inputs[i] = None
                elif p.name not in members:
                    visit(p)

        visit(node)
        self.nodes = [n for n in graph.nodes if n.name in members]
        self.inputs, self.outputs = list(inputs), node.outputs
        self.weights = {i: graph.weights[i] for n in self.nodes for i in n.inputs if i in graph.weights}

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        env: dict[str, Any] = {**self.weights, **dict(zip(self.inputs, tensors, strict=True))}
        for n in self.nodes:
            results = execute(n, [None if i is None else env[i] for i in n.inputs])
            env.update(zip(n.outputs, results, strict=False))
        return tuple(env[o] for o in self.outputs)


def splice(builder: OnnxBuilder, node: Node) -> list[str]:
    """Write an opaque node and return the ONNX names of its outputs.

    Raises:
        UnsupportedError: PyTorch's exporter has no ONNX form for it.
    """
    values = builder.graph.values
    if all(values[o].dtype in _INSIDE for o in node.outputs):
        return [""] * len(node.outputs)
    own = getattr(resolve_target(node.attrs["target"]), "node", None)
    if own is not None:  # an operator of ONNX itself
        return _copied(builder, own, [builder.read(v, node) for v in node.inputs])
    region = Region(builder.graph, node)
    for weight in region.weights:
        stored, raw = builder.plan.stored(weight), {(weight, n.name) for n in region.nodes} & builder.plan.float_edges
        if stored is not None and not raw:
            region.weights[weight] = stored.round(region.weights[weight].detach())
    if not region.inputs:  # a constant
        return [builder.const(t.detach().numpy()) for t in region()]
    names = {v: builder.read(v, node) or "" for v in region.inputs}
    shapes = [values[v].shape for v in region.inputs]
    try:
        model = translate(region, example_values(builder, region.inputs), shapes, builder.opset)
    except (*_REFUSALS, RuntimeError) as e:  # RuntimeError: of the example run before translation
        keras = ":" in node.attrs["target"]
        way = "set KERAS_BACKEND=torch, on which many layers have one" if keras else "export without it"
        what = f"Operator '{node.called}' of '{node.display_name}' has no ONNX form"
        hint = f"replace it by standard operators, or {way}"
        raise UnsupportedError(what, where=node.source, got=first_line(e.__cause__ or e), hint=hint) from e
    prefix = builder.fresh("opaque")
    outside = {i.name: names[v] for i, v in zip(model.graph.input, region.inputs, strict=True)}

    def name(n: str) -> str:
        return outside.get(n, f"{prefix}/{n}") if n else ""

    for t in model.graph.initializer:
        builder.initialisers[name(t.name)] = numpy_helper.from_array(numpy_helper.to_array(t), name(t.name))
    builder.nodes += [_renamed(n, name) for n in model.graph.node]
    return [name(o.name) for o in model.graph.output]


def opset_of(node: Node) -> int:
    """Return the opset whose form an opaque operator has that was read from an ONNX file; 0 for others."""
    target: Any = resolve_target(node.attrs["target"])
    own = getattr(target, "node", None)
    return 0 if own is None or own.domain else int(onnx.defs.get_schema(own.op_type, target.opset).since_version)


def _copied(builder: OnnxBuilder, own: onnx.NodeProto, inputs: Sequence[str | None]) -> list[str]:
    """Write an operator that was read from an ONNX file."""
    given = dict(zip([i for i in own.input if i], inputs, strict=True))
    prefix = builder.fresh("opaque")
    copy = _renamed(own, lambda n: (given[n] or "") if n in given else n and f"{prefix}/{n}")
    builder.nodes.append(copy)
    return list(copy.output)


def _renamed(node: onnx.NodeProto, name: Callable[[str], str]) -> onnx.NodeProto:
    """Return a copy of a node with other names of tensors, in the bodies of loops and branches too."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = name(node.name or node.output[0])
    copy.input[:] = [name(i) for i in node.input]
    copy.output[:] = [name(o) for o in node.output]
    for body in (g for a in copy.attribute for g in (a.g, *a.graphs) if g.output):
        nodes = [_renamed(n, name) for n in body.node]
        del body.node[:]
        body.node.extend(nodes)
        for value in (*body.input, *body.output, *body.initializer, *body.value_info):
            value.name = name(value.name)
    return copy


def example_values(builder: OnnxBuilder, names: Sequence[str]) -> list[torch.Tensor]:
    """Return values for example inputs; the whole graph runs once for a file."""
    if not builder.examples:
        tensors = [v for v, d in builder.graph.values.items() if d.dtype != "int"]
        with torch.no_grad():
            builder.examples |= run(builder.graph, example_inputs(builder.graph), keep=tensors)
    return [builder.examples[n] for n in names]


def translate(
    region: Region, example: list[torch.Tensor], shapes: list[tuple[int | None, ...]], opset: int
) -> onnx.ModelProto:
    dynamic = tuple({k: torch.export.Dim.DYNAMIC for k, s in enumerate(shape) if s is None} for shape in shapes)
    with TRACING, quiet():
        own = tuple(t.clone() for t in example)  # of a view, torch would check the size of what it is a view of
        program = torch.export.export(region, own, dynamic_shapes=(dynamic,), strict=False)
        made = torch.onnx.export(program, (), dynamo=True, opset_version=opset, verbose=False, optimize=True)
    if made is None:  # torch returns None only when it writes the file itself
        raise RuntimeError("torch.onnx.export returned nothing")
    onnx.checker.check_model(made.model_proto, full_check=True)
    return made.model_proto
