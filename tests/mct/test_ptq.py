"""Post-training quantization under MCT's names: arguments, information about the result, errors."""

import inspect
import math
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit import core, errors
from chipfit import target_platform as tp
from chipfit import trainable_infrastructure as trainable
from chipfit.core import CoreConfig, DebugConfig, QuantizationConfig, QuantizationErrorMethod
from chipfit.platform.save import export_platform
from chipfit.ptq import UserInformation
from chipfit.search.resources import resources
from tests.build import mlp, model_of, quantized, sequential
from tests.zoo import make


@pytest.fixture(scope="module")
def net():
    return make("residual_silu")


def data_of(batch):
    def data():
        for _ in range(2):
            yield [batch.double().numpy()]  # numpy's default type, as users of MCT yield it

    return data


def ptq(net, platform=None, *limits, config=None, **options):
    """Return the quantized model and the information about it."""
    options |= {"target_platform_capabilities": platform, "core_config": config}
    return chipfit.pytorch_post_training_quantization(net[0], data_of(net[1]), *limits, **options)


def test_functions_have_the_names_and_arguments_of_mct():
    assert chipfit.core.network_editor is chipfit.network_editor
    shared = ["representative_data_gen", "target_resource_utilization", "core_config", "target_platform_capabilities"]
    for framework, model in (("pytorch", "in_module"), ("keras", "in_model")):
        function = getattr(chipfit, f"{framework}_post_training_quantization")
        assert function is getattr(chipfit.ptq, function.__name__)
        assert list(inspect.signature(function).parameters)[:5] == [model, *shared]


def test_options_have_the_defaults_of_mct():
    off = """relu_bound_to_power_of_2 weights_second_moment_correction input_scaling softmax_shift
    activation_channel_equalization shift_negative_threshold_recalculation shift_negative_params_search
    concat_threshold_update activation_bias_correction"""
    on = "weights_bias_correction shift_negative_activation_correction linear_collapsing residual_collapsing"
    numbers = {"z_threshold": math.inf, "min_threshold": 2.0**-16, "l_p_value": 2, "shift_negative_ratio": 0.05}
    numbers |= {"activation_bias_correction_threshold": 0.0, "custom_tpc_opset_to_layer": None}
    methods = dict.fromkeys(("activation_error_method", "weights_error_method"), QuantizationErrorMethod.MSE)
    expected = {**dict.fromkeys(off.split(), False), **dict.fromkeys(on.split(), True), **numbers, **methods}
    assert vars(QuantizationConfig()) == expected
    values = {"NOCLIPPING": 0, "MSE": 1, "MAE": 2, "KL": 4, "LP": 5, "HMSE": 6}
    assert {m.name: m.value for m in QuantizationErrorMethod} == values
    debug = dict.fromkeys(("analyze_similarity", "simulate_scheduler", "bypass"), False)
    assert vars(DebugConfig()) == debug | {"network_editor": []}
    fields = "quantization_config mixed_precision_config bit_width_config debug_config"
    assert list(vars(CoreConfig())) == fields.split()
    CoreConfig().debug_config.network_editor.append("x")
    assert CoreConfig().debug_config.network_editor == []  # configurations share no default


def test_a_quantized_module_is_returned_with_information(net):
    model, batch = net
    before = {k: v.clone() for k, v in model.state_dict().items()}
    quantized, info = ptq(net)
    assert quantized(batch).shape == model(batch).shape and not torch.equal(quantized(batch), model(batch))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert info.result.plan.platform == tp.get_target_platform_capabilities("pytorch", "default").to_platform().name
    assert info.result.model is quantized
    kernels = [t for t in info.result.plan.tensors.values() if t.role == "weight" and t.quantized]
    assert info.final_resource_utilization.weights_memory == sum(
        info.result.graph.weights[t.name].numel() for t in kernels
    )
    assert ["stem.0", "stem.2"] in info.fusions
    assert (info.input_scale, info.gptq_info_dict, info.mixed_precision_cfg) == (1.0, {}, None)


