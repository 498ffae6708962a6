"""Legality as one projection: the least change of scales that satisfies every cross-tensor rule of a platform.

In v = log2(scale) a tie is v_a = v_b, a bound on a product of scales is a linear row, and a power-of-two scale is
an integer variable. Tied tensors are one variable (union-find); what is left is one small mixed-integer linear
program that minimises the total |v - v_wanted|. Only tensors that some broken row can reach enter it, so scales
that are legal already keep their bits. Rules marked `hard: false` are preferences and are not enforced.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from chipfit.errors import UnsupportedError
from chipfit.platform.schema import Rule
from chipfit.quantizers.grids import Grid

#: an equality holds up to this much in log2: two roundings of float32
_EQUAL = 2.5e-7
#: solved scales keep this much in log2 inside their bounds, so that rounding to float32 does not cross one
_MARGIN = 2e-6


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
        UnsupportedError: two operators dictate different values for one tensor, or for tensors that must share theirs.
    """
    out: dict[str, tuple[float, int]] = {}
    by: dict[str, str] = {}
    for b in bindings:
        for r in b.rules:
            if r.fix and r.hard:
                for t in _slot(b, r.fix):
                    value = (float(r.scale or 0), int(r.zp or 0))
                    if out.setdefault(t, value) != value:
                        raise _two_values(f"Tensor '{t}' is", f"{out[t]} by {by[t]} and {value} by {b.op}")
                    by.setdefault(t, b.op)
    for group in tie_groups(bindings):
        given = {out[t]: t for t in sorted(group) if t in out}
        if len(given) > 1:
            raise _two_values(
                "Tensors that must share one scale are",
                " and ".join(f"{v} for '{t}' by {by[t]}" for v, t in given.items()),
            )
        for value in given:
            out.update(dict.fromkeys(group, value))
    return out


def _two_values(what: str, got: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} fixed to two different (scale, zero point)",
        got=got,
        hint="keep the operator that joins them in float with overrides",
    )


@dataclass(frozen=True, slots=True)
class Row:
    """One product rule with its tensors: low <= sum of exponent * log2(scale) <= high, for every channel."""

    op: str
    rule: Rule
    terms: tuple[tuple[str, int], ...]  #: (tensor, exponent)
    low: float
    high: float

    def total(self, log: Mapping[str, np.ndarray]) -> np.ndarray:
        """The sum per channel: [] or [C]; a scale without channels counts for each."""
        return sum((e * log[t] for t, e in self.terms), start=np.zeros(()))

    def holds(self, log: Mapping[str, np.ndarray]) -> bool:
        total, slack = self.total(log), _EQUAL if self.low == self.high else 1e-12
        return bool(np.all(total >= self.low - slack) and np.all(total <= self.high + slack))


def rows(bindings: Sequence[Binding], tensors: Mapping[str, Any]) -> list[Row]:
    """The hard product rules over `tensors`; a rule with a slot that is float here bounds nothing.

    A slot with several tensors ("ins") gives one row for each; two such slots are paired in order.
    """
    out = []
    for b in bindings:
        for r in b.rules:
            if r.mono is None or not r.hard:
                continue
            picks = [([t for t in _slot(b, s) if t in tensors], e) for s, e in r.mono.items()]
            if not all(ts for ts, _ in picks):
                continue
            low, high = _bounds(r, b.attrs)
            for v in range(max(len(ts) for ts, _ in picks)):
                out.append(Row(b.op, r, tuple((ts[min(v, len(ts) - 1)], e) for ts, e in picks), low, high))
    return out


def _bounds(rule: Rule, attrs: Mapping[str, Any]) -> tuple[float, float]:
    """[low, high] in log2 of the product of scales."""
    low, high = rule.bounds
    times = float(attrs.get(rule.times, 1.0)) if rule.times else 1.0
    if times == 0:
        return -math.inf, math.inf
    low, high = sorted((low / times, high / times))  # a negative factor turns the bounds round
    strictly = _MARGIN if rule.lt is not None and high == rule.lt / abs(times) else 0.0
    return (math.log2(low) if low > 0 else -math.inf), (math.log2(high) - strictly if 0 < high < math.inf else math.inf)


