"""A `.tflite` file as a model: its network, opened and checked by LiteRT, and what LiteRT computes with it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from chipfit.errors import CaptureError, first_line
from chipfit.files import existing_file, wrap_read_errors

_NAMES = {code: name for name, code in vars(schema.TensorType).items() if isinstance(code, int)}
_OPERATORS = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
#: types of biases
_WIDE = ("INT32", "INT64")
#: types of the integers that quantized tensors hold
_CODES = ("INT4", "INT8", "UINT8", "INT16", *_WIDE)


class Tensor:
    """A tensor of a file."""

    def __init__(self, index: int, table: Any, data: bytes | None) -> None:
        self.index, self._data = index, data
        self.name = (table.name or b"").decode("utf-8", "replace").partition(";")[0] or f"tensor_{index}"
        self.kind = _NAMES.get(table.type, str(table.type))
        self.shape = tuple(int(d) for d in (table.shape if table.shape is not None else ()))
        signature = table.shapeSignature
        self.signature = self.shape if signature is None else tuple(int(d) for d in signature)
        q = table.quantization
        scaled = q is not None and q.scale is not None and len(q.scale) > 0 and self.kind in _CODES
        self.scale = np.asarray(q.scale, np.float32) if scaled else None
        self.zero = np.asarray(q.zeroPoint if scaled and q.zeroPoint is not None else 0, np.int64)
        self.axis = int(q.quantizedDimension) if scaled else 0

    @property
    def dtype(self) -> str:
        """The type of the numbers that it stands for."""
        return "float32" if self.scale is not None or self.kind == "FLOAT16" else self.kind.lower()

    @cached_property
    def constant(self) -> np.ndarray | None:
        """The numbers that a constant stands for; None for a tensor that is computed."""
        if self._data is None:
            return None
        codes = self._codes(self._data)
        if self.scale is None:
            return codes.astype(np.float32) if codes.dtype == np.float16 else codes
        sides = [1] * codes.ndim
        if self.scale.size > 1:
            sides[self.axis] = -1
        scale, zero = (v.reshape(sides if v.size > 1 else ()) for v in (self.scale, self.zero))
        reals = (codes.astype(np.int64) - zero) * scale.astype(np.float64)
        return reals if self.kind in _WIDE else reals.astype(np.float32)  # of 32 bits float32 has but 24

    def _codes(self, data: bytes) -> np.ndarray:
        if self.kind != "INT4":
            return np.frombuffer(data, np.dtype(self.kind.lower().replace("bool", "bool_"))).reshape(self.shape)
        pairs = np.frombuffer(data, np.uint8)
        flat = np.stack((pairs & 15, pairs >> 4), -1).ravel()[: int(np.prod(self.shape))].astype(np.int8)
        return np.where(flat > 7, flat - 16, flat).reshape(self.shape)


class Operator:
    """An operator of a file."""

    def __init__(self, table: Any, code: Any) -> None:
        number = max(code.builtinCode, code.deprecatedBuiltinCode)
        custom = (code.customCode or b"").decode("utf-8", "replace")
        self.kind: str = custom if number == schema.BuiltinOperator.CUSTOM else _OPERATORS.get(number, str(number))
        self.inputs, self.outputs = (
            [int(i) for i in (ids if ids is not None else ())] for ids in (table.inputs, table.outputs)
        )
        self._options = table.builtinOptions

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option of the schema's table, or the default where the file leaves it out."""
        return getattr(self._options, name, default)


