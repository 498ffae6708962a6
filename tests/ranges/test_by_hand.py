"""Range rules against numpy: quantiles, deviations, and searches by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.quantizers.grids import Grid
from chipfit.ranges import _of_stats, choose
from chipfit.ranges.qparams import LEAST_SCALE, QParams, finish_scale, from_min_max
from chipfit.ranges.search import ALL, FEW, Sample, _binned, errors

A8 = Grid(bits=8, qmin=0, qmax=255, zero="any")
A4 = Grid(bits=4, qmin=0, qmax=15, zero="any")
S8 = Grid(bits=8, qmin=-128, qmax=127)
N8 = Grid(bits=8, qmin=-127, qmax=127)
N4 = Grid(bits=4, qmin=-7, qmax=7)
U8 = Grid(bits=8, qmin=0, qmax=255)
P8 = Grid(bits=8, qmin=-128, qmax=127, pot=True)


def numbers(q):
    return float(q.scale), int(q.zero_point)


# ---------------------------------------------------------------- from ends to a grid


@pytest.mark.parametrize(
    "low, high, grid, scale, zero",
    [
        (-1.0, 4.1, A8, 5.1 / 255, 50),  # z = rint(1 / 0.02)
        (2.0, 5.1, A8, 5.1 / 255, 0),  # widened to hold 0
        (-5.1, -2.0, A8, 5.1 / 255, 255),
        (-2.0, 1.0, S8, 2.0 / 128, 0),  # the negative end has one code more
        (-1.0, 2.0, S8, 2.0 / 127, 0),
        (-2.0, 1.0, N8, 2.0 / 127, 0),
        (0.5, 2.55, U8, 2.55 / 255, 0),
        (-3.0, 2.55, U8, 2.55 / 255, 0),  # no code for what is below 0
        (-0.9, 0.7, P8, 2.0**-7, 0),  # 0.9 / 128 = 2^-7.15, the next power of two above
        (-1.0, 0.99, P8, 2.0**-7, 0),  # 1 / 128 and 0.99 / 127 just below
        (-1.001, 0.0, P8, 2.0**-6, 0),
        (-1.0, 2.0, Grid(bits=8, qmin=0, qmax=255, zero=128), 2.0 / 127, 128),
        (-1.0, 2.0, Grid(bits=8, qmin=0, qmax=255, zero=(0, 128)), 2.0 / 127, 128),
        (-2.0, 1.0, Grid(bits=8, qmin=0, qmax=255, zero=128), 2.0 / 128, 128),
        (-2.0, 1.0, Grid(bits=8, qmin=0, qmax=255, zero=(0, 128)), 2.0 / 128, 128),
        (1.0, 2.55, Grid(bits=8, qmin=0, qmax=255, zero=(0, 128)), 2.55 / 255, 0),
        (0.0, 0.0, A8, 1.0 / 255, 0),  # nothing was seen
        (0.0, 0.0, S8, 1.0 / 127, 0),
        (0.0, 0.0, P8, 2.0**-6, 0),  # 1 / 127 is above 2^-7
        (0.0, 1e-9, A8, LEAST_SCALE, 0),
        (-1.0, 1.0, Grid(bits=8, qmin=-128, qmax=127, scale_min=0.25), 0.25, 0),
    ],
)
def test_the_least_scale_that_holds_both_ends_and_zero(low, high, grid, scale, zero):
    found, z = numbers(from_min_max(low, high, grid))
    assert found == pytest.approx(scale, rel=1e-6) and z == zero


def test_ends_of_each_channel_make_a_grid_each():
    q = from_min_max(torch.tensor([-1.0, -4.0]), torch.tensor([1.27, 1.0]), N8)
    assert q.scale.tolist() == pytest.approx([0.01, 4 / 127]) and q.zero_point.tolist() == [0, 0]
    low, high = from_min_max(torch.tensor([-1.0, -2.55]), torch.tensor([4.1, 0.0]), A8).bounds(A8)
    assert (low, high) == pytest.approx((-2.55, 4.1), abs=1e-6)


def test_scales_are_float32_and_no_power_of_two_is_missed_by_rounding():
    assert finish_scale(torch.tensor(0.125), P8) == 0.125 and finish_scale(torch.tensor(0.126), P8) == 0.25
    assert (
        finish_scale(torch.tensor(1e-30), A8) == LEAST_SCALE
        and finish_scale(torch.tensor(0.3), A8).dtype is torch.float32
    )


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize("share, low, high", [(0.99, -490, 489), (0.75, -250, 249), (1.0, -500, 499)])
def test_a_percentile_leaves_out_as_many_values_on_each_side(share, low, high):
    """Of -500..499 the share 0.99 leaves 10 below the lower end and 10 above the upper one."""
    x = torch.arange(-500.0, 500.0)[torch.randperm(1000)]
    scale, zero = numbers(choose(x, A8, rule="percentile", share=share))
    assert scale == pytest.approx((high - low) / 255) and zero == round(-low / ((high - low) / 255))


def test_a_percentile_of_counts_is_that_of_the_values():
    """0 .. 9, of which 9 was seen 91 times and each other once: 91 % lie at 9, and 5 % at or below 4."""
    stats = TensorStats("x")
    stats.update(torch.cat([torch.arange(9.0), torch.full((91,), 9.0)]), Need())
    scale, _ = numbers(choose(stats, U8, rule="percentile", share=0.95))
    assert scale == pytest.approx(9 / 255, rel=2e-3)
    stats = TensorStats("x")
    stats.update(torch.cat([torch.zeros(960), torch.ones(30), torch.full((10,), 8.0)]), Need())
    scale, _ = numbers(choose(stats, U8, rule="percentile", share=0.98))
    assert scale == pytest.approx(1 / 255, rel=1e-2)


@pytest.mark.parametrize("k", [1.0, 2.6])
def test_so_many_standard_deviations_around_the_mean(k):
    x = torch.randn(1000) * 2 + 0.5
    mean, sd = float(x.double().mean()), float(x.double().std())
    scale, zero = numbers(choose(x, A8, rule="std", k=k))
    low, high = max(mean - k * sd, float(x.min())), min(mean + k * sd, float(x.max()))
    assert scale == pytest.approx((high - low) / 255, rel=1e-5) and zero == round(-low / scale)


def test_the_smoothed_range_is_that_of_moving_averages():
    stats = TensorStats("x")
    for high in (1.0, 11.0):  # 1, then 0.9 + 1.1
        stats.update(torch.tensor([-1.0, high]), Need())
    scale, _ = numbers(choose(stats, A8, rule="smooth_min_max"))
    assert scale == pytest.approx((2.0 + 1.0) / 255, rel=1e-6)


def test_a_threshold_that_is_not_expanded_is_the_largest_magnitude():
    x = torch.tensor([-1.0, 2.0])
    assert numbers(choose(x, S8, rule="no_clipping"))[0] == pytest.approx(2 / 127)
    assert numbers(choose(x, S8, rule="no_clipping", expand=False))[0] == pytest.approx(2 / 128)
    assert numbers(choose(torch.tensor([0.0, 2.0]), U8, rule="no_clipping", expand=False))[0] == pytest.approx(2 / 256)
    assert numbers(choose(torch.tensor([-4.0, 2.0]), S8, rule="no_clipping", expand=False))[0] == pytest.approx(4 / 128)


# ---------------------------------------------------------------- searches


def error(x, scale, zero, grid, p):
    q = np.clip(np.rint(x / scale) + zero, grid.qmin, grid.qmax)
    return float((np.abs(x - (q - zero) * scale) ** p).mean())


def brute(x, grid, p):
    """Least mean |x - q|^p over dense candidates: one end for symmetric grids, two for affine ones."""
    top, bottom = max(float(x.max()), 0.0), min(float(x.min()), 0.0)
    out = np.inf
    if grid.zero == 0:
        full = max(top / grid.qmax, bottom / grid.qmin if grid.qmin else 0.0)
        for f in np.linspace(0.02, 1.05, 1500):
            out = min(out, error(x, full * f, 0, grid, p))
        return out
    for a in np.linspace(0.03, 1.05, 60):
        for b in np.linspace(0.03, 1.05, 60):
            s = (top * a - bottom * b) / (grid.qmax - grid.qmin)
            out = min(out, error(x, s, np.clip(np.rint(grid.qmin - bottom * b / s), grid.qmin, grid.qmax), grid, p))
    return out


def heavy(n, seed=0):
    """A bell with long tails of both signs, longer above."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2.5, n)
    return np.where(x > 0, 1.5 * x, x).astype("float32")


