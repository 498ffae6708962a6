"""Layout changes move activations only, and only where they must."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from chipfit.calibration.data import first_batch
from chipfit.engine.run import run
from chipfit.frameworks.torch.capture import capture
from chipfit.graph.check import check
from chipfit.graph.ir import Graph
from chipfit.passes.layout import moves_nothing, rearrange, without
from tests.zoo import ZOO, make


def captured(model: nn.Module, x: torch.Tensor) -> Graph:
    return capture(model.eval(), (x,), {})


def kinds(graph: Graph) -> list[str]:
    return [n.op for n in graph.nodes]


@pytest.mark.parametrize("name", sorted(ZOO))
def test_there_and_back_a_network_computes_the_same_numbers(name):
    model, batch = make(name)
    args, kwargs, _ = first_batch([batch], model)
    graph = capture(model, args, kwargs)
    there = rearrange(graph, "channels_last").graph
    check(there)
    back = rearrange(there, "channels_first").graph
    check(back)
    before, after = run(graph, graph.example), run(back, graph.example)
    for a, b in zip(graph.outputs, back.outputs, strict=True):
        assert torch.equal(before[a], after[b])


def test_transpositions_stand_at_the_borders_only():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Softmax(1), nn.Conv2d(4, 2, 1)
    )
    new = rearrange(captured(model, torch.randn(2, 3, 8, 8)), "channels_last")
    there, forms = new.graph, new.forms
    assert kinds(there) == ["Transpose", "Conv2D", "BatchNorm", "Relu", "MaxPool", "Softmax", "Conv2D", "Transpose"]
    assert there.node("softmax").attrs["axis"] == 3
    assert set(forms.values()) == {(0, 2, 3, 1)}


def test_weights_stay_as_they_are():
    graph = captured(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.PReLU(4), nn.ConvTranspose2d(4, 2, 2)), torch.randn(2, 3, 8, 8)
    )
    there = rearrange(graph, "channels_last").graph
    assert all(there.weights[k] is w for k, w in graph.weights.items())


def test_flattening_after_a_global_pool_moves_nothing():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    assert kinds(rearrange(captured(model, torch.randn(2, 3, 8, 8)), "channels_last").graph).count("Transpose") == 1


def test_flattening_an_image_reads_it_in_the_models_own_order():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    assert kinds(rearrange(captured(model, torch.randn(2, 3, 8, 8)), "channels_last").graph) == [
        "Transpose",
        "Conv2D",
        "Transpose",
        "Reshape",
        "Linear",
    ]


def test_the_models_own_transpositions_cancel():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.linear = nn.Conv2d(4, 4, 3, padding=1), nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x):
            return x + self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    there = rearrange(captured(nn.Sequential(Block(), Block()), torch.randn(2, 4, 5, 5)), "channels_last").graph
    assert kinds(there).count("Transpose") == 2  # the model's input and output


def test_constant_operands_are_rearranged_as_new_weights():
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.shift = nn.Conv2d(3, 4, 1), nn.Parameter(torch.arange(4.0).view(4, 1, 1))

        def forward(self, x):
            return self.conv(x) * 2.0 + self.shift

    there = rearrange(captured(Shift(), torch.randn(2, 3, 5, 5)), "channels_last").graph
    add = next(n for n in there.nodes if n.op == "Add")
    assert there.weights[add.inputs[1]].shape == (1, 1, 1, 4)
    assert there.weights["shift"].shape == (4, 1, 1)


def test_only_axes_of_size_one_may_change_places_without_moving_memory():
    assert moves_nothing((None, 8, 1, 1), (0, 2, 3, 1))
    assert not moves_nothing((None, 8, 2, 1), (0, 2, 3, 1))


def test_a_removed_axis_leaves_the_others_in_order():
    assert without((0, 2, 3, 1), {2, 3}) == (0, 1)
    assert without((0, 2, 3, 1), {0}) == (1, 2, 0)
