"""Loops of a known number of steps and composites, written out, as converters of Keras and PyTorch write them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.frameworks.tflite.checks import MOST_OPERATORS

_MOST_STEPS = 1_000  #: of a loop; one with more stays a loop
_MOST_TENSORS = 4 * MOST_OPERATORS
_OPERATOR, _TYPES = schema.BuiltinOperator, schema.TensorType
_KINDS = {_TYPES.INT32: np.int32, _TYPES.INT64: np.int64, _TYPES.BOOL: np.bool_}
_CODES = {np.dtype(kind): code for code, kind in _KINDS.items()}
#: operator -> function of arrays, for the numbers that count steps
_COUNTING: dict[int, Callable[..., Any]] = {
    _OPERATOR.ADD: np.add,
    _OPERATOR.SUB: np.subtract,
    _OPERATOR.MUL: np.multiply,
    _OPERATOR.MINIMUM: np.minimum,
    _OPERATOR.MAXIMUM: np.maximum,
    _OPERATOR.LESS: np.less,
    _OPERATOR.LESS_EQUAL: np.less_equal,
    _OPERATOR.GREATER: np.greater,
    _OPERATOR.GREATER_EQUAL: np.greater_equal,
    _OPERATOR.EQUAL: np.equal,
    _OPERATOR.NOT_EQUAL: np.not_equal,
    _OPERATOR.LOGICAL_AND: np.logical_and,
    _OPERATOR.LOGICAL_OR: np.logical_or,
    _OPERATOR.LOGICAL_NOT: np.logical_not,
    _OPERATOR.RESHAPE: lambda x, shape: x.reshape(shape),
    _OPERATOR.CONCATENATION: lambda *parts: np.concatenate(parts),
}


def unroll_loops(table: Any) -> bool:
    """Write loops and composites of a `ModelT` into its network; return whether it has any, and all are known.

    The table stays as it is where the number of steps of a loop depends on data, or is too large.
    """
    codes = [max(c.builtinCode, c.deprecatedBuiltinCode) for c in table.operatorCodes]
    graph = table.subgraphs[0]
    if not {_OPERATOR.WHILE, _OPERATOR.STABLEHLO_COMPOSITE} & {codes[op.opcodeIndex] for op in graph.operators}:
        return False
    try:
        out = _Unrolled(table, codes)
        names = out.add(graph, {int(i): int(i) for i in range(len(graph.tensors))})
    except _NotCounted:
        return False
    graph.tensors, graph.operators, table.buffers = out.tensors, out.operators, out.buffers
    graph.outputs = [out.whole(names[int(i)]) for i in graph.outputs]
    for signature in table.signatureDefs or ():
        for m in (signature.outputs or ()) if signature.subgraphIndex == 0 else ():
            m.tensorIndex = out.whole(names[int(m.tensorIndex)])
    several = any(s.subgraphIndex for s in table.signatureDefs or ())
    if not several and not {_OPERATOR.CALL_ONCE, _OPERATOR.IF} & {codes[op.opcodeIndex] for op in out.operators}:
        table.subgraphs = [graph]
    return True


class _NotCounted(Exception):
    """Data decide how many steps a loop has, or it has too many."""


@dataclass
class _Unrolled:
    """A network without loops, in the making; operands are numbers of its tensors.

    A list of the results of all steps is kept as its parts, so that a step that replaces one part copies none.
    """

    table: Any
    codes: Sequence[int]
    tensors: list[Any] = field(init=False)
    buffers: list[Any] = field(init=False)
    operators: list[Any] = field(default_factory=list)
    known: dict[int, np.ndarray] = field(default_factory=dict)  #: tensor -> numbers that count steps
    #: tensor -> (tensor, first row, number of rows) of each part; the tensor itself is not computed
    parts: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors, self.buffers = [*self.table.subgraphs[0].tensors], [*self.table.buffers]
        for k in range(len(self.tensors)):
            self._note_constant(k)

    def _note_constant(self, k: int) -> None:
        t, data = self.tensors[k], self.buffers[self.tensors[k].buffer].data
        if t.type in _KINDS and data is not None and 0 < len(data) <= 64:
            shape = [] if t.shape is None else [int(d) for d in t.shape]
            self.known[k] = np.frombuffer(bytes(data), _KINDS[t.type]).reshape(shape)

    def add(self, graph: Any, names: Mapping[int, int]) -> dict[int, int]:
        """Add the operators of a subgraph, of which `names` says what tensors are; return `names` with its results."""
        names = dict(names)
        for op in graph.operators:
            inputs = [names[int(i)] if i >= 0 else -1 for i in op.inputs]
            code = self.codes[op.opcodeIndex]
            if code == _OPERATOR.WHILE:
                names |= zip(map(int, op.outputs), self._loop(op, inputs), strict=True)
            elif code == _OPERATOR.STABLEHLO_COMPOSITE:
                names |= self._decomposed(op, inputs, names)
            elif not self._is_counted(code, op, inputs, names) and not self._is_list(code, op, inputs, names):
                self._copy(op, [self.whole(i) for i in inputs], names)
        return names

    def _copy(self, op: Any, inputs: list[int], names: Mapping[int, int]) -> None:
        if len(self.operators) >= MOST_OPERATORS:
            raise _NotCounted
        new = copy.copy(op)
        new.inputs, new.outputs = inputs, [names[int(o)] for o in op.outputs]
        self.operators.append(new)

    def _loop(self, op: Any, carried: list[int]) -> list[int]:
        """Add the steps of a loop; return the tensors that it carries out."""
        condition, body = (
            self.table.subgraphs[k] for k in (op.builtinOptions.condSubgraphIndex, op.builtinOptions.bodySubgraphIndex)
        )
        constants = [self._constants(g) for g in (condition, body)]
        for step in range(_MOST_STEPS + 1):
            before = len(self.operators)
            held = self._inside(condition, constants[0], carried, step)
            goes_on = self.known.get(held[int(condition.outputs[0])])
            if goes_on is None or len(self.operators) > before or (step == _MOST_STEPS and goes_on):
                raise _NotCounted
            if not goes_on:
                break
            held = self._inside(body, constants[1], carried, step)
            carried = [held[int(o)] for o in body.outputs]
        return carried

    def _decomposed(self, op: Any, inputs: Sequence[int], names: Mapping[int, int]) -> dict[int, int]:
        """Add the operators that a composite stands for; return the tensors of its results."""
        body, made = self.table.subgraphs[op.builtinOptions2.decompositionSubgraphIndex], [int(o) for o in op.outputs]
        results = {int(o): names[k] for o, k in zip(body.outputs, made, strict=True)}
        held = self._inside(body, self._constants(body), inputs, made[0], results)
        return {k: held[int(o)] for o, k in zip(body.outputs, made, strict=True)}

    def _constants(self, graph: Any) -> dict[int, int]:
        """Add the constants of a subgraph once for all steps."""
        made = {int(o) for op in graph.operators for o in op.outputs} | {int(i) for i in graph.inputs}
        return {k: self._tensor(t) for k, t in enumerate(graph.tensors) if k not in made}

    def _inside(
        self,
        graph: Any,
        constants: Mapping[int, int],
        carried: Sequence[int],
        step: int,
        results: Mapping[int, int] = MappingProxyType({}),
    ) -> dict[int, int]:
        names = {**constants, **dict(zip(map(int, graph.inputs), carried, strict=True))}
        for o in (int(o) for op in graph.operators for o in op.outputs):
            names[o] = results[o] if o in results else self._tensor(graph.tensors[o], f"_{step}")
        return self.add(graph, names)

    def _tensor(self, like: Any, mark: str = "") -> int:
        """Add a copy of a tensor of another subgraph."""
        if len(self.tensors) > _MOST_TENSORS:
            raise _NotCounted
        new = copy.copy(like)
        name = (like.name or b"").decode("utf-8", "replace").partition(";")[0]
        new.name, new.shapeSignature = f"{name}{mark}".encode(), None
        self.tensors.append(new)
        self._note_constant(len(self.tensors) - 1)
        return len(self.tensors) - 1

    # ---- numbers that count steps

    def _is_counted(self, code: int, op: Any, inputs: Sequence[int], names: dict[int, int]) -> bool:
        """Compute an operator of known numbers; return whether it was one."""
        if code not in _COUNTING or not inputs or any(i not in self.known for i in inputs):
            return False
        (o,) = (int(o) for o in op.outputs)
        value = np.asarray(_COUNTING[code](*(self.known[i] for i in inputs)))
        if value.dtype not in _CODES or value.size > 8:
            return False
        self._hold(self.tensors[names[o]], value)
        self.known[names[o]] = value
        return True

    def _hold(self, t: Any, numbers: np.ndarray) -> None:
        """Make a tensor a constant."""
        buffer = schema.BufferT()
        buffer.data = np.frombuffer(numbers.tobytes(), np.uint8)
        self.buffers.append(buffer)
        t.buffer, t.type, t.shape = len(self.buffers) - 1, _CODES[numbers.dtype], np.array(numbers.shape, np.int32)

    # ---- lists of the results of all steps

    def _rows(self, i: int) -> list[tuple[int, int, int]]:
        return self.parts[i] if i in self.parts else [(i, 0, int(self.tensors[i].shape[0]))]

    def _is_list(self, code: int, op: Any, inputs: Sequence[int], names: dict[int, int]) -> bool:
        """Keep the parts of a list from which steps take rows, or into which they put theirs."""
        o = names[int(op.outputs[0])] if len(op.outputs) == 1 else -1
        if code == _OPERATOR.SLICE and all(i in self.known for i in inputs[1:]):
            x, (begin, size) = inputs[0], (self.known[i].reshape(-1) for i in inputs[1:])
            shape = [int(d) for d in self.tensors[x].shape]
            rest = [(int(b), int(s)) in ((0, -1), (0, d)) for b, s, d in zip(begin, size, shape, strict=True)]
            if not all(rest[1:]):
                return False
            first = int(begin[0])
            count = int(size[0]) if size[0] >= 0 else shape[0] - first
            self.parts[o] = _cut(self._rows(x), first, count)
            self._set_rows(o, shape, count)
            return True
        if code == _OPERATOR.CONCATENATION and any(i in self.parts for i in inputs):
            if op.builtinOptions.axis or op.builtinOptions.fusedActivationFunction:
                return False
            self.parts[o] = [part for i in inputs for part in self._rows(i)]
            self._set_rows(o, [int(d) for d in self.tensors[inputs[0]].shape], sum(n for *_, n in self.parts[o]))
            return True
        return False

    def _set_rows(self, o: int, shape: Sequence[int], count: int) -> None:
        self.tensors[o].shape = np.array([count, *shape[1:]], np.int32)

    def whole(self, i: int) -> int:
        """Return a tensor, joined if it is a list of parts."""
        if i not in self.parts:
            return i
        pieces = [self._piece(i, *part) for part in self.parts.pop(i) if part[2]]
        if len(pieces) == 1:
            self.parts[i] = self._rows(pieces[0])  # for further operators that read it
            return pieces[0]
        self._operator(_OPERATOR.CONCATENATION, schema.ConcatenationOptionsT(), pieces, i)
        return i

    def _piece(self, whole: int, i: int, first: int, count: int) -> int:
        shape = [int(d) for d in self.tensors[i].shape]
        i = self.whole(i)
        if (first, count) == (0, shape[0]):
            return i
        begin, size = (self._numbers([k, *rest]) for k, rest in ((first, [0] * (len(shape) - 1)), (count, shape[1:])))
        out = self._tensor(self.tensors[whole], f"_rows_{first}")
        self._set_rows(out, shape, count)
        self._operator(_OPERATOR.SLICE, schema.SliceOptionsT(), [i, begin, size], out)
        return out

    def _numbers(self, numbers: Sequence[int]) -> int:
        t = schema.TensorT()
        t.name = b"rows"
        self._hold(t, np.array(numbers, np.int32))
        self.tensors.append(t)
        return len(self.tensors) - 1

    def _operator(self, code: int, options: Any, inputs: list[int], output: int) -> None:
        op = schema.OperatorT()
        if code not in self.codes:
            new = schema.OperatorCodeT()
            new.builtinCode, new.deprecatedBuiltinCode, new.version = code, min(code, 127), 1
            self.table.operatorCodes.append(new)
            self.codes = [*self.codes, code]
        op.opcodeIndex, op.inputs, op.outputs = self.codes.index(code), inputs, [output]
        op.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__[:-1])
        op.builtinOptions = options
        self.operators.append(op)


def _cut(parts: Sequence[tuple[int, int, int]], first: int, count: int) -> list[tuple[int, int, int]]:
    """Return the parts of some rows of a list."""
    out, at = [], 0
    for tensor, begin, rows in parts:
        a, b = max(first, at), min(first + count, at + rows)
        if a < b:
            out.append((tensor, begin + a - at, b - a))
        at += rows
    return out
