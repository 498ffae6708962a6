"""Closed-form rounding against exhaustive search, least squares and sums by hand."""

import itertools

import pytest
import torch

from chipfit.quantizers.grids import Grid
from chipfit.rounding import gptq

GRID = Grid(bits=3, qmin=-4, qmax=3)


def moments(g: int = 1, k: int = 4, n: int = 200, seed: int = 0) -> torch.Tensor:
    x = torch.randn(g, n, k, generator=torch.Generator().manual_seed(seed)) @ torch.randn(
        g, k, k, generator=torch.Generator().manual_seed(seed + 1)
    )
    return x.transpose(1, 2) @ x / n


def stored(
    o: int = 3, k: int = 4, scale: float = 0.3, g: int = 1, free: bool = False, grid: Grid = GRID
) -> gptq.WeightRows:
    entries = torch.full((g * o,), scale)
    ids = torch.arange(g * o).view(g, o) if free else None
    low, high = (torch.full((g * o,), v) for v in (1e-6, 1e6))
    return gptq.WeightRows(
        grid, entries.view(g, o, 1), torch.zeros(g, o, 1), ids, low if free else entries, high if free else entries
    )


def error(q: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return torch.einsum("gok,gkl,gol->go", q - w, h, q - w)


def test_gptq_is_near_the_best_of_all_roundings_and_better_than_the_nearest():
    h, w = moments(), 0.5 * torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(3))
    q, _, inverted = gptq.round_rows(w, h, stored())
    nearest, *_ = gptq.round_rows(w, h, stored(), feedback=False)
    codes = torch.tensor(list(itertools.product(range(-4, 4), repeat=4)), dtype=torch.float32) * 0.3
    best = torch.stack([error(codes.view(1, -1, 4), row.view(1, 1, 4), h).min() for row in w[0]])
    assert inverted and torch.equal(q, (q / 0.3).round().clamp(-4, 3) * 0.3)
    assert float(error(q, w, h).sum()) <= 1.5 * float(best.sum())
    assert float(error(q, w, h).sum()) < float(error(nearest, w, h).sum())


def test_gptq_of_two_weights_by_hand():
    # H = [[1, .5], [.5, 1]]: rounding 0.4 to 0 loses 0.4, of which the next weight takes 0.5 * 0.4: 0.4 + 0.2 -> 1
    h = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]])
    q, *_ = gptq.round_rows(torch.tensor([[[0.4, 0.4]]]), h, stored(1, 2, 1.0), damping=1e-6)
    assert q.tolist() == [[[0.0, 1.0]]]


def test_rows_of_blocks_beyond_the_first_hear_of_earlier_errors():
    k = gptq.BLOCK + 6
    h, w = moments(k=k, n=4 * k), torch.randn(1, 2, k, generator=torch.Generator().manual_seed(5))
    q, *_ = gptq.round_rows(w, h, stored(2, k))
    nearest, *_ = gptq.round_rows(w, h, stored(2, k), feedback=False)
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
    torch.testing.assert_close(gptq.corrected_weights(w, h, c, 0.0)[0], want)
    torch.testing.assert_close(gptq.corrected_weights(w + 1, h, c, 1e9), w + 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_scales_are_searched_for_what_they_are_shared_by(shared):
    h, w = (
        moments(),
        torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(4)) * torch.tensor([[[1.0], [4], [16]]]),
    )
    rows = stored(free=True)
    if shared:
        one = torch.tensor([0.3])
        rows = gptq.WeightRows(
            GRID,
            one.view(1, 1, 1).expand(1, 3, 1),
            torch.zeros(1, 3, 1),
            torch.zeros(1, 3, dtype=torch.long),
            one / 1e6,
            one * 1e6,
        )
    q, scale, _ = gptq.round_rows(w, h, rows)
    assert scale.shape == ((1,) if shared else (3,))
    each = scale.expand(3).view(1, 3, 1)
    torch.testing.assert_close(q, (q / each).round().clamp(-4, 3) * each)
    assert (
        float(error(q, w, h).sum()) < float(error(gptq.round_rows(w, h, stored(scale=float(scale[0])))[0], w, h).sum())
        or shared
    )


def test_scales_stay_between_bounds_and_powers_of_two_where_the_platform_says():
    h, w = moments(), torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(4))
    rows = stored(free=True)
    rows.low, rows.high = torch.tensor([5.0, 1e-6, 1e-6]), torch.tensor([9.0, 0.01, 1e6])
    _, scale, _ = gptq.round_rows(w, h, rows)
    assert scale[0] == 5 and scale[1] == torch.tensor(0.01) and 0.1 < scale[2] < 1
    _, scale, _ = gptq.round_rows(w, h, stored(free=True, grid=Grid(bits=3, qmin=-4, qmax=3, pot=True)))
    assert torch.equal(scale.log2(), scale.log2().round())


