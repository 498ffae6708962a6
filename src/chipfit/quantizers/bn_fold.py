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
Moments = tuple[Any, Any, Any]  #: mean [C], variance [C] and the number of values in each channel
#: reason why the result of strategy -1 is not exported
UNFOLDED = "bn_fold=-1 rounds weights without their batch norm, which a chip folds into them before it rounds"


def strategy_of(given: Any) -> int:
    """Return the number of a strategy.

    Raises:
        ConfigError: it does not exist.
    """
    if given not in STRATEGIES or isinstance(given, bool):
        raise ConfigError("Strategy to fold batch norms is unknown", got=repr(given), allowed=STRATEGIES)
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


def scale_channels(ops: Any, w: Any, k: Any, at: Channels) -> Any:
    """Return a weight with output channel c multiplied by k[c]."""
    return ops.reshape(ops.reshape(w, at.weight) * ops.reshape(k, at.factor), tuple(w.shape))


def updated_statistics(running: Norm, batch: Moments, momentum: float) -> tuple[Any, Any]:
    """Return the running mean and (unbiased) variance after a step."""
    m, v, n = batch  # v (n / (n - 1)) is the unbiased variance
    return running.mean + momentum * (m - running.mean), running.var + momentum * (v * (n / (n - 1)) - running.var)


@dataclass(frozen=True, slots=True)
class NormalizedLayer:
    """A linear layer with a batch norm behind it, and their tensors in one step of training."""

    ops: Any
    weight: Any  #: unfolded
    bias: Any  #: [C], unfolded
    norm: Norm
    at: Channels

    def folded(self) -> tuple[Any, Any]:
        """Return weight and bias [C] of the layer with its batch norm folded in (Jacob et al. 2018, eq. 14)."""
        k = self.norm.gamma / self._deviation(self.norm.var)
        return self._scaled(k), (self.bias - self.norm.mean) * k + self.norm.beta

    def unfolded(self, w: Any) -> Any:
        """Return the weight that becomes w when the batch norm is folded in."""
        return scale_channels(self.ops, w, self._deviation(self.norm.var) / self.norm.gamma, self.at)

    def run(
        self,
        strategy: int,
        training: bool,
        call: Callable[[Any, Any], Any],
        round_weight: Callable[[Any], Any],
        round_bias: Callable[[Any], Any],
    ) -> tuple[Any, Moments | None]:
        """Return the result of layer and batch norm, and the moments of the batch if they are to be remembered.

        Args:
            strategy: any except 0.
            call: (weight, bias [C] or None) -> result of the layer for the input of this step.
        """
        if strategy == -1:
            return self._normalized(call(round_weight(self.weight), self.bias), training)
        if strategy == 1 or not training:
            w, b = self.folded()
            return call(round_weight(w), round_bias(b)), None
        if strategy == 4:
            # if gamma is 0, any factor will do: the result does not depend on the weight
            gamma = self.ops.where(self.norm.gamma == 0, self.ops.ones_like(self.norm.gamma), self.norm.gamma)
            k = gamma / self._deviation(self.norm.var)
            y = call(round_weight(self._scaled(k)), None)
            return self._normalized(y / self._along(k, y) + self._along(self.bias, y), training)
        batch = self._moments(call(self.weight, self.bias))
        s = self._deviation(batch[1])
        shift = (self.bias - batch[0]) * self.norm.gamma / s + self.norm.beta
        if strategy == 2:
            return call(round_weight(self._scaled(self.norm.gamma / s)), round_bias(shift)), batch
        sd = self._deviation(self.norm.var)
        y = call(round_weight(self._scaled(self.norm.gamma / sd)), None)
        return y * self._along(sd / s, y) + self._along(shift, y), batch

    def _normalized(self, y: Any, training: bool) -> tuple[Any, Moments | None]:
        """Return the batch norm's result, with statistics of the batch in training, and these statistics."""
        batch = self._moments(y) if training else None
        m, v = (self.norm.mean, self.norm.var) if batch is None else batch[:2]
        y = (y - self._along(m, y)) * self._along(self.norm.gamma / self._deviation(v), y)
        return y + self._along(self.norm.beta, y), batch

    def _deviation(self, variance: Any) -> Any:
        return self.ops.sqrt(variance + self.norm.eps)

    def _scaled(self, k: Any) -> Any:
        return scale_channels(self.ops, self.weight, k, self.at)

    def _moments(self, y: Any) -> Moments:
        """Return mean and variance of each channel [C], and the number of values in each."""
        axes = tuple(a for a in range(len(y.shape)) if a != self.at.axis % len(y.shape))
        m = self.ops.mean(y, axes)
        variance = self.ops.mean(self.ops.square(y - self._along(m, y)), axes)
        return m, variance, self.ops.size(y) / y.shape[self.at.axis]

    def _along(self, v: Any, y: Any) -> Any:
        """Return v [C] in a shape that broadcasts against y."""
        shape = [1] * len(y.shape)
        shape[self.at.axis] = -1
        return self.ops.reshape(v, tuple(shape))
