"""A `.tflite` file as a model: its network, opened and checked by LiteRT, and what LiteRT computes with it."""

from __future__ import annotations

import copy
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from chipfit.errors import CaptureError, first_line
from chipfit.files import existing_file
from chipfit.frameworks.mapped_files import MappedFiles
from chipfit.frameworks.quantized import dequantized
from chipfit.frameworks.tflite.checks import MOST_OPERATORS, check_operators, check_subgraphs, check_tables
from chipfit.frameworks.tflite.custom_options import check_custom_options
from chipfit.frameworks.tflite.loops import unroll_loops
from chipfit.frameworks.tflite.variables import packed, variables_to_inputs

_NAMES = {code: name for name, code in vars(schema.TensorType).items() if isinstance(code, int)}
_OPERATORS = {code: name for name, code in vars(schema.BuiltinOperator).items() if isinstance(code, int)}
#: types of biases
WIDE = ("INT32", "INT64")
#: types of the integers that quantized tensors hold
_CODES = ("INT4", "INT8", "UINT8", "INT16", *WIDE)
#: operators whose results depend on the shapes of their operands only
_OF_SHAPES = ("SHAPE", "RANK")
LSTM = "UNIDIRECTIONAL_SEQUENCE_LSTM"

Span = tuple[int, int]  #: first byte and number of bytes


class Content:
    """The bytes of a `.tflite` file, which is mapped into memory inside blocks of `opened`, or bytes in memory."""

    def __init__(self, source: bytes | Path) -> None:
        self.path = source if isinstance(source, Path) else None
        self._bytes = source if isinstance(source, bytes) else b""
        self._files = MappedFiles(self.path and self.path.parent)
        if self.path is not None:
            self._files.note(self.path.name)

    def opened(self) -> AbstractContextManager[None]:
        """Check that the file is the one that was loaded, and keep it mapped inside the block."""
        return self._files.mapped()

    def everything(self) -> Any:
        """Return all bytes, which are not copied."""
        return self._bytes if self.path is None else self._files.map(self.path.name)

    def numbers(self, span: Span) -> np.ndarray:
        """Return bytes of the file, which are not copied."""
        return np.frombuffer(self.everything(), np.uint8, span[1], span[0])

    def release(self, span: Span) -> None:
        """Give back the memory of bytes that have been copied."""
        if self.path is not None:
            self._files.release(self.path.name, *span)


class Tensor:
    """A tensor of a file.

    Args:
        span: where the numbers of a constant are; None for a tensor that is computed.
    """

    def __init__(self, index: int, table: Any, content: Content, span: Span | None) -> None:
        self.index, self._content, self._span = index, content, span
        self.name = (table.name or b"").decode("utf-8", "replace").partition(";")[0] or f"tensor_{index}"
        self.kind = _NAMES.get(table.type, str(table.type))
        self.shape = tuple(int(d) for d in (table.shape if table.shape is not None else ()))
        signature = table.shapeSignature
        self.signature = self.shape if signature is None else tuple(int(d) for d in signature)
        q = table.quantization
        scaled = q is not None and q.scale is not None and len(q.scale) > 0 and self.kind in _CODES
        self.scale = np.array(q.scale, np.float32) if scaled else None
        self.zero = np.array(q.zeroPoint if scaled and q.zeroPoint is not None else 0, np.int64)
        self.axis = int(q.quantizedDimension) if scaled else 0

    @property
    def dtype(self) -> str:
        """The type of the numbers that it stands for."""
        return "float32" if self.scale is not None or self.kind == "FLOAT16" else self.kind.lower()

    @property
    def is_constant(self) -> bool:
        return self._span is not None

    @property
    def constant(self) -> np.ndarray | None:
        """The numbers that a constant stands for, not copied if it is of floats; None for a tensor that is computed."""
        if self._span is None:
            return None
        with self._content.opened():
            codes = self._codes(self._content.numbers(self._span))
        if self.scale is None:
            return codes.astype(np.float32) if codes.dtype == np.float16 else codes
        sides = [1] * codes.ndim
        if self.scale.size > 1:
            sides[self.axis] = -1
        scale, zero = (v.reshape(sides if v.size > 1 else ()) for v in (self.scale, self.zero))
        wide = self.kind in WIDE  # float32 cannot hold 32 bits
        return dequantized(codes, scale.astype(np.float64 if wide else np.float32), zero)

    def release(self) -> None:
        """Give back the memory of a constant that has been copied."""
        if self._span is not None:
            self._content.release(self._span)

    def _codes(self, data: np.ndarray) -> np.ndarray:
        if self.kind != "INT4":
            return data.view(np.dtype(self.kind.lower().replace("bool", "bool_"))).reshape(self.shape)
        flat = np.stack((data & 15, data >> 4), -1).ravel()[: int(np.prod(self.shape))].astype(np.int8)
        return np.where(flat > 7, flat - 16, flat).reshape(self.shape)


