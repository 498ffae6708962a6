"""The numbered promises of target-platform modelling: models, sets, options, filters, fusings, files."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from chipfit.errors import ModelingError
from chipfit.facade.target_platform.configs import BIAS_ATTR, KERNEL_ATTR
from chipfit.target_platform import (
    AttributeQuantizationConfig,
    Contains,
    DefaultDict,
    Eq,
    Fusing,
    Greater,
    GreaterEq,
    LayerFilterParams,
    NotEq,
    OperationsSetToLayers,
    OperationsToLayers,
    OperatorSetConcat,
    OperatorsSet,
    OpQuantizationConfig,
    QuantizationConfigOptions,
    QuantizationMethod,
    Smaller,
    SmallerEq,
    TargetPlatformCapabilities,
    TargetPlatformModel,
    export_target_platform_capabilities,
    get_default_quantization_config_options,
    get_target_platform_capabilities,
    load_target_platform_capabilities,
)

F = nn.functional


def config(**changes):
    kernel = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 8, True, True)
    base = OpQuantizationConfig(
        AttributeQuantizationConfig(),
        {KERNEL_ATTR: kernel, BIAS_ATTR: AttributeQuantizationConfig()},
        QuantizationMethod.POWER_OF_TWO,
        8,
        8,
        True,
        False,
        None,
        None,
        32,
    )
    return base.clone_and_edit(**changes)


def options(**changes):
    return QuantizationConfigOptions([config(**changes)])


def model(*sets, fusings=()):
    return TargetPlatformModel(options(), operator_set=sets, fusing_patterns=fusings)


# ---------------------------------------------------------------- models


def test_1_default_options_belong_to_an_open_model():
    with pytest.raises(ModelingError, match="is not initialized"):
        get_default_quantization_config_options()
    with TargetPlatformModel(options()) as m:
        assert get_default_quantization_config_options() == m.default_qco


def test_2_the_default_is_one_option():
    a, b = config(), config(activation_n_bits=4)
    with pytest.raises(AssertionError, match="must contain only one option"):
        TargetPlatformModel(QuantizationConfigOptions([a, b], base_config=a))


def test_3_a_model_is_immutable_once_complete():
    with TargetPlatformModel(options()) as m:
        OperatorsSet("opset")
    with pytest.raises(ModelingError, match="Immutable class. Can't edit attributes"):
        m.operator_set = []
    with pytest.raises(ModelingError, match="can not be reinitialized"), m:
        pass


def test_4_two_sets_of_one_name_are_refused_and_nothing_stays_open():
    def two():
        with TargetPlatformModel(options()):
            OperatorsSet("conv")
            OperatorsSet("conv")

    with pytest.raises(ModelingError, match="'conv'"):
        two()
    with pytest.raises(ModelingError, match="'conv'"):
        model(OperatorsSet("conv"), OperatorsSet("conv", options(activation_n_bits=4)))
    with pytest.raises(ModelingError, match="is not initialized"):
        get_default_quantization_config_options()


def test_an_error_inside_the_block_closes_it():
    with pytest.raises(ZeroDivisionError), TargetPlatformModel(options()):
        _ = 1 / 0
    with pytest.raises(ModelingError, match="is not initialized"):
        get_default_quantization_config_options()


def test_5_options_are_checked_when_they_are_made():
    with pytest.raises(AssertionError):
        QuantizationConfigOptions([])
    with pytest.raises(AssertionError, match="type int"):
        QuantizationConfigOptions([3])
    with pytest.raises(AssertionError, match="list"):
        QuantizationConfigOptions(config())
    with pytest.raises(ModelingError, match="base_config"):
        QuantizationConfigOptions([config(), config(activation_n_bits=4)])
    with pytest.raises(ModelingError, match="base_config"):
        QuantizationConfigOptions([config()], base_config=config(activation_n_bits=4))
    cloned = (
        options().clone_and_edit(activation_n_bits=3).clone_and_edit_weight_attribute([KERNEL_ATTR], weights_n_bits=5)
    )
    first = cloned.quantization_config_list[0]
    assert (first.activation_n_bits, first.attr_weights_configs_mapping[KERNEL_ATTR].weights_n_bits) == (3, 5)
    assert set(first.attr_weights_configs_mapping) == {KERNEL_ATTR, BIAS_ATTR}  # the others stay


@pytest.mark.parametrize(
    "edit",
    [
        lambda: config().clone_and_edit(activation_bits=3),
        lambda: options().clone_and_edit(simd=3),
        lambda: config().clone_and_edit({"kernel": {"weights_n_bits": 3}}),
        lambda: options().clone_and_edit_weight_attribute(["kernel"], weights_n_bits=3),
        lambda: options().clone_and_edit_weight_attribute(bits=3),
        lambda: AttributeQuantizationConfig().clone_and_edit(n_bits=3),
    ],
)
def test_clones_refuse_unknown_fields(edit):
    with pytest.raises(ModelingError, match="There is no"):
        edit()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_n_bits", 0),
        ("activation_n_bits", 8.5),
        ("activation_quantization_method", "POWER_OF_TWO"),
        ("fixed_scale", -1.0),
        ("fixed_zero_point", 3),
        ("simd_size", 0),
        ("signedness", 1),
        ("supported_input_activation_n_bits", "8"),
    ],
)
def test_values_are_checked_when_a_configuration_is_made(field, value):
    with pytest.raises(ModelingError, match=field):
        config(**{field: value})


def test_values_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        config().activation_n_bits = 4
    with pytest.raises(TypeError):
        config().attr_weights_configs_mapping["bias"] = AttributeQuantizationConfig()


def test_6_sets_are_found_by_name():
    three = options(activation_n_bits=3)
    m = model(OperatorsSet("opset_3bit", three))
    assert m.get_config_options_by_operators_set("opset_3bit") == three
    assert m.get_config_options_by_operators_set("unknown") == m.default_qco
    assert m.is_opset_in_model("opset_3bit")
    assert not m.is_opset_in_model("unknown")


def test_7_a_concatenation_is_a_set_without_options():
    with TargetPlatformModel(options()) as m:
        a, b = OperatorsSet("opset_A"), OperatorsSet("opset_B", options(activation_n_bits=2))
        OperatorsSet("opset_C")
        OperatorSetConcat(a, b)
    assert len(m.operator_set) == 4
    assert m.get_opset_by_name("opset_A_opset_B").qc_options is None
    with pytest.raises(ModelingError):
        OperatorSetConcat()
    with pytest.raises(ModelingError):
        OperatorSetConcat(3)


def test_8_fusings_contain_one_another():
    conv, add, tanh = (OperatorsSet(n) for n in ("conv", "add", "tanh"))
    with pytest.raises(AssertionError, match="Fusing can not be created for a single operators group"):
        Fusing([conv])
    with pytest.raises(AssertionError, match="list"):
        Fusing(conv)
    two, three = Fusing([conv, add]), Fusing([conv, add, tanh])
    assert three.contains(two)
    assert not two.contains(three)
    assert two.contains(two)
    assert three.contains(three)
    either = Fusing([conv, OperatorSetConcat(add, tanh)])
    assert either.contains(two)
    assert not two.contains(either)
    assert not three.contains(either)
    assert not either.contains(three)
    assert two.get_info() == {"conv_add": "conv -> add"}


def test_sets_go_by_their_names_in_fusings_and_concatenations():
    with TargetPlatformModel(options()) as m:
        conv, relu, add = (OperatorsSet(n, options(activation_n_bits=4)) for n in ("Conv", "Relu", "Add"))
        by_name, by_set = Fusing(["Conv", "Relu"]), Fusing([conv, relu])
        either = [Fusing([conv, OperatorSetConcat("Relu", add)]), Fusing(["Conv", OperatorSetConcat(relu, add), "Add"])]
        with pytest.raises(ModelingError, match=r"no operator set named 'Rleu'.*'Relu'"):
            Fusing(["Conv", "Rleu"])
    assert by_name == by_set
    assert [f.operator_groups_list[1].name for f in either] == ["Relu_Add", "Relu_Add"]
    assert len(m.operator_set) == 4  # the concatenation is made twice and is one
    assert len(m.fusing_patterns) == 4


def test_a_fusing_made_before_its_model_takes_the_models_sets():
    by_name = [Fusing(["Conv", "Relu"]), Fusing(["Conv", OperatorSetConcat("Relu", "Add")])]
    own = [OperatorsSet(n, options(activation_n_bits=4)) for n in ("Conv", "Relu", "Add")]
    m = model(*own, fusings=by_name)
    assert [o.name for o in m.operator_set] == ["Conv", "Relu", "Add", "Relu_Add"]
    assert all(o.qc_options == options(activation_n_bits=4) for o in m.operator_set[:3])
    again = model(*own, fusings=m.fusing_patterns)  # and the fusings serve another model
    assert again.fusing_patterns == m.fusing_patterns
    with pytest.raises(ModelingError, match="Two operator sets are named 'Conv'"):
        model(*own, fusings=[Fusing([OperatorsSet("Conv", options(activation_n_bits=2)), own[1]])])


# ---------------------------------------------------------------- layers


def test_9_layers_are_returned_in_order():
    with TargetPlatformModel(options()) as m:
        a, b = OperatorsSet("opsetA"), OperatorsSet("opsetB")
        both = OperatorSetConcat(a, b)
    tpc = TargetPlatformCapabilities(m)
    layers_a, layers_b = [nn.Conv2d, LayerFilterParams(nn.Hardtanh, max_val=2)], [nn.SELU]
    with tpc:
        OperationsSetToLayers("opsetA", layers_a)
        OperationsSetToLayers("opsetB", layers_b)
    assert tpc.get_layers_by_opset_name("opsetA") == layers_a
    assert tpc.get_layers_by_opset_name("unknown") is None
    assert tpc.get_layers_by_opset(both) == layers_a + layers_b
    assert tpc.get_layers_by_opset_name("opsetA_opsetB") == layers_a + layers_b


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.Conv2d, "Found layer Conv2d in more than one OperatorsSet"),
        (LayerFilterParams(nn.Softmax, dim=2), "Found layer Softmax(dim=2) in more than one OperatorsSet"),
        (F.hardtanh, "Found layer hardtanh in more than one OperatorsSet"),
    ],
)
def test_10_a_layer_is_in_one_set(layer, text):
    again = LayerFilterParams(nn.Softmax, dim=2) if isinstance(layer, LayerFilterParams) else layer
    with TargetPlatformCapabilities(model(OperatorsSet("a"), OperatorsSet("b"))):
        OperationsSetToLayers("a", [layer])
        with pytest.raises(ModelingError) as e:
            OperationsSetToLayers("b", [again])
    assert text in str(e.value)
    with pytest.raises(ModelingError):
        OperationsToLayers([OperationsSetToLayers("a", [layer]), OperationsSetToLayers("b", [again])])


def test_11_layers_belong_to_a_set_of_the_model():
    with (
        TargetPlatformCapabilities(model(OperatorsSet("opset"))),
        pytest.raises(ModelingError, match="conv is not defined"),
    ):
        OperationsSetToLayers("conv", [nn.Conv2d])


@pytest.mark.parametrize("layers", [[], nn.Conv2d, [lambda x: x], ["Convolution7"]])
def test_layers_are_a_list_of_known_ones(layers):
    with pytest.raises(ModelingError):
        OperationsSetToLayers("conv", layers)


def test_12_fusing_patterns_are_lists_of_layers():
    with TargetPlatformModel(options()) as m:
        a, b, c = (OperatorsSet(n) for n in ("opA", "opB", "opC"))
        Fusing([a, b, c])
        Fusing([a, c])
    limited = LayerFilterParams(nn.Hardtanh, Greater("max_val", 7), min_val=0)
    with TargetPlatformCapabilities(m) as tpc:
        OperationsSetToLayers("opA", [nn.Conv2d])
        OperationsSetToLayers("opB", [nn.Tanh])
        OperationsSetToLayers("opC", [limited])
    assert tpc.get_fusing_patterns() == [[nn.Conv2d, nn.Tanh, limited], [nn.Conv2d, limited]]


def test_13_options_come_under_the_frameworks_own_attribute_names():
    choices = [config(attr_to_edit={KERNEL_ATTR: {"weights_n_bits": b}}) for b in (8, 4, 2)]
    several = QuantizationConfigOptions(choices, base_config=choices[0])
    m = model(OperatorsSet("conv", several), OperatorsSet("tanh", options(activation_n_bits=7)), OperatorsSet("relu"))
    with TargetPlatformCapabilities(m) as tpc:
        names = {KERNEL_ATTR: DefaultDict({nn.Conv2d: "weight"}, "kernel"), BIAS_ATTR: DefaultDict({}, "bias")}
        OperationsSetToLayers("conv", [nn.Conv2d], attr_mapping=names)
        OperationsSetToLayers("tanh", [nn.Tanh])
        OperationsSetToLayers("relu", [LayerFilterParams(nn.ReLU, inplace=True)])
    found = tpc.get_qco_by_node(nn.Conv2d(3, 3, 1))
    assert [set(c.attr_weights_configs_mapping) for c in found.quantization_config_list] == [{"weight", "bias"}] * 3
    kernels = [c.attr_weights_configs_mapping["weight"] for c in found.quantization_config_list]
    assert kernels == [c.attr_weights_configs_mapping[KERNEL_ATTR] for c in choices]
    assert tpc.get_qco_by_node(nn.Tanh()) == options(activation_n_bits=7)
    assert tpc.get_qco_by_node(nn.ReLU(inplace=True)) == m.default_qco
    assert tpc.get_qco_by_node(nn.Softmax(-1)) == m.default_qco


def test_14_a_filter_goes_before_a_plain_layer():
    six = options(activation_n_bits=6)
    m = model(OperatorsSet("plain"), OperatorsSet("filtered", six))
    with TargetPlatformCapabilities(m) as tpc:
        OperationsSetToLayers("plain", [F.avg_pool2d])
        OperationsSetToLayers("filtered", [LayerFilterParams(F.avg_pool2d, kernel_size=2)])
    assert tpc.get_qco_by_node((F.avg_pool2d, {"kernel_size": 2})) == six
    assert tpc.get_qco_by_node((F.avg_pool2d, {"kernel_size": 1})) == m.default_qco


# ---------------------------------------------------------------- filters


def test_15_all_conditions_of_a_filter_hold():
    f = LayerFilterParams(
        nn.Conv2d,
        Greater("out_channels", 2),
        Smaller("out_channels", 4),
        padding_mode="zeros",
        kernel_size=(3, 4),
        out_channels=3,
    )
    assert f.match(nn.Conv2d(1, 3, (3, 4)))
    assert not f.match(nn.Conv2d(1, 2, (3, 4)))
    assert not f.match(nn.ConvTranspose2d(1, 3, (3, 4)))


def test_16_alternatives():
    f = LayerFilterParams(nn.LeakyReLU, GreaterEq("negative_slope", 0.5) | Smaller("negative_slope", 0.2))
    assert [f.match(nn.LeakyReLU(a)) for a in (0.1, 0.5, 0.3)] == [True, True, False]


def test_17_filters_on_functions_and_on_names():
    f = LayerFilterParams(F.leaky_relu, SmallerEq("negative_slope", 2))
    assert [f.match((F.leaky_relu, {"negative_slope": a})) for a in (0.4, 2, 2.1)] == [True, True, False]
    assert LayerFilterParams(F.leaky_relu).match((F.leaky_relu, {"negative_slope": 9}))
    named = Contains("name", "conv")
    assert [named.match({"name": n}) for n in ("conv", "layer_conv_0", "CONVOLUTION")] == [True, True, False]


@pytest.mark.parametrize(
    "make",
    [lambda low, high: nn.Hardtanh(low, high), lambda low, high: (F.hardtanh, {"min_val": low, "max_val": high})],
)
def test_18_conditions_on_two_attributes(make):
    layer = nn.Hardtanh if isinstance(make(0, 1), nn.Module) else F.hardtanh
    f = LayerFilterParams(layer, Greater("max_val", 2) & Smaller("min_val", 1))
    assert [f.match(make(*a)) for a in ((0, 3), (1, 3), (0.5, 2))] == [True, False, False]
    assert not f.match(nn.Hardtanh(max_val=2) if layer is nn.Hardtanh else (F.hardtanh, {"max_val": 2}))


def test_18_defaults_of_a_function_are_visible():
    f = LayerFilterParams(F.normalize, Eq("p", 2) | Eq("p", None))
    assert [f.match((F.normalize, kw)) for kw in ({"p": 2}, {"p": 2.0}, {}, {"p": 3.0})] == [True, True, True, False]


def test_19_a_missing_attribute_is_not_none():
    assert not Eq("x", None).match({})
    assert not NotEq("x", None).match({})
    assert Eq("x", None).match({"x": None})
    assert LayerFilterParams(nn.ReLU, x=None).match(nn.ReLU())
    assert repr(Eq("a", 1) & Smaller("b", 2)) == "a = 1 & b < 2"
    assert repr(LayerFilterParams(nn.ReLU, Eq("a", 1), y=3)) == "ReLU(y=3, a = 1)"


def test_20_conditions_combine_at_will():
    three = Eq("x", 1) | Eq("x", 2) | Eq("x", 3)
    assert [three.match({"x": x}) for x in (1, 2, 3, 4)] == [True, True, True, False]
    nested = Eq("x", 1) | (Greater("x", 5) & (Smaller("x", 7) | Eq("y", 0)))
    assert [nested.match(c) for c in ({"x": 1}, {"x": 6}, {"x": 8, "y": 0}, {"x": 8, "y": 1})] == [
        True,
        True,
        True,
        False,
    ]
    assert [f("x", 3).match({"x": None}) for f in (Greater, GreaterEq, Smaller, SmallerEq, Contains)] == [False] * 5
    assert LayerFilterParams(nn.ReLU, Eq("a", 1)) != LayerFilterParams(nn.ReLU6, Eq("a", 1))
    assert LayerFilterParams(nn.ReLU) != LayerFilterParams(nn.ReLU, x=1)
    with pytest.raises(ModelingError, match="filter"):
        LayerFilterParams(nn.ReLU, "inplace")
    with pytest.raises(TypeError):
        Eq("a", 1) | True


# ---------------------------------------------------------------- fusions


class Chain(nn.Module):
    """Layers in sequence, then outputs given by name."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