@pytest.mark.parametrize("rule, p", [("mse", 2.0), ("mae", 1.0), ("lp(p=3)", 3.0), ("lp(p=2.4)", 2.4)])
@pytest.mark.parametrize("grid", [N4, N8, A4, S8], ids=["n4", "n8", "a4", "s8"])
def test_a_search_is_as_good_as_trying_everything(rule, p, grid):
    """Raw values, few enough for an exact error."""
    x = heavy(600)
    scale, zero = numbers(choose(torch.from_numpy(x), grid, rule=rule))
    found, least = error(x, scale, zero, grid, p), brute(x, grid, p)
    full = from_min_max(float(x.min()), float(x.max()), grid)
    assert found <= 1.02 * least
    assert grid.bits == 8 or found < 0.85 * error(x, *numbers(full), grid, p)


@pytest.mark.parametrize("rest", [0.65, 0.375, 0.24, 0.1, 0.04])
@pytest.mark.parametrize("far", [(-1.0, 1.0), (1.0,), (-1.0,)], ids=["both", "high", "low"])
def test_few_values_far_out_are_clipped_however_far_they_are(rest, far):
    x = np.concatenate([np.linspace(-rest, rest, 999), far]).astype("float32")
    scale, zero = numbers(choose(torch.from_numpy(x), A4, rule="mae"))
    assert error(x, scale, zero, A4, 1.0) <= 1.02 * brute(x, A4, 1.0)


