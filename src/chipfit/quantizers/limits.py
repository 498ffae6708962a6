"""Bounds on products of scales in training: what has left them goes back by the least change, tensor after tensor."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

#: a bound counts as broken beyond this, in log2: a few roundings of float32
SLACK = 4e-6
#: scales go back this much further, so that rounding them to float32 crosses no bound
_INSIDE = 1e-5


class Bound(Protocol):
    """low <= sum of exponent * log2(scale) <= high, channel by channel."""

    @property
    def terms(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


def clipped(
    ops: Any, bounds: Sequence[Bound], log: Mapping[str, Any], moves: Sequence[str], pot: Collection[str]
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
