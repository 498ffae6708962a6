"""An override that changes nothing is refused or said, and one choice does not undo another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.errors import PlanError
from chipfit.platform.schema import Platform


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.a, self.b, self.ln = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, ids):
        x = self.ln(F.relu(self.a(self.emb(ids))))
        return torch.cat([self.b(x), x], -1).softmax(-1)


IDS = [torch.randint(0, 20, (4, 6))]


def quantize(overrides, platform="ort_cpu", model=None, data=IDS):
    torch.manual_seed(0)
    return chipfit.quantize((model or Net()).eval(), data, platform=platform, overrides=overrides, progress=False)


@pytest.mark.parametrize(
    ("overrides", "platform", "says"),
    [
        ({"emb": {"bits": 8}}, "tflite_int8", "'emb' (its operator runs in float)"),
        ({"emb": {"per": "tensor"}}, "tflite_int8", "'emb' (its operator runs in float)"),
        ({"ln": {"activation_bits": 16}}, "ort_cpu", "'ln' (it has 8"),
        ({"LayerNorm": {"bits": 8}}, "ort_cpu", "'ln' (its operator runs in float)"),
        ({"softmax": {"rule": "mse"}}, "tflite_int8", "the platform dictates its scale"),
        ({"softmax": {"range": (0, 2)}}, "tflite_int8", "the platform dictates its scale"),
        ({"Linear": "float", "a": {"rule": "no_clipping"}}, "ort_cpu", "overrides keep 'Linear' in float"),
        ({"b": {"range": (-9, 9)}}, "tflite_int8", "whose range is part of it"),
    ],
)
def test_what_no_layer_can_take_is_refused_with_the_reason(overrides, platform, says):
    with pytest.raises(PlanError, match="changes nothing") as e:
        quantize(overrides, platform)
    assert says in str(e.value)


@pytest.mark.parametrize(
    "overrides",
    [
        {"a": {"bits": 8, "activation_bits": 8}},  # what it has anyway
        {"a": {"rule": "no_clipping", "weight_rule": "mae"}},
        {"relu": {"rule": "no_clipping"}},  # the result of the kernel that it is part of
        {"a": {"per": "tensor", "method": "symmetric"}},
        [("a", {"bits": 8}), ("a", "float")],  # taken back
        {"emb": "float"},
        {"emb": {"rule": "no_clipping"}},
        {"a": {"range": (0, 3)}},
        {"a": {"range": [0, 3]}},
        {"a": {"bits": None}},
    ],
)
def test_what_is_taken_is_not_spoken_of(overrides):
    assert not [n for n in quantize(overrides).plan.rewrites if "override" in n]


def test_what_some_layers_do_not_take_is_said():
    notes = quantize([("Linear", {"rule": "no_clipping"}), ("Relu", {"rule": "mse"})]).plan.rewrites
    assert "the override rule='no_clipping' of 'Linear' changes nothing for 'a' (it has 'mse')" in notes


@pytest.mark.parametrize("kind", [{"bits": 8}, {"activation_bits": 8}])
def test_asking_for_bits_takes_an_earlier_float_back_and_nothing_else_does(kind):
    nodes = quantize([("*", "float"), ("a", kind)]).plan.nodes
    assert [nodes[n].exec for n in ("linear", "linear_1")] == ["int", "float"]
    nodes = quantize([("a", kind), ("*", "float"), ("b", kind)]).plan.nodes
    assert [nodes[n].exec for n in ("linear", "linear_1")] == ["float", "int"]


def test_a_range_known_beforehand_is_not_widened_by_what_moves_the_same_numbers():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2))
    data = [torch.randn(4, 3, 8, 8) * 5]
    for platform in ("tflite_int8", "ort_cpu"):
        plan = quantize({"0": {"range": (-1.0, 1.0)}}, platform, model, data).plan
        assert float(plan["conv2d"].scale) == pytest.approx(2 / 255, rel=1e-3)
        assert float(plan["flatten"].scale) == pytest.approx(2 / 255, rel=1e-3)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ({"io_in": ["a8"], "io_out": ["a8"]}, []),
        ({"io_in": ["a16"], "io_out": ["a8", "float"]}, ["input 'input' is a8: 'npu' names a16 for it"]),
        ({"io_in": ["a8"], "io_out": ["a16"]}, ["output 'relu' is a8: 'npu' names a16 for it"]),
        ({"io_in": ["float"]}, ["input 'input' is a8: 'npu' names float for it"]),
        ({}, []),
    ],
)
def test_inputs_and_outputs_that_the_platform_names_another_format_for_are_noted(place, said):
    op = {"match": ["Linear", "Relu"], "use": [{"in": "a8", "w": "a8", "out": "a8"}], "src": ["M"], "conf": "V"}
    formats = {"a8": {"bits": 8}, "a16": {"bits": 16}}
    npu = Platform.model_validate({"name": "npu", "formats": formats, "ops": [op], "place": place})
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval()
    plan = chipfit.quantize(net, [torch.randn(4, 3)], platform=npu, progress=False).plan
    assert [n for n in plan.rewrites if "names" in n] == said
