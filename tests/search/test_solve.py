"""The integer program against enumeration of all choices."""

import itertools
import random

import pytest

from chipfit.errors import ConfigError, PlanError
from chipfit.search.limits import Limits, parse_amount
from chipfit.search.solve import Choice, solutions


def drawn(seed: int, count: int = 5) -> list[Choice]:
    """Choices of four widths with two costs."""
    draw, widths = random.Random(seed), (2, 3, 4, 8)

    def choice(k):
        losses = tuple(draw.random() * 4.0**-b for b in widths)
        sizes = {"weights": draw.randint(1, 50), "bops": draw.random()}
        return Choice(f"u{k}", losses, {r: tuple(size * b for b in widths) for r, size in sizes.items()})

    return [choice(k) for k in range(count)]


def cost(given, pick, budget):
    """The cost of one option of every choice; the loss is a budget as well."""
    return sum(c.cost(budget)[k] for c, k in zip(given, pick, strict=True))


def allowed(given, budgets):
    """All picks inside the budgets."""
    picks = itertools.product(*(range(len(c.losses)) for c in given))
    return [p for p in picks if all(cost(given, p, r) <= most for r, most in budgets.items())]


def shares(given, **parts):
    return {r: part * sum(c.costs[r][-1] for c in given) for r, part in parts.items()}


def solve(given, budgets, least="loss"):
    return next(solutions(given, budgets, least))


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed):
    given = drawn(seed)
    budgets = shares(given, weights=0.5, bops=0.6)
    picks, pick = allowed(given, budgets), solve(given, budgets)
    assert tuple(pick) in picks
    assert cost(given, pick, "loss") <= 1.0001 * min(cost(given, p, "loss") for p in picks)


@pytest.mark.parametrize("seed", range(4))
def test_solutions_come_best_first_until_none_is_left(seed):
    given = drawn(seed, 3)
    budgets = shares(given, weights=0.6, bops=0.6)
    found = [tuple(p) for p in solutions(given, budgets)]
    assert sorted(found) == sorted(allowed(given, budgets)) and len(found) > 5
    losses = [cost(given, p, "loss") for p in found]
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

    def follows(pick):
        chosen = {c.name: k for c, k in zip(given, pick, strict=True)}
        return all(picks[chosen[c.name]] == chosen[o] for c in given for o, picks in c.implies.items())

    picks, pick = [p for p in allowed(given, budgets) if follows(p)], tuple(solve(given, budgets))
    assert pick in picks and cost(given, pick, "loss") <= 1.001 * min(cost(given, p, "loss") for p in picks)


@pytest.mark.parametrize("seed", range(6))
def test_with_a_limit_on_the_loss_the_smallest_is_chosen_and_of_equal_ones_the_better(seed):
    given = [*drawn(seed), Choice("free", (0.5e-4, 0.1e-4, 0.3e-4), {})]  # takes no memory, whichever option
    most = sum(c.losses[1] for c in given[:-1]) + 0.6e-4
    smallest = min(cost(given, p, "weights") for p in allowed(given, {"loss": most}))
    pick = solve(given, {"loss": most}, least="weights")
    assert cost(given, pick, "loss") <= most * 1.000001 and pick[-1] == 1
    assert cost(given, pick, "weights") <= 1.002 * smallest


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


def test_a_hundred_layers_are_solved_and_an_impossible_limit_says_the_least():
    given = drawn(3, 100)
    half, fifth = shares(given, weights=0.4), shares(given, weights=0.2)
    assert cost(given, solve(given, half), "weights") <= half["weights"] and solve([], {"weights": 1}) == []
    largest = max(given, key=lambda c: c.costs["weights"][0]).name
    said = f"Allowed: {1.25 * fifth['weights']:,.0f} at least.*the largest are '{largest}'"
    with pytest.raises(PlanError, match=said):
        solve(given, fifth)


def test_amounts_are_numbers_texts_with_units_and_shares():
    assert [parse_amount(v, 200, "weights") for v in (3, "50%", "1.5 KB", "2KiB", "1e3")] == [3, 100, 1500, 2048, 1000]
    assert [parse_amount(v, 200, "bops") for v in ("50%", "2.5e9")] == [100, 2.5e9]
    assert parse_amount("1e-3", 1, "loss") == 0.001


@pytest.mark.parametrize("bad", ["abc", "5 parsecs", "-3", "", 0, -1, float("nan"), float("inf"), True, "0%"])
def test_amounts_that_mean_nothing_are_refused(bad):
    with pytest.raises(ConfigError, match="Limit on weights"):
        Limits(weights=bad)


@pytest.mark.parametrize(
    "limit, allowed",
    [
        ({"total": "3 bits"}, r"a number above 0, or a share like '50%', or a number with one of B, KB, MB"),
        ({"bops": "3 KB"}, r"Allowed: a number above 0, or a share like '50%'\.$"),  # operations are no bytes
        ({"loss": "5%"}, r"Allowed: a number above 0\.$"),
        ({"loss": "1 B"}, r"Allowed: a number above 0\.$"),
        ({}, "at least one limit"),
    ],
)
def test_no_limit_and_a_unit_that_a_limit_has_not_are_refused_with_what_is_allowed(limit, allowed):
    with pytest.raises(ConfigError, match=allowed):
        Limits(**limit)
