"""The widths with the least loss inside budgets: one integer program.

    least sum of loss[u, k] x[u, k], one k for every unit u, sum of cost[r, u, k] x[u, k] <= budget[r] for every budget

The loss may be a budget as well, and something else the least.

A peak of several sums, as of tensors alive at the same time, is one budget for each sum. A unit may go with others: a
kernel takes the widths of its weight and of its data together, so that its choice says theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from chipfit.errors import PlanError

#: name of the budget that is the units' losses
LOSS = "loss"
#: what the loss counts beside another objective, so that of choices that are nearly alike it takes the better
_TIE_WEIGHT = 1e-3
#: the loss may be a thousandth above the least, which halves the time
_OPTIONS = {"mip_rel_gap": 1e-3}


@dataclass(frozen=True)
class Choice:
    """What takes one choice: a weight, activations of one width, or a kernel."""

    name: str
    losses: tuple[float, ...]  #: of each choice
    costs: Mapping[str, tuple[float, ...]]  #: budget -> of each choice
    implies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  #: other unit -> its choice with each choice

    def cost(self, budget: str) -> tuple[float, ...]:
        """Of each choice."""
        return self.losses if budget == LOSS else self.costs.get(budget, (0.0,) * len(self.losses))


def solve(units: Sequence[Choice], budgets: Mapping[str, float], least: str = LOSS) -> list[int]:
    """The choice of every unit.

    Args:
        least: what is to be the least, by the name of a budget; other than the loss only where that has a budget.

    Raises:
        PlanError: no choice keeps all budgets; says the least that is possible, and what takes most of it.
    """
    return next(solutions(units, budgets, least))


def solutions(units: Sequence[Choice], budgets: Mapping[str, float], least: str = LOSS) -> Iterator[list[int]]:
    """The best choice of all units, the next best, and so on; see `solve`."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack

    if not units:
        yield []
        return
    sizes = [len(u.losses) for u in units]
    starts = np.cumsum([0, *sizes])
    n = int(starts[-1])
    one = csr_array((np.ones(n), (np.repeat(np.arange(len(units)), sizes), np.arange(n))))
    rules = [(one, 1)]
    at = {u.name: k for k, u in enumerate(units)}
    for u, first in zip(units, starts, strict=False):
        for other, picks in u.implies.items():
            rows = range(sizes[at[other]])
            mine = ((1.0, k, first + j) for j, k in enumerate(picks))
            cells = [*mine, *((-1.0, k, starts[at[other]] + k) for k in rows)]
            value, row, column = zip(*cells, strict=True)
            rules.append((csr_array((value, (row, column)), shape=(len(rows), n)), 0))
    costs = {r: np.concatenate([u.cost(r) for u in units]) for r in {*budgets, least}}
    limits = csr_array(np.stack([costs[r] / budgets[r] for r in budgets])) if budgets else csr_array((0, n))

    seen: list[np.ndarray] = []

    def best(objective: np.ndarray, factor: bool) -> np.ndarray | None:
        """The choice with the least objective; with a last column, by which all budgets are multiplied."""
        wide = int(factor)
        keep = [LinearConstraint(hstack([m, csr_array((m.shape[0], wide))]), v, v) for m, v in rules]
        most = np.full((len(budgets), wide), -1.0)
        keep.append(LinearConstraint(hstack([limits, csr_array(most)]), -np.inf, 0.0 if factor else 1.0))
        if seen:
            keep.append(LinearConstraint(np.stack(seen), -np.inf, len(units) - 1))
        upper = np.concatenate([np.ones(n), np.full(wide, np.inf)])
        free = np.concatenate([np.ones(n), np.zeros(wide)])
        answer = milp(objective, constraints=keep, integrality=free, bounds=Bounds(0, upper), options=_OPTIONS)
        return None if answer.x is None else answer.x[:n]

    goal = costs[least] / (costs[least].max() or 1.0)
    goal = goal if least == LOSS else goal + _TIE_WEIGHT / budgets[LOSS] * costs[LOSS]
    x = best(goal, False)
    if x is None:
        raise _infeasible(units, budgets, costs, best(np.concatenate([np.zeros(n), np.ones(1)]), True))
    while x is not None:
        chosen = [int(part.argmax()) for part in np.split(x, starts[1:-1])]
        yield chosen
        seen.append(np.zeros(n))
        seen[-1][starts[:-1] + chosen] = 1
        x = best(goal, False)


def _infeasible(
    units: Sequence[Choice], budgets: Mapping[str, float], costs: Mapping[str, np.ndarray], x: np.ndarray | None
) -> PlanError:
    """What the choice with the smallest common multiple of all budgets takes of that which binds it."""
    assert x is not None  # any choice keeps budgets that are large enough
    used = {r: float(costs[r] @ np.round(x)) for r in budgets}
    tight = max(budgets, key=lambda r: used[r] / budgets[r])
    parts = np.split(costs[tight] * np.round(x), np.cumsum([len(u.losses) for u in units])[:-1])
    largest = sorted(zip((p.sum() for p in parts), (u.name for u in units), strict=True), key=_size)[:3]
    more = used[tight] / budgets[tight]
    together = f", and the other limits raised {more:.2f} times as well" if len({*map(limit_of, budgets)}) > 1 else ""
    return PlanError(
        f"No choice of widths keeps the limit on {tight}",
        got=format_amount(budgets[tight]),
        allowed=f"{format_amount(used[tight])} at least{together}",
        hint=("" if any(len(u.losses) > 1 for u in units) else "the platform leaves no width to choose; ")
        + "the largest are "
        + ", ".join(f"'{name}'" for size, name in largest if size),
    )


def format_amount(x: float) -> str:
    """Bytes and operations whole, losses with three digits."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.3g}"


def _size(part: tuple[float, str]) -> float:
    return -part[0]


def limit_of(budget: str) -> str:
    """The limit that a budget belongs to: "activations" of "activations while 'conv' runs"."""
    return budget.partition(" ")[0]
