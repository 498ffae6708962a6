"""Reads back what a `.tflite` file says of each tensor: its numbers, and what constants hold."""

from pathlib import Path

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.export import FileTensor
from chipfit.export.tflite.file import INT4, NUMPY


def stored(path: Path) -> dict[str, FileTensor]:
    """By the name of the tensor; constants lie as the file has them."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
    found: dict[str, FileTensor] = {}
    tensors = model.subgraphs[0].tensors
    for t in tensors:
        data, q = model.buffers[t.buffer].data, t.quantization
        numbers = [] if q is None or q.scale is None else [(np.asarray(q.scale), np.asarray(q.zeroPoint))]
        if q is not None and q.detailsType == schema.QuantizationDetails.BlockwiseQuantization:
            of_blocks = tensors[q.details.scales]
            scale = _array(bytes(model.buffers[of_blocks.buffer].data), of_blocks).astype(np.float32)
            numbers = [(scale, np.zeros(scale.shape, np.int64))]
        found[t.name.decode()] = FileTensor(None if data is None else _array(bytes(data), t), numbers)
    return found


def _array(data: bytes, tensor: schema.TensorT) -> np.ndarray:
    shape = tuple(tensor.shape if tensor.shape is not None else ())
    if tensor.type != INT4:
        return np.frombuffer(data, NUMPY[tensor.type]).reshape(shape)
    pairs = np.frombuffer(data, np.uint8)
    flat = np.stack((pairs & 15, pairs >> 4), -1).ravel()[: int(np.prod(shape))].astype(np.int8)
    return np.where(flat > 7, flat - 16, flat).reshape(shape)  # the first of two codes is in the low half
