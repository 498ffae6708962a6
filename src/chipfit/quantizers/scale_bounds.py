"""Bounds on products of scales in training: what has left them goes back by the least change, tensor after tensor."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chipfit.errors import PlanError
from chipfit.quantizers.stored import Stored

#: a bound counts as broken beyond this, in log2: a few roundings of float32
SLACK = 4e-6
#: scales go back this much further, so that rounding them to float32 crosses no bound
_INSIDE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleBound:
    """A bound of the platform on scales: low <= sum of exponent * log2(scale) <= high, channel by channel.

    Raises:
        PlanError: it is about nothing, has exponents beyond those of platforms, or ends that no double is a power of.
    """

    op: str  #: canonical operator whose rule it is
    terms: tuple[tuple[str, int], ...]  #: (tensor, exponent)
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        ends = [x for x in (self.low, self.high) if not math.isinf(x)]
        if not (self.terms and all(abs(e) <= 8 for _, e in self.terms) and all(-1074 <= x < 1024 for x in ends)):
            raise PlanError("A bound on scales is none", got=f"{self.terms}, {self.low}..{self.high}"[:120])

    def __str__(self) -> str:
        product = " * ".join(t if e == 1 else f"{t}^{e}" for t, e in self.terms)
        bounds = [f"{w} {2.0**v:g}" for w, v in ((">=", self.low), ("<=", self.high)) if math.isfinite(v)]
        return f"{self.op}: {product} {' and '.join(bounds)} (scales)"


def clip_to_bounds(
    ops: Any, bounds: Sequence[ScaleBound], log: Mapping[str, Any], moves: Sequence[str], pot: Collection[str]
) -> dict[str, Any]:
    """Scales inside their bounds: each tensor in turn goes to the nearest one that the others allow.

    Once a tensor has had its turn, all bounds that it is in hold, and the turns of others keep them; only bounds that
    contradict each other, given what does not move, can still be broken at the end.

    Args:
        log: log2 of scales by tensor, [] or [C].
        moves: tensors that may move, in this order.
        pot: those whose scale is a power of two.

    Returns:
        As `log`; what is inside is as it came.
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
            if len(rest.shape) > len(v.shape):  # one scale for all channels: the tightest of theirs
                low, high = ops.max(low), -ops.max(-high)
            inside = min(_INSIDE, (bound.high - bound.low) / abs(e) / 2)
            up, down = (ops.ceil(low - SLACK), ops.floor(high + SLACK)) if t in pot else (low + inside, high - inside)
            out[t] = ops.where(v < low - SLACK, up, ops.where(v > high + SLACK, down, v))
    return out


def code_sums(stored: Stored, w: torch.Tensor, axis: int) -> torch.Tensor:
    """The sum of |code| over each channel along `axis`, [C] float64."""
    return stored.quantize(w.detach()).double().abs().transpose(0, axis).flatten(1).sum(1)


def enlargement(stored: Stored, w: torch.Tensor, most: float, axis: int = 0) -> torch.Tensor | None:
    """The factor, [] or [C], that a scale grows by where sums are above `most`; None where none is.

    A larger scale rounds otherwise, so that sums may still be too large after it.
    """
    sums = code_sums(stored, w, axis if stored.axis is None else stored.axis)
    over = (sums if stored.scale.dim() else sums.max()) / most
    if not bool((over > 1).any()):
        return None
    larger = torch.exp2(torch.ceil(torch.log2(over))) if stored.grid.pot else 1.01 * over
    return torch.where(over > 1, larger, 1)
