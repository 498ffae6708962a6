"""The reader against PyTorch itself: each operator that is read, with each argument, as eager PyTorch computes it.

`CASES` has an entry for each row of the reader, `REFUSED` the forms that must stay PyTorch's own, and the last part of
this file shows that no row, no attribute and no argument is missing from them.
"""

from __future__ import annotations

import warnings
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chipfit.engine.run import run
from chipfit.frameworks.torch import program
from chipfit.frameworks.torch.call import NEUTRAL_ARGUMENTS
from chipfit.frameworks.torch.capture import capture
from chipfit.frameworks.torch.read import READERS
from chipfit.graph.ir import OPAQUE
from tests.zoo import ZOO, make

aten = torch.ops.aten

_g = torch.Generator().manual_seed(7)


def _rand(*shape):
    return torch.rand(*shape, generator=_g) - 0.4


w1, w2, w3 = (_rand(4, 4, *[2] * n) for n in (1, 2, 3))
v1, v2, v3 = (_rand(6, 2, *[3] * n) for n in (1, 2, 3))
two1, two2, two3 = (_rand(4, 3, *[2] * n) for n in (1, 2, 3))
norm, shift, mean, var = _rand(4) + 0.9, _rand(4), _rand(4), _rand(4) + 0.9
rows, table = _rand(5, 6), _rand(7, 3)
odd6 = _rand(6)
some = torch.tensor([True, False, True, True])
triangle = torch.ones(6, 6, dtype=torch.bool).tril()
index, more = torch.tensor([3, 0, -1]), torch.tensor([[1, 0], [2, 2]])


def signed(x):
    return x * 4 - 2


def ints(x):
    return (x * 10 - 4).long()


def flat(x):
    """[B, 4, 6]"""
    return x[..., 0]


def cube(x):
    """[B, 4, 3, 6, 6]"""
    return torch.stack([x, 1 - x, x * x], 2)


def flags(x):
    return x > 0.5


def unary(f):
    return (lambda x: f(signed(x)), lambda x: f(flat(x)))


def unary_positive(f):
    return (lambda x: f(x + 0.1), lambda x: f(flat(x) + 1))


def binary(f):
    """Two tensors, broadcast ones, and numbers on either side that the operator may take."""
    return (lambda x: f(signed(x), x), lambda x: f(signed(x), x[:, :1]), lambda x: f(x, norm[:, None, None]))


def comparison(f):
    return (
        *binary(f),
        lambda x: f(torch.floor(x * 4), torch.floor(x[:, :1] * 4)),
        lambda x: f(ints(x), 2),
        lambda x: f(ints(x), 1.5),
        lambda x: f(ints(x), torch.floor(x * 3)),
        lambda x: f(torch.floor(x * 4), 2),
    )


def logical(f):
    return (lambda x: f(flags(x), x < 0.7), lambda x: f(ints(x), x), lambda x: f(torch.floor(x * 2), flags(x)))


def pools(f, *views):
    """The arguments that both poolings have, in each rank."""
    return tuple(
        lambda x, view=view, kw=kw: f(view(x), **kw)
        for view in views
        for kw in (
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 1},
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": 3, "stride": 2, "ceil_mode": True},
            {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True},
        )
    )


def resized(mode, view, n, *more):
    """The ways to give a size to F.interpolate, which make torch sample at different places."""
    given = (
        {"size": (5, 9, 4)[:n]},
        {"size": (12, 12, 6)[:n]},
        {"scale_factor": 2.0},
        {"scale_factor": 1.7},
        {"scale_factor": 0.5},
        {"scale_factor": (1.5, 2.0, 1.0)[:n]},
        {"scale_factor": 1.7, "recompute_scale_factor": True},
    )
    corners = ({},) if mode == "nearest" else ({"align_corners": True}, {"align_corners": False})
    every = (*({**g, **c} for g in given for c in corners), *more)
    return tuple(lambda x, kw=kw: F.interpolate(view(x), mode=mode, **kw) for kw in every)


def same(f):
    return (lambda x: f(x) + 1, lambda x: f(x.transpose(1, 2)) * 2)


def dropped(f):
    return (lambda x: f(x, 0.3, False), lambda x: f(x, 0.0, False), lambda x: f(x, 0.5, False))


