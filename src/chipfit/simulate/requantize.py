"""From accumulators to codes, as platform files describe it in `math.requant`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from chipfit.errors import UnsupportedError

FORMS = ("float", "q31")  #: forms of `math.requant` that have a simulator


def requantize(acc: torch.Tensor, multiplier: torch.Tensor, rule: Mapping[str, Any]) -> torch.Tensor:
    """Scale integer accumulators and round them.

    Args:
        acc: integers, |acc| < 2^31, any shape, any dtype that holds them exactly.
        multiplier: s_in s_w / s_out, float32, broadcasts against acc.
        rule: `math.requant` of a platform: {"form": "float", "round": "half_even"} or
            {"form": "q31", "round": "half_away", "passes": 1 or 2}.

    Returns:
        Integers before the zero point, float64 (exact).

    float: one float32 product of the accumulator rounded to float32, rounded half to even. q31: the multiplier as
    m 2^e with m a 31-bit integer; one pass shifts the 64-bit product with halves up; two passes take the doubled
    high half (halves away from zero), then a rounding shift away from zero.
    Source: ONNX Runtime and XNNPACK kernels (float); gemmlowp, docs/quantization.md (q31).
    """
    form = rule.get("form")
    if form == "float":
        return torch.round(acc.to(torch.float32) * multiplier.to(torch.float32)).double()
    if form == "q31":
        return _fixed_point(acc, multiplier, passes=int(rule.get("passes", 2)))
    raise UnsupportedError(f"Requantization form '{form}' has no simulator", allowed=", ".join(FORMS))


def _fixed_point(acc: torch.Tensor, multiplier: torch.Tensor, passes: int) -> torch.Tensor:
    mantissa, exponent = torch.frexp(multiplier.double())
    m = torch.floor(mantissa * 2.0**31 + 0.5).to(torch.int64)
    overflow = m == 1 << 31
    m, exponent = torch.where(overflow, m // 2, m), exponent.to(torch.int64) + overflow
    a = acc.to(torch.int64)
    if passes == 1:
        shift = 31 - exponent
        return ((a * m + (torch.ones_like(shift) << (shift - 1))) >> shift).double()
    left, right = exponent.clamp_min(0), (-exponent).clamp_min(0)
    product = (a << left) * m
    nudged = product + torch.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = torch.where(nudged >= 0, nudged >> 31, -((-nudged) >> 31))  # C division truncates
    mask = (torch.ones_like(right) << right) - 1
    return ((high >> right) + ((high & mask) > (mask >> 1) + (high < 0).long())).double()