def fused(net, tpc, shape=(2, 3, 8, 8)):
    """Layer types of every group that the platform fuses."""
    from chipfit.linting import lint

    found = lint(net, torch.randn(shape), tpc)
    return [tuple(found.graph.node(n).op for n in g) for g in found.assignment.groups]


def chip(*patterns, **layers):
    """Capabilities with these fusing patterns; a group of sets is a tuple of names."""
    sets = {n: OperatorsSet(n) for n in layers}
    group = lambda g: sets[g] if isinstance(g, str) else OperatorSetConcat(*(sets[n] for n in g))
    m = TargetPlatformModel(
        options(),
        operator_set=sets.values(),
        fusing_patterns=[Fusing([group(g) for g in p], name=str(p)) for p in patterns],
    )
    return TargetPlatformCapabilities(
        m, op_sets_to_layers=OperationsToLayers([OperationsSetToLayers(n, ls) for n, ls in layers.items()])
    )


def conv(n=3):
    return nn.Conv2d(3, n, 3, padding=1)


def test_21_the_nearest_convolution_fuses():
    assert fused(Chain(conv(), conv(), nn.ReLU()), chip(["conv", "relu"], conv=[nn.Conv2d], relu=[nn.ReLU])) == [
        ("Conv2D", "Relu")
    ]


