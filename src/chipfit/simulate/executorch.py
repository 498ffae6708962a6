"""XNNPACK as ExecuTorch's delegate calls it: LiteRT's profile of XNNPACK, except for what is listed here.

No other integer kernels stand behind it: what the delegate does not take is computed in float.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chipfit.operators.table import OPS
from chipfit.quantizers.stored import scales_per_output
from chipfit.registry import lookup, register
from chipfit.simulate.integer import KernelCall, Profile, accumulate, integer_clip_range, kernel_of
from chipfit.simulate.litert import quantize_by_inverse

Tensor = torch.Tensor


_bounds = partial(integer_clip_range, rounded=torch.round)  #: halves to even


def _clamp(c: KernelCall) -> None:
    """Clip integers; the result keeps the operand's scale."""
    q, ends = c.code().long(), _bounds(c.node, c.run.stored(c.out))
    c.run.store(c.out, q if ends is None else q.clamp(*ends))


def _product_sum(c: KernelCall) -> None:
    """acc -> rne(float32(acc) * float32(s_x s_w / s_y)) + z."""
    acc, m = accumulate(c.run, c.node), c.multiplier(c.x, c.second)
    if c.node.facts.kind != "linear":
        m = scales_per_output(m.reshape(-1), acc.shape[1]).view(-1, *[1] * (acc.dim() - 2))
    c.write_result(torch.round(acc.float() * m).double())


_XNNPACK: Any = lookup("kernels", "litert_xnnpack")
_PRODUCTS = dict.fromkeys("Conv1D Conv2D DepthwiseConv2D TransposeConv2D Linear".split(), kernel_of(_product_sum))
_SHARED = {op: _XNNPACK.kernels[op] for op in ("Add", "Sub", "Mul", "GlobalAvgPool")}
_CLAMPS = {op: kernel_of(_clamp) for op, row in OPS.items() if row.clips}
_PROFILE: Profile = replace(
    _XNNPACK,
    kernels={**_PRODUCTS, **_SHARED},
    pass_through=_CLAMPS,
    float_outputs={},
    clip=_bounds,
    quantize=quantize_by_inverse,
    supported_math=("float 1 half_even", "half_even"),
    max_bits=8,
)
register("kernels", "executorch")(_PROFILE)
