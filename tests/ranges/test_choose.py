"""What a rule is given of a tensor or of its statistics, and what a name stands for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.calibration.histogram import BINS, Histogram
from chipfit.errors import ConfigError, DataError
from chipfit.quantizers.grids import Grid
from chipfit.ranges import _EDGES, _inside, _of_stats, _of_tensor, choose, name_of, rule_of, statistic_of
from chipfit.ranges.kl import KlRange, _divergence
from chipfit.ranges.lp import LpRange
from chipfit.ranges.no_clipping import NoClippingRange
from chipfit.ranges.percentile import PercentileRange
from chipfit.ranges.qparams import GREATEST_SCALE, LEAST_SCALE, UNSEEN, QParams, finish_scale, from_min_max
from chipfit.ranges.search import Sample
from chipfit.ranges.std import StdRange
from chipfit.registry import lookup

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


def test_settings_that_nobody_gives():
    assert (KlRange().steps, KlRange().lowest) == (40, 0.1)
    assert (LpRange().p, StdRange().k, PercentileRange().share, NoClippingRange().expand) == (2.4, 2.6, 0.9999, True)
    assert [lookup("range", rule).p for rule in ("mse", "mae", "hmse")] == [2, 1, 2]
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).pow(3)
    assert torch.equal(choose(x, N4).scale, choose(x, N4, rule="mse").scale)
    assert not torch.equal(choose(x, N4).scale, choose(x, N4, rule="mae").scale)


# ---------------------------------------------------------------- statistics


def test_bins_end_where_the_data_do_and_runs_of_empty_ones_are_one():
    sample = _of_stats(statistics({-3: 2, 1: 4, 2: 1, 6: 5}, -2.25, 6.5), None)
    found, zeros = bins(sample)
    assert found == [(-2.25, -2, 2), (-2, 1, 0), (1, 2, 4), (2, 3, 1), (3, 6, 0), (6, 6.5, 5)] and zeros == 0
    np.testing.assert_allclose(sample.values[0], [-2.125, -0.5, 1.5, 2.5, 4.5, 6.25, 0])
    assert (float(sample.low), float(sample.high)) == (-2.25, 6.5)
    assert (float(sample.smooth_low), float(sample.smooth_high)) == (-1.125, 3.25)


def test_a_bin_keeps_a_hundredth_of_its_width_at_least():
    found, _ = bins(_of_stats(statistics({20: 2, 21: 1, 30: 5}, 20.999, 30.001), None))
    assert found[0] == (pytest.approx(20.99), 21, 2) and found[-1] == (30, pytest.approx(30.01), 5)
    found, _ = bins(_of_stats(statistics({20: 2, 30: 5}, 20.98, 30.02), None))
    assert found[0][0] == pytest.approx(20.98) and found[-1][1] == pytest.approx(30.02)
    # an extreme of another batch, before the reach grew, may lie outside the bins that are left
    found, _ = bins(_of_stats(statistics({20: 2, 30: 5}, 3.0, 50.0), None))
    assert found[0][0] == 20 and found[-1][1] == 31


@pytest.mark.parametrize("zeros", [0, 1, 3])
def test_exact_zeros_are_taken_out_of_the_bin_that_starts_at_zero(zeros):
    stats = statistics({-1: 2, 0: 7, 1: 1}, -0.5, 1.5, zeros)
    found, own = bins(_of_stats(stats, None))
    assert [n for *_, n in found] == [2, 7 - zeros, 1] and own == zeros
    assert float(stats.histogram.counts[MIDDLE]) == 7  # what was given stays


@pytest.mark.parametrize("full", [_EDGES - 2, _EDGES - 1, _EDGES, _EDGES + 1])
def test_bins_of_dense_histograms_are_taken_in_pairs(full):
    assert _EDGES == 768
    counts = {k: float(k % 7 + 1) for k in range(1, full + 1)}
    found, _ = bins(_of_stats(statistics(counts, 1.0, float(full + 1)), None))
    if full + 1 <= _EDGES:
        assert found == [(k, k + 1, counts[k]) for k in range(1, full + 1)]
    else:
        pairs = [(k, min(k + 2, full + 1), counts[k] + counts.get(k + 1, 0)) for k in range(1, full + 1, 2)]
        assert found == pairs


def test_without_a_histogram_the_two_ends_are_what_is_known():
    for stats in (TensorStats("x", -2.0, 3.0), statistics({}, -2.0, 3.0)):
        sample = _of_stats(stats, None)
        assert sample.values.tolist() == [[-2, 3]] and sample.weights is None and sample.edges is None
        assert (float(sample.low), float(sample.high)) == (-2, 3)


def test_outliers_of_statistics_are_left_out_before_the_rule_sees_them():
    stats = statistics({-200: 1, 2: 50, 3: 50, 900: 1}, -199.5, 900.5)
    sample = _of_stats(stats, 2.0)
    assert (float(sample.low), float(sample.high), float(sample.weights.sum())) == (2, 4, 100)
    assert choose(stats, A8, rule="no_clipping", z_threshold=2.0).bounds(A8)[1] < 5
    assert choose(stats, A8, rule="no_clipping").bounds(A8)[1] > 890


def test_what_lies_between_two_ends_counts_with_the_ends():
    sample = Sample(
        torch.tensor([[1.0, 2, 3, 4], [1, 2, 3, 4]]),
        torch.tensor([[5.0, 6, 7, 8], [1, 2, 3, 4]]),
        torch.tensor([0.5, 0.5]),
        torch.tensor([4.5, 4.5]),
    )
    part = _inside(sample, torch.tensor([2.0, 0.0]), torch.tensor([3.0, 2.5]))
    assert part.weights.tolist() == [[0, 6, 7, 0], [1, 2, 0, 0]]
    assert part.low.tolist() == [2, 0.5] and part.high.tolist() == [3, 2.5]


# ---------------------------------------------------------------- tensors


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_rows_are_the_channels_of_any_axis(axis):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    sample = _of_tensor(x, axis)
    parts = np.moveaxis(x.numpy(), axis, 0).reshape(x.shape[axis], -1)
    np.testing.assert_array_equal(np.sort(sample.values), np.sort(parts))
    np.testing.assert_array_equal(sample.low, parts.min(1))
    np.testing.assert_array_equal(sample.high, parts.max(1))
    assert sample.weights is None and sample.low.dtype is torch.float64


def test_one_range_for_all_is_a_single_row():
    sample = _of_tensor(torch.tensor([[1.0, -2.0], [4.0, 0.0]]), None)
    assert sample.values.shape == (1, 4) and (float(sample.low), float(sample.high)) == (-2, 4)


def test_no_copy_is_made_where_channels_lie_first_or_last_in_memory():
    x = torch.randn(3, 4, 5, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    for y, axis in ((x, 0), (last, 0), (last, 1), (x.permute(3, 1, 2, 0), 3)):
        assert _of_tensor(y, axis).values.data_ptr() == y.data_ptr()


def test_a_range_of_blocks_has_the_blocks_in_place_of_the_axis():
    x = torch.arange(1.0, 49).view(2, 6, 4)
    q = choose(x, Grid(bits=8, qmin=-127, qmax=127), rule="no_clipping", axis=1, block=3)
    assert q.scale.shape == q.zero_point.shape == (2, 2, 4) and q.scale.is_contiguous()
    np.testing.assert_allclose(q.scale, x.numpy().reshape(2, 2, 3, 4).max(2) / 127, rtol=1e-6)


# ---------------------------------------------------------------- rules


def test_the_deviation_is_the_unbiased_one():
    def ends(x, k):
        return choose(torch.tensor(x), A8, rule="std", k=k).bounds(A8)

    assert ends([0.0, 1.0], 0.5)[1] == pytest.approx(0.5 + 0.5 * 0.5**0.5, rel=1e-5)  # of two: 1 / (2 - 1)
    assert ends([2.0], 1.0)[1] == pytest.approx(2.0)
    many = torch.cat([torch.zeros(50), torch.ones(50), torch.full((4,), 9.0)])
    stats = TensorStats("x")
    stats.update(many, Need())
    want = float(many.mean() + 1.5 * many.std())
    assert choose(stats, A8, rule="std", k=1.5).bounds(A8)[1] == pytest.approx(want, rel=1e-2)


@pytest.mark.parametrize(
    ("share", "low", "high"),
    [(1.0, -4, 3), (15 / 16, -4, 3), (7 / 8, -3, 2), (13 / 16, -3, 2), (3 / 4, -2, 1)],
)
def test_a_share_of_eight_values(share, low, high):
    """-4 .. 3, of which each is an eighth: as many as fit wholly into the rest are cut above, and as many below."""
    rule = PercentileRange(share)
    sample = Sample(torch.arange(-4.0, 4).view(1, -1).flip(1), None, torch.tensor([-4.0]), torch.tensor([3.0]))
    q = rule(sample, A8)
    assert float(q.scale) == pytest.approx((high - low) / 255)


def test_a_threshold_that_is_not_expanded_holds_nothing_where_nothing_was_seen():
    rule = NoClippingRange(expand=False)
    for grid, codes in ((N4, 7), (Grid(bits=4, qmin=-8, qmax=7), 8), (Grid(bits=4, qmin=0, qmax=15), 16)):
        assert float(rule(_of_tensor(torch.zeros(3), None), grid).scale) == pytest.approx(UNSEEN / codes)
        assert float(rule(_of_tensor(torch.tensor([0.0, 3.0]), None), grid).scale) == pytest.approx(3 / codes)
    affine = rule(_of_tensor(torch.tensor([-1.0, 1.55]), None), A8)
    assert float(affine.scale) == pytest.approx(0.01) and int(affine.zero_point) == 100


def divergence(x, h, scale, zero, grid):
    """KL in nats, with loops; see `tests/ranges/test_by_hand.py`."""
    low, high, n = x.min(), x.max(), 512
    place = lambda v: np.clip(np.floor((v - low) / (high - low) * n), 0, n - 1).astype(int)
    p = np.bincount(place(x), h, n)
    middle = low + (np.arange(n) + 0.5) * (high - low) / n
    clipped = np.bincount(place(np.clip(middle, (grid.qmin - zero) * scale, (grid.qmax - zero) * scale)), p, n)
    codes = np.clip(np.rint(middle / scale) + zero, grid.qmin, grid.qmax)
    r = np.zeros(n)
    for c in np.unique(codes):
        own = (codes == c) & (clipped > 0)
        r[own] = clipped[codes == c].sum() / max(own.sum(), 1)
    p, r = p / p.sum(), r / r.sum()
    return float(sum(a * np.log(a / max(b, 1e-10)) for a, b in zip(p, r, strict=True) if a > 0))


@pytest.mark.parametrize("weighed", [False, True], ids=["values", "counts"])
def test_divergences_of_candidates_and_channels_are_those_on_paper(weighed):
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, (2, 200)).astype("float32").astype("float64") * [[1.0], [5.0]]
    h = rng.integers(1, 9, x.shape).astype("float64") if weighed else np.ones_like(x)
    x = x.astype("float32").astype("float64")
    sample = Sample(
        torch.from_numpy(x).float(),
        torch.from_numpy(h) if weighed else None,
        torch.from_numpy(x.min(1)),
        torch.from_numpy(x.max(1)),
    )
    scales = torch.tensor([[0.5, 3.0], [0.25, 1.1], [0.1, 0.3]])
    zeros = torch.tensor([[6, 7], [4, 9], [8, 2]], dtype=torch.int32)
    got = _divergence(sample, QParams(scales, zeros), A4)
    for k in range(3):
        for c in range(2):
            want = divergence(x[c], h[c], float(scales[k, c]), int(zeros[k, c]), A4)
            assert float(got[k, c]) == pytest.approx(want, rel=1e-6)


def test_powers_of_two_are_tried_by_divergence_as_halvings():
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)).pow(3)
    pot = Grid(bits=4, qmin=-8, qmax=7, pot=True)
    full = float(choose(x, pot, rule="no_clipping").scale)
    line = {full / 2**k: divergence(x.double().numpy(), np.ones(2000), full / 2**k, 0, pot) for k in range(10)}
    best = float(choose(x, pot, rule="kl").scale)
    assert line[best] == pytest.approx(min(line.values()), rel=1e-2) and best < full


# ---------------------------------------------------------------- scales


def test_scales_lie_between_those_that_kernels_can_multiply():
    assert (LEAST_SCALE, GREATEST_SCALE, UNSEEN) == (2.0**-24, 2.0**100, 1.0)
    assert float(finish_scale(torch.tensor(0.0), A8)) == 2.0**-24
    strict = Grid(bits=8, qmin=0, qmax=255, zero="any", scale_min=2.0**-10)
    loose = Grid(bits=8, qmin=0, qmax=255, zero="any", scale_min=2.0**-30)
    assert float(finish_scale(torch.tensor(1e-6), strict)) == 2.0**-10
    assert float(finish_scale(torch.tensor(1e-9), loose)) == 2.0**-24


def test_a_scale_that_is_a_code_itself_stays_where_it_is_one():
    table = (-1.0, -0.5, -0.25, 0.0, 0.25, 0.5, 1.0)
    log, floats = (Grid(bits=3, qmin=-1, qmax=1, kind=kind, table=table) for kind in ("log", "float"))
    for scale, want in ((4.0, 4.0), (4.000001, 4.0), (4.1, 8.0), (0.3, 0.5)):
        assert float(finish_scale(torch.tensor(scale), log)) == want
    assert float(finish_scale(torch.tensor(0.3), floats)) == pytest.approx(0.3)
    pot = Grid(bits=8, qmin=-128, qmax=127, pot=True)
    scales = torch.tensor([0.25, 0.25 * (1 + 1e-10), 0.2500001], dtype=torch.float64)
    assert finish_scale(scales, pot).tolist() == [0.25, 0.25, 0.5]


def test_ends_over_all_channels():
    q = QParams(torch.tensor([0.5, 2.0]), torch.tensor([10, 250], dtype=torch.int32))
    assert q.bounds(A8) == (-500.0, 122.5)
    assert q.bounds(Grid(bits=2, qmin=0, qmax=3, kind="offset", table=(-1.5, -0.5, 0.5, 1.5)))[1] == -4.25


@pytest.mark.parametrize("ends, zero", [((0.0, 2.0), 0), ((-1e-6, 2.0), 128), ((-2.0, 0.0), 128)])
def test_of_a_set_of_zero_points_data_without_negative_values_take_the_lowest(ends, zero):
    grid = Grid(bits=8, qmin=0, qmax=255, zero=(128, 0))
    assert int(from_min_max(*ends, grid).zero_point) == zero


def test_channels_of_zeros_alone_keep_the_least_scale_beside_others():
    q = from_min_max(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 1.0]), N4)
    assert q.scale.tolist() == pytest.approx([LEAST_SCALE, 1 / 7])
    assert from_min_max(torch.zeros(2), torch.zeros(2), N4).scale.tolist() == pytest.approx([UNSEEN / 7] * 2)


def test_a_bfloat16_scale_is_the_nearest_one():
    grid = Grid(bits=8, qmin=-127, qmax=127, bf16=True)
    assert float(finish_scale(torch.tensor(0.3), grid)) == 0.30078125  # 77 / 256
    assert finish_scale(torch.tensor(0.3), grid).dtype is torch.float32


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


@pytest.mark.parametrize("share", [0.5, 0.2, -0.1, 0.0, 1.001, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="'share' of range rule 'percentile' is out of bounds"):
        PercentileRange(share)


def test_divergences_do_not_depend_on_the_unit_nor_on_how_much_all_counts():
    x = torch.randn(1, 300, generator=torch.Generator().manual_seed(0)).pow(3)
    scale, zero = choose(x[0], A4, rule="kl").scale, choose(x[0], A4, rule="kl").zero_point
    small = choose(x[0] * 2.0**-10, A4, rule="kl")
    assert float(small.scale) == float(scale) * 2.0**-10 and int(small.zero_point) == int(zero)
    low, high = x.double().aminmax(dim=1)
    q = QParams(scale.view(1, 1), zero.view(1, 1))
    once, rarely = (_divergence(Sample(x, torch.full((1, 300), w), low, high), q, A4) for w in (1.0, 2.0**-12))
    torch.testing.assert_close(once, rarely)


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