def test_22_a_concatenation_of_activations():
    acts = {"tanh": [nn.Tanh], "relu": [nn.ReLU], "sigmoid": [nn.Sigmoid], "swish": [nn.SiLU]}
    net = Chain(conv(), conv(), nn.Tanh(), conv(), nn.ReLU(), conv(), nn.Sigmoid(), conv(), nn.SiLU())
    every = chip(["conv", tuple(acts)], conv=[nn.Conv2d], **acts)
    assert fused(net, every) == [("Conv2D", a) for a in ("Tanh", "Relu", "Sigmoid", "Swish")]
    assert fused(net, chip(["conv", "relu"], conv=[nn.Conv2d], **acts)) == [("Conv2D", "Relu")]


class Branches(nn.Module):
    """Residual blocks whose tails differ, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv() for _ in range(5))
        self.dense = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        a, b, c, d, e = self.convs
        x = F.silu(a(x)) + x
        x = F.silu(b(x)) + x
        y = torch.relu(c(x))
        z = torch.relu(d(y)) + y
        w = e(z)
        w = torch.sin(w)
        return F.silu(self.dense[1](F.silu(self.dense[0](w))))


def test_23_a_residual_network():
    tpc = chip(
        ["conv", ("relu", "swish")],
        ["conv", "add", ("relu", "swish")],
        ["conv", ("relu", "swish"), "add"],
        ["fc", ("relu", "swish")],
        conv=[nn.Conv2d],
        fc=[nn.Linear],
        relu=[nn.ReLU, torch.relu],
        swish=[nn.SiLU, F.silu],
        add=[torch.add],
    )
    assert fused(Branches(), tpc) == [
        ("Conv2D", "Swish", "Add"),
        ("Conv2D", "Swish", "Add"),
        ("Conv2D", "Relu"),
        ("Conv2D", "Relu", "Add"),
        ("Linear", "Swish"),
        ("Linear", "Swish"),
    ]


class Dense(nn.Module):
    def __init__(self, then) -> None:
        super().__init__()
        self.fc, self.then = nn.Linear(8, 8), then

    def forward(self, x):
        return self.then(torch.relu(self.fc(x)), x)


LAYERS = {"fc": [nn.Linear], "relu": [torch.relu], "add": [torch.add]}


def test_24_what_is_not_declared_does_not_fuse_and_what_is_fuses_whatever_follows():
    three, two = ["fc", "relu", "add"], ["fc", "relu"]
    other, adds = Dense(lambda a, b: torch.tanh(a)), Dense(torch.add)
    assert fused(other, chip(three, **LAYERS), (2, 8)) == []
    assert fused(other, chip(three, two, **LAYERS), (2, 8)) == [("Linear", "Relu")]
    assert fused(adds, chip(three, two, **LAYERS), (2, 8)) == [("Linear", "Relu", "Add")]
    assert fused(adds, chip(two, three, **LAYERS), (2, 8)) == [("Linear", "Relu", "Add")]


class TwoIntoOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(), conv()

    def forward(self, x):
        return self.a(x) + self.b(x)


def test_25_groups_never_overlap():
    layers = {"conv": [nn.Conv2d], "relu": [nn.ReLU], "add": [torch.add], "tanh": [nn.Tanh]}
    assert fused(Chain(conv(), nn.ReLU(), nn.ReLU()), chip(["conv", "relu"], ["relu", "relu"], **layers)) == [
        ("Conv2D", "Relu")
    ]
    assert fused(TwoIntoOne(), chip(["conv", "add"], **layers)) == [("Conv2D", "Add")]
    longer = chip(["conv", "relu"], ["conv", "relu", "tanh", "add"], **layers)
    assert fused(Chain(conv(), nn.ReLU(), nn.Tanh(), nn.Sigmoid()), longer) == [("Conv2D", "Relu")]


# ---------------------------------------------------------------- built-in chips and files


def test_42_imx500():
    tpc = get_target_platform_capabilities("pytorch", "default")
    found = tpc.get_qco_by_node(nn.Conv2d(3, 3, 1))
    kernels = [c.attr_weights_configs_mapping["weight"] for c in found.quantization_config_list]
    assert [
        (k.weights_n_bits, k.weights_quantization_method.name, k.weights_per_channel_threshold) for k in kernels
    ] == [(b, "SYMMETRIC", True) for b in (8, 4, 2)]
    assert {c.activation_quantization_method for c in found.quantization_config_list} == {
        QuantizationMethod.POWER_OF_TWO
    }
    assert [c.simd_size for c in found.quantization_config_list] == [32, 64, 128]
    for version in ("v1", "v1_lut", "v1_pot", "v2", "v2_lut", "v3", "v3_lut", "v4"):
        assert get_target_platform_capabilities("pytorch", "imx500", version).version == version
    for wrong in (
        ("theano", "imx500"),
        ("pytorch", "imx5000"),
        ("pytorch", "imx500", "v99"),
        ("pytorch", "tflite", "v1_lut"),
    ):
        with pytest.raises(ModelingError, match="There is no"):
            get_target_platform_capabilities(*wrong)


def test_42_versions_differ_as_released():
    def kernel(version, bits):
        found = get_target_platform_capabilities("pytorch", "imx500", version).get_qco_by_node(nn.Linear(2, 2))
        kernels = [c.attr_weights_configs_mapping["weight"] for c in found.quantization_config_list]
        return next(k.weights_quantization_method.name for k in kernels if k.weights_n_bits == bits)

    assert [kernel(v, 8) for v in ("v1", "v1_pot", "v1_lut")] == ["SYMMETRIC", "POWER_OF_TWO", "SYMMETRIC"]
    assert [kernel(v, 4) for v in ("v1", "v1_pot", "v1_lut")] == ["SYMMETRIC", "POWER_OF_TWO", "LUT_SYM_QUANTIZER"]
    assert not get_target_platform_capabilities("pytorch", "imx500", "v1").tp_model.add_metadata
    assert get_target_platform_capabilities("pytorch", "imx500", "v2").tp_model.add_metadata
    wide = get_target_platform_capabilities("pytorch", "imx500", "v4").get_qco_by_node(nn.Tanh())
    assert [c.activation_n_bits for c in wide.quantization_config_list] == [8, 16]


def said(tpc, layer):
    """A layer's options, most preferred first: bits and signedness of results, widths that it reads, its constants."""

    def constants(c):
        d = c.default_weight_attr_config
        return (d.weights_quantization_method.name, d.weights_n_bits, d.weights_per_channel_threshold)

    return [
        (
            c.activation_n_bits if c.enable_activation_quantization else "off",
            c.signedness.name,
            c.supported_input_activation_n_bits,
            c.default_weight_attr_config.enable_weights_quantization and constants(c),
        )
        for c in tpc.get_qco_by_node(layer).quantization_config_list
    ]


