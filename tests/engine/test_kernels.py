"""Every canonical operator runs, on the attributes that the table of operators gives it."""

from __future__ import annotations

import inspect
import math
from pkgutil import resolve_name

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from chipfit.engine.kernels import KERNELS, TORCH_KERNELS, execute
from chipfit.errors import DataError
from chipfit.graph.ir import OPAQUE, Node, Ref
from chipfit.graph.ops import OPS

PLAIN = {word.partition("=")[0] for words in TORCH_KERNELS["plain"].values() for word in words.split()}
RENAMED = TORCH_KERNELS["renamed"]


def parameters(function) -> set[str]:
    """Names that a function of Python or torch takes."""
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # torch's own are known by their schemas
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{function.__name__}")
        return {a.name for s in schemas for a in s.arguments}


def test_every_operator_has_one_kernel_and_every_kernel_an_operator():
    assert set(KERNELS) == set(OPS) and not PLAIN & set(RENAMED)


@pytest.mark.parametrize("op", sorted(RENAMED))
def test_a_renamed_attribute_is_the_operators_and_a_parameter_of_torch(op):
    function, names = RENAMED[op]
    ours, theirs = zip(*(name.split("=") for name in names.split()), strict=True)
    assert sorted(ours) == sorted(OPS[op].attrs)
    assert set(theirs) <= parameters(resolve_name(function))


@pytest.mark.parametrize("op", sorted(PLAIN))
def test_torch_takes_the_attributes_of_a_plain_operator_under_their_own_names(op):
    assert set(OPS[op].attrs) <= parameters(KERNELS[op])


@pytest.mark.parametrize("op", sorted(set(OPS) - PLAIN - set(RENAMED)))
def test_a_kernel_takes_the_attributes_of_its_operator_and_no_others(op):
    keywords = [p for p in inspect.signature(KERNELS[op]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert sorted(p.name for p in keywords if p.default is p.empty) == sorted(OPS[op].attrs)


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
    window = {"kernel": (3, 2), "stride": (2, 3), "padding": padding, "ceil_mode": ceil_mode}
    torch_window = ((3, 2), (2, 3))
    got = compute("MaxPool", x, dilation=(1, 2), **window)
    torch.testing.assert_close(
        got, F.max_pool2d(padded(x, padding, -math.inf), *torch_window, dilation=(1, 2), ceil_mode=ceil_mode)
    )
    total, count = (
        F.avg_pool2d(padded(v, padding), *torch_window, ceil_mode=ceil_mode) for v in (x, torch.ones_like(x))
    )
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
        ((2, 3, 5, 4), ((0, 0), (0, 0), (0, 0), (2, 1))),
        ((3, 5, 4), ((0, 0), (1, 3), (2, 0))),
        ((3, 5, 4), ((0, 0), (0, 0), (2, 0))),
        ((5, 4), ((0, 0), (2, 1))),
    ],
)
@pytest.mark.parametrize("mode, name", [("constant", "constant"), ("reflect", "reflect"), ("replicate", "edge")])
def test_padding_of_all_axes(shape, padding, mode, name):
    x = torch.randn(shape)
    more = {"constant_values": 1.5} if mode == "constant" else {}
    want = torch.from_numpy(np.pad(x.numpy(), padding, mode=name, **more))
    assert torch.equal(compute("Pad", x, padding=padding, mode=mode, value=1.5), want)


@pytest.mark.parametrize(
    "axis, start, end, step, want",
    [(1, 1, 4, 2, [1, 3]), (-1, 2, None, 1, [2, 3, 4]), (1, 0, -1, 3, [0, 3]), (1, -2, None, 1, [3, 4])],
)
def test_a_slice_of_one_axis(axis, start, end, step, want):
    got = compute("Slice", torch.arange(5.0).expand(2, 5), axis=axis, start=start, end=end, step=step)
    assert got.tolist() == [want] * 2


@pytest.mark.parametrize(
    "n, mode, name",
    [(n, "nearest", "nearest") for n in (1, 2, 3)]
    + [(1, "linear", "linear"), (2, "linear", "bilinear"), (3, "linear", "trilinear"), (2, "cubic", "bicubic")],
)
@pytest.mark.parametrize("corners", [False, True])
def test_images_are_resized_to_a_size_or_by_a_scale_as_torch_does(n, mode, name, corners):
    x = torch.randn(2, 3, *(5, 4, 3)[:n])
    more = {} if mode == "nearest" else {"align_corners": corners}
    size, scale = (7, 9, 4)[:n], (1.5, 2.3, 1.7)[:n]
    by_size = compute("Resize", x, mode=mode, size=size, scale=None, align_corners=corners)
    assert torch.equal(by_size, F.interpolate(x, size, mode=name, **more))
    by_scale = compute("Resize", x, mode=mode, size=None, scale=scale, align_corners=corners)
    want = F.interpolate(x, scale_factor=scale, mode=name, recompute_scale_factor=False, **more)
    assert torch.equal(by_scale, want)


