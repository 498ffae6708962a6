"""Operators on sequences of tensors, such as old exporters write for `split` and lists.

A graph holds the tensors themselves: a sequence is a list of operands while a model is read.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chipfit.errors import CaptureError
from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.reading import Unreadable, chunk_sizes, present, require

_MOST = 1_000  #: parts of a tensor
_HINT = "export the model with the tensors themselves, of one size, in place of a list"


def read_sequence(c: OnnxCall) -> list[Any]:
    """Return the result of an operator that makes or reads a sequence: an operand, or a list of them.

    Raises:
        CaptureError: Data decide which tensors there are, or the operator has no equivalent for single tensors.
    """
    kind, where = c.node.op_type, c.node.name or c.name
    if kind not in READERS:
        raise CaptureError(f"Operator '{kind}' cannot read a sequence of tensors", where=where, hint=_HINT)
    try:
        return [READERS[kind](c)]
    except IndexError as e:
        raise CaptureError(f"The sequence lacks a tensor that '{kind}' reads", where=where, hint=_HINT) from e
    except Unreadable as e:
        what = f"Which tensors the sequence of '{kind}' holds is not known before the model runs"
        raise CaptureError(what, where=where, hint=_HINT) from e


def _sequence(c: OnnxCall) -> list[Operand]:
    given: Any = c.inputs[0]
    require(isinstance(given, list))
    return [*given]


def _position(c: OnnxCall, index: int, default: int) -> int:
    x = c.optional(index)
    return default if x is None else int(present(x.constant).reshape(-1)[0])


def _insert(c: OnnxCall) -> list[Operand]:
    members = _sequence(c)
    members.insert(_position(c, 2, len(members)), c.operand(1))
    return members


def _erase(c: OnnxCall) -> list[Operand]:
    members = _sequence(c)
    members.pop(_position(c, 1, -1))
    return members


def _split(c: OnnxCall) -> list[Operand]:
    """Read parts of given sizes, of one size but the last, or of size 1, whose axis may be left out."""
    x = c.operand(0)
    axis, given = c.attr("axis") % x.rank, c.optional(1)
    each = np.array(1) if given is None else present(given.constant)
    sizes = [int(s) for s in each] if each.ndim else chunk_sizes(present(x.shape[axis]), int(each), _MOST)
    parts = c.steps("Split", [x], [f"{c.name}_{k}" for k in range(len(sizes))], axis=axis, sizes=tuple(sizes))
    if given is not None or c.attr("keepdims"):
        return parts
    return [c.step("Squeeze", [p], axes=(axis,)) for p in parts]


def _concat(c: OnnxCall) -> Operand:
    members, axis = _sequence(c), c.attr("axis")
    require(members)
    if c.attr("new_axis"):
        axis %= members[0].rank + 1
        members = [c.step("Unsqueeze", [m], axes=(axis,)) for m in members]
    return c.emit("Concat", members, axis=axis % members[0].rank)


def makes_or_reads(kind: str, inputs: Sequence[Any]) -> bool:
    """Return whether a node has to do with sequences, by its operator and its operands."""
    return any(isinstance(x, list) for x in inputs) or (kind in READERS and kind != "Identity")


#: operators that make or read sequences
READERS: dict[str, Callable[[OnnxCall], Any]] = {
    "SequenceEmpty": lambda c: [],
    "SequenceConstruct": lambda c: [*c.inputs],
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "SequenceAt": lambda c: _sequence(c)[_position(c, 1, 0)],
    "SequenceLength": lambda c: c.builder.constants([np.array(len(_sequence(c)))]),
    "SplitToSequence": _split,
    "ConcatFromSequence": _concat,
    "Identity": _sequence,
}