POT = ("POWER_OF_TWO", 8, True)
WIDE = [(8, "AUTO", (8, 16), POT), (16, "SIGNED", (8, 16), POT)]  # the 16-bit options


def test_imx500_v3_and_v3_lut_are_the_released_ones():
    v3, lut = (get_target_platform_capabilities("pytorch", "imx500", v) for v in ("v3", "v3_lut"))
    for layer in ((torch.add, {}), (torch.subtract, {}), (torch.mul, {})):
        assert said(v3, layer) == WIDE
        assert said(lut, layer) == WIDE[:0] + [(8, "AUTO", (8,), POT)]
    for layer in ((torch.stack, {}), (torch.cat, {}), (torch.concat, {})):
        assert said(v3, layer) == WIDE
        assert said(lut, layer) == [(8, "AUTO", (8,), False)]  # no such set
    for tpc in (v3, lut):
        assert said(tpc, (torch.div, {})) == [(8, "AUTO", (8,), POT)]
        assert said(tpc, nn.Tanh()) == said(tpc, nn.GELU()) == [(8, "AUTO", (8,), False)]
        assert tpc.tp_model.add_metadata
    assert said(v3, nn.Flatten()) == [("off", "AUTO", (8, 16), False)]
    assert said(lut, nn.Flatten()) == [("off", "AUTO", (8,), False)]
    assert (v3.tp_model.is_simd_padding, lut.tp_model.is_simd_padding) == (True, False)
    assert "Default16BitInout" in {o.name for o in v3.tp_model.operator_set} - {
        o.name for o in lut.tp_model.operator_set
    }
    fused = [list(f.get_info().values()) for f in v3.tp_model.fusing_patterns]
    assert fused == [list(f.get_info().values()) for f in lut.tp_model.fusing_patterns]


