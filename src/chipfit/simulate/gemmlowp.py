"""Fixed-point functions of gemmlowp that LiteRT's kernels call, on int64 tensors that hold raw values of 32 or 16 bits.

A raw value of w bits, i of them for integers, stands for raw / 2^(w - 1 - i). Widths are 32 unless said.
Source: gemmlowp, fixedpoint/fixedpoint.h; TensorFlow Lite, kernels/internal/common.h and reference/softmax.h.
"""

from functools import partial

import torch

from chipfit.simulate.requantize import multiplier_and_shift, scale_by, shift_away, shift_up

Tensor = torch.Tensor
TOP = (1 << 31) - 1  #: "one" without integer bits
#: exp(-2^k) for k = -2 .. 4
_POWERS = (1672461947, 1302514674, 790015084, 290630308, 39332535, 720401, 242)


def _product(a: Tensor, b: Tensor | int, width: int = 32) -> Tensor:
    """Return the doubled high half of a product."""
    return _up(shift_up(a * b, width - 1), 0, width)


def _up(x: Tensor, by: Tensor | int, width: int = 32) -> Tensor:
    top = (1 << width - 1) - 1
    return (x << by).clamp(-top - 1, top)


def _constant(raw: int, width: int) -> int:
    """Round a 32-bit constant to another width."""
    by = 32 - width
    return raw + (1 << by >> 1) >> by


def exp_of_negative(a: Tensor, integers: int = 5, width: int = 32) -> Tensor:
    """Return exp(a), without integer bits, for a <= 0 with some integer bits."""
    product, constant = partial(_product, width=width), partial(_constant, width=width)
    digits = width - 1 - integers - 2  # below a quarter
    quarter = 1 << digits
    low = (a & (quarter - 1)) - quarter
    x = _up(low, integers, width) + constant(1 << 28)  # around -1/8, where the series is developed
    x2 = product(x, x)
    series = shift_away(product(shift_away(product(x2, x2), 2) + product(x2, x), constant(715827883)) + x2, 1)
    y = constant(1895147668) + product(x + series, constant(1895147668))
    rest = low - a
    for k, power in enumerate(_POWERS[: integers + 2]):
        y = torch.where((rest >> digits + k) & 1 == 1, product(y, constant(power)), y)
    if integers > 5:  # below -32
        y = torch.where(a < -(1 << width + 4 - integers), 0, y)
    return torch.where(a == 0, (1 << width - 1) - 1, y)


