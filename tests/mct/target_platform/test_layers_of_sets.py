"""Layers of operator sets: attached, found again, and kept apart where sets share an operator."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit import target_platform as tp
from chipfit.errors import ModelingError
from chipfit.mct.target_platform.configs import BIAS_ATTR, KERNEL_ATTR
from tests.build import model_of, quantized, sequential
from tests.mct.target_platform.chips import chip, config, kernel, model, options

F = nn.functional


def test_layers_are_returned_in_order():
    with tp.TargetPlatformModel(options()) as m:
        both = tp.OperatorSetConcat(tp.OperatorsSet("opsetA"), tp.OperatorsSet("opsetB"))
    layers_a, layers_b = [nn.Conv2d, tp.LayerFilterParams(nn.Hardtanh, max_val=2)], [nn.SELU]
    with tp.TargetPlatformCapabilities(m) as tpc:
        tp.OperationsSetToLayers("opsetA", layers_a)
        tp.OperationsSetToLayers("opsetB", layers_b)
    assert tpc.get_layers_by_opset_name("opsetA") == layers_a
    assert tpc.get_layers_by_opset_name("unknown") is None
    assert tpc.get_layers_by_opset(both) == tpc.get_layers_by_opset_name("opsetA_opsetB") == layers_a + layers_b


@pytest.mark.parametrize(
    ("layer", "again", "name"),
    [
        (nn.Conv2d, nn.Conv2d, "Conv2d"),
        (tp.LayerFilterParams(nn.Softmax, dim=2), tp.LayerFilterParams(nn.Softmax, dim=2), "Softmax(dim=2)"),
        (F.hardtanh, F.hardtanh, "hardtanh"),
        (F.relu, torch.relu, "relu"),  # layers of one name cannot be told apart
    ],
)
def test_a_layer_is_in_one_set(layer, again, name):
    def both():
        return [tp.OperationsSetToLayers("a", [layer]), tp.OperationsSetToLayers("b", [again])]

    with tp.TargetPlatformCapabilities(model("a", "b")), pytest.raises(ModelingError) as e:
        both()
    assert f"Found layer {name} in more than one OperatorsSet" in str(e.value)
    with pytest.raises(ModelingError, match="Found layer"):
        tp.OperationsToLayers(both())


def test_layers_belong_to_a_set_of_the_model():
    with tp.TargetPlatformCapabilities(model("opset")), pytest.raises(ModelingError, match="conv is not defined"):
        tp.OperationsSetToLayers("conv", [nn.Conv2d])


@pytest.mark.parametrize("layers", [[], nn.Conv2d, [lambda x: x], ["Convolution7"]])
def test_layers_are_a_list_of_known_layers(layers):
    with pytest.raises(ModelingError):
        tp.OperationsSetToLayers("conv", layers)


def test_fusing_patterns_are_lists_of_layers():
    a, b, c = (tp.OperatorsSet(n) for n in ("opA", "opB", "opC"))
    limited = tp.LayerFilterParams(nn.Hardtanh, tp.Greater("max_val", 7), min_val=0)
    with tp.TargetPlatformCapabilities(model(a, b, c, fusings=[tp.Fusing([a, b, c]), tp.Fusing([a, c])])) as tpc:
        for name, layer in (("opA", nn.Conv2d), ("opB", nn.Tanh), ("opC", limited)):
            tp.OperationsSetToLayers(name, [layer])
    assert tpc.get_fusing_patterns() == [[nn.Conv2d, nn.Tanh, limited], [nn.Conv2d, limited]]


def test_options_of_a_layer_have_the_frameworks_attribute_names():
    several = options(*(config(kernel(bits)) for bits in (8, 4, 2)))
    m = model(tp.OperatorsSet("conv", several), tp.OperatorsSet("tanh", options(activation_n_bits=7)), "relu")
    with tp.TargetPlatformCapabilities(m) as tpc:
        names = {KERNEL_ATTR: tp.DefaultDict({nn.Conv2d: "weight"}, "kernel"), BIAS_ATTR: tp.DefaultDict({}, "bias")}
        tp.OperationsSetToLayers("conv", [nn.Conv2d], attr_mapping=names)
        tp.OperationsSetToLayers("tanh", [nn.Tanh])
        tp.OperationsSetToLayers("relu", [tp.LayerFilterParams(nn.ReLU, inplace=True)])
    weights = [c.attr_weights_configs_mapping for c in tpc.get_qco_by_node(nn.Conv2d(3, 3, 1)).quantization_config_list]
    assert [set(w) for w in weights] == [{"weight", "bias"}] * 3
    assert [w["weight"] for w in weights] == [kernel(8), kernel(4), kernel(2)]
    assert tpc.get_qco_by_node(nn.Tanh()) == options(activation_n_bits=7)
    assert tpc.get_qco_by_node(nn.ReLU(inplace=True)) == tpc.get_qco_by_node(nn.Softmax(-1)) == m.default_qco


def test_the_configuration_of_kernels_is_not_that_of_other_weights():
    """It is an attribute of linear layers; slopes, scales and constants have the one for weights without their own."""
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 4, 1), "slope": nn.PReLU(4), "norm": nn.LayerNorm(6), "head": nn.Linear(6, 2)}
    net = model_of(lambda m, x: m.head(m.norm(m.slope(m.conv(x)) * torch.full((4, 1, 1), 0.7))), **parts)
    result = quantized(net, torch.randn(4, 3, 6, 6), tp.TargetPlatformCapabilities(model()))
    weights = {name for name in result.plan.tensors if result.plan.quantized(name) and name in result.graph.weights}
    assert weights == {"conv.weight", "head.weight"}


def test_a_filter_takes_precedence_over_a_plain_layer():
    six = options(activation_n_bits=6)
    m = model("plain", tp.OperatorsSet("filtered", six))
    with tp.TargetPlatformCapabilities(m) as tpc:
        tp.OperationsSetToLayers("plain", [F.avg_pool2d])
        tp.OperationsSetToLayers("filtered", [tp.LayerFilterParams(F.avg_pool2d, kernel_size=2)])
    assert tpc.get_qco_by_node((F.avg_pool2d, {"kernel_size": 2})) == six
    assert tpc.get_qco_by_node((F.avg_pool2d, {"kernel_size": 1})) == m.default_qco


# ---------------------------------------------------------------- sets that share an operator


def net_of(layer=None, function=F.relu):
    """Return one operator as a layer and as a function, each behind a convolution."""
    torch.manual_seed(0)
    parts = {"a": nn.Conv2d(3, 4, 1), "layer": layer or nn.ReLU(), "b": nn.Conv2d(4, 4, 1)}
    return model_of(lambda m, x: function(m.b(m.layer(m.a(x)))), **parts)


def bits_of(tpc, op="Relu", net=None):
    """Bits of the results of an operator's nodes in a plan."""
    torch.manual_seed(1)
    result = quantized(net or net_of(), torch.randn(4, 3, 8, 8), tpc)
    return [result.plan.tensors[n.output].grid.bits for n in result.graph.nodes if n.op == op], result