@pytest.mark.parametrize("kind", ["name", "record", "capabilities", "file", "path"])
def test_a_platform_may_be_given_in_every_form(net, kind, tmp_path):
    path = export_platform("ort_cpu", tmp_path / "mine.yaml")
    forms = {"name": "ort_cpu", "record": chipfit.load_platform("ort_cpu"), "file": str(path), "path": path}
    forms["capabilities"] = tp.get_target_platform_capabilities("pytorch", "ort_cpu")
    _, info = ptq(net, forms[kind])
    assert info.result.verify([net[1]]).exact
    assert info.result.export(tmp_path / "m.onnx").is_file()


def test_the_configuration_attaches_layers_to_operator_sets(net):
    base = tp.get_target_platform_capabilities("pytorch", "imx500").tp_model.default_qco
    narrow = tp.QuantizationConfigOptions([base.base_config.clone_and_edit(activation_n_bits=4)])
    with tp.TargetPlatformModel(base, name="mine") as chip:
        tp.OperatorsSet("Strange", narrow)
    config = CoreConfig(QuantizationConfig(custom_tpc_opset_to_layer={"Strange": [nn.SiLU]}))
    for given in (chip, tp.TargetPlatformCapabilities(chip)):
        assert ptq(net, given, config=config)[1].result.plan.tensors["silu"].grid.bits == 4
    with pytest.raises(errors.ConfigError, match="sets"):
        ptq(net, "ort_cpu", config=config)


def test_a_list_of_inputs_has_no_label():
    model = model_of(lambda m, x, i: m.linear(x + m.table(i)), table=nn.Embedding(5, 8), linear=nn.Linear(8, 3))
    x, index = torch.randn(6, 8), torch.arange(6) % 5
    quantized, _ = chipfit.pytorch_post_training_quantization(model, lambda: iter([[x.numpy(), index.numpy()]]))
    assert quantized(x, index).shape == (6, 3)


class Named(nn.Module):
    """A network of two inputs, with layers in folders, a batch norm, and functions."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU6())
        self.drop, self.fc = nn.Dropout(), nn.Linear(4, 5)

    def forward(self, x, y):
        x = torch.relu(self.stem(x)) * 2 + y
        return self.fc(self.drop(x.mean((2, 3))))


def two_inputs():
    torch.manual_seed(0)
    for _ in range(2):
        yield [torch.randn(4, 3, 8, 8), torch.randn(4, 4, 6, 6)]


@pytest.fixture(scope="module")
def named():
    torch.manual_seed(0)
    return chipfit.pytorch_post_training_quantization(Named().eval(), two_inputs)


def test_a_network_in_float_has_folded_batch_norms_and_the_layers_under_their_names():
    net = Named().eval()
    options = {"target_platform_capabilities": quiet_chip()}
    with pytest.warns(UserWarning, match="stays in float"):
        model, _ = chipfit.pytorch_post_training_quantization(net, two_inputs, **options)
    x, y = next(two_inputs())
    torch.testing.assert_close(model([x, y]), net(x, y))
    scale = net.stem[1].weight / torch.sqrt(net.stem[1].running_var + net.stem[1].eps)
    assert isinstance(model.stem_0_bn, nn.Conv2d) and isinstance(model.fc, nn.Linear)
    torch.testing.assert_close(model.stem_0_bn.weight, net.stem[0].weight * scale[:, None, None, None])
    assert model.fc.weight is model.get_parameter("fc.weight")
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def test_a_network_without_operators_is_returned_in_float():
    with pytest.warns(UserWarning, match="stays in float"):
        model, information = chipfit.pytorch_post_training_quantization(nn.Identity(), data_of(torch.ones(4, 3)))
    assert torch.equal(model(torch.ones(2, 3)), torch.ones(2, 3)) and not information.quantizes


class Identity(nn.Module):
    """A layer of the user's own with the name of one of PyTorch's."""

    def forward(self, x):
        return x


class Doubled(nn.Module):
    """A layer of the user's own."""

    def forward(self, x):
        return x + x


def test_a_layer_of_the_users_own_without_weights_is_found_under_its_name():
    model, _ = chipfit.pytorch_post_training_quantization(
        sequential(nn.Linear(3, 3), Doubled(), Identity()), data_of(torch.ones(4, 3))
    )
    assert isinstance(getattr(model, "1"), Doubled) and "1" not in model._modules
    assert isinstance(getattr(model, "2"), Identity)
    with pytest.raises(AttributeError):
        _ = getattr(pickle.loads(pickle.dumps(model)), "2")