def test_new_axes_are_put_in_one_after_another():
    assert compute("Unsqueeze", torch.zeros(2, 3), axes=(0, 2)).shape == (1, 2, 1, 3)
    assert compute("Unsqueeze", torch.zeros(2, 3), axes=(-1, 1)).shape == (2, 1, 3, 1)


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


def test_norms_take_their_statistics_where_the_layers_of_torch_do():
    x, w, b = torch.randn(3, 4, 5, 2) * 2 + 1, torch.randn(4), torch.randn(4)
    mean, var = torch.randn(4), torch.rand(4)
    by = [v.view(1, -1, 1, 1) for v in (mean, var, w, b)]
    want = (x - by[0]) / (by[1] + 0.3).sqrt() * by[2] + by[3]
    torch.testing.assert_close(compute("BatchNorm", x, w, b, mean, var, eps=0.3), want)

    def normal(axes, x=x):
        return (x - x.mean(axes, keepdim=True)) / (x.var(axes, unbiased=False, keepdim=True) + 0.3).sqrt()

    torch.testing.assert_close(compute("InstanceNorm", x, w, b, eps=0.3), normal((2, 3)) * by[2] + by[3])
    torch.testing.assert_close(compute("InstanceNorm", x, eps=0.3), normal((2, 3)))
    in_groups = normal((2, 3, 4), x.view(3, 2, 2, 5, 2)).view_as(x)
    torch.testing.assert_close(compute("GroupNorm", x, w, b, groups=2, eps=0.3), in_groups * by[2] + by[3])
    last = torch.randn(5, 2)
    torch.testing.assert_close(
        compute("LayerNorm", x, last, None, normalized_shape=(5, 2), eps=0.3), normal((2, 3)) * last
    )
    rms = x / (x.square().mean((2, 3), keepdim=True) + 0.3).sqrt()
    torch.testing.assert_close(compute("RMSNorm", x, last, normalized_shape=(5, 2), eps=0.3), rms * last)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm_keeps_small_deviations_of_a_large_mean_in_every_layout(layout):
    """A variance of 3e-5 beside a mean square of 2.9, by whose difference float32 would lose a hundredth of it."""
    x = 1.7 + 0.02 * torch.rand(4, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    groups = x.double().view(4, 2, -1)
    want = (groups - groups.mean(2, True)) / (groups.var(2, unbiased=False, keepdim=True) + 1e-5).sqrt()
    got = compute("GroupNorm", x.contiguous(memory_format=layout), None, None, groups=2, eps=1e-5)
    torch.testing.assert_close(got.double(), want.view(x.shape), rtol=0, atol=1e-4)


def test_operators_of_one_expression():
    x = torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(compute("GlobalAvgPool", x), x.mean((2, 3), keepdim=True))
    assert compute("GlobalAvgPool", x[..., 0]).shape == (2, 3, 1)
    assert torch.equal(compute("AdaptiveAvgPool", x, output_size=(2, 3)), F.adaptive_avg_pool2d(x, (2, 3)))
    assert torch.equal(compute("AdaptiveMaxPool", x[0], output_size=(2,)), F.adaptive_max_pool1d(x[0], 2))
    assert compute("Concat", x, x[:, :1], axis=1).shape == (2, 4, 5, 4)
    assert compute("Stack", x, x, axis=1).shape == (2, 2, 3, 5, 4)
    assert compute("Size", x, axis=-2) == 5
    assert compute("Identity", x) is x and compute("Requantize", x) is x
    assert compute("Cast", x, dtype="float16").dtype == torch.float16
    index = torch.randint(3, (2, 2, 5, 4), dtype=torch.int32)
    want = torch.from_numpy(np.take_along_axis(x.numpy(), index.numpy(), 1))
    assert torch.equal(compute("GatherElements", x, index, axis=1), want)


def test_dropout_drops_nothing_unless_it_trains():
    x = torch.ones(1000)
    assert torch.equal(compute("Dropout", x, p=0.5), x)
    assert set(compute("Dropout", x, p=0.5, training=True).tolist()) == {0.0, 2.0}


def test_a_node_gives_as_many_results_as_torch_does():
    split = Node("n", "Split", ("x",), ("a", "b"), {"axis": 0, "sizes": (1, 2)})
    assert [len(y) for y in execute(split, [torch.zeros(3)])] == [1, 2]
    called = Node("n", OPAQUE, ("x",), ("y",), {"target": "aten.roll.default", "args": [Ref(0), [1]], "kwargs": {}})
    (y,) = execute(called, [torch.arange(3)])
    assert y.tolist() == [2, 0, 1]