@pytest.mark.parametrize(("version", "method"), [("v3", "SYMMETRIC"), ("v3_lut", "LUT_SYM_QUANTIZER")])
def test_imx500_v3_kernels(version, method):
    found = get_target_platform_capabilities("pytorch", "imx500", version).get_qco_by_node(nn.Conv2d(2, 2, 1))
    kernels = [(c.simd_size, c.attr_weights_configs_mapping["weight"]) for c in found.quantization_config_list]
    assert [(s, k.weights_n_bits, k.weights_quantization_method.name) for s, k in kernels] == [
        (32, 8, "SYMMETRIC"),
        (64, 4, method),
        (128, 2, method),
    ]
    assert not any(
        c.attr_weights_configs_mapping["bias"].enable_weights_quantization for c in found.quantization_config_list
    )


def test_45_files_keep_capabilities_as_they_are(tmp_path):
    for name, version in (
        ("imx500", "v4"),
        ("imx500", "v3_lut"),
        ("tflite", None),
        ("qnnpack", None),
        ("ort_cpu", None),
    ):
        tpc = get_target_platform_capabilities("pytorch", name, version)
        path = export_target_platform_capabilities(tpc, tmp_path / "made" / "here" / f"{name}.json")
        back = load_target_platform_capabilities(path)
        assert back.tp_model == tpc.tp_model
        assert back == tpc
        assert load_target_platform_capabilities(back) is back
        again = back.to_platform()
        if tpc.source is None:
            assert again.model_dump() == tpc.to_platform().model_dump()


