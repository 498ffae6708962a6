"""conv(x) + x is one convolution."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.collapse_residual import collapse_residual
from tests.steps import captured


class Skip(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return (x + self.layer(x)).relu()


LAYERS = {
    "plain": nn.Conv2d(6, 6, 3, padding=1),
    "grouped": nn.Conv2d(6, 6, 3, padding=1, groups=3, bias=False),
    "depthwise dilated": nn.Conv2d(6, 6, 5, padding=4, dilation=2, groups=6),
    "point": nn.Conv2d(6, 6, 1),
    "even": nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(6, 6, 2)),
    "strided": nn.Conv2d(6, 1, 3, 2, 1),
}


@pytest.mark.parametrize("name", ["plain", "grouped", "depthwise dilated", "point"])
def test_the_addition_goes_into_the_centre_tap(name):
    x = torch.randn(2, 6, 7, 7)
    graph = captured(Skip(LAYERS[name]), x)
    new, notes = collapse_residual(graph)
    assert [n.op for n in new.nodes] == [graph.nodes[0].op, "Relu"] and len(notes) == 1
    (want,), (got,) = run(graph, [x]).values(), run(new, [x]).values()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    before, after = graph.weights["layer.weight"], new.weights["layer.weight"]
    moved = after - before
    assert float(moved.sum()) == pytest.approx(6) and int((moved != 0).sum()) == 6  # one tap for each of six channels
    centre = [s // 2 for s in moved.shape[2:]]
    assert torch.allclose(moved[:, :, *centre].sum(1), torch.ones(6))


def test_a_linear_layer_gets_the_identity():
    new, _ = collapse_residual(captured(Skip(nn.Linear(3, 3, bias=False)), torch.randn(2, 3)))
    assert [n.op for n in new.nodes] == ["Linear", "Relu"]


def test_a_convolution_without_a_tap_at_its_own_place_stays():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 2, padding=1, dilation=2)

        def forward(self, x):
            return self.conv(x) + x

    new, notes = collapse_residual(captured(Shifted(), torch.randn(2, 4, 6, 6)))
    assert len(new.nodes) == 2
    assert notes == ["'conv' keeps its residual addition 'add': no tap of its kernel reads the output's own position"]


def test_other_shapes_strides_and_readers_stop_it():
    x = torch.randn(2, 6, 1, 1)
    new, notes = collapse_residual(captured(Skip(LAYERS["strided"]), x))
    assert len(new.nodes) == 3 and len(notes) == 1
    new, notes = collapse_residual(captured(Skip(LAYERS["even"]), torch.randn(2, 6, 5, 5)))
    assert len(new.nodes) == 4 and notes == []  # the convolution reads the padded tensor, not x

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            y = self.conv(x)
            return x + y, y * 2

    new, notes = collapse_residual(captured(Twice(), torch.randn(2, 4, 3, 3)))
    assert len(new.nodes) == 3 and notes == []
