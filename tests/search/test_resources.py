"""What a model takes, counted by hand."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import PlanError
from chipfit.search.resources import peak_bytes, resources


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x):  # [3, 6, 6] -> [8, 4, 4], which stays for the sum
        y = torch.relu(self.a(x))
        return self.head((y + torch.relu(self.b(y))).mean((2, 3)))


DATA = [torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(1))]


def test_memory_and_operations_are_those_by_hand():
    result = chipfit.quantize(Net().eval(), DATA, "ort_cpu", progress=False)
    found = resources(result.graph, result.plan)
    products = 3 * 8 * 9 * 16 + 8 * 8 * 16 + 8 * 5
    assert found.weights == 3 * 8 * 9 + 64 + 40 and found.bops == products * 64
    assert found.activations == 3 * 128  # y, the other branch and their sum, 8 x 4 x 4 codes of 8 bits each
    assert found.total == found.weights + found.activations
    assert peak_bytes(result.graph, result.plan, 4.0) == found.activations / 2


def test_limits_on_both_memories_leave_weights_what_activations_do_not_take():
    def fitted(**limits):
        limited = chipfit.Limits(**limits)
        wide = {"*": {"activation_bits": 8}}
        return chipfit.quantize(Net().eval(), DATA, "mqbench_academic", overrides=wide, limits=limited, progress=False)

    alive = peak_bytes(*(lambda r: (r.graph, r.plan))(fitted(weights="90%")))
    result = fitted(total=alive + 200.0)
    taken = sum(
        result.graph.weights[n].numel() * t.grid.bits / 8
        for n, t in result.plan.tensors.items()
        if t.role == "weight" and t.quantized
    )
    assert 100 < taken <= 200
    assert f"total {alive + taken:,.0f} of {alive + 200:,.0f}" in next(n for n in result.plan.rewrites if "widths" in n)
    fitted(activations=alive)
    with pytest.raises(PlanError, match="activations while"):
        fitted(activations=alive - 1)
    with pytest.raises(PlanError, match="limit on total"):
        fitted(total=alive)
