"""Readers of recurrent layers."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from chipfit.frameworks.keras.call import KerasCall
from chipfit.frameworks.keras.read import reads
from chipfit.frameworks.reading import Unreadable, require
from chipfit.graph.ir import Value

_SIGMOID, _TANH, _RELU = (keras.activations.get(name) for name in ("sigmoid", "tanh", "relu"))
Shape = Sequence[int | None]


@reads("LSTM GRU SimpleRNN RNN")
def _layer(r: KerasCall, sequences: Value, initial_state: Any = None, mask: Any = None) -> list[Value]:
    """Read a layer of one direction, over all steps; one of stacked cells is a layer for each of them.

    Raises:
        Unreadable: its cell has no kernel, the number of steps is open, or states of stacked cells are given or taken.
    """
    inner = list(getattr(getattr(r.op, "cell", None), "cells", ()))[:-1]
    if inner and (initial_state is not None or r.op.return_state):
        raise Unreadable
    for cell in inner:
        sequences, *_ = _one_direction(r, r.op, sequences, None, f"{r.name}/{cell.name}", mask, cell)
    y, last, *more = _one_direction(r, r.op, sequences, initial_state, r.name, mask)
    if mask is not None and r.op.return_sequences and getattr(r.op, "zero_output_for_mask", False):
        wide = r.step("Unsqueeze", [mask], "mask", axes=(2,))
        y = r.step("Where", [wide, y, r.operand(0.0)], "hidden")
    if r.op.return_sequences and r.op.go_backwards:  # Keras returns the states in the order in which they are made
        y = _flipped(r, y)
    return [y if r.op.return_sequences else last, *([last, *more] if r.op.return_state else [])]


@reads("Bidirectional")
def _bidirectional(r: KerasCall, sequences: Value, initial_state: Any = None) -> list[Value]:
    """Read a layer in both directions."""
    o, states = r.op, [None, None] if initial_state is None else _halves(initial_state)
    both = [
        _one_direction(r, layer, sequences, s, f"{r.name}/{layer.name}")
        for layer, s in zip((o.forward_layer, o.backward_layer), states, strict=True)
    ]
    require([o.forward_layer.go_backwards, o.backward_layer.go_backwards] == [False, True])
    results = [y if o.return_sequences else last for y, last, *_ in both]
    states = [s for _, *last in both for s in last] if o.return_state else []
    return [*_merged(r, results), *states]


def _halves(states: Sequence[Any]) -> list[Any]:
    return [states[: len(states) // 2], states[len(states) // 2 :]]


def _merged(r: KerasCall, results: list[Value]) -> list[Value]:
    mode = r.op.merge_mode
    if mode is None:
        return results
    if mode == "concat":
        return [r.step("Concat", results, "concat", axis=len(results[0].shape) - 1)]
    merged = r.step("Mul" if mode == "mul" else "Add", results, mode)
    return [r.step("Mul", [merged, r.operand(0.5)], "half")] if mode == "ave" else [merged]


def _one_direction(
    r: KerasCall, layer: Any, x: Value, initial: Any, name: str, mask: Any = None, cell: Any = None
) -> list[Value]:
    """Append the node of one direction, by default of the layer's last cell; return its results."""
    cell = cell or getattr(layer, "cell", None)
    cell = getattr(cell, "cells", [cell])[-1]
    require(x.dtype == "float32" and len(x.shape) == 3 and x.shape[1] is not None)
    op, attrs = _kind(cell)
    states = [initial] if isinstance(initial, Value) else list(initial or ())
    require(all(isinstance(s, Value) for s in states) and (mask is None or isinstance(mask, Value)))
    weights = [r.weight(cell.kernel, "linear"), r.weight(cell.recurrent_kernel, "linear"), *_biases(r, cell)]
    n, t, units = x.shape[0], x.shape[1], cell.units
    outs: list[tuple[Shape, str]] = [((n, t, units), x.dtype), *[((n, units), x.dtype)] * (2 if op == "LSTM" else 1)]
    attrs = {**attrs, "reverse": bool(layer.go_backwards)}
    given = [s.name for s in states] or [None] * len(outs[1:])
    inputs: list[str | None] = [x.name, *weights, *given, None if mask is None else mask.name]
    return r.builder.emit(r.origin, name, op, inputs, attrs, outs)


def _kind(cell: Any) -> tuple[str, dict[str, Any]]:
    """Return operator and attributes of a cell.

    Raises:
        Unreadable: the cell is not one of Keras, or its activations are not those of the kernels.
    """
    usual = getattr(cell, "recurrent_activation", _SIGMOID) is _SIGMOID
    if type(cell) is keras.layers.SimpleRNNCell and cell.activation in (_TANH, _RELU):
        return "RNN", {"activation": "tanh" if cell.activation is _TANH else "relu"}
    if type(cell) is keras.layers.LSTMCell and usual and cell.activation is _TANH:
        return "LSTM", {"gates": "ifgo", "cell_clip": None}
    if type(cell) is keras.layers.GRUCell and usual and cell.activation is _TANH:
        return "GRU", {"gates": "zrn", "reset_after": bool(cell.reset_after)}
    raise Unreadable


def _biases(r: KerasCall, cell: Any) -> list[str | None]:
    """Return the bias of the inputs and that of the states; Keras has one bias, or both as rows of one variable."""
    if cell.bias is None or len(cell.bias.shape) == 1:
        return [r.weight(cell.bias), None]
    return [r.weight(cell.bias, "row_0", "bias"), r.weight(cell.bias, "row_1", "recurrent_bias")]


def _flipped(r: KerasCall, y: Value) -> Value:
    return r.step("Gather", [y, r.operand(np.arange(y.shape[1] or 0)[::-1], "int64")], "flip", axis=1)