def test_parts_of_a_pytorch_model_have_the_names_that_mct_gives_them(named):
    model, info = named
    conv = model.stem_0_bn
    assert conv is model.get_submodule("stem.0")
    assert isinstance(conv, trainable.PytorchQuantizationWrapper) and isinstance(conv.layer, nn.Conv2d)
    assert conv.is_weights_quantization and conv.num_weights_quantizers == 1
    assert isinstance(model.stem_2, nn.ReLU6) and isinstance(model.drop, nn.Module)
    for name, value in {"stem_2": "hardtanh", "add": "add", "mul": "mul", "x": "x", "fc": "linear"}.items():
        holder = getattr(model, f"{name}_activation_holder_quantizer")
        assert isinstance(holder, trainable.PytorchActivationQuantizationHolder)
        assert torch.equal(holder.numbers()[0], info.result.plan[value].scale)
    with pytest.raises(AttributeError, match="stem_1"):
        _ = model.stem_1  # the batch norm, which is folded
    assert pickle.loads(pickle.dumps(model)).stem_0_bn.node.layer == "stem.0"


def test_constants_of_functions_are_those_of_the_float_network():
    class Scaled(nn.Module):
        def forward(self, x):
            return x * 2.7

    chip = chipfit.get_target_platform_capabilities("pytorch", "imx500", "v3")
    options = {"target_platform_capabilities": chip}
    model, info = chipfit.pytorch_post_training_quantization(Scaled(), lambda: iter([[torch.ones(1, 4)]]), **options)
    assert model.metadata["tpc_version"] == info.result.platform.name
    assert model.get_submodule("mul").weight_values == {1: torch.tensor(2.7)}


def test_all_calls_of_a_layer_add_one_bias(tmp_path):
    torch.manual_seed(0)
    conv, batch = nn.Conv2d(3, 3, 3, padding=1), torch.randn(4, 3, 6, 6)
    model = model_of(lambda m, x: m.conv(torch.relu(m.conv(x))), conv=conv)
    quantized, info = chipfit.pytorch_post_training_quantization(model, lambda: iter([[batch]]))
    assert [n.bias for n in info.result.graph.nodes if n.op == "Conv2D"] == ["conv.bias", "conv.bias"]
    info.result.save(tmp_path / "saved")
    assert torch.equal(chipfit.load(tmp_path / "saved").model(batch), quantized(batch))


def test_metadata_of_a_chip_have_the_order_of_kernels_and_their_memory():
    conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    debug = CoreConfig(debug_config=DebugConfig(simulate_scheduler=True))
    chip = chipfit.get_target_platform_capabilities("pytorch", "imx500", "v2")
    options = {"core_config": debug, "target_platform_capabilities": chip}
    model, _ = chipfit.pytorch_post_training_quantization(conv, lambda: iter([[torch.randn(1, 3, 8, 8)]]), **options)
    found = pickle.loads(pickle.dumps(model)).metadata["scheduling_info"]
    assert found["operators_scheduling"] == ["DummyPlaceHolder:input", "FusedLayerType:FusedNode_0_bn_2"]
    assert found["max_cut"] == (3 + 4) * 64
    assert found["fused_nodes_mapping"] == dict.fromkeys(["0_bn", "2"], "FusedNode_0_bn_2")


def test_quantizers_that_do_not_train_count_as_the_inferable_ones_with_their_grid(named):
    model, inferable = named[0], trainable.pytorch_inferable_quantizers
    weight, result = model.stem_0_bn.weights_quantizers["weight"], model.add_activation_holder_quantizer
    quantizer = result.activation_holder_quantizer
    assert isinstance(weight, inferable.WeightsSymmetricInferableQuantizer) and weight.input_rank == 4
    assert isinstance(weight, trainable.BaseInferableQuantizer)
    assert isinstance(quantizer, inferable.ActivationPOTInferableQuantizer)
    assert not isinstance(weight, (inferable.WeightsPOTInferableQuantizer, inferable.ActivationPOTInferableQuantizer))
    trained, _ = chipfit.pytorch_quantization_aware_training_init_experimental(
        Named().eval(), two_inputs, qat_config=chipfit.qat.QATConfig("lsq", "lsq")
    )
    assert not isinstance(trained.add_activation_holder_quantizer, inferable.ActivationPOTInferableQuantizer)


