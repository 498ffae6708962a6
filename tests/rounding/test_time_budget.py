"""A time budget becomes an amount of work, which the plan records."""

import itertools

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.graph.ir import Graph, Node, Value
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.rounding import gptq, time_budget

FOUR = {"*": {"bits": 4, "activation_bits": 8}}
DATA = list(torch.randn(96, 3, 8, 8, generator=torch.Generator().manual_seed(1)).split(40))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 3)).eval()


def fitted(activation_bits=8, **settings):
    given = {
        "overrides": [*FOUR.items(), ("*", {"activation_bits": activation_bits})],
        "settings": Settings(**settings),
        "progress": False,
    }
    return chipfit.quantize(net(), DATA, "mqbench_academic", **given)


def steps(result):
    return result.plan.provenance["settings"]["steps"]


def test_the_cost_is_that_of_both_streams_moments_factors_and_columns():
    result = fitted()
    # one image: 36 positions x (27 x 8 + 8 x 4) weights, and 432 of the last layer, in two streams
    streams = 2 * (36 * (27 * 8 + 8 * 4) + 432)
    # read x K (K + O) + K^3 + 5 scales x O K^2; 36 positions of one image, one of the last layer
    first = 36 * 27 * (27 + 8) + 27**3 + 5 * 8 * 27**2
    second = 36 * 8 * (8 + 4) + 8**3 + 5 * 4 * 8**2
    last = 1 * 144 * (144 + 3) + 144**3 + 5 * 3 * 144**2
    graph, plan = result.decision.graph, result.uncorrected
    assert time_budget.count_multiplications(graph, plan, 1, 256) == streams + first + second + last
    few = fitted(rounding="off", activation_bits=4).plan
    assert (
        time_budget.count_multiplications(graph, few, 1, 256) == 2.5 * streams + first + second + last
    )  # and images forth and back
    assert time_budget.count_multiplications(graph, plan, 2, 16) < 2 * time_budget.count_multiplications(
        graph, plan, 1, 256
    )  # 2 K positions at least, of 72


def test_more_time_means_more_work_and_the_plan_holds_how_much(monkeypatch):
    result = fitted()
    graph, plan = result.decision.graph, result.uncorrected
    rate = time_budget.count_multiplications(graph, plan, 96, 2048) / time_budget.EFFICIENCY
    monkeypatch.setattr(time_budget, "multiplications_per_second", lambda: rate * 1.001)
    much, little = fitted(seconds=1.0, shift_negative=0.5), fitted(seconds=0.5)
    assert steps(much) == {"shift_negative": 0.5, "rounding_images": 96, "rounding_samples": 2048}
    assert steps(little)["rounding_images"] < 96
    assert any("is expected to take" in n and not n.startswith("warning") for n in much.plan.rewrites)
    again = fitted(**steps(little))
    assert "seconds" not in steps(little)
    weights = little.graph.weights
    assert all(torch.equal(weights[k], w) for k, w in again.graph.weights.items())
    assert not all(torch.equal(weights[k], w) for k, w in much.graph.weights.items())


def test_too_little_time_is_said_and_the_least_work_done(monkeypatch):
    monkeypatch.setattr(time_budget, "multiplications_per_second", lambda: 1.0)
    result = fitted(seconds=1.0)
    assert steps(result) == {"rounding_images": 16, "rounding_samples": 256}
    assert any(n.startswith("warning: rounding is expected to take") for n in result.plan.rewrites)


def test_the_steps_of_work_are_ordered_by_what_they_cost():
    """First positions are given up, beyond 2,048; then images, down to 128; then both."""
    work = [(images or 1 << 20) * positions for images, positions in time_budget.LADDER]
    assert work == sorted(work, reverse=True) and len(set(work)) == len(work)
    assert [p for n, p in time_budget.LADDER if n is None] == [2**k for k in range(16, 10, -1)]
    for (n, p), (m, q) in itertools.pairwise((n or 512, p) for n, p in time_budget.LADDER if n or p == 2048):
        assert (m, q) in ((n / 2, p), (n, p / 2), (n / 2, p / 2))
    assert time_budget.LADDER[-1] == (16, 256) and time_budget.EFFICIENCY == 0.25