def test_45_wrong_files_are_named(tmp_path):
    tpc = get_target_platform_capabilities("pytorch", "qnnpack")
    with pytest.raises(FileNotFoundError):
        load_target_platform_capabilities(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"SCHEMA_VERSION": 1}')
    (tmp_path / "chip.txt").write_text("{}")
    for name in ("text.json", "list.json", "other.json", "chip.txt"):
        with pytest.raises(ValueError, match=name):
            load_target_platform_capabilities(tmp_path / name)
    with pytest.raises(TypeError):
        load_target_platform_capabilities(3)
    with pytest.raises(TypeError):
        export_target_platform_capabilities(3, tmp_path / "x.json")
    with pytest.raises(ValueError, match="chip.txt"):
        export_target_platform_capabilities(tpc, tmp_path / "chip.txt")


@pytest.mark.parametrize("name, value", [("stride", math.nan), ("padding", (1, math.nan)), (3, 1)])
def test_an_attribute_is_compared_with_anything_but_nan(name, value):
    with pytest.raises(ModelingError, match="any value except nan"):
        Eq(name, value)
    if isinstance(name, str):
        with pytest.raises(ModelingError, match="any value except nan"):
            LayerFilterParams(nn.Conv2d, **{name: value})
    assert LayerFilterParams(nn.Hardtanh, min_val=-math.inf).match(nn.Hardtanh(-math.inf, 1.0))


