"""Legality as one projection: the least change of scales that satisfies every cross-tensor rule of a platform.

In v = log2(scale) a tie is v_a = v_b, a bound on a product of scales is a linear row, and a power-of-two scale is
an integer variable. Ties and fixed values are merged by union-find; what is left is one small mixed-integer
linear program that minimises the total |v - v_wanted|. Tensors whose scales are legal already keep them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Rule
from chipfit.quantizers.grids import Grid

#: rows hold up to this much in log2: one part in a hundred million of the scale, below float32's resolution
_SLACK = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The rules of one operator with the names of the tensors in its slots."""

    op: str
    rules: tuple[Rule, ...]
    slots: Mapping[str, tuple[str, ...]]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Var:
    """One tensor's scale and zero point, wanted or legal."""

    scale: torch.Tensor  #: float32, [] or [C]
    zero_point: torch.Tensor  #: int32, same shape
    grid: Grid


def _slot(binding: Binding, name: str) -> tuple[str, ...]:
    slots = binding.slots
    if name == "outs":
        return slots.get("outs", slots.get("out", ()))
    if name == "ins":
        return slots.get("ins", tuple(t for k in ("in0", "in1", "in2") for t in slots.get(k, ())))
    return slots.get(name, ())


def tie_groups(bindings: Sequence[Binding]) -> list[set[str]]:
    """Tensors that must share scale and zero point, joined over all hard ties; groups of two or more, sorted."""
    parent: dict[str, str] = {}

    def find(t: str) -> str:
        parent.setdefault(t, t)
        while parent[t] != t:
            parent[t] = parent[parent[t]]
            t = parent[t]
        return t

    for b in bindings:
        for r in b.rules:
            if r.tie and r.hard:
                members = [t for s in r.tie for t in _slot(b, s)]
                for t in members[1:]:
                    parent[find(t)] = find(members[0])
    groups: dict[str, set[str]] = {}
    for t in parent:
        groups.setdefault(find(t), set()).add(t)
    return sorted((g for g in groups.values() if len(g) > 1), key=sorted)


def fixed(bindings: Sequence[Binding]) -> dict[str, tuple[float, int]]:
    """Tensors whose scale and zero point the hardware dictates, ties included.

    Raises:
        UnsupportedError: two operators dictate different values for one tensor.
    """
    out: dict[str, tuple[float, int]] = {}
    for b in bindings:
        for r in b.rules:
            if r.fix and r.hard:
                for t in _slot(b, r.fix):
                    value = (float(r.scale or 0), int(r.zp or 0))
                    if out.setdefault(t, value) != value:
                        raise UnsupportedError(f"Tensor '{t}' is fixed to two different scales", got=f"{out[t]} and {value}")
    for group in tie_groups(bindings):
        given = {out[t] for t in group if t in out}
        if len(given) == 1:
            out.update(dict.fromkeys(group, given.pop()))
    return out


def _bounds(rule: Rule, attrs: Mapping[str, Any]) -> tuple[float, float]:
    """[low, high] in log2 of the product of scales."""
    times = abs(float(attrs.get(rule.times, 1.0))) if rule.times else 1.0
    if times == 0:
        return -math.inf, math.inf
    if rule.eq is not None:
        v = math.log2(float(rule.eq) / times)
        return v, v
    low = math.log2(rule.min / times) if rule.min is not None and rule.min > 0 else -math.inf
    top = rule.max if rule.max is not None else rule.lt
    high = math.log2(top / times) if top is not None else math.inf
    if rule.max is None and rule.lt is not None:
        high -= 1e-6  # strictly below
    return low, high


def rows(bindings: Sequence[Binding], sizes: Mapping[str, int]) -> list[tuple[dict[tuple[str, int], int], float, float, Rule]]:
    """Every hard product rule as {(tensor, channel): exponent}, low, high in log2; one row per channel."""
    out = []
    for b in bindings:
        for r in b.rules:
            if r.mono is None or not r.hard:
                continue
            picks = [(_slot(b, s), e) for s, e in r.mono.items()]
            if any(not [t for t in ts if t in sizes] for ts, _ in picks):
                continue  # a slot that is float here has no scale to bound
            low, high = _bounds(r, b.attrs)
            variants = max(len(ts) for ts, _ in picks)
            for v in range(variants):
                chosen = [(ts[min(v, len(ts) - 1)], e) for ts, e in picks]
                width = max(sizes.get(t, 1) for t, _ in chosen)
                for c in range(width):
                    row: dict[tuple[str, int], int] = {}
                    for t, e in chosen:
                        key = (t, c if sizes[t] > 1 else 0)
                        row[key] = row.get(key, 0) + e
                    out.append((row, low, high, r))
    return out


