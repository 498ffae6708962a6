"""Bounds of a platform on products of scales, and on sums of quantized weights, which scales must satisfy."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chipfit.errors import PlanError
from chipfit.quantizers.stored import Stored

#: tolerance of a bound, in log2: a few roundings of float32
SLACK = 4e-6
#: margin inside a bound, in log2, so that rounding a scale to float32 does not cross it
_INSIDE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBound:
    """A bound of the platform on scales: low <= sum of exponent * log2(scale) <= high, channel by channel.

    Raises:
        PlanError: there are no terms, an exponent is above 8, or a bound is outside the exponents of a double.
    """

    op: str  #: canonical operator whose rule it is
    terms: tuple[tuple[str, int], ...]  #: (tensor, exponent)
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        ends = [x for x in (self.low, self.high) if not math.isinf(x)]
        if not (self.terms and all(abs(e) <= 8 for _, e in self.terms) and all(-1074 <= x < 1024 for x in ends)):
            raise PlanError("Scale bound is not valid", got=f"{self.terms}, {self.low}..{self.high}"[:120])

    def total(self, log: Mapping[str, Any]) -> Any:
        """Return the sum of exponent * log2(scale) by channel, [] or [C]; one scale for all channels counts in each."""
        return sum((e * log[t] for t, e in self.terms), start=np.zeros(()))

    def holds(self, log: Mapping[str, Any], slack: float = SLACK) -> bool:
        """Return whether the bound holds, up to `slack` in log2."""
        total = self.total(log)
        return bool(np.all(total >= self.low - slack) and np.all(total <= self.high + slack))

    def __str__(self) -> str:
        product = " * ".join(t if e == 1 else f"{t}^{e}" for t, e in self.terms)
        ends = (("=", self.low),) if self.low == self.high else ((">=", self.low), ("<=", self.high))
        bounds = [f"{w} {2.0**v:g}" for w, v in ends if math.isfinite(v)]
        return f"{self.op}: {product} {' and '.join(bounds)} (scales)"


def clip_to_bounds(
    ops: Any, bounds: Sequence[ScaleBound], log: Mapping[str, Any], moves: Sequence[str], pot: Collection[str]
) -> dict[str, Any]:
    """Move scales into their bounds: one tensor after another, to the nearest scale that the others allow.

    After a tensor's turn all its bounds hold, and later turns keep them. Only bounds that contradict each other, given
    the scales that do not move, can remain violated.

    Args:
        log: log2 of scales by tensor, [] or [C].
        moves: tensors whose scales may move, in this order.
        pot: tensors whose scale is a power of two.

    Returns:
        log2 of scales, unchanged where the bounds already hold.
    """
    out = dict(log)
    for t in moves:
        for bound in bounds:
            e = next((e for name, e in bound.terms if name == t), 0)
            if not e:
                continue
            v = out[t]
            rest = sum((e * out[name] for name, e in bound.terms if name != t), start=v * 0)
            low, high = ((end - rest) / e for end in ((bound.low, bound.high) if e > 0 else (bound.high, bound.low)))
            if len(rest.shape) > len(v.shape):  # one scale for all channels: the tightest bound of all
                low, high = ops.max(low), -ops.max(-high)
            inside = min(_INSIDE, (bound.high - bound.low) / abs(e) / 2)
            up, down = (ops.ceil(low - SLACK), ops.floor(high + SLACK)) if t in pot else (low + inside, high - inside)
            out[t] = ops.where(v < low - SLACK, up, ops.where(v > high + SLACK, down, v))
    return out


def sums_of(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sum of |code| of each channel along `axis`, int64 [C]."""
    return codes.detach().transpose(0, axis).flatten(1).long().abs().sum(1)


def code_sums(stored: Stored, w: torch.Tensor, axis: int) -> torch.Tensor:
    """Return the sum of |quantized weight| of each channel along `axis`, int64 [C]."""
    return sums_of(stored.quantize(w.detach()), axis)


def growth(sums: torch.Tensor, most: float, pot: bool, per_channel: bool) -> torch.Tensor | None:
    """Return factors of the scale, [] or [C], where `sums_of` codes exceed `most`; None if all sums are small enough.

    A larger scale rounds differently, so the sums may still be too large afterwards.
    """
    over = (sums if per_channel else sums.max()).double() / most
    if not bool((over > 1).any()):
        return None
    return torch.where(over > 1, torch.exp2(torch.ceil(torch.log2(over))) if pot else 1.01 * over, 1)


def scale_growth(stored: Stored, w: torch.Tensor, most: float, axis: int = 0) -> torch.Tensor | None:
    """Return the `growth` of the scale of a quantized weight."""
    sums = code_sums(stored, w, axis if stored.axis is None else stored.axis)
    return growth(sums, most, stored.grid.pot, bool(stored.scale.dim()))
