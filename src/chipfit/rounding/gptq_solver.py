"""Weights and scales of one linear operator for given moments of its inputs, in closed form.

With the moments H [g, K, K] of the inputs, the error of rounded weights q in the outputs is (q - w) H (q - w)' for
every row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from chipfit.graph.ir import Node
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import Grid, fake_quantize, shape_for
from chipfit.quantizers.rounding import round_by_rule
from chipfit.rounding.moments import as_rows

#: share of the mean of diag(H) that is added to the diagonal before H is factorized
DAMPING = 0.01
#: columns that are rounded one by one before their errors move to the rest of the matrix
BLOCK = 64
#: scales tried for every row, as multiples of the scale that a search by diag(H) finds
CANDIDATES = (0.80, 0.89, 0.98, 1.06, 1.15)
#: number of scales that this search tries
TRIES = 36
#: numbers that are rounded at a time, so that they fit the processor's cache
NUMBERS_AT_ONCE = 1 << 17
#: a row of more weights tries these candidates alone, since each takes long
LONG_ROW, CANDIDATES_OF_LONG_ROWS = 1024, (1.0,)
#: distance of solved scales from their bounds in log2, for two roundings to float32
_MARGIN = 4e-6


@dataclass
class WeightRows:
    """The grid and the numbers of an operator's weight, seen as [g, O/g, K]."""

    grid: Grid
    scale: Tensor  #: of each weight, [g, O/g, K], or of each row, [g, O/g, 1]
    zero: Tensor  #: zero point, in the shape of `scale`
    ids: Tensor | None  #: entry of the stored scale that each row has, int64 [g, O/g]; None: the scale stays
    low: Tensor  #: least value that the platform allows for each entry of the scale, [entries]
    high: Tensor  #: greatest value


def corrected_weights(w: Tensor, h: Tensor, c: Tensor, ridge: float) -> Tensor:
    """Return the weights with the least squared error to the wanted outputs.

    W* = W + (C - W H) (H + rho mean(diag H) I)^-1

    Args:
        w: [g, O/g, K].
        h, c: moments of the inputs, and of the wanted outputs with the inputs.
        ridge: rho, which draws towards the old weights.
    """
    a, wanted = _damped(h, ridge), (c - w @ h).transpose(1, 2)
    lower, failed = torch.linalg.cholesky_ex(a)
    if bool(failed.any()):  # on the CPU, whose driver takes matrices without full rank
        return w + torch.linalg.lstsq(a.cpu(), wanted.cpu()).solution.transpose(1, 2).to(w.device)
    return w + torch.cholesky_solve(wanted, lower).transpose(1, 2)


def round_rows(
    w: Tensor, h: Tensor, rows: WeightRows, feedback: bool = True, candidates: Sequence[float] = CANDIDATES
) -> tuple[Tensor, Tensor, bool]:
    """Return weights on their grid with the least error in the outputs.

    Args:
        feedback: the error of a column moves to those behind it; else each weight takes its nearest quantized value.
        candidates: scales to try, as multiples of the scale that a search by diag(H) finds.

    Returns:
        q [g, O/g, K]; the entries of the scale; whether H could be factorized (else q has the nearest values).
    """
    g, o, k = w.shape
    tries = [rows.scale]
    if rows.ids is not None and _without_zero_points(rows.grid, rows.zero):
        best = search_scales(w, h, rows)
        factors = CANDIDATES_OF_LONG_ROWS if k > LONG_ROW else candidates
        tries = [within_bounds(best * r, rows)[rows.ids].unsqueeze(2) for r in factors]
    n = len(tries)
    scale, zero = torch.cat([t.expand(g, o, k) for t in tries], 1), rows.zero.expand(g, o, k).repeat(1, n, 1)
    shares, wanted = error_feedback(h) if feedback else None, w.repeat(1, n, 1)
    if shares is not None:
        q = round_columns(wanted, shares, scale, zero, rows.grid)
    else:
        q = NearestOnGrid(scale, zero, rows.grid)(wanted)
    factorized = shares is not None or not feedback
    if rows.ids is None:
        return q, rows.low, factorized
    ids, entries = rows.ids.flatten(), torch.zeros_like(rows.low)
    winner = torch.zeros_like(entries, dtype=torch.long)
    if n > 1:
        error = (((q - wanted) @ h) * (q - wanted)).sum(2).view(g, n, o)
        losses = [torch.zeros_like(entries).index_add_(0, ids, e.flatten()) for e in error.unbind(1)]
        winner = torch.stack(losses).argmin(0)
    pick = winner[rows.ids].unsqueeze(1)  # [g, 1, O/g]
    scales = torch.stack([t[..., 0] for t in tries], 1).gather(1, pick)[:, 0]
    q = q.view(g, n, o, k).gather(1, pick.unsqueeze(3).expand(g, 1, o, k))[:, 0]
    return q, entries.index_copy_(0, ids, scales.flatten()), factorized