#: operator of PyTorch -> calls that become it; x is float32 [B, 4, 6, 6], in 0 to 1
CASES = {
    **{
        name: unary(getattr(aten, name))
        for name in (
            "relu relu6 sigmoid tanh hardswish hardsigmoid silu mish selu exp abs neg sin cos erf floor ceil sign"
        ).split()
    },
    **{name: unary_positive(getattr(aten, name)) for name in ("log", "sqrt", "rsqrt", "reciprocal")},
    "logical_not": (lambda x: torch.logical_not(flags(x)), lambda x: torch.logical_not(torch.floor(x * 3))),
    "mul": (
        *binary(torch.mul),
        lambda x: x * 0.1,
        lambda x: aten.mul.Scalar(x, 0.7),
        lambda x: 3 * x,
        lambda x: ints(x) * 2,
        lambda x: ints(x) * 0.5,
        lambda x: ints(x) * x,
        lambda x: flags(x) * x,
        lambda x: x.double() * x,
        lambda x: flags(x) * 2,
    ),
    **{
        name: (*binary(f), lambda x, f=f: f(ints(x), x))
        for name, f in (("maximum", torch.maximum), ("minimum", torch.minimum))
    },
    **{name: comparison(getattr(torch, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: logical(getattr(torch, name)) for name in ("logical_and", "logical_or")},
    "linear": (
        lambda x: F.linear(x, rows),
        lambda x: F.linear(flat(x), rows, shift.new_tensor([1, 2, 3, 4, 5.0])),
        lambda x: F.linear(x[:, 0, 0], rows),
        lambda x: F.linear(x, x[0, 0]),
    ),
    "embedding": (
        lambda x: F.embedding((x * 7).long(), table),
        lambda x: F.embedding((flat(x) * 7).int(), table, padding_idx=2),
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, mean, var, norm, shift, eps=0.01),
        lambda x: F.batch_norm(x, mean, var, None, None, momentum=0.9, eps=0.3),
        lambda x: F.batch_norm(flat(x), mean, var, norm, None),
        lambda x: F.batch_norm(cube(x), mean, var, None, shift),
    ),
    "_native_batch_norm_legit_no_training": (
        lambda x: aten._native_batch_norm_legit_no_training(x, norm, shift, mean, var, 0.1, 0.01)[0],
        lambda x: aten._native_batch_norm_legit_no_training(x, None, None, mean, var, 0.1, 0.3)[0],
    ),
    "layer_norm": (
        lambda x: F.layer_norm(x, (6,)),
        lambda x: F.layer_norm(x, (4, 6, 6), eps=0.2),
        lambda x: F.layer_norm(x, (6,), odd6, None, eps=0.01),
        lambda x: F.layer_norm(x, (6,), odd6, odd6 * 2),
    ),
    "group_norm": (
        lambda x: F.group_norm(x, 2),
        lambda x: F.group_norm(x, 4, norm, shift, eps=0.3),
        lambda x: F.group_norm(flat(x), 1, norm),
    ),
    "instance_norm": (
        lambda x: F.instance_norm(x),
        lambda x: F.instance_norm(x, None, None, norm, shift, eps=0.2),
        lambda x: F.instance_norm(flat(x), weight=norm),
    ),
    "rms_norm": (
        lambda x: F.rms_norm(x, (6,)),
        lambda x: F.rms_norm(x, (6, 6), eps=0.2),
        lambda x: F.rms_norm(x, (6,), odd6, eps=0.01),
    ),
    "scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(x, 1 - x, x * x),
        lambda x: F.scaled_dot_product_attention(x, 1 - x, x * x, is_causal=True),
        lambda x: F.scaled_dot_product_attention(x, x, 1 - x, scale=0.7),
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=signed(x)),
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=triangle),
        lambda x: F.scaled_dot_product_attention(x, x[:, :2], 1 - x[:, :2], enable_gqa=True),
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], 1 - x[:, :1], enable_gqa=True),
        lambda x: F.scaled_dot_product_attention(x, x[..., :4, :], x[..., :4, 1:4]),
    ),
    "rsub": (
        lambda x: 1 - x,
        lambda x: torch.rsub(x, x * x),
        lambda x: torch.rsub(ints(x), 0.5),
        lambda x: 7 - ints(x),
    ),
    "div": (
        *binary(torch.div),
        lambda x: x / 3,
        lambda x: ints(x) / 3,
        lambda x: ints(x) / (ints(x) + 20),
        lambda x: torch.div(x, 3, rounding_mode=None),
        lambda x: aten.div.Scalar(x, 0.7),
        lambda x: aten.div.Scalar_mode(x, 0.7, rounding_mode=None),
    ),
    "pow": (
        lambda x: x**2.5,
        lambda x: signed(x) ** 2,
        lambda x: signed(x) ** 3,
        lambda x: x**-1,
        lambda x: x**0.5,
        lambda x: ints(x) ** 2,
        lambda x: ints(x) ** 2.0,
        lambda x: 2**x,
        lambda x: 0.5 ** ints(x),
        lambda x: x ** signed(x),
    ),
    "where": (
        lambda x: torch.where(flags(x), x, signed(x)),
        lambda x: torch.where(flags(x), x, 0.25),
        lambda x: torch.where(flags(x), -1, x),
        lambda x: torch.where(flags(x), 1.0, 0.0),
        lambda x: torch.where(flags(x[:, :1]), x, shift[:, None, None]),
        lambda x: torch.where(flags(x), ints(x), x),
    ),
    "masked_fill": (
        lambda x: x.masked_fill(flags(x), -1),
        lambda x: x.masked_fill(flags(x[:, :1]), torch.tensor(0.25)),
        lambda x: ints(x).masked_fill(flags(x), 7),
        lambda x: ints(x).masked_fill(flags(x), -2.5),
        lambda x: x.double().masked_fill(flags(x), 0.1),
        lambda x: ints(x).masked_fill(flags(x), torch.tensor(3, dtype=torch.int32)),
        lambda x: flags(x).masked_fill(x > 0.7, 0),
        lambda x: flags(x).masked_fill(x < 0.3, 0.5),
        lambda x: flags(x).masked_fill(x < 0.3, True),
    ),
    "square": (lambda x: torch.square(signed(x)), lambda x: ints(x).square()),
    "linalg_vector_norm": (
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: signed(x).norm(dim=(-1, 2), keepdim=True),
        lambda x: torch.linalg.vector_norm(x),
    ),
    "prelu": (lambda x: F.prelu(signed(x), shift), lambda x: F.prelu(signed(x), shift[:1])),
    "elu": (lambda x: F.elu(signed(x)), lambda x: F.elu(signed(x), 1.5), lambda x: F.elu(signed(x), alpha=-2)),
    "leaky_relu": (lambda x: F.leaky_relu(signed(x)), lambda x: F.leaky_relu(signed(x), 0.3)),
    "softplus": (
        lambda x: F.softplus(signed(x)),
        lambda x: F.softplus(signed(x), 2.0),
        lambda x: F.softplus(signed(x), beta=3, threshold=1),
    ),
    "gelu": (lambda x: F.gelu(signed(x)), lambda x: F.gelu(signed(x), approximate="tanh")),
    "softmax": (
        lambda x: x.softmax(-1),
        lambda x: F.softmax(x, 1),
        lambda x: F.softmax(x, 2, dtype=torch.float32),
        lambda x: F.softmax(ints(x), 1, dtype=torch.float32),
        lambda x: x.softmax(-1, dtype=torch.float64),
    ),
    "_softmax": (lambda x: aten._softmax(x, -1, False), lambda x: aten._softmax(x, 1, False)),
    "log_softmax": (
        lambda x: x.log_softmax(-1),
        lambda x: F.log_softmax(x, 1),
        lambda x: x.log_softmax(1, dtype=torch.float64),
    ),
    "_log_softmax": (lambda x: aten._log_softmax(x, -1, False), lambda x: aten._log_softmax(x, 1, False)),
    "argmax": (
        lambda x: x.argmax(),
        lambda x: x.argmax(1),
        lambda x: x.argmax(-1, keepdim=True),
        lambda x: torch.argmax(x, None, True),
    ),
    "max_pool1d": (*pools(F.max_pool1d, flat), lambda x: F.max_pool1d(signed(flat(x)), 2, 2, 1, 2)),
    "max_pool2d": (
        *pools(F.max_pool2d, signed),
        lambda x: F.max_pool2d(signed(x), (2, 3), (1, 2), (0, 1), (2, 1), True),
    ),
    "max_pool3d": (*pools(F.max_pool3d, cube), lambda x: F.max_pool3d(-cube(x), (1, 2, 3), 1, (0, 1, 1), (1, 2, 1))),
    "avg_pool1d": (*pools(F.avg_pool1d, flat), lambda x: F.avg_pool1d(flat(x), 3, 2, 1, True, False)),
    "avg_pool2d": (
        *pools(F.avg_pool2d, signed),
        lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, (2, 3), (3, 2), (1, 0), ceil_mode=True, count_include_pad=False),
        lambda x: F.avg_pool2d(x, (2, 3), (3, 2), (1, 0), ceil_mode=True),
    ),
    "avg_pool3d": (
        *pools(F.avg_pool3d, cube),
        lambda x: F.avg_pool3d(cube(x), 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(flat(x), 2), lambda x: F.adaptive_max_pool1d(flat(x), 4)),
    "adaptive_max_pool2d": (
        lambda x: F.adaptive_max_pool2d(x, 4),
        lambda x: F.adaptive_max_pool2d(x, (1, 3)),
        lambda x: F.adaptive_max_pool2d(x, (None, 2)),
    ),
    "permute": (lambda x: x.permute(0, 2, -1, 1), lambda x: x.permute(-2, 1, 0, 3), lambda x: flat(x).permute(2, 1, 0)),
    "unsqueeze": (lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1), lambda x: x.unsqueeze(-2), lambda x: x[:, None]),
    "select": (
        lambda x: x.select(1, 2),
        lambda x: x[:, -1],
        lambda x: x[..., 3],
        lambda x: x.select(-2, -6),
    ),
    "index_select": (
        lambda x: x.index_select(1, torch.tensor([2, 0])),
        lambda x: x.index_select(-1, torch.tensor([5, 5, 1, 0])),
    ),
    "repeat": (
        lambda x: x.repeat(1, 2, 1, 1),
        lambda x: x.repeat(3, 1, 1, 1, 2),
        lambda x: norm[None].repeat(x.shape[0], 1),
        lambda x: norm[:, None].repeat(x.shape[0], 1, 3),
    ),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), lambda x: F.pixel_shuffle(x.repeat(1, 9, 1, 1), 3)),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), lambda x: F.pixel_unshuffle(x, 3)),
    "channel_shuffle": (lambda x: F.channel_shuffle(x, 2), lambda x: F.channel_shuffle(x.repeat(1, 3, 1, 1), 3)),
    "gather": (
        lambda x: x.gather(1, ints(x).clamp(0, 3)),
        lambda x: x.gather(-1, ints(x)[..., :2].clamp(0, 5)),
    ),
    # ---- with a function of their own in the reader
    "conv1d": (
        lambda x: F.conv1d(flat(x), w1),
        lambda x: F.conv1d(flat(x), w1, shift, stride=2, padding=3, dilation=2),
        lambda x: F.conv1d(flat(x), w1, padding="same", dilation=3),
        lambda x: F.conv1d(flat(x), v1, padding="same", groups=2),
        lambda x: F.conv1d(flat(x), w1, padding="valid"),
    ),
    "conv2d": (
        lambda x: F.conv2d(x, w2, shift),
        lambda x: F.conv2d(x, w2, stride=(2, 1), padding=(0, 2), dilation=(1, 3)),
        lambda x: F.conv2d(x, w2, padding="same"),
        lambda x: F.conv2d(x, w2, padding="same", dilation=(1, 2)),
        lambda x: F.conv2d(x, v2, padding="valid", stride=2, groups=2),
        lambda x: F.conv2d(x, w2[:, :1], shift, groups=4, padding=1),
        lambda x: F.conv2d(x, v2[:4, :1], groups=4, stride=2),
        lambda x: F.conv2d(x[:, :2], v2[:4, :1], groups=2, dilation=(1, 2)),
        lambda x: F.conv2d(x, torch.cat([w2, -w2])[:, :1], padding="same", groups=4, dilation=2),
    ),
    "conv3d": (
        lambda x: F.conv3d(cube(x), w3),
        lambda x: F.conv3d(cube(x), v3, odd6, stride=(1, 2, 1), padding=(1, 0, 2), groups=2),
        lambda x: F.conv3d(cube(x), w3, padding="same", dilation=(1, 2, 3)),
    ),
    "convolution": (
        lambda x: aten.convolution(x, w2, shift, [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
        lambda x: aten.convolution(x, two2, None, [2, 1], [1, 0], [1, 2], True, [1, 0], 2),
        lambda x: aten.convolution(flat(x), v1, odd6, [1], [1], [1], False, [0], 2),
    ),
    "conv_transpose1d": (
        lambda x: F.conv_transpose1d(flat(x), w1, stride=2),
        lambda x: F.conv_transpose1d(flat(x), two1, odd6, 3, 1, 2, 2, 2),
    ),
    "conv_transpose2d": (
        lambda x: F.conv_transpose2d(x, w2, shift),
        lambda x: F.conv_transpose2d(x, two2, None, (2, 3), (1, 0), (1, 2), 2, (1, 2)),
    ),
    "conv_transpose3d": (
        lambda x: F.conv_transpose3d(cube(x), w3),
        lambda x: F.conv_transpose3d(cube(x), two3, odd6, 2, 1, 1, 2, (1, 1, 2)),
    ),
    "matmul": (
        lambda x: x @ x.transpose(-1, -2),
        lambda x: torch.matmul(x, rows.t()),
        lambda x: torch.matmul(rows, x),
        lambda x: flat(x)[:, None] @ x,
    ),
    "bmm": (lambda x: torch.bmm(flat(x), x[:, 1]), lambda x: torch.bmm(x[:, 0], flat(x).transpose(1, 2))),
    "mm": (lambda x: torch.mm(x[:, 0, 0], rows.t()), lambda x: torch.mm(rows, x[0, 1])),
    "add": (
        *binary(torch.add),
        lambda x: x + 0.3,
        lambda x: ints(x) + 3,
        lambda x: ints(x) + 0.5,
        lambda x: ints(x) + x,
        lambda x: torch.add(x, signed(x), alpha=2),
        lambda x: torch.add(x, ints(x), alpha=3),
        lambda x: torch.add(ints(x), ints(x), alpha=3),
        lambda x: torch.add(x, ints(x), alpha=0.5),
        lambda x: torch.add(x, 2, alpha=0.25),
        lambda x: torch.add(x, flags(x), alpha=2),
        lambda x: aten.add.Scalar(x, 2, 3),
        lambda x: flags(x) + x,
    ),
    "sub": (
        *binary(torch.sub),
        lambda x: x - 0.3,
        lambda x: torch.sub(x, signed(x), alpha=-1.5),
        lambda x: torch.sub(ints(x), 2, alpha=3),
        lambda x: aten.sub.Scalar(x, 2, 0.5),
        lambda x: ints(x) - x,
    ),
    "hardtanh": (
        lambda x: F.hardtanh(signed(x)),
        lambda x: F.hardtanh(signed(x), -0.3, 1.2),
        lambda x: F.hardtanh(ints(x), -2.5, 3.5),
    ),
    "clamp": (
        lambda x: signed(x).clamp(-0.5, 0.7),
        lambda x: signed(x).clamp(min=0),
        lambda x: signed(x).clamp(max=0.3),
        lambda x: (signed(x) * 6).clamp(0, 6),
        lambda x: ints(x).clamp(-2, 3),
        lambda x: ints(x).clamp(min=0),
        lambda x: ints(x).clamp(0, 6),
    ),
    "clamp_min": (
        lambda x: signed(x).clamp_min(0),
        lambda x: signed(x).clamp_min(-0.2),
        lambda x: ints(x).clamp_min(1),
    ),
    "clamp_max": (lambda x: signed(x).clamp_max(6), lambda x: signed(x).clamp_max(0)),
    "clip": (lambda x: signed(x).clip(-0.5, 0.7), lambda x: signed(x).clip(max=1)),
    "adaptive_avg_pool1d": (
        lambda x: F.adaptive_avg_pool1d(flat(x), 1),
        lambda x: F.adaptive_avg_pool1d(flat(x), 3),
        lambda x: F.adaptive_avg_pool1d(flat(x), 4),
        lambda x: F.adaptive_avg_pool1d(flat(x), 5),
    ),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (1, 2)),
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        lambda x: F.adaptive_avg_pool2d(x, 4),
        lambda x: F.adaptive_avg_pool2d(x, (None, 5)),
        lambda x: F.adaptive_avg_pool2d(x, (None, 1)),
    ),
    "adaptive_avg_pool3d": (
        lambda x: F.adaptive_avg_pool3d(cube(x), 1),
        lambda x: F.adaptive_avg_pool3d(cube(x), (3, 2, 1)),
        lambda x: F.adaptive_avg_pool3d(cube(x), (2, 2, 1)),
    ),
    "mean": (
        lambda x: x.mean(),
        lambda x: x.mean(1),
        lambda x: x.mean((-1, -2)),
        lambda x: x[:, 1:].mean((2, 3)),
        lambda x: x.mean((2, 3), keepdim=True),
        lambda x: x.mean((1, -1), keepdim=True),
        lambda x: x.mean((0, 1)),
        lambda x: x.mean((), keepdim=True),
        lambda x: x.mean(-1, dtype=torch.float32),
    ),
    "sum": (
        lambda x: x.sum(),
        lambda x: x.sum(1),
        lambda x: x.sum((-1, 1), keepdim=True),
        lambda x: ints(x).sum(-1),
        lambda x: ints(x).int().sum(-1),
        lambda x: x.sum(()),
    ),
    "amax": (lambda x: x.amax(), lambda x: x.amax((1, -1)), lambda x: x.amax(2, keepdim=True)),
    "amin": (lambda x: x.amin(), lambda x: x.amin((1, -1)), lambda x: x.amin(2, keepdim=True)),
    "cumsum": (
        lambda x: x.cumsum(1),
        lambda x: x.cumsum(-1),
        lambda x: ints(x).cumsum(2),
        lambda x: x.cumsum(1, dtype=torch.float64),
        lambda x: ints(x).int().cumsum(1),
        lambda x: flags(x).cumsum(1),
    ),
    "view": (lambda x: x.view(-1, 4, 36), lambda x: x.view(x.shape[0], 24, 6)),
    "reshape": (lambda x: x.reshape(-1, 2, 72), lambda x: x.transpose(1, 2).reshape(x.shape[0], -1)),
    "flatten": (lambda x: x.flatten(1), lambda x: x.flatten(0, 1), lambda x: x.flatten(-2)),
    "unflatten": (lambda x: x.unflatten(1, (2, -1)), lambda x: x.unflatten(-1, (3, 2))),
    "_unsafe_view": (lambda x: aten._unsafe_view(x, [-1, 8, 18]), lambda x: aten._unsafe_view(x, [-1, 6])),
    "view_as": (lambda x: x.view_as(x.transpose(1, 2)), lambda x: x.flatten(1).view_as(x)),
    "reshape_as": (lambda x: x.reshape_as(x.transpose(1, 2)), lambda x: x.transpose(1, 3).reshape_as(x.flatten(1))),
    "transpose": (lambda x: x.transpose(1, -1), lambda x: x.transpose(-2, 0)),
    "swapaxes": (lambda x: x.swapaxes(1, -1), lambda x: aten.swapaxes(x, 2, 0)),
    "t": (lambda x: x[:, 0, 0].t(), lambda x: x[:, 1, 1, 1].t()),
    "numpy_T": (lambda x: aten.numpy_T(x), lambda x: aten.numpy_T(x[:, 0, 0])),
    "squeeze": (
        lambda x: x[:, :1].squeeze(1),
        lambda x: x[:, :1, :, :1].squeeze(),
        lambda x: x[:, :1, :, :1].squeeze((1, -1)),
        lambda x: x.squeeze(1),
        lambda x: x[..., :1].squeeze((-1, 2)),
    ),
    "slice": (
        lambda x: x[:, 1:4:2],
        lambda x: x[:, -3:],
        lambda x: x[..., :-2],
        lambda x: x[..., -4:-1],
        lambda x: x[:, :, 2:100],
        lambda x: x[:, -100:2],
        lambda x: x[..., ::4],
        lambda x: x[:, 3:3],
        lambda x: x[1:],
        lambda x: x[:-1],
    ),
    "split": (
        lambda x: x.split(3, 1),
        lambda x: x.split([1, 3], 1),
        lambda x: x.split(4, -1)[1],
        lambda x: torch.split(x, [2, 1, 3], dim=2)[2],
        lambda x: aten.split.sizes(x, [2, 1, 3], 2),
    ),
    "split_with_sizes": (
        lambda x: aten.split_with_sizes(x, [1, 3], 1),
        lambda x: x.split_with_sizes([2, 4], -1)[1],
    ),
    "chunk": (lambda x: x.chunk(2, 1), lambda x: x.chunk(4, -1)[2], lambda x: torch.chunk(x, 4, 2)),
    "tensor_split": (
        lambda x: x.tensor_split(4, -1),
        lambda x: x.tensor_split((1, 2, 5), 2),
        lambda x: x.tensor_split(3, 1)[0],
    ),
    "unbind": (lambda x: x.unbind(1), lambda x: x.unbind(-1)[2]),
    "cat": (
        lambda x: torch.cat([x, signed(x)], 1),
        lambda x: torch.cat([x, x[..., :2], x], -1),
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, ints(x)], 1),
    ),
    "concat": (lambda x: aten.concat([x, signed(x)], 1), lambda x: aten.concat([x, x[..., :2]], -1)),
    "concatenate": (lambda x: aten.concatenate([x, signed(x)], 1), lambda x: aten.concatenate([x, x[..., :2]], -1)),
    "stack": (lambda x: torch.stack([x, signed(x)]), lambda x: torch.stack([x, x, 1 - x], -2)),
    "expand": (
        lambda x: x[:1].expand(x.shape[0], -1, -1, -1),
        lambda x: norm.expand(x.shape[0], -1),
        lambda x: x[:, :1].expand(-1, 3, -1, -1),
        lambda x: norm.expand(2, 3, 4),
        lambda x: x[:, :, :1].expand(-1, 4, 5, 6),
    ),
    "expand_as": (lambda x: x[:, :1].expand_as(x), lambda x: norm[:, None, None].expand_as(torch.zeros(4, 2, 3))),
    "pad": (
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.pad(x, (1, 0, 2, 1, 0, 3)),
        lambda x: F.pad(x, (-1, 2, 0, -2)),
        lambda x: F.pad(x, (0, 1), value=-0.7),
        lambda x: F.pad(x, (1, 2, 0, 3), "reflect"),
        lambda x: F.pad(x, (1, 2, 0, 3), "replicate"),
        lambda x: F.pad(x, (1, 2, 0, 3), "circular"),
        lambda x: F.pad(x, (0, 0, 2, 1), "reflect"),
        lambda x: F.pad(flat(x), (2, 1), "reflect"),
        lambda x: F.pad(flat(x), (2, 1), "circular"),
        lambda x: F.pad(cube(x), (1, 1, 0, 2, 1, 0), "replicate"),
        lambda x: F.pad(cube(x), (1, 1, 0, 2, 1, 0), "reflect"),
    ),
    "constant_pad_nd": (
        lambda x: aten.constant_pad_nd(x, [1, 2, 0, 1], 0.5),
        lambda x: aten.constant_pad_nd(x, [0, 0, 3, 1]),
    ),
    "reflection_pad1d": (
        lambda x: aten.reflection_pad1d(flat(x), [2, 1]),
        lambda x: aten.reflection_pad1d(flat(x), [0, 3]),
    ),
    "reflection_pad2d": (
        lambda x: aten.reflection_pad2d(x, [2, 1, 0, 3]),
        lambda x: aten.reflection_pad2d(x, [0, 0, 1, 2]),
    ),
    "replication_pad1d": (
        lambda x: aten.replication_pad1d(flat(x), [2, 1]),
        lambda x: aten.replication_pad1d(flat(x), [0, 3]),
    ),
    "replication_pad2d": (
        lambda x: aten.replication_pad2d(x, [2, 1, 0, 3]),
        lambda x: aten.replication_pad2d(x, [0, 0, 1, 2]),
    ),
    "index": (
        lambda x: x[:, index],
        lambda x: x[..., more],
        lambda x: norm[ints(x).clamp(0, 3)],
        lambda x: x[:, :, more],
        lambda x: x[more - 1],
        lambda x: x[:, index, more[:, :1]],
        lambda x: x[:, :, index, index - 3],
        lambda x: x[torch.arange(x.shape[0]), index[:1]],
        lambda x: x[torch.arange(x.shape[0]), ints(x[:, 0, 0, 0]).clamp(0, 3)],
        lambda x: flat(x)[torch.arange(x.shape[0]), ints(x[:, 0, 0, 0]).clamp(0, 3)],
        lambda x: x[:, :, 0, 0][torch.arange(x.shape[0]), ints(x[:, 0, 0, 0]).clamp(0, 3)],
        lambda x: x[torch.arange(x.shape[0])[:, None], more[:1]],
        lambda x: x[torch.arange(x.shape[0])[:, None, None], more[None]],
    ),
    "roll": (
        lambda x: x.roll(1, 1),
        lambda x: x.roll((1, -2), (2, 3)),
        lambda x: x.roll((3, 1), (-1, 1)),
    ),
    "upsample_nearest1d": (
        *resized("nearest", flat, 1),
        lambda x: aten.upsample_nearest1d(flat(x), [9]),
        lambda x: aten.upsample_nearest1d(flat(x), [10], 1.7),
    ),
    "upsample_nearest2d": (
        *resized("nearest", signed, 2),
        lambda x: aten.upsample_nearest2d(x, [9, 5]),
        lambda x: aten.upsample_nearest2d(x, [10, 9], 1.7, 1.5),
    ),
    "upsample_nearest3d": (
        *resized("nearest", cube, 3),
        lambda x: aten.upsample_nearest3d(cube(x), [9, 5, 4]),
        lambda x: aten.upsample_nearest3d(cube(x), [5, 10, 9], 1.7, 1.7, 1.5),
    ),
    "upsample_linear1d": (
        *resized("linear", flat, 1),
        lambda x: aten.upsample_linear1d(flat(x), [9], True),
        lambda x: aten.upsample_linear1d(flat(x), [10], False, 1.7),
    ),
    "upsample_bilinear2d": (
        *resized("bilinear", signed, 2),
        lambda x: aten.upsample_bilinear2d(x, [9, 5], False),
        lambda x: aten.upsample_bilinear2d(x, [10, 9], False, 1.7, 1.5),
    ),
    "upsample_bicubic2d": (
        *resized("bicubic", signed, 2),
        lambda x: aten.upsample_bicubic2d(x, [9, 5], False),
        lambda x: aten.upsample_bicubic2d(x, [10, 9], False, 1.7, 1.5),
    ),
    **{
        name: same(getattr(aten, name))
        for name in "clone contiguous alias detach lift_fresh_copy resolve_conj resolve_neg".split()
    },
    **{name: dropped(getattr(torch, name)) for name in ("dropout", "feature_dropout", "alpha_dropout")},
    "native_dropout": (
        lambda x: aten.native_dropout(x, 0.3, False)[0],
        lambda x: aten.native_dropout(x, 0.6, False)[0],
    ),
    "to": (
        lambda x: x.double(),
        lambda x: x.to(torch.int32),
        lambda x: x.to(torch.float32) + 1,
        lambda x: aten.to.other(x, ints(x)),
        lambda x: aten.to.dtype_layout(x, dtype=torch.float64),
        lambda x: ints(x).to("cpu", torch.float32),
        lambda x: signed(x).bool(),
    ),
    "_to_copy": (
        lambda x: aten._to_copy(x, dtype=torch.float64),
        lambda x: aten._to_copy(signed(x), dtype=torch.int16),
    ),
    "type_as": (lambda x: x.type_as(ints(x)), lambda x: ints(x).type_as(x)),
    "sym_size": (lambda x: F.pad(x, (1, 0)).shape[0], lambda x: x.transpose(0, 2).shape[2]),
    "broadcast_to": (lambda x: norm.broadcast_to(2, 3, 4), lambda x: x[:, :1].broadcast_to(x.shape)),
    "celu": (lambda x: F.celu(signed(x)), lambda x: F.celu(signed(x), 0.7)),
    "max": (
        lambda x: x.max(),
        lambda x: x.max(1)[0],
        lambda x: x.max(-1, True).values,
        lambda x: torch.max(signed(x), x[:, :1]),
        lambda x: torch.max(ints(x), x),
    ),
    "min": (
        lambda x: x.min(),
        lambda x: x.min(1)[0],
        lambda x: x.min(-1, True).values,
        lambda x: torch.min(ints(x), ints(x[:, :1])),
    ),
    "__and__": (lambda x: flags(x) & (x < 0.7),),
    "__or__": (lambda x: flags(x) | (x < 0.2),),
    "bitwise_and": (lambda x: torch.bitwise_and(flags(x), x < 0.7),),
    "bitwise_or": (lambda x: torch.bitwise_or(flags(x), x < 0.2),),
    "bitwise_not": (lambda x: ~flags(x),),
    "zeros_like": (lambda x: torch.zeros_like(x), lambda x: torch.zeros_like(norm, dtype=torch.int64)),
    "ones_like": (lambda x: torch.ones_like(x[:, 0]), lambda x: torch.ones_like(norm)),
    "full_like": (lambda x: torch.full_like(x, 0.3), lambda x: torch.full_like(norm, 7)),
    "new_zeros": (lambda x: x.new_zeros(2, 3), lambda x: x.new_zeros(x.shape[0], 2)),
    "new_ones": (lambda x: x.new_ones((), dtype=torch.bool), lambda x: x.new_ones(2, x.shape[0])),
    "new_full": (lambda x: x.new_full((2, 3), 0.7), lambda x: x.new_full((x.shape[0], 1), 3)),
    "zeros": (lambda x: torch.zeros(2, 3), lambda x: torch.zeros(x.shape[0], 2, dtype=torch.int32)),
    "ones": (lambda x: torch.ones(2, 3), lambda x: torch.ones(x.shape[0])),
    "full": (lambda x: torch.full((2, 3), 0.7), lambda x: torch.full((x.shape[0], 1), True)),
    "fill": (
        lambda x: aten.fill(x, 0.4),
        lambda x: aten.fill(norm, 3),
        lambda x: aten.fill(x, x[0, 0, 0, 0]),
    ),
    "copy": (
        lambda x: aten.copy(x, ints(x)),
        lambda x: aten.copy(ints(x), x[:, :1]),
        lambda x: aten.copy(x, norm[:, None, None]),
    ),
    "slice_scatter": (
        lambda x: torch.slice_scatter(x, x[:, :2] * 2, 1, 1, 3),
        lambda x: torch.slice_scatter(x, x[..., :2] * 2, -1, -2),
        lambda x: torch.slice_scatter(x, x[..., :3] * 2, -1, 0, 3),
        lambda x: torch.slice_scatter(x, 1 - x),
        lambda x: torch.slice_scatter(x, x[:, :0], 1, 2, 2),
    ),
    "select_scatter": (
        lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 2),
        lambda x: torch.select_scatter(x, x[..., 0] * 2, -1, -1),
        lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 0),
    ),
    "flip": (lambda x: x.flip(1), lambda x: x.flip(-1, 2)),
    "unfold": (lambda x: x.unfold(2, 3, 1), lambda x: x.unfold(-1, 2, 2), lambda x: x.unfold(1, 3, 4)),
    "im2col": (lambda x: F.unfold(x, 2, stride=2), lambda x: F.unfold(x, (2, 3), stride=(2, 3))),
    "col2im": (
        lambda x: F.fold(x.flatten(2), 12, 2, stride=2),
        lambda x: F.fold(x.reshape(-1, 24, 6), (4, 9), (2, 3), stride=(2, 3)),
    ),
}