@pytest.mark.parametrize("rule, p", [("mse", 2.0), ("mae", 1.0)])
@pytest.mark.parametrize("grid", [N4, A4], ids=["n4", "a4"])
@pytest.mark.parametrize("how", ["histogram", "many values"])
def test_a_search_in_bins_is_nearly_as_good(rule, p, grid, how):
    x = heavy(16000 if how == "histogram" else 20000, seed=2)
    x[::3] = 0.0  # exact zeros, which cost nothing
    t = torch.from_numpy(x)
    source = t
    if how == "histogram":
        source = TensorStats("x")
        for part in t.split(8000):
            source.update(part, Need())
    scale, zero = numbers(choose(source, grid, rule=rule))
    assert error(x, scale, zero, grid, p) <= 1.06 * brute(x, grid, p)


def test_a_search_along_channels_is_one_for_each():
    w = torch.from_numpy(np.stack([heavy(400, k) * 4.0**k for k in range(3)]))
    q = choose(w.t(), N4, rule="mse", axis=1)
    for k in range(3):
        one = choose(w[k], N4, rule="mse")
        assert float(q.scale[k]) == pytest.approx(float(one.scale), rel=1e-6)
        assert error(w[k].numpy(), float(q.scale[k]), 0, N4, 2.0) <= 1.02 * brute(w[k].numpy(), N4, 2.0)


def test_power_of_two_grids_try_halvings():
    x = torch.from_numpy(heavy(500, 3))
    scale, _ = numbers(choose(x, Grid(bits=4, qmin=-8, qmax=7, pot=True), rule="mse"))
    grid = Grid(bits=4, qmin=-8, qmax=7)
    tried = {2.0**k: error(x.numpy(), 2.0**k, 0, grid, 2.0) for k in range(-8, 6)}
    assert scale == min(tried, key=tried.get)


def divergence(x, scale, zero, grid, bins=512):
    """KL(p || r): p counts x in bins over its range; r is p after clipping, each code's mass spread over the occupied
    bins that it covers. Migacz 2017, with loops."""
    low, high = float(x.min()), float(x.max())
    width = (high - low) / bins

    def at(v):
        return int(np.clip(np.floor((v - low) / (high - low) * bins), 0, bins - 1))

    p, clipped = np.zeros(bins), np.zeros(bins)
    for v in x:
        p[at(v)] += 1
    middle = low + (np.arange(bins) + 0.5) * width
    first, last = (grid.qmin - zero) * scale, (grid.qmax - zero) * scale
    for m, n in zip(middle, p):
        clipped[at(min(max(m, first), last))] += n
    codes = np.clip(np.rint(middle / scale) + zero, grid.qmin, grid.qmax)
    r = np.zeros(bins)
    for c in np.unique(codes):
        mine = (codes == c) & (clipped > 0)
        if mine.any():
            r[mine] = clipped[codes == c].sum() / mine.sum()
    p, r = p / p.sum(), r / r.sum()
    return float(sum(a * np.log(a / max(b, 1e-10)) for a, b in zip(p, r) if a > 0))


