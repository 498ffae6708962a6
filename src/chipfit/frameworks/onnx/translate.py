"""Translate the nodes of an ONNX model to a Graph; what depends on constants and sizes alone is computed."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx.reference import ReferenceEvaluator

import chipfit.frameworks.onnx.along
import chipfit.frameworks.onnx.einsum
import chipfit.frameworks.onnx.recurrent
import chipfit.frameworks.onnx.resize
import chipfit.frameworks.onnx.scatter  # noqa: F401 -- registers readers
from chipfit.errors import CaptureError, raise_bug, short_message
from chipfit.frameworks.onnx.call import OnnxCall, OnnxGraphBuilder, Operand
from chipfit.frameworks.onnx.functions import body
from chipfit.frameworks.onnx.fused import OPSET, definition
from chipfit.frameworks.onnx.limits import check_attributes, check_results
from chipfit.frameworks.onnx.model import OnnxModel, domain_of
from chipfit.frameworks.onnx.read import read
from chipfit.frameworks.onnx.sequences import makes_or_reads, read_sequence
from chipfit.frameworks.onnx.tidy import tidy
from chipfit.frameworks.onnx.unroll import CONTROL_FLOW, unrolled
from chipfit.frameworks.reading import Unreadable
from chipfit.graph.builder import Origin
from chipfit.graph.ir import Graph
from chipfit.graph.removed import remember_aliases, remember_removed
from chipfit.operators.table import SIZED_BY_DATA

#: results of at most this many elements are computed while a model is read, further ones by the engine
_FOLDED = 1 << 16
#: weights of at most this many elements are moved while a model is read
_MOVED = 1 << 28
#: nodes that the steps of all loops may have
_MOST_UNROLLED = 10_000
TOO_MANY_STEPS = "The steps of the model's loops have too many nodes"
_MOVES = "Reshape Transpose Squeeze Unsqueeze Flatten Identity".split()
_RANDOM = "RandomNormal RandomUniform RandomNormalLike RandomUniformLike Bernoulli Multinomial".split()


def translate(
    model: OnnxModel, variants: Sequence[Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype], fixed: int
) -> tuple[Graph, list[str]]:
    """Return a Graph and its outputs.

    Args:
        variants: shapes of the inputs; sizes in which they differ stay open.
        dtypes: types of the data for each input.
        fixed: the batch size that the file declares, if it is to be read with an open one; else 0.

    Raises:
        CaptureError: A node cannot be read.
    """
    if len(variants) == 1 and any(n.op_type in SIZED_BY_DATA for n in model.graph):
        variants = [*variants, *variants]  # between which sizes differ that depend on data
    t = Translator(model, len(variants))
    t.builder.fixed = fixed
    t.inputs(variants, dtypes)
    t.nodes(model.graph)
    outputs = [t.output(v.name or "") for v in model.graph.outputs]
    before = t.builder.graph.copy()
    before.outputs = outputs
    graph, outputs = tidy(t.builder.graph, outputs)
    graph = remember_removed(before, graph)
    remember_aliases(graph, t.names, before)
    return graph, outputs


class Translator:
    """One pass over the nodes of a model."""

    def __init__(self, model: OnnxModel, count: int) -> None:
        self.model, self.builder = model, OnnxGraphBuilder(model, count)
        opsets = model.graph.opset_imports
        self.names: dict[str, tuple[str, str]] = {}  #: node -> its first result, and the value that it became
        self.unrolled_nodes = 0  #: number of nodes of loops and branches that were read, once for each step
        self.inside = 0  #: number of definitions by simpler operators that are being read
        self.opsets = {"": opsets.get("", opsets.get("ai.onnx", 1)), "com.microsoft": 1}

    def inputs(self, variants: Sequence[Sequence[tuple[int, ...]]], dtypes: Sequence[torch.dtype]) -> None:
        """Add the inputs, see `translate`, and the initialisers."""
        for k, value in enumerate(self.model.inputs):
            shapes = [v[k] for v in variants]
            metas = [torch.empty(s, dtype=dtypes[k], device="meta") for s in shapes]
            self.builder.env[value.name or ""] = self.cast(value, self.builder.input(value.name or "", metas))
            if k == 0 and shapes[0]:
                self.builder.batch = tuple(s[0] for s in shapes)
        for name, value in self.model.graph.initializers.items():
            self.builder.env[name] = self.initialiser(name, value.const_value)

    def cast(self, value: ir.Value, x: Operand) -> Operand:
        """Return an input in the type that the model declares; all float types are float32."""
        if value.dtype is None:
            return x
        want = torch.float32 if value.dtype.is_floating_point() else getattr(torch, value.dtype.name.lower(), x.dtype)
        if want is x.dtype:
            return x
        name = str(want).removeprefix("torch.")
        (made,) = self.builder.emit(Origin(), f"{x.name}_cast", "Cast", [x.name], {"dtype": name}, [(x.shape, name)])
        return Operand(tuple(m.to(want) for m in x.metas), made.name)

    def initialiser(self, name: str, tensor: ir.TensorProtocol | None) -> Operand:
        """Return an initialiser, or a constant of several numbers, which are read now.

        Raises:
            CaptureError: They cannot be read.
        """
        try:
            array = self.model.stored.array(tensor)
        except Exception as e:  # of files and types
            raise_bug(e)
            raise CaptureError(f"The data of '{name}' cannot be read: {short_message(e)}") from e
        array = _plain_type(array) if array.size <= _FOLDED else array  # larger ones are converted when they are read
        return self.builder.constants([array], name, array.dtype.kind not in "biu" and array.ndim > 0)

    def nodes(self, graph: Iterable[ir.Node]) -> None:
        """Read nodes in execution order, and enter their results by the names of the file."""
        for node in graph:
            found = self.node(node)
            for value, x in zip(node.outputs, found, strict=False):
                if value.name and x is not None:
                    self.builder.env[value.name] = x
                    if not isinstance(x, list) and x.name and not self.inside:
                        self.names.setdefault(node.name or value.name, (value.name, x.name))

    def node(self, node: ir.Node) -> Sequence[Operand | None]:
        """Return the results of a node."""
        kind = node.op_type if not domain_of(node) else ""
        if not any(v.name for v in node.outputs):
            return []
        missing = [v.name for v in node.inputs if v is not None and v.name and v.name not in self.builder.env]
        if missing:
            raise CaptureError(f"Nothing computes the input '{missing[0]}'", where=node.name or node.op_type)
        inputs = [None if v is None or not v.name else self.builder.env[v.name] for v in node.inputs]
        try:
            if kind not in CONTROL_FLOW and makes_or_reads(kind, inputs):
                return read_sequence(OnnxCall(self.builder, node, self.opsets[domain_of(node)]))
            if kind in ("Shape", "Size"):
                return [self.builder.constants(_sizes(node, inputs[0].metas))]  # type: ignore[union-attr]  # it has one
            numbers = [x is None or (not isinstance(x, list) and bool(x.numbers and not x.name)) for x in inputs]
            if kind == "Identity" and numbers == [True]:
                return inputs
            plain = node.op_type not in CONTROL_FLOW  # nodes inside control flow are checked one by one
            if _trains(node, inputs, self.opsets[domain_of(node)]):
                what = f"operator '{node.op_type}' of '{node.name or node.outputs[0].name}' is in training mode"
                advice = "export the model as it is used, in PyTorch after model.eval()"
                self.builder.graph.notes.append(f"warning: {what}: {advice}")
            check_attributes(node)
            if plain and (any(numbers) or not inputs):
                self.check(node, inputs)
            value = node.attributes.get("value") if kind == "Constant" and not self.inside else None
            if value is not None and value.as_tensor().size > 1:  # some exporters write all weights in this way
                return [self.initialiser(node.outputs[0].name or "", value.as_tensor())]
            if plain and all(numbers) and kind not in _RANDOM and (found := self.folded(node, inputs)) is not None:
                return found
            return self.read(node)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as e:
            what = f"Operator '{node.op_type}' is malformed, or not for these sizes: {short_message(e)}"
            raise CaptureError(what, where=node.name or node.op_type) from e

    def check(self, node: ir.Node, inputs: Sequence[Operand | None]) -> None:
        """Check the sizes of a node's results before they are computed; raises as `check_results`."""
        proto, opset = _single(node), self.opsets[domain_of(node)]
        for k in range(self.builder.count):
            operands = {f"i{i}": x.known(k) for i, x in enumerate(inputs) if x is not None}
            check_results(proto, opset, operands, self.builder.rows(k), node.name or node.op_type)

    def read(self, node: ir.Node) -> Sequence[Operand | None]:
        """Read a node by its reader, or as an opaque one."""
        call = OnnxCall(self.builder, node, self.opsets[domain_of(node)])
        try:
            found = unrolled(call, self.inner)
            return read(call) if found is None else found
        except Unreadable as e:
            if (parts := self.by_definition(call)) is not None:
                return parts
            if self.inside:
                raise e
        try:
            return call.opaque()
        except Unreadable as e:
            what = f"Operator '{node.op_type}' needs a size that is open as a number"
            raise CaptureError(what, where=node.name or call.name, hint="give batches of one size") from e

    def by_definition(self, call: OnnxCall) -> list[Operand | None] | None:
        """Read an operator that is defined by simpler ones as these; None if one of them has no reader."""
        version, nodes = OPSET, definition(call)
        if not nodes:
            shapes = [None if x is None else x.metas[0] for x in call.inputs]
            version, nodes = body(call.node, call.opset, shapes, call.outputs)
        if not nodes:
            return None
        mark, opset = self.builder.mark(), self.opsets[""]
        self.inside, self.opsets[""] = self.inside + 1, version
        try:
            self.nodes(nodes)
            return [self.builder.env[o] if o else None for o in call.outputs]
        except (Unreadable, CaptureError):
            self.builder.undo(mark)
            return None
        finally:
            self.inside, self.opsets[""] = self.inside - 1, opset
            for value in (v for n in nodes for v in n.outputs):
                self.builder.env.pop(value.name or "", None)

    def inner(self, graph: ir.Graph, inputs: Sequence[Operand]) -> list[Operand]:
        """Read a graph of control flow with these inputs; return its outputs."""
        self.unrolled_nodes += len(graph)
        if self.unrolled_nodes > _MOST_UNROLLED:
            allowed = f"at most {_MOST_UNROLLED:,}"
            raise CaptureError(TOO_MANY_STEPS, where=self.model.where, allowed=allowed, hint="shorten the loops")
        self.builder.env |= {v.name or "": x for v, x in zip(graph.inputs, inputs, strict=True)}
        for name, value in graph.initializers.items():
            self.builder.env[name] = self.initialiser(name, value.const_value)
        self.nodes(graph)
        return [self.builder.env[v.name or ""] for v in graph.outputs]

    def folded(self, node: ir.Node, inputs: Sequence[Operand | None]) -> list[Operand] | None:
        """Return the results of a node whose inputs are numbers; None if they are many, or it cannot be computed."""
        constant = all(x is None or x.constant is not None for x in inputs)
        most = _MOVED if constant and node.op_type in (*_MOVES, "Slice", "Split") else _FOLDED
        if sum(x.numbers[0].size for x in inputs if x is not None) > most:
            return None
        try:
            evaluator = _evaluator(_single(node), self.opsets[domain_of(node)])
            results = []
            for k in range(1 if constant else self.builder.count):
                feeds = {f"i{i}": x.numbers[k] for i, x in enumerate(inputs) if x is not None}
                results.append([np.asarray(y) for y in evaluator.run(None, feeds)])
        except Exception as e:  # evaluators of single operators raise anything
            raise_bug(e)
            return None
        if any(y.dtype.kind not in "biuf" or y.size > max(64 * _FOLDED, most) for r in results for y in r):
            return None
        found = [self.builder.constants([_plain_type(y) for y in column]) for column in zip(*results, strict=True)]
        sources = [x for x in inputs if x is not None and x.source and x.trainable]
        if len(sources) == len(found) == 1 and node.op_type in _MOVES:  # a layer's weight in another order
            found[0].source, found[0].trainable = sources[0].source, True
            found[0].change = f"{sources[0].change}>{node.outputs[0].name}"
        return found

    def output(self, name: str) -> str:
        """Return the value or weight that an output of the model became."""
        if name not in self.builder.env:
            raise CaptureError(f"Nothing computes the output '{name}'")
        x = self.builder.env[name]
        if isinstance(x, list):
            raise CaptureError(f"Output '{name}' is a sequence of tensors", hint="let the model return the tensors")
        if x.name:
            return x.name
        if x.constant is None:
            raise CaptureError(f"Output '{name}' depends on a size alone", hint="remove it from the outputs")
        return self.builder.weight(x, name)