def project(wanted: Mapping[str, Var], bindings: Sequence[Binding]) -> dict[str, Var]:
    """The legal scales nearest to the wanted ones.

    Args:
        wanted: by tensor name; members of a tie must already agree (see `tie_groups`) or the first one's wins.
        bindings: rules with tensor names. Biases are not variables: their scale follows from others.

    Returns:
        The same names. A tensor whose rules hold already is returned as it came.

    Raises:
        UnsupportedError: no scales satisfy all rules; names the smallest set of rules that contradict each other.
    """
    out = dict(wanted)
    pinned = {t: v for t, v in fixed(bindings).items() if t in out}
    for name, (scale, zero) in pinned.items():
        v = out[name]
        out[name] = replace(v, scale=torch.full_like(v.scale, scale), zero_point=torch.full_like(v.zero_point, zero))
    leader = {t: t for t in out}
    for group in tie_groups(bindings):
        members = sorted(t for t in group if t in out)
        for t in members:
            leader[t] = members[0]
            out[t] = replace(out[t], scale=out[members[0]].scale, zero_point=out[members[0]].zero_point)
    _zero_points(out, bindings, leader, pinned)

    # from here on a tie group is its leader
    log = {t: np.log2(np.maximum(out[t].scale.detach().double().numpy(), 2.0**-126)) for t in set(leader.values())}
    pot = {leader[t] for t, v in out.items() if v.grid.pot}
    floor: dict[str, float] = {}
    for t, v in out.items():
        if v.grid.scale_min:
            floor[leader[t]] = max(floor.get(leader[t], -126.0), math.log2(np.float32(v.grid.scale_min)))
    table = [replace(r, terms=_joined((leader[t], e) for t, e in r.terms)) for r in rows(bindings, out)]
    held = {leader[t] for t in pinned}
    todo = {t for r in table if not r.holds(log) for t, _ in r.terms}
    todo |= {
        t
        for t in log
        if t not in held
        and (np.any(log[t] < floor.get(t, -126.0) - 1e-9) or (t in pot and np.any(log[t] != np.rint(log[t]))))
    }
    if any(not r.terms and not r.holds(log) for r in table):  # every tensor of the row is tied to another of it
        raise _contradiction([r for r in table if not r.terms and not r.holds(log)][:1])
    reading: dict[str, list[Row]] = {}
    for r in table:
        for t, _ in r.terms:
            reading.setdefault(t, []).append(r)
    queue = list(todo)
    while queue:  # whatever shares a row with a tensor that moves may have to move too
        near = {u for r in reading.get(queue.pop(), ()) for u, _ in r.terms} - todo - held
        todo |= near
        queue += near
    todo -= held
    active = [r for r in table if any(t in todo for t, _ in r.terms) or not r.holds(log)]
    if not todo and not active:
        return out
    solved = _solve(active, log, todo, pot, floor)
    if solved is None:
        raise _contradiction(_conflict(active, log, todo, pot, floor))
    for t in out:
        new = solved.get(leader[t])
        if new is not None and np.any(np.abs(new - log[leader[t]]) > _EQUAL):
            v = out[t]
            moved = torch.from_numpy(np.asarray(np.exp2(new))).to(torch.float32).reshape(v.scale.shape)
            stays = torch.from_numpy(np.asarray(np.abs(new - log[leader[t]]) <= _EQUAL)).reshape(v.scale.shape)
            out[t] = replace(v, scale=torch.where(stays, v.scale, moved))
    return out