#: operator -> calls in a form that no canonical operator has: they stay PyTorch's own, by name
REFUSED = {
    "view": (lambda x: x.view(torch.int32),),
    "adaptive_max_pool1d": (lambda x: F.adaptive_max_pool1d(flat(x), 2, return_indices=True)[1],),
    "adaptive_max_pool2d": (
        lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True),
        lambda x: F.adaptive_max_pool2d(x[:, 0], 2),
    ),
    "native_dropout": (lambda x: aten.native_dropout(x, 0.3, False), lambda x: aten.native_dropout(x, 0.0, False)),
    "_native_batch_norm_legit_no_training": (
        lambda x: aten._native_batch_norm_legit_no_training(x, norm, shift, mean, var, 0.1, 0.01),
    ),
    "elu": (lambda x: aten.elu(signed(x), 1.5, 2, 1), lambda x: aten.elu(signed(x), 1.5, 1, 0.5)),
    "max_pool1d": (lambda x: F.max_pool1d(x[0, 0], 2),),
    "max_pool2d": (lambda x: F.max_pool2d(x[:, 0], 2),),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2, divisor_override=3), lambda x: F.avg_pool2d(x[:, 0], 2)),
    "avg_pool3d": (lambda x: F.avg_pool3d(cube(x), 2, divisor_override=3),),
    "adaptive_avg_pool2d": (
        lambda x: F.adaptive_avg_pool2d(x[:, 0], 1),
        lambda x: F.adaptive_avg_pool2d(x[:, 0], (4, 5)),
    ),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True),),
    "instance_norm": (lambda x: F.instance_norm(x, mean, var, use_input_stats=False),),
    "scaled_dot_product_attention": (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=1.0),),
    "rsub": (lambda x: torch.rsub(x, 1, alpha=2),),
    "linalg_vector_norm": (
        lambda x: torch.linalg.vector_norm(x, 1, dim=1),
        lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float64),
    ),
    "div": (
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        lambda x: torch.div(signed(x), 0.3, rounding_mode="trunc"),
    ),
    "conv2d": (lambda x: F.conv2d(x[0], w2),),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x[0], w2),),
    "matmul": (lambda x: x @ odd6, lambda x: torch.matmul(odd6, x)),
    "clamp": (lambda x: x.clamp(x * x, 1 - x * x), lambda x: x.clamp(min=norm[:, None, None])),
    "clamp_min": (lambda x: x.clamp_min(norm[:, None, None] - 0.5),),
    "clamp_max": (lambda x: x.clamp_max(norm[:, None, None] - 0.5),),
    "clip": (lambda x: x.clip(min=norm[:, None, None] - 0.5),),
    "mean": (
        lambda x: x.mean(1, dtype=torch.float64),
        lambda x: ints(x).mean(1, dtype=torch.float32),
        lambda x: x[:, :0].mean((2, 3)),
        lambda x: x[:, :1].expand(-1, x.shape[0], -1, -1).mean((2, 3)),
    ),
    "sum": (lambda x: x.sum(1, dtype=torch.float64), lambda x: flags(x).sum(1)),
    "max": (lambda x: torch.max(x, 1),),
    "min": (lambda x: torch.min(x, 1),),
    "__and__": (lambda x: aten.__and__(ints(x), ints(x * x)), lambda x: aten.__and__(ints(x), 3)),
    "__or__": (lambda x: aten.__or__(ints(x), ints(x * x)), lambda x: aten.__or__(ints(x), 3)),
    "bitwise_and": (lambda x: torch.bitwise_and(ints(x), 3), lambda x: torch.bitwise_and(3, ints(x))),
    "bitwise_or": (lambda x: torch.bitwise_or(ints(x), 3), lambda x: torch.bitwise_or(3, ints(x))),
    "bitwise_not": (lambda x: ~ints(x),),
    "repeat": (lambda x: x[0].repeat(x.shape[0], 1, 1),),
    "slice_scatter": (
        lambda x: torch.slice_scatter(x, x[:, ::2] * 2, 1, step=2),
        lambda x: torch.slice_scatter(x, x[:1] * 2, 0, 0, 1),
    ),
    "flip": (lambda x: x.flip(0),),
    "unfold": (lambda x: x.unfold(0, 2, 1),),
    "im2col": (
        lambda x: F.unfold(x, 2),
        lambda x: F.unfold(x, 2, 2, 0, 2),
        lambda x: F.unfold(x, 2, 1, 1, 2),
        lambda x: F.unfold(x, 4, 1, 0, 4),
    ),
    "col2im": (lambda x: F.fold(x.flatten(2), 7, 2, stride=1),),
    "roll": (lambda x: x.roll(1),),
    "index": (lambda x: x[:, index, :, index], lambda x: x[:, some], lambda x: x[index % 2, index]),
    "eq": (lambda x: flags(x).eq(True),),
    "mul": (lambda x: x * x.shape[0], lambda x: flags(x) * True),
    "where": (lambda x: torch.where(flags(x), x, True), lambda x: torch.where(flags(x))),
    "fill": (lambda x: (x * 1).fill_(x.shape[0]),),
    "chunk": (lambda x: x.chunk(2),),
    "slice": (lambda x: x[:, : x.shape[0]],),
    "upsample_nearest2d": (
        lambda x: aten.upsample_nearest2d(x, [10, 9], None, 1.5),
        lambda x: aten.upsample_nearest2d(x, [9, 9], 1.7, 1.5),
    ),
}


