"""Tensors that are 0, or nearly, on all calibration data: their scales must suit kernels, and harm no neighbour."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.platform.load import names
from chipfit.registry import entry

LITERT = [
    n for n in names() for r in chipfit.load_platform(n).runtimes[:1]
    if entry("runtime", r).declares.suffix == ".tflite"
]  # fmt: skip


def nearly_dead(layer: nn.Module, shape: tuple[int, ...], most: float) -> tuple[nn.Module, list[torch.Tensor]]:
    """A network whose ReLU is open for one value a channel, by so much; and its data, the last batch unseen."""
    torch.manual_seed(0)
    data = [torch.randn(4, *shape) for _ in range(3)]
    first = nn.Conv2d(6, 6, 1) if len(shape) == 3 else nn.Linear(6, 6)
    model = nn.Sequential(first, layer, nn.ReLU()).eval()
    with torch.no_grad():
        layer.weight.mul_(30)
        layer.bias.zero_()
        y = torch.cat([model[:2](d) for d in data[:2]])
        layer.bias.copy_(most - y.transpose(0, 1).flatten(1).amax(1))
    return model, data


LAYERS = {
    "depthwise": (lambda: nn.Conv2d(6, 6, 1, groups=6), (6, 8, 8)),
    "conv": (lambda: nn.Conv2d(6, 6, 1), (6, 8, 8)),
    "linear": (lambda: nn.Linear(6, 6), (6,)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 6, 2, 2), (6, 8, 8)),
}


@pytest.mark.parametrize("platform", LITERT)
@pytest.mark.parametrize("most", [-1.0, 1e-6])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_relu_that_hardly_opens_is_computed_as_simulated(platform, kind, most):
    make, shape = LAYERS[kind]
    model, data = nearly_dead(make(), shape, most)
    result = chipfit.quantize(model, data[:2], platform, progress=False)
    check = result.verify([data[2] * 2])
    assert check.sound and (check.integers or not check.rows), check.summary()


def test_what_was_0_throughout_gets_a_grid_of_unit_size_and_does_not_widen_what_it_is_tied_to():
    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dead = nn.Linear(4, 4)
            nn.init.constant_(self.dead.bias, -100.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.dead(x).relu(), x], 1)

    x = torch.randn(8, 4).clamp(-0.1, 0.1)
    plan = chipfit.quantize(Join(), [x], "tflite_int8", rule="no_clipping", progress=False).plan
    assert float(plan["cat"].scale) == float(plan["relu"].scale) == pytest.approx(0.2 / 255)
    plan = chipfit.quantize(nn.Sequential(Join().dead, nn.ReLU()), [x], "tflite_int8", progress=False).plan
    assert float(plan["relu"].scale) == pytest.approx(1 / 255)


def test_of_two_equal_moves_the_one_that_clips_nothing_is_taken():
    model, data = nearly_dead(nn.Linear(6, 6), (6,), 1e-6)
    plan = chipfit.quantize(model, data[:2], "ethos_u", rule="no_clipping", progress=False).plan
    seen = float(torch.cat([model[0](d).detach() for d in data[:2]]).abs().max())
    assert float(plan["linear"].scale) * 255 >= seen  # the ReLU's scale was raised, its input's was not lowered
    assert "moved to satisfy" in plan.tensors["relu"].origin
