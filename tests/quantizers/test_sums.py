"""Sums of codes of one output channel, by hand."""

from __future__ import annotations

import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import code_sums, enlargement
from chipfit.quantizers.stored import Stored, per_output

W = torch.tensor([[[1.0, -2.0], [0.5, 3.0]], [[-1.0, 0.0], [1.0, 0.5]], [[0.0, 0.0], [0.5, 0.0]]])  # [3, 2, 2]


def stored(scale, axis=None, pot=False):
    s = torch.tensor(scale)
    grid = Grid(bits=8, qmin=-128, qmax=127, pot=pot)
    return Stored(format="w8", grid=grid, scale=s, zero_point=torch.zeros_like(s, dtype=torch.int32), axis=axis)


@pytest.mark.parametrize("axis, sums", [(0, [13, 5, 1]), (1, [8, 11]), (2, [8, 11])])
def test_magnitudes_are_summed_over_each_channel(axis, sums):
    """Steps of a half: codes 2, 4, 1, 6; 2, 0, 2, 1; 0, 0, 1, 0."""
    found = code_sums(stored(0.5), W, axis)
    assert found.tolist() == sums and found.dtype is torch.float64


def test_scales_grow_where_their_sum_is_too_large():
    assert enlargement(stored(0.5), W, 13.0) is None
    assert float(enlargement(stored(0.5), W, 12.0)) == pytest.approx(1.01 * 13 / 12)  # one scale: the largest sum
    each = enlargement(stored([0.5, 0.5, 0.5], 0), W, 4.0)
    assert each.tolist() == pytest.approx([1.01 * 13 / 4, 1.01 * 5 / 4, 1])
    assert enlargement(stored([0.5, 0.5, 0.5], 0, pot=True), W, 4.0).tolist() == [4, 2, 1]
    inner = enlargement(stored([0.5, 0.5], 1), W, 10.0)
    assert inner.tolist() == pytest.approx([1, 1.01 * 11 / 10])
    assert float(enlargement(stored(0.5), W, 10.0, axis=1)) == pytest.approx(1.01 * 11 / 10)
    assert float(enlargement(stored(0.5), W, 10.0)) == pytest.approx(1.01 * 13 / 10)  # of axis 0


def test_groups_of_a_transposed_convolution_share_the_scales_of_their_channels():
    scale = torch.tensor([1.0, 2.0])
    assert per_output(scale, 6).tolist() == [1, 2, 1, 2, 1, 2] and per_output(scale, 2) is scale
    assert per_output(scale, 1) is scale and float(per_output(scale[0], 6)) == 1
