"""Ranges by weighed errors: against every scale there is, on numbers that can be followed by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.quantizers.grids import Grid
from chipfit.ranges import choose
from chipfit.ranges.search import ALL, BINS, FEW, Sample

TERNARY = Grid(bits=2, qmin=-1, qmax=1)
N4, A4 = Grid(bits=4, qmin=-7, qmax=7), Grid(bits=4, qmin=0, qmax=15, zero="any")
POT4 = Grid(bits=4, qmin=-8, qmax=7, pot=True)


def error(x, h, scale, zero, grid):
    """sum h (x - q)^2 / sum h, in numpy."""
    q = np.clip(np.rint(x / scale) + zero, grid.qmin, grid.qmax)
    return float((h * (x - (q - zero) * scale) ** 2).sum() / h.sum())


def least(x, h, grid, channels=1):
    """The least of that over dense candidates: one end of symmetric grids, two of affine ones, together in channels."""
    top, bottom = max(float(x.max()), 0.0), min(float(x.min()), 0.0)
    if grid.pot:
        return min(error(x, h, 2.0**k, 0, grid) for k in range(-12, 6))
    if grid.zero == 0:
        full = max(top / grid.qmax, bottom / grid.qmin)
        return min(error(x, h, full * f, 0, grid) for f in np.linspace(0.02, 1.05, 2000))
    ends = np.linspace(0.03, 1.05, 80)
    pairs = [(a, b) for a in ends for b in ends] if channels == 1 else [(a, a) for a in np.linspace(0.03, 1.05, 2000)]
    steps = [((top * a - bottom * b) / grid.qmax, bottom * b) for a, b in pairs]
    return min(error(x, h, s, np.clip(np.rint(-b / s), 0, grid.qmax), grid) for s, b in steps)


def drawn(rows, columns, seed=0):
    """Weights with long tails, and an importance that the large ones lack."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, (rows, columns)).astype("float32")
    h = (rng.exponential(1.0, x.shape) * np.where(np.abs(x) > 2, 0.01, 1.0)).astype("float32")
    return x, h


def both(x, h, grid, **options):
    """By weighed errors, and by errors alone."""
    x, h = torch.from_numpy(x), torch.from_numpy(h)
    return choose(x, grid, rule="hmse", extras={"importance": h}, **options), choose(x, grid, rule="mse", **options)


def test_weights_that_matter_are_kept_where_squared_errors_alone_keep_the_large_one():
    """Codes -1, 0, 1 for (1, 0.3, -0.3). At s = 1 the error is 2 x 0.09 = 0.18; where the small ones have codes, it is
    (1 - s)^2 + 2 (0.3 - s)^2, 0.33 at best: plain errors choose 1. With h = (0.01, 1, 1) it is 0.18 or more at large s
    and 0.01 (1 - s)^2 + 2 (0.3 - s)^2 at small ones, least at s = 0.61 / 2.01.
    """
    weighed, plain = both(np.float32([1, 0.3, -0.3]), np.float32([0.01, 1, 1]), TERNARY)
    assert float(plain.scale) == pytest.approx(1.0, rel=3e-3)
    assert float(weighed.scale) == pytest.approx(0.61 / 2.01, rel=3e-3)


@pytest.mark.parametrize("grid", [N4, A4, POT4], ids=["symmetric", "affine", "power of two"])
@pytest.mark.parametrize("axis", [None, 0], ids=["tensor", "channel"])
def test_the_range_is_as_good_as_the_best_of_all(grid, axis):
    x, h = drawn(4, 60)
    weighed, plain = both(x, h, grid, axis=axis)
    rows = [(x, h)] if axis is None else list(zip(x, h, strict=True))
    for k, (row, weight) in enumerate(rows):
        found, other = (
            error(row, weight, float(q.scale.reshape(-1)[k]), int(q.zero_point.reshape(-1)[k]), grid)
            for q in (weighed, plain)
        )
        assert found <= 1.03 * least(row, weight, grid, len(rows)) and found <= other
    assert not torch.equal(weighed.scale, plain.scale)


@pytest.mark.parametrize("grid", [N4, A4, POT4], ids=["symmetric", "affine", "power of two"])
def test_large_weights_are_weighed_in_bins(grid):
    x, h = drawn(3, 2 * max(ALL // 3, FEW, BINS))
    x[:, ::3] = 0.0  # exact zeros, which cost nothing
    weighed, plain = both(x, h, grid, axis=0)
    for k in range(3):
        found = error(x[k], h[k], float(weighed.scale[k]), int(weighed.zero_point[k]), grid)
        assert found <= 1.06 * least(x[k], h[k], grid, 3)
        assert grid.pot or found < 0.9 * error(x[k], h[k], float(plain.scale[k]), int(plain.zero_point[k]), grid)


def test_a_channel_in_which_nothing_matters_is_placed_by_its_errors_alone():
    x, h = drawn(2, 50)
    h[1] = 0
    weighed, plain = both(x, h, N4, axis=0)
    assert float(weighed.scale[1]) == float(plain.scale[1]) and float(weighed.scale[0]) != float(plain.scale[0])


def test_importance_belongs_to_its_weights_in_blocks_and_in_any_layout():
    x, h = drawn(32, 3)
    weighed, _ = both(x, h, N4, axis=0, block=16)
    assert weighed.scale.shape == (2, 3)
    for b in range(2):
        for c in range(3):
            part = np.s_[16 * b : 16 * b + 16, c]
            alone, _ = both(x[part], h[part], N4)
            assert float(weighed.scale[b, c]) == pytest.approx(float(alone.scale))
    turned = np.asfortranarray(x)
    assert float(both(turned, h, N4)[0].scale) == float(both(x, h, N4)[0].scale)


def test_a_table_is_fitted_to_the_weights_that_matter():
    """Three entries for five values: groups (-8, -7), (0), (7, 8). Of each the mean by weight is an entry."""
    grid = Grid(bits=8, qmin=-8, qmax=8, kind="lut", entries=3)
    x = torch.tensor([-8.0, -7.0, 0.0, 7.0, 8.0])
    heavy = torch.tensor([1.0, 99.0, 1.0, 1.0, 99.0])
    assert choose(x, grid, rule="hmse", extras={"importance": heavy}).table == (-7.0, 0.0, 8.0)
    assert choose(x, grid, rule="hmse", extras={"importance": heavy.flip(0)}).table == (-8.0, 0.0, 7.0)


def test_an_activation_is_weighed_by_its_values_and_outliers_are_cut_all_the_same():
    stats = TensorStats("x")
    stats.update(torch.cat([torch.linspace(-1, 1, 999), torch.tensor([4.0])]), Need())
    edges = torch.linspace(-1, 4, 501).unsqueeze(0)
    middles, ends = (edges[:, 1:] + edges[:, :-1]) / 2, (torch.tensor([-1.0]).double(), torch.tensor([4.0]).double())
    high = Sample(middles, torch.where(middles > 3.9, 1000.0, 1.0), *ends, edges)
    low = Sample(middles, torch.where(middles > 1, 0.0, 1.0), *ends, edges)

    def top(importance, **options):
        return choose(replace(stats, extras={"importance": importance}), A4, rule="hmse", **options).bounds(A4)[1]

    assert top(high) == pytest.approx(4, abs=0.1) and top(low) == pytest.approx(1, abs=0.1)
    assert top(high, z_threshold=3.0) < 1.2
