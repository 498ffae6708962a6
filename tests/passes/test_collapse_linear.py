"""Linear operators in a row become one, where that costs no parameters."""

from __future__ import annotations

import torch
from torch import nn

from chipfit.engine.run import run
from chipfit.passes.collapse_linear import collapse_linear
from tests.steps import captured


def same(a, b, x) -> bool:
    (want,), (got,) = run(a, [x]).values(), run(b, [x]).values()
    return torch.allclose(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_a_convolution_takes_in_the_point_convolution_behind_it():
    x = torch.randn(2, 4, 9, 9)
    graph = captured(nn.Sequential(nn.Conv2d(4, 16, 3, 2, 1), nn.Conv2d(16, 6, 1)), x)
    new, notes = collapse_linear(graph)
    (node,) = new.nodes
    assert new.shape(node.inputs[1]) == (6, 4, 3, 3)  # 216 parameters instead of 576 + 96
    assert notes == ["collapsed '1' into '0'"]
    assert same(graph, new, x)


def test_the_product_of_two_weights_on_paper():
    first, second = nn.Linear(1, 2), nn.Linear(2, 1)
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[2.0], [3.0]]))
        first.bias.copy_(torch.tensor([1.0, -1.0]))
        second.weight.copy_(torch.tensor([[10.0, 100.0]]))
        second.bias.copy_(torch.tensor([7.0]))
    new, _ = collapse_linear(captured(nn.Sequential(first, second), torch.randn(2, 1)))
    (node,) = new.nodes
    assert new.weights[node.inputs[1]].tolist() == [[320.0]]  # 10 * 2 + 100 * 3
    assert new.weights[node.inputs[2]].tolist() == [-83.0]  # 10 - 100 + 7


def test_a_row_of_three_collapses_to_one():
    x = torch.randn(2, 8)
    graph = captured(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)), x)
    new, notes = collapse_linear(graph)
    assert len(new.nodes) == 1 and len(notes) == 2 and same(graph, new, x)


def test_a_pair_that_would_grow_stays():
    graph = captured(nn.Sequential(nn.Conv2d(4, 2, 3), nn.Conv2d(2, 64, 1)), torch.randn(2, 4, 5, 5))
    new, notes = collapse_linear(graph)
    assert len(new.nodes) == 2
    assert notes == [
        "'0' and '1' do not collapse: 2304 parameters instead of 200"
    ]  # 64 * 4 * 9, not 2 * 4 * 9 + 64 * 2


def test_stride_padding_groups_and_activations_in_between_stop_it():
    for second, why in (
        (nn.Conv2d(8, 4, 1, 2), "stride or padding"),
        (nn.Conv2d(8, 4, 1, padding=1), "stride or padding"),
        (nn.Conv2d(8, 4, 1, groups=2), "groups"),
    ):
        new, notes = collapse_linear(captured(nn.Sequential(nn.Conv2d(4, 8, 3), second), torch.randn(2, 4, 5, 5)))
        assert len(new.nodes) == 2 and why in notes[0]
    for second in (nn.Conv2d(8, 4, 3), nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1))):  # no such pair: nothing to say
        graph = captured(nn.Sequential(nn.Conv2d(4, 8, 3), second), torch.randn(2, 4, 5, 5))
        new, notes = collapse_linear(graph)
        assert len(new.nodes) == len(graph.nodes) and notes == []


def test_what_else_is_read_is_not_collapsed():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            y = self.a(x)
            return y, self.b(y)

    assert len(collapse_linear(captured(Both(), torch.randn(2, 4, 5, 5)))[0].nodes) == 2


def test_an_added_constant_becomes_the_bias():
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.linear = nn.Conv2d(3, 4, 3, bias=False), nn.Linear(4, 2)
            self.shift, self.row = nn.Parameter(torch.randn(4, 1, 1)), nn.Parameter(torch.randn(2))

        def forward(self, x):
            y = (0.5 + (self.conv(x) + self.shift)).relu()
            return self.linear(y.mean((2, 3))) - self.row

    x = torch.randn(2, 3, 5, 5)
    graph = captured(Constants(), x)
    new, notes = collapse_linear(graph)
    assert not {"Add", "Sub"} & {n.op for n in new.nodes} and len(notes) == 3
    assert same(graph, new, x)


def test_a_constant_that_differs_from_place_to_place_stays_an_addition():
    class Map(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.map = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(4, 5, 5))

        def forward(self, x):
            return self.conv(x) + self.map

    assert len(collapse_linear(captured(Map(), torch.randn(2, 3, 5, 5)))[0].nodes) == 2