def test_dead_inputs_and_singular_moments_are_carried_by_the_damping():
    w = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(4))
    q, _, inverted = gptq.round_rows(w, torch.zeros(1, 4, 4), stored())
    assert inverted and torch.equal(q, gptq.round_rows(w, torch.zeros(1, 4, 4), stored(), feedback=False)[0])
    bad = torch.full((1, 4, 4), float("nan"))
    q, _, inverted = gptq.round_rows(w, bad, stored())
    assert not inverted and bool(torch.isfinite(q).all())


def test_wide_rows_come_with_the_scale_that_they_were_rounded_to():
    k = gptq.LONG_ROW + 6
    h, w = torch.eye(k).unsqueeze(0), torch.randn(1, 2, k, generator=torch.Generator().manual_seed(6))
    q, scale, _ = gptq.round_rows(w, h, stored(2, k, scale=7.0, free=True))
    codes = q / scale.view(1, 2, 1)
    assert bool((scale < 2).all()) and len(q.unique()) > 4
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-4)


# ---------------------------------------------------------------- scales that are tried


def drawn(g=1, o=3, k=6, seed=7):
    return torch.randn(g, o, k, generator=torch.Generator().manual_seed(seed))


def weighed(w, scale, h, damping):
    """Sum of (h_jj + damping times their mean) (q_j - w_j)^2 of each row, one by one."""
    out = torch.zeros(w.shape[:2])
    for g in range(len(w)):
        diagonal = h[g].diagonal()
        for o in range(w.shape[1]):
            s = scale[g * w.shape[1] + o]
            q = (w[g, o] / s).round().clamp(-4, 3) * s
            out[g, o] = ((diagonal + damping * diagonal.mean()) * (q - w[g, o]).square()).sum()
    return out


@pytest.mark.parametrize("at_once", [1, 50, 1 << 17])
def test_a_search_takes_the_best_of_36_scales_between_a_quarter_and_a_tenth_more_than_all(at_once, monkeypatch):
    assert (gptq.TRIES, gptq.NUMBERS_AT_ONCE, gptq.CANDIDATES, gptq.CANDIDATES_OF_LONG_ROWS) == (
        36,
        1 << 17,
        (0.80, 0.89, 0.98, 1.06, 1.15),
        (1.0,),
    )
    monkeypatch.setattr(gptq, "NUMBERS_AT_ONCE", at_once)
    w, h = drawn(2, 3) * torch.tensor([1.0, 4.0, 0.1]).view(1, 3, 1), moments(2, 6)
    found = gptq.search_scales(w, h, stored(3, 6, g=2, free=True), 0.5)
    tops = w.abs().amax(2).flatten() / 3.5
    lines = [tops * (0.25 + 0.85 * t / 35) for t in range(36)]
    losses = torch.stack([weighed(w, s, h, 0.5).flatten() for s in lines])
    assert torch.allclose(found, torch.stack(lines).gather(0, losses.argmin(0, keepdim=True))[0], rtol=1e-4)


def test_rows_that_share_a_scale_are_searched_together():
    w, h = drawn(1, 4), moments(1, 6)
    rows = stored(4, 6, free=True)
    rows.ids = torch.tensor([[0, 1, 0, 1]])
    rows.low, rows.high = rows.low[:2], rows.high[:2]
    found = gptq.search_scales(w, h, rows, 0.01)
    for entry in range(2):
        own = w[:, entry::2]
        tops = own.abs().max() / 3.5
        lines = [tops * (0.25 + 0.85 * t / 35) for t in range(36)]
        losses = [float(weighed(own, s.expand(2), h, 0.01).sum()) for s in lines]
        assert float(found[entry]) == pytest.approx(float(lines[losses.index(min(losses))]), rel=1e-4)


def test_weights_of_zero_keep_a_scale_above_zero():
    assert 0 < float(gptq.search_scales(torch.zeros(1, 1, 4), moments(), stored(1, free=True), 0.01)) <= 1e-6


def test_of_the_scales_around_that_one_each_row_takes_the_one_that_loses_least():
    w, h = drawn(2, 4), moments(2, 6)
    rows = stored(4, 6, g=2, free=True)
    q, entries, inverted = gptq.round_rows(w, h, rows)
    alone = [gptq.round_rows(w, h, rows, candidates=(r,)) for r in gptq.CANDIDATES]
    losses = torch.stack([error(other, w, h) for other, *_ in alone])
    winner = losses.argmin(0)
    assert inverted and len(winner.unique()) > 1
    for g in range(2):
        for o in range(4):
            other, scale, _ = alone[int(winner[g, o])]
            assert torch.equal(q[g, o], other[g, o]) and float(entries[4 * g + o]) == float(scale[4 * g + o])


