"""How reals become integers: the rounding rules that platforms name, each written once, for torch and for Keras.

They are exact: x - round(x) is, because round(x) is within a factor of two of x, or zero. `ops` is `torch` or
`keras.ops`. Where a half lies between two integers, -2.5 becomes -2, -3, -2, -2, -3, -2 and 2.5 becomes 2, 3, 3, 2, 2,
2 under half_even, half_away, half_up, half_even_up, floor and trunc.
"""

from collections.abc import Callable
from typing import Any

import torch


def half_away(x: Any, ops: Any = torch) -> Any:
    """To the nearest integer, halves away from zero: C's `round`."""
    nearest = ops.round(x)
    return ops.where(ops.abs(x - nearest) == 0.5, ops.trunc(x) + ops.sign(x), nearest)


def half_up(x: Any, ops: Any = torch) -> Any:
    """To the nearest integer, halves up."""
    nearest = ops.round(x)
    return ops.where(ops.abs(x - nearest) == 0.5, ops.ceil(x), nearest)


def half_even_up(x: Any, ops: Any = torch) -> Any:
    """To the nearest integer, halves of positive numbers to even, those of negative ones up: MQBench's Vitis."""
    return ops.where(x < 0, half_up(x, ops), ops.round(x))


#: name in a platform's file -> rule; half_even is IEEE 754's roundTiesToEven, trunc C's conversion to an integer
ROUNDINGS: dict[str, Callable[..., Any]] = {
    "half_even": lambda x, ops=torch: ops.round(x),
    "half_away": half_away,
    "half_up": half_up,
    "half_even_up": half_even_up,
    "floor": lambda x, ops=torch: ops.floor(x),
    "trunc": lambda x, ops=torch: ops.trunc(x),
}


def by_rule(x: torch.Tensor, rule: str) -> torch.Tensor:
    """A tensor that nobody else reads, by one of the rules: in place where that can be, since memory costs most."""
    return x.round_() if rule == "half_even" else ROUNDINGS[rule](x)
