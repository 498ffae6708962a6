"""The arena that TensorFlow Lite Micro needs for a `.tflite` file, found without its interpreter.

The arena has two ends. At the head lie the buffers of computed tensors and the scratch buffers of kernels, which share
memory where they live at different times; at the tail lie records that stay: of the interpreter, of tensors, operators
and kernels. While a file loads, the head holds temporary records instead, which count where they take more.

Sizes are those of a 64-bit processor, in the order in which the interpreter takes them. Source: tensorflow/tflite-micro
at 90b983c2b3f1, tensorflow/lite/micro/{micro_allocator,micro_allocation_info,micro_interpreter}.cc and kernels/*.cc;
what differs in the package tflite-micro 0.dev20261023182759 (with compressed tensors) is measured there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from ai_edge_litert import schema_py_generated as schema

from chipfit.export.tflite.file import INT4, NUMPY, TYPES
from chipfit.files import package_data

ALIGNMENT = 16  #: of tensors, scratch buffers and records of kernels [bytes]
#: bytes of the allocator, the planner and the list of graphs; of an operator; of the interpreter's two tensor records
_FIXED, _NODE, _EVAL_TENSOR, _TENSOR = 488, 64, 24, 64
_QUANTIZATION, _POINTER = 24, 8
#: bytes of records while a file loads: of a scratch request, and how many are free; of a buffer to plan, and planned
_REQUEST, _FREE_REQUESTS, _TO_PLAN, _PLANNED = 16, 12, 32, 40
#: operator -> bytes of its options, and of the record that its kernel keeps
_KEPT: dict[str, list[int]] = package_data("chipfit.export.tflite", "arena.yaml")
_CHANNEL_AXES = {"CONV_2D": 0, "DEPTHWISE_CONV_2D": 3, "TRANSPOSE_CONV": 0}  #: of weights
_SOFTMAX_TABLE = 2 * 513  #: bytes of each of the two tables for inputs of 16 bits
_FLOAT = TYPES["float32"]


@dataclass(frozen=True)
class Arena:
    """The memory that an interpreter takes for one file [bytes]."""

    total: int  #: least size with which the file loads
    tensors: int  #: of the computed tensors and scratch buffers
    records: int  #: of what stays
    layer: str = ""  #: output of the operator at which most is alive
    alive: int = 0  #: bytes of tensors and scratch buffers that are alive there


class Buffer(NamedTuple):
    """A computed tensor, or a scratch buffer."""

    size: int  #: bytes, aligned
    first: int  #: operator that makes it; 0 for inputs, and 1 for the first operator
    last: int  #: last operator that needs it


def place(buffers: Sequence[Buffer]) -> int:
    """Return the bytes that buffers take if they share memory.

    The largest comes first, each at the lowest offset that is free while it lives ("greedy by size for offset
    calculation", Pisarchyk and Lee 2020, arXiv:2001.03288). Of equal ones the last comes first.
    """
    placed: list[tuple[int, int, int, int]] = []
    for _, b in sorted(enumerate(buffers), key=lambda pair: (-pair[1].size, -pair[0])):
        at = 0
        for low, high, first, last in sorted(placed):
            if first <= b.last and b.first <= last:
                if low - at >= b.size:
                    break
                at = max(at, high)
        placed.append((at, at + b.size, b.first, b.last))
    return max((high for _, high, *_ in placed), default=0)


def tensor_memory(content: bytes, aligned: int = ALIGNMENT) -> int:
    """Return the bytes of a `.tflite` file's computed tensors; those that live at different times share memory."""
    return place(_tensor_buffers(*_read(content), aligned))


def arena(content: bytes) -> Arena:
    """Return the arena that a `.tflite` file needs; batch sizes are those of the file."""
    model, g = _read(content)
    kinds = [_kind(model, op) for op in g.operators]
    tail, before = _Tail(_FIXED), 0  # bytes while it loads
    tail.take(_EVAL_TENSOR * len(g.tensors), 8)
    tail.take(_NODE * len(g.operators), 8)
    for kind in kinds:
        size = _KEPT.get(kind, [0])[0]
        tail.take(size, 4 if size % 4 == 0 else 1)
    for kind in kinds:
        tail.take(_KEPT.get(kind, [0])[-1])
    scratch: list[Buffer] = []
    for k, (op, kind) in enumerate(zip(g.operators, kinds, strict=True), 1):
        kept, needed = _kernel_memory(g.tensors, op, kind)
        for size in kept:
            tail.take(size)
        scratch += [Buffer(_up(size), k, k) for size in needed]
        requests = _REQUEST * (len(scratch) + _FREE_REQUESTS)
        before = max(before, requests + _loading_memory(g.tensors, op, kind) + tail.bytes)
    tail.take(_POINTER * len(scratch), 8)
    for t in g.tensors:
        tail.take(_bytes(t) if t.isVariable else 0)
    buffers = _tensor_buffers(model, g) + scratch
    requests = _REQUEST * (len(scratch) + _FREE_REQUESTS) + _POINTER
    planning = _up(requests + _TO_PLAN * (len(g.tensors) + len(scratch))) + _PLANNED * len(buffers)
    before = max(before, planning + _up(tail.bytes))
    for ends in (g.inputs, g.outputs):
        tail.take(_POINTER * len(ends))
        for t in ends:
            tail.take(_TENSOR, 8)
            if (scales := _scales(g.tensors[t])) is not None:
                tail.take(_QUANTIZATION, 8)
                tail.take(4 + 4 * scales, 4)
    head = place(buffers)
    return Arena(_up(max(before, head + tail.bytes)), head, tail.bytes, *_fullest(g, buffers))


class _Tail:
    """The records that stay: each lies below the last one, aligned."""

    def __init__(self, taken: int) -> None:
        self.bytes = taken

    def take(self, size: int, aligned: int = ALIGNMENT) -> None:
        if size:
            self.bytes = _up(self.bytes + size, aligned)


def _read(content: bytes) -> tuple[Any, Any]:
    """Return a model and its first graph."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    return model, model.subgraphs[0]


def _kind(model: Any, op: Any) -> str:
    code = model.operatorCodes[op.opcodeIndex]
    return _KINDS.get(max(code.builtinCode, code.deprecatedBuiltinCode), "")


_KINDS = {number: name for name, number in vars(schema.BuiltinOperator).items() if isinstance(number, int)}


def _tensor_buffers(model: Any, g: Any, aligned: int = ALIGNMENT) -> list[Buffer]:
    """Return the computed tensors, in the order of the file."""
    lives: dict[int, list[int]] = {int(t): [0, 0] for t in g.inputs}
    for k, op in enumerate(g.operators, 1):
        for t in (*op.inputs, *op.outputs):
            if t >= 0 and not _stays(model, g.tensors[t]):
                lives.setdefault(int(t), [k, k])[1] = k
    for t in g.outputs:
        lives.setdefault(int(t), [len(g.operators)] * 2)[1] = len(g.operators)
    return [Buffer(_up(_bytes(g.tensors[t]), aligned), *lives[t]) for t in sorted(lives)]


def _stays(model: Any, tensor: Any) -> bool:
    """Return whether a tensor is a constant, or a variable, which lies among the records."""
    data = model.buffers[tensor.buffer].data
    return tensor.isVariable or (data is not None and len(data) > 0)


def _kernel_memory(tensors: Sequence[Any], op: Any, kind: str) -> tuple[list[int], list[int]]:
    """Return the bytes of what a kernel keeps besides its record, and of its scratch buffers."""
    ins: list[Any] = [tensors[t] if t >= 0 else None for t in op.inputs]
    out, kept, scratch = tensors[op.outputs[0]], list[int](), list[int]()
    if kind in _CHANNEL_AXES:
        kept = [4 * int(ins[1].shape[_CHANNEL_AXES[kind]])] * 2
    elif kind == "FULLY_CONNECTED" and out.type != _FLOAT and (_scales(ins[1]) or 0) > 1:
        kept = [4 * (_scales(ins[1]) or 0)] * 2
    elif kind == "SOFTMAX" and NUMPY[ins[0].type].itemsize == 2:
        kept = [_SOFTMAX_TABLE] * 2
    elif kind == "BATCH_MATMUL":
        kept = [28] if out.type != _FLOAT else []
        options = op.builtinOptions
        turned = [t for t, yes in ((ins[0], options.adjX), (ins[1], not options.adjY)) if yes]
        kept += [n for t in turned for n in (_EVAL_TENSOR, 4 + 4 * len(t.shape), _bytes(t))]
    if kind in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED") and ins[1].type == INT4:
        scratch = [_count(ins[1])]  # unpacked weights
    elif kind == "TRANSPOSE_CONV" and out.type != _FLOAT:
        scratch = [_count(out) * (4 if NUMPY[out.type].itemsize == 1 else 8)]
    elif kind in ("MEAN", "SUM", "REDUCE_MAX", "REDUCE_MIN"):
        scratch = [4 * _count(out)] if kind in ("MEAN", "SUM") and out.type != _FLOAT else []
        scratch += [4 * len(ins[0].shape), 4 * _count(ins[1])]
    elif kind == "MIRROR_PAD":
        scratch = [4 * len(ins[0].shape)] * 2
    elif kind == "SVDF":
        filters, batch = int(ins[1].shape[0]), int(ins[0].shape[0])
        scratch = [4 * batch * n for n in (filters, *([filters // op.builtinOptions.rank] * (out.type != _FLOAT)))]
    elif kind == "UNIDIRECTIONAL_SEQUENCE_LSTM":
        scratch = [_bytes(ins[19])] * 4  # of the size of the cell's state
    return kept, scratch


def _loading_memory(tensors: Sequence[Any], op: Any, kind: str) -> int:
    """Return the bytes of the records of a kernel's operands, which it reads while the file loads."""
    operands = [tensors[t] for t in (*op.inputs, *op.outputs) if t >= 0]
    again = [*operands[:2], operands[-1]] if kind in _CHANNEL_AXES else []  # a convolution reads these twice
    sizes = (
        _TENSOR + (0 if scales is None else _up(_QUANTIZATION + 4 + 4 * scales, 8))
        for scales in map(_scales, (*operands, *again))
    )
    return sum(sizes)


def _fullest(g: Any, buffers: Sequence[Buffer]) -> tuple[str, int]:
    """Return the output of the operator at which most is alive, and how many bytes are."""
    if not len(g.operators):
        return "", 0
    alive = [sum(b.size for b in buffers if b.first <= k <= b.last) for k in range(1, len(g.operators) + 1)]
    most = max(range(len(alive)), key=alive.__getitem__)
    name = g.tensors[g.operators[most].outputs[0]].name or b""
    return name.decode(errors="replace"), alive[most]


def _scales(tensor: Any) -> int | None:
    """Return the number of scales; None without quantization."""
    q = tensor.quantization
    return None if q is None or q.scale is None or not len(q.scale) else len(q.scale)


def _count(tensor: Any) -> int:
    return prod(map(int, tensor.shape)) if tensor.shape is not None else 1


def _bytes(tensor: Any) -> int:
    return (_count(tensor) + 1) // 2 if tensor.type == INT4 else _count(tensor) * NUMPY[tensor.type].itemsize


def _up(size: int, aligned: int = ALIGNMENT) -> int:
    return -(-size // aligned) * aligned
