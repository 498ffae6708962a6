"""Target platform models: operator sets, their options, concatenations and fusings."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from chipfit import target_platform as tp
from chipfit.errors import ModelingError
from chipfit.mct.target_platform.configs import BIAS_ATTR, KERNEL_ATTR
from tests.build import quantized, sequential
from tests.mct.target_platform.chips import FLOAT, config, kernel, model, options


def two_sets_of_one_name():
    tp.OperatorsSet("conv")
    tp.OperatorsSet("conv")


@pytest.mark.parametrize(("body", "error"), [(lambda: 1 / 0, ZeroDivisionError), (two_sets_of_one_name, ModelingError)])
def test_default_options_are_those_of_the_open_model_which_errors_close(body, error):
    with tp.TargetPlatformModel(options()) as m:
        assert tp.get_default_quantization_config_options() == m.default_qco
    with pytest.raises(error), tp.TargetPlatformModel(options()):
        body()
    with pytest.raises(ModelingError, match="is not initialized"):
        tp.get_default_quantization_config_options()


def test_a_model_is_immutable_once_complete():
    with tp.TargetPlatformModel(options()) as m:
        tp.OperatorsSet("opset")
    with pytest.raises(ModelingError, match="Immutable class. Can't edit attributes"):
        m.operator_set = []
    with pytest.raises(ModelingError, match="can not be reinitialized"), m:
        pass


CONV = tp.OperatorsSet("conv", options(activation_n_bits=4))
WIDE = tp.AttributeQuantizationConfig(tp.QuantizationMethod.LUT_SYM_QUANTIZER, 60, True, True)


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: tp.TargetPlatformModel(options(config(), config(WIDE))), "must contain only one option"),
        (lambda: model("conv", CONV), "'conv'"),
        (lambda: tp.TargetPlatformModel(options(config(WIDE)), operator_set=[]).to_platform(), "at most 16 bits"),
        (lambda: tp.Fusing([CONV]), "Fusing can not be created for a single operators group"),
        (lambda: tp.Fusing(CONV), "list"),
        (lambda: tp.QuantizationConfigOptions([]), "at least one 'OpQuantizationConfig'. The provided list is empty"),
        (lambda: tp.QuantizationConfigOptions([config(), 3]), "'OpQuantizationConfig', but found .* <class 'int'>"),
        (lambda: tp.QuantizationConfigOptions(config()), "list"),
        (lambda: tp.QuantizationConfigOptions([config(), config(activation_n_bits=4)]), "base_config"),
        (lambda: tp.QuantizationConfigOptions([config()], base_config=config(activation_n_bits=4)), "base_config"),
        (lambda: config().clone_and_edit(activation_bits=3), "There is no"),
        (lambda: options().clone_and_edit(simd=3), "There is no"),
        (lambda: config().clone_and_edit({"kernel": {"weights_n_bits": 3}}), "There is no"),
        (lambda: options().clone_and_edit_weight_attribute(["kernel"], weights_n_bits=3), "There is no"),
        (lambda: options().clone_and_edit_weight_attribute(bits=3), "There is no"),
        (lambda: FLOAT.clone_and_edit(n_bits=3), "There is no"),
        (lambda: config(activation_n_bits=0), "activation_n_bits"),
        (lambda: config(activation_n_bits=8.5), "activation_n_bits"),
        (lambda: config(activation_quantization_method="POWER_OF_TWO"), "activation_quantization_method"),
        (lambda: config(fixed_zero_point=3), "fixed_zero_point"),
        (lambda: config(simd_size=0), "simd_size"),
        (lambda: config(signedness=1), "signedness"),
        (lambda: config(supported_input_activation_n_bits="8"), "supported_input_activation_n_bits"),
        *((lambda s=s: config(fixed_scale=s), "finite number above 0") for s in (math.inf, math.nan, 0, -1.0, "x")),
    ],
)
def test_invalid_models_fusings_and_options_are_refused(make, says):
    with pytest.raises(AssertionError, match=says):  # a ModelingError is one
        make()


def test_clones_change_single_fields():
    edited = (
        options().clone_and_edit(activation_n_bits=3).clone_and_edit_weight_attribute([KERNEL_ATTR], weights_n_bits=5)
    )
    assert edited.base.activation_n_bits == 3
    assert edited.base.attr_weights_configs_mapping == {KERNEL_ATTR: kernel(5), BIAS_ATTR: FLOAT}
    with pytest.raises(AttributeError):
        config().activation_n_bits = 4


def test_weight_attributes_can_be_edited_until_a_model_holds_them():
    """As scripts for MCT do: change an entry, then clone the configuration."""
    base = config()
    base.attr_weights_configs_mapping[KERNEL_ATTR] = kernel(4)
    assert base.clone_and_edit(activation_n_bits=4).attr_weights_configs_mapping[KERNEL_ATTR] == kernel(4)
    tp.TargetPlatformModel(tp.QuantizationConfigOptions([base]), operator_set=[])
    with pytest.raises(TypeError):
        base.attr_weights_configs_mapping[KERNEL_ATTR] = kernel(2)


def test_sets_are_found_by_name():
    three = options(activation_n_bits=3)
    m = model(tp.OperatorsSet("opset_3bit", three))
    assert m.get_config_options_by_operators_set("opset_3bit") == three
    assert m.get_config_options_by_operators_set("unknown") == m.default_qco
    assert m.is_opset_in_model("opset_3bit") and not m.is_opset_in_model("unknown")


def test_a_concatenation_is_a_set_without_options():
    with tp.TargetPlatformModel(options()) as m:
        tp.OperatorSetConcat(tp.OperatorsSet("opset_A"), tp.OperatorsSet("opset_B", options(activation_n_bits=2)))
    assert len(m.operator_set) == 3 and m.get_opset_by_name("opset_A_opset_B").qc_options is None
    for wrong in ((), (3,)):
        with pytest.raises(ModelingError):
            tp.OperatorSetConcat(*wrong)


def test_fusings_contain_shorter_ones_and_single_members_of_concatenations():
    conv, add, tanh = (tp.OperatorsSet(n) for n in ("conv", "add", "tanh"))
    two, three = tp.Fusing([conv, add]), tp.Fusing([conv, add, tanh])
    either = tp.Fusing([conv, tp.OperatorSetConcat(add, tanh)])
    assert all(f.contains(f) for f in (two, three, either))
    assert three.contains(two) and either.contains(two)
    others = [(two, three), (two, either), (three, either), (either, three)]
    assert not any(longer.contains(shorter) for longer, shorter in others)
    assert two.get_info() == {"conv_add": "conv -> add"}


def test_fusings_and_concatenations_accept_names_of_sets():
    with tp.TargetPlatformModel(options()) as m:
        conv, relu, add = (tp.OperatorsSet(n, options(activation_n_bits=4)) for n in ("Conv", "Relu", "Add"))
        by_name, by_set = tp.Fusing(["Conv", "Relu"]), tp.Fusing([conv, relu])
        two = tp.Fusing([conv, tp.OperatorSetConcat("Relu", add)])
        three = tp.Fusing(["Conv", tp.OperatorSetConcat(relu, add), "Add"])
        with pytest.raises(ModelingError, match=r"no operator set named 'Rleu'.*'Relu'"):
            tp.Fusing(["Conv", "Rleu"])
    assert by_name == by_set
    assert [f.operator_groups_list[1].name for f in (two, three)] == ["Relu_Add", "Relu_Add"]
    assert len(m.operator_set) == 4  # two equal concatenations count as one
    assert len(m.fusing_patterns) == 4


def test_a_fusing_created_before_its_model_refers_to_the_models_sets():
    by_name = [tp.Fusing(["Conv", "Relu"]), tp.Fusing(["Conv", tp.OperatorSetConcat("Relu", "Add")])]
    own = [tp.OperatorsSet(n, options(activation_n_bits=4)) for n in ("Conv", "Relu", "Add")]
    m = model(*own, fusings=by_name)
    assert [o.name for o in m.operator_set] == ["Conv", "Relu", "Add", "Relu_Add"]
    assert all(o.qc_options == options(activation_n_bits=4) for o in m.operator_set[:3])
    assert model(*own, fusings=m.fusing_patterns).fusing_patterns == m.fusing_patterns  # also in another model
    other = model(*own, fusings=[tp.Fusing([tp.OperatorsSet("Conv", options(activation_n_bits=2)), own[1]])])
    assert other.fusing_patterns[0].operator_groups_list == tuple(own[:2])  # whatever the options of the fusing's set


def test_a_concatenation_has_no_options_unless_a_copy_of_its_model_gives_it_some():
    base = tp.get_target_platform_capabilities("pytorch", "imx500").tp_model
    assert base.get_config_options_by_operators_set("Conv_ConvTranspose") is None
    four = options(activation_n_bits=4)
    for given in (None, four):
        with tp.TargetPlatformModel(base.default_qco) as clone:
            for o in base.operator_set:
                tp.OperatorsSet(o.name, given or o.qc_options)
            for f in base.fusing_patterns:
                tp.Fusing(list(f.operator_groups_list))
        assert sorted(o.name for o in clone.operator_set) == sorted(o.name for o in base.operator_set)
        assert clone.get_config_options_by_operators_set("Conv_ConvTranspose") == given
        fused = sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        result = quantized(fused, torch.randn(4, 3, 8, 8), clone)
        assert len(result.plan.groups) == 1
        assert result.plan[result.graph.outputs[0]].grid.bits == (8 if given is None else 4)


def test_models_and_capabilities_can_be_copied_and_pickled():
    tpc = tp.get_target_platform_capabilities("pytorch", "imx500")
    assert copy.deepcopy(tpc) == tpc
    for twin in (copy.deepcopy(tpc.tp_model), pickle.loads(pickle.dumps(tpc.tp_model))):
        assert twin == tpc.tp_model and twin.to_platform() == tpc.tp_model.to_platform()
        with pytest.raises(TypeError):
            twin.get_default_op_quantization_config().attr_weights_configs_mapping["bias"] = FLOAT


@pytest.mark.parametrize("part", ["math", "operator_set", "fusing_patterns"])
@pytest.mark.parametrize("given", [torch.ones(2), 0, 5, "x"], ids=str)
def test_parts_of_a_model_have_their_types(part, given):
    with pytest.raises(ModelingError, match=f"'{part}' must be a .*Where: TargetPlatformModel"):
        tp.TargetPlatformModel(options(), **{part: given})


@pytest.mark.parametrize("pads", [True, False])
def test_simd_padding_is_set_inside_the_block_of_its_model(pads):
    with tp.TargetPlatformModel(options()) as m:
        m.set_simd_padding(is_simd_padding=pads)
    assert m.is_simd_padding is pads
    with pytest.raises(ModelingError, match="Immutable"):
        m.set_simd_padding(is_simd_padding=True)


def test_fields_without_a_meaning_may_be_none():
    """As in MCT's tutorial of pruning."""
    attribute = tp.AttributeQuantizationConfig(tp.QuantizationMethod.UNIFORM, None, None, None, None)
    assert attribute == tp.AttributeQuantizationConfig(tp.QuantizationMethod.UNIFORM)
    assert not config(enable_activation_quantization=None, quantization_preserving=None).quantization_preserving


def test_the_open_capabilities_are_known_inside_their_block():
    with pytest.raises(ModelingError, match="not initialized"):
        tp.get_current_tpc()
    with tp.TargetPlatformCapabilities(model()) as tpc:
        assert tp.get_current_tpc() is tpc
    with pytest.raises(ModelingError, match="no node"):
        tpc.get_qco_by_node(None)
