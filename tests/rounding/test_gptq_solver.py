"""Closed-form rounding against exhaustive search, least squares and sums by hand."""

import itertools

import pytest
import torch

from chipfit.rounding import gptq_solver
from chipfit.rounding.gptq_solver import WeightRows, corrected_weights, error_feedback, round_rows, search_scales
from tests.build import grid, randn

GRID = grid(3)
POWERS = grid(3, pot=True)
NAN = torch.full((1, 4, 4), float("nan"))


def moments(g: int = 1, k: int = 4, n: int = 200) -> torch.Tensor:
    x = randn(g, n, k) @ randn(g, k, k, seed=1)
    return x.transpose(1, 2) @ x / n


def rows_of(o=3, k=4, scale=0.3, g=1, free=False, on=GRID, ids=None) -> WeightRows:
    """Rows with scales of their own, which stay or are free; or those with shared ones, by `ids`."""
    ids = torch.arange(g * o).view(g, o) if ids is None else torch.tensor(ids).view(g, o)
    entries = torch.full((int(ids.max()) + 1,), scale)
    low, high = (torch.full_like(entries, v) if free else entries for v in (1e-6, 1e6))
    return WeightRows(on, entries[ids].unsqueeze(2), torch.zeros(g, o, 1), ids if free else None, low, high)


def error(q: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.einsum("gok,gkl,gol->go", q - w, h, q - w)


def total(q, w, h) -> float:
    return float(error(q, w, h).sum())


# ---------------------------------------------------------------- columns


def test_gptq_is_near_the_best_of_all_roundings_and_better_than_the_nearest():
    h, w = moments(), 0.5 * randn(1, 3, 4, seed=3)
    q, _, factorized = round_rows(w, h, rows_of())
    nearest, *_ = round_rows(w, h, rows_of(), feedback=False)
    codes = torch.tensor(list(itertools.product(range(-4, 4), repeat=4)), dtype=torch.float32) * 0.3
    best = sum(float(error(codes.view(1, -1, 4), row.view(1, 1, 4), h).min()) for row in w[0])
    assert factorized and torch.equal(q, (q / 0.3).round().clamp(-4, 3) * 0.3)
    assert total(q, w, h) <= 1.5 * best and total(q, w, h) < total(nearest, w, h)


def test_columns_beyond_the_first_block_take_earlier_errors():
    k = gptq_solver.BLOCK + 6
    h, w = moments(k=k, n=4 * k), randn(1, 2, k, seed=5)
    q, nearest = (round_rows(w, h, rows_of(2, k), feedback=f)[0] for f in (True, False))
    u = torch.linalg.cholesky(torch.linalg.inv(h + 0.01 * h.diagonal(dim1=1, dim2=2).mean() * torch.eye(k)), upper=True)
    plain = w.clone()
    for i in range(k):  # algorithm 1 without blocks
        rounded = (plain[..., i] / 0.3).round().clamp(-4, 3) * 0.3
        e, plain[..., i] = (plain[..., i] - rounded) / u[:, i, i], rounded
        plain[..., i + 1 :] -= e.unsqueeze(2) * u[:, i, i + 1 :]
    assert float(((q - plain).abs() > 0.1).float().mean()) < 0.02  # ties in float32
    assert total(q, w, h) < total(nearest, w, h)


def test_errors_move_by_the_triangular_factor(monkeypatch):
    monkeypatch.setattr(gptq_solver, "DAMPING", 1e-6)
    """H = R R' of an upper triangular R: here [[2, 1], [0, 1]], so that R_12 / R_22 = 1."""
    h = torch.tensor([[[5.0, 1.0], [1.0, 1.0]]])
    assert torch.allclose(error_feedback(h), torch.tensor([[[1.0, 1.0], [0.0, 1.0]]]), atol=1e-4)
    # H = [[1, .5], [.5, 1]]: rounding 0.4 to 0 loses 0.4, of which the next weight takes 0.5 * 0.4: 0.4 + 0.2 -> 1
    h = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]])
    assert round_rows(torch.tensor([[[0.4, 0.4]]]), h, rows_of(1, 2, 1.0))[0].tolist() == [[[0.0, 1.0]]]


