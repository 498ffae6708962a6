"""Closed-form rounding against exhaustive search, least squares and sums by hand."""

import itertools

import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.rounding import fit

GRID = Grid(bits=3, qmin=-4, qmax=3)


def moments(g: int = 1, k: int = 4, n: int = 200, seed: int = 0) -> torch.Tensor:
    x = torch.randn(g, n, k, generator=torch.Generator().manual_seed(seed)) @ torch.randn(
        g, k, k, generator=torch.Generator().manual_seed(seed + 1)
    )
    return x.transpose(1, 2) @ x / n


def stored(o: int = 3, k: int = 4, scale: float = 0.3, g: int = 1, free: bool = False, grid: Grid = GRID) -> fit.Rows:
    entries = torch.full((g * o,), scale)
    ids = torch.arange(g * o).view(g, o) if free else None
    low, high = (torch.full((g * o,), v) for v in (1e-6, 1e6))
    return fit.Rows(
        grid, entries.view(g, o, 1), torch.zeros(g, o, 1), ids, low if free else entries, high if free else entries
    )


def error(q: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.einsum("gok,gkl,gol->go", q - w, h, q - w)


def test_gptq_is_near_the_best_of_all_roundings_and_better_than_the_nearest():
    h, w = moments(), 0.5 * torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(3))
    q, _, inverted = fit.rounded(w, h, stored())
    nearest, *_ = fit.rounded(w, h, stored(), spread=False)
    codes = torch.tensor(list(itertools.product(range(-4, 4), repeat=4)), dtype=torch.float32) * 0.3
    best = torch.stack([error(codes.view(1, -1, 4), row.view(1, 1, 4), h).min() for row in w[0]])
    assert inverted and torch.equal(q, (q / 0.3).round().clamp(-4, 3) * 0.3)
    assert float(error(q, w, h).sum()) <= 1.5 * float(best.sum())
    assert float(error(q, w, h).sum()) < float(error(nearest, w, h).sum())


def test_gptq_of_two_weights_by_hand():
    # H = [[1, .5], [.5, 1]]: rounding 0.4 to 0 loses 0.4, of which the next weight takes 0.5 * 0.4: 0.4 + 0.2 -> 1
    h = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]])
    q, *_ = fit.rounded(torch.tensor([[[0.4, 0.4]]]), h, stored(1, 2, 1.0), damping=1e-6)
    assert q.tolist() == [[[0.0, 1.0]]]


def test_rows_of_blocks_beyond_the_first_hear_of_earlier_errors():
    k = fit.BLOCK + 6
    h, w = moments(k=k, n=4 * k), torch.randn(1, 2, k, generator=torch.Generator().manual_seed(5))
    q, *_ = fit.rounded(w, h, stored(2, k))
    nearest, *_ = fit.rounded(w, h, stored(2, k), spread=False)
    u = torch.linalg.cholesky(torch.linalg.inv(h + 0.01 * h.diagonal(dim1=1, dim2=2).mean() * torch.eye(k)), upper=True)
    plain = w.clone()
    for i in range(k):  # algorithm 1 without blocks
        e = (plain[..., i] - (plain[..., i] / 0.3).round().clamp(-4, 3) * 0.3) / u[:, i, i]
        plain[..., i] = (plain[..., i] / 0.3).round().clamp(-4, 3) * 0.3
        plain[..., i + 1 :] -= e.unsqueeze(2) * u[:, i, i + 1 :]
    assert float(((q - plain).abs() > 0.1).float().mean()) < 0.02  # ties in float32
    assert float(error(q, w, h).sum()) < float(error(nearest, w, h).sum())


def test_corrected_weights_are_least_squares_without_a_ridge_and_the_old_ones_with_a_large_one():
    x, t = torch.randn(300, 4, dtype=torch.float64), torch.randn(300, 2, dtype=torch.float64)
    h, c, w = (x.T @ x / 300)[None], (t.T @ x / 300)[None], torch.zeros(1, 2, 4, dtype=torch.float64)
    want = torch.linalg.lstsq(x, t).solution.T
    torch.testing.assert_close(fit.corrected(w, h, c, 0.0)[0], want)
    torch.testing.assert_close(fit.corrected(w + 1, h, c, 1e9), w + 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_scales_are_searched_for_what_they_are_shared_by(shared):
    h, w = (
        moments(),
        torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(4)) * torch.tensor([[[1.0], [4], [16]]]),
    )
    rows = stored(free=True)
    if shared:
        one = torch.tensor([0.3])
        rows = fit.Rows(
            GRID,
            one.view(1, 1, 1).expand(1, 3, 1),
            torch.zeros(1, 3, 1),
            torch.zeros(1, 3, dtype=torch.long),
            one / 1e6,
            one * 1e6,
        )
    q, scale, _ = fit.rounded(w, h, rows)
    assert scale.shape == ((1,) if shared else (3,))
    each = scale.expand(3).view(1, 3, 1)
    torch.testing.assert_close(q, (q / each).round().clamp(-4, 3) * each)
    assert (
        float(error(q, w, h).sum()) < float(error(fit.rounded(w, h, stored(scale=float(scale[0])))[0], w, h).sum())
        or shared
    )


def test_scales_stay_between_bounds_and_powers_of_two_where_the_platform_says():
    h, w = moments(), torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(4))
    rows = stored(free=True)
    rows.low, rows.high = torch.tensor([5.0, 1e-6, 1e-6]), torch.tensor([9.0, 0.01, 1e6])
    _, scale, _ = fit.rounded(w, h, rows)
    assert scale[0] == 5 and scale[1] == torch.tensor(0.01) and 0.1 < scale[2] < 1
    _, scale, _ = fit.rounded(w, h, stored(free=True, grid=Grid(bits=3, qmin=-4, qmax=3, pot=True)))
    assert torch.equal(scale.log2(), scale.log2().round())


def test_dead_inputs_and_singular_moments_are_carried_by_the_damping():
    w = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(4))
    q, _, inverted = fit.rounded(w, torch.zeros(1, 4, 4), stored())
    assert inverted and torch.equal(q, fit.rounded(w, torch.zeros(1, 4, 4), stored(), spread=False)[0])
    bad = torch.full((1, 4, 4), float("nan"))
    q, _, inverted = fit.rounded(w, bad, stored())
    assert not inverted and bool(torch.isfinite(q).all())


def test_wide_rows_come_with_the_scale_that_they_were_rounded_to():
    k = fit.MANY + 6
    h, w = torch.eye(k).unsqueeze(0), torch.randn(1, 2, k, generator=torch.Generator().manual_seed(6))
    q, scale, _ = fit.rounded(w, h, stored(2, k, scale=7.0, free=True))
    codes = q / scale.view(1, 2, 1)
    assert bool((scale < 2).all()) and len(q.unique()) > 4
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)