class Operator:
    """An operator of a file."""

    def __init__(self, table: Any, code: Any) -> None:
        number = max(code.builtinCode, code.deprecatedBuiltinCode)
        custom = (code.customCode or b"").decode("utf-8", "replace")
        self.is_custom = number == schema.BuiltinOperator.CUSTOM
        self.kind: str = custom if self.is_custom else _OPERATORS.get(number, str(number))
        self.inputs, self.outputs = (
            [int(i) for i in (ids if ids is not None else ())] for ids in (table.inputs, table.outputs)
        )
        self.intermediates = [int(i) for i in (table.intermediates if table.intermediates is not None else ())]
        self.custom_options = bytes(table.customOptions if table.customOptions is not None else b"")
        self._options = table.builtinOptions
        for name, value in vars(self._options or object.__new__(schema.AddOptionsT)).items():
            if isinstance(value, np.ndarray):
                setattr(self._options, name, value.copy())  # not in the file, which is unmapped

    def option(self, name: str, default: Any = None) -> Any:
        """Return an option of the schema's table, or the default where the file leaves it out."""
        return getattr(self._options, name, default)


class Facts(NamedTuple):
    """The facts about a network that a run of LiteRT shows."""

    shapes: list[tuple[int, ...]]  #: of every tensor
    folded: dict[int, np.ndarray]  #: tensors that are computed from constants and sizes -> their numbers


