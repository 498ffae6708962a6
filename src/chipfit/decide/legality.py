"""Legal scales by one projection: the least change of scales that satisfies every rule of a platform across tensors.

In v = log2(scale) a tie is v_a = v_b, a bound on a product of scales is linear, and a power-of-two scale is an integer
variable. Tied tensors are one variable (union-find); what is left is one small mixed-integer linear program that
minimises the total |v - v_wanted|. Only tensors that a violated bound can reach enter it, so scales that are legal
already stay bit-identical. Rules marked `hard: false` are preferences and are not enforced.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from chipfit.decide.constraints import Constraint, FixedQParams, dictated_qparams, hard_rules, tie_groups
from chipfit.errors import PlanError, UnsupportedError
from chipfit.graph.ir import Graph
from chipfit.operators.table import OPS
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Rule
from chipfit.quantizers.grids import in_16_bits
from chipfit.quantizers.scale_bounds import SLACK, ScaleBound
from chipfit.quantizers.stored import Stored

#: an equality holds up to this much in log2: two roundings of float32
_EQUAL = 2.5e-7
#: solved scales keep this much in log2 inside their bounds, so that rounding to float32 does not cross one
_MARGIN = 2e-6
#: the least scale, in log2: the least normal float32 number
_LEAST = -126.0
#: extra cost of moving a scale down instead of up: enough to decide between equal moves, too little to change others
_CLIPS = 1e-3

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBound(ScaleBound):
    """A bound on the product of scales of named tensors, and the rule that it comes from."""

    rule: Rule

    def __post_init__(self) -> None:
        """Accept a bound without terms: if ties leave no tensor, the projection finds out whether the bound holds."""

    def holds(self, log: Mapping[str, Array], slack: float | None = None) -> bool:
        """Return whether the bound holds; by default an equality up to two roundings of float32, all others exactly."""
        return ScaleBound.holds(self, log, slack or (_EQUAL if self.low == self.high else 1e-12))


def product_bounds(constraints: Iterable[Constraint], tensors: Collection[str]) -> list[ProductBound]:
    """Return the hard product rules over `tensors`; a rule with a slot whose tensors are all float bounds nothing.

    A slot with several tensors ("ins") gives one bound for each; two such slots are paired in order.
    """
    out = []
    for c, r in hard_rules(constraints):
        factors = [([t for t in c.of(slot) if t in tensors], e) for slot, e in (r.scale_product or {}).items()]
        if not factors or not all(ts for ts, _ in factors):
            continue
        low, high = _bounds(r, c.attrs)
        for k in range(max(len(ts) for ts, _ in factors)):
            terms = tuple((ts[min(k, len(ts) - 1)], e) for ts, e in factors)
            out.append(ProductBound(op=c.op, terms=terms, low=low, high=high, rule=r))
    return out


def _bounds(rule: Rule, attrs: Mapping[str, Any]) -> tuple[float, float]:
    """Return [low, high] of the product of scales, in log2."""
    low, high = rule.bounds
    times = float(attrs.get(rule.times, 1.0)) if rule.times else 1.0
    if times == 0:
        return -math.inf, math.inf
    low, high = sorted((low / times, high / times))  # a negative factor swaps the bounds
    strictly = _MARGIN if rule.lt is not None and high == rule.lt / abs(times) else 0.0
    return (math.log2(low) if low > 0 else -math.inf), (math.log2(high) - strictly if 0 < high < math.inf else math.inf)


def project(wanted: Mapping[str, Stored], constraints: Sequence[Constraint]) -> dict[str, Stored]:
    """Return the legal scales nearest to the wanted ones.

    Dictated numbers, ties and zero points have one answer each and come first. Then the scales that violate a bound,
    and those that share a bound with one that moves, are solved for together; all others are constants.

    Args:
        wanted: by tensor name; members of a tie have one scale (see `tie_groups`), or the first one's wins.
        constraints: rules with tensor names. Biases are not variables: their scale follows from others.

    Returns:
        As `wanted`. A tensor whose rules hold already is returned unchanged.

    Raises:
        UnsupportedError: no scales satisfy all rules; names a smallest set of rules that contradict each other.
    """
    out = dict(wanted)
    dictated = {t: numbers for t, numbers in dictated_qparams(constraints).items() if t in out}
    for name, (scale, zero) in dictated.items():
        v = out[name]
        out[name] = v.with_(scale=torch.full_like(v.scale, scale), zero_point=torch.full_like(v.zero_point, zero))
    leader = {t: t for t in out}
    for group in tie_groups(constraints):
        members = [t for t in group if t in out]
        for t in members[1:]:
            leader[t] = members[0]
            out[t] = out[t].with_(scale=out[members[0]].scale, zero_point=out[members[0]].zero_point)
    _allow_zero_points(out, constraints, leader, dictated)

    problem = _rules_of(out, constraints, leader)
    free = problem.to_move({leader[t] for t in dictated})
    active = [r for r in problem.bounds if any(t in free for t, _ in r.terms) or not r.holds(problem.log)]
    if not free and not active:
        return out
    solved = problem.solve(active, free)
    if solved is None:
        raise _contradiction(problem.conflict(active, free))
    for t, v in out.items():
        now, new = problem.log[leader[t]], solved.get(leader[t])
        if new is not None and np.any(np.abs(new - now) > _EQUAL):
            moved = torch.from_numpy(np.asarray(np.exp2(new))).to(torch.float32).reshape(v.scale.shape)
            stays = torch.from_numpy(np.asarray(np.abs(new - now) <= _EQUAL)).reshape(v.scale.shape)
            moved = in_16_bits(moved) if v.grid.short_scale else moved
            out[t] = v.with_(scale=torch.where(stays, v.scale, moved))
    return out


def _allow_zero_points(
    out: dict[str, Stored],
    constraints: Iterable[Constraint],
    leader: Mapping[str, str],
    dictated: Mapping[str, FixedQParams],
) -> None:
    """Move zero points to one that every `zero` rule of the tied tensors allows; scales grow to keep ranges covered."""
    allowed: dict[str, set[int]] = {}
    for c, r in hard_rules(constraints):
        if r.zero is None:
            continue
        here = set(r.eq) if isinstance(r.eq, (list, tuple)) else {int(r.eq)}
        for t in (t for t in c.of(r.zero) if t in out):
            allowed[leader[t]] = left = allowed.get(leader[t], here) & here
            if not left or (t in dictated and dictated[t][1] not in here):
                what = f"No zero point of '{t}' is allowed by every rule"
                raise UnsupportedError(what, where=f"operator {c.op}", allowed=f"{sorted(here)} here")
    for t, head in leader.items():
        v = out[t]
        now = int(v.zero_point.reshape(-1)[0])
        if now in allowed.get(head, {now}):
            continue
        zero = min(sorted(allowed[head]), key=lambda a: abs(a - now))
        low, high = v.grid.qmin - now, v.grid.qmax - now  # quantized values on either side of zero
        sides = ((-low, zero - v.grid.qmin), (high, v.grid.qmax - zero))
        grow = max(have / room for have, room in sides if room > 0)
        out[t] = v.with_(scale=v.scale * max(grow, 1.0), zero_point=torch.full_like(v.zero_point, zero))


def _rules_of(
    variables: Mapping[str, Stored], constraints: Iterable[Constraint], leader: Mapping[str, str]
) -> _Problem:
    """Return the rules over the leaders of the ties, each of which stands for its group."""
    scales = {t: variables[t].scale.detach().double().numpy() for t in leader.values()}
    log = {t: np.log2(np.maximum(s, 2.0**_LEAST)) for t, s in scales.items()}
    floor: dict[str, float] = {}
    for t, v in variables.items():
        if v.grid.scale_min:
            floor[leader[t]] = max(floor.get(leader[t], _LEAST), math.log2(np.float32(v.grid.scale_min)))
    bounds = product_bounds(constraints, variables)
    bounds = [replace(b, terms=_summed((leader[t], e) for t, e in b.terms)) for b in bounds]
    return _Problem(log, {leader[t] for t, v in variables.items() if v.grid.pot}, floor, bounds)


def _summed(terms: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Return terms with one exponent for each tensor; exponents that cancel are left out."""
    out: dict[str, int] = {}
    for t, e in terms:
        out[t] = out.get(t, 0) + e
    return tuple((t, e) for t, e in out.items() if e)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Bounds on the scales of some tensors, in log2."""

    log: Mapping[str, Array]  #: wanted scales, [] or [C]
    pot: Collection[str]  #: tensors whose scales are powers of two
    floor: Mapping[str, float]  #: least scale, where the hardware has one
    bounds: Sequence[ProductBound]

    def to_move(self, held: set[str]) -> set[str]:
        """Return the tensors that violate a rule, and all that bounds connect with one of them; never those `held`.

        Raises:
            UnsupportedError: a bound is violated whose tensors are all tied to each other.
        """
        violated = [b for b in self.bounds if not b.holds(self.log)]
        unsolvable = [b for b in violated if not b.terms]
        if unsolvable:
            raise _contradiction(unsolvable[:1])
        out = {t for b in violated for t, _ in b.terms}
        for t, v in self.log.items():
            is_illegal = (v < self.floor.get(t, _LEAST) - 1e-9) | (t in self.pot and v != np.rint(v))
            out |= {t} if t not in held and np.any(is_illegal) else set()
        bounds_of: dict[str, list[ProductBound]] = {}
        for b in self.bounds:
            for t, _ in b.terms:
                bounds_of.setdefault(t, []).append(b)
        queue = list(out)
        while queue:
            near = {u for b in bounds_of.get(queue.pop(), ()) for u, _ in b.terms} - out - held
            out |= near
            queue += near
        return out - held

    def solve(self, bounds: Sequence[ProductBound], free: Collection[str]) -> dict[str, Array] | None:
        """Return the scales of the free tensors that satisfy the bounds with the least sum of |v - wanted|.

        Of two solutions with equal sums, larger scales are preferred: smaller ones clip values that were seen. The
        variables are v and d >= |v - wanted|, and the sum of d is minimised; every bound is one linear constraint for
        each channel. Tensors that are not free are constants. Solved scales stay a little inside their bounds, since
        they are rounded to float32 afterwards; sums of integers need no such margin. None if there are no such scales.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import block_array, eye_array

        names = sorted(free)
        if not names:
            limits = (self._limits(b, ()) for b in bounds)
            return {} if all(np.all(a <= 0) and np.all(z >= 0) for a, z in limits) else None
        sizes = [self.log[t].size for t in names]
        start = dict(zip(names, np.cumsum([0, *sizes]), strict=False))
        n = sum(sizes)
        wanted = np.concatenate([self.log[t].reshape(-1) for t in names])
        integral = np.concatenate([np.full(self.log[t].size, t in self.pot) for t in names])
        # a power of two above a float32 floor stays above it; other scales need the margin of a rounding
        least = np.concatenate([np.full(self.log[t].size, self._floor(t)) for t in names])
        rules, low, high = self._rows(bounds, start, n)
        eye, none = eye_array(n), np.full(n, np.inf)
        down = 1 + _CLIPS  # v - d <= wanted <= v + d / down
        matrix = block_array([[rules, None], [eye, -eye], [down * eye, eye]], format="csr")
        at_least, at_most = np.concatenate([low, -none, down * wanted]), np.concatenate([high, wanted, none])
        within = LinearConstraint(matrix, at_least, at_most)
        box = Bounds(np.r_[least, np.zeros(n)], np.r_[np.full(n, -_LEAST), none])
        cost, whole = np.r_[np.zeros(n), np.ones(n)], np.r_[integral, np.zeros(n)]
        answer = milp(cost, constraints=within, bounds=box, integrality=whole)
        if answer.x is None:
            return None
        v = np.where(integral > 0, np.rint(answer.x[:n]), answer.x[:n])
        return {t: v[start[t] : start[t] + self.log[t].size].reshape(self.log[t].shape) for t in names}

    def _rows(self, bounds: Sequence[ProductBound], start: Mapping[str, int], n: int) -> tuple[Any, Array, Array]:
        """Return the bounds as rows of a sparse matrix [M, n], one for each channel, and the ends of each row [M].

        Args:
            start: free tensor -> its first column.
            n: number of columns, the scales of free tensors.
        """
        from scipy.sparse import csr_array

        at_row, at_column, factors, m = [np.zeros(0, int)], [np.zeros(0, int)], [np.zeros(0)], 0
        low, high = [np.zeros(0)], [np.zeros(0)]
        for bound in bounds:
            width = max(self.log[t].size for t, _ in bound.terms)
            for t, e in bound.terms:
                if t in start:
                    at_row.append(m + np.arange(width))
                    at_column.append(start[t] + np.arange(width) * (self.log[t].size > 1))
                    factors.append(np.full(width, float(e)))
            for side, limit in zip((low, high), self._limits(bound, start), strict=True):
                side.append(np.broadcast_to(limit, width))
            m += width
        entries = np.concatenate(factors), (np.concatenate(at_row), np.concatenate(at_column))
        return csr_array(entries, shape=(m, n)), np.concatenate(low), np.concatenate(high)

    def _floor(self, t: str) -> float:
        return _LEAST if t not in self.floor else self.floor[t] if t in self.pot else self.floor[t] + _MARGIN

    def _limits(self, bound: ProductBound, free: Collection[str]) -> tuple[Array, Array]:
        """Return [low, high] of the free part of a bound, each [] or [C]."""
        fixed = sum((e * self.log[t] for t, e in bound.terms if t not in free), start=np.zeros(()))
        low, high = bound.low - fixed, bound.high - fixed
        if all(t in self.pot for t, _ in bound.terms if t in free):  # a sum of integers
            return np.ceil(low - 1e-9), np.floor(high + 1e-9)
        inside = min(_MARGIN, (bound.high - bound.low) / 2) if bound.low < bound.high else 0.0
        return low + inside, high - inside

    def conflict(self, bounds: Sequence[ProductBound], free: Collection[str]) -> list[ProductBound]:
        """Return a smallest subset of the bounds that has no solution (QuickXplain, Junker 2004)."""

        def search(given: list[ProductBound], new: bool, rest: list[ProductBound]) -> list[ProductBound]:
            if new and self.solve(given, free) is None:
                return []
            if len(rest) == 1:
                return rest
            half = len(rest) // 2
            second = search(given + rest[:half], True, rest[half:])
            return search(given + second, bool(second), rest[:half]) + second

        return search([], False, list(bounds))