def inverse_sqrt(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1 / sqrt(a) of integers a > 0 below 2^29 as mantissa and exponent m 2^(e - 31), by five Newton steps.

    Source: TensorFlow Lite, kernels/internal/common.h, GetInvSqrtQuantizedMultiplierExp.
    """
    pairs = (31 - torch.frexp(a.double()).exponent.long()) // 2 - 1  # of bits by which a can move to the left
    half_input = shift_away((a << 2 * pairs) >> 1, 1)
    x = torch.full_like(a, 1 << 28)  # 1, with 3 integer bits
    for _ in range(5):
        cube = _up(_product(_product(x, x), x), 6)
        x = _up(_product(x, (1 << 28) + (1 << 27)) - _product(half_input, cube), 3)
    m, right = _product(x, 1518500250), 11 - pairs  # times sqrt(1/2)
    m, right = m << (-right).clamp_min(0), right.clamp_min(0)
    return torch.where(a <= 1, TOP, m), torch.where(a <= 1, 0, -right)


def _inverse(a: Tensor, width: int) -> Tensor:
    """Return 2 / (1 + a), with 2 integer bits, for a in 0 .. 1 without: three steps of Newton and Raphson."""
    product = partial(_product, width=width)
    half = (a + (1 << width - 1)) >> 1
    x = _constant(1515870810, width) + product(half, _constant(-1010580540, width))
    for _ in range(3):
        x = x + _up(product(x, (1 << width - 3) - product(half, x)), 2, width)
    return x


def reciprocal_of_one_plus(a: Tensor, width: int = 32) -> Tensor:
    """Return 1 / (1 + a) for a in 0 .. 1, neither with integer bits."""
    return _up(_inverse(a, width), 1, width)


def logistic(a: Tensor, integers: int, width: int = 32) -> Tensor:
    """Return 1 / (1 + exp(-a)), without integer bits, for a with some integer bits."""
    y = reciprocal_of_one_plus(exp_of_negative(-a.abs(), integers, width), width)
    return torch.where(a == 0, 1 << width - 2, torch.where(a > 0, y, (1 << width - 1) - 1 - y))


def tanh(a: Tensor, integers: int, width: int = 32) -> Tensor:
    """Return tanh(a) = (1 - e) / (1 + e), e = exp(-2 |a|), without integer bits, for a with some integer bits."""
    y = _up(_inverse(exp_of_negative(-a.abs(), integers + 1, width), width) - (1 << width - 3), 2, width)
    return torch.sign(a) * y


def rescaled_differences(diff: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return differences of integers with 5 integer bits, and which of them are small enough to count."""
    m, e = multiplier_and_shift((scale.double() * (1 << 26)).clamp(max=float(TOP)))
    least = -int(31.0 * (1 << 26) / 2.0 ** int(e))
    return scale_by(diff.clamp_min(least), m, e, "away"), diff >= least


def softmax(diff: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return the softmax over the last axis.

    Args:
        diff: integers minus the row's largest, int64, <= 0.
        scale: of the integers, scalar.
        bits: of the result.

    Returns:
        int64 of [0, 2^bits]; the unit is 2^-bits.
    """
    fine, kept = rescaled_differences(diff, scale)
    e_x = exp_of_negative(fine)
    total = torch.where(kept, shift_away(e_x, 12), 0).sum(-1, keepdim=True)
    digits = torch.frexp(total.double()).exponent.long()  # total < 2^digits
    inverse = reciprocal_of_one_plus((total << 32 - digits) - (1 << 31))
    over = 12 - (32 - digits)
    return torch.where(kept, shift_away(_product(e_x, inverse), over + 31 - bits), 0)


def log(x: Tensor) -> Tensor:
    """Return log(x), 5 integer bits, for x >= 1 with 12; of the mantissas of x and x / sqrt 2 the smaller is used."""
    quarter = 1 << 23  # 1/4 with 6 integer bits
    half_root, fourth_root = 1518500250, 1805811301  # sqrt(1/2) and its root, without integer bits
    lead = 32 - torch.frexp(x.double()).exponent.long()
    a = _up(_product(_up(x, lead - 1), half_root), 1)
    power_a = ((12 - lead) << 25) + quarter
    y = _product(x, half_root)
    head = 31 - torch.frexp(y.double()).exponent.long()
    b, power_b = _up(x, head), ((12 - head) << 25) - quarter
    r, power = torch.minimum(a, b), torch.maximum(power_a, power_b)
    p, q = (r + fourth_root + 1) >> 1, 2 * (r - fourth_root)
    square = _product(q, q)
    num = _product(q, r) + _product(_product(q, square), 117049297)
    less = _product(p, 1057819769 + q + _product(square, 127690142)) + _product(q, 638450708)
    y = _product(power, 1488522236) + _product(shift_away(num, 6), reciprocal_of_one_plus(less))
    return _up(y, 1)


def log_softmax(diff: Tensor, scale: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the last axis.

    Args:
        diff: integers minus the row's largest, int64, <= 0.
        scale: of the integers, scalar.

    Returns:
        int64 of [-255, 0]; the unit is 1/16.
    """
    fine, kept = rescaled_differences(diff, scale)
    total = torch.where(kept, shift_away(exp_of_negative(fine), 12), 0).sum(-1, keepdim=True)
    return torch.where(kept, shift_away(fine - log(total), 22), -255).clamp_min(-255)