class TfliteModel:
    """The network of a `.tflite` file.

    Args:
        source: the file's path, or its bytes.
        where: what names it in messages.
        requantize: take the integers of a quantized file for the floats that they stand for.

    Raises:
        CaptureError: LiteRT refuses the file, or it is more than one network.
    """

    def __init__(self, source: bytes | Path, where: str = "the model", requantize: bool = False) -> None:
        self.content, self.where, self.requantize = Content(source), where, requantize
        self._interpreter: Any = None  #: open inside a session
        try:
            self._check_start()
            if (mended := self._with_axes_of_vectors()) is not None:
                self.content = Content(mended)
            with self.session() as interpreter:  # which checks all offsets
                table = self.table()
                check_subgraphs(table, where)
                changed = unroll_loops(table)
                self.states = variables_to_inputs(table, where)  #: number of the last inputs that hold states
                changed = scale_biases(table) or changed or self.states > 0
                if not changed:
                    self._read_checked(table, interpreter)
            if changed:
                self.content = Content(packed(table))
                with self.session() as interpreter:
                    self._read_checked(self.table(), interpreter)
        except (ValueError, RuntimeError, LookupError, TypeError, AttributeError, struct.error) as e:
            what = "The file is not a .tflite file that LiteRT can run"
            raise CaptureError(what, where=where, got=first_line(e)) from e

    def __repr__(self) -> str:
        inputs = ", ".join(f"{t.name} {list(t.signature)}" for t in self.inputs)
        return f"<network of {self.where}, {len(self.operators)} operators, inputs {inputs}>"

    def _read_checked(self, table: Any, interpreter: Any) -> None:
        self._read(table)
        check_operators(self)
        self._check_kernels(interpreter)

    def _check_kernels(self, interpreter: Any) -> None:
        """Check that LiteRT has kernels for all operators, and that they take the sizes that the file has."""
        try:
            interpreter.allocate_tensors()
        except RuntimeError as e:  # sizes of 1 in place of open ones may be too few, as for a window of samples
            if unknown := re.search(r"(?:custom op|Flex delegate).*Node number \d+ \((\S+)\)", str(e), re.DOTALL):
                what = f"LiteRT has no kernel for the custom operator {unknown[1]}"
                hint = "convert the model without it, or give the file that a chip's compiler was given"
                raise CaptureError(what, where=self.where, hint=hint) from e
            if self.has_custom or not any(d < 0 for t in self.inputs for d in t.signature):
                raise

    def _check_start(self) -> None:
        """Check what LiteRT needs to look into a file."""
        with self.content.opened():
            content = self.content.everything()
            if content[4:8] != b"TFL3" or schema.Model.GetRootAs(content, 0).SubgraphsIsNone():
                raise ValueError("no network, or no mark of TensorFlow Lite")
            count = max(schema.Model.GetRootAs(content, 0).Subgraphs(0).OperatorsLength(), 0)
            check_custom_options(schema.Model.GetRootAs(content, 0), self.where)
        if count > MOST_OPERATORS:
            got, allowed = f"{count:,} operators", f"at most {MOST_OPERATORS:,}"
            raise CaptureError("The network is too large a graph", where=self.where, got=got, allowed=allowed)

    def _with_axes_of_vectors(self) -> bytes | None:
        """Return the file with the scales of vectors along their only axis; None if they are.

        Old converters wrote the axis of the weights there, which LiteRT refuses and microcontrollers ignore.
        """
        with self.content.opened():
            graph = schema.Model.GetRootAs(self.content.everything(), 0).Subgraphs(0)
            vectors = [t for t in map(graph.Tensors, range(graph.TensorsLength())) if t.ShapeLength() == 1]
            found = [q for t in vectors if (q := t.Quantization()) is not None and q.QuantizedDimension() > 0]
            places = [q._tab.Pos + q._tab.Offset(16) for q in found]
            out = bytearray(self.content.everything() if places else b"")
        for at in places:
            out[at : at + 4] = bytes(4)
        return bytes(out) if places else None

    def _read(self, table: Any) -> None:
        """Keep what the tables of the file hold.

        Raises:
            CaptureError: They are malformed.
        """
        graph = table.subgraphs[0]
        whole = np.frombuffer(self.content.everything(), np.uint8)
        spans = [_span(t, table.buffers[t.buffer], whole) for t in graph.tensors]
        kinds = [_NAMES.get(t.type, str(t.type)) for t in graph.tensors]
        check_tables(table, kinds, [None if s is None else s[1] for s in spans], self.where)
        self.tensors = [Tensor(k, t, self.content, spans[k]) for k, t in enumerate(graph.tensors)]
        self.operators = [Operator(o, table.operatorCodes[o.opcodeIndex]) for o in graph.operators]
        self.has_custom = any(code.customCode for code in table.operatorCodes)
        signatures = table.signatureDefs or ()
        first = [s for s in signatures if s.subgraphIndex == 0][:1]
        self.left_out = [s.signatureKey.decode() for s in signatures if s.subgraphIndex != 0]  #: further networks
        named = {m.tensorIndex: m.name.decode() for s in first for m in s.inputs or ()}
        self.names = [named.get(int(i), self.tensors[int(i)].name) for i in graph.inputs]  #: of inputs, for callers
        self.inputs, self.outputs = ([self.tensors[int(i)] for i in ids] for ids in (graph.inputs, graph.outputs))

    @property
    def quantized(self) -> list[Tensor]:
        """The tensors of integers with a scale."""
        return [t for t in self.tensors if t.scale is not None]

    def table(self) -> Any:
        """Return the file as the objects of its schema, whose numbers are not copied."""
        return schema.ModelT.InitFromObj(schema.Model.GetRootAs(self.content.everything(), 0))

    @contextmanager
    def session(self) -> Iterator[Any]:
        """Keep the file mapped and LiteRT's interpreter open inside the block."""
        with self.content.opened():
            first = self._interpreter is None
            try:
                if first:
                    self._interpreter = self._opened()
                yield self._interpreter
            finally:
                if first:
                    self._interpreter = None

    def _opened(self) -> Any:
        kernels = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        options = {"experimental_op_resolver_type": kernels, "experimental_preserve_all_tensors": True}
        path = self.content.path
        given = {"model_content": self.content.everything()} if path is None else {"model_path": str(path)}
        return Interpreter(**given, num_threads=1, **options)

    @property
    def streams(self) -> bool:
        """Each call computes the next step of one sequence: it has SVDF, or LSTMs with one step a call."""
        shapes = {self.tensors[o.inputs[0]].shape[:2] for o in self.operators if o.kind == LSTM}
        return any(o.kind == "SVDF" for o in self.operators) or shapes == {(1, 1)}

    @property
    def opens(self) -> bool:
        """The first axis of inputs but scalars may count any number of samples, computed one at a time."""
        major = any(o.kind == LSTM and o.option("timeMajor", False) for o in self.operators)
        return {t.shape[:1] for t in self.inputs} - {()} == {(1,)} and (self.streams or not major)

    @property
    def unrunnable(self) -> str:
        """The operator at which LiteRT would crash, although it opens the file; "" if there is none."""
        states = {self.tensors[o.inputs[4]].kind for o in self.operators if o.kind == "SVDF"}
        return "SVDF with a state of 8 bits" if "INT8" in states else ""

    def run(self, inputs: Sequence[np.ndarray], follows: bool = False) -> list[np.ndarray]:
        """Return the outputs for one call, in the order of the file; quantized ones as the numbers they stand for.

        Args:
            follows: begin with the states that the call before left in this session, not with those of the file.

        Raises:
            CaptureError: LiteRT cannot run the network with these inputs.
        """
        if self.unrunnable:
            raise CaptureError(f"LiteRT has no kernel for {self.unrunnable}", where=self.where)
        try:
            with self.session():
                for t, x in zip(self.inputs, inputs, strict=True):
                    self._interpreter.resize_tensor_input(t.index, x.shape)
                self._interpreter.allocate_tensors()
                if not follows:
                    self._interpreter.reset_all_variables()
                for t, x in zip(self.inputs, inputs, strict=True):
                    self._interpreter.set_tensor(t.index, _to_codes(t, x))
                self._interpreter.invoke()
                return [_to_reals(t, self._interpreter.get_tensor(t.index)) for t in self.outputs]
        except (RuntimeError, ValueError) as e:
            given = ", ".join(str(list(x.shape)) for x in inputs)
            what = f"LiteRT cannot run the file: {first_line(e)}"
            raise CaptureError(what, where=self.where, got=f"inputs {given}") from e

    def steps(self, data: Iterable[Any]) -> Iterator[Any]:
        """Yield batches with states, which start from zeros: without them, all samples are steps of one sequence."""
        count = len(self.inputs) - self.states
        states = [np.zeros(t.shape, np.float32) for t in self.inputs[count:]]
        for batch in data:
            named = [batch[n] for n in self.names if n in batch] if isinstance(batch, dict) else batch
            given = list(named) if isinstance(named, (list, tuple)) else [named]
            if len(given) < len(self.inputs):
                seen = []
                with self.session():
                    for k in range(len(given[0])):
                        seen.append(states)
                        states = self.run([*(np.asarray(x[k : k + 1]) for x in given[:count]), *states])[-len(states) :]
                given[count:count] = [torch.from_numpy(np.concatenate(xs)) for xs in zip(*seen, strict=True)]
            yield tuple(given)

    def facts(self) -> Facts:
        """Return what the last run of this session shows."""
        found = {int(d["index"]): d["shape"] for d in self._interpreter.get_tensor_details()}
        shapes = [tuple(map(int, found[t.index])) if t.index in found else t.shape for t in self.tensors]
        computed, folded = {t.index for t in self.inputs}, dict[int, np.ndarray]()
        for op in self.operators:
            if not op.inputs or (op.kind not in _OF_SHAPES and not computed.isdisjoint(op.inputs)):
                computed.update(op.outputs)
            elif not self.restores(op):
                folded |= {o: _to_reals(self.tensors[o], self._interpreter.get_tensor(o)) for o in op.outputs}
        return Facts(shapes, folded)

    def restores(self, op: Operator) -> bool:
        """Return whether an operator returns the numbers that a constant stands for."""
        return op.kind == "DEQUANTIZE" and self.tensors[op.inputs[0]].is_constant

    def __call__(self, *inputs: Any) -> Any:
        """Return what LiteRT computes for arrays or tensors, one sample at a time where the file fixes the batch."""
        arrays = [np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x) for x in inputs]
        out = [torch.from_numpy(np.array(y)) for y in self.run_batch(arrays)]
        return out[0] if len(out) == 1 else tuple(out)

    def run_batch(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for a batch of any size."""
        count = max((len(a) for a in arrays if a.ndim), default=1)
        fixed = [t.shape[0] for t in self.inputs if t.shape]
        is_open = any(t.signature[:1] == (-1,) for t in self.inputs)
        if is_open or len({*fixed}) != 1 or count == fixed[0]:
            try:
                return self.run(arrays)
            except CaptureError:  # the operators of a file may take one sample alone, though its inputs are open
                if not is_open or {*fixed} != {1} or count == 1:
                    raise
        with self.session():
            starts = range(0, count, fixed[0])
            parts = [
                self.run([a[k : k + fixed[0]] if a.ndim else a for a in arrays], self.streams and k > 0) for k in starts
            ]
        return [np.concatenate(ys) for ys in zip(*parts, strict=True)]


def _span(table: Any, buffer: Any, whole: np.ndarray) -> Span | None:
    """Return where the numbers of a constant are; None for a tensor that is computed, as dense ones are from sparse."""
    if table.sparsity is not None:
        return None
    if buffer.offset > 1:  # files of more than 2 GB have them behind their tables
        return int(buffer.offset), int(buffer.size)
    if buffer.data is None or len(buffer.data) == 0:
        return None
    return buffer.data.ctypes.data - whole.ctypes.data, len(buffer.data)


def _to_codes(t: Tensor, x: np.ndarray) -> np.ndarray:
    if t.scale is None:
        return x.astype(np.dtype(t.kind.lower().replace("bool", "bool_")))
    kind = np.dtype(t.kind.lower())
    if x.dtype == kind:
        return x
    ends = np.iinfo(kind)
    return np.clip(np.rint(x / t.scale) + t.zero, ends.min, ends.max).astype(kind)


def _to_reals(t: Tensor, y: np.ndarray) -> np.ndarray:
    if t.scale is None:
        return y
    along = [-1 if k == t.axis else 1 for k in range(y.ndim)] if t.scale.size > 1 else []  # of a constant
    zero = t.zero.reshape(along) if t.zero.size > 1 else t.zero
    return ((y.astype(np.int64) - zero) * t.scale.reshape(along or t.scale.shape)).astype(np.float32)


def load(path: str | Path) -> TfliteModel:
    """Open a `.tflite` file.

    Raises:
        CaptureError: There is no such file, or LiteRT refuses it.
    """
    file = existing_file(path, CaptureError, "The model file")
    return TfliteModel(file, str(path))


_CODE, _WIDE = schema.BuiltinOperator, (schema.TensorType.INT32, schema.TensorType.INT64)
#: operator -> places of its input, weight and bias
_LAYERS = {
    **dict.fromkeys((_CODE.CONV_2D, _CODE.DEPTHWISE_CONV_2D, _CODE.FULLY_CONNECTED), (0, 1, 2)),
    _CODE.TRANSPOSE_CONV: (2, 1, 3),
}
_NEAR = 1e-3  #: relative difference of scales that are rounded otherwise


def scale_biases(table: Any) -> bool:
    """Give biases of a `ModelT` whose own scale says something else a copy with the kernel's; return whether any did.

    Kernels add the integers of a bias as they are. Converters let layers share one whose integers suit one of them.
    """
    graph, codes = table.subgraphs[0], [max(c.builtinCode, c.deprecatedBuiltinCode) for c in table.operatorCodes]
    found = False
    for op in graph.operators:
        places = _LAYERS.get(codes[op.opcodeIndex])
        if places is None or len(op.inputs) <= places[2] or min(int(op.inputs[k]) for k in places) < 0:
            continue
        x, weight, bias = (graph.tensors[int(op.inputs[k])] for k in places)
        of_x, of_weight, own = (_scales(t) for t in (x, weight, bias))
        wanted = (of_x * of_weight).astype(np.float32) if of_x.size == 1 else np.zeros(0)
        known = own.size in (1, wanted.size) and np.allclose(own, wanted, _NEAR, 0)
        if bias.type not in _WIDE or not wanted.size or known:
            continue
        new = copy.copy(bias)
        new.name = (bias.name or b"bias") + b"_%d" % int(op.outputs[0])
        new.quantization = schema.QuantizationParametersT()
        new.quantization.scale, new.quantization.zeroPoint = wanted, np.zeros(wanted.size, np.int64)
        op.inputs, found = np.array(op.inputs), True
        op.inputs[places[2]] = len(graph.tensors)
        graph.tensors.append(new)
    return found


def _scales(t: Any) -> np.ndarray:
    return np.zeros(0) if t.quantization is None or t.quantization.scale is None else np.ravel(t.quantization.scale)
