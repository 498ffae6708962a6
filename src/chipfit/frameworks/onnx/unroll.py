"""Control flow without a jump at run time: branches of an If, known numbers of steps of a Loop or a Scan."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from chipfit.errors import CaptureError
from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.reading import require

#: function from a graph inside an operator and the operands of its inputs to its outputs, read into the builder
ReadBody = Callable[[ir.Graph, Sequence[Operand]], list[Operand]]
_MOST_STEPS = 1_000  #: of a loop; one with more becomes an opaque node
_BRANCHES = ("then", "else")  #: of an If


def unrolled(c: OnnxCall, read_body: ReadBody) -> list[Operand] | None:
    """Return the results of an If, a Loop or a Scan; None for other nodes, and where data decide how many steps run.

    Raises:
        Unreadable: The steps of a Loop or Scan give results of different ranks.
    """
    return CONTROL_FLOW[c.node.op_type](c, read_body) if c.node.op_type in CONTROL_FLOW and not c.node.domain else None


def _constant(x: Operand | None, default: Any) -> Any:
    """Return the number that an operand holds: the default if it is absent, None if it depends on data."""
    return default if x is None else None if x.constant is None or x.constant.size != 1 else x.constant.reshape(-1)[0]


def _branch(c: OnnxCall, read_body: ReadBody) -> list[Operand] | None:
    """Return the results of the branch that a constant condition chooses, or `Where` of the results of both branches.

    A branch that fails with inputs of these sizes is left out, with a warning. Return None if the branches give
    results of different sizes or types.

    Raises:
        CaptureError: Both branches fail.
    """
    condition, graphs = _constant(c.operand(0), None), [c.node.attributes[f"{b}_branch"].as_graph() for b in _BRANCHES]
    if condition is not None:
        return read_body(graphs[not condition], ())
    read, failed = dict[str, list[Operand]](), dict[str, CaptureError]()
    for branch, graph in zip(_BRANCHES, graphs, strict=True):
        mark = c.builder.mark()
        try:
            read[branch] = read_body(graph, ())
        except CaptureError as e:
            c.builder.undo(mark)
            failed[branch] = e
    if failed:
        return _only_branch(c, read, failed)
    pairs = [*zip(*read.values(), strict=True)]
    if any(m.shape != n.shape or m.dtype != n.dtype for a, b in pairs for m, n in zip(a.metas, b.metas, strict=True)):
        return None
    names = [v.name or "" for v in c.node.outputs]
    return [c.step("Where", [c.operand(0), *pair], name) for pair, name in zip(pairs, names, strict=True)]


def _only_branch(c: OnnxCall, read: dict[str, list[Operand]], failed: dict[str, CaptureError]) -> list[Operand]:
    """Return the results of the only branch that can be computed."""
    branch, why = next(iter(failed.items()))
    if not read:
        raise why
    skipped = f"the {branch} branch of If '{c.node.name or c.name}'"
    note = f"warning: {skipped} is left out, which inputs of these sizes cannot take: {why.what}"
    c.builder.graph.notes.append(note)
    return next(iter(read.values()))


def _loop(c: OnnxCall, read_body: ReadBody) -> list[Operand] | None:
    """Return the final states of a Loop, then its scan outputs stacked; None if data decide when it ends."""
    graph, proceeds = c.node.attributes["body"].as_graph(), _constant(c.optional(1), True)
    trip_count = _constant(c.optional(0), _MOST_STEPS + 1)
    if trip_count is None or proceeds is None:
        return None
    carried, made = [c.operand(k) for k in range(2, len(c.inputs))], list[list[Operand]]()
    for step in range(int(trip_count)):
        if not proceeds:
            break
        if step == _MOST_STEPS:
            return None
        given = [c.builder.constants([np.asarray(v)]) for v in (np.int64(step), np.bool_(True))]
        condition, *results = read_body(graph, [*given, *carried])
        carried = results[: len(carried)]
        made.append(results[len(carried) :])
        proceeds = _constant(condition, None)
        if proceeds is None:
            return None
    return carried + [_stack_steps(c, column, 0) for column in zip(*made, strict=True)] if made else carried


def _scan(c: OnnxCall, read_body: ReadBody) -> list[Operand] | None:
    """Return the final states of a Scan, then its scan outputs stacked; None if its length is open or too long."""
    graph, count = c.node.attributes["body"].as_graph(), c.attr("num_scan_inputs")
    states = [c.operand(k) for k in range(len(c.inputs) - count)]
    scan_inputs = [c.operand(k) for k in range(len(states), len(c.inputs))]
    axes = [a % x.rank for a, x in zip(c.attr("scan_input_axes") or [0] * count, scan_inputs, strict=True)]
    length = scan_inputs[0].shape[axes[0]]
    if c.opset < 9 or length is None or length > _MOST_STEPS:
        return None
    backwards, made = c.attr("scan_input_directions") or [0] * count, list[list[Operand]]()
    for step in range(length):
        indices = [length - 1 - step if b else step for b in backwards]
        parts = [_step_input(c, x, axis, k) for x, axis, k in zip(scan_inputs, axes, indices, strict=True)]
        results = read_body(graph, [*states, *parts])
        states = results[: len(states)]
        made.append(results[len(states) :])
    columns = [*zip(*made, strict=True)]
    reversed_outputs, out = (c.attr(f"scan_output_{k}") or [0] * len(columns) for k in ("directions", "axes"))
    in_order = [column[::-1] if t else column for t, column in zip(reversed_outputs, columns, strict=True)]
    return states + [_stack_steps(c, column, axis) for column, axis in zip(in_order, out, strict=True)]


def _step_input(c: OnnxCall, x: Operand, axis: int, index: int) -> Operand:
    """Return one slice of a scan input, without the axis."""
    if x.constant is not None and not x.name:
        return c.builder.constants([np.take(x.constant, index, axis)])
    return c.step("Select", [x], axis=axis, index=index)


def _stack_steps(c: OnnxCall, parts: Sequence[Operand], axis: int) -> Operand:
    """Return a scan output: the results of all steps along a new axis."""
    if all(p.constant is not None for p in parts):
        return c.builder.constants([np.stack([p.constant for p in parts], axis)])  # type: ignore[misc]  # none is None
    rank = parts[0].rank
    require(all(p.rank == rank for p in parts))
    axis %= rank + 1
    return c.step("Concat", [c.step("Unsqueeze", [p], axes=(axis,)) for p in parts], axis=axis)


#: operators of control flow
CONTROL_FLOW: dict[str, Callable[[OnnxCall, ReadBody], list[Operand] | None]] = {
    "If": _branch,
    "Loop": _loop,
    "Scan": _scan,
}
