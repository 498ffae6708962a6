"""Statements of the document "target_platform Module"; effects of fields: tests/mct/target_platform/test_fields.py."""

import inspect
import json

import onnx
import pytest
import torch
from torch import nn

import chipfit as mct
from chipfit import target_platform as tp
from chipfit.errors import ModelingError
from tests.build import quantized, randn, sequential

REQUIRED = inspect.Parameter.empty
SIGNATURES = {
    tp.AttributeQuantizationConfig: {
        "weights_quantization_method": tp.QuantizationMethod.POWER_OF_TWO,
        "weights_n_bits": 32,
        "weights_per_channel_threshold": False,
        "enable_weights_quantization": False,
        "lut_values_bitwidth": None,
    },
    tp.QuantizationConfigOptions: {"quantization_config_list": REQUIRED, "base_config": None},
    tp.TargetPlatformModel: {"default_qco": REQUIRED, "add_metadata": False, "name": "default_tp_model"},
    tp.OperatorsSet: {"name": REQUIRED, "qc_options": None},
    tp.Fusing: {"operator_groups_list": REQUIRED, "name": None},
    tp.OperatorSetConcat: {"opsets": REQUIRED},
    tp.OperationsToLayers: {"op_sets_to_layers": None},
    tp.OperationsSetToLayers: {"op_set_name": REQUIRED, "layers": REQUIRED, "attr_mapping": None},
    tp.LayerFilterParams: {"layer": REQUIRED, "conditions": REQUIRED, "kwargs": REQUIRED},
    tp.TargetPlatformCapabilities: {"tp_model": REQUIRED, "name": "base", "version": None},
}
FIELDS = (
    "default_weight_attr_config attr_weights_configs_mapping activation_quantization_method activation_n_bits "
    "supported_input_activation_n_bits enable_activation_quantization quantization_preserving fixed_scale "
    "fixed_zero_point simd_size signedness"
).split()
KERNEL = tp.AttributeQuantizationConfig(tp.QuantizationMethod.SYMMETRIC, 8, True, True)


def config(**changes):
    """Return a configuration in which every field of the document has a value."""
    float_, pot = tp.AttributeQuantizationConfig(), tp.QuantizationMethod.POWER_OF_TWO
    values = float_, {"kernel_attr": KERNEL}, pot, 8, (8, 16), True, False, None, None, 32, tp.Signedness.AUTO
    return tp.OpQuantizationConfig(*values).clone_and_edit(**changes)


def options(**changes):
    return tp.QuantizationConfigOptions([config(**changes)])


@pytest.mark.parametrize("cls", SIGNATURES, ids=lambda c: c.__name__)
def test_arguments_have_the_names_order_and_defaults_of_the_document(cls):
    found = list(inspect.signature(cls).parameters.values())
    assert [(p.name, p.default) for p in found][: len(SIGNATURES[cls])] == list(SIGNATURES[cls].items())
    assert all(p.kind is p.KEYWORD_ONLY or p.default is not REQUIRED for p in found[len(SIGNATURES[cls]) :])


def test_an_operators_configuration_takes_eleven_fields_in_order():
    assert list(inspect.signature(tp.OpQuantizationConfig).parameters) == FIELDS
    made = config()
    assert [getattr(made, f) for f in FIELDS[2:]] == [
        *(tp.QuantizationMethod.POWER_OF_TWO, 8, (8, 16), True, False, None, None, 32, tp.Signedness.AUTO)
    ]
    assert dict(made.attr_weights_configs_mapping) == {"kernel_attr": KERNEL}


def test_the_quantization_methods():
    assert [m.name for m in tp.QuantizationMethod] == [
        *("POWER_OF_TWO", "LUT_POT_QUANTIZER", "SYMMETRIC", "UNIFORM", "LUT_SYM_QUANTIZER")
    ]
    assert all(tp.QuantizationMethod(m.value) is m for m in tp.QuantizationMethod)


@pytest.mark.parametrize("module", ["target_platform", "target_platform_capabilities.target_platform"])
def test_the_classes_are_in_the_modules_of_the_document_and_of_its_later_examples(module):
    owner = mct
    for name in module.split("."):
        owner = getattr(owner, name)
    assert all(
        getattr(owner, cls.__name__) is cls for cls in (*SIGNATURES, tp.OpQuantizationConfig, tp.QuantizationMethod)
    )


@pytest.mark.parametrize("name", ["imx500", "tflite", "qnnpack"])
def test_three_chips_are_available_as_capabilities(name):
    tpc = mct.get_target_platform_capabilities("pytorch", name)
    assert isinstance(tpc, tp.TargetPlatformCapabilities) and isinstance(tpc.tp_model, tp.TargetPlatformModel)
    _, info = mct.pytorch_post_training_quantization(
        sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), lambda: iter([[randn(4, 3, 8, 8)]]), target_platform_capabilities=tpc
    )
    assert info.result.plan["0.weight"].grid.bits == 8


