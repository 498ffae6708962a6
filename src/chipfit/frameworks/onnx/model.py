"""ONNX models as they are loaded: from a file, its bytes, an `onnx.ModelProto` or an `onnx_ir.Model`.

Nothing in a file is executed. External data must lie in the folder of the file or below.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
import onnx_ir as ir

from chipfit.errors import CaptureError, raise_bug, short_message
from chipfit.files import existing_file, wrap_read_errors
from chipfit.frameworks.onnx.integers import is_foreign, is_quantized
from chipfit.frameworks.onnx.limits import MOST_ELEMENTS
from chipfit.frameworks.onnx.live import without_unread
from chipfit.frameworks.onnx.stored import StoredWeights, without_weights
from chipfit.graph.edit import unique_name

#: domains whose operators are known
DOMAINS = ("", "com.microsoft")
_NEWEST = onnx.defs.onnx_opset_version()
_OLDEST = 1
_MOST_NODES = 100_000
_DEEPEST = 64  #: calls of functions and graphs inside one another
_TYPES = {code: name.lower() for name, code in onnx.TensorProto.DataType.items()}
_NUMERIC = {code for code, name in _TYPES.items() if name not in ("undefined", "string")}
#: fields of a tensor that hold numbers, and how many numbers of few bits one entry holds at most
_NUMBERS, _PACKED = "float_data int32_data string_data int64_data double_data uint64_data".split(), 4


class OnnxModel(ir.Model):
    """An ONNX model whose functions are inlined and whose nodes are in execution order."""

    stored: StoredWeights  #: its files
    where = "the model"  #: what names it in messages
    requantize = False  #: take the integers of a quantized file for the floats that they stand for
    session: Any = None  #: runs it, see `runtime.session_of`

    @classmethod
    def of_proto(cls, proto: onnx.ModelProto, where: str) -> OnnxModel:
        """Return a model that was made from another one."""
        read = ir.from_proto(proto)
        made = cls(read.graph, ir_version=read.ir_version)
        made.graph.sort()
        made.stored, made.where = StoredWeights(None), where
        return made

    @property
    def folder(self) -> str:
        """The folder of external data; "" for a model that does not come from a file."""
        return str(self.stored.folder or "")

    @property
    def inputs(self) -> Sequence[ir.Value]:
        """The inputs that a caller gives: those without an initial value."""
        return [v for v in self.graph.inputs if v.name not in self.graph.initializers]

    @property
    def bytes_of_weights(self) -> int:
        values = (v.const_value for v in self.graph.initializers.values())
        return sum(w.nbytes for w in values if w is not None)

    def names(self) -> list[str]:
        return [v.name or "" for v in self.inputs]

    @property
    def quantized(self) -> list[str]:
        """The operators of integers, and casts that dequantize constants, sorted."""
        found = (n for n in self.graph.all_nodes() if is_quantized(n.op_type, n.domain) or _dequantizes(n))
        return sorted({n.op_type for n in found})

    def proto(self) -> onnx.ModelProto:
        """Return the model with the data of its tensors, and a name for every node.

        Raises:
            CaptureError: They cannot be read.
        """
        try:
            proto = ir.to_proto(self)
            with self.stored.mapped():  # which checks that the files are those that were loaded
                onnx.external_data_helper.load_external_data_for_model(proto, self.folder)
        except Exception as e:  # of files, types and values
            raise_bug(e)
            raise CaptureError(f"The ONNX model is malformed: {short_message(e)}", where=self.where) from e
        return proto


def load(path: str) -> OnnxModel:
    """Load the model of a file; its weights are read when they are needed.

    Raises:
        CaptureError: The file cannot be read, or the model cannot be understood, see `opened`.
    """
    file = existing_file(Path(path), CaptureError, "The model file")
    with wrap_read_errors(file, CaptureError, "The model file"), file.open("rb") as content:
        empty = not content.seek(0, os.SEEK_END)
        data = b"" if empty else mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_READ)
    light, nodes = without_weights(data, file.name)
    _check_count(nodes, str(file))
    return opened(light, file)


def opened(model: Any, file: Path | None = None) -> OnnxModel:
    """Return a model in the form in which it is read.

    Args:
        model: bytes of a file, an `onnx.ModelProto` or an `onnx_ir.Model`, which stays as it is.
        file: where it comes from.

    Raises:
        CaptureError: The model is malformed, of an unknown version, or has unknown operators.
    """
    if isinstance(model, OnnxModel):
        return model
    where = str(file or "")
    try:
        given = isinstance(model, onnx.ModelProto)
        if isinstance(model, ir.Model):
            model = ir.to_proto(model)
        proto = model if isinstance(model, onnx.ModelProto) else onnx.ModelProto.FromString(bytes(model))
        proto = without_unread(proto, copy=given)
        _check_proto(proto, stored := StoredWeights(file and file.parent), where)
        own = {f.domain for f in proto.functions}
        _check_domains([n for n in proto.graph.node if n.domain not in own], where)  # their types may be unreadable
        _check_functions(proto, where)
        read = ir.from_proto(_inlined(proto, where) if proto.functions else proto)
        if file is not None:
            ir.external_data.set_base_dir(read.graph, file.parent)
        read.graph.sort()
        for value in read.graph.inputs:  # some exporters write -1 for a size that is open
            if value.shape is not None and any(isinstance(d, int) and d < 0 for d in value.shape):
                value.shape = ir.Shape([None if isinstance(d, int) and d < 0 else d for d in value.shape])
        _check_inputs(read.graph.inputs, where)
    except Exception as e:  # parsers raise many types
        raise_bug(e)
        hint = "onnx.checker.check_model(path) names the fault; write the file again"
        what = f"The ONNX model cannot be read: {short_message(e)}"
        raise CaptureError(what, where=where, hint=hint) from e
    _check_nodes(read.graph, where)
    fields = ("producer_name", "producer_version", "domain", "model_version", "doc_string", "metadata_props")
    made = OnnxModel(read.graph, ir_version=read.ir_version, **{k: getattr(read, k) for k in fields})
    made.stored = stored
    made.where = where or made.where
    return made


def _check_proto(proto: onnx.ModelProto, stored: StoredWeights, where: str) -> None:
    """Check versions, and that external data lie in the folder of the file."""
    if proto.HasField("graph") and not proto.opset_import and 0 < proto.ir_version < 3:
        what, got = "The ONNX model is older than opsets, of 2017", f"IR version {proto.ir_version}"
        hint = "export it again from the model that it was made from"
        raise CaptureError(what, where=where, got=got, allowed="3 or newer", hint=hint)
    if not proto.HasField("graph") or not proto.opset_import:
        raise CaptureError("File is truncated or not an ONNX model", where=where, allowed="a graph and its opset")
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=_NEWEST)
    if not _OLDEST <= opset <= _NEWEST:
        allowed = f"{_OLDEST} to {_NEWEST}"
        hint = "onnx.version_converter.convert_version(model, 18) changes the opset"
        raise CaptureError("The ONNX model has an unknown opset", where=where, got=opset, allowed=allowed, hint=hint)
    for tensor in _tensors(proto):
        if tensor.data_type not in _NUMERIC:
            got, allowed = _TYPES.get(tensor.data_type, tensor.data_type), "numbers of a known type"
            raise CaptureError(f"Tensor '{tensor.name}' holds no numbers", where=where, got=got, allowed=allowed)
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            _check_external(tensor, stored, where)
        elif tensor.HasField("raw_data"):
            _check_size(tensor, len(tensor.raw_data), where)
        elif math.prod(tensor.dims) > _PACKED * (count := sum(len(getattr(tensor, k)) for k in _NUMBERS)):
            got, allowed = f"{count:,} numbers", f"{math.prod(tensor.dims):,} for {list(tensor.dims)}"
            raise CaptureError(f"Tensor '{tensor.name}' does not fit its shape", where=where, got=got, allowed=allowed)


def _check_inputs(inputs: Sequence[ir.Value], where: str) -> None:
    """Check that inputs have different names, numbers, and sizes that memory holds."""
    names = [v.name for v in inputs]
    for value in inputs:
        if names.count(value.name) > 1:
            raise CaptureError(f"The model has several inputs with the name '{value.name}'", where=where)
        if value.dtype is not None and int(value.dtype) not in _NUMERIC:
            what, got = f"Input '{value.name}' takes no numbers", str(value.dtype).lower()
            raise CaptureError(what, where=where, got=got, allowed="numbers of a known type")
        sizes = [d for d in dims_of(value) or () if d is not None]
        if math.prod(sizes) > MOST_ELEMENTS:
            allowed = f"at most {MOST_ELEMENTS:,} elements"
            raise CaptureError(f"Input '{value.name}' is too large", where=where, got=sizes, allowed=allowed)


def _check_functions(proto: onnx.ModelProto, where: str) -> None:
    """Check how deep functions call one another, and the number of nodes once they are inlined, at most 2^depth."""
    bodies = {(f.domain, f.name, f.overload): f.node for f in proto.functions}
    sizes: dict[tuple[str, str, str], int] = {}

    def size_of(nodes: Any, depth: int) -> int:
        if depth > _DEEPEST:
            what, hint = "Functions of the ONNX model call one another too deep", "inline them: onnx.inliner"
            raise CaptureError(what, where=where, allowed=f"{_DEEPEST} calls, none of itself", hint=hint)
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, node.overload)
            if key in bodies and key not in sizes:
                sizes[key] = size_of(bodies[key], depth + 1)
            inner = [g for a in node.attribute for g in (a.g, *a.graphs)]
            total += sizes.get(key, 1) + sum(size_of(g.node, depth + 1) for g in inner)
        return total

    _check_count(size_of(proto.graph.node, 0), where)


def _inlined(proto: onnx.ModelProto, where: str) -> onnx.ModelProto:
    """Return a model with the bodies of functions in place of their calls, and different names of nodes.

    Raises:
        CaptureError: A function has other versions of operators than the model.
    """
    proto = onnx.inliner.inline_local_functions(proto)
    if proto.functions:
        left, hint = proto.functions[0], "onnx.version_converter brings both to one version"
        what = f"Function '{left.domain}.{left.name}' has other versions of operators than the ONNX model"
        got, allowed = (", ".join(f"{o.domain} {o.version}" for o in x.opset_import) for x in (left, proto))
        raise CaptureError(what, where=where, got=got.strip(), allowed=allowed.strip(), hint=hint)
    name_apart(proto)
    return proto


def name_apart(proto: onnx.ModelProto) -> None:
    """Give nodes of one name different ones, as ONNX Runtime requires."""
    taken, counts = set[str](), dict[str, int]()
    for node in proto.graph.node:
        if node.name:
            node.name = unique_name(node.name, taken, counts)
            taken.add(node.name)


def _check_external(tensor: onnx.TensorProto, stored: StoredWeights, where: str) -> None:
    """Check that the numbers of a tensor lie in the folder of the file, and that they fit its shape."""
    entries = {e.key: e.value for e in tensor.external_data}
    location, name = entries.get("location", ""), tensor.name
    if stored.folder is None:
        hint = "give the path of the file, or onnx.load(path), which loads them"
        raise CaptureError(f"The data of '{name}' are in another file", got=location[:200], hint=hint)
    folder = stored.folder.resolve()
    if isinstance(location, bytes):  # protobuf returns those that are not text
        location = repr(location)
    try:
        beside = (folder / location).resolve()
        inside = bool(location) and not Path(location).is_absolute() and beside.is_relative_to(folder)
    except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL
        inside = False
    if not inside:
        allowed = "files in the folder of the model"
        raise CaptureError(f"The data of '{name}' lie elsewhere", where=where, got=location[:200], allowed=allowed)
    existing_file(beside, CaptureError, f"The file with the data of '{name}'")
    numbers = [entries.get("offset", "0"), entries.get("length", "0")]
    if not all(n.isascii() and n.isdigit() and len(n) < 19 for n in numbers):
        got, allowed = ", ".join(numbers)[:200], "numbers of bytes"
        raise CaptureError(f"The place of the data of '{name}' is malformed", where=where, got=got, allowed=allowed)
    offset, length = map(int, numbers)
    if "length" in entries:
        _check_size(tensor, length, where)
    end, size = offset + max(length, bytes_of(tensor) or 0), stored.note(location)
    if end > size:
        got, allowed = f"{size:,} bytes", f"at least {end:,}"
        what = f"The file with the data of '{name}' is cut off"
        raise CaptureError(what, where=str(beside), got=got, allowed=allowed)


def bytes_of(tensor: onnx.TensorProto) -> int | None:
    """Return the number of bytes that the numbers of a tensor take; None for a type without a fixed size."""
    if tensor.data_type not in onnx.helper.get_all_tensor_dtypes() or tensor.data_type == onnx.TensorProto.STRING:
        return None
    bits = ir.DataType(tensor.data_type).bitwidth
    return -(-math.prod(tensor.dims) * bits // 8)


def _check_size(tensor: onnx.TensorProto, size: int, where: str) -> None:
    """Check that the bytes of a tensor are those of its shape."""
    wanted = bytes_of(tensor)
    if wanted is not None and (size != wanted or any(d < 0 for d in tensor.dims)):
        got, allowed = f"{size:,} bytes", f"{wanted:,} for {list(tensor.dims)}"
        raise CaptureError(f"Tensor '{tensor.name}' does not fit its shape", where=where, got=got, allowed=allowed)


def _tensors(proto: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a model: initialisers, and those in attributes, inner graphs and functions."""
    graphs, nodes = [proto.graph], [n for f in proto.functions for n in f.node]
    while graphs or nodes:
        if graphs:
            graph = graphs.pop()
            yield from graph.initializer
            for sparse in graph.sparse_initializer:
                yield from (sparse.values, sparse.indices)
            nodes += graph.node
        for attribute in (a for n in nodes for a in n.attribute):
            yield from (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors
            graphs += (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs
        nodes = []


def _check_count(nodes: int, where: str) -> None:
    if nodes > _MOST_NODES:
        got, allowed = f"{nodes:,} nodes", f"at most {_MOST_NODES:,}"
        raise CaptureError("The ONNX model is too large a graph", where=where, got=got, allowed=allowed)


def _check_nodes(graph: ir.Graph, where: str) -> None:
    _check_count(graph.num_nodes(), where)
    _check_domains(graph.all_nodes(), where)


def _check_domains(nodes: Iterable[Any], where: str) -> None:
    strange = [n for n in nodes if domain_of(n) not in DOMAINS and not is_foreign(n.op_type, n.domain)]
    unknown = sorted({f"{n.domain}.{n.op_type}" for n in strange})
    if unknown:
        allowed = "operators of ONNX and com.microsoft, and functions that the file defines"
        hint = "export the model with standard operators; trees, text and tables (ai.onnx.ml) are not quantized"
        what = "The ONNX model has operators of an unknown domain"
        raise CaptureError(what, where=where, got=_some(unknown), allowed=allowed, hint=hint)


def _dequantizes(node: ir.Node) -> bool:
    """Return whether a node casts a constant of 8-bit integers, or rows of one, that constant scales multiply."""
    held = node.inputs[0] if node.op_type == "Cast" else None
    maker = None if held is None else held.producer()
    constant = maker.inputs[0] if maker is not None and maker.op_type == "Gather" else held
    if constant is None or not constant.is_initializer():
        return False
    floats, narrow = node.outputs[0], constant.dtype in (ir.DataType.INT8, ir.DataType.UINT8)
    scales = (i for use in floats.uses() if use.node.op_type == "Mul" for i in use.node.inputs if i is not floats)
    return narrow and any(i is not None and i.is_initializer() for i in scales)


def refuse_quantized(model: OnnxModel) -> None:
    """Raise for a model that has quantizers or operators of integers.

    Raises:
        CaptureError: It has.
    """
    if found := model.quantized:
        hint = "give the float file; or chipfit.load_model(file, requantize=True) (--requantize), which drops its"
        hint += " quantizers and keeps the losses of its weights"
        what = "The ONNX model is quantized already"
        raise CaptureError(what, where=model.where, got=_some(found), allowed="float models", hint=hint)


def dims_of(value: ir.Value) -> list[int | None] | None:
    """Return the declared sizes of a tensor, None where one is open; None if the file declares no shape."""
    return None if value.shape is None else [d if isinstance(d, int) and d > 0 else None for d in value.shape]


def domain_of(node: Any) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return ", ".join([first, *more[:7], *(["..."] if len(more) > 7 else [])])
