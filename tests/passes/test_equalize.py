"""Cross-layer equalization: equal ranges on both sides of every channel."""

from __future__ import annotations

import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.equalize import equalize
from chipfit.quantizers.grids import Grid, fake_quantize
from chipfit.ranges.qparams import from_min_max
from tests.steps import captured


def test_the_scales_of_equation_11_on_paper():
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[8.0], [0.5]]))
        net[0].bias.copy_(torch.tensor([4.0, 1.0]))
        net[2].weight.copy_(torch.tensor([[2.0, 2.0]]))
    new, notes = equalize(captured(net, torch.randn(2, 1)))
    # s = sqrt(8 / 2), sqrt(0.5 / 2) = 2, 0.5
    assert new.weights["0.weight"].flatten().tolist() == [4.0, 1.0]
    assert new.weights["0.bias"].tolist() == [2.0, 2.0]
    assert new.weights["2.weight"].flatten().tolist() == [4.0, 1.0]
    assert notes[-1] == "equalized '0' with '2'"


def test_a_chain_with_a_depthwise_convolution_and_a_dead_channel():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(8, 4, 1),
    )
    with torch.no_grad():
        net[0].weight.mul_(torch.logspace(-2, 1, 8).view(-1, 1, 1, 1))
        net[2].weight[3] = 0
    x = torch.randn(2, 3, 6, 6)
    graph = captured(net, x)
    new, _ = equalize(graph)
    (want,), (got,) = run(graph, [x]).values(), run(new, [x]).values()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ranges = [new.weights[f"{k}.weight"].abs() for k in (0, 2, 5)]
    r = [ranges[0].amax((1, 2, 3)), ranges[1].amax((1, 2, 3)), ranges[2].amax((0, 2, 3))]
    live = torch.arange(8) != 3
    torch.testing.assert_close(r[0][live], r[1][live], rtol=0.01, atol=0)
    torch.testing.assert_close(r[1][live], r[2][live], rtol=0.01, atol=0)


def test_per_tensor_weights_lose_an_order_of_magnitude_of_error():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    with torch.no_grad():
        k = torch.logspace(-1.5, 1.5, 16)[torch.randperm(16)]
        net[0].weight.mul_(k.view(-1, 1, 1, 1))
        net[0].bias.mul_(k)
        net[2].weight.div_(k.view(1, -1, 1, 1))
    x = torch.randn(4, 3, 8, 8)
    graph = captured(net, x)

    def error(g):
        grid = Grid(bits=8, qmin=-127, qmax=127)
        rounded = dict(g.weights)
        for name, w in g.weights.items():
            if name.endswith("weight"):
                q = from_min_max(float(w.min()), float(w.max()), grid)
                rounded[name] = fake_quantize(w, q.scale, q.zero_point, grid)
        (want,), (got,) = run(g, [x]).values(), run(g, [x], weights=rounded).values()
        return float((got - want).square().mean())

    assert error(equalize(graph)[0]) < 0.1 * error(graph)


def test_what_cannot_be_scaled_back_says_why():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Conv2d(4, 2, 1))
    graph = captured(net, torch.randn(2, 3, 4, 4))
    new, notes = equalize(graph)
    assert notes == [
        "'0' is not equalized: Relu6 '1' reads it",
        "'2' is not equalized: Swish '3' reads it",
        f"'4' is not equalized: '{graph.outputs[0]}' is an output of the model",
    ]
    assert all(torch.equal(w, new.weights[k]) for k, w in graph.weights.items())
