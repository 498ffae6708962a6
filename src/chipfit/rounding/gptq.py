"""Weights, scales and codes of one linear operator for given moments, in closed form.

With H [g, K, K] the moments of what the operator reads, the error of rounded weights q in its outputs is
(q - w) H (q - w)' for every row on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.quantizers.rounding import by_rule

#: of the mean of diag(H), added to the diagonal before it is inverted
DAMPING = 0.01
#: columns that are rounded one by one before the rest of the matrix hears of it
BLOCK = 64
#: scales that are tried for every row, in units of the one that a search by diag(H) finds
CANDIDATES = (0.80, 0.89, 0.98, 1.06, 1.15)
#: scales that this search tries
TRIES = 36
#: numbers that are rounded at a time: so many stay in the processor's cache
_AT_ONCE = 1 << 17
#: the same, for rows of many weights, of which each try is slow
CANDIDATES_OF_LONG_ROWS = (1.0,)
LONG_ROW = 1024


@dataclass
class WeightRows:
    """How the weight of one operator is stored, seen as [g, O/g, K]."""

    grid: Grid
    scale: Tensor  #: of each number, [g, O/g, K] or of one that is the same for all K, [g, O/g, 1]
    zero: Tensor  #: zero point, the same shape
    ids: Tensor | None  #: which entry of the stored scale a row has, int64 [g, O/g]; None: it stays
    low: Tensor  #: least value of each entry that the platform allows, [entries]
    high: Tensor  #: greatest


def corrected_weights(w: Tensor, h: Tensor, c: Tensor, ridge: float) -> Tensor:
    """W* = W + (C - W H) (H + rho mean(diag H) I)^-1: what makes most of the outputs that are wanted.

    Args:
        w: [g, O/g, K].
        h, c: moments of inputs, and of wanted outputs with inputs.
        ridge: rho, which draws towards the weights as they are.
    """
    a, wanted = h + torch.diag_embed((ridge * _mean_diagonal(h)).expand(h.shape[:2])), (c - w @ h).transpose(1, 2)
    lower, failed = torch.linalg.cholesky_ex(a)
    if bool(failed.any()):
        return w + torch.linalg.lstsq(a, wanted).solution.transpose(1, 2)
    return w + torch.cholesky_solve(wanted, lower).transpose(1, 2)


def round_rows(
    w: Tensor,
    h: Tensor,
    rows: WeightRows,
    *,
    spread: bool = True,
    damping: float = DAMPING,
    candidates: Sequence[float] = CANDIDATES,
) -> tuple[Tensor, Tensor, bool]:
    """Weights on their grid with the least error in the outputs.

    Args:
        spread: the error of a column goes to those behind it; else each weight takes its nearest code.
        candidates: scales to try, in units of the one that a search by diag(H) finds.

    Returns:
        q [g, O/g, K]; the entries of the scale; whether H could be inverted (where it could not, q is the nearest).
    """
    g, o, k = w.shape
    entries = _scale_entries(rows)
    tries = [rows.scale]
    if rows.ids is not None and rows.grid.table is None and not bool(rows.zero.any()):
        best = _search_scales(w, h, rows, damping)
        tries = [_within_bounds(best * r, rows) for r in (CANDIDATES_OF_LONG_ROWS if k > LONG_ROW else candidates)]
        tries = [t[rows.ids].unsqueeze(2) for t in tries]
    many = torch.cat([t.expand(g, o, k) for t in tries], 1)
    passed = _error_feedback(h, damping) if spread else None
    again = w.repeat(1, len(tries), 1)
    zeros = rows.zero.expand(g, o, k).repeat(1, len(tries), 1)
    q = (
        round_columns(again, passed, many, zeros, rows.grid)
        if passed is not None
        else _Nearest(many, zeros, rows.grid)(again)
    )
    if rows.ids is None:
        return q, entries, passed is not None or not spread
    winner = torch.zeros(len(entries), dtype=torch.long)
    if len(tries) > 1:
        error = (((q - again) @ h) * (q - again)).sum(2).view(g, len(tries), o)
        losses = [torch.zeros(len(entries)).index_add_(0, rows.ids.flatten(), e.flatten()) for e in error.unbind(1)]
        winner = torch.stack(losses).argmin(0)
    q = q.view(g, len(tries), o, k)
    pick = winner[rows.ids]  # [g, O/g]
    scales = torch.stack([t[..., 0] for t in tries], 1).gather(1, pick.unsqueeze(1))[:, 0]
    entries = entries.clone().index_copy_(0, rows.ids.flatten(), scales.flatten())
    return q.gather(1, pick[:, None, :, None].expand(g, 1, o, k))[:, 0], entries, passed is not None or not spread


def round_columns(w: Tensor, passed: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """Columns one after another; the error of each goes to those that are still to come.

    With H = R R' for an upper triangular R, the error (q - w) H (q - w)' is the sum over columns j of the squares of
    R_jj (q_j - w_j + sum over i < j of (q_i - w_i) R_ij / R_jj), which the nearest code to the rest makes least.

    Args:
        w, scale, zero: [g, R, K].
        passed: R_ij / R_jj, [g, K, K].

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, without the inverse of H by theorem 6 of Chee et al.
    2023, arXiv:2307.13304.
    """
    # [g, K, R]: what is done to a column runs over numbers that lie side by side
    w, scale, zero = (x.transpose(1, 2).contiguous() for x in (w, scale, zero))
    heard, q, size = w.clone(), torch.empty_like(w), w.shape[1]
    nearest = _Nearest(scale, zero, grid)
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        part, errors, within = heard[:, start:end], torch.empty_like(w[:, start:end]), passed[:, start:end, start:end]
        for i in range(end - start):
            q[:, start + i] = nearest(part[:, i], start + i)
            errors[:, i] = w[:, start + i] - q[:, start + i]
            part[:, i + 1 :].addcmul_(within[:, i, i + 1 :].unsqueeze(2), errors[:, i].unsqueeze(1))
        heard[:, end:].baddbmm_(passed[:, start:end, end:].transpose(1, 2), errors)
    return q.transpose(1, 2).contiguous()


class _Nearest:
    """Weights to the nearest reals that a grid with these scales and zero points holds, as `fake_quantize` does it.

    Everything that does not depend on the weights is made once: the columns of a matrix come one by one.
    """

    def __init__(self, scale: Tensor, zero: Tensor, grid: Grid) -> None:
        self.scale, self.zero, self.grid = scale, zero, grid
        self.symmetric = grid.table is None and not bool(zero.any())

    def __call__(self, w: Tensor, column: int | None = None) -> Tensor:
        """All of [g, R, K], or one column [g, R] where scales are [g, K, R]."""
        s, z = (p if column is None else p[:, column] for p in (self.scale, self.zero))
        if not self.symmetric:
            return fake_quantize(w, s, z, self.grid)
        return by_rule(w / s, self.grid.rounding).clamp_(self.grid.qmin, self.grid.qmax).mul_(s)


def _error_feedback(h: Tensor, damping: float) -> Tensor | None:
    """What `gptq` takes, of the damped H; None where even ten times the mean does not make it definite."""
    while damping <= 10:
        damped = h + torch.diag_embed((damping * _mean_diagonal(h)).expand(h.shape[:2]))
        # with rows and columns in reverse, so that the factor is upper triangular
        lower, failed = torch.linalg.cholesky_ex(damped.flip(1, 2))
        if not bool(failed.any()):
            r = lower.flip(1, 2)
            passed = r.div_(r.diagonal(dim1=1, dim2=2).unsqueeze(1).clone())
            if bool(torch.isfinite(passed).all()):
                return passed
        damping *= 10
    return None


def _mean_diagonal(h: Tensor) -> Tensor:
    """Mean of the diagonal, [g, 1]; above 0 where all inputs are dead."""
    return h.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).clamp_min(1e-10)


def _search_scales(w: Tensor, h: Tensor, rows: WeightRows, damping: float) -> Tensor:
    """The entries of the scale with the least sum of (h_jj + damping) (q_j - w_j)^2, of `TRIES`."""
    assert rows.ids is not None
    weights = (h.diagonal(dim1=1, dim2=2) + damping * _mean_diagonal(h)).unsqueeze(2)
    flat, n = rows.ids.flatten(), len(rows.low)
    top = torch.zeros(n).scatter_reduce_(0, flat, w.abs().amax(2).flatten(), "amax")
    half = (rows.grid.qmax - rows.grid.qmin) / 2
    tries = _within_bounds(
        (top / half * torch.linspace(0.25, 1.1, TRIES).unsqueeze(1)).clamp_min(1e-12), rows
    )  # [tries, n]
    losses = []
    for some in tries.split(max(1, _AT_ONCE // w.numel())):
        q = _Nearest(some[:, rows.ids].unsqueeze(3), rows.zero, rows.grid)(w)  # [some, g, O/g, K]
        error = (q.sub_(w).square_() @ weights).flatten(1)
        losses.append(torch.zeros_like(some).index_add_(1, flat, error))
    return tries.gather(0, torch.cat(losses).argmin(0, keepdim=True))[0]


def _within_bounds(scale: Tensor, rows: WeightRows) -> Tensor:
    """The nearest entries that the platform allows."""
    if rows.grid.pot:
        scale = torch.exp2(torch.round(torch.log2(scale)))
    return torch.minimum(torch.maximum(scale, rows.low), rows.high)


def _scale_entries(rows: WeightRows) -> Tensor:
    """The entries of the scale as they are."""
    if rows.ids is None:
        return rows.low
    return torch.zeros_like(rows.low).index_copy_(0, rows.ids.flatten(), rows.scale[..., 0].flatten())