def _joined(terms: Iterator[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Exponents of the same tensor added; those that cancel are gone."""
    out: dict[str, int] = {}
    for t, e in terms:
        out[t] = out.get(t, 0) + e
    return tuple((t, e) for t, e in out.items() if e)


def _zero_points(
    out: dict[str, Var], bindings: Sequence[Binding], leader: Mapping[str, str], pinned: Mapping[str, Any]
) -> None:
    """Zero points moved to one that every `zero` rule of the tied tensors allows; the scale grows so that the range stays covered."""
    allowed: dict[str, set[int]] = {}
    for b in bindings:
        for r in b.rules:
            if r.zero is None or not r.hard:
                continue
            for t in (t for t in _slot(b, r.zero) if t in out):
                said = set(r.eq) if isinstance(r.eq, (list, tuple)) else {int(r.eq)}
                left = allowed.setdefault(leader[t], said)
                allowed[leader[t]] = left & said
                if not left & said or (t in pinned and pinned[t][1] not in said):
                    raise UnsupportedError(
                        f"No zero point of '{t}' is allowed by every rule",
                        where=f"operator {b.op}",
                        allowed=f"{sorted(said)} here",
                    )
    for t, head in leader.items():
        if head in allowed:
            v = out[t]
            now = int(v.zero_point.reshape(-1)[0])
            if now not in allowed[head]:
                zero = min(sorted(allowed[head]), key=lambda a: abs(a - now))
                low, high = v.grid.qmin - now, v.grid.qmax - now  # codes on either side of zero
                sides = [
                    (have, room) for have, room in ((-low, zero - v.grid.qmin), (high, v.grid.qmax - zero)) if room > 0
                ]
                grow = max(have / room for have, room in sides)
                out[t] = replace(v, scale=v.scale * max(grow, 1.0), zero_point=torch.full_like(v.zero_point, zero))


def _solve(
    table: Sequence[Row], log: Mapping[str, np.ndarray], free: set[str], pot: set[str], floor: Mapping[str, float]
) -> dict[str, np.ndarray] | None:
    """log2 scales of the free tensors that satisfy the rows with the least sum of |v - wanted|; None when there are none."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, hstack, vstack

    names = sorted(free)
    start = dict(zip(names, np.cumsum([0, *(log[t].size for t in names)])))
    n = sum(log[t].size for t in names)
    wanted = np.concatenate([log[t].reshape(-1) for t in names]) if names else np.zeros(0)
    integral = np.concatenate([np.full(log[t].size, t in pot) for t in names]) if names else np.zeros(0)
    r_, c_, v_, low, high, m = [], [], [], [], [], 0
    for row in table:
        width = max(log[t].size for t, _ in row.terms)
        at = np.arange(width)
        known = np.zeros(width)
        for t, e in row.terms:
            if t in free:
                r_.append(m + at)
                c_.append(start[t] + (at if log[t].size > 1 else 0 * at))
                v_.append(np.full(width, float(e)))
            else:
                known = known + e * log[t]
        a, z = row.low - known, row.high - known
        if all(t in pot for t, _ in row.terms if t in free):  # a sum of integers
            a, z = np.ceil(a - 1e-9), np.floor(z + 1e-9)
        elif row.low < row.high:
            inside = min(_MARGIN, (row.high - row.low) / 2)
            a, z = a + inside, z - inside
        low.append(a)
        high.append(z)
        m += width
    if not names:
        return {} if all(np.all(a <= 0) and np.all(z >= 0) for a, z in zip(low, high)) else None
    eye = eye_array(n)
    entries = (np.concatenate(v_), (np.concatenate(r_), np.concatenate(c_))) if m else ([], ([], []))
    rules = hstack([csr_array(entries, shape=(m, n)), csr_array((m, n))])
    matrix = vstack([rules, hstack([eye, -eye]), hstack([eye, eye])]).tocsr()  # d >= |v - wanted|
    none = np.full(n, np.inf)
    # a floor that float32 holds is kept by a power of two above it, and by other scales with a rounding's margin
    least = [np.full(log[t].size, floor[t] + (0.0 if t in pot else _MARGIN) if t in floor else -126.0) for t in names]
    answer = milp(
        np.r_[np.zeros(n), np.ones(n)],
        constraints=LinearConstraint(
            matrix, np.concatenate([*low, -none, wanted]), np.concatenate([*high, wanted, none])
        ),
        bounds=Bounds(np.r_[np.concatenate(least), np.zeros(n)], np.r_[np.full(n, 126.0), none]),
        integrality=np.r_[integral, np.zeros(n)],
    )
    if answer.x is None:
        return None
    v = np.where(integral > 0, np.rint(answer.x[:n]), answer.x[:n])
    return {t: v[start[t] : start[t] + log[t].size].reshape(log[t].shape) for t in names}


def _conflict(
    table: Sequence[Row], log: Mapping[str, np.ndarray], free: set[str], pot: set[str], floor: Mapping[str, float]
) -> list[Row]:
    """A smallest subset of the rows that has no solution (QuickXplain, Junker 2004)."""

    def fails(some: Sequence[Row]) -> bool:
        return _solve(some, log, free, pot, floor) is None

    def search(given: list[Row], new: bool, rest: list[Row]) -> list[Row]:
        if new and fails(given):
            return []
        if len(rest) == 1:
            return rest
        half = len(rest) // 2
        second = search(given + rest[:half], True, rest[half:])
        return search(given + second, bool(second), rest[:half]) + second

    return search([], False, list(table))


def _contradiction(conflict: Sequence[Row]) -> UnsupportedError:
    from chipfit.platform.show import rule_text

    return UnsupportedError(
        "No scales satisfy all rules of the platform together",
        got="; ".join(
            f"{r.op} over {', '.join(repr(t) for t, _ in r.terms) or 'tied tensors'}: {rule_text(r.rule)}"
            for r in conflict
        ),
        hint="keep one of these layers in float with overrides={'layer': 'float'}",
    )
