"""Requantization of accumulators: float multipliers, and the fixed-point ones of gemmlowp and TensorFlow Lite."""

from collections.abc import Mapping
from typing import Any

import torch

from chipfit.errors import UnsupportedError
from chipfit.platform.support import REQUANT_FORMS
from chipfit.quantizers.rounding import ROUNDINGS


def requantize(acc: torch.Tensor, multiplier: torch.Tensor, rule: Mapping[str, Any]) -> torch.Tensor:
    """Scale integer accumulators and round them.

    Args:
        acc: integers, |acc| < 2^31, any shape, any dtype that holds them exactly.
        multiplier: s_in s_w / s_out, float32, broadcasts against acc.
        rule: `math.requant` of a platform, such as {"form": "float", "round": "half_even"} or {"form": "q31", "round":
            "half_away", "passes": 2}; `round` is a name of `quantizers.rounding`.

    Returns:
        Integers before the zero point, float64 (exact).

    float: one float32 product of the accumulator rounded to float32. q31: the product with a 31-bit mantissa, shifted
    once, or (passes 2) first its doubled high half with halves up, then the shift; `round` says how the shift rounds.
    shift: the accumulator shifted by the exponent of the multiplier, which must be a power of two.
    Source: ONNX Runtime and XNNPACK kernels (float); gemmlowp, docs/quantization.md (q31).
    """
    form, passes = rule.get("form"), rule.get("passes", 2)
    if form == "float":
        return ROUNDINGS[rule.get("round", "half_even")](acc.to(torch.float32) * multiplier.to(torch.float32)).double()
    if form == "q31":
        (m, e), a = multiplier_and_shift(multiplier), acc.to(torch.int64)
        if passes == 1:
            return shift(a * m, 31 - e, rule.get("round", "half_up")).double()
        high = shift((a << e.clamp_min(0)) * m, torch.tensor(31), "half_up")
        return shift(high, (-e).clamp_min(0), rule.get("round", "half_away")).double()
    if form == "shift":
        mantissa, e = torch.frexp(multiplier.double())
        if not bool((mantissa == 0.5).all()):
            got = multiplier.flatten()[(mantissa != 0.5).flatten()][0].item()
            what = "A chip that requantizes by shifts needs multipliers s_in s_w / s_out that are powers of two"
            raise UnsupportedError(what, got=got, hint="give its formats `scale: pot`")
        right = 1 - e.to(torch.int64)
        left = acc.to(torch.int64) << (-right).clamp_min(0)
        return shift(left, right.clamp_min(0), rule.get("round", "half_up")).double()
    raise UnsupportedError(f"Requantization form '{form}' has no simulator", allowed=", ".join(REQUANT_FORMS))


def multiplier_and_shift(real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return m and e of a multiplier m 2^(e - 31) > 0, with m in [2^30, 2^31), both int64; (0, 0) for zero."""
    mantissa, exponent = torch.frexp(real.double())
    m = torch.floor(mantissa * 2.0**31 + 0.5).to(torch.int64)
    overflow = m == 1 << 31
    m, e = torch.where(overflow, m // 2, m), exponent.to(torch.int64) + overflow
    vanishes = e < -31
    return torch.where(vanishes, 0, m), torch.where(vanishes, 0, e)


def fixed_point(acc: torch.Tensor, real: torch.Tensor, how: str) -> torch.Tensor:
    """Return acc times a real multiplier, computed in integers, int64.

    Args:
        acc: integers, any dtype that holds them exactly.
        real: multiplier >= 0, broadcasts against acc.
        how: "away": doubled high half of the product, halves up, then a rounding shift, halves away from zero. "up":
            both with halves up. "once": one shift of the 64-bit product, halves up. "q15": the multiplier reduced to 16
            bits, one shift, halves up.

    Source: gemmlowp, docs/quantization.md; TensorFlow Lite, kernels/internal/common.h.
    """
    return scale_by(acc, *multiplier_and_shift(real), how)


def scale_by(acc: torch.Tensor, m: torch.Tensor, e: torch.Tensor, how: str) -> torch.Tensor:
    """Return `fixed_point` of a multiplier given as mantissa and exponent (see `multiplier_and_shift`)."""
    a = acc.to(torch.int64)
    if how == "once":
        return shift_up(a * m, 31 - e)
    if how == "q15":
        return shift_up(a * short(m), 15 - e)
    product = (a << e.clamp_min(0)) * m
    right = (-e).clamp_min(0)
    return (shift_up if how == "up" else shift_away)(shift_up(product, 31), right)


def shift(x: torch.Tensor, by: torch.Tensor, rounding: str) -> torch.Tensor:
    """Return x / 2^by in integers, int64.

    >>> [shift(torch.tensor([-3, -1, 1, 3]), torch.tensor(1), r).tolist() for r in ("half_away", "half_even", "trunc")]
    [[-2, -1, 1, 2], [-2, 0, 0, 2], [-1, 0, 0, 1]]
    """
    if rounding in _SHIFTS:
        return _SHIFTS[rounding](x, by)
    below = x >> by
    rest = x - (below << by)
    beyond_half = 2 * rest - (1 << by)
    up = {
        "floor": torch.zeros_like(rest, dtype=torch.bool),
        "trunc": (x < 0) & (rest != 0),
        "half_even": (beyond_half > 0) | ((beyond_half == 0) & (below % 2 == 1)),
    }[rounding]
    return below + up.long()


def short(m: torch.Tensor) -> torch.Tensor:
    """Round a 31-bit mantissa to 15 bits."""
    return torch.where(m < 0x7FFF0000, (m + (1 << 15)) >> 16, 0x7FFF)


def shift_up(x: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """Return x / 2^by, halves rounded up."""
    return (x + ((1 << by) >> 1)) >> by


def shift_away(x: torch.Tensor, by: torch.Tensor | int) -> torch.Tensor:
    """Return x / 2^by, halves rounded away from zero; int64."""
    mask = (1 << by) - 1
    return (x >> by) + ((x & mask) > (mask >> 1) + (x < 0).long()).long()


#: rounding rule -> the shift that rounds so, for those of which kernels have one
_SHIFTS = {"half_up": shift_up, "half_away": shift_away}
