"""Rounding rules of platforms, from floats to integers, for torch and for Keras.

`ops` is `torch` or `keras.ops`. x - round(x) is exact, because round(x) is 0 or within a factor of two of x.

    x      half_even  half_away  half_up  half_even_up  floor  trunc
    -2.5   -2         -3         -2       -2            -3     -2
     2.5    2          3          3        2             2      2
"""

from collections.abc import Callable
from typing import Any

import torch


def half_away(x: Any, ops: Any = torch) -> Any:
    """Round to the nearest integer, halves away from zero: C's `round`."""
    nearest = ops.round(x)
    return ops.where(ops.abs(x - nearest) == 0.5, ops.trunc(x) + ops.sign(x), nearest)


def half_up(x: Any, ops: Any = torch) -> Any:
    """Round to the nearest integer, halves up."""
    nearest = ops.round(x)
    return ops.where(ops.abs(x - nearest) == 0.5, ops.ceil(x), nearest)


def half_even_up(x: Any, ops: Any = torch) -> Any:
    """Round to the nearest integer, positive halves to even, negative halves up: MQBench's Vitis."""
    return ops.where(x < 0, half_up(x, ops), ops.round(x))


#: name in platform files -> rule; half_even is IEEE 754's roundTiesToEven, trunc C's conversion to an integer
ROUNDINGS: dict[str, Callable[..., Any]] = {
    "half_even": lambda x, ops=torch: ops.round(x),
    "half_away": half_away,
    "half_up": half_up,
    "half_even_up": half_even_up,
    "floor": lambda x, ops=torch: ops.floor(x),
    "trunc": lambda x, ops=torch: ops.trunc(x),
}


def round_by_rule(x: torch.Tensor, rule: str) -> torch.Tensor:
    """Round a temporary tensor by a rule; half_even works in place, since memory traffic dominates."""
    if rule == "half_even":
        return x.round_()
    return _half_away_in_few_passes(x) if rule == "half_away" else ROUNDINGS[rule](x)


def _half_away_in_few_passes(x: torch.Tensor) -> torch.Tensor:
    """Return `half_away` of floats, bit for bit.

    Added to |x|, the float before 0.5 reaches the next integer from a half on, because the sum is rounded to even.
    """
    before_half = 0.5 - torch.finfo(x.dtype).eps / 4
    return x.abs().add_(before_half).floor_().copysign_(x)
