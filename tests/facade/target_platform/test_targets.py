"""Every built-in chip quantizes every kernel of a network, and runs it (43)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.facade.target_platform.targets import chip_descriptions
from chipfit.target_platform import get_target_platform_capabilities

CHIPS = [(n, v) for n, chip in chip_descriptions().items() for v in chip["versions"] if n != "default"]


class Every(nn.Module):
    """All kinds of weights, functional and as layers; pools, concatenation, constants, activations."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6()
        self.depthwise, self.pool = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.MaxPool2d(2)
        self.up, self.dense = nn.ConvTranspose2d(8, 4, 2, 2), nn.Linear(12 * 16, 6)
        self.offset = nn.Parameter(torch.randn(1, 8, 1, 1))
        self.kernel = nn.Parameter(torch.randn(4, 8, 1, 1))

    def forward(self, x):
        x = self.relu(self.norm(self.conv(x)))
        x = torch.tanh(self.depthwise(x)) + x * torch.sigmoid(x) + self.offset
        x = self.pool(x)
        both = torch.cat(
            [nn.functional.avg_pool2d(self.up(x), 2), nn.functional.conv2d(x, self.kernel), torch.sigmoid(x[:, :4])], 1
        )
        return torch.softmax(self.dense(both.flatten(1)), -1)


@pytest.mark.parametrize(("name", "version"), CHIPS)
def test_43_no_kernel_stays_in_float(name, version):
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    network = Every().eval()
    result = chipfit.quantize(network, data, get_target_platform_capabilities("pytorch", name, version), progress=False)
    kernels = {
        n.inputs[1] for n in result.graph.nodes if n.op in ("Conv2D", "DepthwiseConv2D", "TransposeConv2D", "Linear")
    }
    assert len(kernels) == 5
    assert [k for k in kernels if not result.plan.quantized(k)] == []
    x = data[0]
    error = (result.model(x) - network(x)).abs().max()
    assert error < 0.1, error  # probabilities of 6 classes


def test_v3_quantizes_constants_and_v1_does_not():
    for version, quantized in (("v1", False), ("v3", True)):
        torch.manual_seed(0)
        chip = get_target_platform_capabilities("pytorch", "imx500", version)
        result = chipfit.quantize(Every().eval(), [torch.randn(8, 3, 8, 8)], chip, progress=False)
        assert result.plan.quantized("offset") is quantized, version


def test_a_network_on_a_platform_file_through_the_same_function():
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    network = Every().eval()
    through = chipfit.quantize(network, data, get_target_platform_capabilities("pytorch", "ort_cpu"), progress=False)
    direct = chipfit.quantize(network, data, "ort_cpu", progress=False)
    assert through.plan.tensors.keys() == direct.plan.tensors.keys()
    assert all(
        t.scale is None or torch.equal(t.scale, direct.plan.tensors[n].scale) for n, t in through.plan.tensors.items()
    )


@pytest.mark.parametrize(("name", "runtime"), [("tflite", "litert_reference"), ("qnnpack", "onnxruntime")])
def test_a_chip_with_known_arithmetic_is_verified_to_the_integer(name, runtime):
    torch.manual_seed(0)
    data = [torch.randn(8, 3, 8, 8) for _ in range(2)]
    result = chipfit.quantize(Every().eval(), data, get_target_platform_capabilities("pytorch", name), progress=False)
    found = result.verify(data[:1], runtime=runtime)
    assert [(r.layer, r.op, r.differing) for r in found.rows if r.differing and not r.in_float] == []
    assert found.summary()
