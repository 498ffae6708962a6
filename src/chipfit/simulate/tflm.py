"""TensorFlow Lite Micro's reference kernels: LiteRT's reference kernels, except for the operators listed here.

Linear layers multiply in fixed point as convolutions do; activation curves are computed in fixed point, not by tables.
Source: TensorFlow Lite Micro, tensorflow/lite/micro/kernels and tensorflow/lite/kernels/internal/reference.
"""

import math
from collections import ChainMap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chipfit.graph.ir import Node
from chipfit.operators.table import by_name, read_column, resolve
from chipfit.registry import lookup, register
from chipfit.simulate import gemmlowp, recurrent
from chipfit.simulate.integer import CellFunction, Kernel, KernelCall, Profile, accumulate, kernel_of
from chipfit.simulate.libm import libm
from chipfit.simulate.litert import apply_table, prelu, rows_in_fixed_point, softmax
from chipfit.simulate.requantize import fixed_point, multiplier_and_shift, scale_by, shift_away

Tensor = torch.Tensor


def _linear(c: KernelCall) -> None:
    """Multiply in fixed point; the product of two single scales is rounded to float32 first."""
    s, w = c.scale(c.x), c.scale(c.second)
    product = (s * w).double() if w.numel() == 1 else s.double() * w.double()
    real = product / c.scale(c.out).double()
    c.write_result(fixed_point(accumulate(c.run, c.node), real, "q15" if c.wide else "away"))


def _mul(c: KernelCall) -> None:
    """Multiply, with a multiplier computed in double precision."""
    real = c.multiplier(c.x, c.second, kind=torch.float64)
    c.write_result(fixed_point(c.centred() * c.centred(c.second), real, "away"))


def _relu6(c: KernelCall) -> None:
    """Clip between the operand's integers for 0 and 6, and write them as they are, whatever the result's scale."""
    zero = int(c.zero(c.x))
    six = zero + int(torch.floor(6.0 / c.scale(c.x) + 0.5))
    c.run.store(c.out, c.code().long().clamp(zero, six))


def _elu(x: Tensor, node: Node) -> Tensor:
    """Return the function, each step rounded to float32: exp(x) - 1 keeps fewer bits of small numbers than expm1(x)."""
    return torch.where(x < 0, libm("exp", x) - 1.0, x)


def _curve(c: KernelCall, function: Callable[[Tensor, int], Tensor], bits: int) -> None:
    """Compute an activation curve of 8-bit integers in fixed point with 4 integer bits; beyond 15 it is constant.

    Args:
        function: (32-bit fixed point, its integer bits) -> fixed point without integer bits.
        bits: of the result.
    """
    if c.wide:
        return _REFERENCE.kernels[c.node.op](c.run, c.nodes)
    m, e = multiplier_and_shift(c.scale(c.x).double() * 2.0**27)
    radius = math.floor(15.0 * 2.0**27 / 2.0 ** int(e))
    q = c.centred().long()
    y = shift_away(function(scale_by(q.clamp(-radius, radius), m, e, "away"), 4), 31 - bits)
    least, most = -128 - int(c.zero(c.out)), 127 - int(c.zero(c.out))
    c.write_result(torch.where(q <= -radius, least, torch.where(q >= radius, most, y)))


_FUNCTIONS: dict[str, Callable[..., None]] = {
    "elu": partial(apply_table, f=_elu),
    "prelu": partial(prelu, kind=torch.float64),
    "softmax": partial(softmax, rows=rows_in_fixed_point, kind=torch.float32),
    "sigmoid": partial(_curve, function=gemmlowp.logistic, bits=8),
    "tanh": partial(_curve, function=gemmlowp.tanh, bits=7),
} | by_name(_linear, _mul, _relu6)
_FUNCTIONS |= recurrent.FUNCTIONS["tflm"]
_KERNELS: dict[str, Kernel] = {}  #: operator -> kernel, of those that differ from LiteRT's reference kernels
_PASS_THROUGH: dict[str, Kernel] = {}


def _enter_cell(op: str, name: CellFunction | None = None, pass_through: CellFunction | None = None) -> None:
    """Enter a cell of the table of operators; `pass_through` computes where operand and result share a scale."""
    for table, f in ((_KERNELS, name), (_PASS_THROUGH, pass_through)):
        if f is not None:
            table[op] = kernel_of(resolve(f, _FUNCTIONS))


read_column("tflm", _enter_cell, _KERNELS, _PASS_THROUGH)
_REFERENCE: Any = lookup("kernels", "litert_reference")
_PROFILE: Profile = replace(
    _REFERENCE,
    kernels=ChainMap(_KERNELS, _REFERENCE.kernels),
    pass_through=ChainMap(_PASS_THROUGH, _REFERENCE.pass_through),
)
register("kernels", "tflm")(_PROFILE)