def bits_for(tpc, *things):
    return [tpc.get_qco_by_node(t).base.activation_n_bits for t in things]


@pytest.mark.parametrize(("four", "eight", "bits"), [(nn.ReLU, F.relu, [4, 8]), (F.relu, nn.ReLU, [8, 4])])
def test_a_layer_and_a_function_may_be_in_different_sets(four, eight, bits, tmp_path):
    tpc = chip([four], [eight])
    found, result = bits_of(tpc)
    assert found == bits_for(tpc, nn.ReLU(), (F.relu, {})) == bits
    assert bits_for(tpc, *(n for n in result.graph.nodes if n.op == "Relu")) == bits
    back = tp.load_target_platform_capabilities(tp.export_target_platform_capabilities(tpc, tmp_path / "chip.json"))
    assert bits_of(back)[0] == bits_for(back, nn.ReLU(), (F.relu, {})) == bits


@pytest.mark.parametrize(("eight", "bits"), [(nn.Tanh, [4, 4]), ("Relu", [4, 8])])
def test_a_layer_without_a_set_belongs_to_that_of_its_operator(eight, bits):
    tpc = chip([nn.ReLU], [eight])
    assert bits_of(tpc)[0] == bits_for(tpc, nn.ReLU(), (F.relu, {})) == bits


@pytest.mark.parametrize(("fusing", "fused"), [("four", ["ReLU"]), ("eight", ["relu"])])
def test_a_fusion_includes_the_layers_of_its_own_set(fusing, fused):
    _, result = bits_of(chip([nn.ReLU], [F.relu], fusing))
    assert [result.graph.node(g[-1]).layer_type for g in result.plan.groups] == fused


def test_a_filter_on_a_layer_does_not_affect_the_function():
    tpc = chip([tp.LayerFilterParams(nn.LeakyReLU, negative_slope=0.1)], [F.leaky_relu])
    found, _ = bits_of(tpc, "LeakyRelu", net_of(nn.LeakyReLU(0.1), lambda x: F.leaky_relu(x, 0.1)))
    assert found == bits_for(tpc, nn.LeakyReLU(0.1), (F.leaky_relu, {"negative_slope": 0.1})) == [4, 8]


LAYERS = [nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.ReLU6(), nn.LeakyReLU()]
LAYERS += [nn.Hardtanh(0, 3), nn.Hardtanh(-1, 1), nn.SiLU(), nn.Hardswish(), nn.Sigmoid(), nn.Tanh(), nn.GELU()]
LAYERS += [nn.PReLU(), nn.Softmax(1), nn.MaxPool2d(2), nn.Flatten(), nn.ELU(), nn.Linear(8, 2)]
CALLS = [(F.relu, {}), (torch.relu, {}), (F.hardtanh, {"min_val": 0.0}), (F.silu, {}), (torch.tanh, {})]
CALLS += [(torch.flatten, {}), (torch.argmax, {"dim": 1}), (F.softmax, {"dim": 1})]


@pytest.mark.parametrize("name", ["imx500 v1", "imx500 v3", "imx500 v4", "tflite v1", "qnnpack v1", "ort_cpu"])
def test_a_layer_and_its_node_have_the_same_options(name):
    tpc = tp.get_target_platform_capabilities("pytorch", *name.split())
    for thing in [*LAYERS, *CALLS]:
        called = isinstance(thing, tuple)
        call = lambda m, x, thing=thing: thing[0](m.inner(x), **thing[1])
        net = model_of(call, inner=nn.Identity()) if called else sequential(thing, nn.Identity())
        graph = chipfit.capture(net, (torch.rand(2, 3, 8, 8),), {})
        wanted = thing[0].__name__ if called else type(thing).__name__
        (node,) = [n for n in graph.nodes if n.layer_type == wanted]
        assert tpc.get_qco_by_node(thing) == tpc.get_qco_by_node(node), thing
