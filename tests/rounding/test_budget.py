"""A time budget becomes an amount of work, which the plan records."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.rounding import budget

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
    graph, plan = result._uncorrected
    assert budget.cost(graph, plan, 1, 256) == streams + first + second + last
    few = fitted(rounding="off", activation_bits=4).plan
    assert budget.cost(graph, few, 1, 256) == 2.5 * streams + first + second + last  # and images forth and back
    assert budget.cost(graph, plan, 2, 16) < 2 * budget.cost(graph, plan, 1, 256)  # 2 K positions at least, of 72


def test_more_time_means_more_work_and_the_plan_holds_how_much(monkeypatch):
    graph, plan = fitted()._uncorrected
    rate = budget.cost(graph, plan, 96, 2048) / budget.EFFICIENCY
    monkeypatch.setattr(budget, "speed", lambda: rate * 1.001)
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
    monkeypatch.setattr(budget, "speed", lambda: 1.0)
    result = fitted(seconds=1.0)
    assert steps(result) == {"rounding_images": 16, "rounding_samples": 256}
    assert any(n.startswith("warning: rounding is expected to take") for n in result.plan.rewrites)


@pytest.mark.parametrize("most, sizes", [(50, [40, 10]), (40, [40]), (500, [40, 40, 16])])
def test_the_first_images_are_used(most, sizes):
    from chipfit.correction.rounding import _first

    found = _first([[x] for x in DATA], most)
    assert [len(b[0]) for b in found] == sizes
    assert torch.equal(torch.cat([b[0] for b in found]), torch.cat(DATA)[: sum(sizes)])
