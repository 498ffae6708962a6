"""Range rules against worked numbers of MCT and MQBench, numpy, scikit-learn, and searches by brute force."""

import numpy as np
import pytest
import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.ranges import choose
from chipfit.ranges.kl import divergence
from chipfit.ranges.percentile import PercentileRange
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import ALL, FEW, Sample
from chipfit.registry import registered
from tests.build import randn

A8, A4 = (Grid(bits=b, qmin=0, qmax=2**b - 1, zero="any") for b in (8, 4))
N8, N4 = (Grid(bits=b, qmin=1 - 2 ** (b - 1), qmax=2 ** (b - 1) - 1) for b in (8, 4))


def signed(bits, pot=False):
    return Grid(bits=bits, qmin=-(1 << bits - 1), qmax=(1 << bits - 1) - 1, pot=pot)


def unsigned(bits, pot=False):
    return Grid(bits=bits, qmin=0, qmax=(1 << bits) - 1, pot=pot)


def numbers(q):
    return float(q.scale), int(q.zero_point)


def seen(*batches):
    stats = TensorStats("x")
    for batch in batches:
        stats.update(torch.as_tensor(batch), Need())
    return stats


def threshold(q, grid):
    """Half range of a symmetric grid: scale times 2^(bits - 1), or 2^bits without sign."""
    return float(q.scale.max()) * (-grid.qmin if grid.signed else grid.qmax + 1)


def lost(x, q, grid, p=2, axis=None):
    return float((x - fake_quantize(x, q.scale, q.zero_point, grid, axis)).abs().pow(p).mean())


# ---------------------------------------------------------------- thresholds that users of MCT know


@pytest.mark.parametrize(
    ("x", "grid", "t"),
    [
        ([-1.0, 9.0], signed(2, pot=True), 16),
        ([-1.0, 9.0], signed(2), 9),
        *(([0.0, x], unsigned(8, pot=True), t) for x, t in ((0.3, 0.5), (0.5, 0.5), (0.51, 1), (1.0001, 2), (3, 4))),
        ([-1.0, 2.0], signed(8), 2),
        ([0.0, 2.0], unsigned(8), 2),
        ([-4.0, 2.0], signed(8), 4),
        ([0.0, 3.0], N4, 3),
        ([0.0, 0.0], signed(4), 1),  # nothing was seen
    ],
)
def test_a_threshold_that_is_not_expanded_is_the_largest_magnitude(x, grid, t):
    assert threshold(choose(torch.tensor(x), grid, rule="no_clipping", expand=False), grid) == pytest.approx(t)


@pytest.mark.parametrize(("bits", "t"), [(8, 1.007874), (4, 1.142857), (2, 2.0)])
def test_the_maximum_gets_a_code_of_its_own(bits, t):
    q = choose(torch.tensor([-0.5, 1.0]), signed(bits), rule="no_clipping")
    assert threshold(q, signed(bits)) == pytest.approx(t, abs=1e-6)


def test_each_channel_gets_its_own_threshold_and_a_dead_one_a_tiny_legal_one():
    x = torch.stack([torch.linspace(-1, 1, 27) * f for f in (0.1, 1, 3, 0)]).view(4, 3, 3, 3)
    q = choose(x, signed(8), rule="no_clipping", axis=0)
    assert (q.scale * 128)[:3].tolist() == pytest.approx([0.100787, 1.007874, 3.023622], abs=1e-6)
    assert 0 < float(q.scale[3]) < 1e-6
    p = choose(x, signed(8, True), rule="no_clipping", axis=0)
    assert (p.scale * 128)[:3].tolist() == [0.125, 2, 4]


# ---------------------------------------------------------------- every rule