class TfliteModel:
    """The network of a `.tflite` file.

    Args:
        content: the file's bytes.
        where: what names it in messages.
        requantize: take the integers of a quantized file for the floats that they stand for.

    Raises:
        CaptureError: LiteRT refuses the file, or it is more than one network.
    """

    def __init__(self, content: bytes, where: str = "the model", requantize: bool = False) -> None:
        self.content, self.where, self.requantize = content, where, requantize
        try:
            self._interpreter = self._opened()
            self._interpreter.allocate_tensors()
            table = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
        except (ValueError, RuntimeError, IndexError, TypeError, AttributeError, struct.error) as e:
            what = "The file is not a .tflite file that LiteRT can run"
            hint = "a file with custom operators needs the program that registers them"
            raise CaptureError(what, where=where, got=first_line(e), hint=hint) from e
        graph = table.subgraphs[0]
        data = [b.data for b in table.buffers]
        self.tensors = [Tensor(k, t, _content(t, data[t.buffer])) for k, t in enumerate(graph.tensors)]
        self.operators = [Operator(o, table.operatorCodes[o.opcodeIndex]) for o in graph.operators]
        named = {m.tensorIndex: m.name.decode() for s in (table.signatureDefs or ())[:1] for m in s.inputs or ()}
        self.names = [named.get(int(i), self.tensors[int(i)].name) for i in graph.inputs]  #: of inputs, for callers
        self.inputs, self.outputs = ([self.tensors[int(i)] for i in ids] for ids in (graph.inputs, graph.outputs))

    @property
    def quantized(self) -> list[Tensor]:
        """The tensors of integers with a scale."""
        return [t for t in self.tensors if t.scale is not None]

    def _opened(self) -> Any:
        kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        options = {"experimental_op_resolver_type": kernels, "experimental_preserve_all_tensors": True}
        return Interpreter(model_content=self.content, num_threads=1, **options)

    def run(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for one call, in the order of the file; quantized ones as the numbers they stand for.

        Raises:
            CaptureError: LiteRT cannot run the network with these inputs.
        """
        try:
            for t, x in zip(self.inputs, inputs, strict=True):
                self._interpreter.resize_tensor_input(t.index, x.shape)
            self._interpreter.allocate_tensors()
            for t, x in zip(self.inputs, inputs, strict=True):
                self._interpreter.set_tensor(t.index, _to_codes(t, x))
            self._interpreter.invoke()
        except (RuntimeError, ValueError) as e:
            given = ", ".join(str(list(x.shape)) for x in inputs)
            what = f"LiteRT cannot run the file: {first_line(e)}"
            raise CaptureError(what, where=self.where, got=f"inputs {given}") from e
        return [_to_reals(t, self._interpreter.get_tensor(t.index)) for t in self.outputs]

    def computed(self, index: int) -> np.ndarray:
        """Return what LiteRT computed for a tensor in the last call."""
        return _to_reals(self.tensors[index], np.array(self._interpreter.get_tensor(index)))

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shape of every tensor in the last call."""
        return [
            tuple(map(int, self._interpreter.get_tensor(t.index).shape)) if self._known(t) else t.shape
            for t in self.tensors
        ]

    def _known(self, t: Tensor) -> bool:
        try:
            self._interpreter.get_tensor(t.index)
        except ValueError:  # it is read by no operator, or inside one only
            return False
        return True

    def __call__(self, *inputs: Any) -> Any:
        """Return what LiteRT computes for arrays or tensors, one sample at a time where the file fixes the batch."""
        arrays = [np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x) for x in inputs]
        out = [torch.from_numpy(np.array(y)) for y in self.run_batch(arrays)]
        return out[0] if len(out) == 1 else tuple(out)

    def run_batch(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for a batch of any size."""
        count = max(len(a) for a in arrays)
        fixed = [t.shape[0] if t.shape else 1 for t in self.inputs]
        if any(t.signature[:1] == (-1,) for t in self.inputs) or len({*fixed}) != 1 or count == fixed[0]:
            return self.run(arrays)
        parts = [self.run([a[k : k + fixed[0]] for a in arrays]) for k in range(0, count, fixed[0])]
        return [np.concatenate(ys) for ys in zip(*parts, strict=True)]


def _content(table: Any, data: Any) -> bytes | None:
    """Return the content of a constant; None for a tensor that is computed, as dense ones are from sparse ones."""
    return None if data is None or len(data) == 0 or table.sparsity is not None else bytes(data)


def _to_codes(t: Tensor, x: np.ndarray) -> np.ndarray:
    if t.scale is None:
        return x.astype(np.dtype(t.kind.lower().replace("bool", "bool_")))
    kind = np.dtype(t.kind.lower())
    if x.dtype == kind:
        return x
    ends = np.iinfo(kind)
    return np.clip(np.rint(x / t.scale) + t.zero, ends.min, ends.max).astype(kind)


def _to_reals(t: Tensor, y: np.ndarray) -> np.ndarray:
    return y if t.scale is None else ((y.astype(np.int64) - t.zero) * t.scale).astype(np.float32)


def load(path: str | Path) -> TfliteModel:
    """Open a `.tflite` file.

    Raises:
        CaptureError: There is no such file, or LiteRT refuses it.
    """
    file = existing_file(path, CaptureError, "The model file")
    with wrap_read_errors(file, CaptureError, "The model file"):
        content = file.read_bytes()
    return TfliteModel(content, str(path))
