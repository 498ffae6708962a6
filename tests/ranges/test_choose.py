"""What a rule is given of a tensor or of its statistics, and what a name stands for."""

import numpy as np
import pytest
import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.calibration.histogram import BINS, Histogram
from chipfit.errors import ConfigError, DataError
from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose, name_of, rule_of, sample_of_stats, sample_of_tensor, statistic_of
from chipfit.ranges.lp import LpRange
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.std import StdRange

A8 = Grid(bits=8, qmin=0, qmax=255, zero="any")
A4 = Grid(bits=4, qmin=0, qmax=15, zero="any")
N4 = Grid(bits=4, qmin=-7, qmax=7)
MIDDLE = BINS // 2


def statistics(counts, low, high, zeros=0, reach=float(MIDDLE)):
    """Bins of width 1 unless told otherwise: bin `MIDDLE + k` holds k .. k + 1."""
    stats = TensorStats("x", low, high, smooth_low=low / 2, smooth_high=high / 2, batches=1)
    stats.histogram = Histogram(reach, zeros=zeros)
    for k, n in counts.items():
        stats.histogram.counts[MIDDLE + k] = n
    return stats


def bins(sample):
    """(low, high, count) of every bin, and the count of zeros."""
    edges, weights = sample.edges[0].tolist(), sample.weights[0].tolist()
    return list(zip(edges[:-1], edges[1:], weights[:-1], strict=True)), weights[-1]


# ---------------------------------------------------------------- statistics


def test_bins_end_where_the_data_do_and_runs_of_empty_ones_are_one():
    sample = sample_of_stats(statistics({-3: 2, 1: 4, 2: 1, 6: 5}, -2.25, 6.5), None)
    found, zeros = bins(sample)
    assert found == [(-2.25, -2, 2), (-2, 1, 0), (1, 2, 4), (2, 3, 1), (3, 6, 0), (6, 6.5, 5)] and zeros == 0
    np.testing.assert_allclose(sample.values[0], [-2.125, -0.5, 1.5, 2.5, 4.5, 6.25, 0])
    assert (float(sample.low), float(sample.high)) == (-2.25, 6.5)
    assert (float(sample.smooth_low), float(sample.smooth_high)) == (-1.125, 3.25)


def test_a_bin_keeps_a_hundredth_of_its_width_at_least():
    found, _ = bins(sample_of_stats(statistics({20: 2, 21: 1, 30: 5}, 20.999, 30.001), None))
    assert found[0] == (pytest.approx(20.99), 21, 2) and found[-1] == (30, pytest.approx(30.01), 5)
    found, _ = bins(sample_of_stats(statistics({20: 2, 30: 5}, 20.98, 30.02), None))
    assert found[0][0] == pytest.approx(20.98) and found[-1][1] == pytest.approx(30.02)
    # an extreme of another batch, before the reach grew, may lie outside the bins that are left
    found, _ = bins(sample_of_stats(statistics({20: 2, 30: 5}, 3.0, 50.0), None))
    assert found[0][0] == 20 and found[-1][1] == 31


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_exact_zeros_are_taken_out_of_the_bin_that_starts_at_zero(zeros):
    stats = statistics({-1: 2, 0: 7, 1: 1}, -0.5, 1.5, zeros)
    found, own = bins(sample_of_stats(stats, None))
    assert [n for *_, n in found] == [2, 7 - zeros, 1] and own == zeros
    assert float(stats.histogram.counts[MIDDLE]) == 7  # what was given stays


def test_exact_zeros_that_are_outliers_are_left_out_with_their_bin():
    found, own = bins(sample_of_stats(statistics({0: 2, 900: 50}, 0.0, 900.5, zeros=2), 1.0))
    assert found == [(900, 900.5, 50)] and own == 0


@pytest.mark.parametrize("full", [766, 767, 768, 769])
def test_bins_of_dense_histograms_are_taken_in_pairs(full):
    counts = {k: float(k % 7 + 1) for k in range(1, full + 1)}
    found, _ = bins(sample_of_stats(statistics(counts, 1.0, float(full + 1)), None))
    if full + 1 <= 768:
        assert found == [(k, k + 1, counts[k]) for k in range(1, full + 1)]
    else:
        pairs = [(k, min(k + 2, full + 1), counts[k] + counts.get(k + 1, 0)) for k in range(1, full + 1, 2)]
        assert found == pairs


