"""Ways in which a file or a runtime can be something else than the plan says, for both file formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


class Onnx:
    """A QDQ file in hand."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path, self.model = path, onnx.load(str(path))
        self.constants = {i.name: i for i in self.model.graph.initializer}

    def change(self, name: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
        from onnx import numpy_helper

        t = self.constants[name]
        t.CopyFrom(numpy_helper.from_array(how(numpy_helper.to_array(t).copy()), name))

    def codes(self, tensor: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
        self.change(f"{tensor}_q", how)

    def scale(self, tensor: str, by: float) -> None:
        self.change(f"{tensor}_scale", lambda s: (s * by).astype(np.float32))

    def zero(self, tensor: str) -> None:
        self.change(f"{tensor}_zero_point", lambda z: (z + 1).astype(z.dtype))

    def swap(self, a: str, b: str) -> None:
        one, other = self.constants[f"{a}_q"], self.constants[f"{b}_q"]
        one.raw_data, other.raw_data = other.raw_data, one.raw_data

    def save(self) -> None:
        self.path.write_bytes(self.model.SerializeToString())


class TfLite:
    """A `.tflite` file in hand."""

    def __init__(self, path: Path) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.path, self.model = path, schema.ModelT.InitFromObj(schema.Model.GetRootAs(path.read_bytes(), 0))
        self.tensors = {t.name.decode(): t for t in self.model.subgraphs[0].tensors}

    def codes(self, tensor: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
        t = self.tensors[tensor]
        buffer, kind = self.model.buffers[t.buffer], {9: np.int8, 2: np.int32}[t.type]
        found = np.frombuffer(bytes(buffer.data), kind).copy()
        buffer.data = np.frombuffer(how(found).astype(kind).tobytes(), np.uint8)

    def scale(self, tensor: str, by: float) -> None:
        q = self.tensors[tensor].quantization
        q.scale = (q.scale * by).astype(np.float32)

    def zero(self, tensor: str) -> None:
        q = self.tensors[tensor].quantization
        q.zeroPoint = q.zeroPoint + 1

    def swap(self, a: str, b: str) -> None:
        one, other = self.tensors[a], self.tensors[b]
        one.buffer, other.buffer = other.buffer, one.buffer

    def save(self) -> None:
        import flatbuffers

        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), file_identifier=b"TFL3")
        self.path.write_bytes(bytes(builder.Output()))


def opened(path: Path) -> Any:
    return {".onnx": Onnx, ".tflite": TfLite}[path.suffix](path)


def bump(q: np.ndarray) -> np.ndarray:
    """One code is another one; an even one, which stays in the grid."""
    flat = q.reshape(-1)
    flat[0] = int(flat[0]) + (-1 if flat[0] > 0 else 1)
    return q
