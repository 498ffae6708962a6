"""Statements of the document "hardware_representation Module", sentence by sentence."""

import pytest
import torch
from torch import nn

import chipfit as mct
from chipfit import hardware_representation as hw
from chipfit.errors import ModelingError
from tests.build import model_of, quantized, randn, sequential

op_qc_8bit = hw.OpQuantizationConfig(
    activation_quantization_method=hw.QuantizationMethod.POWER_OF_TWO,
    weights_quantization_method=hw.QuantizationMethod.POWER_OF_TWO,
    activation_n_bits=8,
    weights_n_bits=8,
    weights_per_channel_threshold=True,
    enable_weights_quantization=True,
    enable_activation_quantization=True,
)
op_qc_4bit = op_qc_8bit.clone_and_edit(weights_n_bits=4)
op_qc_2bit = op_qc_8bit.clone_and_edit(weights_n_bits=2)
mixed_precision_configuration_options = hw.QuantizationConfigOptions(
    [op_qc_8bit, op_qc_4bit, op_qc_2bit], base_config=op_qc_8bit
)
default_configuration_options = hw.QuantizationConfigOptions([op_qc_8bit])
fc_opset = hw.OperatorsSet("FullyConnected", mixed_precision_configuration_options)
relu_opset = hw.OperatorsSet("Relu")
add_opset = hw.OperatorsSet("Add")


def is_power_of_two(x):
    return bool((torch.log2(x) == torch.log2(x).round()).all())


def hardware(*fusings, default=op_qc_8bit):
    """Return the document's model with the three sets of its examples and some fusings."""
    with hw.HardwareModel(hw.QuantizationConfigOptions([default]), name="my_model") as my_model:
        fc, relu, add = (hw.OperatorsSet(o.name, o.qc_options) for o in (fc_opset, relu_opset, add_opset))
        for steps in fusings:
            hw.Fusing([{"fc": fc, "relu": relu, "add": add}.get(s) or hw.OperatorSetConcat(relu, add) for s in steps])
    return my_model


def net(then=lambda y, x: torch.tanh(y), relu=torch.relu):
    return model_of(lambda m, x: then(relu(m.fc(x)), x), fc=nn.Linear(8, 8))


def groups(my_model, **parts):
    """Return the operators of each group that runs as one kernel."""
    result = quantized(net(**parts), randn(16, 8), my_model)
    return [tuple(result.graph.node(n).op for n in g) for g in result.plan.groups], result


# ---------------------------------------------------------------- chips


@pytest.mark.parametrize(("chip", "thresholds"), [("qnnpack", 1), ("tflite", 6)])
def test_chips_differ_in_the_number_of_thresholds_of_a_convolution(chip, thresholds):
    tpc = mct.get_model("pytorch", chip)
    result = quantized(sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), randn(8, 3, 8, 8), tpc)
    assert result.plan["0.weight"].scale.numel() == thresholds


def test_the_methods_have_the_names_of_their_thresholds_and_grids():
    names = {"POWER_OF_TWO", "SYMMETRIC", "UNIFORM", "KMEANS", "LUT_QUANTIZER"}
    assert names <= set(hw.QuantizationMethod.__members__)


@pytest.mark.parametrize("given", [("pytorch", "unheard_of"), ("theano", "default")])
def test_an_unknown_chip_or_framework_is_refused(given):
    assert mct.get_model is mct.hardware_representation.get_model
    with pytest.raises(AssertionError, match="There is no"):
        mct.get_model(*given)


# ---------------------------------------------------------------- configurations


def test_a_configuration_of_eight_bits_with_thresholds_of_powers_of_two_per_channel():
    result = quantized(net(), randn(16, 8), hw.HardwareModel(default_configuration_options))
    weight, activation = result.plan["fc.weight"], result.plan[result.graph.nodes[0].output]
    assert (weight.grid.bits, activation.grid.bits) == (8, 8)
    assert weight.scale.shape == (8,) and is_power_of_two(weight.scale) and is_power_of_two(activation.scale)


@pytest.mark.parametrize("of", ["weights", "activation"])
def test_weights_and_activations_are_enabled_apart(of):
    config = op_qc_8bit.clone_and_edit(**{f"enable_{of}_quantization": False})
    result = quantized(net(), randn(16, 8), hw.HardwareModel(hw.QuantizationConfigOptions([config])))
    stored = {t.role for t in result.plan.tensors.values() if t.quantized}
    assert stored == ({"activation"} if of == "weights" else {"weight"})


def test_weights_and_activations_may_have_different_methods():
    config = op_qc_8bit.clone_and_edit(
        weights_quantization_method=hw.QuantizationMethod.SYMMETRIC,
        activation_quantization_method=hw.QuantizationMethod.UNIFORM,
    )
    plan = quantized(net(), randn(16, 8) + 0.3, hw.HardwareModel(hw.QuantizationConfigOptions([config]))).plan
    assert plan["fc.weight"].grid.symmetric and not is_power_of_two(plan["fc.weight"].scale)
    assert not plan["x"].grid.symmetric