def round_columns(w: Tensor, shares: Tensor, scale: Tensor, zero: Tensor, grid: Grid) -> Tensor:
    """Round columns one after another; the error of each moves to the columns that are still to come.

    With H = R R' for an upper triangular R, the error (q - w) H (q - w)' is the sum over columns j of the squares of
    R_jj (q_j - w_j + sum over i < j of (q_i - w_i) R_ij / R_jj). Each q_j is the value on the grid that makes its
    square least.

    Args:
        w, scale, zero: [g, R, K].
        shares: R_ij / R_jj, [g, K, K].

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1, without the inverse of H by theorem 6 of Chee et al.
    2023, arXiv:2307.13304.
    """
    # [g, K, R], so that the numbers of a column are contiguous
    w, scale, zero = (x.transpose(1, 2).contiguous() for x in (w, scale, zero))
    wanted, q, size = w.clone(), torch.empty_like(w), w.shape[1]
    nearest = NearestOnGrid(scale, zero, grid)
    for start in range(0, size, BLOCK):
        end = min(start + BLOCK, size)
        part, errors, within = wanted[:, start:end], torch.empty_like(w[:, start:end]), shares[:, start:end, start:end]
        for i in range(end - start):
            nearest(part[:, i], start + i, out=q[:, start + i])
            torch.sub(w[:, start + i], q[:, start + i], out=errors[:, i])
            part[:, i + 1 :].addcmul_(within[:, i, i + 1 :].unsqueeze(2), errors[:, i].unsqueeze(1))
        wanted[:, end:].baddbmm_(shares[:, start:end, end:].transpose(1, 2), errors)
    return q.transpose(1, 2).contiguous()


class NearestOnGrid:
    """Rounding of weights to the nearest values of a grid with these scales and zero points, like `fake_quantize`.

    What does not depend on the weights is computed once, since the columns of a matrix come one by one.
    """

    def __init__(self, scale: Tensor, zero: Tensor, grid: Grid) -> None:
        self.scale, self.zero, self.grid = scale, zero, grid
        self.symmetric = _without_zero_points(grid, zero)

    def __call__(self, w: Tensor, column: int | None = None, out: Tensor | None = None) -> Tensor:
        """Round all of [g, R, K], or one column [g, R] where scales are [g, K, R]; into `out`, if it is given."""
        s = self.scale if column is None else self.scale[:, column]
        if self.symmetric:
            codes = round_by_rule(w / s, self.grid.rounding).clamp_(self.grid.qmin, self.grid.qmax)
            return codes.mul_(s) if out is None else torch.mul(codes, s, out=out)
        q = fake_quantize(w, s, self.zero if column is None else self.zero[:, column], self.grid)
        return q if out is None else out.copy_(q)


def _without_zero_points(grid: Grid, zero: Tensor) -> bool:
    """Return whether values are codes times scales; only zero points that may be any code are looked at."""
    return grid.table is None and (grid.zero == 0 or not bool(zero.any()))


def error_feedback(h: Tensor) -> Tensor | None:
    """Return R_ij / R_jj of the damped H for `round_columns`; None if no damping up to ten means makes H definite."""
    damping = DAMPING
    while damping <= 10:
        # rows and columns in reverse order, so that the factor is upper triangular
        lower, failed = torch.linalg.cholesky_ex(_damped(h, damping).flip(1, 2))
        r = lower.flip(1, 2)
        shares = r.div_(r.diagonal(dim1=1, dim2=2).unsqueeze(1).clone())
        if bool((failed == 0).all() & torch.isfinite(shares).all()):
            return shares
        damping *= 10
    return None


def _damped(h: Tensor, share: float) -> Tensor:
    """Return H with a share of its mean diagonal added to the diagonal; the mean counts as 1e-10 at least."""
    mean = h.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).clamp_min(1e-10)  # [g, 1]
    return h + torch.diag_embed((share * mean).expand(h.shape[:2]))


