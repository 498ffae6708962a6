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


@pytest.mark.parametrize(
    "layer, x",
    [
        (nn.Conv2d(6, 1, 1), torch.randn(2, 6, 4, 4)),
        (nn.Linear(3, 1), torch.randn(2, 3)),
        (nn.Conv2d(6, 6, 3, padding=2), torch.randn(2, 6, 1, 1)),  # one position, added to each of nine
    ],
)
def test_an_operand_that_is_repeated_is_no_residual(layer, x):
    graph = captured(Skip(layer), x)
    new, notes = collapse_residual(graph)
    assert new.nodes == graph.nodes and notes == ["'layer' keeps its residual addition 'add': the shapes differ"]
    assert torch.equal(new.weights["layer.weight"], graph.weights["layer.weight"])


def test_weights_of_several_operators_stay_and_a_refusal_ends_nothing():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

        def forward(self, x):
            x = self.a(x) + x
            x = x + self.a(x)
            return x + self.b(x)

    x = torch.randn(2, 2, 3, 3)
    graph = captured(Two(), x)
    new, notes = collapse_residual(graph)
    assert [n.op for n in new.nodes] == ["Conv2D", "Add", "Conv2D", "Add", "Conv2D"]
    why = "'a.weight' is read by several operators"
    assert notes[:2] == [f"'a' keeps its residual addition '{k}': {why}" for k in ("add", "add_1")]
    assert notes[2:] == ["collapsed the residual addition 'add_2' into 'b'"]
    torch.testing.assert_close(list(run(new, [x]).values()), list(run(graph, [x]).values()), rtol=1e-5, atol=1e-5)
    assert not {n.output for n in graph.nodes} <= set(new.values)  # the convolution's old result is gone


@pytest.mark.parametrize(
    "settings, tap",
    [
        ({"kernel_size": 2, "padding": 1}, None),  # 5 x 5 of 4 x 4
        ({"kernel_size": 3, "padding": 1}, (1, 1)),
        ({"kernel_size": (3, 1), "padding": (1, 0)}, (1, 0)),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, (1, 1)),
        ({"kernel_size": 3, "padding": 1, "stride": (1, 2)}, None),
        ({"kernel_size": 3, "padding": (2, 1), "dilation": (2, 1)}, (1, 1)),
    ],
)
def test_the_tap_that_reads_the_outputs_own_position(settings, tap):
    graph = captured(Skip(nn.Conv2d(1, 1, bias=False, **settings)), torch.randn(1, 1, 1, 1))
    if tap is None:
        assert len(collapse_residual(graph)[0].nodes) == 3
        return
    new, _ = collapse_residual(graph)
    moved = (new.weights["layer.weight"] - graph.weights["layer.weight"])[0, 0]
    assert moved.nonzero().tolist() == [list(tap)] and moved[tap] == pytest.approx(1)
