"""The parts of a search for a range, each against numpy."""

import numpy as np
import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose, search
from chipfit.ranges.qparams import QParams, from_min_max
from chipfit.ranges.search import BINS, HALVINGS, Sample, best, count, errors

N4 = Grid(bits=4, qmin=-7, qmax=7)
A4 = Grid(bits=4, qmin=0, qmax=15, zero="any")


def rows(values, weights=None):
    x = torch.tensor(values)
    low, high = x.double().aminmax(dim=1)
    return Sample(x, weights, low, high)


# ---------------------------------------------------------------- candidates


@pytest.mark.parametrize("each, sizes", [(0, [4, 1]), (1, [4, 1]), (2, [2, 2, 1]), (3, [1] * 5), (9, [1] * 5)])
def test_channels_are_searched_in_groups_whose_values_fit_into_memory(each, sizes, monkeypatch):
    monkeypatch.setattr(search, "CHUNK", 4)
    x = torch.arange(10.0).view(5, 2)
    sample = Sample(x, None, x[:, 0].double(), x[:, 1].double(), smooth_low=x[:, 0].double())
    parts = list(sample.chunks(each))
    assert [len(p.low) for p in parts] == sizes
    for name in ("values", "low", "high", "smooth_low"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(sample, name))
    assert all(p.weights is None and p.edges is None and p.smooth_high is None for p in parts)


def test_the_first_candidate_with_the_least_error_wins_in_each_channel():
    sample = rows([[-1.0, 7.0], [-14.0, 2.0], [0.5, 3.5]])
    losses = torch.tensor([[3.0, 1.0, 2.0], [1.0, 5.0, 2.0], [1.0, 1.0, 0.0]])
    low = torch.tensor([[1.0], [0.5], [0.25]], dtype=torch.float64)
    q, f, g = best(sample, N4, lambda s, q, grid: losses, low)
    assert f.tolist() == g.tolist() == [0.5, 1.0, 0.25]
    assert q.scale.tolist() == [0.5, 2.0, 0.125] and q.zero_point.tolist() == [0, 0, 0]
    high = low.flip(0)
    q, f, g = best(sample, A4, lambda s, q, grid: losses, low, high)
    assert f.tolist() == [0.5, 1.0, 0.25] and g.tolist() == [0.5, 0.25, 1.0]
    want = from_min_max(sample.low * f, sample.high * g, A4)
    assert torch.equal(q.scale, want.scale) and torch.equal(q.zero_point, want.zero_point)


@pytest.mark.parametrize("grid", [N4, A4], ids=["symmetric", "affine"])
def test_what_is_held_at_once_changes_no_result(grid, monkeypatch):
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).pow(3)
    whole = choose(x, grid, axis=0)
    monkeypatch.setattr(search, "CHUNK", 1500)  # two channels, and one or two candidates of each
    parts = choose(x, grid, axis=0)
    assert torch.equal(parts.scale, whole.scale) and torch.equal(parts.zero_point, whole.zero_point)


