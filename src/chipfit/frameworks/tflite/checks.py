"""Checks of the tables of a `.tflite` file, for what LiteRT takes on trust: it would end the process, or read garbage.

LiteRT itself checks offsets, and the operands of its kernels.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.errors import CaptureError

#: bits of an element, by the name of its type
_BITS = {"INT4": 4, "INT2": 2, "BOOL": 8, "INT8": 8, "UINT8": 8, "INT16": 16, "UINT16": 16, "FLOAT16": 16}
_BITS |= {"BFLOAT16": 16, "INT32": 32, "UINT32": 32, "FLOAT32": 32, "INT64": 64, "UINT64": 64, "FLOAT64": 64}
_BITS |= {"COMPLEX64": 64, "COMPLEX128": 128}
#: integers in which zero points must lie, by the name of their type
_CODES = {"INT4": (-8, 7), "INT8": (-128, 127), "UINT8": (0, 255), "INT16": (-(1 << 15), (1 << 15) - 1)}
_MOST_BYTES = 1 << 34
MOST_OPERATORS = 100_000
#: greatest number of elements of a result
_MOST_ELEMENTS = 1 << 28
#: operator -> operand with the sizes of the result, and function from these and the first operand's shape to elements
_ELEMENTS: dict[str, tuple[int, Callable[[np.ndarray, Sequence[int]], int]]] = {
    **dict.fromkeys(("FILL", "RANDOM_UNIFORM", "RANDOM_STANDARD_NORMAL"), (0, lambda sizes, _: _product(sizes))),
    "BROADCAST_TO": (1, lambda sizes, _: _product(sizes)),
    "SCATTER_ND": (2, lambda sizes, _: _product(sizes)),
    "TRANSPOSE_CONV": (0, lambda sizes, _: _product(sizes)),
    **dict.fromkeys(("TILE", "ONE_HOT"), (1, lambda times, shape: _product(times) * _product(shape))),
    **dict.fromkeys(("PAD", "PADV2", "MIRROR_PAD"), (1, lambda pads, shape: _product(_padded(pads, shape)))),
    **dict.fromkeys(
        ("RESIZE_BILINEAR", "RESIZE_NEAREST_NEIGHBOR"),
        (1, lambda sizes, shape: _product(sizes) * _product([shape[0], shape[-1]] if shape else ())),
    ),
}


#: operators that may lack operands -> the first that they may lack
_FIRST_OPTIONAL = {
    **dict.fromkeys(("FULLY_CONNECTED", "CONV_2D", "DEPTHWISE_CONV_2D", "CONV_3D"), 2),
    **dict.fromkeys(("TRANSPOSE_CONV", "CONV_3D_TRANSPOSE", "SVDF"), 3),
    **dict.fromkeys(("LSTM", "UNIDIRECTIONAL_SEQUENCE_LSTM", "BIDIRECTIONAL_SEQUENCE_LSTM"), 1),
    "BIDIRECTIONAL_SEQUENCE_RNN": 1,
}


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(max(int(s), 1) for s in sizes)


def _padded(pads: np.ndarray, shape: Sequence[int]) -> list[int]:
    return [s + int(p.sum()) for s, p in zip(shape, pads.reshape(-1, 2), strict=False)]


def check_operators(model: Any) -> None:
    """Check operators of a `TfliteModel` that would end the process, or fill all memory, where LiteRT runs them.

    Raises:
        CaptureError: An operator lacks an operand, makes too large a tensor, divides by what traps, or has an
            impossible option; or there is control flow, whose operators are not checked.
    """
    if loops := sorted({op.kind for op in model.operators} & {"WHILE", "IF"}):
        hint = "convert the model with a fixed batch and a fixed number of steps, or without control flow"
        raise CaptureError(f"The control flow {loops[0]} has no reader", where=model.where, hint=hint)
    for op in model.operators:
        where = f"{model.where}, {op.kind}"
        needed = 0 if op.is_custom else _FIRST_OPTIONAL.get(op.kind, len(op.inputs))
        if min(op.inputs[:needed], default=0) < 0:
            raise CaptureError("An operator lacks an operand", where=where, got=str(op.inputs))
        tensors = [model.tensors[i] if i >= 0 else None for i in op.inputs]
        if (count := _elements(op.kind, tensors)) > _MOST_ELEMENTS:
            allowed = f"at most {_MOST_ELEMENTS:,} elements"
            raise CaptureError("An operator makes too large a tensor", where=where, got=f"{count:,}", allowed=allowed)
        if op.kind == "FLOOR_MOD" and (_numbers(tensors, 1) == -1).any():
            raise CaptureError("Integers are divided by -1, which traps for the least one", where=where)
        if op.option("radius", 0) < 0:
            raise CaptureError("The radius of a normalization is negative", where=where, got=op.option("radius"))


def _elements(kind: str, tensors: Sequence[Any]) -> int:
    """Return the number of elements of a result, where constants determine it; 0 elsewhere."""
    if kind == "RANGE":
        start, limit, delta = (_numbers(tensors, k) for k in range(3))
        known = start.size == limit.size == delta.size == 1 and delta[0] and np.isfinite([start, limit, delta]).all()
        return int(abs((float(limit[0]) - float(start[0])) / float(delta[0]))) if known else 0
    at, count = _ELEMENTS.get(kind, (0, None))
    if count is None or not tensors or tensors[0] is None or not (sizes := _numbers(tensors, at)).size:
        return 0
    return count(sizes, tensors[0].shape)


def _numbers(tensors: Sequence[Any], at: int) -> np.ndarray:
    """Return the numbers of a constant operand; none for one that is computed or left out."""
    tensor = tensors[at] if at < len(tensors) else None
    numbers = None if tensor is None else tensor.constant
    return np.zeros(0) if numbers is None else np.reshape(numbers, -1)


def check_subgraphs(table: Any, where: str) -> None:
    """Check that no subgraph calls itself, on which LiteRT would run out of stack.

    Raises:
        CaptureError: One does.
    """
    ends = "subgraph", "subgraphindex"
    calls = {
        k: {int(v) for op in _items(g.operators) for n, v in _options(op) if n.lower().endswith(ends)}
        for k, g in enumerate(table.subgraphs)
    }
    try:
        graphlib.TopologicalSorter(calls).prepare()
    except graphlib.CycleError as e:
        raise CaptureError("A subgraph of the file calls itself", where=where, got=e.args[1]) from e


def _options(op: Any) -> Iterable[tuple[str, Any]]:
    tables = [table for table in (op.builtinOptions, op.builtinOptions2) if table is not None]
    return (item for table in tables for item in vars(table).items())


def check_tables(table: Any, kinds: Sequence[str], sizes: Sequence[int | None], where: str) -> None:
    """Check tensors and operators of a network.

    Args:
        table: its `ModelT`.
        kinds: name of the type of each tensor.
        sizes: bytes of each constant; None for a tensor that is computed.

    Raises:
        CaptureError: A tensor is malformed, or is computed twice, too late or by nothing.
    """
    graph = table.subgraphs[0]
    names = [(t.name or b"").decode("utf-8", "replace") for t in graph.tensors]
    for name, kind, size, t in zip(names, kinds, sizes, graph.tensors, strict=True):
        for what, got, allowed in (*_faults(t, kind, size), *_scale_faults(t.quantization, kind, _items(t.shape))):
            raise CaptureError(f"Tensor '{name}' {what}", where=where, got=got, allowed=allowed)
    custom = {k for k, code in enumerate(table.operatorCodes) if code.customCode}  # LiteRT refuses unknown ones
    _check_order(graph, names, [size is not None for size in sizes], custom, where)


def _items(values: Any) -> list[Any]:
    return [] if values is None else list(values)


def _faults(t: Any, kind: str, size: int | None) -> Iterable[tuple[str, object, str]]:
    dims = [int(d) for d in _items(t.shape)]
    if any(d < 0 for d in dims) or math.prod(dims) * _BITS.get(kind, 8) > 8 * _MOST_BYTES:
        yield "has an impossible shape", dims, f"sizes of at most {_MOST_BYTES:,} bytes together"
    elif kind == "STRING" and size is None:  # whose memory kernels of numbers would not have
        yield "holds text", kind, "numbers"
    elif size is not None and kind in _BITS and size != (wanted := -(-math.prod(dims) * _BITS[kind] // 8)):
        yield "does not fit its shape", f"{size:,} bytes", f"{wanted:,} for {dims} of {kind}"


def _scale_faults(q: Any, kind: str, dims: Sequence[int]) -> Iterable[tuple[str, object, str]]:
    if q is not None and q.detailsType == schema.QuantizationDetails.BlockwiseQuantization:
        yield "has a scale for each block of its numbers", q.details.blockSize, "one scale, or one of each channel"
    scales, zeros = np.array(_items(q and q.scale), np.float64), np.array(_items(q and q.zeroPoint), np.float64)
    if kind not in (*_CODES, "INT32", "INT64") or not scales.size:
        return
    low, high = _CODES.get(kind, (0, 0))
    if not (np.isfinite(scales).all() and (scales >= 0).all()):
        yield "has an impossible scale", scales[~(np.isfinite(scales) & (scales >= 0))][0], "finite positive numbers"
    if zeros.size and not (low <= zeros.min() and zeros.max() <= high):
        yield "has a zero point outside its type", int(zeros.max()), f"{low} to {high} for {kind}"
    if scales.size > 1 and (not 0 <= q.quantizedDimension < len(dims) or dims[q.quantizedDimension] != scales.size):
        yield "has scales that do not fit its channels", f"{scales.size} along axis {q.quantizedDimension}", f"{dims}"
    if zeros.size not in (0, 1, scales.size):
        yield "has zero points that do not fit its scales", zeros.size, f"{scales.size}"


def _check_order(
    graph: Any, names: Sequence[str], constant: Sequence[bool], custom: Collection[int], where: str
) -> None:
    """Check that every operand is there before its operator, and that no constant or tensor is written again."""
    count, inputs = len(names), [int(i) for i in _items(graph.inputs)]
    every = [[int(i) for i in (*_items(op.inputs), *_items(op.outputs))] for op in graph.operators]
    ends = [*inputs, *map(int, _items(graph.outputs))]
    if any(not -1 <= i < count for op in every for i in op) or any(not 0 <= i < count for i in ends):
        raise CaptureError("An operator refers to a tensor that the file does not have", where=where, allowed=count)
    if twice := [names[i] for i in {*inputs} if inputs.count(i) > 1]:
        raise CaptureError(f"Tensor '{twice[0]}' is an input of the network several times", where=where)
    absent = [not constant[k] and t.sparsity is None and not t.isVariable for k, t in enumerate(graph.tensors)]
    known = {k for k in range(count) if not absent[k] or math.prod(_items(graph.tensors[k].shape)) == 0} | {*inputs}
    written = {*inputs}
    for op in graph.operators:
        for i in map(int, _items(op.inputs)):
            if i >= 0 and i not in known and op.opcodeIndex not in custom:
                raise CaptureError(f"Nothing computes tensor '{names[i]}' before it is read", where=where)
        for o in map(int, _items(op.outputs)):
            if o < 0 or constant[o] or o in written:
                raise CaptureError(f"Tensor '{names[o]}' is written although it has numbers already", where=where)
            written.add(o)
            known.add(o)
    if missing := [names[int(o)] for o in _items(graph.outputs) if int(o) not in known]:
        raise CaptureError(f"Nothing computes the output '{missing[0]}'", where=where)
