"""OpenVINO's kernels: integers of small networks, on several instruction sets; ties; outputs of a plain session."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import chipfit
from chipfit.result import Result
from chipfit.runtimes.onnxruntime import saturates
from tests.build import model_of

pytest.importorskip("openvino")


class Network(nn.Module):
    """Residual blocks of each kind, a strided shortcut, a depthwise layer, pools, a branch, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU6())
        self.first, self.second = nn.Conv2d(12, 12, 3, padding=1), nn.Conv2d(12, 12, 1, bias=False)
        self.depthwise, self.wide = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 20, 1)
        self.narrow, self.shortcut = nn.Conv2d(20, 12, 1), nn.Conv2d(12, 12, 1, bias=False)
        self.rows, self.head = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(x + self.second(torch.relu(self.first(x))))  # adds in place
        y = self.narrow(torch.relu(self.wide(torch.relu(self.depthwise(x)))))
        x = x + y  # with zero points
        x = F.max_pool2d(x, 2) + F.avg_pool2d(x, 2)  # both operands are quantized
        x = torch.cat([x, F.avg_pool2d(self.shortcut(x), 3, 1, 1)], 1).mean((2, 3))
        return self.head(torch.relu(self.rows(x[:, :12] + x[:, 12:])))


def quantized(seed: int, platform: str = "openvino_cpu") -> tuple[Result, list[Tensor]]:
    torch.manual_seed(seed)
    model = Network().eval()
    nn.init.uniform_(model.stem[1].running_var, 0.5, 1.5)
    data = [torch.randn(8, 3, 16, 16) for _ in range(3)]
    return chipfit.quantize(model, data[:2], platform=platform, progress=False), data[2:]


def differing(seed: int, platform: str = "openvino_cpu") -> list[str]:
    """Return the tensors of a network, and outputs, that differ on OpenVINO."""
    result, data = quantized(seed, platform)
    check = result.verify(data)
    assert (check.runtime, check.promised) == ("openvino", True)
    assert check.integers > 50_000 and not check.not_compared
    return [r.tensor for r in check.rows if r.differing or r.op_differing] + check.departures


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("platform", ["openvino_cpu", "openvino_cpu@VNNI"])
def test_no_integer_of_a_network_differs(platform, seed):
    if "VNNI" in platform and saturates():
        pytest.skip("without VNNI, weights of 8 bits saturate")
    assert differing(seed, platform) == []


@pytest.mark.slow
@pytest.mark.parametrize("most", ["AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI"])
def test_no_integer_differs_with_fewer_instructions(most):
    run = "from tests.simulate.test_openvino import differing; assert not (found := differing(0)), found"
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": most}
    done = subprocess.run([sys.executable, "-c", run], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_device_model_returns_what_a_plain_session_returns(tmp_path):
    import openvino

    result, (x,) = quantized(0)
    result.export(tmp_path / "m.onnx")
    session = openvino.Core().compile_model(tmp_path / "m.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert np.array_equal(session([x.numpy()])[0], result.device_model(x).numpy())


@pytest.mark.parametrize("shift", [0.0, 1.3])
def test_inputs_half_way_between_two_integers_are_rounded_as_openvino_does(shift):
    torch.manual_seed(0)
    model = nn.Conv2d(2, 4, 1).eval()
    result = chipfit.quantize(model, [torch.rand(4, 2, 16, 16) * 3 - shift], platform="openvino_cpu", progress=False)
    stored = result.plan[result.graph.inputs[0]]
    half = (torch.arange(256.0).view(16, 16).expand(32, 2, 16, 16) + 0.5 - stored.zero_point) * stored.scale
    near = half.contiguous().view(torch.int32) + torch.randint(-3, 4, half.shape, dtype=torch.int32)
    check = result.verify([near.view(torch.float32)])
    assert check.differing == 0 and check.exact


def test_scales_of_activations_have_16_significant_bits():
    result, _ = quantized(1)
    scales = [t.scale for t in result.plan.tensors.values() if t.quantized and t.role == "activation"]
    assert len(scales) > 8
    for s in scales:
        mantissa, _ = np.frexp(np.float64(float(s)))
        assert mantissa * 2**16 == np.round(mantissa * 2**16)


@pytest.mark.parametrize("kind", [torch.float32, torch.uint8])  # bytes are codes as they are: an input of two names
def test_a_file_with_a_fixed_batch_size_gives_the_same_integers(kind):
    def forward(m, x: Tensor) -> Tensor:
        x = torch.relu(m.a(x.float() / 255))
        return (torch.relu(x + m.b(x))).reshape(2, -1)

    torch.manual_seed(2)
    data = [(torch.rand(2, 4, 8, 8) * 255).to(kind) for _ in range(4)]
    net = model_of(forward, a=nn.Conv2d(4, 8, 3, padding=1), b=nn.Conv2d(8, 8, 1))
    check = chipfit.quantize(net, data[:2], platform="openvino_cpu", progress=False).verify(data[2:])
    assert check.differing == 0 and not check.departures


class Tokens(nn.Module):
    """Convolutions and what a network makes of their pixels as a sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second, self.head = kind, nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Linear(8, 5)
        self.token, self.places, self.norm = torch.randn(1, 1, 8), torch.randn(1, 16, 8), nn.BatchNorm1d(8)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        y = self.second(torch.relu(self.first(x))).flatten(2).transpose(1, 2)
        if self.kind == "class token":
            y = torch.cat([self.token.expand(n, -1, -1), self.first(x).flatten(2).transpose(1, 2)], 1)
        elif self.kind == "joined":
            y = torch.cat([y.sin(), y], 1)
        elif self.kind == "places of each sample":
            y = y + self.places.expand(n, -1, -1)
        elif self.kind == "counted":
            y = y * torch.ones(n, 16, 8).cumsum(1)
        else:
            made = {"mean": lambda: y.mean(1), "largest": lambda: y.amax(1), "sum": lambda: y.sum(1) * self.token[0]}
            y = self.norm(made[self.kind]())
        return self.head(y)


@pytest.mark.parametrize(
    "kind", ["class token", "joined", "places of each sample", "counted", "mean", "largest", "sum"]
)
def test_no_integer_of_a_sequence_of_pixels_differs_where_openvino_alone_would_compute_another(kind):
    torch.manual_seed(0)
    data = [torch.randn(4, 3, 4, 4) for _ in range(3)]
    check = chipfit.quantize(Tokens(kind).eval(), data[:2], platform="openvino_cpu", progress=False).verify(data[2:])
    assert check.exact and not check.departures and not check.not_compared