def test_a_quantized_model_takes_its_inputs_as_one_list_too(named):
    x, y = next(two_inputs())
    assert torch.equal(named[0]([x, y]), named[0](x, y))
    with pytest.raises(errors.DataError, match="captured with other inputs"):
        named[0]([x, y, y])


def test_a_traced_model_is_saved_as_torchscript_and_computes_what_it_did(named, tmp_path):
    batch = tuple(next(two_inputs()))
    torch.jit.script(torch.jit.trace(named[0], batch)).save(tmp_path / "model.pt")
    assert torch.equal(torch.jit.load(tmp_path / "model.pt")(*batch), named[0](*batch))
    assert torch.equal(torch.fx.symbolic_trace(named[0])(*batch), named[0](*batch))  # with the factor of `mul`


def test_a_bypassed_model_is_returned_unchanged(net):
    got, info = ptq(net, config=CoreConfig(debug_config=DebugConfig(bypass=True)))
    assert got is net[0] and info.result is None and info.final_resource_utilization is None


def quiet_chip():
    """Return a chip that quantizes neither weights nor results."""
    float_, pot = tp.AttributeQuantizationConfig(), tp.QuantizationMethod.POWER_OF_TWO
    return tp.TargetPlatformModel(tp.QuantizationConfigOptions([tp.OpQuantizationConfig(float_, {}, pot, 8, 8, False)]))


@pytest.mark.parametrize("step", ["post_training_quantization", "quantization_aware_training_init"])
def test_a_chip_that_quantizes_nothing_keeps_the_float_network_with_a_warning(net, step):
    facade = getattr(chipfit, f"pytorch_{step}")
    with pytest.warns(UserWarning, match="The model stays in float: Nothing in this model can be quantized on"):
        model, info = facade(net[0], data_of(net[1]), target_platform_capabilities=quiet_chip())
    assert not info.quantizes and {t.format for t in info.result.plan.tensors.values()} == {"float"}
    torch.testing.assert_close(model(net[1]), net[0](net[1]))
    with pytest.raises(errors.NothingQuantizedError):
        quantized(net[0], net[1], quiet_chip())
    resources, options = core.pytorch_resource_utilization_data, {"target_platform_capabilities": quiet_chip()}
    with pytest.raises(errors.NothingQuantizedError):
        resources(net[0], data_of(net[1]), **options)


def test_a_framework_info_selects_the_layers_to_quantize(net):
    _, info = ptq(net, fw_info=chipfit.FrameworkInfo([nn.Linear], [nn.ReLU, nn.SiLU], []))
    weights = {t.name for t in info.result.plan.tensors.values() if t.role == "weight" and t.quantized}
    assert weights == {"head.weight"}


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "data",
    [
        lambda: iter([]),
        lambda: None,
        lambda: "images",
        lambda shape: iter([[np.zeros(shape)]]),
        [[np.zeros((1, 3, 8, 8))]],
        iter([[np.zeros((1, 3, 8, 8))]]),
        None,
        lambda: iter([[np.zeros((1, 3, 8, 8), np.float32)], [np.zeros((1, 4, 8, 8), np.float32)]]),
        lambda: iter([[np.zeros((1, 3, 8, 8), np.float32)], [np.zeros((1, 3, 8), np.float32)]]),
        lambda: iter([[np.zeros((1, 3, 8, 8), np.float32)], [np.full((1, 3, 8, 8), np.nan, np.float32)]]),
    ],
    ids=["empty", "nothing", "text", "wants arguments", "list", "iterator", "none", "channels", "rank", "nan"],
)
def test_invalid_data_are_refused(net, data):
    with pytest.raises(errors.DataError):
        chipfit.pytorch_post_training_quantization(net[0], data)


def test_a_batch_that_does_not_fit_the_model_is_refused(net):
    with pytest.raises(errors.ChipfitError, match="fails on the example"):
        chipfit.pytorch_post_training_quantization(net[0], lambda: iter([[np.zeros((1, 5, 8, 8))]]))


