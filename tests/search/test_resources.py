"""Memory and operations that a model needs, counted by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import PlanError
from chipfit.search import choose
from chipfit.search.choose import SearchSpace
from chipfit.search.resources import peak_bytes, resources
from tests.build import graph_of, grid, model_of, plan_of, quantized, randn, stored


def fitted(platform="mqbench_academic", **options):
    """[3, 6, 6] -> [8, 4, 4], which stays for the sum."""
    torch.manual_seed(0)
    layers = {"a": nn.Conv2d(3, 8, 3), "b": nn.Conv2d(8, 8, 1), "head": nn.Linear(8, 5)}

    def forward(m, x):
        y = torch.relu(m.a(x))
        return m.head((y + torch.relu(m.b(y))).mean((2, 3)))

    return quantized(model_of(forward, **layers), randn(8, 3, 6, 6, seed=1), platform, **options)


def limited(**limits):
    return fitted(overrides={"*": {"activation_bits": 8}}, limits=chipfit.Limits(**limits))


def test_memory_and_operations_are_those_by_hand():
    result = fitted("ort_cpu")
    found = resources(result.graph, result.plan)
    products = 3 * 8 * 9 * 16 + 8 * 8 * 16 + 8 * 5
    assert found.weights == 3 * 8 * 9 + 64 + 40 and found.bops == products * 64
    assert found.activations == 3 * 128  # y, the other branch and their sum, 8 x 4 x 4 codes of 8 bits each
    assert found.total == found.weights + found.activations
    assert peak_bytes(result.graph, result.plan, 4.0) == found.activations / 2


def test_limits_on_both_memories_leave_weights_what_activations_do_not_take():
    some = limited(weights="90%")
    alive = peak_bytes(some.graph, some.plan)
    result = limited(total=alive + 200.0)
    taken = resources(result.graph, result.plan).weights
    assert 100 < taken <= 200
    assert f"total {alive + taken:,.0f} of {alive + 200:,.0f}" in next(n for n in result.plan.rewrites if "widths" in n)
    limited(activations=alive)
    with pytest.raises(PlanError, match="activations while"):
        limited(activations=alive - 1)
    with pytest.raises(PlanError, match="limit on total"):
        limited(total=alive)


# ---------------------------------------------------------------- two layers of 16 multiplications each


LOST = {"v": {2: 0.5, 8: 0.1}, "w": {2: 3.0, 8: 0.0}}


def two_layers():
    """Weights v and w of 2 or 8 bits; the first layer reads floats, the second one 8 bits."""
    graph = graph_of("a = Linear(x, v)", "b = Linear(a, w)", weights={"v": torch.ones(4, 4), "w": torch.ones(4, 4)})
    plan = plan_of({"v": "weight", "w": "weight"}, x=None, **dict.fromkeys("avwb", stored(0.5, on=grid())))
    pairs = {"a": [(2, 0), (8, 0)], "b": [(2, 8), (8, 8)]}
    return SearchSpace(graph, plan, [], pairs, dict.fromkeys("vw", (2, 8)), LOST)


@pytest.mark.parametrize(
    "limits, bits, used, most",
    [
        ({"bops": "100%"}, (8, 8), 16 * 8 * 32 + 16 * 8 * 8, 16 * 8 * 32 + 16 * 8 * 8),
        ({"bops": "60%"}, (2, 8), 16 * 2 * 32 + 16 * 8 * 8, 3072),
        ({"weights": "70%"}, (2, 8), 4 + 16, 22.4),
        ({"weights": 8}, (2, 2), 4 + 4, 8),
        ({"loss": 0.5}, (2, 8), 0.5, 0.5),
        ({"total": 48}, (2, 8), 4 + 16 + 20, 48),  # x has four floats, a four numbers of 8 bits
    ],
    ids=str,
)
def test_the_bits_that_lose_least_inside_the_limits_by_hand(limits, bits, used, most):
    found = two_layers().choose(chipfit.Limits(**limits))
    assert tuple(found.weights.values()) == bits and found.activations == {}
    ((name, amount),) = found.used.items()
    assert (name, amount) == (next(iter(limits)), pytest.approx(used)) and found.most == {name: pytest.approx(most)}
    assert found.predicted == pytest.approx(LOST["v"][bits[0]] + LOST["w"][bits[1]])


@pytest.mark.parametrize("work, tries, limits", [(1.9, 0, {}), (2, 2, {}), (99, 2, {}), (99, 0, {"loss": 9.0})])
def test_as_many_choices_are_measured_as_the_work_allows_and_the_least_measured_loss_decides(
    work, tries, limits, monkeypatch
):
    monkeypatch.setattr(choose, "WORK", work * 128 * 32)  # of 128 samples
    found = two_layers().choose(chipfit.Limits(weights=20, **limits), lambda bits: bits["w"] + 1.0)
    assert found.tries == tries
    # the best by prediction are (2, 8), (8, 2) and (2, 2), which has bits less than (2, 8) that no limit asks for
    if limits:
        return
    assert tuple(found.weights.values()) == ((8, 2) if tries else (2, 8))
    assert found.measured == (3.0 if tries else None)


def test_of_choices_with_one_measured_loss_the_one_with_more_bits_is_taken():
    losses = {"v": {2: 0.0, 4: 0.0, 8: 0.0}, "w": {2: 3.0, 4: 0.5, 8: 0.0}}
    space = replace(two_layers(), weights=dict.fromkeys("vw", (2, 4, 8)), losses=losses, pairs={})
    found = space.choose(chipfit.Limits(weights=24), lambda bits: 1.0)  # 12 bits for a pair of weights
    assert tuple(found.weights.values()) == (4, 8)
