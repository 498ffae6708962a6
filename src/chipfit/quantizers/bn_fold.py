"""Training of a layer with the batch norm behind it folded in, for every framework.

The strategies are numbered as in document 004 (MQBench, Li et al. 2021, arXiv:2111.03759, section 3); 2 and 3 are those
of Krishnamoorthi 2018, arXiv:1806.08342, section 3.2.2. w and b are the layer's weight and bias, k = gamma / sd; mean
and sd = sqrt(var + eps) are the running statistics, m and s = sqrt(v + eps) those of the batch; Q quantizes weights:

    -1  BN(conv(x, Q(w)) + b), never folded: no chip computes that with integers
     0  w and b are folded once, before training, and the batch norm disappears
     1  conv(x, Q(w k)) + (b - mean) k + beta: running statistics are frozen
     2  as 1 with m and s, which a convolution with w computes first
     3  conv(x, Q(w k)) sd / s + (b - m) gamma / s + beta
     4  BN(conv(x, Q(w k)) / k + b)

In inference, strategies 1 to 4 all compute what 1 does. 4 is of no use where Q(w k) does not grow with k
(`Algorithm.scale_invariant`): its running variance is that of conv(x, Q(w k)) / k, follows itself, and drifts away.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from chipfit.errors import ConfigError

STRATEGIES = (-1, 0, 1, 2, 3, 4)
#: reason why the result of strategy -1 is not exported
UNFOLDED = "bn_fold=-1 rounds weights without their batch norm, which a chip folds into them before it rounds"


def strategy_of(given: Any) -> int:
    """Return the number of a strategy.

    Raises:
        ConfigError: it does not exist.
    """
    if given not in STRATEGIES or isinstance(given, bool):
        raise ConfigError("There is no such way to fold a batch norm", got=repr(given), allowed=STRATEGIES)
    return int(given)


@dataclass(frozen=True, slots=True)
class Norm:
    """The parameters and running statistics of a batch norm, [C] each."""

    gamma: Any
    beta: Any
    mean: Any
    var: Any
    eps: float


@dataclass(frozen=True, slots=True)
class Channels:
    """The position of a linear layer's output channels."""

    weight: tuple[int, ...]  #: shape of the weight's view
    factor: tuple[int, ...]  #: shape in which [C] broadcasts against that view
    axis: int  #: channel axis of results


def times(ops: Any, w: Any, k: Any, at: Channels) -> Any:
    """Return the weight with output channel c multiplied by k[c]."""
    return ops.reshape(ops.reshape(w, at.weight) * ops.reshape(k, at.factor), tuple(w.shape))


def folded(ops: Any, w: Any, b: Any, bn: Norm, at: Channels) -> tuple[Any, Any]:
    """Return weight and bias [C] of the layer with its batch norm folded in (Jacob et al. 2018, eq. 14)."""
    k = bn.gamma / ops.sqrt(bn.var + bn.eps)
    return times(ops, w, k, at), (b - bn.mean) * k + bn.beta


def moments(ops: Any, y: Any, at: Channels) -> tuple[Any, Any, Any]:
    """Return mean and variance of each channel [C], and the number of values in each."""
    axes = tuple(a for a in range(len(y.shape)) if a != at.axis % len(y.shape))
    m = ops.mean(y, axes)
    return m, ops.mean(ops.square(y - _along(ops, m, y, at)), axes), ops.size(y) / y.shape[at.axis]


def remembered(running: Norm, batch: tuple[Any, Any, Any], momentum: float) -> tuple[Any, Any]:
    """Return the running mean and (unbiased) variance after a step."""
    m, v, n = batch
    unbiased = v * (n / (n - 1))
    return running.mean + momentum * (m - running.mean), running.var + momentum * (unbiased - running.var)


def forward(
    ops: Any,
    strategy: int,
    training: bool,
    call: Callable[[Any, Any], Any],
    w: Any,
    b: Any,
    bn: Norm,
    at: Channels,
    weight: Callable[[Any], Any],
    bias: Callable[[Any], Any],
) -> tuple[Any, tuple[Any, Any, Any] | None]:
    """Return the result of layer and batch norm, and the batch's `moments` to update running statistics, or None.

    Args:
        strategy: any except 0.
        call: (weight, bias [C] or None) -> result of the layer for the input of this step.
        w, b: weight and bias [C] of the layer, unfolded.
        weight, bias: their quantizers.
    """
    if strategy != -1 and (strategy == 1 or not training):
        w_folded, b_folded = folded(ops, w, b, bn, at)
        return call(weight(w_folded), bias(b_folded)), None
    sd = ops.sqrt(bn.var + bn.eps)
    if strategy in (-1, 4):
        if strategy == -1:
            y = call(weight(w), b)
        else:  # if gamma is 0, any factor will do: the result does not depend on the weight
            k = ops.where(bn.gamma == 0, ops.ones_like(bn.gamma), bn.gamma) / sd
            y = call(weight(times(ops, w, k, at)), None)
            y = y / _along(ops, k, y, at) + _along(ops, b, y, at)
        batch = moments(ops, y, at) if training else None
        m, s = (bn.mean, sd) if batch is None else (batch[0], ops.sqrt(batch[1] + bn.eps))
        y = (y - _along(ops, m, y, at)) * _along(ops, bn.gamma / s, y, at)
        return y + _along(ops, bn.beta, y, at), batch
    batch = moments(ops, call(w, b), at)
    s = ops.sqrt(batch[1] + bn.eps)
    shift = (b - batch[0]) * bn.gamma / s + bn.beta
    if strategy == 2:
        return call(weight(times(ops, w, bn.gamma / s, at)), bias(shift)), batch
    y = call(weight(times(ops, w, bn.gamma / sd, at)), None)
    return y * _along(ops, sd / s, y, at) + _along(ops, shift, y, at), batch


def _along(ops: Any, v: Any, y: Any, at: Channels) -> Any:
    """Return v [C] in a shape that broadcasts against y."""
    shape = [1] * len(y.shape)
    shape[at.axis] = -1
    return ops.reshape(v, tuple(shape))