@pytest.mark.parametrize("rule", registered("range"))
@pytest.mark.parametrize(
    "grid", [signed(8), signed(2), unsigned(4), A8, signed(8, True)], ids=lambda g: f"{g.bits}{g.zero}{g.pot}"
)
@pytest.mark.parametrize(
    "x",
    [[0.0] * 8, [3.0] * 8, [-2.0] * 8, [1e-38, 0.0], [1.0], [1e30, 1.0, -1.0]],
    ids=["zero", "constant", "negative", "subnormal", "single", "outlier"],
)
def test_every_rule_gives_a_legal_grid_for_every_tensor(rule, grid, x):
    q = choose(torch.tensor(x), grid, rule=rule)
    assert torch.isfinite(q.scale) and float(q.scale) > 0
    assert grid.qmin <= int(q.zero_point) <= grid.qmax
    if grid.pot:
        assert float(torch.log2(q.scale)) == round(float(torch.log2(q.scale)))
    assert torch.isfinite(fake_quantize(torch.tensor(x), q.scale, q.zero_point, grid)).all()


@pytest.mark.parametrize(("rule", "p"), [("mse", 2), ("mae", 1), ("lp", 2.4)])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_error_search_is_never_worse_than_no_clipping_by_its_own_measure(rule, p, bits):
    x = randn(4000).pow(3)
    for grid in (signed(bits), Grid(bits=bits, qmin=0, qmax=2**bits - 1, zero="any"), signed(bits, True)):
        full = lost(x, choose(x, grid, rule="no_clipping"), grid, p)
        assert lost(x, choose(x, grid, rule=rule), grid, p) <= full * 1.0001


@pytest.mark.parametrize("grid", [signed(4), N8, A4, A8], ids=lambda g: f"{g.bits}{g.zero}")
@pytest.mark.parametrize("seed", range(4))
def test_rounding_keeps_zero_repeats_itself_ascends_and_errs_half_a_step(grid, seed):
    x = randn(500, seed=seed).sort().values * 3 + seed
    q = choose(x, grid, rule="no_clipping")
    y = fake_quantize(x, q.scale, q.zero_point, grid)
    assert torch.equal(fake_quantize(y, q.scale, q.zero_point, grid), y)
    assert bool((y.diff() >= 0).all()) and len(y.unique()) <= grid.levels
    assert float((x - y).abs().max()) <= float(q.scale) * 0.5001
    assert float(fake_quantize(torch.tensor(0.0), q.scale, q.zero_point, grid)) == 0


@pytest.mark.parametrize("rule", ["no_clipping", "mse", "std", "smooth_min_max"])
def test_equal_channels_get_the_scale_of_the_tensor_and_permuted_ones_permuted_scales(rule):
    row = randn(50, seed=3)
    same = choose(row.expand(4, 50), N8, rule=rule, axis=0).scale.tolist()
    assert same == [float(choose(row, N8, rule=rule).scale)] * 4
    w, order = randn(6, 40) * torch.arange(1, 7).view(-1, 1), torch.tensor([3, 0, 5, 1, 4, 2])
    q = choose(w, N8, rule=rule, axis=0)
    assert torch.equal(choose(w[order], N8, rule=rule, axis=0).scale, q.scale[order])
    assert torch.allclose(choose(w.T.contiguous(), N8, rule=rule, axis=1).scale, q.scale)


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_fitted_table_errs_no_more_than_k_means_of_scikit_learn(bits, axis):
    cluster = pytest.importorskip("sklearn.cluster")
    grid = Grid(bits=bits, qmin=-128, qmax=127, kind="lut", entries=1 << bits)
    w = randn(8, 300, seed=bits).pow(3)
    q = choose(w, grid, axis=axis)
    assert 0.0 in q.table and len(q.table) <= 1 << bits and all(v == int(v) and -128 <= v <= 127 for v in q.table)
    fitted = Grid(bits=bits, qmin=-128, qmax=127, kind="lut", table=q.table)
    units = q.scale if axis is None else q.scale[:, None]
    theirs = cluster.KMeans(1 << bits, n_init=3, random_state=0).fit((w / units).reshape(-1, 1).numpy()).inertia_
    mine = float(((w - fake_quantize(w, q.scale, q.zero_point, fitted, axis)) / units).square().sum())
    assert mine <= theirs * (1.6 if bits == 2 else 1.2)  # one entry is forced to zero, all to integers
    assert choose(w, grid, axis=axis).table == q.table