def test_without_a_histogram_the_two_ends_are_what_is_known():
    for stats in (TensorStats("x", -2.0, 3.0), statistics({}, -2.0, 3.0)):
        sample = sample_of_stats(stats, None)
        assert sample.values.tolist() == [[-2, 3]] and sample.weights is None and sample.edges is None
        assert (float(sample.low), float(sample.high)) == (-2, 3)


def test_outliers_of_statistics_are_left_out_before_the_rule_sees_them():
    stats = statistics({-200: 1, 2: 50, 3: 50, 900: 1}, -199.5, 900.5)
    sample = sample_of_stats(stats, 2.0)
    assert (float(sample.low), float(sample.high), float(sample.weights.sum())) == (2, 4, 100)
    assert choose(stats, A8, rule="no_clipping", z_threshold=2.0).bounds(A8)[1] < 5
    assert choose(stats, A8, rule="no_clipping").bounds(A8)[1] > 890


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_rows_are_the_channels_of_any_axis(axis):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    sample = sample_of_tensor(x, axis)
    parts = np.moveaxis(x.numpy(), axis, 0).reshape(x.shape[axis], -1)
    np.testing.assert_array_equal(np.sort(sample.values), np.sort(parts))
    np.testing.assert_array_equal(sample.low, parts.min(1))
    np.testing.assert_array_equal(sample.high, parts.max(1))
    assert sample.weights is None and sample.low.dtype is torch.float64


def test_one_range_for_all_is_a_single_row():
    sample = sample_of_tensor(torch.tensor([[1.0, -2.0], [4.0, 0.0]]), None)
    assert sample.values.shape == (1, 4) and (float(sample.low), float(sample.high)) == (-2, 4)


