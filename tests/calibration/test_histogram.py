"""Histograms that grow and shift, against numpy."""

import numpy as np
import pytest
import torch

from chipfit.calibration.histogram import BINS, LEAST_REACH, Histogram, in_memory_order


def counted(*batches):
    h = Histogram()
    for x in batches:
        h.add(torch.tensor(x), float(np.abs(x).max()))
    return h


@pytest.mark.parametrize(
    ("largest", "reach"), [(0.0, LEAST_REACH), (0.49, 0.5), (0.5, 1.0), (1.0, 2.0), (7.9, 8.0), (8.0, 16.0)]
)
def test_the_reach_is_the_next_power_of_two_above_the_largest(largest, reach):
    h = Histogram()
    h.grow(largest)
    assert h.reach == reach
    h.grow(reach / 2)
    assert h.reach == reach and LEAST_REACH == 2.0**-100
    h.grow(reach)
    assert h.reach == 2 * reach


def test_counts_before_and_after_the_reach_grows_are_those_of_numpy():
    batches = [np.float32([-0.9, 0.1, 0.1, 0.75]), np.float32([3.0, -2.5, 0.0]), np.float32([-9.25, 15.9, 0.0, 0.0])]
    h = counted(*batches)
    want, edges = np.histogram(np.concatenate(batches), BINS, (-16, 16))
    np.testing.assert_array_equal(h.counts, want)
    np.testing.assert_array_equal(h.edges, edges)
    np.testing.assert_allclose(h.centers, (edges[1:] + edges[:-1]) / 2)
    assert h.zeros == 3 and BINS == 2048


@pytest.mark.parametrize("factor", [2.0**-40, 1.0, 2.0**12, 2.0**60])
def test_bins_are_as_fine_whatever_the_unit(factor):
    x = np.float32([-0.9, 0.1, 0.1, 0.75]) * np.float32(factor)
    h = counted(x)
    np.testing.assert_array_equal(h.counts, np.histogram(x, BINS, (-factor, factor))[0])


def test_the_ends_of_the_reach_fall_into_the_last_bins():
    h = Histogram(reach=1.0)
    h.add(torch.tensor([-1.0, -1 + 1.5 / 1024, 0.0, 1 - 0.5 / 1024, 1 - 1.5 / 1024]), 0.99)
    assert h.counts.nonzero()[:, 0].tolist() == [0, 1, 1024, 2046, 2047]


@pytest.mark.parametrize("by", [0.0, 0.25, -0.25, 1.5, -1.5, 40.0, -40.0, 0.0011])
@pytest.mark.parametrize("x", [[-1.5, 0.25, 0.25, 1.75], [1.999], [-1.999]], ids=["both", "high", "low"])
def test_a_shifted_histogram_is_that_of_shifted_values_to_the_nearest_bin(x, by):
    before = counted(np.float32(x))
    h, counts = before.shifted(by), before.counts.clone()
    assert float(h.counts.sum()) == len(x) and h.zeros == 0
    width = 2 * h.reach / BINS
    want = np.sort(np.unique(np.float64(x) + by))
    np.testing.assert_allclose(h.centers[h.counts > 0], want, atol=width * 1.01)
    assert h.counts[h.counts > 0].tolist() == counts[counts > 0].tolist()
    assert h.reach <= max(4.0, 4 * abs(by)) and torch.equal(before.counts, counts)


def test_an_empty_histogram_is_shifted_to_itself():
    assert float(Histogram(2.0).shifted(1.0).counts.sum()) == 0


@pytest.mark.parametrize(
    "make, same",
    [
        (lambda x: x, True),
        (lambda x: x.permute(2, 0, 1), True),
        (lambda x: x[:1], True),
        (lambda x: x[:, :1].transpose(0, 1), False),  # gaps
        (lambda x: x[1:], True),
        (lambda x: x[..., ::2], False),
        (lambda x: x[:1, :1, :1].expand(2, 3, 4), False),  # one number many times
        (lambda x: x.as_strided((1, 12), (99, 1)), True),  # the stride of a single row says nothing
        (lambda x: x[0, 0, 0], True),
    ],
)
def test_only_dense_tensors_are_read_where_they_lie(make, same):
    x = make(torch.arange(24.0).view(2, 3, 4))
    flat = in_memory_order(x)
    assert flat.shape == (x.numel(),) and (flat.data_ptr() == x.data_ptr() or not same)
    assert sorted(flat.tolist()) == sorted(x.flatten().tolist())
    assert not same or flat.tolist() == sorted(flat.tolist())
