"""Operator sets that share an operator through different layers: each keeps the layers that it names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import ModelingError
from chipfit.target_platform import (
    LayerFilterParams,
    export_target_platform_capabilities,
    get_target_platform_capabilities,
    load_target_platform_capabilities,
)
from tests.facade.target_platform.small import chip

F = nn.functional


class Net(nn.Module):
    """One operator as a layer and as a function, each behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.layer, self.b = nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return F.relu(self.b(self.layer(self.a(x))))


def fit(tpc, net=None):
    torch.manual_seed(0)
    return chipfit.quantize((net or Net()).eval(), [torch.randn(4, 3, 8, 8)], tpc, progress=False)


def relus(result):
    return [result.plan.tensors[n.output].grid.bits for n in result.graph.nodes if n.op == "Relu"]


def asked(tpc, *things):
    return [tpc.get_qco_by_node(t).base.activation_n_bits for t in things]


@pytest.mark.parametrize(("four", "eight", "bits"), [(nn.ReLU, F.relu, [4, 8]), (F.relu, nn.ReLU, [8, 4])])
def test_a_layer_and_a_function_are_in_different_sets(four, eight, bits, tmp_path):
    tpc = chip([four], [eight])
    result = fit(tpc)
    assert relus(result) == bits
    assert asked(tpc, nn.ReLU(), (F.relu, {})) == bits
    assert asked(tpc, *(n for n in result.graph.nodes if n.op == "Relu")) == bits
    back = load_target_platform_capabilities(export_target_platform_capabilities(tpc, tmp_path / "chip.json"))
    assert relus(fit(back)) == asked(back, nn.ReLU(), (F.relu, {})) == bits


def test_what_no_set_names_belongs_to_the_set_that_has_its_operator():
    tpc = chip([nn.ReLU], [nn.Tanh])
    assert relus(fit(tpc)) == asked(tpc, nn.ReLU(), (F.relu, {})) == [4, 4]
    tpc = chip([nn.ReLU], ["Relu"])  # the operator itself, whatever layer it comes from
    assert relus(fit(tpc)) == asked(tpc, nn.ReLU(), (F.relu, {})) == [4, 8]


@pytest.mark.parametrize(("fusing", "fused"), [("four", ["ReLU"]), ("eight", ["relu"])])
def test_a_fusion_takes_the_layers_of_its_own_set(fusing, fused):
    result = fit(chip([nn.ReLU], [F.relu], fusing))
    assert [result.graph.node(g[-1]).layer_type for g in result.plan.groups] == fused


def test_a_filter_on_one_of_them_leaves_the_other_alone():
    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LeakyReLU(0.1)

        def forward(self, x):
            return F.leaky_relu(self.b(self.layer(self.a(x))), 0.1)

    tpc = chip([LayerFilterParams(nn.LeakyReLU, negative_slope=0.1)], [F.leaky_relu])
    result = fit(tpc, Two())
    found = [result.plan.tensors[n.output].grid.bits for n in result.graph.nodes if n.op == "LeakyRelu"]
    assert found == asked(tpc, nn.LeakyReLU(0.1), (F.leaky_relu, {"negative_slope": 0.1})) == [4, 8]


def test_layers_of_one_name_cannot_be_kept_apart_and_are_refused():
    with pytest.raises(ModelingError, match="Found layer relu in more than one OperatorsSet"):
        chip([F.relu], [torch.relu])


LAYERS = [nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.ReLU6(), nn.LeakyReLU()]
LAYERS += [nn.Hardtanh(0, 3), nn.Hardtanh(-1, 1), nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.Tanh(), nn.GELU()]
LAYERS += [nn.PReLU(), nn.Softmax(1), nn.MaxPool2d(2), nn.Flatten(), nn.ELU(), nn.Linear(8, 2)]
CALLS = [(F.relu, {}), (torch.relu, {}), (F.hardtanh, {"min_val": 0.0}), (F.silu, {}), (torch.tanh, {})]
CALLS += [(torch.flatten, {}), (torch.argmax, {"dim": 1}), (F.softmax, {"dim": 1})]


class Called(nn.Module):
    def __init__(self, function, kwargs) -> None:
        super().__init__()
        self.function, self.kwargs, self.inner = function, kwargs, nn.Identity()

    def forward(self, x):
        return self.function(self.inner(x), **self.kwargs)


@pytest.mark.parametrize("name", ["imx500 v1", "imx500 v3", "imx500 v4", "tflite v1", "qnnpack v1", "ort_cpu"])
def test_asking_for_a_layer_is_asking_for_its_node(name):
    tpc = get_target_platform_capabilities("pytorch", *name.split())
    for thing in [*LAYERS, *CALLS]:
        called = isinstance(thing, tuple)
        net = Called(*thing) if called else nn.Sequential(thing, nn.Identity())
        graph = chipfit.capture(net.eval(), (torch.rand(2, 3, 8, 8),), {})
        wanted = thing[0].__name__ if called else type(thing).__name__
        (node,) = [n for n in graph.nodes if n.layer_type == wanted]
        assert tpc.get_qco_by_node(thing) == tpc.get_qco_by_node(node), thing