# ---------------------------------------------------------------- statistics


@pytest.mark.parametrize(
    ("share", "low", "high"), [(1.0, -4, 3), (15 / 16, -4, 3), (7 / 8, -3, 2), (13 / 16, -3, 2), (3 / 4, -2, 1)]
)
def test_a_percentile_of_eight_values_cuts_those_that_fit_wholly_into_the_rest(share, low, high):
    q = choose(torch.arange(-4.0, 4).flip(0), A8, rule="percentile", share=share)
    assert float(q.scale) == pytest.approx((high - low) / 255)


def test_a_percentile_of_counts_is_that_of_the_values():
    """0 .. 9, of which 9 was seen 91 times and each other once: 91 % lie at 9, and 5 % at or below 4."""
    stats = seen(torch.cat([torch.arange(9.0), torch.full((91,), 9.0)]))
    assert numbers(choose(stats, unsigned(8), rule="percentile", share=0.95))[0] == pytest.approx(9 / 255, rel=2e-3)
    stats = seen(torch.cat([torch.zeros(960), torch.ones(30), torch.full((10,), 8.0)]))
    assert numbers(choose(stats, unsigned(8), rule="percentile", share=0.98))[0] == pytest.approx(1 / 255, rel=1e-2)


@pytest.mark.parametrize("share", [0.5, -0.1, 1.001, float("nan")])
def test_a_share_out_of_bounds_is_refused(share):
    with pytest.raises(ValueError, match="'share' of range rule 'percentile' is out of bounds"):
        PercentileRange(share)


@pytest.mark.parametrize("k", [1.0, 2.6])
def test_so_many_unbiased_standard_deviations_around_the_mean_inside_the_extremes(k):
    x = randn(1000) * 2 + 0.5
    mean, sd = float(x.double().mean()), float(x.double().std())
    scale, zero = numbers(choose(x, A8, rule="std", k=k))
    low, high = max(mean - k * sd, float(x.min())), min(mean + k * sd, float(x.max()))
    assert scale == pytest.approx((high - low) / 255, rel=1e-5) and zero == round(-low / scale)
    few = choose(torch.tensor([0.0, 1.0]), A8, rule="std", k=0.5)
    assert few.bounds(A8)[1] == pytest.approx(0.5 + 0.5 * 0.5**0.5, rel=1e-5)  # of two: 1 / (2 - 1)
    assert choose(torch.tensor([2.0]), A8, rule="std", k=k).bounds(A8)[1] == pytest.approx(2.0)
    many = torch.cat([torch.zeros(50), torch.ones(50), torch.full((4,), 9.0)])
    want = float(many.mean() + 1.5 * many.std())
    assert choose(seen(many), A8, rule="std", k=1.5).bounds(A8)[1] == pytest.approx(want, rel=1e-2)


def test_the_smoothed_range_is_that_of_moving_averages():
    """0.9 (-1, 1) + 0.1 (-2, 3) = (-1.1, 1.2)."""
    q = choose(seen([-1.0, 1.0], [-2.0, 3.0]), A8, rule="smooth_min_max")
    assert float(q.scale) == pytest.approx(2.3 / 255, rel=1e-6) and int(q.zero_point) == round(1.1 * 255 / 2.3)


# ---------------------------------------------------------------- searches


def error(x, scale, zero, grid, p):
    q = np.clip(np.rint(x / scale) + zero, grid.qmin, grid.qmax)
    return float((np.abs(x - (q - zero) * scale) ** p).mean())