def test_weight_attributes_without_an_entry_have_the_default_configuration():
    eight = config(default_weight_attr_config=KERNEL, attr_weights_configs_mapping={})
    four = eight.clone_and_edit(attr_weights_configs_mapping={"kernel_attr": KERNEL.clone_and_edit(weights_n_bits=4)})
    for chosen, bits in ((eight, 8), (four, 4)):
        model = tp.TargetPlatformModel(tp.QuantizationConfigOptions([chosen]))
        assert quantized(sequential(nn.Linear(6, 4)), randn(8, 6), model).plan["0.weight"].grid.bits == bits


def test_the_fallback_configuration_is_the_base_and_one_alone_is_its_own():
    two = [config(), config(activation_n_bits=4)]
    assert tp.QuantizationConfigOptions(two, base_config=two[1]).base_config == two[1]
    assert tp.QuantizationConfigOptions(two[:1]).base_config == two[0]
    with pytest.raises(AssertionError):
        tp.QuantizationConfigOptions(two)


def test_metadata_is_written_into_files_if_the_model_says_so(tmp_path):
    for add in (False, True):
        model = tp.TargetPlatformModel(options(), add_metadata=add, name="my_chip")
        file = quantized(sequential(nn.Linear(6, 4)), randn(8, 6), model).export(tmp_path / "m.onnx")
        (notes,) = [json.loads(p.value) for p in onnx.load(file).metadata_props if p.key == "chipfit.provenance"]
        assert ("platform" in notes) is add and notes.get("platform", {"name": "my_chip"})["name"] == "my_chip"


def test_a_fusings_name_is_that_of_its_groups_unless_it_is_given():
    conv, relu, add = map(tp.OperatorsSet, ("Conv", "Relu", "Add"))
    assert tp.Fusing([conv, tp.OperatorSetConcat(relu, add)]).name == "Conv_Relu_Add"
    assert tp.Fusing([conv, relu], name="fused").name == "fused"


def test_layers_of_sets_are_gathered_and_attached():
    layers = tp.OperationsToLayers([tp.OperationsSetToLayers("Relu", [nn.ReLU, nn.ReLU6])])
    layers.add(tp.OperationsSetToLayers("Add", [torch.add]))
    model = tp.TargetPlatformModel(options(), operator_set=[tp.OperatorsSet("Relu"), tp.OperatorsSet("Add")])
    tpc = tp.TargetPlatformCapabilities(model, op_sets_to_layers=layers)
    assert [tpc.get_layers_by_opset_name(n) for n in ("Relu", "Add")] == [[nn.ReLU, nn.ReLU6], [torch.add]]
    assert tp.OperationsToLayers().op_sets_to_layers == []


def test_an_attribute_mapping_gives_weights_the_names_of_the_framework():
    with tp.TargetPlatformModel(options()) as model:
        tp.OperatorsSet("Conv", options())
    names = {"kernel_attr": mct.DefaultDict({nn.Conv2d: "weight", nn.Linear: "w"}, "kernel")}
    with tp.TargetPlatformCapabilities(model) as tpc:
        tp.OperationsSetToLayers("Conv", [nn.Conv2d, nn.Linear, nn.Conv1d], attr_mapping=names)
    layers = nn.Conv2d(1, 1, 1), nn.Linear(1, 1), nn.Conv1d(1, 1, 1)
    found = [tpc.get_qco_by_node(layer).base_config.attr_weights_configs_mapping for layer in layers]
    assert [list(f) for f in found] == [["weight"], ["w"], ["kernel"]]
    assert all(KERNEL in f.values() for f in found)


def test_a_filter_holds_by_its_conditions_and_attributes():
    chosen = tp.LayerFilterParams(nn.Conv2d, tp.Greater("out_channels", 2) & tp.Eq("groups", 1), kernel_size=(3, 3))
    layers = nn.Conv2d(2, 4, 3), nn.Conv2d(2, 2, 3), nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(2, 4, 1)
    assert [chosen.match(layer) for layer in layers] == [True, False, False, False]
    with pytest.raises(ModelingError):
        tp.LayerFilterParams(nn.Conv2d, "out_channels > 2")


def test_capabilities_have_a_name_and_a_version():
    tpc = tp.TargetPlatformCapabilities(tp.TargetPlatformModel(options()))
    assert (tpc.name, tpc.version) == ("base", None)
    assert tp.TargetPlatformCapabilities(tpc.tp_model, name="chip", version="v2").version == "v2"
