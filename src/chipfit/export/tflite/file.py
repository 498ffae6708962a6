"""A `.tflite` file under construction: its tensors, its operators, and the tables of the schema around them."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit._version import __version__
from chipfit.export.tflite.versions import least_version
from chipfit.files import package_data
from chipfit.graph.edit import unique_name

#: types as torch and numpy name them -> their numbers in the schema
TYPES = {
    name: getattr(schema.TensorType, name.upper())
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}
NUMPY = {code: np.dtype(name) for name, code in TYPES.items()}
INT4 = schema.TensorType.INT4


class Quantization(NamedTuple):
    """Scale and zero point of a tensor."""

    scale: np.ndarray  #: one, or one for each channel; [O, I / block] for blocks of a matrix
    zero: np.ndarray
    axis: int = 0  #: of the channels


class File:
    """The tensors and operators so far."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.operators: list[Any] = []
        self.index: dict[str, int] = {}  #: tensor name -> index
        self.scope = "io"  #: first part of the names of unnamed tensors
        #: tensor [N, L, C] -> the image [N, 1, L, C] of its numbers, which kernels of images read or have made
        self.images: dict[int, int] = {}
        self._picks: dict[int, tuple[int, int, np.ndarray]] = {}  #: result of GATHER -> its operand, axis and indices
        self._buffers: list[_Buffer] = [_Buffer()]
        self._by_bytes: dict[bytes, int] = {}
        self._codes: list[Any] = []
        self._constants: dict[Any, int] = {}

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        kind: int,
        numbers: Quantization | None = None,
        *,
        data: bytes | None = None,
        open_shape: Sequence[int] = (),
    ) -> int:
        """Add a tensor and return its index."""
        t = schema.TensorT()
        t.name, t.shape, t.type, t.buffer, t.hasRank = name.encode(), np.array(shape, np.int32), kind, 0, True
        if -1 in open_shape:
            t.shapeSignature = np.array(open_shape, np.int32)
        if data is not None:
            t.buffer = self._buffer(data)
        if numbers is not None and np.ndim(numbers.scale) > 1:
            p = t.quantization = schema.QuantizationParametersT()
            p.detailsType = schema.QuantizationDetails.BlockwiseQuantization
            p.details = self._blocks(name, shape, numbers)
        elif numbers is not None:
            t.quantization = quantization(numbers)
        self.tensors.append(t)
        self.index[name] = len(self.tensors) - 1
        return self.index[name]

    def _blocks(self, name: str, shape: Sequence[int], numbers: Quantization) -> Any:
        """Add the scales of blocks along the last axis as a tensor of their own; zero points are 0."""
        blocks = schema.BlockwiseQuantizationT()
        blocks.scales = self.constant(np.asarray(numbers.scale, np.float16), f"{name}/scales")
        blocks.zeroPoints, blocks.blockSize = -1, shape[-1] // numbers.scale.shape[-1]
        return blocks

    def constant(self, value: Any, name: str = "", kind: int | None = None, numbers: Quantization | None = None) -> int:
        """Add a constant tensor, shared by all operators that read equal content, and return its index."""
        a = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
        kind = TYPES[a.dtype.name] if kind is None else kind
        key = (name, kind, a.shape, a.tobytes(), numbers and np.asarray(numbers.scale).tobytes())
        if key not in self._constants:
            data = pack_4_bits(a) if kind == INT4 else a.astype(NUMPY[kind])
            whole = self._free(name or f"{self.scope}/const")
            self._constants[key] = self.tensor(whole, a.shape, kind, numbers, data=data.tobytes())
        return self._constants[key]

    def ints(self, *values: int) -> int:
        return self.constant(np.array(values, np.int32))

    def scalar(self, value: float) -> int:
        return self.constant(np.float32(value))

    def temporary(self, shape: Sequence[int], like: int | None = None, name: str = "") -> int:
        """Add a tensor inside a decomposed operator: float, or with type and quantization of the tensor `like`."""
        k = self.tensor(self._free(name or f"{self.scope}/part"), shape, TYPES["float32"])
        if like is not None:
            t = self.tensors[like]
            self.tensors[k].type, self.tensors[k].quantization = t.type, t.quantization
        return k

    def op(self, kind: str, inputs: Sequence[int], outputs: int | Sequence[int], **options: Any) -> None:
        """Add an operator by the schema's name, with options by theirs."""
        outs = [outputs] if isinstance(outputs, int) else outputs
        o = schema.OperatorT()
        o.opcodeIndex = self._code(kind, inputs, outs, options)
        o.inputs, o.outputs = np.array(inputs, np.int32), np.array(outs, np.int32)
        table = _ODD_TABLES.get(kind, _TABLES.get(kind.replace("_", "").lower(), ""))
        if table:
            o.builtinOptionsType = getattr(schema.BuiltinOptions, table)
            o.builtinOptions = getattr(schema, f"{table}T")()
        for key, value in options.items():
            if not hasattr(o.builtinOptions, key):
                raise AttributeError(f"{table or kind} has no field {key}")
            setattr(o.builtinOptions, key, value)
        self.operators.append(o)

    def pick(self, x: int, index: np.ndarray, axis: int, y: int) -> None:
        """Add a GATHER with constant indices, which are not negative."""
        if index.ndim == 1:
            self._picks[y] = x, axis, index
        self.op("GATHER", [x, self.constant(index.astype(np.int32))], y, axis=axis)

    def merge_picks(self, outputs: Collection[int]) -> None:
        """Merge each GATHER with one before it, and drop those that move nothing or that nothing reads."""
        same: dict[int, int] = {}
        for o in self.operators:
            o.inputs = np.array([same.get(int(i), int(i)) for i in o.inputs], np.int32)
            y = int(o.outputs[0])
            if y not in self._picks:
                continue
            (_, axis, index), x = self._picks[y], int(o.inputs[0])
            before = self._picks.get(x)
            if before is not None and before[1] == axis and self._alike(before[0], x):
                x, index = before[0], before[2][index]
                o.inputs = np.array([x, self.constant(index.astype(np.int32))], np.int32)
            self._picks[y] = x, axis, index
            size = self.tensors[x].shape[axis]
            if y not in outputs and np.array_equal(index, np.arange(size)) and self._alike(x, y):
                same[y] = x
        reads = Counter(int(i) for o in self.operators for i in o.inputs) + Counter(outputs)
        for o in reversed(self.operators):
            if int(o.outputs[0]) in self._picks and not reads[int(o.outputs[0])]:
                reads.subtract(int(i) for i in o.inputs)
                self.operators.remove(o)

    def _alike(self, a: int, b: int) -> bool:
        """Return whether the integers of two tensors stand for the same numbers."""
        first, second = (self.tensors[k] for k in (a, b))
        pair = [
            None if t.quantization is None else (list(t.quantization.scale), list(t.quantization.zeroPoint))
            for t in (first, second)
        ]
        return first.type == second.type and pair[0] == pair[1]

    def drop_unread_lines(self, outputs: Collection[int]) -> list[str]:
        """Drop the reshapes of images to lines that nothing reads; return the lines' names, which the images get."""
        reads = Counter(int(i) for o in self.operators for i in o.inputs)
        unread = {y: image for y, image in self.images.items() if not reads[y] and y not in outputs}
        made = [o for o in self.operators if int(o.outputs[0]) in unread]
        self.operators = [o for o in self.operators if int(o.outputs[0]) not in unread]
        for y, image in unread.items():
            self.tensors[image].name = self.tensors[y].name
        return [self.tensors[int(o.outputs[0])].name.decode() for o in made]

    def content(self, inputs: Mapping[str, int], outputs: Mapping[str, int], notes: Mapping[str, bytes]) -> bytes:
        """Return the whole file.

        Args:
            inputs, outputs: tensors by their names in the signature.
            notes: metadata entries, by name.
        """
        used = {int(i) for o in self.operators for i in (*o.inputs, *o.outputs)}
        used |= {int(i) for o in self.operators for i in (() if o.intermediates is None else o.intermediates)}
        used |= {*inputs.values(), *outputs.values()}
        used.discard(-1)  # operands that are left out
        blocks = [q.details for i in sorted(used) if (q := self.tensors[i].quantization) and q.details]
        used |= {b.scales for b in blocks}
        # a fused activation leaves tensors behind that nothing reads; order as in files of TFLiteConverter
        keep = sorted(used, key=lambda i: (i not in inputs.values(), not self.tensors[i].buffer, i))
        new = {old: k for k, old in enumerate(keep)} | {-1: -1}
        for o in self.operators:
            o.inputs, o.outputs = (np.array([new[int(i)] for i in ids], np.int32) for ids in (o.inputs, o.outputs))
            if o.intermediates is not None:
                o.intermediates = np.array([new[int(i)] for i in o.intermediates], np.int32)
        for b in blocks:
            b.scales = new[b.scales]
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = b"serving_default", 0
        signature.inputs, signature.outputs = (
            [_named(name, new[k]) for name, k in ends.items()] for ends in (inputs, outputs)
        )
        g = schema.SubGraphT()
        g.name, g.tensors, g.operators = b"main", [self.tensors[i] for i in keep], self.operators
        g.inputs, g.outputs = (np.array([new[k] for k in ends.values()], np.int32) for ends in (inputs, outputs))
        entries = [schema.MetadataT() for _ in notes]
        for entry, (name, content) in zip(entries, notes.items(), strict=True):
            entry.name, entry.buffer = name.encode(), self._buffer(content)
        m = schema.ModelT()
        m.version, m.description, m.operatorCodes, m.subgraphs = 3, f"chipfit {__version__}".encode(), self._codes, [g]
        m.metadata, m.buffers, m.signatureDefs = entries, self._buffers, [signature]
        builder = _Builder(1024)
        builder.Finish(m.Pack(builder), file_identifier=b"TFL3")
        return bytes(builder.Output())

    def _free(self, name: str) -> str:
        return unique_name(name, self.index)

    def _buffer(self, data: bytes) -> int:
        """Return the number of the buffer with these bytes; tensors with equal bytes share one."""
        if data not in self._by_bytes:
            self._by_bytes[data] = len(self._buffers)
            self._buffers.append(_Buffer(data))
        return self._by_bytes[data]

    def custom_op(self, code: str, inputs: Sequence[int], outputs: Sequence[int], options: bytes) -> None:
        """Add an operator that the schema does not have, with options in a form of its own."""
        o = schema.OperatorT()
        o.opcodeIndex = self._add_code(schema.BuiltinOperator.CUSTOM, 1, code.encode())
        o.inputs, o.outputs = np.array(inputs, np.int32), np.array(outputs, np.int32)
        o.customOptions = np.frombuffer(options, np.uint8)
        self.operators.append(o)

    def _code(self, kind: str, inputs: Sequence[int], outputs: Sequence[int], options: Mapping[str, Any]) -> int:
        """Return the index of an operator code, in the least version that these tensors and options need."""
        ins, outs = ([self.tensors[t] for t in ids if t >= 0] for ids in (inputs, outputs))
        version = least_version(_VERSIONS, kind, ins, outs, options)
        return self._add_code(getattr(schema.BuiltinOperator, kind), version)

    def _add_code(self, number: int, version: int, custom: bytes | None = None) -> int:
        for k, c in enumerate(self._codes):
            if (c.builtinCode, c.version, c.customCode) == (number, version, custom):
                return k
        c = schema.OperatorCodeT()
        c.builtinCode, c.deprecatedBuiltinCode, c.version = number, min(number, 127), version
        c.customCode = custom
        self._codes.append(c)
        return len(self._codes) - 1


