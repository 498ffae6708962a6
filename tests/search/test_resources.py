"""Memory and operations that a model needs, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import PlanError
from chipfit.search.resources import peak_bytes, resources
from tests.build import model_of, quantized, randn


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