def brute(x, grid, p):
    """Least mean |x - q|^p over dense candidates: one end for symmetric grids, two for affine ones."""
    top, bottom = max(float(x.max()), 0.0), min(float(x.min()), 0.0)
    if grid.zero == 0:
        full = max(top / grid.qmax, bottom / grid.qmin if grid.qmin else 0.0)
        return min(error(x, full * f, 0, grid, p) for f in np.linspace(0.02, 1.05, 1500))
    ends = np.linspace(0.03, 1.05, 60)
    steps = [((top * a - bottom * b) / grid.qmax, bottom * b) for a in ends for b in ends]
    return min(error(x, s, np.clip(np.rint(-low / s), 0, grid.qmax), grid, p) for s, low in steps)


def heavy(n, seed=0):
    """A bell with long tails of both signs, longer above."""
    x = np.random.default_rng(seed).standard_t(2.5, n)
    return np.where(x > 0, 1.5 * x, x).astype("float32")


@pytest.mark.parametrize("rule, p", [("mse", 2.0), ("mae", 1.0), ("lp(p=3)", 3.0), ("lp", 2.4)])
@pytest.mark.parametrize("grid", [N4, N8, A4, signed(8)], ids=["n4", "n8", "a4", "s8"])
def test_a_search_is_as_good_as_trying_everything(rule, p, grid):
    x = heavy(600)  # raw values, few enough for an exact error
    found, least = error(x, *numbers(choose(torch.from_numpy(x), grid, rule=rule)), grid, p), brute(x, grid, p)
    full = from_min_max(float(x.min()), float(x.max()), grid)
    assert found <= 1.02 * least
    assert grid.bits == 8 or found < 0.85 * error(x, *numbers(full), grid, p)


def test_the_first_and_the_second_power_are_the_rules_of_their_names():
    x = torch.from_numpy(heavy(600))
    for rule, p in (("mae", 1.0), ("mse", 2.0)):
        assert numbers(choose(x, A4, rule="lp", p=p)) == numbers(choose(x, A4, rule=rule))
        assert numbers(choose(x, A4, rule="lp", p=p + 0.5)) != numbers(choose(x, A4, rule=rule))


@pytest.mark.parametrize("rest", [0.65, 0.375, 0.24, 0.1, 0.04])
@pytest.mark.parametrize("far", [(-1.0, 1.0), (1.0,), (-1.0,)], ids=["both", "high", "low"])
def test_few_values_far_out_are_clipped_however_far_they_are(rest, far):
    x = np.concatenate([np.linspace(-rest, rest, 999), far]).astype("float32")
    assert error(x, *numbers(choose(torch.from_numpy(x), A4, rule="mae")), A4, 1.0) <= 1.02 * brute(x, A4, 1.0)


@pytest.mark.parametrize("rule, p", [("mse", 2.0), ("mae", 1.0)])
@pytest.mark.parametrize("grid", [N4, A4], ids=["n4", "a4"])
@pytest.mark.parametrize("histogram", [True, False], ids=["histogram", "many values"])
def test_a_search_in_bins_is_nearly_as_good(rule, p, grid, histogram):
    x = heavy(16000 if histogram else 20000, seed=2)
    x[::3] = 0.0  # exact zeros, which cost nothing
    t = torch.from_numpy(x)
    q = choose(seen(*t.split(8000)) if histogram else t, grid, rule=rule)
    assert error(x, *numbers(q), grid, p) <= 1.06 * brute(x, grid, p)


def test_a_search_along_channels_is_one_for_each():
    w = torch.from_numpy(np.stack([heavy(400, k) * 4.0**k for k in range(3)]))
    q = choose(w.t(), N4, rule="mse", axis=1)
    for k in range(3):
        assert float(q.scale[k]) == pytest.approx(float(choose(w[k], N4, rule="mse").scale), rel=1e-6)
        assert error(w[k].numpy(), float(q.scale[k]), 0, N4, 2.0) <= 1.02 * brute(w[k].numpy(), N4, 2.0)