@pytest.mark.parametrize("grid", [N8, A4], ids=["n8", "a4"])
def test_kullback_leibler_takes_the_range_with_the_least_divergence(grid):
    x = heavy(3000, 5)
    tried = {}
    for f in np.linspace(1.0, 0.1, 40):
        q = from_min_max(float(x.min()) * f, float(x.max()) * f, grid)
        tried[float(q.scale)] = divergence(x, *numbers(q), grid)
    scale, _ = numbers(choose(torch.from_numpy(x), grid, rule="kl"))
    assert tried[scale] == pytest.approx(min(tried.values()), rel=1e-3)
    assert grid.bits == 8 or min(tried.values()) < tried[max(tried)]  # clipping pays


@pytest.mark.parametrize("zeros", [1, 3])
def test_zeros_of_a_histogram_count_at_zero_and_not_in_the_middle_of_a_bin(zeros):
    stats = TensorStats("x")
    stats.update(torch.tensor([-1.0, 2.0, *[0.0] * zeros]), Need(histogram=True))
    sample = _of_stats(stats, None)
    assert float(sample.values[0, -1]) == 0 and float(sample.weights[0, -1]) == zeros
    assert float(sample.weights.sum()) == zeros + 2
    assert sorted(float(v) for v, w in zip(sample.values[0], sample.weights[0]) if w) == pytest.approx(
        [-1, 0, 2], abs=0.01
    )


def test_large_weights_of_affine_channels_are_searched_in_a_histogram_of_each():
    """Normal numbers in 16 codes: clipping gains a fifth or more, and the middles lie where each channel's do."""
    rows = FEW + 1 + ALL // 2
    x = torch.randn(3, rows, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [0.1], [3.0]])
    x[2] += 2.0
    low, high = x.double().aminmax(dim=1)
    bins = _binned(Sample(x, None, low, high))
    assert bins.values.shape == bins.weights.shape and bins.weights.sum(1).tolist() == [rows] * 3
    mean, width = (bins.values * bins.weights).sum(1) / rows, (high - low) / bins.values.shape[1]
    assert bool(((mean - x.mean(1)).abs() < 0.1 * width).all())
    found, whole = (choose(x, A4, rule=rule, axis=0) for rule in ("mse", "no_clipping"))

    def error(q):
        s, z = q.scale.unsqueeze(1), q.zero_point.unsqueeze(1)
        codes = (torch.round(x / s) + z).clamp(0, 15)
        return ((codes - z) * s - x).square().mean(1)

    assert bool((error(found) < 0.8 * error(whole)).all())


def test_the_error_of_weighed_values_is_their_mean_by_weight_of_each_channel():
    values, weights = torch.tensor([[1.0, 3.5], [2.25, 0.5]]), torch.tensor([[3.0, 1.0], [2.0, 6.0]])
    ends = values.amin(1).double(), values.amax(1).double()
    grid = Grid(bits=8, qmin=-128, qmax=127, rounding="floor")
    q = QParams(torch.tensor([[1.0, 1.0], [2.0, 0.5]]), torch.zeros(2, 2, dtype=torch.int32))
    found = errors(Sample(values, weights, *ends), q, grid, 2.0)
    # floored in steps of 1: 0 and 0.5; 0.25 and 0.5. In steps of 2 and of 0.5: 1 and 1.5; 0.25 and 0
    by_hand = [[0.25 / 4, (2 * 0.0625 + 6 * 0.25) / 8], [(3 + 2.25) / 4, 2 * 0.0625 / 8]]
    torch.testing.assert_close(found.double(), torch.tensor(by_hand, dtype=torch.float64))
