"""The platform's rules over named tensors: ties, dictated scales, bounds on products of scales."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from chipfit.errors import UnsupportedError
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS
from chipfit.plan.record import TensorPlan
from chipfit.platform.schema import Rule
from chipfit.quantizers.scale_bounds import ScaleBound

#: a scale and a zero point
FixedQParams = tuple[float, int]
#: a strict upper bound is kept by this much in log2, which rounding to float32 does not cross
MARGIN = 2e-6
#: an equality holds up to this much in log2: two roundings of float32
EQUAL = 2.5e-7

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """The rules of one operator, with the names of the tensors in its slots."""

    op: str
    rules: tuple[Rule, ...]
    slots: Mapping[str, tuple[str, ...]]
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def of(self, slot: str) -> tuple[str, ...]:
        """Return the tensors in a slot; in "outs" and "ins", if they are not listed, those in the single slots."""
        if slot == "outs":
            return self.slots.get("outs", self.slots.get("out", ()))
        if slot == "ins":
            return self.slots.get("ins", tuple(t for k in ("in0", "in1", "in2") for t in self.slots.get(k, ())))
        return self.slots.get(slot, ())

    @property
    def tied(self) -> list[list[str]]:
        """The tensors of each hard tie."""
        return [[t for slot in r.tie for t in self.of(slot)] for r in self.rules if r.tie and r.hard]

    @property
    def same_type(self) -> list[list[str]]:
        """The tensors of each hard `dtype` rule."""
        return [[t for slot in r.dtype for t in self.of(slot)] for r in self.rules if r.dtype and r.hard]

    @property
    def dictated(self) -> list[tuple[str, FixedQParams]]:
        """Each tensor whose scale and zero point the hardware dictates, with them."""
        rules = [(r.fix, (float(r.scale or 0), int(r.zp or 0))) for r in self.rules if r.fix and r.hard]
        return [(t, numbers) for slot, numbers in rules for t in self.of(slot)]


def hard_rules(constraints: Iterable[Constraint]) -> Iterator[tuple[Constraint, Rule]]:
    """Yield the rules that the hardware requires, each with its constraint; the others are preferences."""
    return ((c, r) for c in constraints for r in c.rules if r.hard)


def tie_groups(constraints: Iterable[Constraint]) -> tuple[tuple[str, ...], ...]:
    """Return the tensors that must share scale and zero point, over all hard ties; groups of two or more, sorted."""
    return tuple(g for g in connected_components(m for c in constraints for m in c.tied) if len(g) > 1)


def connected_components(lists: Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Return the unions of lists that have members in common, each sorted, in sorted order."""
    parent: dict[str, str] = {}

    def find(t: str) -> str:
        parent.setdefault(t, t)
        while parent[t] != t:
            parent[t] = parent[parent[t]]
            t = parent[t]
        return t

    for members in lists:
        for t in members:
            parent[find(t)] = find(members[0])
    groups: dict[str, list[str]] = {}
    for t in parent:
        groups.setdefault(find(t), []).append(t)
    return tuple(sorted(tuple(sorted(g)) for g in groups.values()))


def copies(graph: Graph, group: Collection[str]) -> set[str]:
    """Return the tensors of a tie that only hold numbers of others in it, and so have the range of those."""

    def moves(n: Node) -> bool:
        data = [i for i in n.inputs if i is not None and graph.is_float(i)]
        return n.op in OPS and OPS[n.op].moves and all(i in group for i in data)

    return {o for n in graph.nodes if moves(n) for o in n.outputs if o in group}


def dictated_qparams(constraints: Sequence[Constraint]) -> dict[str, FixedQParams]:
    """Return tensor -> the scale and zero point that the hardware dictates for it or for a tensor tied to it.

    Raises:
        UnsupportedError: two operators dictate different values for one tensor, or for tensors that must share theirs.
    """
    out: dict[str, FixedQParams] = {}
    by: dict[str, str] = {}
    for c in constraints:
        for t, numbers in c.dictated:
            if out.setdefault(t, numbers) != numbers:
                raise _two_values(f"Tensor '{t}' is", f"{out[t]} by {by[t]} and {numbers} by {c.op}")
            by.setdefault(t, c.op)
    for group in tie_groups(constraints) if out else ():
        given = {out[t]: t for t in group if t in out}
        if len(given) > 1:
            each = " and ".join(f"{numbers} for '{t}' by {by[t]}" for numbers, t in given.items())
            raise _two_values("Tensors that must share one scale are", each)
        for numbers in given:
            out.update(dict.fromkeys(group, numbers))
    return out


def _two_values(what: str, got: str) -> UnsupportedError:
    hint = "keep the operator that joins them in float with overrides"
    return UnsupportedError(f"{what} fixed to two different (scale, zero point)", got=got, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBound(ScaleBound):
    """A bound on the product of scales of named tensors, and the rule that it comes from."""

    rule: Rule

    def __post_init__(self) -> None:
        """Accept a bound without terms: if ties leave no tensor, the projection finds out whether the bound holds."""

    def total(self, log: Mapping[str, Array]) -> Array:
        """Return the sum of exponent * log2(scale) by channel, [] or [C]; one scale for all channels counts in each."""
        return sum((e * log[t] for t, e in self.terms), start=np.zeros(()))

    def holds(self, log: Mapping[str, Array]) -> bool:
        total, slack = self.total(log), EQUAL if self.low == self.high else 1e-12
        return bool(np.all(total >= self.low - slack) and np.all(total <= self.high + slack))


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
    strictly = MARGIN if rule.lt is not None and high == rule.lt / abs(times) else 0.0
    return (math.log2(low) if low > 0 else -math.inf), (math.log2(high) - strictly if 0 < high < math.inf else math.inf)


def plan_limits(graph: Graph, constraints: Sequence[Constraint], tensors: Mapping[str, TensorPlan]) -> dict[str, Any]:
    """Return `limits`, `fixed`, `zeros` and `sums` of a Plan: what training must not do to its numbers.

    Biases follow from other tensors and are in none of them. `sums` leaves out weights that cannot exceed theirs.
    """
    grids = {t.name: t.stored.grid for t in tensors.values() if t.stored is not None and t.role != "bias"}
    bounds = [(r.op, r.terms, r.low, r.high) for r in product_bounds(constraints, grids) if r.terms]
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
        for t in c.of("w") if r.wsum_max else ():
            shape, most = graph.shape(t), float(r.wsum_max or 0)
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
