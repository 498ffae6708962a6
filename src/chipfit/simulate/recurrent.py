"""Integer kernels of recurrent operators in LiteRT and in TensorFlow Lite Micro: LSTM with 16-bit cell state, and SVDF.

The gates of an LSTM have 3 integer bits before their curves and none behind them; the scale of its cell state is a
power of two. LiteRT computes the curves in fixed point, TensorFlow Lite Micro by tables.
Sources: TensorFlow Lite, kernels/lstm_eval.cc and kernels/internal/reference/svdf.h; TensorFlow Lite Micro,
micro/kernels/lstm_eval.cc, lstm_eval_common.cc and svdf_common.cc; experiments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch

from chipfit.errors import UnsupportedError
from chipfit.quantizers.stored import scales_per_output
from chipfit.simulate import gemmlowp, tables16
from chipfit.simulate.integer import KernelCall
from chipfit.simulate.requantize import fixed_point, shift_away, shift_up

Tensor = torch.Tensor
_LOW, _HIGH = -(1 << 15), (1 << 15) - 1
#: scale of the gates before their curves: 3 integer bits
GATE_SCALE = 2.0**-12


def _saturated(x: Tensor) -> Tensor:
    return x.clamp(_LOW, _HIGH)


@dataclass(frozen=True)
class Cell:
    """The arithmetic of an LSTM in one family of kernels."""

    #: 16-bit integers with 3 integer bits -> their sigmoid, without integer bits
    sigmoid: Callable[[Tensor], Tensor]
    #: (16-bit integers, number of their integer bits) -> their tanh, without integer bits
    tanh: Callable[[Tensor, int], Tensor]
    #: (16-bit integers, 16-bit integers, bits) -> their products divided by 2^bits
    product: Callable[[Tensor, Tensor, int], Tensor]
    #: (scale of an operand, scales of a weight) -> multipliers of their products for gates
    multiplier: Callable[[Tensor, Tensor], Tensor]
    #: scale of the new state, float32 -> multiplier of o tanh(c)
    hidden: Callable[[Tensor], Tensor]
    #: it adds the share of the state in the gates before it saturates that, and rounds the new state to the grid of the
    #: result, not to that of the state before it
    fused: bool


def _tanh_by_table(q: Tensor, integers: int) -> Tensor:
    by = integers - 3
    return tables16.tanh_of_12288ths(3 * q << by if by >= 0 else shift_up(3 * q, -by))


#: LiteRT computes multipliers in float32
LITERT = Cell(
    sigmoid=lambda q: gemmlowp.logistic(q, 3, 16),
    tanh=lambda q, integers: gemmlowp.tanh(q, integers, 16),
    product=lambda a, b, bits: _saturated(shift_away(a * b, bits)),
    multiplier=lambda x, w: (w * x / GATE_SCALE).double(),
    hidden=lambda s: (2.0**-30 / s).double(),
    fused=True,
)
#: TensorFlow Lite Micro computes multipliers in double precision
TFLM = Cell(
    sigmoid=lambda q: tables16.sigmoid(q, torch.tensor(GATE_SCALE)),
    tanh=_tanh_by_table,
    product=lambda a, b, bits: _saturated(fixed_point(a * b, torch.tensor(2.0**-bits), "away")),
    multiplier=lambda x, w: x.double() * w.double() / GATE_SCALE,
    hidden=lambda s: 2.0**-30 / s.double(),
    fused=False,
)


@cache
def _curves(cell: Cell, integers: int) -> tuple[Tensor, Tensor]:
    """Return sigmoid and tanh of all 16-bit integers, for arguments with so many integer bits."""
    q = torch.arange(_LOW, _HIGH + 1)
    return cell.sigmoid(q), cell.tanh(q, integers)


def _require_state(c: KernelCall, name: str) -> None:
    """Raise if a state is not quantized.

    Raises:
        UnsupportedError: it is not.
    """
    if not c.run.plan.quantized(name):
        what = f"The plan states no scale for the state of {c.node.op} '{c.node.display_name}'"
        raise UnsupportedError(what, hint="only native layers of quantized .tflite files have one")


def lstm(c: KernelCall, cell: Cell) -> None:
    """Compute an LSTM with 8-bit activations and weights and 16-bit cell state, all steps of a sequence."""
    _require_state(c, c.node.outputs[-1])
    steps = _Lstm(c, cell)
    x = c.centred()
    x = (x if x.dim() == 3 else x.unsqueeze(1)).double()
    x = x.flip(1) if c.attrs["reverse"] else x
    inputs, states = steps.products(x, c.node.weight, c.x, c.node.operand("b")), []
    for gates in inputs.unbind(1):
        states.append(steps.step(gates))
    y = torch.stack(states[::-1] if c.attrs["reverse"] else states, 1)
    c.run.store(c.out, y.reshape(c.code().shape[:-1] + y.shape[-1:]))
    c.run.store(c.node.outputs[-1], steps.c)
    for name in c.node.outputs[1:-1]:  # h after the last step
        if c.run.plan.quantized(name):
            c.run.store(name, states[-1])
        else:
            c.run.floats[name] = (states[-1] - steps.zero).float() * steps.scale


class _Lstm:
    """The states of an LSTM, and the step that changes them.

    Raises:
        UnsupportedError: the scale of the cell state is not a power of two.
    """

    def __init__(self, c: KernelCall, cell: Cell) -> None:
        self.call, self.cell = c, cell
        name, cell_scale = c.node.operand("h"), float(c.scale(c.node.outputs[-1]))
        self.r = c.node.inputs[2] or ""
        self.state = name or c.nodes[0].output
        result = c.nodes[0].output if cell.fused and c.run.plan.quantized(c.nodes[0].output) else self.state
        result = result if c.run.plan.quantized(result) else c.out
        self.zero, self.scale = (c.zero(result), c.scale(result))
        self.bits = -round(float(np.log2(cell_scale)))  #: fractional bits of the cell state
        if 2.0**-self.bits != cell_scale:
            what = f"The scale of the cell state of '{c.node.display_name}' must be a power of two"
            raise UnsupportedError(what, got=cell_scale)
        self.sigmoid, self.tanh_of_gate = _curves(cell, 3)
        self.tanh_of_cell = _curves(cell, 15 - self.bits)[1]
        clip = c.attrs.get("cell_clip")
        self.clip = int(min(clip / cell_scale, _HIGH)) if clip else None
        count, size = c.code().shape[0], c.code(self.r).shape[1]
        given = [c.node.operand(k) for k in ("h", "c")]
        self.h, self.c = (torch.zeros(count, size) if i is None else c.centred(i).expand(count, size) for i in given)
        self.h, self.c = self.h.double(), self.c.long()

    def products(self, x: Tensor, weight: str, operand: str, bias: str | None) -> Tensor:
        """Return the share of an operand in the gates, int64."""
        acc = x @ self.call.centred(weight).t()
        acc = acc if bias is None else acc + self.call.code(bias)
        scales = scales_per_output(self.call.scale(weight).reshape(-1), acc.shape[-1])
        real = self.cell.multiplier(self.call.scale(operand), scales)
        return fixed_point(acc, real, "away")

    def step(self, gates: Tensor) -> Tensor:
        """Compute one step from the operand's share in the gates; return the integers of the new state."""
        more = self.products(self.h, self.r, self.state, None)
        gates = _saturated(_saturated(gates) + (more if self.cell.fused else _saturated(more)))
        parts = dict(zip(self.call.attrs["gates"], gates.chunk(4, -1), strict=True))
        i, f, o = (self.sigmoid[parts[k] - _LOW] for k in "ifo")
        new, product = self.tanh_of_gate[parts["g"] - _LOW], self.cell.product
        self.c = _saturated(product(f, self.c, 15) + product(i, new, 30 - self.bits))
        self.c = self.c if self.clip is None else self.c.clamp(-self.clip, self.clip)
        y = fixed_point(o * self.tanh_of_cell[self.c - _LOW], self.cell.hidden(self.scale), "away") + self.zero
        y = y.clamp(-128, 127)
        self.h = (y - self.call.zero(self.state)).double()
        return y


