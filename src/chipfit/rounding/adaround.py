"""Weights between two quantized values, at a share h in [0, 1] that training drives to 0 or 1.

The formulas are those of AdaRound, Nagel et al. 2020, arXiv:2004.10568, equations 22 to 25.
"""

import torch
from torch import Tensor

from chipfit.quantizers.stored import Stored

#: range of the stretched sigmoid, which is then clipped to [0, 1]
LOW, HIGH = -0.1, 1.1
#: share of the steps before the regularizer sets in, and its exponent then and in the last step
WARM_UP, FIRST, LAST = 0.2, 20.0, 2.0


def rectified_sigmoid(v: Tensor) -> Tensor:
    """Return h = clip(1.2 sigmoid(v) - 0.1, 0, 1): 0.5 at 0, 1 from ln 11 = 2.398 on, 0 up to -2.398."""
    return torch.clamp(torch.sigmoid(v) * (HIGH - LOW) + LOW, 0, 1)


def inverse_sigmoid(h: Tensor) -> Tensor:
    """Return the v of least magnitude for which the rectified sigmoid is h in [0, 1]."""
    return torch.log((h - LOW) / (HIGH - h))


def regularizer(h: Tensor, exponent: float) -> Tensor:
    """Return the sum of 1 - |2h - 1|^exponent: 0 if every h is 0 or 1; 1 for h = 0.5; 0.75 for h = 0.25, exponent 2."""
    return (1 - (2 * h - 1).abs().pow(exponent)).sum()


def regularizer_exponent(step: int, steps: int) -> float:
    """Return 20 in the first fifth of the steps, then a value that falls linearly to 2 at their end."""
    after = max(step / steps - WARM_UP, 0) / (1 - WARM_UP)
    return FIRST + (LAST - FIRST) * after


def output_error(got: Tensor, wanted: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the squared error, summed over channels (the second axis) and averaged over all other axes.

    Args:
        weight: of each sample and channel, [N, C].
    """
    error = (got - wanted).square()
    if error.dim() < 2:
        return error.mean()
    per_channel = error.flatten(2).mean(2) if error.dim() > 2 else error
    return (per_channel if weight is None else per_channel * weight).sum(1).mean()


class SoftWeight:
    """A weight between two quantized values: the one that it starts from, and the one beyond its float value.

    Args:
        stored: how the weight is stored, on any grid.
        wanted: the float weight.
        start: the weight to start from, perhaps on its grid; `hard` returns it, rounded, until something is learned.
            Where it is the nearest quantized value, `soft` returns the float weight, inside the range of the grid.
    """

    def __init__(self, stored: Stored, wanted: Tensor, start: Tensor) -> None:
        self.stored, q = stored, stored.quantize(start).long()
        ends = (stored.grid.qmin, stored.grid.qmax) if stored.grid.table is None else (0, stored.grid.levels - 1)
        below = q - (wanted < stored.dequantize(q)).long()
        self.low, self.high = (stored.dequantize(c.clamp(*ends)) for c in (below, below + 1))
        gap = self.high - self.low
        share = ((wanted - self.low) / torch.where(gap > 0, gap, 1)).clamp(0, 1)
        share = torch.where(q > below, share.clamp_min(0.5 + 1e-6), share.clamp_max(0.5 - 1e-6))
        self.v = self.variable(share).requires_grad_()

    def variable(self, share: Tensor) -> Tensor:
        """Return the variable to train for a share."""
        return inverse_sigmoid(share)

    def share(self) -> Tensor:
        """Return the position between the two quantized values, in [0, 1]."""
        return rectified_sigmoid(self.v)

    def soft(self) -> Tensor:
        """Return the weight between the two quantized values."""
        return torch.lerp(self.low, self.high, self.share())

    def hard(self) -> Tensor:
        """Return the weight on its grid: the upper value where the share is at least half and the grid allows it."""
        hard = torch.where(self.v.detach() >= 0, self.high, self.low)
        return hard if self.stored.grid.pair_limit is None else self.stored.round(hard)


class StraightThroughWeight(SoftWeight):
    """A weight that is one of two quantized values in each step; gradients pass as if it lay between them."""

    SLOPE = 0.3  #: of the share, as that of the rectified sigmoid at 0

    def variable(self, share: Tensor) -> Tensor:
        return (share - 0.5) / self.SLOPE

    def share(self) -> Tensor:
        between = (0.5 + self.SLOPE * self.v).clamp(0, 1)
        return between + ((self.v >= 0).to(between.dtype) - between).detach()