def test_unknown_options_are_refused_on_construction_and_assignment():
    with pytest.raises(errors.UnknownNameError, match="'weights_bias_correction'"):
        QuantizationConfig(weight_bias_correction=True)
    config = QuantizationConfig()
    with pytest.raises(errors.UnknownNameError, match="'softmax_shift'"):
        config.softmaxshift = True
    for record in (CoreConfig, DebugConfig, core.MixedPrecisionQuantizationConfig, core.ResourceUtilization):
        with pytest.raises(errors.UnknownNameError, match=record.__name__):
            record(nonsense=1)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("weights_bias_correction", 1, ""),
        ("z_threshold", "3", ""),
        ("activation_error_method", "MSE", ""),
        ("shift_negative_ratio", -0.1, ".*at least"),
        ("z_threshold", -1.0, ".*at least"),
        ("l_p_value", 0, ".*at least"),
    ],
)
def test_invalid_values_are_refused_on_construction_and_assignment(option, value, says):
    with pytest.raises(errors.ConfigError, match=option + says):
        QuantizationConfig(**{option: value})
    config = QuantizationConfig()
    with pytest.raises(errors.ConfigError, match=option + says):
        setattr(config, option, value)


# ---------------------------------------------------------------- search of bit widths


def test_limits_on_resources_start_a_search_of_widths(net):
    model, batch = net
    plain = ptq(net)[1].result
    small = core.ResourceUtilization(weights_memory=0.6 * sum(w.numel() for w in model.parameters() if w.dim() > 1))
    mixed = core.CoreConfig(mixed_precision_config=core.MixedPrecisionQuantizationConfig())
    info = ptq(net, None, small, config=mixed)[1]
    assert info.result.report.quantized_bytes < plain.report.quantized_bytes
    chosen = info.result.plan.provenance["chosen"]
    assert min(chosen.values()) < 8 and all(info.result.plan[w].grid.bits == b for w, b in chosen.items())
    layers = [n for n, m in model.named_modules() if f"{n}.weight" in chosen]
    # of 8, 4 and 2 bits, in the order of the network
    indices = [(8, 4, 2).index(chosen[f"{n}.weight"]) for n in layers]
    assert all(info.mixed_precision_cfg == indices) and any(indices)
    used, default = info.final_resource_utilization, core.pytorch_resource_utilization_data(model, data_of(batch))
    assert used.activation_memory == default.activation_memory and used.bops < default.bops
    assert used.total_memory == used.weights_memory + used.activation_memory < default.total_memory
    assert small.holds_constraints(used) and not small.holds_constraints(default)
    assert default.weights_memory == sum(w.numel() for w in model.parameters() if w.dim() > 1)  # without biases
    for limit in ({"activation_memory": 10}, {"total_memory": 10}):
        with pytest.raises(errors.PlanError, match=next(iter(limit)).partition("_")[0]):
            ptq(net, None, core.ResourceUtilization(**limit))


def test_resources_before_a_choice_of_bits_are_counted_at_8_bits_and_32_bit_products():
    """As MCT 2.2: a layer from 6 to 4 numbers has 24 weights and 24 multiplications, whatever the chip's bits."""
    data = {
        "representative_data_gen": lambda: [[torch.randn(8, 6)]],
        "target_platform_capabilities": "mqbench_academic",
    }
    found = core.pytorch_resource_utilization_data(nn.Linear(6, 4), **data)
    assert vars(found) == {"weights_memory": 24, "activation_memory": 6, "total_memory": 30, "bops": 24 * 32 * 32}


def test_candidates_are_pairs_of_a_layers_weight_and_result_widest_first():
    result = quantized(mlp(4, 4, 2), torch.randn(8, 4), "mqbench_academic")
    (x,), (a, relu, _) = result.graph.inputs, (n.output for n in result.graph.nodes)
    widths = {"0.weight": (2, 4, 8), a: (4, 8), relu: (8,), x: (4, 8, 16), "2.weight": (2, 4)}
    chosen = {"0.weight": 4, a: 4, relu: 8, x: 8, "2.weight": 4}
    plan = replace(result.plan, provenance={"widths": widths, "chosen": chosen})
    # x: 16, 8, 4; the first layer: 8/8, 8/4, 4/8, 4/4, 2/8, 2/4; the activation has no choice; the last layer: 4, 2
    assert UserInformation(replace(result, plan=plan)).mixed_precision_cfg.tolist() == [1, 3, 0]