def project(wanted: Mapping[str, Var], bindings: Sequence[Binding]) -> dict[str, Var]:
    """The legal scales nearest to the wanted ones.

    Args:
        wanted: by tensor name; members of a tie must already agree (see `tie_groups`) or the first one's wins.
        bindings: rules with tensor names. Biases are not variables: their scale follows from others.

    Returns:
        The same names. A tensor whose rules hold already is returned as it came.

    Raises:
        UnsupportedError: no scales satisfy all rules; names the operators.
    """
    out = dict(wanted)
    pinned = {t: v for t, v in fixed(bindings).items() if t in out}
    for name, (fixed_scale, fixed_zero) in pinned.items():
        v = out[name]
        out[name] = Var(scale=torch.full_like(v.scale, fixed_scale), zero_point=torch.full_like(v.zero_point, fixed_zero), grid=v.grid)
    leader: dict[str, str] = {}
    for group in tie_groups(bindings):
        members = sorted(t for t in group if t in out)
        for t in members:
            leader[t] = next((m for m in members if m in pinned), members[0])
            first = out[leader[t]]
            out[t] = Var(scale=first.scale, zero_point=first.zero_point, grid=out[t].grid)
    _zero_rules(out, bindings)

    sizes = {t: v.scale.numel() for t, v in out.items()}
    log = {t: np.log2(np.maximum(v.scale.detach().double().numpy().reshape(-1), 2.0**-126)) for t, v in out.items()}
    pot = {t for t, v in out.items() if v.grid.pot}
    floor = {t: math.log2(v.grid.scale_min) for t, v in out.items() if v.grid.scale_min}
    table = [(row, low, high, r) for row, low, high, r in rows(bindings, sizes)]
    merged: list[tuple[dict[tuple[str, int], int], float, float]] = []
    for row, low, high, _ in table:
        joined: dict[tuple[str, int], int] = {}
        for (t, c), e in row.items():
            key = (leader.get(t, t), c)
            joined[key] = joined.get(key, 0) + e
        merged.append(({k: e for k, e in joined.items() if e}, low, high))

    broken = any(not _holds(row, low, high, log) for row, low, high in merged)
    broken = broken or any((log[t] < f - _SLACK).any() for t, f in floor.items())
    broken = broken or any((np.abs(log[t] - np.rint(log[t])) > _SLACK).any() for t in pot)
    if not broken:
        return out
    solved = _solve(merged, log, pot, floor, leader, set(pinned), bindings)
    for t in out:
        new = solved.get(leader.get(t, t))
        if new is None or np.array_equal(new, log[leader.get(t, t)]):
            continue
        moved = np.abs(new - log[leader.get(t, t)]) > _SLACK
        legal = np.where(moved, np.exp2(new), out[t].scale.double().numpy().reshape(-1))
        projected = torch.from_numpy(legal).to(torch.float32).reshape(out[t].scale.shape)
        out[t] = Var(scale=projected, zero_point=out[t].zero_point, grid=out[t].grid)
    return out


def _zero_rules(out: dict[str, Var], bindings: Sequence[Binding]) -> None:
    for b in bindings:
        for r in b.rules:
            if r.zero is None or not r.hard or r.eq is None:
                continue
            allowed = list(r.eq) if isinstance(r.eq, (list, tuple)) else [int(r.eq)]
            for t in _slot(b, r.zero):
                if t in out:
                    z = out[t].zero_point
                    near = min(allowed, key=lambda a: abs(a - int(z.reshape(-1)[0])))
                    if int(z.reshape(-1)[0]) not in allowed:
                        out[t] = Var(scale=out[t].scale, zero_point=torch.full_like(z, near), grid=out[t].grid)


def _holds(row: Mapping[tuple[str, int], int], low: float, high: float, log: Mapping[str, np.ndarray]) -> bool:
    total = sum(e * float(log[t][c]) for (t, c), e in row.items())
    return low - _SLACK <= total <= high + _SLACK


def _solve(
    table: list[tuple[dict[tuple[str, int], int], float, float]], log: Mapping[str, np.ndarray], pot: set[str],
    floor: Mapping[str, float], leader: Mapping[str, str], pinned: set[str], bindings: Sequence[Binding],
) -> dict[str, np.ndarray]:  # fmt: skip
    """Minimise sum |v - wanted| over all leaders' log2 scales subject to the rows; HiGHS does the work."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_matrix

    names = sorted({leader.get(t, t) for t in log})
    index = {(t, c): i for i, (t, c) in enumerate((t, c) for t in names for c in range(len(log[t])))}
    n = len(index)
    wanted = np.concatenate([log[t] for t in names]) if names else np.zeros(0)
    rr: list[int] = []
    cc: list[int] = []
    vv: list[float] = []
    low: list[float] = []
    high: list[float] = []
    for k, (row, a, z) in enumerate(table):
        for key, e in row.items():
            rr.append(k)
            cc.append(index[key])
            vv.append(e)
        low.append(a)
        high.append(z)
    m = len(table)
    for j in range(n):  # d_j >= |v_j - wanted_j|
        rr += [m + 2 * j, m + 2 * j, m + 2 * j + 1, m + 2 * j + 1]
        cc += [j, n + j, j, n + j]
        vv += [1, -1, 1, 1]
        low += [-math.inf, wanted[j]]
        high += [wanted[j], math.inf]
    lower, upper, integral = np.full(n, -126.0), np.full(n, 126.0), np.zeros(n)
    members: dict[str, list[str]] = {}
    for t in log:
        members.setdefault(leader.get(t, t), []).append(t)
    for (t, _), j in index.items():
        group = members[t]
        lower[j] = max([floor[g] for g in group if g in floor], default=-126.0)
        integral[j] = any(g in pot for g in group)
        if any(g in pinned for g in group):
            lower[j] = upper[j] = wanted[j]
    matrix = coo_matrix((vv, (rr, cc)), shape=(m + 2 * n, 2 * n)).tocsr()
    answer = milp(
        np.r_[np.zeros(n), np.ones(n)],
        constraints=LinearConstraint(matrix, low, high),
        bounds=Bounds(np.r_[lower, np.zeros(n)], np.r_[upper, np.full(n, np.inf)]),
        integrality=np.r_[integral, np.zeros(n)],
    )
    if answer.x is None:
        ops = sorted({b.op for b in bindings if any(r.mono or r.fix for r in b.rules)})
        raise UnsupportedError(
            "No scales satisfy all rules of the platform together",
            where=f"operators {', '.join(ops)}",
            hint="keep one of these layers in float with overrides={'layer': 'float'}",
        )
    v = np.where(integral > 0, np.rint(answer.x[:n]), answer.x[:n])
    return {t: v[[index[(t, c)] for c in range(len(log[t]))]] for t in names}