def search_scales(w: Tensor, h: Tensor, rows: WeightRows) -> Tensor:
    """Return the entries of the scale with the least sum of (damped H)_jj (q_j - w_j)^2, of `TRIES` tried."""
    assert rows.ids is not None
    weights = _damped(h, DAMPING).diagonal(dim1=1, dim2=2).unsqueeze(2)
    flat, n = rows.ids.flatten(), len(rows.low)
    top = w.new_zeros(n).scatter_reduce_(0, flat, w.abs().amax(2).flatten(), "amax")
    half = (rows.grid.qmax - rows.grid.qmin) / 2
    shares = torch.linspace(0.25, 1.1, TRIES).unsqueeze(1).to(w.device)
    tries = within_bounds((top / half * shares).clamp_min(1e-12), rows)  # [tries, n]
    losses = []
    for some in tries.split(max(1, NUMBERS_AT_ONCE // w.numel())):
        q = NearestOnGrid(some[:, rows.ids].unsqueeze(3), rows.zero, rows.grid)(w)  # [some, g, O/g, K]
        error = (q.sub_(w).square_() @ weights).flatten(1)
        losses.append(torch.zeros_like(some).index_add_(1, flat, error))
    return tries.gather(0, torch.cat(losses).argmin(0, keepdim=True))[0]


def within_bounds(scale: Tensor, rows: WeightRows) -> Tensor:
    """Return the nearest scales that the platform allows."""
    if rows.grid.pot:
        scale = torch.exp2(torch.round(torch.log2(scale)))
    return torch.minimum(torch.maximum(scale, rows.low), rows.high)


# ---------------------------------------------------------------- how a weight is stored, and bounds of its scale


def weight_rows(plan: Plan, node: Node, w: Tensor) -> WeightRows:
    """Return how the weight `w` of `node` is stored, as rows, with the bounds of its scale, on the device of `w`."""
    stored = plan[node.weight]

    def spread(p: Tensor) -> Tensor:
        return as_rows(node, shape_for(p, w, stored.axis or 0).expand(w.shape))

    scale, zero = (spread(p) for p in stored.numbers_on(w.device))
    ids = spread(torch.arange(stored.scale.numel()).view(stored.scale.shape))
    bounds = scale_bounds(plan, node.weight)
    free = bounds is not None and bool((ids == ids[..., :1]).all())
    low, high = (p.to(w.device) for p in (bounds if bounds is not None and free else (stored.scale.reshape(-1),) * 2))
    return WeightRows(stored.grid, scale, zero, ids[..., 0].to(w.device) if free else None, low, high)


def scale_bounds(plan: Plan, name: str) -> tuple[Tensor, Tensor] | None:
    """Return the least and greatest value of each entry of a scale [entries] while all other scales stay.

    Returns:
        None if other tensors share this scale, or rules other than bounds hold for it.
    """
    held = name in plan.fixed or plan[name].grid.pair_limit is not None or any(name == w for w, _ in plan.sums)
    if held or any(name in group for group in plan.ties):
        return None
    scale = plan[name].scale.reshape(-1)
    low = torch.full_like(scale, plan[name].grid.scale_min or torch.finfo(torch.float32).tiny)
    high = torch.full_like(scale, 2.0**100)
    for limit in plan.limits:
        exponents = dict(limit.terms)
        e = exponents.pop(name, 0)
        if not e or not all(plan.quantized(t) for t in exponents):
            continue
        rest = sum((x * torch.log2(plan[t].scale.double()) for t, x in exponents.items()), torch.zeros(()))
        ends = [(limit.low + _MARGIN - rest) / e, (limit.high - _MARGIN - rest) / e]
        below, above = ends if e > 0 else ends[::-1]
        per_entry = rest.dim() == 0 or rest.shape == scale.shape
        low = torch.maximum(low, torch.exp2(below if per_entry else below.max()).to(scale.dtype))
        high = torch.minimum(high, torch.exp2(above if per_entry else above.min()).to(scale.dtype))
    return torch.minimum(low, scale), torch.maximum(high, scale)


def scale_is_allowed(plan: Plan, name: str, scale: Tensor) -> bool:
    """Return whether a tensor may have this scale while all others stay."""
    bounds = scale_bounds(plan, name)
    return bounds is not None and bool(((scale >= bounds[0]) & (scale <= bounds[1])).all())
