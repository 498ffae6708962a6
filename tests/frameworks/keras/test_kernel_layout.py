"""Kernels in both layouts, against numpy."""

import numpy as np
import pytest
import torch

from chipfit.frameworks.keras.kernel_layout import to_canonical, to_keras


def numbered(*shape):
    return torch.arange(float(np.prod(shape))).view(shape)


@pytest.mark.parametrize("layout", ["conv", "transposed"])
@pytest.mark.parametrize(
    "shape, order", [((3, 2, 7), (2, 1, 0)), ((3, 5, 2, 7), (3, 2, 0, 1)), ((2, 3, 4, 5, 6), (4, 3, 0, 1, 2))]
)
def test_channels_come_last_in_keras_and_first_here(layout, shape, order):
    kernel = numbered(*shape)
    found = to_canonical(layout, kernel)
    np.testing.assert_array_equal(found, kernel.numpy().transpose(order))
    assert found.is_contiguous() and to_keras(layout, found).is_contiguous()
    assert torch.equal(to_keras(layout, found), kernel) and torch.equal(to_keras(layout, found, 2), kernel)


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 5, 2, 4), (3, 5, 1, 4)])
def test_a_depthwise_kernel_has_a_channel_for_each_pair(shape):
    """[*space, C, M]: channel c M + m."""
    *space, c, m = shape
    kernel = numbered(*shape)
    found = to_canonical("depthwise", kernel)
    assert found.shape == (c * m, 1, *space) and found.is_contiguous()
    for i in range(c):
        for j in range(m):
            assert torch.equal(found[i * m + j, 0], kernel[..., i, j])
    assert torch.equal(to_keras("depthwise", found, c), kernel)
    assert to_keras("depthwise", found).shape == (*space, 1, c * m)  # of one input channel unless it is said


def test_a_matrix_is_turned_and_everything_else_stays():
    w, v = numbered(3, 5), numbered(2, 3, 4)
    assert torch.equal(to_canonical("linear", w), w.t()) and torch.equal(to_keras("linear", w.t()), w)
    assert to_canonical("linear", w).is_contiguous() and to_keras("linear", w).is_contiguous()
    assert to_canonical("", v) is v and to_keras("", v) is v
