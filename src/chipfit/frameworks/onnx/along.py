"""Readers of operators along one axis: running sums and products, the place of the largest element, reversed steps."""

from typing import Any

import numpy as np
from onnx.helper import tensor_dtype_to_np_dtype

from chipfit.frameworks.onnx.call import OnnxCall, Operand
from chipfit.frameworks.onnx.read import reads
from chipfit.frameworks.reading import present, require, running_sum, shifted


def _backwards(c: OnnxCall, size: int | None, count: int | None = None) -> Operand:
    """Return indices that reverse an axis of a size, or its first `count` elements."""
    order = np.arange(present(size))
    order[:count] = order[:count][::-1].copy()
    return c.builder.constants([order])


@reads("CumSum")
def _cum_sum(c: OnnxCall) -> Any:
    x, axis = c.operand(0), present(c.integers("", 1))[0] % c.operand(0).rank
    order = _backwards(c, x.shape[axis]) if c.attr("reverse") else None
    return running_sum(c, x, axis, x.rank, order, bool(c.attr("exclusive")))


@reads("CumProd")
def _cum_prod(c: OnnxCall) -> Any:
    """Read running products of 2^k elements each, from those of 2^(k - 1) elements."""
    x, axis = c.operand(0), present(c.integers("", 1))[0] % c.operand(0).rank
    size, order = present(x.shape[axis]), _backwards(c, x.shape[axis])
    x = c.step("Gather", [x, order], axis=axis) if c.attr("reverse") else x
    x = shifted(c, x, axis, x.rank, 1, 1.0) if c.attr("exclusive") else x
    for k in range((size - 1).bit_length()):
        x = c.step("Mul", [x, shifted(c, x, axis, x.rank, 1 << k, 1.0)])
    return c.step("Gather", [x, order], axis=axis) if c.attr("reverse") else x


@reads("Hardmax")
def _hardmax(c: OnnxCall) -> Any:
    """Read 1 at the first of the largest elements and 0 elsewhere; before opset 13 it is over all axes from
    `axis` on."""
    x, axis = c.operand(0), c.attr("axis") % c.operand(0).rank
    if c.opset < 13:
        require(axis == x.rank - 1)
    size = present(x.shape[axis])
    places = c.builder.constants([np.arange(size).reshape(-1, *[1] * (x.rank - 1 - axis))])
    formula = "cast(argmax(x, axis=axis, keepdims=True) == places, dtype='float32')"
    return c.formula(formula, x=x, axis=axis, places=places)


@reads("ReverseSequence")
def _reverse_sequence(c: OnnxCall) -> Any:
    """Read the reversal of the first steps of each sample, as many of all samples."""
    x, counts, time = c.operand(0), c.operand(1), c.attr("time_axis")
    found = {int(k) for n in counts.numbers for k in np.unique(n)}
    require(len(found) == 1)
    return c.emit("Gather", [x, _backwards(c, x.shape[time], *found)], axis=time)


@reads("EyeLike")
def _eye_like(c: OnnxCall) -> Any:
    """Read ones on a diagonal as a constant."""
    x, kind = c.operand(0), c.attr("dtype")
    dtype = np.dtype(str(x.dtype).removeprefix("torch.") if kind is None else tensor_dtype_to_np_dtype(kind))
    return c.builder.constants([np.eye(m.shape[0], m.shape[1], c.attr("k"), dtype) for m in x.metas])
