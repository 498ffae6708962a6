"""What a file takes and gives, floats or codes, and what an app should know of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from chipfit.errors import ConfigError, UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import is_number

#: types in which codes are handed over -> their bits, and whether they have a sign
TYPES = {"int8": (8, True), "uint8": (8, False), "int16": (16, True), "uint16": (16, False)}


#: options of `io_spec_of`, as a format declares them
OPTIONS = ("io", "labels", "mean", "std")


class QuantizedIO(NamedTuple):
    """How an input or output is handed over: the codes q of the reals scale * (q - zero_point)."""

    type: str
    scale: float
    zero_point: int
    own: bool  #: they are the codes of the plan; else those shifted by half of the type's range


class IOSpec(NamedTuple):
    """Inputs and outputs of a file that are codes, by the value's name, and notes of what they mean."""

    inputs: dict[str, QuantizedIO] = {}
    outputs: dict[str, QuantizedIO] = {}
    notes: dict[str, Any] = {}


def io_spec_of(
    graph: Graph,
    plan: Plan,
    io: str | Sequence[str] = "float",
    labels: Sequence[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> IOSpec:
    """What is asked for, in the numbers of this plan.

    Args:
        io: "float", "int8", "uint8", "int16" or "uint16" for what goes in and comes out, or one for inputs and one
            for outputs. Values that are no floats, such as token ids, stay what they are.
        labels: of the classes along an axis of the first output.
        mean, std: which an app takes from its pixels, and then divides by, before the model sees them; a number, or
            one for each channel.

    Raises:
        ConfigError: a type that does not exist; labels or numbers that fit no output or input.
        UnsupportedError: a value that the plan does not store in such codes.
    """
    inputs, outputs = (
        {v: _codes(graph, plan, v, kind) for v in ends if kind != "float" and graph.is_float(v)}
        for kind, ends in zip(kinds_of(io), (graph.inputs, graph.outputs), strict=True)
    )
    return IOSpec(inputs, outputs, _notes(graph, labels, mean, std))


def kinds_of(io: Any) -> tuple[str, str]:
    """The types of inputs and of outputs.

    Raises:
        ConfigError: one does not exist.
    """
    kinds = (io, io) if isinstance(io, str) else tuple(io) if isinstance(io, (list, tuple)) else ()
    if len(kinds) != 2 or not all(isinstance(k, str) and (k == "float" or k in TYPES) for k in kinds):
        allowed = f"{', '.join(('float', *TYPES))}, or two of them, for inputs and outputs"
        raise ConfigError("The type of inputs and outputs is not understood", got=repr(io), allowed=allowed)
    return kinds


def _codes(graph: Graph, plan: Plan, value: str, kind: str) -> QuantizedIO:
    stored = plan.stored(value) if value in graph.values else None
    if stored is None or stored.grid.kind != "int" or stored.scale.dim():
        hint = 'leave it in float: io=("float", ...) for inputs, io=(..., "float") for outputs'
        raise UnsupportedError(f"'{value}' is not stored in codes of one scale", got=f"io: {kind}", hint=hint)
    if value in graph.inputs and plan.before_rounding({value}):
        readers = ", ".join(sorted(n for v, n in plan.float_edges if v == value)[:4])
        raise UnsupportedError(f"'{value}' is read before it is rounded, by {readers}", got=f"io: {kind}")
    (bits, signed), own = TYPES[kind], (stored.grid.file_bits, stored.grid.signed)
    if bits != own[0]:
        allowed = ", ".join(t for t, (b, _) in TYPES.items() if b == own[0]) or "float"
        what = f"'{value}' is stored in {own[0]} bits, and cannot be handed over in {bits}"
        raise UnsupportedError(what, got=f"io: {kind}", allowed=allowed)
    shift = 0 if signed == own[1] else (-1 if signed else 1) << (bits - 1)
    return QuantizedIO(kind, float(stored.scale), int(stored.zero_point) + shift, not shift)


def _notes(graph: Graph, labels: Any, mean: Any, std: Any) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if labels is not None:
        sizes = {s for s in graph.shape(graph.outputs[0])[1:] if s is not None}
        lines = isinstance(labels, (list, tuple)) and all(isinstance(n, str) and n and "\n" not in n for n in labels)
        if not lines:
            raise ConfigError("Labels are no names", got=repr(labels)[:80], allowed="a list of lines of text")
        if sizes and len(labels) not in sizes:
            allowed = " or ".join(map(str, sorted(sizes)))
            raise ConfigError("Labels do not fit the first output", got=len(labels), allowed=allowed)
        notes["labels"] = list(labels)
    for key, value in (("mean", mean), ("std", std)):
        if value is not None:
            numbers = list(value) if isinstance(value, (list, tuple)) else [value]
            low = -math.inf if key == "mean" else 0.0
            if not numbers or not all(is_number(v) and low < v for v in numbers):
                raise ConfigError(f"`{key}` is not understood", got=repr(value)[:80], allowed=f"numbers above {low:g}")
            notes[key] = [float(v) for v in numbers]
    if ("mean" in notes) != ("std" in notes) or len(notes.get("mean", ())) != len(notes.get("std", ())):
        raise ConfigError(
            "`mean` and `std` go together", got=f"mean {mean}, std {std}", allowed="one of each a channel"
        )
    channels = {s for i in graph.inputs[:1] for s in graph.shape(i) if s is not None} | {1}
    if "mean" in notes and len(notes["mean"]) not in channels:
        got = f"{len(notes['mean'])} numbers"
        raise ConfigError(
            "`mean` and `std` do not fit the first input", got=got, allowed=f"1 or {sorted(channels - {1})}"
        )
    return notes
