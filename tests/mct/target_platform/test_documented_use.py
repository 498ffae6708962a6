"""The published examples of hardware and framework modelling."""

import inspect

import pytest
import torch
from torch import nn

import chipfit
from chipfit import DefaultDict, FrameworkInfo, target_platform
from chipfit import hardware_representation as hw
from chipfit.errors import ModelingError
from tests.build import model_of, quantized


def parameters(thing):
    return [p for p in inspect.signature(thing).parameters if p != "self"]


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "OpQuantizationConfig": "default_weight_attr_config attr_weights_configs_mapping "
        "activation_quantization_method activation_n_bits supported_input_activation_n_bits "
        "enable_activation_quantization quantization_preserving fixed_scale fixed_zero_point simd_size signedness",
        "AttributeQuantizationConfig": "weights_quantization_method weights_n_bits weights_per_channel_threshold "
        "enable_weights_quantization lut_values_bitwidth",
        "QuantizationConfigOptions": "quantization_config_list base_config",
        "TargetPlatformModel": "default_qco add_metadata name",
        "OperatorsSet": "name qc_options",
        "Fusing": "operator_groups_list name",
        "OperatorSetConcat": "opsets",
        "OperationsToLayers": "op_sets_to_layers",
        "OperationsSetToLayers": "op_set_name layers attr_mapping",
        "LayerFilterParams": "layer conditions kwargs",
        "TargetPlatformCapabilities": "tp_model name version",
        "get_target_platform_capabilities": "fw_name target_platform_name target_platform_version",
        "FrameworkInfo": "kernel_ops activation_ops no_quantization_ops activation_quantizer_mapping "
        "weights_quantizer_mapping kernel_channels_mapping activation_min_max_mapping layer_min_max_mapping",
    }.items(),
)
def test_signatures_begin_as_published(name, expected):
    thing = getattr(chipfit if name == "FrameworkInfo" else target_platform, name)
    assert parameters(thing)[: len(expected.split())] == expected.split()


def test_quantization_methods_have_the_published_names():
    names = ["POWER_OF_TWO", "LUT_POT_QUANTIZER", "SYMMETRIC", "UNIFORM", "LUT_SYM_QUANTIZER"]
    assert [m.name for m in target_platform.QuantizationMethod] == names
    assert {"KMEANS", "LUT_QUANTIZER"} <= set(hw.QuantizationMethod.__members__)


def hardware():
    """Return the first generation's example of a model, outside any `with` block."""
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
    mixed = hw.QuantizationConfigOptions([op_qc_8bit, op_qc_4bit, op_qc_2bit], base_config=op_qc_8bit)
    my_model = hw.HardwareModel(hw.QuantizationConfigOptions([op_qc_8bit]), name="my_model")
    fc_opset = hw.OperatorsSet("FullyConnected", mixed)
    relu_opset = hw.OperatorsSet("Relu")
    hw.Fusing([fc_opset, relu_opset])
    add_opset = hw.OperatorsSet("Add")
    hw.Fusing([fc_opset, relu_opset, add_opset])
    activations_after_fc_to_fuse = hw.OperatorSetConcat(relu_opset, add_opset)
    hw.Fusing([fc_opset, activations_after_fc_to_fuse])
    return my_model, fc_opset, relu_opset, add_opset


def test_parts_created_outside_a_block_belong_to_no_model():
    my_model, *_ = hardware()
    assert my_model.operator_set == ()
    assert my_model.name == "my_model"


@pytest.mark.parametrize("adds", [True, False])
def test_the_documented_chip_fuses_and_quantizes_as_documented(adds):
    made, fc, *_ = hardware()
    with hw.HardwareModel(made.default_qco, name="my_model") as my_model:
        fc_opset = hw.OperatorsSet("FullyConnected", fc.qc_options)
        relu_opset, add_opset = hw.OperatorsSet("Relu"), hw.OperatorsSet("Add")
        hw.Fusing([fc_opset, relu_opset, add_opset])
        hw.Fusing([fc_opset, hw.OperatorSetConcat(relu_opset, add_opset)])
    torch.manual_seed(0)
    net = model_of(
        lambda m, x: m.relu(m.fc(x)) + x if adds else torch.tanh(m.relu(m.fc(x))), fc=nn.Linear(8, 8), relu=nn.ReLU()
    )
    result = quantized(net, torch.randn(16, 8), my_model)
    (group,) = [tuple(result.graph.node(n).op for n in g) for g in result.plan.groups]
    assert group == (("Linear", "Relu", "Add") if adds else ("Linear", "Relu"))
    w = result.plan.tensors["fc.weight"]
    assert (w.grid.bits, w.scale.shape) == (8, (8,))
    assert bool((torch.log2(w.scale) % 1 == 0).all())
    assert result.edit({"fc": {"bits": 4}}).plan.tensors["fc.weight"].grid.bits == 4


def test_first_generation_capabilities():
    made, fc, relu, add = hardware()
    model = target_platform.TargetPlatformModel(made.default_qco, operator_set=[fc, relu, add])
    with hw.FrameworkHardwareModel(model, name="my_framework_model") as fw:
        hw.OperationsSetToLayers("FullyConnected", [nn.Linear])
        hw.OperationsSetToLayers("Relu", [nn.ReLU, hw.LayerFilterParams(nn.Hardtanh, hw.NotEq("min_val", None))])
        hw.OperationsSetToLayers("Add", [torch.add])
    assert fw.get_layers_by_opset_name("FullyConnected") == [nn.Linear]
    eight = hw.get_model("pytorch", "default")
    assert eight.get_layers_by_opset_name("FullyConnected")
    with pytest.raises(AssertionError):
        hw.get_model("pytorch", "unheard_of")
    with pytest.raises(AssertionError):
        hw.get_model("theano", "default")


def test_first_generation_configurations_have_their_fields():
    made, *_ = hardware()
    config = made.get_default_op_quantization_config()
    assert (config.weights_n_bits, config.activation_n_bits) == (8, 8)
    assert (config.quantization_preserving, config.weights_multiplier_nbits) == (False, None)
    assert config.clone_and_edit(weights_multiplier_nbits=4).weights_multiplier_nbits == 4
    with pytest.raises(ModelingError):
        config.clone_and_edit(weight_bits=4)
    with pytest.raises(AttributeError):
        _ = config.weight_bits


def test_functions_are_also_in_chipfit():
    assert chipfit.get_model is hw.get_model
    assert chipfit.get_target_platform_capabilities is target_platform.get_target_platform_capabilities
    assert {"get_model", "get_target_platform_capabilities"} <= set(dir(chipfit))


def test_framework_info_with_positional_arguments():
    kernel_ops, kernel_channels_mapping = [nn.Conv2d], DefaultDict({nn.Conv2d: (0, 1)})
    info = FrameworkInfo(kernel_ops, [], [], kernel_channels_mapping, {}, {})
    assert info.kernel_channels_mapping is kernel_channels_mapping
    assert (info.activation_quantizer_mapping, info.weights_quantizer_mapping) == ({}, {})
    activation_ops, no_quantization_ops = [nn.ReLU], [torch.reshape]
    functions, layers = {"softmax": (0, 1)}, {nn.Softmax: (0, 1)}
    info = FrameworkInfo(kernel_ops, activation_ops, no_quantization_ops, kernel_channels_mapping, functions, layers)
    assert (info.activation_min_max_mapping, info.layer_min_max_mapping) == (functions, layers)
    with pytest.raises(ModelingError, match="on other axes"):
        FrameworkInfo(kernel_ops, [], [], DefaultDict({nn.Conv2d: (3, 2)}), {}, {})
