"""A tensor whose grid the chip dictates does not force it on the tensors that it is joined with."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.platform.load import load
from chipfit.target_platform import get_target_platform_capabilities


class Joined(nn.Module):
    """A sigmoid or two beside a wide tensor."""

    def __init__(self, *functions) -> None:
        super().__init__()
        self.conv, self.functions = nn.Conv2d(3, 4, 1), functions

    def forward(self, x):
        x = 3 * self.conv(x)
        return torch.cat([*(f(x) for f in self.functions), x], 1)


def moved(x):
    return torch.sigmoid(x).reshape(x.shape[0], 4, -1).reshape(x.shape)


DATA = [torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(k)) for k in range(2)]
CHIPS = ["tflite_int8", get_target_platform_capabilities("pytorch", "tflite")]


@pytest.mark.parametrize("chip", CHIPS, ids=["file", "python"])
@pytest.mark.parametrize(
    "functions", [(torch.sigmoid,), (torch.sigmoid, torch.tanh), (moved,)], ids=["one", "two", "behind movers"]
)
def test_what_is_joined_is_not_clipped(chip, functions):
    network = Joined(*functions).eval()
    result = chipfit.quantize(network, DATA, chip, progress=False)
    assert sum(n.op == "Requantize" for n in result.graph.nodes) == len(functions)
    error = (result.model(DATA[0]) - network(DATA[0])).abs().max()
    step = float(result.plan.tensors[result.graph.outputs[0]].scale)
    assert error < 3 * step
    sigmoid = next(n.output for n in result.graph.nodes if n.op == "Sigmoid")
    assert float(result.plan.tensors[sigmoid].scale) == 1 / 256
    assert any("requantized for" in note for note in result.plan.rewrites)


def test_tensors_with_one_dictated_grid_are_joined_as_they_are():
    class Two(nn.Module):
        def forward(self, x):
            return torch.cat([torch.sigmoid(x), torch.sigmoid(2 * x)], 1)

    result = chipfit.quantize(Two(), [torch.randn(4, 3)], "tflite_int8", progress=False)
    assert not any(n.op == "Requantize" for n in result.graph.nodes)
    assert float(result.plan.tensors[result.graph.outputs[0]].scale) == 1 / 256


def test_a_chip_that_cannot_requantize_says_what_contradicts():
    whole = load("tflite_int8")
    chip = whole.model_copy(update={"name": "plain", "ops": tuple(r for r in whole.ops if r.match != ("Requantize",))})
    with pytest.raises(UnsupportedError, match="share"):
        chipfit.quantize(Joined(torch.sigmoid, torch.tanh).eval(), DATA, chip, progress=False)


def test_a_plan_with_requantization_is_saved_edited_and_exported(tmp_path):
    network = Joined(torch.sigmoid).eval()
    result = chipfit.quantize(network, DATA, "tflite_int8", progress=False)
    again = chipfit.load(result.save(tmp_path / "plan"))
    assert torch.equal(again.model(DATA[0]), result.model(DATA[0]))
    edited = result.edit({"conv": "float"})
    assert sum(n.op == "Requantize" for n in edited.graph.nodes) == 1
    assert not edited.plan.quantized("conv.weight")
    assert result.export(tmp_path / "m.onnx").is_file()