def test_information_is_a_screen_in_consoles_and_notebooks():
    result = quantized(mlp(4, 4, 2), torch.randn(8, 4), "mqbench_academic")
    found = UserInformation(result, input_scale=0.5)
    assert "Information about a quantized model" in repr(found) and "input scale  0.5" in repr(found)
    assert "<td>Linear</td>" in found._repr_html_() and "not quantized" in repr(UserInformation())


def test_options_of_the_search_have_the_order_and_defaults_of_mct():
    expected = {"compute_distance_fn": None, "distance_weighting_method": core.MpDistanceWeighting.AVG}
    expected |= {"num_of_images": 32, "configuration_overwrite": None, "num_interest_points_factor": 1.0}
    expected |= {"use_hessian_based_scores": False, "norm_scores": True, "refine_mp_solution": True}
    expected |= {"metric_normalization_threshold": 1e10, "hessian_batch_size": 32}
    assert list(vars(core.MixedPrecisionQuantizationConfig()).items()) == list(expected.items())
    for bad in ({"num_interest_points_factor": 0}, {"distance_weighting_method": "AVG"}, {"compute_distance_fn": 3}):
        with pytest.raises(errors.ConfigError, match=next(iter(bad))):
            core.MixedPrecisionQuantizationConfig(**bad)


SEARCH = core.MixedPrecisionQuantizationConfig


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            {"config": CoreConfig(mixed_precision_config=SEARCH(configuration_overwrite=[1]))},
            *(errors.ConfigError, "requires a search. Try: pass target_resource_utilization"),
        ),
        ({"config": QuantizationConfig()}, errors.ConfigError, "CoreConfig"),
        ({"target_resource_utilization": 1000}, errors.ConfigError, "ResourceUtilization"),
        ({"platform": 8}, errors.PlatformError, "platform must be given by name, path or record"),
    ],
)
def test_unsupported_options_and_arguments_of_the_wrong_type_are_refused(net, arguments, error, says):
    with pytest.raises(error, match=says):
        ptq(net, **arguments)


def test_options_without_effect_are_named_in_one_warning(net):
    search = SEARCH(compute_distance_fn=max, num_of_images=4, hessian_batch_size=8)
    options = QuantizationConfig(shift_negative_params_search=True)
    with pytest.warns(UserWarning, match="Options without effect") as found:
        ptq(net, config=CoreConfig(options, search, debug_config=DebugConfig(analyze_similarity=True)))
    assert len(found) == 1
    for name in "shift_negative_params_s compute_distance_fn num_of_images hessian_batch_size analyze_s".split():
        assert f"'{name}" in str(found[0].message)


def test_candidates_are_chosen_by_index(net):
    limits = core.ResourceUtilization(weights_memory=0.7 * resources(*searched(net)).weights)
    _, usual = ptq(net, "imx500", limits)
    found = usual.mixed_precision_cfg
    other = [0 if k else 1 for k in found.tolist()]
    config = CoreConfig(mixed_precision_config=SEARCH(configuration_overwrite=other))
    _, info = ptq(net, "imx500", limits, config=config)
    assert info.mixed_precision_cfg.tolist() == other != found.tolist()
    widths, plan = info.result.plan.provenance["widths"], info.result.plan
    for name in (t for t, b in widths.items() if len(b) > 1):
        assert plan[name].grid.bits == plan.provenance["chosen"][name]
    for bad in (other[:-1], [9] * len(other)):
        config = CoreConfig(mixed_precision_config=SEARCH(configuration_overwrite=bad))
        with pytest.raises(errors.ConfigError, match="'configuration_overwrite' does not fit the candidates"):
            ptq(net, "imx500", limits, config=config)


def searched(net):
    result = ptq(net, "imx500")[1].result
    return result.graph, result.plan


