"""Opaque operators in ONNX: PyTorch's own exporter translates each into a small graph, which takes its place."""

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

#: dtypes that have no tensors in ONNX: a region recomputes such values instead of reading them
_NOT_IN_ONNX = ("int", "complex32", "complex64", "complex128")
#: errors of PyTorch's exporter and of ONNX's checks that mean: no ONNX form
_REFUSALS = torch.onnx.OnnxExporterError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError


class Region(torch.nn.Module):
    """An opaque node as a module, together with the nodes before it whose results ONNX cannot pass on as tensors.

    These are Python integers, complex numbers, and constants that an opaque node without operands makes.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        super().__init__()
        producers = graph.producers()
        members: dict[str, Node] = {}
        inputs: dict[str, None] = {}

        def add(n: Node) -> None:
            members[n.name] = n
            for i in n.inputs:
                if i is None or i in graph.weights:
                    continue
                p = producers.get(i)
                constant = p is not None and p.op == OPAQUE and not any(p.inputs)
                if p is None or not (graph.values[i].dtype in _NOT_IN_ONNX or constant):
                    inputs[i] = None
                elif p.name not in members:
                    add(p)

        add(node)
        self.nodes = [n for n in graph.nodes if n.name in members]
        self.inputs, self.outputs = list(inputs), node.outputs
        self.weights = {i: graph.weights[i] for n in self.nodes for i in n.inputs if i in graph.weights}

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        """Return the outputs of the opaque node."""
        env: dict[str, Any] = {**self.weights, **dict(zip(self.inputs, tensors, strict=True))}
        for n in self.nodes:
            results = execute(n, [None if i is None else env[i] for i in n.inputs])
            env.update(zip(n.outputs, results, strict=False))
        return tuple(env[o] for o in self.outputs)


def splice(builder: OnnxBuilder, node: Node) -> list[str]:
    """Write an opaque node and return the ONNX names of its outputs; "" for an output whose type ONNX lacks.

    Raises:
        UnsupportedError: PyTorch's exporter has no ONNX form for it.
    """
    values = builder.graph.values
    if all(values[o].dtype in _NOT_IN_ONNX for o in node.outputs):
        return [""] * len(node.outputs)
    source = getattr(resolve_target(node.attrs["target"]), "node", None)
    if source is not None:  # an operator of ONNX itself
        return _copy_onnx_operator(builder, source, [builder.read(v, node) for v in node.inputs])
    region = Region(builder.graph, node)
    for weight in region.weights:
        stored, readers = builder.plan.stored(weight), {(weight, n.name) for n in region.nodes}
        if stored is not None and readers.isdisjoint(builder.plan.float_edges):
            region.weights[weight] = stored.round(region.weights[weight].detach())
    if not region.inputs:  # a constant
        return [builder.const(t.detach().numpy()) for t in region()]
    names = {v: builder.read(v, node) or "" for v in region.inputs}
    shapes = [values[v].shape for v in region.inputs]
    try:
        model = translate(region, example_values(builder, region.inputs), shapes, builder.opset)
    except (*_REFUSALS, RuntimeError) as e:  # RuntimeError: the example run failed
        of_keras = ":" in node.attrs["target"]
        remedy = "set KERAS_BACKEND=torch, on which many layers have one" if of_keras else "export without it"
        what = f"Operator '{node.called}' of '{node.display_name}' has no ONNX form"
        hint = f"replace it by standard operators, or {remedy}"
        raise UnsupportedError(what, where=node.source, got=first_line(e.__cause__ or e), hint=hint) from e
    prefix = builder.fresh("opaque")
    operands = {i.name: names[v] for i, v in zip(model.graph.input, region.inputs, strict=True)}

    def rename(tensor: str) -> str:
        return operands.get(tensor, f"{prefix}/{tensor}") if tensor else ""

    for t in model.graph.initializer:
        builder.initialisers[rename(t.name)] = numpy_helper.from_array(numpy_helper.to_array(t), rename(t.name))
    builder.nodes += [_renamed(n, rename) for n in model.graph.node]
    return [rename(o.name) for o in model.graph.output]


def opset_of(node: Node) -> int:
    """Return the opset that defined an opaque operator as its ONNX file has it; 0 if it comes from elsewhere."""
    target: Any = resolve_target(node.attrs["target"])
    source = getattr(target, "node", None)
    if source is None or source.domain:
        return 0
    return int(onnx.defs.get_schema(source.op_type, target.opset).since_version)


def _copy_onnx_operator(builder: OnnxBuilder, source: onnx.NodeProto, inputs: Sequence[str | None]) -> list[str]:
    """Write an operator as the ONNX file has it from which it was read, between other tensors."""
    given = dict(zip([i for i in source.input if i], inputs, strict=True))
    prefix = builder.fresh("opaque")
    copy = _renamed(source, lambda n: (given[n] or "") if n in given else n and f"{prefix}/{n}")
    builder.nodes.append(copy)
    return list(copy.output)


def _renamed(node: onnx.NodeProto, rename: Callable[[str], str]) -> onnx.NodeProto:
    """Return a copy of a node with other names of tensors, in the bodies of loops and branches too."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = rename(node.name or node.output[0])
    copy.input[:] = [rename(i) for i in node.input]
    copy.output[:] = [rename(o) for o in node.output]
    for body in (g for a in copy.attribute for g in (a.g, *a.graphs) if g.output):
        nodes = [_renamed(n, rename) for n in body.node]
        del body.node[:]
        body.node.extend(nodes)
        for value in (*body.input, *body.output, *body.initializer, *body.value_info):
            value.name = rename(value.name)
    return copy


def example_values(builder: OnnxBuilder, names: Sequence[str]) -> list[torch.Tensor]:
    """Return the float values of these names for example inputs; the graph runs once for each file written."""
    if not builder.examples:
        tensors = [v for v, d in builder.graph.values.items() if d.dtype != "int"]
        with torch.no_grad():
            builder.examples |= run(builder.graph, example_inputs(builder.graph), keep=tensors)
    return [builder.examples[n] for n in names]


def translate(
    region: Region, example: list[torch.Tensor], shapes: list[tuple[int | None, ...]], opset: int
) -> onnx.ModelProto:
    """Translate a region with PyTorch's exporter.

    Args:
        example: inputs with which it is traced.
        shapes: shapes of the inputs; None for a size that stays open.
    """
    dynamic = tuple({k: torch.export.Dim.DYNAMIC for k, s in enumerate(shape) if s is None} for shape in shapes)
    with TRACING, quiet():
        inputs = tuple(t.clone() for t in example)  # torch would check the size of the tensor behind a view
        program = torch.export.export(region, inputs, dynamic_shapes=(dynamic,), strict=False)
        made = torch.onnx.export(program, (), dynamo=True, opset_version=opset, verbose=False, optimize=True)
    if made is None:  # torch returns None only when it writes the file itself
        raise RuntimeError("torch.onnx.export returned nothing")
    onnx.checker.check_model(made.model_proto, full_check=True)
    return made.model_proto
