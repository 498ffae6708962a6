"""Every canonical operator runs, on the attributes that the table of operators gives it."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chipfit.engine.kernels import KERNELS, execute
from chipfit.engine.recurrent import lstm
from chipfit.errors import DataError
from chipfit.graph.ir import Node
from chipfit.operators.table import OPS


def test_every_operator_has_one_kernel_and_every_kernel_an_operator():
    assert set(KERNELS) == set(OPS)


# ---------------------------------------------------------------- numbers, against torch without padding and numpy

#: both sides alike, and each axis padded by other numbers
EVEN, UNEVEN = ((1, 1), (2, 2), (0, 0)), ((1, 2), (2, 0), (0, 3))


def compute(op, *operands, **attrs):
    (y,) = execute(Node("n", op, tuple("abcdef"[: len(operands)]), ("y",), attrs), operands)
    return y


def padded(x, padding, value=0.0):
    return torch.from_numpy(np.pad(x.numpy(), [(0, 0), (0, 0), *padding], constant_values=value))


@pytest.mark.parametrize("n, padding", [(n, p[:n]) for n in (1, 2, 3) for p in (EVEN, UNEVEN)])
def test_convolutions_pad_each_side_by_its_own_number(n, padding):
    x, w, b = torch.randn(2, 4, *(9, 8, 7)[:n]), torch.randn(6, 2, *(2, 3, 1)[:n]), torch.randn(6)
    attrs = {"stride": (2, 1, 3)[:n], "dilation": (1, 2, 1)[:n], "groups": 2}
    f = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    for more in ((b,), ()):
        want = f(padded(x, padding), w, *more, **attrs)
        torch.testing.assert_close(compute(f"Conv{n}D", x, w, *more, padding=padding, **attrs), want)


@pytest.mark.parametrize("n, padding", [(n, p[:n]) for n in (1, 2, 3) for p in (EVEN, UNEVEN)])
def test_the_padding_of_transposed_convolutions_trims_each_side_by_its_own_number(n, padding):
    x, w, b = torch.randn(2, 4, *(4, 5, 3)[:n]), torch.randn(4, 3, *(4, 3, 5)[:n]), torch.randn(6)
    attrs = {"stride": (2, 3, 1)[:n], "dilation": (1, 2, 2)[:n], "groups": 2, "output_padding": (1, 2, 0)[:n]}
    f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    whole = f(x, w, b, **attrs)
    inner = (slice(lo, size - hi) for (lo, hi), size in zip(padding, whole.shape[2:], strict=True))
    torch.testing.assert_close(compute(f"TransposeConv{n}D", x, w, b, padding=padding, **attrs), whole[:, :, *inner])


@pytest.mark.parametrize("padding", [((1, 1), (0, 0)), ((1, 0), (0, 1)), ((0, 0), (1, 1))])
@pytest.mark.parametrize("ceil_mode", [False, True])
def test_pools_over_padded_windows(padding, ceil_mode):
    """Padding is never the largest, and counts as a zero or not at all."""
    x = -torch.rand(2, 3, 7, 10) - 1
    how = {"stride": (2, 3), "ceil_mode": ceil_mode}
    window = {"kernel": (3, 2), "padding": padding, **how}
    want = F.max_pool2d(padded(x, padding, -math.inf), (3, 2), dilation=(1, 2), **how)
    torch.testing.assert_close(compute("MaxPool", x, dilation=(1, 2), **window), want)
    total, count = (F.avg_pool2d(padded(v, padding), (3, 2), **how) for v in (x, torch.ones_like(x)))
    torch.testing.assert_close(compute("AvgPool", x, count_include_pad=False, **window), total / count)
    torch.testing.assert_close(compute("AvgPool", x, count_include_pad=True, **window), total)


@pytest.mark.parametrize("axes, keepdims", [((1,), False), ((0, 2), False), ((-1, 0), True), ((2, 1), True)])
def test_a_product_over_several_axes(axes, keepdims):
    x = torch.randn(2, 3, 4)
    want = torch.from_numpy(x.numpy().prod(axis=axes, keepdims=keepdims))
    torch.testing.assert_close(compute("ReduceProd", x, axes=axes, keepdims=keepdims), want)


@pytest.mark.parametrize(
    "shape, padding",
    [
        ((2, 3, 5, 4), ((0, 0), (0, 0), (1, 3), (2, 0))),
        ((2, 3, 5, 4), ((0, 0), (1, 1), (1, 3), (2, 0))),
        ((3, 5, 4), ((0, 0), (1, 3), (2, 0))),
        ((5, 4), ((0, 0), (2, 1))),
    ],
)
@pytest.mark.parametrize("mode, name", [("constant", "constant"), ("reflect", "reflect"), ("replicate", "edge")])
def test_padding_of_all_axes(shape, padding, mode, name):
    x = torch.randn(shape)
    more = {"constant_values": 1.5} if mode == "constant" else {}
    want = torch.from_numpy(np.pad(x.numpy(), padding, mode=name, **more))
    assert torch.equal(compute("Pad", x, padding=padding, mode=mode, value=1.5), want)


@pytest.mark.parametrize("shape, axis", [((4, 3), 0), ((4,), 0), ((4, 3, 2), 0), ((3, 4, 2), 1), ((3, 4), -1)])
def test_rows_are_counted_along_any_axis(shape, axis):
    table, index = torch.randn(shape), torch.tensor([[3, 0], [1, 1]])
    want = torch.from_numpy(np.take(table.numpy(), index.numpy(), axis))
    assert torch.equal(compute("Gather", table, index, axis=axis), want)
    if axis == 0:
        assert torch.equal(compute("Embedding", table, index), want)
    with pytest.raises(DataError, match=r"(?s)Ids are out of the table's range.*1 to 4.*0 to 3"):
        compute("Gather", table, torch.tensor([1, 4]), axis=axis)


@pytest.mark.parametrize(
    "shape, sizes, want",
    [((0, -1), (), (2, 12)), ((None, 4, None), (3, 2), (3, 4, 2)), ((4, 0, None), (2,), (4, 3, 2)), ((-1,), (), (24,))],
)
def test_shapes_take_open_sizes_in_order_and_keep_those_that_are_0(shape, sizes, want):
    x = torch.randn(2, 3, 4)
    assert torch.equal(compute("Reshape", x, *sizes, shape=shape), x.reshape(want))
    y = torch.randn(1, 3, 1)
    assert compute("Expand", y, 5, shape=(None, 0, 2)).shape == (5, 3, 2)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm_keeps_small_deviations_of_a_large_mean_in_every_layout(layout):
    """A variance of 3e-5 beside a mean square of 2.9, by whose difference float32 would lose a hundredth of it."""
    x = 1.7 + 0.02 * torch.rand(4, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    groups = x.double().view(4, 2, -1)
    want = (groups - groups.mean(2, True)) / (groups.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
    got = compute("GroupNorm", x.contiguous(memory_format=layout), None, None, groups=2, eps=1e-5)
    torch.testing.assert_close(got.double(), want.view(x.shape), rtol=0, atol=1e-4)


def test_the_shapes_of_a_long_sequence_are_computed_without_its_steps():
    x, w, r = (torch.empty(s, device="meta") for s in ((2, 10**6, 3), (16, 3), (16, 4)))
    assert [y.shape for y in lstm(x, w, r, gates="ifgo", reverse=True)] == [(2, 10**6, 4), (2, 4), (2, 4)]


def test_dropout_drops_nothing_unless_it_trains():
    x = torch.ones(1000)
    assert torch.equal(compute("Dropout", x, p=0.5), x)
    assert set(compute("Dropout", x, p=0.5, training=True).tolist()) == {0.0, 2.0}