@pytest.mark.parametrize("images, used", [(1000, 256), (200, 200), (20, 20)])
def test_the_first_step_that_fits_into_the_time_is_taken(images, used, monkeypatch):
    costs = {}
    monkeypatch.setattr(
        time_budget, "multiplications_per_second", lambda: 40.0
    )  # a quarter of it is reached: 10 a second
    monkeypatch.setattr(
        time_budget, "count_multiplications", lambda graph, plan, n, p: costs.setdefault((n, p), float(n * p))
    )
    found = time_budget.fit_to_time(None, None, images, used * 2048 / 10)
    assert found == (used, 2048, used * 2048 / 10)
    assert time_budget.fit_to_time(None, None, images, used * 2048 / 10 - 1e-3)[:2] != (used, 2048)
    least = min(images, 16)
    assert time_budget.fit_to_time(None, None, images, 0.0) == (least, 256, least * 256 / 10)
    everything = time_budget.fit_to_time(None, None, images, 1e12)
    assert everything == (images, 65536, images * 65536 / 10)


def test_the_speed_is_that_of_the_fastest_of_five_products(monkeypatch):
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 20.5, 30.0, 31.0, 40.0, 43.0])
    monkeypatch.setattr(time_budget.time, "perf_counter", lambda: next(times))
    assert time_budget.multiplications_per_second() == 384**3 / 0.5 and next(times, None) is None


def test_wide_rows_try_a_single_scale():
    assert gptq.LONG_ROW == 1024
    x = torch.randn(40, gptq.LONG_ROW + 1)
    for inputs, tries in ((gptq.LONG_ROW, 5), (gptq.LONG_ROW + 1, 1)):
        net = torch.nn.Linear(inputs, 2).eval()
        graph = chipfit.capture(net, (x[:, :inputs],))
        k = inputs
        assert time_budget._count_of_fit(graph, graph.nodes[0], 40, 256) == 40 * k * (k + 2) + k**3 + tries * 2 * k * k


def test_as_many_positions_are_read_as_there_are_weights_twice():
    graph = chipfit.capture(net(), (torch.zeros(2, 3, 8, 8),))
    k, o = 27, 8
    for images, positions, read in ((1, 9, 36), (10, 9, 54), (10, 53, 54), (10, 55, 55), (10, 999, 360)):
        want = read * k * (k + o) + k**3 + 5 * o * k * k
        assert time_budget._count_of_fit(graph, graph.nodes[0], images, positions) == want


def test_operators_that_stay_in_float_or_read_no_data_are_run_and_not_fitted():
    """Two streams of 10 images; of 2 x 2 weights 10 positions x 2 x 4 products, 2^3, and 5 scales x 2 x 2^2."""

    def cost(*nodes):
        made = [Node(o, "Linear", (i, w, None), (o,)) for o, i, w in nodes]
        values = {n: Value(n, (None, 2)) for n in ("x", *(n.name for n in made))}
        graph = Graph(made, ["x"], [made[-1].name], values, {n: torch.ones(2, 2) for n in ("w", "w2", "c")})
        grid, zero = Grid(bits=4, qmin=-8, qmax=7), torch.tensor(0, dtype=torch.int32)
        stored = Stored(format="w4", grid=grid, scale=torch.tensor(1.0), zero_point=zero)
        return time_budget.count_multiplications(
            graph, Plan(tensors={"w": TensorPlan(name="w", role="weight", stored=stored)}), 10, 256
        )

    streams, fitted = 2 * 10 * 4, 10 * 2 * 4 + 2**3 + 5 * 2 * 2**2
    assert cost(("y", "x", "w")) == streams + fitted
    assert cost(("y", "x", "w2")) == cost(("y", "c", "w")) == streams
    assert cost(("y", "x", "w"), ("z", "y", "w2")) == 2 * streams + fitted
