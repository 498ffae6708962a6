"""Read back the tensors of a `.tflite` file: constants, scales and zero points."""

import json
from pathlib import Path

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.export import FileTensor
from chipfit.export.tflite.file import INT4, NUMPY


def read_back(path: Path) -> dict[str, FileTensor]:
    """Return all tensors by name; constants are in the file's layout."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    found: dict[str, FileTensor] = {}
    tensors = model.subgraphs[0].tensors
    written = [bytes(model.buffers[m.buffer].data) for m in model.metadata or () if m.name == b"chipfit"]
    notes = json.loads(written[0]) if written else {}
    images = notes.get("images", {})
    for t in tensors:
        data, q = model.buffers[t.buffer].data, t.quantization
        qparams = [] if q is None or q.scale is None else [(np.asarray(q.scale), np.asarray(q.zeroPoint))]
        if q is not None and q.detailsType == schema.QuantizationDetails.BlockwiseQuantization:
            scales = tensors[q.details.scales]
            scale = array_of(bytes(model.buffers[scales.buffer].data), scales).astype(np.float32)
            qparams = [(scale, np.zeros(scale.shape, np.int64))]
        empty = data is None or (not len(data) and np.prod(t.shape) > 0)  # some converters write empty buffers
        computed = empty or t.sparsity is not None  # sparse numbers are made dense by an operator
        name, values = t.name.decode(), None if computed else array_of(bytes(data), t)
        values = _reset(t, qparams) if t.isVariable else values
        if values is not None and name in images:
            values = values.reshape(len(values), -1, images[name][0]).swapaxes(1, 2).reshape(values.shape)
        found[name] = FileTensor(values, qparams)
    found |= {after: found[before] for before, after in notes.get("kept", {}).items()}
    for name, parts in notes.get("joined", {}).items():
        # one part is the same constant with other axes, which other operators read as it is
        found[name] = _joined([found.pop(p) if len(parts) > 1 else found[p] for p in parts])
    return found


def _reset(tensor: schema.TensorT, qparams: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return what a variable tensor holds before the first call."""
    zero = qparams[0][1].ravel()[0] if qparams else 0
    return np.full(tuple(tensor.shape), zero, NUMPY[tensor.type])


def _joined(parts: list[FileTensor]) -> FileTensor:
    """Return tensors that are one weight, one after another."""
    values = [np.asarray(p.values) for p in parts]
    if not all(p.qparams for p in parts):
        return FileTensor(np.concatenate(values), [])
    scale, zero = (
        np.concatenate([np.broadcast_to(p.qparams[0][k], len(v)) for p, v in zip(parts, values)]) for k in (0, 1)
    )
    return FileTensor(np.concatenate(values), [(scale, zero)])


def array_of(data: bytes, tensor: schema.TensorT) -> np.ndarray:
    """Return the content of a tensor's buffer as an array; of two 4-bit integers the first is in the low half."""
    shape = tuple(tensor.shape if tensor.shape is not None else ())
    if tensor.type != INT4:
        return np.frombuffer(data, NUMPY[tensor.type]).reshape(shape)
    pairs = np.frombuffer(data, np.uint8)
    flat = np.stack((pairs & 15, pairs >> 4), -1).ravel()[: int(np.prod(shape))].astype(np.int8)
    return np.where(flat > 7, flat - 16, flat).reshape(shape)