def test_a_clone_has_the_fields_of_its_original_but_those_that_are_edited():
    assert (op_qc_4bit.weights_n_bits, op_qc_2bit.weights_n_bits, op_qc_8bit.weights_n_bits) == (4, 2, 8)
    assert op_qc_4bit.clone_and_edit(weights_n_bits=8) == op_qc_8bit
    for field in ("weights_per_channel_threshold", "enable_weights_quantization", "activation_n_bits"):
        assert getattr(op_qc_4bit, field) == getattr(op_qc_8bit, field)
    rest = [getattr(op_qc_8bit, name) for name in ("quantization_preserving", "fixed_scale", "fixed_zero_point")]
    assert rest == [False, None, None]
    assert op_qc_8bit.clone_and_edit(weights_multiplier_nbits=4).weights_multiplier_nbits == 4
    with pytest.raises(ModelingError):
        op_qc_8bit.clone_and_edit(weight_bits=4)


def test_several_options_require_a_base_configuration():
    with pytest.raises(AssertionError, match="base_config"):
        hw.QuantizationConfigOptions([op_qc_8bit, op_qc_4bit, op_qc_2bit])
    assert hw.QuantizationConfigOptions([op_qc_8bit]).base_config == op_qc_8bit


def test_without_mixed_precision_the_base_configuration_is_used_and_the_others_are_choices():
    result = quantized(net(), randn(16, 8), hardware())
    assert result.plan["fc.weight"].grid.bits == 8
    for bits in (4, 2):
        assert result.edit({"fc": {"bits": bits}}).plan["fc.weight"].grid.bits == bits
    searched = quantized(net(), randn(16, 8), hardware(), limits=mct.Limits(weights=8 * 8 * 4 // 8))
    assert searched.plan["fc.weight"].grid.bits == 4


# ---------------------------------------------------------------- the model and its sets


@pytest.mark.parametrize("given", [(), (mixed_precision_configuration_options,)])
def test_a_model_requires_default_options_with_one_configuration(given):
    with pytest.raises((TypeError, ModelingError), match="default_qco|only one option"):
        hw.HardwareModel(*given)
    my_model = hw.HardwareModel(default_configuration_options, name="my_model")
    assert (my_model.name, my_model.default_qco) == ("my_model", default_configuration_options)


def test_the_default_configuration_quantizes_operators_without_a_set():
    twelve = hardware(default=op_qc_8bit.clone_and_edit(activation_n_bits=12))
    result = quantized(net(), randn(16, 8), twelve)
    bits = {n.op: result.plan[n.output].grid.bits for n in result.graph.nodes}
    assert bits == {"Linear": 8, "Relu": 12, "Tanh": 12}


def test_a_set_has_a_unique_label_and_the_options_that_are_attached_to_it():
    my_model = hardware()
    assert my_model.get_config_options_by_operators_set("FullyConnected") == mixed_precision_configuration_options
    assert fc_opset.name == "FullyConnected"
    with pytest.raises(AssertionError, match="'Add'"), hw.HardwareModel(default_configuration_options):
        [hw.OperatorsSet("Add") for _ in range(2)]


def test_a_set_without_options_has_the_default_options_of_its_model():
    for my_model in (hardware(), hardware(default=op_qc_4bit)):
        assert my_model.get_config_options_by_operators_set("Relu") == my_model.default_qco


# ---------------------------------------------------------------- fusings


def test_nothing_is_quantized_between_fused_operators():
    fused, result = groups(hardware(["fc", "relu"]))
    assert fused == [("Linear", "Relu")]
    linear, relu = (next(n.output for n in result.graph.nodes if n.op == op) for op in ("Linear", "Relu"))
    assert not result.plan.quantized(linear) and result.plan.quantized(relu)


def test_a_fusing_has_at_least_two_groups():
    for groups_of in ([], [fc_opset]):
        with pytest.raises(AssertionError, match="Fusing"):
            hw.Fusing(groups_of)
    assert hw.Fusing([fc_opset, relu_opset]).name == "FullyConnected_Relu"


THREE, TWO = ["fc", "relu", "add"], ["fc", "relu"]


@pytest.mark.parametrize(
    ("then", "fusings", "expected"),
    [
        (lambda y, x: torch.tanh(y), [THREE], []),  # a part of the list is no pattern
        (lambda y, x: torch.tanh(y), [THREE, TWO], [("Linear", "Relu")]),
        (torch.add, [THREE, TWO], [("Linear", "Relu", "Add")]),  # the shorter pattern changes nothing
        (torch.add, [TWO, THREE], [("Linear", "Relu", "Add")]),
    ],
)
def test_a_part_of_a_pattern_fuses_only_by_a_pattern_of_its_own(then, fusings, expected):
    assert groups(hardware(*fusings), then=then)[0] == expected


@pytest.mark.parametrize("relu", [torch.relu, lambda y: y])
def test_a_concatenation_is_one_pattern_for_each_of_its_sets(relu):
    one, two = hardware(["fc", "either"]), hardware(["fc", "relu"], ["fc", "add"])
    expected = [("Linear", "Relu" if relu is torch.relu else "Add")]
    assert groups(one, then=torch.add, relu=relu)[0] == groups(two, then=torch.add, relu=relu)[0] == expected


def test_parts_made_outside_a_model_belong_to_none():
    hw.Fusing([fc_opset, hw.OperatorSetConcat(relu_opset, add_opset)])
    assert hw.HardwareModel(default_configuration_options).operator_set == ()


# ---------------------------------------------------------------- the examples of a model and of its layers


def default_hardware_model():
    """Return the chip of the section "HardwareModel Code Example"."""
    with hw.HardwareModel(default_configuration_options, name="default_hwm") as model:
        options = mct.hardware_representation.get_default_quantization_config_options()
        off = {"enable_weights_quantization": False, "enable_activation_quantization": False}
        hw.OperatorsSet("NoQuantization", options.clone_and_edit(**off))
        mixed = mixed_precision_configuration_options
        hw.OperatorsSet("ConvTranspose", mixed)
        conv, fc = hw.OperatorsSet("Conv", mixed), hw.OperatorsSet("FullyConnected", mixed)
        names = "AnyReLU Add PReLU Swish Sigmoid Tanh"
        any_relu, add, prelu, swish, sigmoid, tanh = map(hw.OperatorsSet, names.split())
        hw.Fusing([conv, hw.OperatorSetConcat(any_relu, swish, prelu, sigmoid, tanh)])
        hw.Fusing([fc, hw.OperatorSetConcat(any_relu, swish, sigmoid)])
        hw.Fusing([conv, add, any_relu])
        hw.Fusing([conv, any_relu, add])
    return model


def test_the_example_of_a_model_has_its_sets_and_fusings():
    model = default_hardware_model()
    sets = "NoQuantization ConvTranspose Conv FullyConnected AnyReLU Add PReLU Swish Sigmoid Tanh".split()
    assert [o.name for o in model.operator_set if isinstance(o, hw.OperatorsSet)] == sets
    assert len(model.fusing_patterns) == 4
    quiet = model.get_config_options_by_operators_set("NoQuantization").base_config
    assert (quiet.enable_weights_quantization, quiet.enable_activation_quantization) == (False, False)


def four_bits_of_add(layers):
    four = hw.QuantizationConfigOptions([op_qc_8bit.clone_and_edit(activation_n_bits=4)])
    with hw.HardwareModel(default_configuration_options) as model:
        hw.OperatorsSet("Add", four)
    with hw.FrameworkHardwareModel(model) as chip:
        hw.OperationsSetToLayers("Add", layers)
    return chip


def test_a_layer_is_quantized_with_the_options_of_the_set_that_it_is_attached_to():
    chip = four_bits_of_add([torch.add])
    result = quantized(net(then=torch.add), randn(16, 8), chip)
    assert {n.op: result.plan[n.output].grid.bits for n in result.graph.nodes} == {"Linear": 8, "Relu": 8, "Add": 4}
    assert chip.get_qco_by_node((torch.add, {})) == chip.tp_model.get_config_options_by_operators_set("Add")


def test_filters_tell_bounded_from_unbounded_layers():
    keras = pytest.importorskip("keras")
    ReLU = keras.layers.ReLU
    unbounded, bounded = (
        hw.LayerFilterParams(ReLU, max_value=None),
        hw.LayerFilterParams(ReLU, hw.NotEq("max_value", None)),
    )
    layers = [ReLU(), ReLU(max_value=6), keras.layers.LeakyReLU()]
    assert [unbounded.match(layer) for layer in layers] == [True, False, False]
    assert [bounded.match(layer) for layer in layers] == [False, True, False]


def test_filters_are_attached_to_sets_like_layers():
    twelve = hw.QuantizationConfigOptions([op_qc_8bit.clone_and_edit(activation_n_bits=12)])
    with hw.HardwareModel(default_configuration_options) as model:
        hw.OperatorsSet("Bounded", twelve)
    with hw.FrameworkHardwareModel(model) as chip:
        hw.OperationsSetToLayers("Bounded", [hw.LayerFilterParams(nn.Hardtanh, max_val=6.0)])
    two = sequential(nn.Linear(8, 8), nn.Hardtanh(0, 6), nn.Linear(8, 8), nn.Hardtanh(0, 5))
    result = quantized(two, randn(16, 8) * 9, chip)
    assert [result.plan[n.output].grid.bits for n in result.graph.nodes if n.layer in "13"] == [12, 8]


def test_a_framework_model_requires_a_model_and_has_the_name_base():
    with pytest.raises(TypeError):
        hw.FrameworkHardwareModel()
    with pytest.raises(ModelingError):
        hw.FrameworkHardwareModel("imx500")
    chip = hw.FrameworkHardwareModel(default_hardware_model())
    assert (chip.name, hw.FrameworkHardwareModel(chip.tp_model, name="keras").name) == ("base", "keras")
    with pytest.raises(ModelingError, match="Softmax is not defined"), chip:
        hw.OperationsSetToLayers("Softmax", [nn.Softmax])
