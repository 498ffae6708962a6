"""Weights that stay in the files of an ONNX model until they are needed, and are mapped into memory then.

A file is read without its weights: the bytes of each large tensor become external data of the file itself. So a model
takes no memory beside the weights that are copied from it, and models larger than the memory can be looked into.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from chipfit.frameworks.mapped_files import MappedFiles

#: tensors of fewer bytes stay in the model
_SMALL = 1 << 13
_GRAPH, _NODE, _INITIALIZER = 7, 1, 5  # numbers of fields in onnx.proto
_FLOAT_DATA, _RAW_DATA = 4, 9
_TYPE, _LOCATION = 2, 14

Span = tuple[int, int, int, int, int]  #: number and wire type of a field, and where it, its content and its end are


class _Odd(Exception):
    """Bytes are not those of a model that this module understands."""


def without_weights(content: Any, location: str) -> tuple[bytes, int]:
    """Return an ONNX file without the bytes of its large tensors, and the number of its nodes.

    Args:
        content: bytes of the file, perhaps mapped.
        location: name of the file, which the tensors refer to as their external data.
    """
    view = memoryview(content)
    try:
        parts, nodes = list[bytes](), 0
        for field in _fields(view, 0, len(view)):
            number, kind, start, begin, end = field
            if number == _GRAPH and kind == 2:
                inner, nodes = _graph(view, begin, end, location)
                parts += [view[start : start + 1].tobytes(), _varint(len(inner)), inner]
            else:
                parts.append(view[start:end].tobytes())
        return b"".join(parts), nodes
    except _Odd:
        return view.tobytes(), 0
    finally:
        view.release()


def _fields(view: memoryview, at: int, end: int) -> Iterator[Span]:
    """Yield the fields of a message."""
    while at < end:
        start = at
        key, at = _read_varint(view, at, end)
        kind = key & 7
        begin = at
        if kind == 0:
            _, at = _read_varint(view, at, end)
        elif kind == 2:
            size, begin = _read_varint(view, at, end)
            at = begin + size
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise _Odd
        if at > end:
            raise _Odd
        yield key >> 3, kind, start, begin, at


def _read_varint(view: memoryview, at: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while at < end and shift < 64:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _Odd


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _graph(view: memoryview, begin: int, end: int, location: str) -> tuple[bytes, int]:
    parts, nodes, kept = list[bytes](), 0, begin  # what lies between large tensors is copied at once
    for number, kind, start, inner, stop in _fields(view, begin, end):
        nodes += number == _NODE
        if number == _INITIALIZER and kind == 2 and stop - inner >= _SMALL:
            tensor = _outside(view, inner, stop, location)
            if tensor is not None:
                parts += [view[kept:start].tobytes(), view[start : start + 1].tobytes(), _varint(len(tensor)), tensor]
                kept = stop
    return b"".join([*parts, view[kept:end].tobytes()]), nodes


def _outside(view: memoryview, begin: int, end: int, location: str) -> bytes | None:
    """Return a tensor whose numbers are external data of the file itself; None where it has no block of them."""
    rest, blocks, kinds = list[bytes](), list[Span](), dict[int, int]()
    for field in _fields(view, begin, end):
        number, kind, start, inner, stop = field
        if number in (_RAW_DATA, _FLOAT_DATA) and kind == 2:
            blocks.append(field)
            continue
        if number in (_TYPE, _LOCATION) and kind == 0:
            kinds[number] = _read_varint(view, inner, stop)[0]
        rest.append(view[start:stop].tobytes())
    if len(blocks) != 1 or kinds.get(_LOCATION) or blocks[0][4] - blocks[0][3] < _SMALL:
        return None
    number, _, _, inner, stop = blocks[0]
    if (number == _FLOAT_DATA and kinds.get(_TYPE) != onnx.TensorProto.FLOAT) or kinds.get(_TYPE) not in _WHOLE:
        return None
    tensor = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in ("location", location), ("offset", str(inner)), ("length", str(stop - inner)):
        tensor.external_data.add(key=key, value=value)
    return b"".join(rest) + tensor.SerializeToString()


#: types whose numbers are whole bytes, of those that onnx-ir knows: it may be older than onnx
_WHOLE = {int(t) for t in ir.DataType if t not in (ir.DataType.STRING, ir.DataType.UNDEFINED) and t.bitwidth % 8 == 0}


class StoredWeights(MappedFiles):
    """The files of an ONNX model while it is read."""

    def array(self, tensor: Any) -> np.ndarray:
        """Return the numbers of a tensor, without copying those of whole bytes that are in a file.

        Raises:
            CaptureError: The file has changed since the model was loaded.
        """
        if not isinstance(tensor, ir.ExternalTensor) or int(tensor.dtype) not in _WHOLE or not tensor.size:
            found: np.ndarray = tensor.numpy()
            return found
        kind = tensor.dtype.numpy().newbyteorder("<")
        return self.numbers(str(tensor.location), kind, tensor.size, tensor.offset or 0).reshape(tensor.shape.numpy())

    def release_tensor(self, tensor: Any) -> None:
        """Give back the memory of a tensor that has been copied."""
        if isinstance(tensor, ir.ExternalTensor):
            self.release(str(tensor.location), tensor.offset or 0, tensor.nbytes)
