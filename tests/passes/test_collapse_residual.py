"""conv(x) + x is one convolution."""

import pytest
import torch
from torch import nn

from chipfit.passes.collapse_residual import collapse_residual
from tests.build import model_of
from tests.steps import assert_same, captured


def skip(layer: nn.Module) -> nn.Module:
    return model_of(lambda m, x: (x + m.layer(x)).relu(), layer=layer)


LAYERS = {
    "plain": nn.Conv2d(6, 6, 3, padding=1),
    "grouped": nn.Conv2d(6, 6, 3, padding=1, groups=3, bias=False),
    "depthwise dilated": nn.Conv2d(6, 6, 5, padding=4, dilation=2, groups=6),
    "point": nn.Conv2d(6, 6, 1),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_addition_goes_into_the_centre_tap(layer):
    x = torch.randn(2, 6, 7, 7)
    graph = captured(skip(layer), x)
    new, notes = collapse_residual(graph)
    assert [n.op for n in new.nodes] == [graph.nodes[0].op, "Relu"] and len(notes) == 1
    assert_same(graph, new, x)
    moved = new.weights["layer.weight"] - graph.weights["layer.weight"]
    assert float(moved.sum()) == pytest.approx(6) and int((moved != 0).sum()) == 6  # one tap for each of six channels
    centre = [s // 2 for s in moved.shape[2:]]
    assert torch.allclose(moved[:, :, *centre].sum(1), torch.ones(6))


def test_a_linear_layer_gets_the_identity():
    new, _ = collapse_residual(captured(skip(nn.Linear(3, 3, bias=False)), torch.randn(2, 3)))
    assert [n.op for n in new.nodes] == ["Linear", "Relu"]


def test_a_convolution_without_a_tap_at_its_own_place_stays():
    net = model_of(lambda m, x: m.conv(x) + x, conv=nn.Conv2d(4, 4, 2, padding=1, dilation=2))
    new, notes = collapse_residual(captured(net, torch.randn(2, 4, 6, 6)))
    assert len(new.nodes) == 2
    assert notes == ["'conv' keeps its residual addition 'add': no tap of its kernel reads the output's own position"]


def test_other_operands_and_readers_stop_it():
    padded = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(6, 6, 2))  # which reads the padded tensor, not x
    returned = model_of(lambda m, x: (x + (y := m.conv(x)), y * 2), conv=nn.Conv2d(6, 6, 1))
    for net, size in ((skip(padded), 4), (returned, 3)):
        new, notes = collapse_residual(captured(net, torch.randn(2, 6, 5, 5)))
        assert len(new.nodes) == size and notes == []


@pytest.mark.parametrize(
    "layer, shape",
    [(nn.Conv2d(6, 1, 1), (6, 4, 4)), (nn.Linear(3, 1), (3,)), (nn.Conv2d(6, 6, 3, padding=2), (6, 1, 1))],
    ids=["channels", "numbers", "one position, added to each of nine"],
)
def test_an_operand_that_is_repeated_is_no_residual(layer, shape):
    graph = captured(skip(layer), torch.randn(2, *shape))
    new, notes = collapse_residual(graph)
    assert new.nodes == graph.nodes and notes == ["'layer' keeps its residual addition 'add': the shapes differ"]
    assert torch.equal(new.weights["layer.weight"], graph.weights["layer.weight"])


def test_weights_of_several_operators_stay_and_a_refusal_ends_nothing():
    def forward(m, x):
        x = m.a(x) + x
        x = x + m.a(x)
        return x + m.b(x)

    x = torch.randn(2, 2, 3, 3)
    graph = captured(model_of(forward, a=nn.Conv2d(2, 2, 1), b=nn.Conv2d(2, 2, 1)), x)
    new, notes = collapse_residual(graph)
    assert [n.op for n in new.nodes] == ["Conv2D", "Add", "Conv2D", "Add", "Conv2D"]
    why = "'a.weight' is read by several operators"
    assert notes[:2] == [f"'a' keeps its residual addition '{k}': {why}" for k in ("add", "add_1")]
    assert notes[2:] == ["collapsed the residual addition 'add_2' into 'b'"]
    assert_same(graph, new, x)
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
    graph = captured(skip(nn.Conv2d(1, 1, bias=False, **settings)), torch.randn(1, 1, 1, 1))
    if tap is None:
        assert len(collapse_residual(graph)[0].nodes) == 3
        return
    new, _ = collapse_residual(graph)
    moved = (new.weights["layer.weight"] - graph.weights["layer.weight"])[0, 0]
    assert moved.nonzero().tolist() == [list(tap)] and moved[tap] == pytest.approx(1)