def svdf(c: KernelCall) -> None:
    """Filter features, then each filter's last values in time; steps are the rows of the operand.

    Multipliers are computed in float32. The activation of the file's operator is not applied.
    """
    w, time, state = c.node.weight, c.node.inputs[2] or "", c.node.inputs[4] or ""
    _require_state(c, state)
    scale = c.scale(state)
    features = fixed_point(c.centred() @ c.centred(w).t(), (c.scale(c.x) * c.scale(w) / scale).double(), "away")
    grid = c.run.plan[state].grid
    features = (features.clamp(grid.qmin, grid.qmax) + c.zero(state)).double()  # 8 bits wrap around behind the clip
    features = _wrapped(features, grid.bits) - c.zero(state)
    before = c.centred(state).reshape(c.code(time).shape).t()[1:]
    steps = torch.cat((before, features)).unfold(0, c.code(time).shape[1], 1)
    acc = (steps * c.centred(time)).sum(-1).unflatten(-1, (-1, c.attrs["rank"])).sum(-1)
    bias = c.node.inputs[3]
    acc = _wrapped(acc if bias is None else acc + c.code(bias), 32)
    c.write_result(fixed_point(acc, (scale * c.scale(time) / c.scale(c.out)).double(), "away"))


def _wrapped(x: Tensor, bits: int) -> Tensor:
    """Return integers as a type of so many bits holds them."""
    half = 2.0 ** (bits - 1)
    return torch.remainder(x + half, 2 * half) - half


#: functions of the columns "litert" and "tflm", by name
FUNCTIONS: dict[str, dict[str, Callable[..., None]]] = {
    "litert": {"lstm": partial(lstm, cell=LITERT), "svdf": svdf},
    "tflm": {"lstm": partial(lstm, cell=TFLM), "svdf": svdf},
}
