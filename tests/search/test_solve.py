"""The integer program against enumeration of all choices."""

import itertools
import random

import pytest

from chipfit.errors import ConfigError, PlanError
from chipfit.search.limits import Limits, amount
from chipfit.search.solve import Unit, solve


def units(seed: int, count: int = 5) -> list[Unit]:
    draw = random.Random(seed)
    widths = (2, 3, 4, 8)
    return [
        Unit(
            f"u{k}",
            tuple(draw.random() * 4.0**-b for b in widths),
            {
                r: tuple(size * b for b in widths)
                for r, size in (("weights", draw.randint(1, 50)), ("bops", draw.random()))
            },
        )
        for k in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed):
    given = units(seed)
    whole = {r: sum(u.costs[r][-1] for u in given) for r in ("weights", "bops")}
    budgets = {"weights": 0.5 * whole["weights"], "bops": 0.6 * whole["bops"]}

    def cost(pick, r):
        return sum(u.costs[r][k] for u, k in zip(given, pick, strict=True))

    def loss(pick):
        return sum(u.losses[k] for u, k in zip(given, pick, strict=True))

    allowed = [p for p in itertools.product(range(4), repeat=5) if all(cost(p, r) <= budgets[r] for r in budgets)]
    pick = solve(given, budgets)
    assert tuple(pick) in allowed and loss(pick) <= 1.0001 * min(map(loss, allowed))


def test_a_hundred_layers_are_solved_and_what_cannot_be_says_the_least():
    given = units(3, 100)
    whole = sum(u.costs["weights"][-1] for u in given)
    pick = solve(given, {"weights": 0.4 * whole})
    assert sum(u.costs["weights"][k] for u, k in zip(given, pick, strict=True)) <= 0.4 * whole
    with pytest.raises(PlanError, match=f"Allowed: {0.25 * whole:,.0f} at least"):
        solve(given, {"weights": 0.2 * whole})
    assert solve([], {"weights": 1}) == []


def test_amounts_are_numbers_texts_with_units_and_shares():
    assert [amount(v, 200, "weights") for v in (3, "50%", "1.5 KB", "2KiB", "1e3")] == [3, 100, 1500, 2048, 1000]


@pytest.mark.parametrize("bad", ["abc", "5 parsecs", "-3", "", 0, -1, float("nan"), float("inf"), True, "0%"])
def test_amounts_that_mean_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="limit on weights"):
        Limits(weights=bad)


def test_limits_that_limit_nothing_are_refused():
    with pytest.raises(ConfigError, match="nothing"):
        Limits()