@pytest.mark.parametrize(
    "most, held", [(1, [1] * 10), (40, [1] * 10), (119, [2] * 5), (120, [3, 3, 3, 1]), (1000, [10])]
)
def test_candidates_are_tried_as_many_at_once_as_fit_into_memory(most, held, monkeypatch):
    """Each has as many errors as there are values, 40."""
    monkeypatch.setattr(search, "CHUNK", most)
    sizes = []

    def error(sample, q, grid):
        sizes.append(len(q.scale))
        return errors(sample, q, grid, 2.0)

    x = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    best(rows(x.tolist()), N4, error, HALVINGS.unsqueeze(-1))
    assert sizes == held


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("p", [1.0, 2.0, 2.4, 3.0])
@pytest.mark.parametrize("grid, zero", [(N4, 0), (A4, 5), (Grid(bits=4, qmin=0, qmax=15), 0)], ids=["n4", "a4", "u4"])
def test_errors_of_a_histogram_are_integrals_over_its_bins(p, grid, zero):
    """Against sums over dense points: bins that hold several cells, parts of one, and what is clipped at both ends."""
    edges = np.array([-9.3, -4.1, -0.2, 0.3, 0.35, 2.0, 21.7])
    counts = np.array([3.0, 1.0, 5.0, 2.0, 7.0, 4.0])
    middles = np.append((edges[1:] + edges[:-1]) / 2, 0.0)
    sample = Sample(
        torch.tensor(middles[None]).float(),
        torch.tensor(np.append(counts, 1000.0)[None]).float(),  # exact zeros, which no grid rounds
        torch.tensor([edges[0]]),
        torch.tensor([edges[-1]]),
        torch.tensor(edges[None]).float(),
    )
    scales = torch.tensor([[0.5], [1.0], [1.7]])
    q = QParams(scales, torch.full((3, 1), zero, dtype=torch.int32))
    got = errors(sample, q, grid, p)
    for k, s in enumerate(scales[:, 0].tolist()):
        want = 0.0
        for a, b, n in zip(edges[:-1], edges[1:], counts, strict=True):
            x = a + (np.arange(20000) + 0.5) / 20000 * (b - a)
            codes = np.clip(np.rint(x / s) + zero, grid.qmin, grid.qmax)
            want += n * (np.abs(x - (codes - zero) * s) ** p).mean()
        assert float(got[k, 0]) == pytest.approx(want, rel=1e-3)


def test_errors_of_raw_values_are_their_mean_over_each_channel():
    x = np.float32([[0.2, -1.6, 9.0], [0.5, 3.5, -8.0]])
    q = QParams(torch.tensor([[1.0, 1.0], [0.5, 2.0]]), torch.zeros(2, 2, dtype=torch.int32))
    got = errors(rows(x.tolist()), q, N4, 3.0)
    for k, scales in enumerate([(1.0, 1.0), (0.5, 2.0)]):
        for c, s in enumerate(scales):
            want = (np.abs(x[c] - np.clip(np.rint(x[c] / s), -7, 7) * s) ** 3).mean()
            assert float(got[k, c]) == pytest.approx(want, rel=1e-5)


# ---------------------------------------------------------------- bins


@pytest.mark.parametrize("bins", [4, 7])
def test_values_are_counted_in_bins_of_their_row(bins):
    x = np.float32([[-1.0, 0.0, 0.4, 2.9, 3.0], [5.0, 0.0, 0.0, 6.9, 4.0], [1.0, 2.0, 2.0, 8.0, 1.5]])
    start, span = np.float64([-1.0, 0.0, 1.0]), np.float64([4.0, 7.0, 7.0])
    h = np.float32([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]])
    tensors = [torch.from_numpy(a) for a in (x, start, span)]
    plain, zeros = count(*tensors, bins)
    weighed, heavy = count(*tensors, bins, torch.from_numpy(h))
    for k in range(3):
        ends = (start[k], start[k] + span[k])
        np.testing.assert_array_equal(plain[k], np.histogram(x[k], bins, ends)[0])
        np.testing.assert_array_equal(weighed[k], np.histogram(x[k], bins, ends, weights=h[k])[0])
    assert zeros.tolist() == [1, 2, 0] and heavy.tolist() == [2, 15, 0]
    outside, none = count(torch.tensor([[-50.0, 50.0, 1.0, 1.0]]), torch.zeros(1), torch.full((1,), 4.0), bins)
    assert outside[0, 0] == 1 and outside[0, -1] == 1 and none.tolist() == [0]


