"""Operations and layers of Keras without a reader, by simpler ones: what they compute, in keras.ops.

A formula receives the operation, whose settings it reads, and the arguments of the call. It is traced on symbolic
tensors, whose sizes other than the batch are known; an error in it leaves the operation to the next way of reading.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from keras import ops

Formula = Callable[..., Any]


def _axes(axis: Any, x: Any) -> tuple[int, ...]:
    rank = len(x.shape)
    return tuple(range(rank)) if axis is None else tuple(a % rank for a in ((axis,) if isinstance(axis, int) else axis))


def _var(o: Any, x: Any) -> Any:
    """mean((x - mean)^2)"""
    away = x - ops.mean(x, _axes(o.axis, x), keepdims=True)
    return ops.mean(away * away, _axes(o.axis, x), keepdims=o.keepdims)


def _log_sum_exp(o: Any, x: Any) -> Any:
    """m + log(sum(exp(x - m))), m being the maximum"""
    axes = _axes(o.axis, x)
    top = ops.max(x, axes, keepdims=True)
    logs = ops.log(ops.sum(ops.exp(x - top), axes, keepdims=True))
    return logs + top if o.keepdims else ops.squeeze(logs + top, axes)


def _triangle(o: Any, x: Any, function: Callable[..., Any]) -> Any:
    """x where a constant matrix of ones and zeros holds"""
    kept = function(np.ones(x.shape[-2:], bool), o.k)
    return ops.where(kept, x, 0.0)


def _shrink_hard(o: Any, x: Any) -> Any:
    return ops.where(ops.abs(x) > o.threshold, x, 0.0)


def _shrink_soft(o: Any, x: Any) -> Any:
    """relu(x - t) - relu(-x - t)"""
    return ops.relu(x - o.threshold) - ops.relu(-x - o.threshold)


def _celu(o: Any, x: Any) -> Any:
    """max(x, 0) + alpha (exp(min(x, 0) / alpha) - 1)"""
    return ops.maximum(x, 0.0) + o.alpha * (ops.exp(ops.minimum(x, 0.0) / o.alpha) - 1.0)


def _sparse_plus(o: Any, x: Any) -> Any:
    """0 below -1, x above 1, (x + 1)^2 / 4 between"""
    inner = ops.clip(x, -1.0, 1.0) + 1.0
    return 0.25 * inner * inner + ops.relu(x - 1.0)


def _glu(o: Any, x: Any) -> Any:
    a, b = ops.split(x, 2, o.axis)
    return a * ops.sigmoid(b)


def _log_of_sum(o: Any, a: Any, b: Any) -> Any:
    top = ops.maximum(a, b)
    return top + ops.log(ops.exp(a - top) + ops.exp(b - top))


def _filled(value: float) -> Formula:
    """Return the formula of a constant that is repeated for each sample."""

    def formula(o: Any, x: Any, dtype: Any = None) -> Any:
        one = np.full((1, *x.shape[1:]), value, dtype or o.dtype or x.dtype)
        return ops.broadcast_to(one, x.shape)

    return formula


def _time_distributed(o: Any, x: Any) -> Any:
    """the layer on all steps of all samples at once, [N, T, ...] as [N T, ...]"""
    steps, *sizes = x.shape[1:]
    y = o.layer(ops.reshape(x, (-1, *sizes)))
    return ops.reshape(y, (-1, steps, *y.shape[1:]))


#: class of an operation -> its formula
FORMULAS: Mapping[str, Formula] = {
    "Softsign": lambda o, x: x / (ops.abs(x) + 1.0),
    "TanhShrink": lambda o, x: x - ops.tanh(x),
    "SoftShrink": _shrink_soft,
    "HardShrink": _shrink_hard,
    "LogSigmoid": lambda o, x: -ops.softplus(-x),
    "Celu": _celu,
    "SparsePlus": _sparse_plus,
    "Squareplus": lambda o, x: (x + ops.sqrt(x * x + float(o.b))) / 2.0,
    "SparseSigmoid": lambda o, x: ops.clip(0.5 * (x + 1.0), 0.0, 1.0),
    "Threshold": lambda o, x: ops.where(x > o.threshold, x, float(o.default_value)),
    "Glu": _glu,
    "Var": _var,
    "Std": lambda o, x: ops.sqrt(_var(o, x)),
    "Logsumexp": _log_sum_exp,
    "Logaddexp": _log_of_sum,
    "Tril": lambda o, x: _triangle(o, x, np.tril),
    "Triu": lambda o, x: _triangle(o, x, np.triu),
    "ZerosLike": _filled(0.0),
    "OnesLike": _filled(1.0),
    "Log1p": lambda o, x: ops.log(x + 1.0),
    "Expm1": lambda o, x: ops.exp(x) - 1.0,
    "Log2": lambda o, x: ops.log(x) * (1.0 / math.log(2.0)),
    "Log10": lambda o, x: ops.log(x) * (1.0 / math.log(10.0)),
    "Exp2": lambda o, x: ops.exp(x * math.log(2.0)),
    "Hypot": lambda o, a, b: ops.sqrt(a * a + b * b),
    "TimeDistributed": _time_distributed,
    "Ptp": lambda o, x: ops.max(x, o.axis, keepdims=o.keepdims) - ops.min(x, o.axis, keepdims=o.keepdims),
}
