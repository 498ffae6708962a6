"""Random networks: operators, shapes, strides, groups, residuals, and scales that make ties."""

from __future__ import annotations

import dataclasses

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import chipfit
from chipfit.export.onnx.writer import export_onnx
from chipfit.verify import verify


class Drawn(nn.Module):
    """A network from a list of drawn steps; each step reads the running tensor, some an earlier one too."""

    def __init__(self, channels: int, side: int, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps, self.layers, c, s = [], nn.ModuleList(), channels, side
        for kind, a, b in steps:
            if kind in ("conv", "grouped", "depthwise"):
                k, stride = (1, 3)[a % 2], 2 if b % 5 == 0 and s >= 4 else 1
                groups = c if kind == "depthwise" else 2 if kind == "grouped" and c % 2 == 0 else 1
                o = c if kind == "depthwise" else 2 * (1 + (a + b) % 5)
                self.layers.append(nn.Conv2d(c, o, k, stride, k // 2, groups=groups, bias=b % 3 > 0))
                c, s = o, (s + 2 * (k // 2) - k) // stride + 1
                self.steps.append(("layer", len(self.layers) - 1, a % 4))
            elif kind == "pool" and s >= 2:
                s = s // 2
                self.steps.append(("max" if a % 2 else "avg", 0, 0))
            elif kind == "up" and s <= 6:
                s *= 2
                self.steps.append(("up", 0, 0))
            elif kind in ("residual", "concat", "product"):
                self.layers.append(nn.Conv2d(c, c, 3, 1, 1, groups=c if a % 2 else 1))
                self.steps.append((kind, len(self.layers) - 1, a % 4))
                c = 2 * c if kind == "concat" else c
            elif kind == "activation":
                self.steps.append(("activation", 0, a))
        self.head = nn.Linear(c, 3)

    @staticmethod
    def activate(x: torch.Tensor, kind: int) -> torch.Tensor:
        return (F.relu, F.relu6, lambda v: v, F.relu)[kind](x)

    def forward(self, x):
        for kind, index, act in self.steps:
            if kind == "layer":
                x = self.activate(self.layers[index](x), act)
            elif kind == "max":
                x = F.max_pool2d(x, 2)
            elif kind == "avg":
                x = F.avg_pool2d(x, 2)
            elif kind == "up":
                x = F.interpolate(x, scale_factor=2)
            elif kind == "residual":
                x = self.activate(x + self.layers[index](x), act)
            elif kind == "product":
                x = x * torch.sigmoid(self.layers[index](x))
            elif kind == "concat":
                x = torch.cat((x, self.layers[index](x)), 1)
            else:
                x = (F.relu, F.leaky_relu, torch.sigmoid, F.relu6)[act % 4](x)
        return self.head(x.mean((2, 3)))


KINDS = ("conv", "grouped", "depthwise", "pool", "up", "residual", "concat", "product", "activation")
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 19), st.integers(0, 19)), min_size=1, max_size=6)


def power_of_two_scales(plan):
    """The same plan with every activation scale rounded up to a power of two, where ties are common."""
    tensors = dict(plan.tensors)
    for name, t in tensors.items():
        if t.quantized and t.role == "activation":
            tensors[name] = t.with_(scale=torch.exp2(torch.ceil(torch.log2(t.scale))))
    return dataclasses.replace(plan, tensors=tensors)


def with_biases(graph, plan):
    """Bias scales follow their inputs."""
    tensors = dict(plan.tensors)
    for n in graph.nodes:
        if len(n.inputs) > 2 and n.inputs[2] in tensors and tensors[n.inputs[2]].role == "bias":
            b = tensors[n.inputs[2]]
            tensors[n.inputs[2]] = b.with_(
                scale=(tensors[n.inputs[0]].scale * tensors[n.inputs[1]].scale).expand(b.scale.shape).contiguous()
            )
    return dataclasses.replace(plan, tensors=tensors)


@pytest.mark.parametrize("part", range(6))  # 300 networks in parts, so that workers share them
def test_no_integer_of_a_random_network_differs_from_onnx_runtime(tmp_path_factory, part):
    @hypothesis.seed(part)
    @settings(max_examples=50, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([1, 2, 3, 4]), st.sampled_from([4, 5, 8]), STEPS, st.integers(0, 999), st.booleans())
    def drawn(channels, side, steps, seed, ties):
        check(tmp_path_factory.mktemp("net"), channels, side, steps, seed, ties)

    drawn()


def check(folder, channels, side, steps, seed, ties):
    torch.manual_seed(seed)
    model = Drawn(channels, side, steps).eval()
    x = torch.randn(3, channels, side, side)
    result = chipfit.quantize(model, [x], platform="ort_cpu", rule=("mse", "no_clipping")[seed % 2], progress=False)
    plan = with_biases(result.graph, power_of_two_scales(result.plan)) if ties else result.plan
    found = verify(result.graph, plan, result.platform, [x], path=export_onnx(result.graph, plan, folder / "m.onnx"))
    assert found.sound, found.summary()
    if not found.float_operators:
        assert found.exact, found.summary()
