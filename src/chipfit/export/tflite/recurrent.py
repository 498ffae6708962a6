"""Writer of LSTM, whose states lie in variable tensors of the file and start from zeros at each reset."""

from collections.abc import Sequence

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from chipfit.export.tflite.builder import TfliteBuilder, code_type
from chipfit.export.tflite.file import TYPES, Quantization
from chipfit.graph.ir import Node

_ORDER = "ifgo"  #: gates in the order of the operator's operands: input, forget, cell and output
#: operands that are left out: peephole weights, a projection, and layer norms
_PEEPHOLES, _PROJECTION, _NORMS = [-1] * 3, [-1] * 2, [-1] * 4
_INTERMEDIATES = 5  #: of which integer kernels read the last, the grid of the state


def lstm(w: TfliteBuilder, n: Node, y: Sequence[int]) -> None:
    """Write UNIDIRECTIONAL_SEQUENCE_LSTM, over a sequence or one step."""
    size, shape = w.shape(n.inputs[2] or "")[1], list(w.shape(n.data))
    sequence, x = len(shape) == 3, w.read(n.data)
    if not sequence:
        shape.insert(1, 1)
        x = _reshaped(w, x, shape)
    backwards = np.arange(shape[1])[::-1] if n.attrs["reverse"] else None
    if backwards is not None:
        x, given = w.temporary(shape, x), x
        w.pick(given, backwards, 1, x)
    states, cell = [*shape[:2], size], _cell(w, n, y[-1])
    result = y[0] if sequence and backwards is None else w.temporary(states, y[0])
    weights = [k for slot in "wr" for k in _gates(w, n, n.operand(slot) or "")]
    operands = [x, *weights, *_PEEPHOLES, *_biases(w, n, x, weights), *_PROJECTION, _state(w, n, y[0]), cell, *_NORMS]
    tanh, clip = schema.ActivationFunctionType.TANH, float(n.attrs["cell_clip"] or 0.0)
    w.op(w.kind, operands, result, fusedActivationFunction=tanh, cellClip=clip)
    if w.integer:
        hidden = w.temporary([0], y[0], f"{n.name}/hidden")
        w.operators[-1].intermediates = np.full(_INTERMEDIATES, hidden, np.int32)
    if not sequence:
        w.op("RESHAPE", [result, w.ints(shape[0], size)], y[0], newShape=[shape[0], size])
    elif _is_read(w, n.outputs[1]):
        _last_step(w, result, y[1])
    if sequence and backwards is not None:
        w.pick(result, backwards, 1, y[0])


def _reshaped(w: TfliteBuilder, x: int, shape: Sequence[int]) -> int:
    y = w.temporary(shape, x)
    w.op("RESHAPE", [x, w.ints(*shape)], y, newShape=list(shape))
    return y


def _last_step(w: TfliteBuilder, x: int, y: int) -> None:
    """Write the state after the last step."""
    bounds = [w.ints(*v) for v in ([0, -1, 0], [0, 0, 0], [1, 1, 1])]
    w.op("STRIDED_SLICE", [x, *bounds], y, beginMask=0b101, endMask=0b111, shrinkAxisMask=0b010)


def _is_read(w: TfliteBuilder, value: str) -> bool:
    return value in w.graph.outputs or any(value in m.inputs for m in w.graph.nodes)


def _gates(w: TfliteBuilder, n: Node, name: str) -> list[int]:
    """Return the tensors of the four gates of a weight or bias; gates of integers have one scale each."""
    stored, whole = w.plan.stored(name), w.graph.weights[name].detach()
    parts = (whole if stored is None else stored.quantize(whole)).numpy().reshape(len(_ORDER), -1, *whole.shape[1:])
    rows, found = parts.shape[1], dict[str, int]()
    for k, (letter, part) in enumerate(zip(n.attrs["gates"], parts, strict=True)):
        called = f"{name}/{letter}"
        if stored is None:
            found[letter] = w.constant(part, called)
            continue
        scale = stored.scale.reshape(-1).expand(len(whole))[k * rows : (k + 1) * rows]
        one_scale = not w.integer or bool((scale == scale[0]).all())
        w.require(n, one_scale, f"the rows of a gate of '{name}' have several scales")
        numbers = Quantization(scale[: 1 if w.integer else rows].numpy(), np.zeros(1 if w.integer else rows, np.int64))
        found[letter] = w.constant(part, called, code_type(w.plan.tensors[name]), numbers)
    w.joined[name] = [w.tensors[found[letter]].name.decode() for letter in n.attrs["gates"]]
    in_floats = stored is not None and not w.integer
    return [w.dequantized(found[letter], f"{name}/{letter}") if in_floats else found[letter] for letter in _ORDER]


def _biases(w: TfliteBuilder, n: Node, x: int, weights: Sequence[int]) -> list[int]:
    """Return the tensors of the gates' biases: zeros where there are none."""
    name, rows = n.operand("b"), w.shape(n.weight)[0]
    if name is not None:
        return _gates(w, n, name)
    if not w.integer:
        return [w.constant(np.zeros(rows // len(_ORDER), np.float32))] * len(_ORDER)
    data, found = np.float32(w.tensors[x].quantization.scale[0]), list[int]()
    for letter, k in zip(_ORDER, weights, strict=False):
        numbers = Quantization(np.array(data * np.float32(w.tensors[k].quantization.scale[0])), np.array(0))
        found.append(w.constant(np.zeros(rows // len(_ORDER), np.int32), f"{n.name}/{letter}", TYPES["int32"], numbers))
    return found


def _state(w: TfliteBuilder, n: Node, like: int) -> int:
    """Return the variable tensor of the state: an input of the file in a network of one step."""
    given = n.operand("h")
    k = (
        w.index[given]
        if given is not None
        else w.temporary([w.shape(n.output)[0], w.shape(n.inputs[2] or "")[1]], like)
    )
    w.tensors[k].isVariable = True
    return k


def _cell(w: TfliteBuilder, n: Node, cell: int) -> int:
    """Return the variable tensor of the cell's state, which is the result, and perhaps an input of the file too."""
    given = n.operand("c")
    if given is not None:
        cell = w.index[n.outputs[-1]] = w.index[given]
        w.kept[given] = n.outputs[-1]
    w.tensors[cell].isVariable = True
    return cell