def test_the_damping_grows_until_moments_are_definite():
    """Of diag(1, 1, -0.5) the mean is a half: 0.01, 0.1 and 1 times that are too little, 10 times is enough."""
    assert torch.equal(error_feedback(torch.diag(torch.tensor([1.0, 1.0, -0.5]))[None]), torch.eye(3)[None])
    assert error_feedback(torch.diag(torch.tensor([9.0, 9.0, -14.0]))[None]) is None  # ten means are 13.3
    assert torch.equal(error_feedback(torch.zeros(1, 3, 3)), torch.eye(3)[None])
    found = error_feedback(torch.tensor([[[1.0, 3.0], [3.0, 1.0]]]))  # 10 times the mean, so that the diagonal is 11
    torch.testing.assert_close(found, torch.tensor([[[1.0, 3 / 11], [0.0, 1.0]]]))


@pytest.mark.parametrize("free", [False, True])
def test_dead_inputs_are_carried_by_the_damping_and_bad_moments_give_the_nearest(free):
    w, dead = randn(1, 3, 4, seed=4), torch.zeros(1, 4, 4)
    q, nearest = (round_rows(w, dead, rows_of(), feedback=f)[0] for f in (True, False))
    assert torch.equal(q, nearest) and bool(torch.isfinite(round_rows(w, NAN, rows_of())[0]).all())
    factorized = [round_rows(w, h, rows_of(free=free), feedback=f)[2] for h in (dead, NAN) for f in (True, False)]
    assert factorized == [True, True, False, True]


# ---------------------------------------------------------------- corrected weights


def test_corrected_weights_are_least_squares_without_a_ridge_and_the_old_ones_with_a_large_one():
    x, t = randn(300, 4).double(), randn(300, 2, seed=1).double()
    h, c, w = (x.T @ x / 300)[None], (t.T @ x / 300)[None], torch.zeros(1, 2, 4, dtype=torch.float64)
    torch.testing.assert_close(corrected_weights(w, h, c, 0.0)[0], torch.linalg.lstsq(x, t).solution.T)
    torch.testing.assert_close(corrected_weights(w + 1, h, c, 1e9), w + 1, rtol=0, atol=1e-6)


def test_without_definite_moments_corrected_weights_are_those_of_least_squares():
    h, c, w = torch.zeros(1, 2, 2), torch.tensor([[[6.0, 0.0]]]), torch.tensor([[[1.0, 5.0]]])
    h[0, 0, 0] = 2.0
    assert torch.allclose(corrected_weights(w, h, c, 0.0), torch.tensor([[[3.0, 5.0]]]))
    # W + (C - W H) / (H + rho mean): 1 + (6 - 2) / (2 + 0.5)
    assert torch.allclose(corrected_weights(w, h, c, 0.5), torch.tensor([[[1 + 4 / 2.5, 5.0]]]))


# ---------------------------------------------------------------- scales


def best_of_36(w, h, damping):
    """The scale of rows [R, K] with the least sum of (h_jj + damping times their mean) (q_j - w_j)^2, one by one."""
    diagonal = h.diagonal() + damping * h.diagonal().mean()
    lines = [w.abs().max() / 3.5 * (0.25 + 0.85 * t / 35) for t in range(36)]
    return min(lines, key=lambda s: float((diagonal * ((w / s).round().clamp(-4, 3) * s - w).square()).sum()))


@pytest.mark.parametrize("at_once", [1, 50, 1 << 17])
def test_a_search_takes_the_best_of_36_scales_between_a_quarter_and_a_tenth_more_than_all(at_once, monkeypatch):
    monkeypatch.setattr(gptq_solver, "NUMBERS_AT_ONCE", at_once)
    monkeypatch.setattr(gptq_solver, "DAMPING", 0.5)
    w, h = randn(2, 3, 6, seed=7) * torch.tensor([1.0, 4.0, 0.1]).view(1, 3, 1), moments(2, 6)
    found = search_scales(w, h, rows_of(3, 6, g=2, free=True))
    want = [float(best_of_36(w[g, o : o + 1], h[g], 0.5)) for g in range(2) for o in range(3)]
    assert found.tolist() == pytest.approx(want, rel=1e-4)