# ---------------------------------------------------------------- one capture of all of them


class One(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class Every(nn.Module):
    """Every call of a table as a layer of its own: "add 3" is the fourth one of "add"."""

    def __init__(self, calls):
        super().__init__()
        for name, fs in calls.items():
            for k, f in enumerate(fs):
                self.add_module(f"{name} {k}", One(f))

    def forward(self, x):
        return {name: m(x) for name, m in self.named_children()}


class Watched(dict):
    """Arguments that remember which of them were asked for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = set()

    def __getitem__(self, key):
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def flat_leaves(y):
    return [t for v in y for t in flat_leaves(v)] if isinstance(y, (tuple, list)) else [y]


class Reading:
    """What the reader made of every call of a table, and what eager PyTorch and the Graph make of fresh data."""

    def __init__(self, calls):
        self.tried = set()  #: overloads that came to a reader
        self.readings = []  #: of what it read: (ATen operator, reader, arguments that it asked for, nodes that it made)
        originals = dict(READERS)
        model = Every(calls).eval()
        READERS.update({name: self._watched(name, f) for name, f in originals.items()})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch tells of slow forms once in a process
            try:
                self.graph = capture(model, (torch.rand(5, 4, 6, 6),))
            finally:
                READERS.update(originals)
            x = torch.rand(3, 4, 6, 6)
            produced = [o for n in self.graph.nodes for o in n.outputs]
            self.values = run(self.graph, (x,), keep=produced)
            want = model(x)
        names = [(name, k) for name in want for k in range(len(flat_leaves(want[name])))]
        got = [torch.as_tensor(self.values[o]) for o in self.graph.outputs]
        expected = [torch.as_tensor(t) for y in want.values() for t in flat_leaves(y)]
        self.pairs = defaultdict(list)
        for (name, _), a, b in zip(names, expected, got, strict=True):
            self.pairs[name].append((a, b))

    def _watched(self, name, f):
        def read(c):
            c.args, first = Watched(c.args), len(c.builder.graph.nodes)
            self.tried.add(f"{name}.{c.node.target._overloadname}")
            out = f(c)
            self.readings.append((name, f, c.node.target._schema, c.args.asked, c.builder.graph.nodes[first:]))
            return out

        return read


@pytest.fixture(scope="module")
def read():
    torch.manual_seed(3)
    return Reading(CASES)


@pytest.fixture(scope="module")
def refused():
    torch.manual_seed(4)
    return Reading(REFUSED)


def difference(a, b):
    """None where both are the same, bit for bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{b.dtype} {tuple(b.shape)} instead of {a.dtype} {tuple(a.shape)}"
    if torch.equal(a, b):
        return None
    d = (a.double() - b.double()).abs().max().item()
    return f"off by {d}"


#: torch raises to a number by other functions than to a tensor, and has one kernel for means of parts of any size
_LAST_BIT = ("pow", "celu", "adaptive_avg_pool2d", "adaptive_avg_pool3d")


@pytest.mark.parametrize("name", CASES)
def test_the_graph_computes_what_pytorch_does(read, name):
    for k in range(len(CASES[name])):
        for a, b in read.pairs[f"{name} {k}"]:
            if name in _LAST_BIT and a.dtype == b.dtype == torch.float32:
                torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7)
            else:
                assert difference(a, b) is None, (k, difference(a, b))


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("sym_size",)])
def test_the_call_is_read_by_its_name_and_nothing_of_it_is_opaque(read, name):
    layers = {f"{name} {k}" for k in range(len(CASES[name]))}
    assert [(n.layer, n.attrs["target"]) for n in read.graph.nodes if n.layer in layers and n.op == OPAQUE] == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_form_without_canonical_operator_stays_pytorchs_own_by_name(refused, name):
    for k in range(len(REFUSED[name])):
        targets = {n.attrs["target"] for n in refused.graph.nodes if n.layer == f"{name} {k}" and n.op == OPAQUE}
        assert any(t.split(".")[1] == name for t in targets), (k, targets)
        for a, b in refused.pairs[f"{name} {k}"]:
            assert difference(a, b) is None, k


