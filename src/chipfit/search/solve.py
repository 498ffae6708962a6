"""The widths with the least loss inside budgets: one integer program.

    least sum of loss[u, k] x[u, k], one k for every unit u, sum of cost[r, u, k] x[u, k] <= budget[r] for every budget

A peak of several sums, as of tensors alive at the same time, is one budget for each sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from chipfit.errors import PlanError


@dataclass(frozen=True)
class Unit:
    """What takes one choice: tensors of one kernel, or of one tie."""

    name: str
    losses: tuple[float, ...]  #: of each choice
    costs: Mapping[str, tuple[float, ...]]  #: budget -> of each choice


def solve(units: Sequence[Unit], budgets: Mapping[str, float]) -> list[int]:
    """The choice of every unit.

    Raises:
        PlanError: no choice keeps all budgets; says the least that is possible.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if not units:
        return []
    sizes = [len(u.losses) for u in units]
    ends = np.cumsum(sizes)
    n = int(ends[-1])
    scale = max((max(u.losses) for u in units), default=0.0) or 1.0
    loss = np.concatenate([np.asarray(u.losses) for u in units]) / scale
    one = csr_array((np.ones(n), (np.repeat(np.arange(len(units)), sizes), np.arange(n))))
    constraints = [LinearConstraint(one, 1, 1)]
    for name, most in budgets.items():
        cost = np.concatenate([np.asarray(u.costs.get(name, (0.0,) * len(u.losses))) for u in units])
        least = sum(min(u.costs.get(name, (0.0,))) for u in units)
        if least > most:
            raise PlanError(
                f"No choice of widths keeps the limit on {name}",
                got=f"{most:,.0f}",
                allowed=f"{least:,.0f} at least",
                hint="the largest are " + ", ".join(f"'{u.name}'" for u in _largest(units, name)),
            )
        if cost.any():
            size = most or 1.0
            constraints.append(LinearConstraint(csr_array(cost[None] / size), -np.inf, most / size))
    answer = milp(
        loss, constraints=constraints, integrality=np.ones(n), bounds=Bounds(0, 1), options={"mip_rel_gap": 1e-4}
    )
    if answer.x is None:
        got = ", ".join(f"{k} {v:,.0f}" for k, v in budgets.items())
        raise PlanError("No choice of widths keeps all limits together", got=got, hint="raise one of them")
    return [int(part.argmax()) for part in np.split(answer.x, ends[:-1])]


def _largest(units: Sequence[Unit], budget: str) -> list[Unit]:
    return sorted(units, key=lambda u: -min(u.costs.get(budget, (0.0,))))[:3]
