"""Comparing plans: what rounds, what does not, and losses by hand."""

import math

import pytest
import torch
from torch import nn

import chipfit
from chipfit.rounding.compare import Reference, rounded_run

X = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Skip(nn.Module):
    """The sum reads what the second convolution's input was before it was rounded, on input-placed platforms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        return y + self.b(y)


@pytest.mark.parametrize("platform", ["mqbench_academic", "ort_cpu", "tensorrt", "imx500"])
def test_a_rounded_run_is_what_the_model_computes(platform):
    result = chipfit.quantize(Skip().eval(), [X], platform, progress=False)
    with torch.inference_mode():
        (got,) = rounded_run(result.graph, result.plan, [X]).values()
        want = result.model.eval()(X)
    step = max((float(t.scale.max()) for t in result.plan.tensors.values() if t.quantized), default=0.0)
    assert float((got != want).float().mean()) < 0.01 and float((got - want).abs().max()) <= 1.01 * step


def test_losses_by_hand():
    identity, half = (nn.Linear(2, 2, bias=False) for _ in range(2))
    with torch.no_grad():
        identity.weight.copy_(torch.eye(2))
        half.weight.copy_(0.5 * torch.eye(2))
    x = torch.tensor([[math.log(3.0), 0.0]])  # probabilities 3/4 and 1/4; halved: sqrt 3 to 1
    graphs = [chipfit.capture(m.eval(), (x,)) for m in (identity, half)]
    q = math.sqrt(3) / (1 + math.sqrt(3))
    want = 0.75 * math.log(0.75 / q) + 0.25 * math.log(0.25 / (1 - q))
    assert Reference(graphs[0], [[x]]).loss(graphs[1], chipfit.Plan()) == pytest.approx(want, rel=1e-5)
    x3 = torch.tensor([[[2.0, 4.0]]])
    other = [chipfit.capture(m.eval(), (x3,)) for m in (identity, half)]
    assert Reference(other[0], [[x3]]).loss(other[1], chipfit.Plan()) == pytest.approx(0.25)
    assert Reference(other[0], [[x3]]).loss(other[0], chipfit.Plan()) == 0