def quantization(numbers: Quantization) -> Any:
    """Return scales and zero points as the schema's table."""
    p = schema.QuantizationParametersT()
    p.scale = np.atleast_1d(np.asarray(numbers.scale, np.float32))
    p.zeroPoint = np.broadcast_to(np.atleast_1d(np.asarray(numbers.zero, np.int64)), p.scale.shape).copy()
    p.quantizedDimension = numbers.axis
    return p


class _Builder(flatbuffers.Builder):
    """A builder that writes equal vectors and texts once, such as the zero points of layers of equal width."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._written: dict[Any, int] = {}  #: type and content -> offset

    def _once(self, key: Any, write: Callable[[], int]) -> int:
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]

    def CreateNumpyVector(self, x: np.ndarray) -> int:  # noqa: N802 -- called by generated code
        return self._once((x.dtype.str, x.tobytes()), partial(super().CreateNumpyVector, x))

    def CreateString(self, s: Any, *more: Any) -> int:  # noqa: N802 -- called by generated code
        return self._once((s, more), partial(super().CreateString, s, *more))


class _Buffer:
    """A buffer that starts at a multiple of 16 bytes, as the schema demands; the generated writer does not align."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def Pack(self, builder: Any) -> Any:  # noqa: N802 -- called by generated code
        at = None
        if self.data:
            builder.StartVector(1, len(self.data), 16)
            builder.head -= len(self.data)
            builder.Bytes[builder.head : builder.head + len(self.data)] = self.data
            at = builder.EndVector()
        schema.BufferStart(builder)
        if at is not None:
            schema.BufferAddData(builder, at)
        return schema.BufferEnd(builder)


def _named(name: str, index: int) -> Any:
    t = schema.TensorMapT()
    t.name, t.tensorIndex = name.encode(), index
    return t


def pack_4_bits(codes: np.ndarray) -> np.ndarray:
    """Pack two 4-bit integers into a byte, the first in the low half."""
    flat = codes.ravel().astype(np.int8)
    flat = np.append(flat, np.int8(0)) if flat.size % 2 else flat
    return ((flat[0::2] & 15) | ((flat[1::2] & 15) << 4)).astype(np.uint8)


#: tables of options: "fullyconnected" -> "FullyConnectedOptions"
_TABLES = {name.removesuffix("Options").lower(): name for name in vars(schema.BuiltinOptions)}
_SCHEMA = package_data("chipfit.export.tflite", "schema.yaml")
_ODD_TABLES, _VERSIONS = (
    {kind: value for value, kinds in _SCHEMA[key].items() for kind in kinds.split()} for key in ("tables", "versions")
)