def _contradiction(conflict: Iterable[ProductBound]) -> UnsupportedError:
    over = [(r, ", ".join(repr(t) for t, _ in r.terms) or "tied tensors") for r in conflict]
    got = "; ".join(f"{r.op} over {tensors}: {r.rule}" for r, tensors in over)
    hint = "keep one of these layers in float with overrides={'layer': 'float'}"
    return UnsupportedError("No scales satisfy all rules of the platform together", got=got, hint=hint)


def check_scales(plan: Plan, constraints: Sequence[Constraint]) -> None:
    """Check that scales and zero points keep the rules of the platform, also where a user has changed a plan.

    Raises:
        PlanError: a rule is broken; the message names it and its tensors.
    """
    stored = {t.name: t.stored for t in plan.tensors.values() if t.stored is not None}
    hint = "change scales by Result.edit, with an override of 'range': it keeps the rules"
    for t, numbers in dictated_qparams(constraints).items():
        if t in stored and bool(((stored[t].scale != numbers[0]) | (stored[t].zero_point != numbers[1])).any()):
            allowed = f"scale {numbers[0]:g}, zero point {numbers[1]}"
            raise PlanError(f"The platform dictates the scale of '{t}'", got=repr(plan.tensors[t]), allowed=allowed)
    for first, *others in filter(None, ([t for t in group if t in stored] for group in plan.ties)):
        for t in others:
            if not (
                stored[t].scale.equal(stored[first].scale) and stored[t].zero_point.equal(stored[first].zero_point)
            ):
                got = f"{plan.tensors[first]!r}; {plan.tensors[t]!r}"
                raise PlanError(f"'{first}' and '{t}' must share scale and zero point", got=got, hint=hint)
    scales = {t: np.log2(s.scale.detach().double().numpy()) for t, s in stored.items()}
    for bound in product_bounds(constraints, stored) or plan.limits:
        log = {t: scales[t] for t, _ in bound.terms if t in scales}
        most = max((v.size for v in log.values()), default=0)
        log = {t: np.tile(v, most // v.size) if v.ndim and v.size < most else v for t, v in log.items()}
        if len(log) == len(bound.terms) and not bound.holds(log, SLACK):
            raise PlanError("The scales break a rule of the platform", got=str(bound), hint=hint)


def plan_limits(graph: Graph, constraints: Sequence[Constraint], tensors: Mapping[str, TensorPlan]) -> dict[str, Any]:
    """Return `limits`, `fixed`, `zeros` and `sums` of a Plan: what training must not do to its numbers.

    A bias whose scale follows from others is in none of them. `sums` leaves out weights that cannot exceed theirs.
    """
    stored = {t.name: t.stored.grid for t in tensors.values() if t.stored is not None}
    biases = {t for t in stored if tensors[t].role == "bias"}
    grids = {t: grid for t, grid in stored.items() if t not in biases}
    products = [b for b in product_bounds(constraints, stored) if b.terms]
    follow = {t for b in products if b.low == b.high for t, _ in b.terms if t in biases}
    bounds = [(b.op, b.terms, b.low, b.high) for b in products if follow.isdisjoint(t for t, _ in b.terms)]
    for t, grid in grids.items():
        if grid.scale_min:
            bounds.append((tensors[t].op, ((t, 1),), math.log2(np.float32(grid.scale_min)), math.inf))
    limits = [
        ScaleBound(op=op, terms=terms, low=low, high=high)
        for op, terms, low, high in dict.fromkeys(bounds)
        if math.isfinite(low) or math.isfinite(high)
    ]
    sums: dict[str, float] = {}
    for c, r in hard_rules(constraints):
        for t, most in ((t, float(r.wsum_max)) for t in c.of("w") if r.wsum_max):
            shape = graph.shape(t)
            count = math.prod(int(n or 1) for n in shape) // int(shape[OPS[c.op].weight_axis] or 1)
            if t in grids and count * max(-grids[t].qmin, grids[t].qmax) > most:
                sums[t] = min(most, sums.get(t, most))
    zeros = {t for c, r in hard_rules(constraints) if r.zero for t in c.of(r.zero)}
    return {
        "limits": tuple(limits),
        "fixed": tuple(sorted(dictated_qparams(constraints).keys() & grids.keys())),
        "zeros": tuple(sorted(zeros & grids.keys())),
        "sums": tuple(sums.items()),
    }
