"""A time budget becomes an amount of work, which the plan records."""

import itertools

import pytest
import torch
from torch import nn

from chipfit import Settings
from chipfit.rounding.gptq_solver import LONG_ROW
from chipfit.rounding.methods import gptq
from chipfit.rounding.methods.gptq import count_multiplications, fit_to_time
from tests.build import graph_of, plan_of, quantized, randn, sequential, stored

DATA = list(randn(96, 3, 8, 8, seed=1).split(40))


def net():
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(144, 3))


def fitted(activation_bits=8, **settings):
    four = {"*": {"bits": 4, "activation_bits": activation_bits}}
    return quantized(net(), DATA, "mqbench_academic", overrides=four, settings=Settings(**settings))


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
    assert count_multiplications(graph, plan, 1, 256) == streams + first + second + last
    few = fitted(rounding="off", activation_bits=4).plan  # images go forth and back for weighted ranges
    assert count_multiplications(graph, few, 1, 256) == 2.5 * streams + first + second + last
    # 2 K positions at least, of 72
    assert count_multiplications(graph, plan, 2, 16) < 2 * count_multiplications(graph, plan, 1, 256)


def test_more_time_means_more_work_and_the_plan_holds_how_much(monkeypatch):
    result = fitted()
    graph, plan = result.decision.graph, result.uncorrected
    rate = count_multiplications(graph, plan, 96, 2048) / gptq.EFFICIENCY
    monkeypatch.setattr(gptq, "multiplications_per_second", lambda device: rate * 1.001)
    much, little = fitted(seconds=1.0, shift_negative=0.5), fitted(seconds=0.5)
    assert steps(much) == {"shift_negative": 0.5, "rounding_images": 96, "rounding_samples": 2048}
    assert steps(little)["rounding_images"] < 96
    assert any("is expected to take" in n and not n.startswith("warning") for n in much.plan.rewrites)
    again = fitted(**steps(little))
    assert "seconds" not in steps(little)
    weights = little.graph.weights
    assert all(torch.equal(weights[k], w) for k, w in again.graph.weights.items())
    assert not all(torch.equal(weights[k], w) for k, w in much.graph.weights.items())


@pytest.mark.parametrize("images, used", [(1000, 256), (200, 200), (20, 20)])
def test_the_first_step_that_fits_into_the_time_is_taken(images, used, monkeypatch):
    """Of 40 multiplications a second a quarter is reached: 10."""
    monkeypatch.setattr(gptq, "multiplications_per_second", lambda device: 40.0)
    monkeypatch.setattr(gptq, "count_multiplications", lambda graph, plan, n, p: float(n * p))
    least, graph = min(images, 16), graph_of("y = Relu(x)")
    assert fit_to_time(graph, None, images, used * 2048 / 10) == (used, 2048, used * 2048 / 10)
    assert fit_to_time(graph, None, images, used * 2048 / 10 - 1e-3)[:2] != (used, 2048)
    assert fit_to_time(graph, None, images, 0.0) == (least, 256, least * 256 / 10)
    assert fit_to_time(graph, None, images, 1e12) == (images, 65536, images * 65536 / 10)


def test_the_speed_is_that_of_the_fastest_of_five_products(monkeypatch):
    monkeypatch.setattr(gptq.timeit, "repeat", lambda product, *, number, repeat: [4.0, 2.0, 0.5, 1.0, 3.0][:repeat])
    assert gptq.multiplications_per_second() == 384**3 / 0.5


def cost(*nodes, images=10, positions=256, k=2, o=2):
    """Multiplications of these nodes on inputs of k numbers; w is quantized."""
    graph = graph_of(*nodes, weights={n: torch.ones(o, k) for n in ("w", "w2", "c")}, shape=(None, o))
    return count_multiplications(graph, plan_of(w=stored(bits=4)), images, positions)


@pytest.mark.parametrize("images, positions, read", [(1, 9, 1), (10, 3, 4), (10, 5, 5), (10, 99, 10)])
def test_as_many_positions_are_read_as_there_are_weights_twice(images, positions, read):
    fit = read * 2 * 4 + 2**3 + 5 * 2 * 2**2
    assert cost("y = Linear(x, w, -)", images=images, positions=positions) == 2 * images * 4 + fit


def test_each_step_down_the_ladder_is_less_work_in_powers_of_two():
    steps = [(images or 1 << 20, positions) for images, positions in gptq.LADDER]
    assert all(n & (n - 1) == 0 for step in steps for n in step)
    assert all(a * b > c * d and a >= c and b >= d for (a, b), (c, d) in itertools.pairwise(steps))


def test_operators_that_stay_in_float_or_read_no_data_are_run_and_not_fitted():
    """Two streams of 10 images; of 2 x 2 weights 10 positions x 2 x 4 products, 2^3, and 5 scales x 2 x 2^2."""
    streams, fit = 2 * 10 * 4, 10 * 2 * 4 + 2**3 + 5 * 2 * 2**2
    assert cost("y = Linear(x, w, -)") == streams + fit
    assert cost("y = Linear(x, w2, -)") == cost("y = Linear(c, w, -)") == streams
    assert cost("y = Linear(x, w, -)", "z = Linear(y, w2, -)") == 2 * streams + fit
    for k, tries in ((LONG_ROW, 5), (LONG_ROW + 1, 1)):  # long rows try a single scale
        fit = 40 * k * (k + 2) + k**3 + tries * 2 * k * k
        assert cost("y = Linear(x, w, -)", images=40, k=k) == 2 * 40 * 2 * k + fit
