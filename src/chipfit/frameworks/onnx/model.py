"""ONNX models as they are loaded: from a file, its bytes, an `onnx.ModelProto` or an `onnx_ir.Model`.

Nothing in a file is executed. External data must lie in the folder of the file or below.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from chipfit.errors import CaptureError, raised_outside_chipfit, short_message
from chipfit.files import existing_file, wrap_read_errors

#: domains whose operators are known
DOMAINS = ("", "com.microsoft")
_NEWEST = onnx.defs.onnx_opset_version()
_OLDEST = 1
_MOST_NODES = 500_000
_QUANTIZED = "QuantizeLinear DequantizeLinear QLinearConv QLinearMatMul ConvInteger MatMulInteger".split()


class OnnxModel(ir.Model):
    """An ONNX model whose functions are inlined and whose nodes are in execution order."""

    folder = ""  #: of external data
    session: Any = None  #: runs it, see `runtime.session_of`

    @property
    def inputs(self) -> Sequence[ir.Value]:
        """The inputs that a caller gives: those without an initial value."""
        return [v for v in self.graph.inputs if v.name not in self.graph.initializers]

    def names(self) -> list[str]:
        return [v.name or "" for v in self.inputs]


def load(path: str) -> OnnxModel:
    """Load the model of a file; weights in external data are read when they are needed.

    Raises:
        CaptureError: The file cannot be read, or the model cannot be understood, see `opened`.
    """
    file = existing_file(Path(path), CaptureError, "The model file")
    with wrap_read_errors(file, CaptureError, "The model file"):
        data = file.read_bytes()
    return opened(data, file)


def opened(model: Any, file: Path | None = None) -> OnnxModel:
    """Return a model in the form in which it is read.

    Args:
        model: bytes of a file, an `onnx.ModelProto` or an `onnx_ir.Model`, which stays as it is.
        file: where it comes from.

    Raises:
        CaptureError: The model is malformed, of an unknown version, quantized already, or has unknown operators.
    """
    if isinstance(model, OnnxModel):
        return model
    where = str(file or "")
    try:
        if isinstance(model, ir.Model):
            model = ir.to_proto(model)
        proto = model if isinstance(model, onnx.ModelProto) else onnx.ModelProto.FromString(bytes(model))
        _check_proto(proto, file)
        read = ir.from_proto(proto)
        if file is not None:
            ir.external_data.set_base_dir(read.graph, file.parent)
        if read.functions:
            read = InlinePass()(read).model
        read.graph.sort()
        for value in read.graph.inputs:  # some exporters write -1 for a size that is open
            if value.shape is not None and any(isinstance(d, int) and d < 0 for d in value.shape):
                value.shape = ir.Shape([None if isinstance(d, int) and d < 0 else d for d in value.shape])
    except Exception as e:  # parsers raise many types
        if not raised_outside_chipfit(e):
            raise
        hint = "onnx.checker.check_model(path) names the fault; write the file again"
        what = f"The ONNX model cannot be read: {short_message(e)}"
        raise CaptureError(what, where=where, hint=hint) from e
    _check_nodes(read.graph, where)
    fields = ("producer_name", "producer_version", "domain", "model_version", "doc_string", "metadata_props")
    made = OnnxModel(read.graph, ir_version=read.ir_version, **{k: getattr(read, k) for k in fields})
    made.folder = str(file.parent) if file is not None else ""
    return made


def _check_proto(proto: onnx.ModelProto, file: Path | None) -> None:
    """Check versions, and that external data lie in the folder of the file."""
    where = str(file or "")
    if not proto.HasField("graph") or not proto.opset_import:
        raise CaptureError("This is not an ONNX model, or it is cut off", where=where, allowed="a graph and its opset")
    opset = max((o.version for o in proto.opset_import if o.domain in ("", "ai.onnx")), default=_NEWEST)
    if not _OLDEST <= opset <= _NEWEST:
        allowed = f"{_OLDEST} to {_NEWEST}"
        hint = "onnx.version_converter.convert_version(model, 18) changes the opset"
        raise CaptureError("The ONNX model has an unknown opset", where=where, got=opset, allowed=allowed, hint=hint)
    for tensor in _tensors(proto.graph):
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            _check_size(tensor, where)
            continue
        entries = {e.key: e.value for e in tensor.external_data}
        location, name = entries.get("location", ""), tensor.name
        if file is None:
            hint = "give the path of the file, or onnx.load(path), which loads them"
            raise CaptureError(f"The data of '{name}' are in another file", got=location[:200], hint=hint)
        folder = file.parent.resolve()
        beside = (folder / location).resolve()
        if not location or not beside.is_relative_to(folder):
            allowed = "files in the folder of the model"
            raise CaptureError(f"The data of '{name}' lie elsewhere", where=where, got=location[:200], allowed=allowed)
        existing_file(beside, CaptureError, f"The file with the data of '{name}'")
        end = int(entries.get("offset", "0")) + int(entries.get("length", "0"))
        if end > beside.stat().st_size:
            got = f"{beside.stat().st_size:,} bytes"
            raise CaptureError(f"The file with the data of '{name}' is cut off", where=str(beside), got=got)


def _check_size(tensor: onnx.TensorProto, where: str) -> None:
    """Check that the bytes of a tensor are those of its shape."""
    if tensor.HasField("raw_data") and tensor.data_type in onnx.helper.get_all_tensor_dtypes():
        bits = 8 * onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        count = int(np.prod(list(tensor.dims), dtype=object)) if tensor.dims else 1
        packed = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}
        bits = packed.get(onnx.TensorProto.DataType.Name(tensor.data_type), bits)
        if len(tensor.raw_data) != -(-count * bits // 8):
            got, allowed = f"{len(tensor.raw_data):,} bytes", f"{-(-count * bits // 8):,} for {list(tensor.dims)}"
            raise CaptureError(f"Tensor '{tensor.name}' does not fit its shape", where=where, got=got, allowed=allowed)


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield the tensors of a graph, and those in attributes and inner graphs."""
    yield from graph.initializer
    for attribute in (a for n in graph.node for a in n.attribute):
        yield from (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors
        for inner in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
            yield from _tensors(inner)


def _check_nodes(graph: ir.Graph, where: str) -> None:
    nodes = list(graph.all_nodes()) if graph.num_nodes() <= _MOST_NODES else None
    if nodes is None:
        got, allowed = f"{graph.num_nodes():,} nodes", f"at most {_MOST_NODES:,}"
        raise CaptureError("The ONNX model is too large a graph", where=where, got=got, allowed=allowed)
    unknown = sorted({f"{n.domain}.{n.op_type}" for n in nodes if domain_of(n) not in DOMAINS})
    if unknown:
        allowed = "operators of ONNX and com.microsoft, and functions that the file defines"
        hint = "export the model with standard operators; trees, text and tables (ai.onnx.ml) are not quantized"
        what = "The ONNX model has operators of an unknown domain"
        raise CaptureError(what, where=where, got=_some(unknown), allowed=allowed, hint=hint)
    if quantized := sorted({n.op_type for n in nodes if n.op_type in _QUANTIZED}):
        hint = "start from the float model that it was made from"
        what = "The ONNX model is quantized already"
        raise CaptureError(what, where=where, got=_some(quantized), allowed="float models", hint=hint)


def dims_of(value: ir.Value) -> list[int | None] | None:
    """Return the declared sizes of a tensor, None where one is open; None if the file declares no shape."""
    return None if value.shape is None else [d if isinstance(d, int) and d > 0 else None for d in value.shape]


def domain_of(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _some(names: Iterable[str]) -> str:
    first, *more = names
    return ", ".join([first, *more[:7], *(["..."] if len(more) > 7 else [])])
