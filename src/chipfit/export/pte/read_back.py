"""Read back the quantized tensors of an ExecuTorch program: constants, scales and zero points."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from chipfit.export import FileTensor
from chipfit.pte_file.container import GRAPH, Container, classes, misfit, tensor_of


def read_back(path: Path) -> dict[str, FileTensor]:
    """Return quantized tensors by the plan's names.

    Raises:
        RuntimeUnavailable: the file is malformed.
    """
    file = Container(path.read_bytes())
    notes = file.notes()
    graphs = [file.graph(call) for call in range(len(file.calls))]
    values = [{tensor_of(v).idOut: v for v in graph.xvalues} for graph in graphs]
    found: dict[str, FileTensor] = {}

    def enter(name: str, call: int, number: int, constant: bool) -> None:
        """Enter a value of a delegate, if it is quantized."""
        if (value := values[call].get(number)) is None:
            raise misfit(f"a delegate has no value {number}")
        if hasattr(value.xvalueUnion, "quantParams"):
            integers = _integers(file, call, graphs[call], value) if constant else None
            found[name] = FileTensor(integers, [_numbers(file, graphs[call], value)])

    for name, (call, number, *_) in notes.get("tensors", {}).items():
        enter(name, call, number, constant=False)
    for name, places in notes.get("constants", {}).items():
        for k, (call, number) in enumerate(places):
            enter(f"{name}_{k}" if k else name, call, number, constant=True)
    return found


def _constant(file: Container, graph: Any, index: int) -> bytes:
    """Return a constant of a delegate's graph."""
    return file.named_data(graph.constantData[index].namedKey.decode()) or b""


def _integers(file: Container, call: int, graph: Any, value: Any) -> np.ndarray:
    """Return the integers of a constant, with the axes in the file's order."""
    tensor, kinds = tensor_of(value), classes(GRAPH[0]).XNNDatatype
    shape = [int(d) for d in tensor.dims]
    if tensor.constantBufferIdx:
        raw = _constant(file, graph, tensor.constantBufferIdx)
    else:  # a constant of the program, which the delegate receives, repeated for each sample or not
        constant = file.source_of(given := file.calls[call].args[tensor.externalId])
        shape = shape if constant == given else file.shape(constant)
        raw = file.constant(constant)[: math.prod(shape)]
    if tensor.datatype in (kinds.xnn_datatype_qcint4, kinds.xnn_datatype_qbint4):  # the low half first, 8 for zero
        rows = np.frombuffer(raw, np.uint8).reshape(shape[0], -1)
        return (np.stack([rows & 15, rows >> 4], -1).reshape(shape[0], -1)[:, : shape[1]]).astype(np.int8) - np.int8(8)
    wide = tensor.datatype in (kinds.xnn_datatype_qint32, kinds.xnn_datatype_qcint32)
    return np.frombuffer(raw, np.int32 if wide else np.int8).reshape(shape)


def _numbers(file: Container, graph: Any, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return scale and zero point of a value."""
    how = value.xvalueUnion.quantParams
    if not hasattr(how, "scaleBufferIdx"):
        return np.array(how.scale, np.float32), np.array(how.zeroPoint, np.float64)
    raw = _constant(file, graph, how.scaleBufferIdx)
    if hasattr(how, "groupSize"):  # bfloat16, the upper half of a float32
        scale = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        scale = scale.reshape(tensor_of(value).dims[0], -1)
    else:
        scale = np.frombuffer(raw, np.float32)
    return scale, np.zeros(scale.shape)