def test_a_histogram_of_each_channel_lies_between_its_own_ends():
    binned = search.binned(rows([[-1.0, 3.0, 0.0], [4.0, 4.0, 4.0]]))
    edges = binned.edges.numpy()
    np.testing.assert_allclose(edges[0], np.linspace(-1, 3, BINS + 1), atol=1e-6)
    assert (edges[1] == 4).all()  # a single number has no width
    np.testing.assert_allclose(binned.values, (edges[:, 1:] + edges[:, :-1]) / 2, atol=1e-6)
    assert binned.weights.sum(1).tolist() == [3, 3] and binned.weights[0, [0, BINS // 4, -1]].tolist() == [1, 1, 1]


def dense(x, s, zero, grid, p, h):
    codes = np.clip(np.rint(x / s) + zero, grid.qmin, grid.qmax)
    return float((h * np.abs(x - (codes - zero) * s) ** p).sum())


@pytest.mark.parametrize("p", [1.0, 2.0])
@pytest.mark.parametrize("weighed", [False, True], ids=["alike", "weighed"])
@pytest.mark.parametrize(
    "grid",
    [
        N4,
        Grid(bits=4, qmin=0, qmax=15),
        Grid(bits=4, qmin=0, qmax=15, zero=8),
        Grid(bits=4, qmin=0, qmax=15, zero=15),
        Grid(bits=4, qmin=-8, qmax=7, pot=True),
    ],
    ids=["n4", "u4", "middle", "top", "pot"],
)
def test_channels_that_share_bins_lose_as_little_as_by_trying_every_scale(grid, weighed, p):
    rng = np.random.default_rng(3)
    x = (rng.standard_t(3, (3, 3000)) * [[0.1], [1.0], [30.0]]).astype("float32")
    x = np.abs(x) if grid.qmin == grid.zero else -np.abs(x) if grid.qmax == grid.zero else x
    x[:, ::2] = 0.0
    h = np.where(np.abs(x) > 3 * np.abs(x).mean(1, keepdims=True), 0.05, 1.0).astype("float32")
    h = h if weighed else np.ones_like(h)
    sample = rows(x.tolist(), torch.from_numpy(h) if weighed else None)
    q = search.search(sample, grid, p)
    full = from_min_max(sample.low, sample.high, grid)
    for k in range(3):
        zero = int(q.zero_point[k])
        line = [2.0**-j for j in range(10)] if grid.pot else np.linspace(0.03, 1.05, 200)
        least = min(dense(x[k], float(full.scale[k]) * f, zero, grid, p, h[k]) for f in line)
        assert dense(x[k], float(q.scale[k]), zero, grid, p, h[k]) <= (1.001 if grid.pot else 1.03) * least


def test_numbers_on_a_lattice_keep_the_grid_that_holds_them_exactly():
    """Codes -7 .. 7 times 0.3 in 20,000 numbers: bins alone do not show that only the whole range is without error."""
    x = torch.randint(-7, 8, (1, 20000), generator=torch.Generator().manual_seed(0)) * 0.3
    assert float(choose(x[0], N4).scale) == pytest.approx(0.3)


def test_where_codes_are_no_nearest_ones_a_part_of_the_values_stands_for_all(monkeypatch):
    seen = []
    monkeypatch.setattr(search, "errors", lambda sample, q, grid, p: seen.append(sample) or torch.zeros(q.scale.shape))
    x, h = torch.arange(20000.0).view(2, -1), torch.arange(20000.0).view(2, -1) * 2
    sample = Sample(x, h, x.amin(1).double(), x.amax(1).double())
    search.search(sample, Grid(bits=4, qmin=-8, qmax=7, rounding="floor"), 2.0)
    every = -(-10000 // BINS)
    assert torch.equal(seen[0].values, x[:, ::every]) and torch.equal(seen[0].weights, h[:, ::every])
    assert seen[0].high.tolist() == [9999, 19999]


def test_the_error_of_weighted_values_is_their_mean_by_weight_of_each_channel():
    values, weights = torch.tensor([[1.0, 3.5], [2.25, 0.5]]), torch.tensor([[3.0, 1.0], [2.0, 6.0]])
    ends = values.amin(1).double(), values.amax(1).double()
    grid = Grid(bits=8, qmin=-128, qmax=127, rounding="floor")
    q = QParams(torch.tensor([[1.0, 1.0], [2.0, 0.5]]), torch.zeros(2, 2, dtype=torch.int32))
    found = errors(Sample(values, weights, *ends), q, grid, 2.0)
    # floored in steps of 1: 0 and 0.5; 0.25 and 0.5. In steps of 2 and of 0.5: 1 and 1.5; 0.25 and 0
    by_hand = [[0.25 / 4, (2 * 0.0625 + 6 * 0.25) / 8], [(3 + 2.25) / 4, 2 * 0.0625 / 8]]
    torch.testing.assert_close(found.double(), torch.tensor(by_hand, dtype=torch.float64))
