"""Ways in which a file or a runtime can be something else than the plan says, for each file format."""

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
        from chipfit.frameworks.tflite.variables import packed

        self.path.write_bytes(packed(self.model))


class Pte:
    """A `.pte` file in hand."""

    def __init__(self, path: Path) -> None:
        from chipfit.pte_file.container import Container, tensor_of

        self.path, self.file = path, Container(path.read_bytes())
        notes, self.graphs = self.file.notes(), [self.file.graph(k) for k in range(len(self.file.calls))]
        places = {k: v[0] for k, v in notes["constants"].items()} | notes["tensors"]
        values = [{tensor_of(v).idOut: v for v in graph.xvalues} for graph in self.graphs]
        self.values = {name: (place[0], values[place[0]][place[1]].xvalueUnion) for name, place in places.items()}

    def change(self, tensor: str, index: int, how: Callable[[bytes], bytes]) -> None:
        key = self.graphs[self.values[tensor][0]].constantData[index].namedKey
        (held,) = (d for d in self.file.program.namedData if d.key == key)
        self.file.segments[held.segmentIndex] = how(self.file.segments[held.segmentIndex])

    def codes(self, tensor: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
        kind = np.int32 if tensor.endswith("bias") else np.int8
        new = lambda raw: how(np.frombuffer(raw, kind).copy()).astype(kind).tobytes()
        self.change(tensor, self.values[tensor][1].tensorValue.constantBufferIdx, new)

    def scale(self, tensor: str, by: float) -> None:
        numbers = self.values[tensor][1].quantParams
        if hasattr(numbers, "zeroPoint"):
            numbers.scale *= by
        else:
            new = lambda raw: (np.frombuffer(raw, np.float32) * np.float32(by)).tobytes()
            self.change(tensor, numbers.scaleBufferIdx, new)

    def zero(self, tensor: str) -> None:
        self.values[tensor][1].quantParams.zeroPoint += 1

    def swap(self, a: str, b: str) -> None:
        one, other = (self.values[name][1].tensorValue for name in (a, b))
        one.constantBufferIdx, other.constantBufferIdx = other.constantBufferIdx, one.constantBufferIdx

    def save(self) -> None:
        for call, graph in enumerate(self.graphs):
            self.file.set_graph(call, graph)
        self.path.write_bytes(self.file.to_bytes())


def opened(path: Path) -> Any:
    return {".onnx": Onnx, ".tflite": TfLite, ".pte": Pte}[path.suffix](path)


def bump(q: np.ndarray) -> np.ndarray:
    """One code is another one; an even one, which stays in the grid."""
    flat = q.reshape(-1)
    flat[0] = int(flat[0]) + (-1 if flat[0] > 0 else 1)
    return q
