"""The integer program against enumeration of all choices."""

import itertools
import random

import pytest

from chipfit.errors import ConfigError, PlanError
from chipfit.search.limits import Limits, parse_amount
from chipfit.search.solve import Choice, solutions, solve


def units(seed: int, count: int = 5) -> list[Choice]:
    draw = random.Random(seed)
    widths = (2, 3, 4, 8)
    return [
        Choice(
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


@pytest.mark.parametrize("seed", range(4))
def test_solutions_come_best_first_until_none_is_left(seed):
    given = units(seed, 3)
    budgets = {r: 0.6 * sum(u.costs[r][-1] for u in given) for r in ("weights", "bops")}
    allowed = [
        p
        for p in itertools.product(range(4), repeat=3)
        if all(sum(u.costs[r][k] for u, k in zip(given, p, strict=True)) <= budgets[r] for r in budgets)
    ]
    found = [tuple(p) for p in solutions(given, budgets)]
    assert sorted(found) == sorted(allowed) and len(found) > 5
    losses = [sum(u.losses[k] for u, k in zip(given, p, strict=True)) for p in found]
    assert all(a <= 1.001 * b for a, b in itertools.pairwise(losses))  # the allowed gap of the solver


@pytest.mark.parametrize("seed", range(6))
def test_kernels_take_pairs_of_widths_and_peaks_are_one_budget_for_each_moment(seed):
    draw, widths = random.Random(seed), (2, 4, 8)
    sizes = {name: draw.randint(1, 50) for name in ("w0", "w1", "a0", "a1", "a2")}
    moments = {"activations while '0' runs": ("a0", "a1"), "activations while '1' runs": ("a1", "a2")}

    def tensor(name):
        cost = tuple(sizes[name] * b for b in widths)
        budgets = ["weights"] if name in ("w0", "w1") else [m for m, at in moments.items() if name in at]
        return Choice(name, tuple(draw.random() * 4.0**-b for b in widths), dict.fromkeys(budgets, cost))

    def kernel(k):
        pairs = [(b, a) for b in range(3) for a in range(3) if a >= b]  # weights no wider than what they multiply
        bops = tuple(float((k + 1) * widths[b] * widths[a]) for b, a in pairs)
        implies = {f"w{k}": tuple(b for b, _ in pairs), f"a{k}": tuple(a for _, a in pairs)}
        return Choice(f"k{k}", (0.0,) * len(pairs), {"bops": bops}, implies)

    given = [kernel(0), *map(tensor, sizes), kernel(1)]
    budgets = {"weights": 5.0 * (sizes["w0"] + sizes["w1"]), "bops": 0.3 * 64 * 3}
    budgets |= {m: 0.6 * 8 * max(sum(sizes[t] for t in at) for at in moments.values()) for m in moments}

    def good(pick):
        chosen = {u.name: k for u, k in zip(given, pick, strict=True)}
        follows = all(picks[chosen[u.name]] == chosen[o] for u in given for o, picks in u.implies.items())
        used = {r: sum(u.costs[r][k] for u, k in zip(given, pick, strict=True) if r in u.costs) for r in budgets}
        return follows and all(used[r] <= budgets[r] for r in budgets)

    def loss(pick):
        return sum(u.losses[k] for u, k in zip(given, pick, strict=True))

    allowed = [p for p in itertools.product(*(range(len(u.losses)) for u in given)) if good(p)]
    pick = solve(given, budgets)
    assert good(pick) and loss(pick) <= 1.001 * min(map(loss, allowed))


@pytest.mark.parametrize("seed", range(6))
def test_with_a_limit_on_the_loss_the_smallest_is_chosen_and_of_equal_ones_the_better(seed):
    given = units(seed)
    given += [Choice("free", (0.5e-4, 0.1e-4, 0.3e-4), {})]  # takes no memory, whichever choice
    most = sum(u.losses[1] for u in given[:-1]) + 0.6e-4

    def size(pick):
        return sum(u.cost("weights")[k] for u, k in zip(given, pick, strict=True))

    def loss(pick):
        return sum(u.losses[k] for u, k in zip(given, pick, strict=True))

    picks = itertools.product(*(range(len(u.losses)) for u in given))
    smallest = min(size(p) for p in picks if loss(p) <= most)
    pick = solve(given, {"loss": most}, least="weights")
    assert loss(pick) <= most * 1.000001 and size(pick) <= 1.002 * smallest and pick[-1] == 1


def test_a_loss_that_no_choice_keeps_says_the_least_and_whose_it_is():
    given = [Choice("a", (0.5, 0.02), {"weights": (1.0, 2.0)}), Choice("b", (0.3, 0.001), {"weights": (1.0, 2.0)})]
    with pytest.raises(PlanError, match=r"limit on loss\. Got: 0\.01\. Allowed: 0\.021 at least.*largest are 'a', 'b'"):
        solve(given, {"loss": 0.01}, least="weights")


def test_limits_that_hold_one_by_one_and_not_together_say_by_how_much_to_raise_them():
    said = r"limit on weights\. Got: 5\. Allowed: 8 at least, and the other limits raised 1\.60 times as well"
    a = Choice("a", (1.0, 0.0), {"weights": (4.0, 8.0), "bops": (16.0, 8.0)})  # what spares one costs the other
    assert solve([a], {"weights": 4.0}) == [0] and solve([a], {"bops": 8.0}) == [1]
    with pytest.raises(PlanError, match=said):
        solve([a], {"weights": 5.0, "bops": 8.0})


def test_a_hundred_layers_are_solved_and_what_cannot_be_says_the_least():
    given = units(3, 100)
    whole = sum(u.costs["weights"][-1] for u in given)
    pick = solve(given, {"weights": 0.4 * whole})
    assert sum(u.costs["weights"][k] for u, k in zip(given, pick, strict=True)) <= 0.4 * whole
    with pytest.raises(PlanError, match=f"Allowed: {0.25 * whole:,.0f} at least"):
        solve(given, {"weights": 0.2 * whole})
    largest = max(given, key=lambda u: u.costs["weights"][0]).name
    with pytest.raises(PlanError, match=f"the largest are '{largest}'"):
        solve(given, {"weights": 0.2 * whole})
    assert solve([], {"weights": 1}) == []


def test_amounts_are_numbers_texts_with_units_and_shares():
    assert [parse_amount(v, 200, "weights") for v in (3, "50%", "1.5 KB", "2KiB", "1e3")] == [3, 100, 1500, 2048, 1000]
    assert [parse_amount(v, 200, "bops") for v in ("50%", "2.5e9")] == [100, 2.5e9] and parse_amount(
        "1e-3", 1, "loss"
    ) == 0.001


@pytest.mark.parametrize("bad", ["abc", "5 parsecs", "-3", "", 0, -1, float("nan"), float("inf"), True, "0%"])
def test_amounts_that_mean_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="limit on weights"):
        Limits(weights=bad)


@pytest.mark.parametrize(
    "limit, allowed",
    [
        ({"total": "3 bits"}, r"a number above 0, or a share like '50%', or a number with one of B, KB, MB"),
        ({"bops": "3 KB"}, r"Allowed: a number above 0, or a share like '50%'\.$"),  # operations are no bytes
        ({"loss": "5%"}, r"Allowed: a number above 0\.$"),
        ({"loss": "1 B"}, r"Allowed: a number above 0\.$"),
    ],
)
def test_a_unit_that_the_limit_has_not_is_refused_with_those_that_it_has(limit, allowed):
    with pytest.raises(ConfigError, match=allowed):
        Limits(**limit)


def test_limits_that_limit_nothing_are_refused():
    with pytest.raises(ConfigError, match="at least one limit"):
        Limits()