def test_large_weights_of_affine_channels_clip_as_much_as_pays():
    """Normal numbers in 16 codes: clipping gains a fifth or more, and the middles lie where each channel's do."""
    x = randn(3, FEW + 1 + ALL // 2) * torch.tensor([[1.0], [0.1], [3.0]]) + torch.tensor([[0.0], [0.0], [2.0]])
    found, whole = (choose(x, A4, rule=rule, axis=0) for rule in ("mse", "no_clipping"))
    errors = [(fake_quantize(x, q.scale, q.zero_point, A4, 0) - x).square().mean(1) for q in (found, whole)]
    assert bool((errors[0] < 0.8 * errors[1]).all())


def test_power_of_two_grids_try_halvings():
    x = heavy(500, 3)
    scale, _ = numbers(choose(torch.from_numpy(x), signed(4, True), rule="mse"))
    tried = {2.0**k: error(x, 2.0**k, 0, signed(4), 2.0) for k in range(-8, 6)}
    assert scale == min(tried, key=tried.get)


# ---------------------------------------------------------------- divergence


def by_hand(x, h, scale, zero, grid):
    """KL(p || r) in nats: p counts x in 512 bins over its range; r is p after clipping, each code's mass spread over
    the occupied bins that it covers. Migacz 2017, with loops."""
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


@pytest.mark.parametrize("weighted", [False, True], ids=["values", "counts"])
def test_divergences_of_candidates_and_channels_are_those_on_paper(weighted):
    rng = np.random.default_rng(0)
    x = (rng.standard_t(3, (2, 200)).astype("float32").astype("float64") * [[1.0], [5.0]]).astype("float32")
    h = rng.integers(1, 9, x.shape).astype("float64") if weighted else np.ones(x.shape)
    t, x = torch.from_numpy(x), x.astype("float64")
    low, high = t.double().aminmax(dim=1)
    sample = Sample(t, torch.from_numpy(h) if weighted else None, low, high)
    scales = torch.tensor([[0.5, 3.0], [0.25, 1.1], [0.1, 0.3]])
    zeros = torch.tensor([[6, 7], [4, 9], [8, 2]], dtype=torch.int32)
    got = divergence(sample, QParams(scales, zeros), A4)
    for k in range(3):
        for c in range(2):
            want = by_hand(x[c], h[c], float(scales[k, c]), int(zeros[k, c]), A4)
            assert float(got[k, c]) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("grid", [N8, A4, signed(4, True)], ids=["n8", "a4", "powers of two"])
def test_kullback_leibler_takes_the_range_with_the_least_divergence(grid):
    x = torch.from_numpy(heavy(3000, 5))
    factors = [0.5**k for k in range(10)] if grid.pot else np.linspace(1.0, 0.1, 40)
    tried = {}
    for f in factors:
        q = from_min_max(float(x.min()) * f, float(x.max()) * f, grid)
        tried[float(q.scale)] = by_hand(x.double().numpy(), np.ones(3000), *numbers(q), grid)
    scale, _ = numbers(choose(x, grid, rule="kl"))
    assert tried[scale] == pytest.approx(min(tried.values()), rel=1e-2 if grid.pot else 1e-3)
    assert grid.bits == 8 or min(tried.values()) < tried[max(tried)]  # clipping pays


def test_divergences_do_not_depend_on_the_unit_nor_on_how_much_all_counts():
    x = randn(1, 300).pow(3)
    q, small = (choose(x[0] * unit, A4, rule="kl") for unit in (1, 2.0**-10))
    assert float(small.scale) == float(q.scale) * 2.0**-10 and int(small.zero_point) == int(q.zero_point)
    one = QParams(q.scale.view(1, 1), q.zero_point.view(1, 1))
    low, high = x.double().aminmax(dim=1)
    once, rarely = (divergence(Sample(x, torch.full((1, 300), w), low, high), one, A4) for w in (1.0, 2.0**-12))
    torch.testing.assert_close(once, rarely)