@pytest.mark.parametrize("k, tries", [(4, 5), (5, 1)])
def test_rows_of_many_weights_try_one_scale(k, tries, monkeypatch):
    monkeypatch.setattr(gptq, "LONG_ROW", 4)
    tried, old = [], gptq.round_columns
    monkeypatch.setattr(gptq, "round_columns", lambda w, *rest: tried.append(w.shape[1]) or old(w, *rest))
    gptq.round_rows(drawn(1, 3, k), moments(1, k), stored(3, k, free=True))
    assert tried == [3 * tries]


@pytest.mark.parametrize("free", [False, True])
def test_whether_moments_could_be_inverted_is_told_where_it_was_asked(free):
    bad, w = torch.full((1, 4, 4), float("nan")), drawn(k=4)
    assert [
        gptq.round_rows(w, h, stored(free=free), feedback=s)[2] for h in (moments(), bad) for s in (True, False)
    ] == [
        True,
        True,
        False,
        True,
    ]


def test_scales_stay_where_codes_have_a_zero_point_or_a_table():
    w, h = drawn(k=4), moments()
    zeros = stored(free=True)
    zeros.zero = torch.full((1, 3, 1), 1.0)
    for rows in (
        zeros,
        stored(free=True, grid=Grid(bits=3, qmin=-4, qmax=3, kind="lut", table=(-2.0, -1.0, 0.0, 3.0))),
    ):
        q, entries, _ = gptq.round_rows(w, h, rows, feedback=False)
        assert torch.equal(entries, torch.full((3,), 0.3))
        codes = (q / 0.3).round()
        assert float(codes.min()) >= -5 and float(codes.max()) <= 3
        assert rows is zeros or set(codes.unique().tolist()) <= {-2, -1, 0, 3}
    # codes -4 .. 3 about a zero point of 1
    assert float((gptq.round_rows(w - 9, h, zeros, feedback=False)[0] / 0.3).round().max()) == -5
    assert float((gptq.round_rows(w + 9, h, zeros, feedback=False)[0] / 0.3).round().min()) == 2


def test_powers_of_two_are_the_nearest_on_the_logarithm():
    rows = stored(1, free=True, grid=Grid(bits=3, qmin=-4, qmax=3, pot=True))
    scales = torch.tensor([[1.0], [1.4], [1.42], [3.0], [0.1]])
    assert gptq.within_bounds(scales, rows).flatten().tolist() == [1, 1, 2, 4, 0.125]


def test_the_damping_grows_until_moments_are_definite():
    """Of diag(1, 1, -0.5) the mean is a half: 0.01, 0.1 and 1 times that are too little, 10 times is enough."""
    h = torch.diag(torch.tensor([1.0, 1.0, -0.5])).unsqueeze(0)
    assert torch.equal(gptq.error_feedback(h, 0.01), torch.eye(3).unsqueeze(0))
    deeper = torch.diag(torch.tensor([9.0, 9.0, -14.0])).unsqueeze(0)  # a mean of 4 / 3, and ten times it 13.3
    assert gptq.error_feedback(deeper, 0.01) is None
    assert gptq.mean_diagonal(torch.zeros(1, 3, 3)).tolist() == [[pytest.approx(1e-10)]]


def test_errors_are_passed_on_by_the_triangular_factor():
    """H = R R' of an upper triangular R: here [[2, 1], [0, 1]], so that R_12 / R_22 = 1."""
    h = torch.tensor([[[5.0, 1.0], [1.0, 1.0]]])
    assert torch.allclose(gptq.error_feedback(h, 0.0), torch.tensor([[[1.0, 1.0], [0.0, 1.0]]]))


def test_without_definite_moments_corrected_weights_are_those_of_least_squares():
    h = torch.zeros(1, 2, 2)
    h[0, 0, 0] = 2.0
    c, w = torch.tensor([[[6.0, 0.0]]]), torch.tensor([[[1.0, 5.0]]])
    assert torch.allclose(gptq.corrected_weights(w, h, c, 0.0), torch.tensor([[[3.0, 5.0]]]))
    # W + (C - W H) / (H + rho mean): 1 + (6 - 2) / (2 + 0.5)
    assert torch.allclose(gptq.corrected_weights(w, h, c, 0.5), torch.tensor([[[1 + 4 / 2.5, 5.0]]]))