# ---------------------------------------------------------------- arguments of another kind

WEIGHTS = AttributeQuantizationConfig(QuantizationMethod.SYMMETRIC, 8)
GIVEN = (WEIGHTS, {}, QuantizationMethod.SYMMETRIC, 8, 8, True)


def test_a_table_for_60_bit_codes_is_refused():
    wide = AttributeQuantizationConfig(QuantizationMethod.LUT_SYM_QUANTIZER, 60, True, True)
    config = OpQuantizationConfig(wide, {}, QuantizationMethod.SYMMETRIC, 8, 8, True)
    with pytest.raises(ModelingError, match="at most 16 bits"):
        TargetPlatformModel(QuantizationConfigOptions([config]), operator_set=[]).to_platform()


@pytest.mark.parametrize("part", ["math", "operator_set", "fusing_patterns"])
@pytest.mark.parametrize("given", [torch.ones(2), 0, 5, "x"], ids=str)
def test_parts_of_a_modelled_chip_are_of_their_kind(part, given):
    with pytest.raises(ModelingError, match=f"'{part}' of TargetPlatformModel"):
        TargetPlatformModel(QuantizationConfigOptions([OpQuantizationConfig(*GIVEN)]), **{part: given})


@pytest.mark.parametrize("scale", [math.inf, math.nan, 0, -1.0, "x"])
def test_a_fixed_scale_is_a_finite_number_above_zero(scale):
    with pytest.raises(ModelingError, match="finite number above 0"):
        OpQuantizationConfig(*GIVEN, fixed_scale=scale)


def test_a_list_that_holds_itself_is_cut_off_in_filters():
    loop: list = [1]
    loop.append(loop)
    text = repr(LayerFilterParams(nn.Conv2d, stride=loop))
    assert "..." in text and text.count("(1,") == 20
