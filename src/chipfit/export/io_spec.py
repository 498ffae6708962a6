"""Inputs and outputs of a file: their names, floats or integers, and notes for the app that runs it."""

import ast
import json
from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

from chipfit.decide.overrides import PARTS_ARE_LOST
from chipfit.errors import ConfigError, UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.graph.states import state_pairs
from chipfit.plan.record import Plan
from chipfit.registry import is_number

#: integer types of inputs and outputs -> their bits, and whether they are signed
TYPES = {"int8": (8, True), "uint8": (8, False), "int16": (16, True), "uint16": (16, False)}
#: options of `io_spec_of`, as a format declares them
OPTIONS = ("io", "labels", "mean", "std")


class QuantizedIO(NamedTuple):
    """An input or output of quantized values q, which represent scale * (q - zero_point)."""

    type: str
    scale: float
    zero_point: int
    own: bool  #: the plan's quantized values; else these, shifted by half of the type's range


class IOSpec(NamedTuple):
    """Quantized inputs and outputs of a file, by the value's name, and notes on their meaning."""

    inputs: dict[str, QuantizedIO] = {}
    outputs: dict[str, QuantizedIO] = {}
    notes: dict[str, Any] = {}


def io_spec_of(
    graph: Graph,
    plan: Plan,
    io: str | Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> IOSpec:
    """Return the inputs and outputs of a file, with the scales and zero points of this plan.

    Args:
        io: "float", "int8", "uint8", "int16" or "uint16" for inputs and outputs, or one for inputs and one for
            outputs. Values that are not floats, such as token ids, stay as they are. None: "float", or for plans
            without operators in float the integers of the plan.
        labels: of the classes along an axis of the first output.
        mean, std: the app computes (pixel - mean) / std before it runs the model; a number, or one for each channel.

    Raises:
        ConfigError: an unknown type; labels or numbers that fit no output or input.
        UnsupportedError: the plan does not quantize a value to such integers.
    """
    notes = _notes(graph, labels, mean, std)
    states = _kept_states(graph, plan)
    if io is None and plan.provenance.get("integer_only"):
        return IOSpec(_own_io(graph, plan, graph.inputs), _own_io(graph, plan, graph.outputs), notes)
    sides = zip(io_types(io or "float"), (graph.inputs, graph.outputs), strict=True)
    wanted = ([(v, k) for v in ends if k != "float" and v not in states and graph.is_float(v)] for k, ends in sides)
    inputs, outputs = ({v: _quantized_io(graph, plan, v, kind) for v, kind in side} for side in wanted)
    of_states = (_own_io(graph, plan, [v for v in ends if v in states]) for ends in (graph.inputs, graph.outputs))
    inputs, outputs = (given | kept for given, kept in zip((inputs, outputs), of_states, strict=True))
    return IOSpec(inputs, outputs, notes)


def _kept_states(graph: Graph, plan: Plan) -> set[str]:
    """Return the states that an integer kernel of a network of one step keeps: they stay integers between calls."""
    pairs = state_pairs(graph)
    integer = {name for name, n in plan.nodes.items() if n.op == "LSTM" and n.exec == "int"}
    kept = {i for n in graph.nodes if n.name in integer for i in n.inputs}
    return {v for pair in pairs if pair[0] in kept for v in pair}


def _own_io(graph: Graph, plan: Plan, ends: Sequence[str]) -> dict[str, QuantizedIO]:
    """Return inputs or outputs with the plan's own quantized values."""
    types = {v: k for k, v in TYPES.items()}
    grids = {v: plan[v].grid for v in ends if v in graph.values and plan.quantized(v)}
    kinds = {v: types.get((g.file_bits, g.signed), "") for v, g in grids.items() if g.kind == "int"}
    return {v: _quantized_io(graph, plan, v, kind) for v, kind in kinds.items() if kind}


def io_types(io: Any) -> tuple[str, str]:
    """Return the types of inputs and of outputs.

    Raises:
        ConfigError: an unknown type.
    """
    kinds = (io, io) if isinstance(io, str) else tuple(io) if isinstance(io, (list, tuple)) else ()
    if len(kinds) != 2 or not all(isinstance(k, str) and (k == "float" or k in TYPES) for k in kinds):
        allowed = f"{', '.join(('float', *TYPES))}, or two of them, for inputs and outputs"
        raise ConfigError("Type of inputs and outputs is unknown", got=repr(io), allowed=allowed)
    return kinds


def output_names(graph: Graph, taken: Iterable[str] = ()) -> list[str]:
    """Return the names of the outputs: keys of a returned dict, else "output" with a number if there are several.

    Args:
        taken: names of other tensors of the file; an output that is called like one of them or an input ends in "_out".
    """
    others = {*graph.inputs, *taken}
    return [_free(name, others) for name in _wanted_names(graph)]


def _free(name: str, taken: Container[str]) -> str:
    while name in taken:
        name += "_out"
    return name


def _wanted_names(graph: Graph) -> list[str]:
    count = len(graph.outputs)
    try:
        plain = json.loads(json.loads(graph.out_spec)["plain"])[1]
        keys = plain["context"] if plain["type"] == "builtins.dict" else None
        keys = json.loads(keys) if isinstance(keys, str) else keys
        keys = ast.literal_eval(keys) if isinstance(keys, str) else keys
        if isinstance(keys, list) and len(keys) == count and all(isinstance(k, str) for k in keys):
            return keys
    except (KeyError, ValueError, SyntaxError, TypeError, IndexError):
        pass
    return ["output"] if count == 1 else [f"output_{i}" for i in range(count)]


def _quantized_io(graph: Graph, plan: Plan, value: str, kind: str) -> QuantizedIO:
    stored = plan.stored(value) if value in graph.values else None
    if stored is None or stored.grid.kind != "int" or stored.scale.dim():
        hint = 'leave it in float: io=("float", ...) for inputs, io=(..., "float") for outputs'
        if value in graph.outputs:
            lost = any(n.why == PARTS_ARE_LOST for n in plan.nodes.values())
            why = "accept that a part of it is lost" if lost else "keep sums that the model returns in integers"
            hint += f"; or {why}, with Settings(results='codes')"
        elif plan.provenance.get("precise"):
            hint += "; or keep no layer in float for its precision, with Settings(repairs='off')"
        raise UnsupportedError(f"'{value}' is not quantized with one scale", got=f"io: {kind}", hint=hint)
    if value in graph.inputs and plan.before_rounding({value}):
        readers = ", ".join(sorted(n for v, n in plan.float_edges if v == value)[:4])
        raise UnsupportedError(f"'{value}' is read in float, by {readers}", got=f"io: {kind}")
    (bits, signed), own = TYPES[kind], (stored.grid.file_bits, stored.grid.signed)
    if bits != own[0]:
        allowed = ", ".join(t for t, (b, _) in TYPES.items() if b == own[0]) or "float"
        raise UnsupportedError(f"'{value}' is quantized to {own[0]} bits", got=f"io: {kind}", allowed=allowed)
    shift = 0 if signed == own[1] else (-1 if signed else 1) << (bits - 1)
    return QuantizedIO(kind, float(stored.scale), int(stored.zero_point) + shift, not shift)


def _notes(graph: Graph, labels: Any, mean: Any, std: Any) -> dict[str, Any]:
    """Return the notes for the app that runs the file: labels of the output, normalisation of the input."""
    notes: dict[str, Any] = {} if labels is None else {"labels": _checked_labels(graph, labels)}
    notes |= {key: _checked_numbers(key, v) for key, v in (("mean", mean), ("std", std)) if v is not None}
    if ("mean" in notes) != ("std" in notes) or len(notes.get("mean", ())) != len(notes.get("std", ())):
        got = f"mean {mean}, std {std}"
        raise ConfigError("`mean` and `std` go together", got=got, allowed="one of each a channel")
    channels = {s for i in graph.inputs[:1] for s in graph.shape(i) if s is not None} | {1}
    if "mean" in notes and len(notes["mean"]) not in channels:
        got, allowed = f"{len(notes['mean'])} numbers", f"1 or {sorted(channels - {1})}"
        raise ConfigError("`mean` and `std` do not fit the first input", got=got, allowed=allowed)
    return notes


def _checked_labels(graph: Graph, labels: Any) -> list[str]:
    """Return the labels if they are lines of text, one for each class of the first output."""
    sizes = {s for s in graph.shape(graph.outputs[0])[1:] if s is not None}
    lines = isinstance(labels, (list, tuple)) and all(isinstance(n, str) and n and "\n" not in n for n in labels)
    if not lines:
        raise ConfigError("Labels must be a list of lines of text", got=repr(labels)[:80])
    if sizes and len(labels) not in sizes:
        allowed = " or ".join(map(str, sorted(sizes)))
        raise ConfigError("Labels do not fit the first output", got=len(labels), allowed=allowed)
    return list(labels)


def _checked_numbers(key: str, value: Any) -> list[float]:
    """Return means or deviations as a list; deviations must be positive."""
    numbers = list(value) if isinstance(value, (list, tuple)) else [value]
    if not numbers or not all(is_number(v) and (key == "mean" or v > 0) for v in numbers):
        allowed = "finite numbers" if key == "mean" else "finite numbers above 0"
        raise ConfigError(f"Value of option '{key}' is not allowed", got=repr(value)[:80], allowed=allowed)
    return [float(v) for v in numbers]