def test_no_copy_is_made_where_channels_lie_first_or_last_in_memory():
    x = torch.randn(3, 4, 5, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    for y, axis in ((x, 0), (last, 0), (last, 1), (x.permute(3, 1, 2, 0), 3)):
        assert sample_of_tensor(y, axis).values.data_ptr() == y.data_ptr()


def test_a_range_of_blocks_has_the_blocks_in_place_of_the_axis():
    x = torch.arange(1.0, 49).view(2, 6, 4)
    q = choose(x, Grid(bits=8, qmin=-127, qmax=127), rule="no_clipping", axis=1, block=3)
    assert q.scale.shape == q.zero_point.shape == (2, 2, 4) and q.scale.is_contiguous()
    np.testing.assert_allclose(q.scale, x.numpy().reshape(2, 2, 3, 4).max(2) / 127, rtol=1e-6)


# ---------------------------------------------------------------- scales


# ---------------------------------------------------------------- rules that are no names


def twice(sample, grid):
    return from_min_max(2 * sample.low, 2 * sample.high, grid)


def test_a_rule_may_be_a_function_of_a_sample_and_a_grid():
    q = choose(torch.tensor([-3.5, 1.0]), N4, rule=twice)
    assert float(q.scale) == 1 and q.scale.shape == q.zero_point.shape == ()
    assert choose(torch.tensor([[-3.5, 1.0], [7.0, 0.0]]), N4, rule=twice, axis=0).scale.tolist() == [1, 2]
    assert (
        rule_of(twice) is twice
        and rule_of("std", k=3.0) == StdRange(k=3.0)
        and rule_of("ClipStdObserver") == StdRange()
    )
    assert (name_of(twice), name_of("std"), name_of(StdRange())) == ("twice", "std", "StdRange(k=2.6)")
    assert [statistic_of(rule) for rule in (twice, "mse", "HMSE")] == ["", "", "importance"]


@pytest.mark.parametrize(
    "rule", [list, StdRange, [1], 7, None, abs, torch.relu, lambda sample: sample, lambda a, b, c: a]
)
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(ConfigError, match="must be a name or a function.*a function of a sample and a grid"):
        rule_of(rule)


def test_a_rule_that_fails_or_returns_no_range_is_named():
    def fails(sample, grid):
        return sample.nothing

    def three(sample, grid):
        return 3

    with pytest.raises(ConfigError, match="The range rule 'fails' fails: AttributeError"):
        choose(torch.ones(3), N4, rule=fails)
    with pytest.raises(DataError, match="The range rule 'three' returned no range.*Got: 3"):
        choose(torch.ones(3), N4, rule=three)


ONE, ZERO = torch.ones(2), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    "scale, zero, message",
    [
        (
            ONE[0],
            ZERO,
            r"a scale of another shape.*Got: torch\.float32\[\].*Allowed: torch\.float32\[2\], one for each",
        ),
        (ONE[:, None], ZERO, r"a scale of another shape.*Got: torch\.float32\[2, 1\]"),
        (ONE, ZERO[:1], r"a zero point of another shape.*Got: torch\.int32\[1\].*torch\.int32\[2\]"),
        (ONE.double(), ZERO, r"a scale of another shape or type.*Got: torch\.float64\[2\]"),
        (0.1, ZERO, "a scale of another shape or type.*Got: float"),
        (ONE * float("nan"), ZERO, "a scale that is not positive.*Got: nan"),
        (-ONE, ZERO, "a scale that is not positive.*Got: -1 to -1"),
    ],
)
def test_a_rule_returns_a_positive_scale_and_a_zero_point_for_each_channel(scale, zero, message):
    def mine(sample, grid):
        return QParams(scale, zero)

    with pytest.raises(DataError, match=f"The range rule 'mine' returned {message}"):
        choose(torch.ones(2, 3), N4, rule=mine, axis=0)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_values_that_are_no_numbers_have_no_range(bad):
    for axis in (None, 0):
        with pytest.raises(DataError, match="A range needs finite values"):
            choose(torch.tensor([[0.0, 1.0], [-1.0, bad]]), N4, rule="no_clipping", axis=axis)
    with pytest.raises(DataError, match=r"A range needs at least one value.*shape \[0, 3\]"):
        choose(torch.zeros(0, 3), N4)


def test_the_table_of_a_look_up_grid_is_fitted_in_steps_of_the_whole_range():
    """-7 .. 7 in steps of 0.5: values of -3.5, 1 and 1.5 are -7, 2 and 3, of which two entries beside 0 serve."""
    grid = Grid(bits=2, qmin=-7, qmax=7, kind="lut", entries=3)
    q = choose(torch.tensor([-3.5, 0.0, 1.0, 1.0, 1.5]), grid, rule=twice)
    assert float(q.scale) == 0.5 and q.table == (-7, 0, 2)
    assert choose(torch.tensor([-3.5, 0.0, 1.0, 1.5, 1.5]), grid).table == (-7, 0, 3)
    given = Grid(bits=2, qmin=-7, qmax=7, kind="lut", entries=3, table=(-7.0, 0.0, 7.0))
    assert choose(torch.tensor([-3.5, 1.0]), given, rule="no_clipping").table is None


def test_the_same_statistics_are_searched_once_and_again_when_they_grow(monkeypatch):
    stats, asked = TensorStats("x"), []
    search = LpRange.__call__
    monkeypatch.setattr(LpRange, "__call__", lambda rule, *given: asked.append(rule.p) or search(rule, *given))
    stats.update(torch.linspace(-1, 1, 999), Need())
    first, second, other = (choose(stats, A8, rule="lp", p=p) for p in (3.0, 3.0, 4.0))
    assert second is first and other is not first and asked == [3.0, 4.0]
    assert choose(stats, A4, rule="lp", p=3.0).scale > 8 * first.scale
    stats.update(torch.linspace(-2, 2, 999), Need())
    assert choose(stats, A8, rule="lp", p=3.0).scale > 1.5 * first.scale
    assert choose(stats.shifted(1.0), A8, rule="lp", p=3.0).zero_point < first.zero_point  # another record, no answers
    assert asked == [3.0, 4.0, 3.0, 3.0, 3.0]
