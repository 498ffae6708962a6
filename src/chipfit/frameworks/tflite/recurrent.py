"""Readers of recurrent operators in `.tflite` files, whose states are variable tensors.

A file whose calls are steps of one sequence (`TfliteModel.streams`) becomes a graph whose samples are these steps.
"""

from typing import Any

import torch

from chipfit.frameworks.tflite.model import Tensor
from chipfit.frameworks.tflite.read import Call, reads, require
from chipfit.graph.ir import Value

#: operands of UNIDIRECTIONAL_SEQUENCE_LSTM: weights of input, forget, cell and output gate, and others
_WEIGHTS = {"w": (1, 2, 3, 4), "r": (5, 6, 7, 8), "b": (12, 13, 14, 15)}
_UNREAD = {"peephole weights": (9, 10, 11), "a projection": (16, 17), "layer norms": (20, 21, 22, 23)}
_STATE, _CELL = 18, 19
_HIDDEN = 4  #: number of the intermediate tensor that states how h is rounded
_TANH = 4


@reads("UNIDIRECTIONAL_SEQUENCE_LSTM")
def _lstm(c: Call) -> Value:
    for what, operands in _UNREAD.items():
        require(not any(c.has(k) for k in operands), f"it has {what}")
    require(c.has(1), "its input gate is that of the forget gate")
    require(c.fused == _TANH, f"its activation has the number {c.fused}")
    require(c.out[0].kind in ("FLOAT32", "INT8"), f"its activations are {c.out[0].kind}")
    c.fused = 0
    weights = [c.reading.joined(f"{c.name}/{slot}", [c.op.inputs[k] for k in ks]) for slot, ks in _WEIGHTS.items()]
    x = _sequences(c)
    size = c.reading.builder.graph.shape(weights[1])[1]
    inputs: list[Any] = [x, *weights]
    out, hidden, state = c.out[0], _hidden(c), c.tensor(_STATE)
    if not _same_grid(hidden, state):
        inputs += [None, _zeros(c, "state", _STATE, state.shape)]
    _warn_of_other_grids(c, hidden, state)
    clip = float(c.option("cellClip", 0.0) or 0.0) or None
    outs = [((*x.shape[:2], size), out.dtype), *[((x.shape[0], size), out.dtype)] * 2]
    y, _, cell = c.parts("LSTM", inputs, outs, c.name, gates="ifgo", reverse=False, cell_clip=clip)
    c.reading.record_grid(cell.name, c.op.inputs[_CELL])
    if x is c.value(0) and _same_grid(hidden, out):
        return y
    c.reading.record_grid(y.name, hidden.index)
    if c.option("timeMajor", False) and not c.reading.model.streams:
        return c.part("Transpose", [y], c.shape(), perm=(1, 0, 2))
    return c.part("Reshape", [y], c.shape(), shape=c.static())


def _warn_of_other_grids(c: Call, hidden: Tensor, state: Tensor) -> None:
    """Take note of an LSTM whose numbers change their meaning, as TensorFlow's converter writes one before a concat."""
    if hidden.scale is None or state.scale is None or c.out[0].scale is None:
        return  # a float operator has none
    if not _same_grid(hidden, state):
        grids = f"scale {float(hidden.scale[0]):.5g}, and read in the next step with {float(state.scale[0]):.5g}"
        where = "TensorFlow Lite Micro rounds them to the latter, and so gives other numbers than LiteRT"
        c.reading.warn(f"states of '{c.name}' are rounded to {grids}; {where}")
    if not _same_grid(hidden, c.out[0]):
        grids = f"to scale {float(hidden.scale[0]):.5g}, and read behind it with {float(c.out[0].scale[0]):.5g}"
        c.reading.warn(f"results of '{c.name}' are rounded {grids}")


def _sequences(c: Call) -> Value:
    """Return the operand as [samples, steps, features]."""
    x = c.value(0)
    if c.reading.model.streams:
        first, second, width = x.shape
        count = first * second if first is not None and second is not None else None
        require(
            count is not None or second == 1 or not c.option("timeMajor", False), "it runs several sequences at once"
        )
        return c.part("Reshape", [x], (1, count, width), shape=(1, -1, width))
    if c.option("timeMajor", False):
        return c.step("Transpose", [x], perm=(1, 0, 2))
    return x


def _hidden(c: Call) -> Tensor:
    """Return a tensor with the grid to which LiteRT rounds h; TensorFlow's converter may give the result another."""
    found = c.op.intermediates[_HIDDEN] if len(c.op.intermediates) > _HIDDEN else -1
    tensor = c.reading.model.tensors[found] if found >= 0 else c.out[0]
    return tensor if tensor.scale is not None else c.out[0]


def _same_grid(a: Tensor, b: Tensor) -> bool:
    if a.scale is None or b.scale is None:
        return a.scale is b.scale
    return a.kind == b.kind and bool((a.scale == b.scale).all() and (a.zero == b.zero).all())


def _zeros(c: Call, slot: str, operand: int, shape: tuple[int | None, ...]) -> str:
    """Add a state before the first step, stored as a variable tensor of the file is."""
    builder = c.reading.builder
    name = builder.fresh(f"{c.name}/{slot}")
    builder.graph.weights[name] = torch.zeros([int(d or 1) for d in shape])
    c.reading.record_grid(name, c.op.inputs[operand])
    return name


@reads("SVDF")
def _svdf(c: Call) -> Value:
    x = c.value(0)
    require(x.shape[0] in (None, 1), "several sequences run at once")
    if c.out[0].scale is not None:
        c.fused = 0  # integer kernels do not apply it; the zero point of the result stands for it
    w, time = (c.weight(k, trains=True) for k in (1, 2))
    state = _zeros(c, "state", 4, c.tensor(4).shape)
    return c.part("SVDF", [x, w, time, c.bias(3), state], c.shape(), called=c.name, rank=int(c.option("rank")))


@reads("REVERSE_V2")
def _reverse(c: Call) -> Value:
    x, grids = c.value(0), [t.scale for t in (c.tensor(0), c.out[0]) if t.scale is not None]
    if not _same_grid(c.tensor(0), c.out[0]) and len(grids) == 2:
        scales = " and ".join(f"{float(s[0]):.5g}" for s in grids)
        c.reading.warn(f"REVERSE_V2 '{c.name}' copies integers between tensors of the scales {scales}")
    for axis in (a % len(x.shape) for a in c.integers(1)):
        require(x.shape[axis] is not None, "it turns the batch")
        x = c.emit("Gather", [x, c.added(torch.arange(x.shape[axis] or 0).flip(0))], axis=axis)
    return x