def test_thresholds_are_at_least_the_minimum():
    model = sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with torch.no_grad():
        model[2].weight.mul_(0.001)
    data = data_of(0.1 * torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))
    for least in (0.5, 4.0):
        config = CoreConfig(QuantizationConfig(min_threshold=least))
        _, info = chipfit.pytorch_post_training_quantization(model, data, core_config=config)
        thresholds = [t.scale.max() * 128 for t in info.result.plan.tensors.values() if t.quantized]
        assert min(thresholds) >= least / 2 and info.result.plan["2.weight"].scale.tolist() == [least / 128] * 3


def test_an_infinite_ratio_shifts_every_tail_that_gains_a_finer_step():
    # SiLU of [-3.5, 3.5] is in [-0.2785, 3.397]: a signed step of 4 / 128; lifted by 18 steps of 4 / 256 it is unsigned
    model = nn.Sequential(nn.SiLU(), nn.Linear(4, 2))
    data = data_of(torch.linspace(-3.5, 3.5, 400).reshape(100, 4))
    for ratio, lift in ((0.05, 0.0), (math.inf, 18 * 4 / 256)):
        config = CoreConfig(QuantizationConfig(weights_bias_correction=False, shift_negative_ratio=ratio))
        _, info = chipfit.pytorch_post_training_quantization(model, data, core_config=config)
        bias = model[1].bias - lift * model[1].weight.sum(1)
        torch.testing.assert_close(info.result.graph.weights["1.bias"], bias.detach())


def test_resources_hold_limits():
    limits = core.ResourceUtilization(weights_memory=100, bops=50)
    assert limits.holds_constraints(core.ResourceUtilization(100, 7, 7, 50))
    assert not limits.holds_constraints(core.ResourceUtilization(101, 7, 7, 50))
    assert not limits.holds_constraints(core.ResourceUtilization()) and not limits.holds_constraints(None)
    by_target = limits.get_resource_utilization_dict()
    assert by_target[core.RUTarget.BOPS] == 50 and by_target[core.RUTarget.TOTAL] == math.inf
    limits.set_resource_utilization_by_target({core.RUTarget.TOTAL: 3})
    assert limits == core.KPI(total_memory=3)


def test_a_log_folder_gets_text_and_numbers_for_tensorboard(net, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = chipfit.set_log_folder(str(tmp_path))
    try:
        _, info = ptq(net)
    finally:
        assert chipfit.set_log_folder(None) is None
    text = (folder / "chipfit.log").read_text(encoding="utf-8")
    assert "post_training_quantization" in text and all(note in text for note in info.result.plan.rewrites)
    events = EventAccumulator(str(folder / "tensorboard_logs")).Reload()
    name = next(t.name for t in info.result.plan.tensors.values() if t.role == "activation" and t.quantized)
    (point,) = events.Scalars(f"scale/{name}")
    assert point.value == pytest.approx(float(info.result.plan[name].scale))


def chip_with(widths, *more):
    """A chip whose convolutions, and what else is named, have results of these widths and weights of 8 bits."""
    w = tp.AttributeQuantizationConfig(tp.QuantizationMethod.SYMMETRIC, 8, True, True)
    pot = tp.QuantizationMethod.POWER_OF_TWO
    configs = [tp.OpQuantizationConfig(w, {}, pot, n, widths, True) for n in widths]
    options = tp.QuantizationConfigOptions(configs, configs[0])
    moves = configs[0].clone_and_edit(enable_activation_quantization=False)
    with tp.TargetPlatformModel(tp.QuantizationConfigOptions([configs[0]])) as made:
        for name in ("Conv", *more):
            tp.OperatorsSet(name, options)
        tp.OperatorsSet("Transpose", tp.QuantizationConfigOptions([moves]))
    return made


TWO = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 4, 5))
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("most", "expected"), [(3000, [1, 0, 0]), (1536, [1, 1, 1]), (768, [2, 2, 2])])
def test_the_largest_value_has_the_bits_that_the_memory_of_activations_allows(most, expected):
    """8, 4 or 2 bits of 3072, 2700 and 2704 numbers: data of 4 bits and results of 8 in the first case."""
    platform = chip_with((8, 4, 2), "Input")
    info = ptq((TWO, IMAGES), platform, core.ResourceUtilization(activation_memory=most))[1]
    assert info.mixed_precision_cfg.tolist() == expected
    used = max(n * (8, 4, 2)[k] / 8 for n, k in zip((3072, 2700, 2704), expected, strict=True))
    assert info.final_resource_utilization.activation_memory == used <= most