def _trains(node: ir.Node, inputs: Sequence[Operand | None], opset: int) -> bool:
    """Return whether an operator computes as in training: with statistics of its batch, or with random zeros."""
    if node.op_type == "Dropout" and len(inputs) > 2 and (mode := inputs[2]) is not None and mode.constant is not None:
        return bool(mode.constant.any())
    given = node.attributes.get("training_mode")
    old = opset < 14 and len([o for o in node.outputs if o.name]) > 1
    return node.op_type == "BatchNormalization" and (bool(given.value) if given is not None else old)


def _sizes(node: ir.Node, metas: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return the results of Shape or Size, by variant."""
    if node.op_type == "Size":
        return [np.array(m.numel()) for m in metas]
    start = node.attributes["start"].value if "start" in node.attributes else 0
    end = node.attributes["end"].value if "end" in node.attributes else None
    return [np.array(m.shape, np.int64)[start:end] for m in metas]


def _plain_type(array: np.ndarray) -> np.ndarray:
    """Return an array with floats as float32, so that the engine computes in one type."""
    return array if array.dtype.kind in "biu" or array.dtype == np.float32 else array.astype(np.float32)


def _single(node: ir.Node) -> onnx.NodeProto:
    """Return a node whose inputs are called "i0", "i1", ..., and its results "o0", "o1", ..."""
    proto = ir.serde.serialize_node(node)
    proto.input[:] = [f"i{k}" if n else "" for k, n in enumerate(proto.input)]
    proto.output[:] = [f"o{k}" for k in range(len(proto.output))]
    proto.domain = domain_of(node)
    return proto


def _evaluator(proto: onnx.NodeProto, opset: int) -> Any:
    """Return an object that computes one node."""
    ins = [onnx.ValueInfoProto(name=i) for i in proto.input if i]
    outs = [onnx.ValueInfoProto(name=o) for o in proto.output]
    graph = onnx.helper.make_graph([proto], "node", ins, outs)
    opsets = [onnx.helper.make_opsetid(proto.domain, opset)]
    return ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