def test_the_graph_says_the_type_and_shape_of_each_value(read):
    wrong = []
    for n in read.graph.nodes:
        for o in n.outputs:
            said, is_ = read.graph.values[o], read.values[o]
            if isinstance(is_, torch.Tensor) and (
                said.dtype != str(is_.dtype).removeprefix("torch.")
                or len(said.shape) != is_.dim()
                or any(s is not None and s != d for s, d in zip(said.shape, is_.shape))
            ):
                wrong.append((n.layer, n.op, said, is_.dtype, tuple(is_.shape)))
    assert wrong == []


# ---------------------------------------------------------------- what PyTorch takes apart

vector = odd6 - 0.1
#: operator -> calls; x is float32 [B, 4, 6, 6], in 0 to 1
PARTS = {
    "addcdiv": lambda x: torch.addcdiv(x, signed(x), x + 1, value=0.7),
    "addcmul": lambda x: torch.addcmul(x, signed(x), x[:, :1], value=0.7),
    "addmm": lambda x: torch.addmm(odd6[:5], x[:, 0, 0], rows.t(), beta=0.5, alpha=2),
    "addmv": lambda x: torch.addmv(odd6[:5], rows, vector, alpha=2) + x[..., :5],
    "addr": lambda x: torch.addr(rows, odd6[:5], vector, beta=0.5) + x[..., :5, :],
    "baddbmm": lambda x: torch.baddbmm(x[:, 0], flat(x).transpose(1, 2), flat(x), beta=0.5, alpha=2),
    "diff": lambda x: torch.diff(x, dim=1),
    "dot": lambda x: torch.dot(odd6, vector) + x,
    "einsum": lambda x: (
        torch.einsum("bchw,bdhw->bcd", x, 1 - x),
        torch.einsum("bcn,mn->bmc", flat(x), rows),
        torch.einsum("bhnd,bhmd->bhnm", x, signed(x)),
    ),
    "glu": lambda x: (F.glu(signed(x), 1), F.glu(x)),
    "hardshrink": lambda x: F.hardshrink(signed(x), 0.3),
    "inner": lambda x: torch.inner(flat(x), rows),
    "kron": lambda x: torch.kron(x[0, 0], rows),
    "mT": lambda x: x.mT * 2,
    "meshgrid": lambda x: [g + x for g in torch.meshgrid(odd6, vector, indexing="xy")],
    "movedim": lambda x: x.movedim(1, -1) * 2,
    "moveaxis": lambda x: x.moveaxis(1, -1) * 2,
    "mv": lambda x: torch.mv(x[:, 0, 0], vector),
    "narrow": lambda x: x.narrow(1, 1, 2) * 2,
    "outer": lambda x: torch.outer(x[:, 0, 0, 0], vector),
    "ravel": lambda x: x.ravel() * 2,
    "repeat_interleave": lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(3, -1)),
    "rot90": lambda x: x.rot90(1, (2, 3)) * 2,
    "softshrink": lambda x: F.softshrink(signed(x), 0.3),
    "swapdims": lambda x: x.swapdims(1, 2) * 2,
    "tensordot": lambda x: torch.tensordot(x, rows, ([3], [1])),
    "threshold": lambda x: F.threshold(signed(x), 0.2, -3),
    "tile": lambda x: x.tile(2, 1, 1),
}


