"""Opaque operators in ONNX: translated by PyTorch's own exporter, one small graph each, and spliced in."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import onnx
import torch
from onnx import numpy_helper

from chipfit.engine.kernels import execute
from chipfit.engine.run import run
from chipfit.errors import UnsupportedError
from chipfit.graph.ir import OPAQUE, Graph, Node

if TYPE_CHECKING:
    from chipfit.export.onnx.writer import Writer


class _Region(torch.nn.Module):
    """One opaque node with everything that computes its integers, as a function of tensors."""

    def __init__(
        self, nodes: list[Node], inputs: list[str], outputs: tuple[str, ...], weights: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.nodes, self.inputs, self.outputs, self.weights = nodes, inputs, outputs, weights

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        env: dict[str, Any] = dict(zip(self.inputs, tensors, strict=True))
        for n in self.nodes:
            env.update(
                zip(
                    n.outputs,
                    execute(n, [None if i is None else env[i] if i in env else self.weights[i] for i in n.inputs]),
                    strict=False,
                )
            )
        return tuple(env[o] for o in self.outputs)


def splice(writer: Writer, node: Node) -> list[str]:
    """Write an opaque node; returns the ONNX names of its outputs.

    Raises:
        UnsupportedError: PyTorch's exporter has no ONNX form for it.
    """
    graph = writer.graph
    if all(graph.values[o].dtype == "int" for o in node.outputs):
        return [""] * len(node.outputs)  # an integer: every reader recomputes it inside its own region
    nodes, inputs = _region(graph, node)
    weights = {i: graph.weights[i] for n in nodes for i in n.inputs if i in graph.weights}
    region = _Region(nodes, inputs, node.outputs, weights)
    if not inputs:  # a constant
        return [writer.const(t.detach().numpy()) for t in region()]
    example = _values(writer, inputs)
    names = {v: writer._read(v, node) or "" for v in inputs}
    try:
        model = _translate(region, example, [graph.values[v].shape for v in inputs], writer.opset)
    except Exception as e:  # torch.onnx raises many types
        of_keras = node.attrs["target"].startswith("keras:")
        raise UnsupportedError(
            f"Operator '{node.layer_type if of_keras else node.attrs['target']}' of '{node.who}' has no ONNX form",
            where=node.source,
            got=str(e).strip().splitlines()[0][:200] if str(e).strip() else type(e).__name__,
            hint="replace it by standard operators"
            + (", or set KERAS_BACKEND=torch, on which many layers have one" if of_keras else ", or export without it"),
        ) from e
    prefix = writer.fresh("opaque")
    rename = {i.name: names[v] for i, v in zip(model.graph.input, inputs, strict=True)}

    def name(n: str) -> str:
        return rename.get(n, f"{prefix}/{n}") if n else ""

    for t in model.graph.initializer:
        writer.initialisers[name(t.name)] = numpy_helper.from_array(numpy_helper.to_array(t), name(t.name))
    for n in model.graph.node:
        copy = onnx.NodeProto()
        copy.CopyFrom(n)
        copy.name = name(n.name or n.output[0])
        copy.input[:] = [name(i) for i in n.input]
        copy.output[:] = [name(o) for o in n.output]
        writer.nodes.append(copy)
    return [name(o.name) for o in model.graph.output]


def _region(graph: Graph, node: Node) -> tuple[list[Node], list[str]]:
    """The node with every node that computes integers or constants for it, and the tensors that they read."""
    producers = graph.producers()
    members: dict[str, Node] = {}
    inputs: list[str] = []

    def visit(n: Node) -> None:
        if n.name in members:
            return
        for i in n.inputs:
            if i is None or i in graph.weights:
                continue
            p = producers.get(i)
            constant = p is not None and p.op == OPAQUE and not [j for j in p.inputs if j is not None]
            if p is not None and (graph.values[i].dtype == "int" or constant):
                visit(p)
            elif i not in inputs:
                inputs.append(i)
        members[n.name] = n

    visit(node)
    return [n for n in graph.nodes if n.name in members], inputs


def _values(writer: Writer, names: list[str]) -> list[torch.Tensor]:
    from chipfit.export.onnx.writer import example_inputs

    if writer.example_values is None:
        with torch.no_grad():
            every = [v for v, d in writer.graph.values.items() if d.dtype != "int"]
            writer.example_values = run(writer.graph, example_inputs(writer.graph), keep=every)
    return [writer.example_values[n] for n in names]


def _translate(
    region: _Region, example: list[torch.Tensor], shapes: list[tuple[int | None, ...]], opset: int
) -> onnx.ModelProto:
    dynamic = tuple({k: torch.export.Dim.AUTO for k, s in enumerate(shape) if s is None} for shape in shapes)
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.export.export(region, tuple(example), dynamic_shapes=(dynamic,), strict=False)
            made = torch.onnx.export(program, (), dynamo=True, opset_version=opset, verbose=False, optimize=True)
    finally:
        logging.disable(disabled)
    assert made is not None  # torch returns None only when it writes the file itself
    if made is None:
        raise RuntimeError("torch.onnx.export returned nothing")
    return made.model_proto
