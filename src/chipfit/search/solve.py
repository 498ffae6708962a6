"""The bits with the least loss inside budgets, by an integer program.

    minimise sum of loss[c, k] x[c, k], with one option k for every choice c,
    subject to sum of cost[r, c, k] x[c, k] <= budget[r] for every budget r

The loss may be a budget as well, with a cost as the objective. A peak of several sums, as of tensors alive at the same
time, is one budget for each sum. A choice may imply others: a kernel supports pairs of bits for its weight and its
data, so that its option fixes both.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from chipfit.errors import PlanError

#: name of the budget on the sum of losses
LOSS = "loss"
#: weight of the loss beside another objective, which decides between nearly equal solutions
_TIE_WEIGHT = 1e-3
#: the solution may be a thousandth above the optimum, which halves the time
_OPTIONS = {"mip_rel_gap": 1e-3}


@dataclass(frozen=True)
class Choice:
    """A choice of one option, as of the bits of a weight, of activations with equal bits, or of a kernel."""

    name: str
    losses: tuple[float, ...]  #: of each option
    costs: Mapping[str, tuple[float, ...]]  #: budget -> cost of each option
    #: other choice -> its option for each option of this one
    implies: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def cost(self, budget: str) -> tuple[float, ...]:
        """Return the cost of each option."""
        return self.losses if budget == LOSS else self.costs.get(budget, (0.0,) * len(self.losses))


def solutions(choices: Sequence[Choice], budgets: Mapping[str, float], least: str = LOSS) -> Iterator[list[int]]:
    """Yield the option of every choice, of the best solution, of the next best, and so on.

    Args:
        least: name of the budget to minimise; other than the loss only if the loss has a budget.

    Raises:
        PlanError: no solution keeps all budgets; names the least that is possible, and the largest parts of it.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, hstack

    if not choices:
        yield []
        return
    starts = np.cumsum([0, *(len(c.losses) for c in choices)])
    n, rules = int(starts[-1]), _equations(choices, starts)
    costs = {r: np.concatenate([c.cost(r) for c in choices]) for r in {*budgets, least}}
    limits = csr_array(np.stack([costs[r] / budgets[r] for r in budgets])) if budgets else csr_array((0, n))

    earlier: list[np.ndarray] = []

    def best(objective: np.ndarray, factor: bool) -> np.ndarray | None:
        """Return the solution with the least objective; with `factor`, a last column multiplies all budgets."""
        wide = int(factor)
        keep = [LinearConstraint(hstack([m, csr_array((m.shape[0], wide))]), v, v) for m, v in rules]
        most = np.full((len(budgets), wide), -1.0)
        keep.append(LinearConstraint(hstack([limits, csr_array(most)]), -np.inf, 0.0 if factor else 1.0))
        if earlier:
            keep.append(LinearConstraint(np.stack(earlier), -np.inf, len(choices) - 1))
        upper = np.concatenate([np.ones(n), np.full(wide, np.inf)])
        free = np.concatenate([np.ones(n), np.zeros(wide)])
        answer = milp(objective, constraints=keep, integrality=free, bounds=Bounds(0, upper), options=_OPTIONS)
        return None if answer.x is None else answer.x[:n]

    goal = costs[least] / (costs[least].max() or 1.0)
    goal = goal if least == LOSS else goal + _TIE_WEIGHT / budgets[LOSS] * costs[LOSS]
    x = best(goal, False)
    if x is None:
        raise _infeasible(choices, budgets, costs, best(np.concatenate([np.zeros(n), np.ones(1)]), True))
    while x is not None:
        chosen = [int(part.argmax()) for part in np.split(x, starts[1:-1])]
        yield chosen
        earlier.append(np.zeros(n))
        earlier[-1][starts[:-1] + chosen] = 1
        x = best(goal, False)


def _equations(choices: Sequence[Choice], starts: np.ndarray) -> list[tuple[Any, int]]:
    """Return the equations m x = v: each choice has one option, and those that others imply are theirs.

    Args:
        starts: the first column of each choice, and behind them the number of columns.
    """
    from scipy.sparse import csr_array

    n, sizes = int(starts[-1]), np.diff(starts)
    out = [(csr_array((np.ones(n), (np.repeat(np.arange(len(choices)), sizes), np.arange(n)))), 1)]
    at = {c.name: k for k, c in enumerate(choices)}
    for c, first in zip(choices, starts, strict=False):
        for other, picks in c.implies.items():
            rows = range(sizes[at[other]])
            mine = ((1.0, k, first + j) for j, k in enumerate(picks))
            cells = [*mine, *((-1.0, k, starts[at[other]] + k) for k in rows)]
            value, row, column = zip(*cells, strict=True)
            out.append((csr_array((value, (row, column)), shape=(len(rows), n)), 0))
    return out


def _infeasible(
    choices: Sequence[Choice], budgets: Mapping[str, float], costs: Mapping[str, np.ndarray], x: np.ndarray | None
) -> PlanError:
    """Return the error with the least amount of the binding budget when all budgets grow by one factor."""
    assert x is not None  # budgets that are large enough can be kept
    used = {r: float(costs[r] @ np.round(x)) for r in budgets}
    tight = max(budgets, key=lambda r: used[r] / budgets[r])
    parts = np.split(costs[tight] * np.round(x), np.cumsum([len(c.losses) for c in choices])[:-1])
    sizes = zip((-p.sum() for p in parts), (c.name for c in choices), strict=True)
    largest = sorted(sizes, key=itemgetter(0))[:3]
    more = used[tight] / budgets[tight]
    together = f", and the other limits raised {more:.2f} times as well" if len({*map(limit_of, budgets)}) > 1 else ""
    return PlanError(
        f"No choice of widths keeps the limit on {tight}",
        got=format_amount(budgets[tight]),
        allowed=f"{format_amount(used[tight])} at least{together}",
        hint=("" if any(len(c.losses) > 1 for c in choices) else "the platform leaves no width to choose; ")
        + "the largest are "
        + ", ".join(f"'{name}'" for size, name in largest if size),
    )


def format_amount(x: float) -> str:
    """Format bytes and operations as whole numbers, losses with three digits."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.3g}"


def limit_of(budget: str) -> str:
    """Return the limit that a budget belongs to: "activations" of "activations while 'conv' runs"."""
    return budget.partition(" ")[0]