def test_rows_that_share_a_scale_are_searched_together():
    w, h = randn(1, 4, 6, seed=7), moments(1, 6)
    found = search_scales(w, h, rows_of(4, 6, free=True, ids=[0, 1, 0, 1]))
    assert found.tolist() == pytest.approx([float(best_of_36(w[0, k::2], h[0], 0.01)) for k in range(2)], rel=1e-4)


@pytest.mark.parametrize("ids", [None, [0, 0, 0]])
def test_rounded_weights_lie_on_the_scales_that_were_found(ids):
    h, w = moments(), randn(1, 3, 4, seed=4) * torch.tensor([[[1.0], [4], [16]]])
    q, scale, _ = round_rows(w, h, rows_of(free=True, ids=ids))
    each = scale.expand(3).view(1, 3, 1)
    torch.testing.assert_close(q, (q / each).round().clamp(-4, 3) * each)
    if ids is None:
        assert len(scale) == 3 and total(q, w, h) < total(round_rows(w, h, rows_of(scale=float(scale[0])))[0], w, h)


def test_scales_stay_between_bounds_and_powers_of_two_where_the_platform_says():
    h, w = moments(), randn(1, 3, 4, seed=4)
    rows = rows_of(free=True)
    rows.low, rows.high = torch.tensor([5.0, 1e-6, 1e-6]), torch.tensor([9.0, 0.01, 1e6])
    _, scale, _ = round_rows(w, h, rows)
    assert scale[0] == 5 and scale[1] == torch.tensor(0.01) and 0.1 < scale[2] < 1
    _, scale, _ = round_rows(w, h, rows_of(free=True, on=POWERS))
    assert torch.equal(scale.log2(), scale.log2().round())
    nearest = gptq_solver.within_bounds(
        torch.tensor([[1.0], [1.4], [1.42], [3.0], [0.1]]), rows_of(1, free=True, on=POWERS)
    )
    assert nearest.flatten().tolist() == [1, 1, 2, 4, 0.125]


def test_each_row_takes_the_candidate_that_loses_least():
    w, h, rows = randn(2, 4, 6, seed=7), moments(2, 6), rows_of(4, 6, g=2, free=True)
    q, entries, _ = round_rows(w, h, rows)
    alone = [round_rows(w, h, rows, candidates=(r,)) for r in gptq_solver.CANDIDATES]
    winner = torch.stack([error(other, w, h) for other, *_ in alone]).argmin(0)
    assert len(winner.unique()) > 1
    for g, o in itertools.product(range(2), range(4)):
        other, scale, _ = alone[int(winner[g, o])]
        assert torch.equal(q[g, o], other[g, o]) and float(entries[4 * g + o]) == float(scale[4 * g + o])


@pytest.mark.parametrize("k, tries", [(4, 5), (5, 1)])
def test_long_rows_try_one_scale(k, tries, monkeypatch):
    monkeypatch.setattr(gptq_solver, "LONG_ROW", 4)
    tried, old = [], gptq_solver.round_columns
    monkeypatch.setattr(gptq_solver, "round_columns", lambda w, *rest: tried.append(w.shape[1]) or old(w, *rest))
    w, h = randn(1, 3, k, seed=7), moments(1, k)
    q, scale, _ = round_rows(w, h, rows_of(3, k, scale=7.0, free=True))
    assert tried == [3 * tries] and bool((scale < 2).all())
    torch.testing.assert_close(q, (q / scale.view(1, 3, 1)).round() * scale.view(1, 3, 1))


@pytest.mark.parametrize(
    "zero, on, codes",
    [(1.0, GRID, range(-5, 3)), (0.0, grid(3, kind="lut", table=(-2.0, -1.0, 0.0, 3.0)), (-2, -1, 0, 3))],
)
def test_scales_stay_where_the_grid_has_a_zero_point_or_a_table(zero, on, codes):
    w, rows = randn(1, 3, 4, seed=7) * 9, rows_of(free=True, on=on)
    rows.zero = torch.full((1, 3, 1), zero)
    q, entries, _ = round_rows(w, moments(), rows, feedback=False)
    found = {int(c) for c in (q / 0.3).round().flatten()}
    assert torch.equal(entries, torch.full((3,), 0.3)) and found <= set(codes) and {min(codes), max(codes)} <= found