def test_every_operator_that_is_read_in_parts_has_a_case():
    assert set(PARTS) == program.DECOMPOSED and not set(PARTS) & set(READERS)


@pytest.mark.parametrize("traced", [False, True], ids=["watched", "traced"])
@pytest.mark.parametrize("name", PARTS)
def test_what_pytorch_takes_apart_is_read_in_parts(name, traced):
    """Watched, or by `torch.export`, which a model calls that asks a tensor for something."""
    f = PARTS[name]
    model = One(lambda x: (f(x), x + torch.arange(x.shape[0])[:, None, None, None]) if traced else f(x)).eval()
    graph = capture(model, (torch.rand(5, 4, 6, 6),))
    assert {n.attrs["target"] for n in graph.nodes if n.op == OPAQUE} <= ({"aten.arange.default"} if traced else set())
    fresh = torch.rand(3, 4, 6, 6)
    values, want = run(graph, (fresh,)), torch.utils._pytree.tree_leaves(model(fresh))
    for a, o in zip(want, graph.outputs, strict=True):
        torch.testing.assert_close(values[o], a, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------- what is written in place


def clone_is_written(x):
    y = x.clone()
    y.add_(1)
    return x + y


def what_was_cloned_is_written(x):
    y = x * 2
    z = y.clone()
    y.mul_(3)
    return y, z


def contiguous_copy_is_written(x):
    y = (x * 1).transpose(1, 2)
    z = y.contiguous()
    z.add_(1)
    return y, z


def contiguous_alias_is_written(x):
    y = x * 2
    z = y.contiguous()
    z.mul_(3)
    return y, z


def other_name_of_an_axis_swap_is_written(x):
    y = x * 1
    y.swapaxes(1, 2).add_(1)
    return y


def part_of_a_split_is_written(x):
    y = x * 1
    y.tensor_split(2, 1)[0].add_(1)
    return y


def view_like_another_is_written(x):
    y = x * 1
    y.view_as(x.transpose(1, 2)).add_(torch.arange(6.0))
    return y


def matrix_transpose_is_written(x):
    y = x * 1
    y.mT.add_(torch.arange(6.0))
    return y


def detached_is_written(x):
    y = x * 2
    z = y.detach()
    z += 1
    return y, z


def same_type_is_the_same_tensor(x):
    y = x * 2
    z = y.to(torch.float32)
    z += 1
    return y, z


def copy_of_the_same_type_is_another(x):
    y = x * 2
    z = y.to(torch.float32, copy=True)
    z += 1
    return y, z


def whole_slice_is_the_same_tensor(x):
    y = x * 1
    z = y[:]
    z += 1
    return y, z


def result_goes_to_a_given_tensor(x):
    y = torch.empty_like(x)
    torch.add(x, 1, out=y)
    return y * 2


def every_operator_in_place(x):
    y = signed(x)
    F.hardtanh_(y, -0.9, 0.9)
    y.clamp_(min=-0.5).sub_(1, alpha=2).div_(3).pow_(2).mul_(x).neg_().abs_().sqrt_().add_(1).log_().exp_()
    y.sigmoid_().tanh_().floor_().add_(x).reciprocal_().rsqrt_()
    z = y - 1
    F.elu_(z, 0.5)
    return F.leaky_relu_(z, 0.2), y


def shapes_in_place(x):
    y = x * 1
    y.transpose_(1, 2).unsqueeze_(1).squeeze_(1)
    return y * 2


def cells_are_written(x):
    y = x * 1
    y[:, 1] = x[:, 0]
    y[..., 2:4] = 7
    y[:, index] *= 2
    y[y > 1] = 0.5
    return y


WRITES = [
    f
    for name, f in list(globals().items())
    if getattr(f, "__code__", None)
    and name.endswith(("written", "_same_tensor", "_another", "_given_tensor", "_in_place"))
]


@pytest.mark.parametrize("f", WRITES, ids=lambda f: f.__name__)
def test_what_is_written_in_place_is_seen_by_whoever_shares_its_memory(f):
    example, fresh = torch.rand(2, 4, 6, 6), torch.rand(3, 4, 6, 6)
    graph = capture(One(f).eval(), (example,))
    values = run(graph, (fresh,))
    want = flat_leaves(f(fresh))
    for a, o in zip(want, graph.outputs, strict=True):
        torch.testing.assert_close(values[o], a, rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- whole networks


@pytest.mark.parametrize("name", ZOO)
def test_a_network_computes_what_pytorch_does_on_data_that_the_reader_has_not_seen(name):
    model, batch = make(name)
    batch = batch if isinstance(batch, tuple) else (batch,)
    graph = capture(model, batch)
    fresh = torch.utils._pytree.tree_map(lambda t: torch.randn(3, *t.shape[1:]), batch)
    with torch.no_grad():
        want = torch.utils._pytree.tree_leaves(model(*fresh))
        values = run(graph, torch.utils._pytree.tree_leaves(fresh))
    assert len(want) == len(graph.outputs) > 0
    for a, o in zip(want, graph.outputs, strict=True):
        assert values[o].shape == a.shape
        torch.testing.assert_close(values[o], a, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- nothing is missing


#: what is read of an open size that is no batch, and tried in test_open_sizes.py
OF_OPEN_SIZES = {"arange"}


def test_every_row_of_the_reader_has_cases_that_are_read_by_it(read):
    assert {*CASES, *OF_OPEN_SIZES} == set(READERS)
    assert {name for name, *_ in read.readings} == set(READERS) - OF_OPEN_SIZES


READS_TYPES = ("to", "_to_copy", "type_as")  #: others put a Cast where operands have several types
#: attributes that a reader sets to one value, by reader (its first name), operator and attribute
ONE_VALUE = {
    ("adaptive_max_pool1d", "AvgPool", "ceil_mode"): "windows that cover all",
    ("adaptive_max_pool1d", "AvgPool", "count_include_pad"): "no padding",
    ("adaptive_max_pool1d", "MaxPool", "ceil_mode"): "windows that cover all",
    ("celu", "Elu", "alpha"): "the other alphas are factors around it",
    ("index", "GatherElements", "axis"): "the first axis behind the samples",
    ("scaled_dot_product_attention", "SDPA", "enable_gqa"): "copies are made before it",
    ("scaled_dot_product_attention", "Unsqueeze", "axes"): "heads are the second axis",
    ("scaled_dot_product_attention", "Reshape", "shape"): "as many heads as queries have",
    ("slice_scatter", "Slice", "step"): "what is kept lies together",
    **{(name, "Size", "axis"): "the first axis alone is open" for name in ("expand", "repeat", "zeros", "copy")},
    ("sym_size", "Size", "axis"): "programs ask the input, whose first axis alone is open",
}


def test_every_attribute_that_a_reader_sets_was_tried_with_two_values(read):
    by_reader, first = defaultdict(set), {}
    for name, f, _, _, nodes in read.readings:
        first.setdefault(f, name)
        for n in nodes:
            for k, v in n.attrs.items() if n.op != "Cast" or name in READS_TYPES else ():
                by_reader[first[f], n.op, k].add(repr(v))
    once = {key for key, values in by_reader.items() if len(values) < 2}
    assert sorted(once - set(ONE_VALUE)) == [] and sorted(set(ONE_VALUE) - once) == []


#: arguments that a reader need not look at, because the result's shape or type tells what they said
TOLD_BY_THE_RESULT = {
    "view": "size shape start_dim end_dim dim sizes other dtype",
    "split": "split_size split_sizes chunks sections indices tensor_indices_or_sections",
    "expand": "implicit size other",
    "softmax": "dtype half_to_float",
    "zeros": "self size dtype layout device pin_memory memory_format",
    "copy": "self non_blocking",
    "im2col": "output_size",
    "clone": "memory_format",
    "lift_fresh_copy": "memory_format",
    "cumsum": "dtype",
    "dropout": "train",
    "to": "dtype device layout pin_memory non_blocking copy memory_format other",
}


def test_every_argument_of_every_overload_is_looked_at(read, refused):
    """Or what is left of it shows in the result."""
    asked, arguments = defaultdict(set), defaultdict(set)
    first = {}
    for name, f, *_ in read.readings:
        first.setdefault(f, name)
    for _, f, schema, seen, _ in [*read.readings, *refused.readings]:
        key = first[f], f"{schema.name}.{schema.overload_name}"
        asked[key] |= seen | set(NEUTRAL_ARGUMENTS.split())
        arguments[key] |= {a.name for a in schema.arguments}
    unseen = {
        key: left
        for key, given in arguments.items()
        if (left := given - asked[key] - set(TOLD_BY_THE_RESULT.get(key[0], "").split()))
    }
    assert unseen == {}


#: overloads that `torch.export` never leaves in a program, that a CPU does not have, or whose shapes depend on values
NOT_IN_PROGRAMS = """
    to.prim_Device to.prim_dtype to.prim_other index.Tensor_hacked_twin numpy_T.a
    bmm.dtype mm.dtype copy.Dict_Tensor split.default tensor_split.tensor_indices_or_sections
    arange.start arange.start_step
"""


def test_every_overload_that_takes_a_tensor_was_tried(read, refused):
    tried = read.tried | refused.tried
    missing = []
    for name in READERS:
        packet = getattr(aten, name)
        for overload in packet.overloads():
            schema = getattr(packet, overload)._schema
            makes = all("Tensor" in str(v.type) for v in schema.returns) and schema.returns
            plain = not schema.is_mutable and not any("Dimname" in str(a.type) for a in schema.arguments)
            if makes and plain and f"{name}.{overload}" not in tried:
                missing.append(f"{name}.{overload}")
    assert " ".join(sorted(missing)) == " ".join(sorted(NOT_IN_PROGRAMS.split()))