def test_an_input_behind_a_layout_change_has_the_bits_that_a_limit_allows():
    channels_last = model_of(lambda m, x: m.convs(x.permute(0, 3, 1, 2)), convs=TWO)
    given = channels_last, IMAGES.permute(0, 2, 3, 1).contiguous()
    info = ptq(given, chip_with((8, 4), "Input"), core.ResourceUtilization(activation_memory=1536))[1]
    tensors = info.result.plan.tensors.values()
    assert {t.grid.bits for t in tensors if t.role == "activation"} == {4}


def test_both_measures_of_memory_and_of_operations_are_available():
    info = ptq((TWO, IMAGES), chip_with((8,)))[1]
    found = resources(info.result.graph, info.result.plan)
    assert found.largest == info.final_resource_utilization.activation_memory == 3072  # the input
    assert found.activations == 3072 + 2700  # the input, and what the first convolution makes of it
    a, b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
    two_read_the_input = model_of(lambda m, x: m.b(torch.relu(m.a(x))) + m.c(x), a=a, b=b, c=nn.Conv2d(3, 4, 3))
    most = core.ResourceUtilization(bops=4 * 4 * 30 * 30 * 4 * 8)  # those of the kernel that reads its input alone
    info = ptq((two_read_the_input, IMAGES), chip_with((8, 4), "ReLU"), most)[1]
    found = resources(info.result.graph, info.result.plan)
    assert info.final_resource_utilization.bops == found.bops_of_sole_readers == most.bops
    assert found.bops == most.bops + 2 * 3 * 4 * 9 * 30 * 30 * 8 * 8


def test_bits_of_inputs_are_those_of_the_set_input_and_can_be_chosen_by_name():
    widths = core.BitWidthConfig()
    widths.set_manual_activation_bit_width(core.network_editor.NodeTypeFilter("InputLayer"), 4)
    for platform, bits in ((chip_with((8, 4), "Input"), 4), (chip_with((8, 4)), None)):
        how = {"core_config": CoreConfig(bit_width_config=widths), "target_platform_capabilities": platform}
        if bits is None:
            with pytest.raises(errors.UnsupportedError, match="Input '.*' cannot have 4 bits. Got: 4. Allowed: 8 bits"):
                chipfit.pytorch_post_training_quantization(TWO, data_of(IMAGES), **how)
        else:
            result = chipfit.pytorch_post_training_quantization(TWO, data_of(IMAGES), **how)[1].result
            (own,) = result.graph.inputs
            others = {t.grid.bits for t in result.plan.tensors.values() if t.role == "activation" and t.name != own}
            assert result.plan[own].grid.bits == bits and others == {8}


def test_items_that_the_model_does_not_take_are_ignored_with_a_warning():
    model, images = mlp(4, 8, 3), torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    results = []
    for batch in ([images], [images, torch.full((8, 9), 100.0)]):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            _, info = chipfit.pytorch_post_training_quantization(model, lambda batch=batch: iter([batch]))
        assert [str(w.message)[:22] for w in said] == ["Batches hold 2 items: "] * (len(batch) - 1)
        results.append({n: t.scale.tolist() for n, t in info.result.plan.tensors.items() if t.quantized})
    assert results[0] == results[1]


def float_model(model, images):
    options = {"target_platform_capabilities": quiet_chip()}
    with pytest.warns(UserWarning, match="stays in float"):
        return chipfit.pytorch_post_training_quantization(model, lambda: iter([[images]]), **options)[0]


def test_a_network_that_stays_in_float_computes_the_same_bits():
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    model = sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU())
    assert torch.equal(float_model(model, images)(images), model(images))


def test_a_network_that_stays_in_float_has_no_layers_that_rewrites_have_removed():
    images = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    model = sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))
    found = float_model(model, images)
    assert {name.partition(".")[0] for name in found.state_dict()} == {"0", "3", "4"}  # 1 is part of 0
    torch.testing.assert_close(found(images), model(images))
