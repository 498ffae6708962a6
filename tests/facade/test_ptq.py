"""The facades under MCT's names: what they take, what they give back, what they refuse."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit import core, ptq
from chipfit.core import CoreConfig, DebugConfig, QuantizationConfig, QuantizationErrorMethod
from chipfit.errors import (
    ChipfitError,
    ConfigError,
    DataError,
    PlanError,
    PlatformError,
    UnknownNameError,
    UnsupportedError,
)
from chipfit.target_platform import TargetPlatformCapabilities, get_target_platform_capabilities
from tests.zoo import make


@pytest.fixture
def net():
    model, batch = make("residual_silu")

    def data():
        for _ in range(2):
            yield [batch.double().numpy()]  # numpy's default type, as users of MCT yield it

    return model, batch, data


def test_the_names_of_mct_are_there():
    assert chipfit.ptq.pytorch_post_training_quantization is chipfit.pytorch_post_training_quantization
    assert chipfit.ptq.keras_post_training_quantization is chipfit.keras_post_training_quantization
    assert chipfit.core.network_editor is chipfit.network_editor
    for function, model in (
        (chipfit.pytorch_post_training_quantization, "in_module"),
        (chipfit.keras_post_training_quantization, "in_model"),
    ):
        names = list(inspect.signature(function).parameters)
        wanted = [
            model,
            "representative_data_gen",
            "target_resource_utilization",
            "core_config",
            "target_platform_capabilities",
        ]
        assert names[:5] == wanted


def test_options_have_the_defaults_of_mct():
    defaults = {
        "activation_error_method": QuantizationErrorMethod.MSE,
        "weights_error_method": QuantizationErrorMethod.MSE,
        "relu_bound_to_power_of_2": False,
        "weights_bias_correction": True,
        "weights_second_moment_correction": False,
        "input_scaling": False,
        "softmax_shift": False,
        "shift_negative_activation_correction": True,
        "activation_channel_equalization": False,
        "z_threshold": math.inf,
        "l_p_value": 2,
        "linear_collapsing": True,
        "residual_collapsing": True,
        "shift_negative_ratio": 0.05,
        "shift_negative_threshold_recalculation": False,
        "shift_negative_params_search": False,
        "concat_threshold_update": False,
        "activation_bias_correction": False,
        "activation_bias_correction_threshold": 0.0,
        "custom_tpc_opset_to_layer": None,
    }
    assert vars(QuantizationConfig()) == defaults
    assert {m.name: m.value for m in QuantizationErrorMethod} == {
        "NOCLIPPING": 0,
        "MSE": 1,
        "MAE": 2,
        "KL": 4,
        "LP": 5,
        "HMSE": 6,
    }
    assert vars(DebugConfig()) == {
        "analyze_similarity": False,
        "network_editor": [],
        "simulate_scheduler": False,
        "bypass": False,
    }
    assert list(vars(CoreConfig())) == [
        "quantization_config",
        "mixed_precision_config",
        "bit_width_config",
        "debug_config",
    ]


def test_configurations_share_no_default(net):
    CoreConfig().debug_config.network_editor.append("x")
    assert CoreConfig().debug_config.network_editor == []


def test_a_module_comes_back_quantized_with_what_there_is_to_know(net):
    model, batch, data = net
    before = {k: v.clone() for k, v in model.state_dict().items()}
    quantized, info = chipfit.ptq.pytorch_post_training_quantization(model, data)
    assert quantized(batch).shape == model(batch).shape and not torch.equal(quantized(batch), model(batch))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert info.result.plan.platform == get_target_platform_capabilities("pytorch", "default").to_platform().name
    assert info.result.model is quantized
    assert info.final_resource_utilization.weights_memory == info.result.report.quantized_bytes
    assert ["stem.0", "stem.2"] in info.fusions
    assert (info.input_scale, info.gptq_info_dict, info.mixed_precision_cfg) == (1.0, {}, None)


PLATFORMS = {
    "name": lambda tmp: "ort_cpu",
    "record": lambda tmp: chipfit.load_platform("ort_cpu"),
    "capabilities": lambda tmp: get_target_platform_capabilities("pytorch", "ort_cpu"),
    "file": lambda tmp: str(_copy(tmp)),
    "path": lambda tmp: _copy(tmp),
}


def _copy(folder):
    from importlib import resources

    path = folder / "mine.yaml"
    path.write_text((resources.files("chipfit.platform") / "builtin" / "ort_cpu.yaml").read_text())
    return path


@pytest.mark.parametrize("kind", PLATFORMS)
def test_a_platform_may_be_given_in_every_form_and_the_result_is_exact(net, kind, tmp_path):
    model, batch, data = net
    _, info = chipfit.pytorch_post_training_quantization(
        model, data, target_platform_capabilities=PLATFORMS[kind](tmp_path)
    )
    assert info.result.verify([batch]).exact
    assert info.result.export(tmp_path / "m.onnx").is_file()


def test_a_modelled_chip_is_a_platform_too(net):
    model, _, data = net
    tpc = get_target_platform_capabilities("pytorch", "imx500")
    for chip in (tpc, tpc.tp_model):
        _, info = chipfit.pytorch_post_training_quantization(model, data, target_platform_capabilities=chip)
        assert info.result.plan.tensors["head.weight"].grid.bits == 8


def test_layers_are_attached_to_operator_sets_by_the_configuration(net):
    from chipfit.target_platform import OperatorsSet, QuantizationConfigOptions, TargetPlatformModel

    model, _, data = net
    base = get_target_platform_capabilities("pytorch", "imx500").tp_model.default_qco
    narrow = QuantizationConfigOptions([base.base_config.clone_and_edit(activation_n_bits=4)])
    with TargetPlatformModel(base, name="mine") as chip:
        OperatorsSet("Strange", narrow)
    config = CoreConfig(QuantizationConfig(custom_tpc_opset_to_layer={"Strange": [nn.SiLU]}))
    for given in (chip, TargetPlatformCapabilities(chip)):
        _, info = chipfit.pytorch_post_training_quantization(
            model, data, core_config=config, target_platform_capabilities=given
        )
        assert info.result.plan.tensors["silu"].grid.bits == 4
    with pytest.raises(ConfigError, match="sets"):
        chipfit.pytorch_post_training_quantization(
            model, data, core_config=config, target_platform_capabilities="ort_cpu"
        )


def test_several_inputs_are_a_list_and_none_of_them_is_a_label():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 8), nn.Linear(8, 3)

        def forward(self, x, index):
            return self.linear(x + self.table(index))

    x, index = torch.randn(6, 8), torch.arange(6) % 5
    quantized, _ = chipfit.pytorch_post_training_quantization(Chosen(), lambda: iter([[x.numpy(), index.numpy()]]))
    assert quantized(x, index).shape == (6, 3)


def test_a_bypassed_model_comes_back_as_it_is(net):
    model, _, data = net
    got, info = chipfit.pytorch_post_training_quantization(
        model, data, core_config=CoreConfig(debug_config=DebugConfig(bypass=True))
    )
    assert got is model and info.result is None and info.final_resource_utilization is None


def test_known_layers_of_a_framework_info_are_the_only_ones_quantized(net):
    model, _, data = net
    only_linear = chipfit.FrameworkInfo([nn.Linear], [nn.ReLU, nn.SiLU], [])
    _, info = chipfit.pytorch_post_training_quantization(model, data, fw_info=only_linear)
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
def test_data_that_cannot_be_used_are_refused(net, data):
    with pytest.raises(DataError):
        chipfit.pytorch_post_training_quantization(net[0], data)


def test_a_batch_that_the_model_does_not_take_is_refused(net):
    with pytest.raises(ChipfitError, match="fails on the example"):
        chipfit.pytorch_post_training_quantization(net[0], lambda: iter([[np.zeros((1, 5, 8, 8))]]))


def test_unknown_options_are_refused_where_they_are_written():
    with pytest.raises(UnknownNameError, match="'weights_bias_correction'"):
        QuantizationConfig(weight_bias_correction=True)
    config = QuantizationConfig()
    with pytest.raises(UnknownNameError, match="'softmax_shift'"):
        config.softmaxshift = True
    for record in (CoreConfig, DebugConfig, core.MixedPrecisionQuantizationConfig, core.ResourceUtilization):
        with pytest.raises(UnknownNameError, match=record.__name__):
            record(nonsense=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("weights_bias_correction", 1),
        ("softmax_shift", "yes"),
        ("z_threshold", "3"),
        ("activation_error_method", "MSE"),
        ("l_p_value", None),
        ("shift_negative_ratio", True),
    ],
)
def test_values_of_the_wrong_kind_are_refused(option, value):
    with pytest.raises(ConfigError, match=option):
        QuantizationConfig(**{option: value})
    config = QuantizationConfig()
    with pytest.raises(ConfigError, match=option):
        setattr(config, option, value)


@pytest.mark.parametrize(
    "options",
    [
        {"shift_negative_ratio": -0.1},
        {"z_threshold": -1.0},
        {"l_p_value": 0},
        {"activation_bias_correction_threshold": -1.0},
    ],
)
def test_numbers_out_of_bounds_are_refused_before_any_data_are_read(net, options):
    def data():
        raise AssertionError("read")

    with pytest.raises(ConfigError, match="at least"):
        chipfit.pytorch_post_training_quantization(net[0], data, core_config=CoreConfig(QuantizationConfig(**options)))


@pytest.mark.parametrize(
    "config",
    [
        CoreConfig(QuantizationConfig(input_scaling=True)),
        CoreConfig(QuantizationConfig(shift_negative_params_search=True)),
        CoreConfig(debug_config=DebugConfig(analyze_similarity=True)),
        CoreConfig(debug_config=DebugConfig(simulate_scheduler=True)),
    ],
)
def test_what_is_not_there_yet_says_so(net, config):
    with pytest.raises(UnsupportedError, match="not|would"):
        chipfit.pytorch_post_training_quantization(net[0], net[2], core_config=config)


def test_limits_on_resources_start_a_search_of_widths(net):
    model, _, data = net
    plain = chipfit.pytorch_post_training_quantization(model, data)[1].result
    small = core.ResourceUtilization(weights_memory=0.6 * sum(w.numel() for w in model.parameters() if w.dim() > 1))
    mixed = core.CoreConfig(mixed_precision_config=core.MixedPrecisionQuantizationConfig())
    info = chipfit.pytorch_post_training_quantization(model, data, small, mixed)[1]
    assert info.result.report.quantized_bytes < plain.report.quantized_bytes
    chosen = info.result.plan.provenance["chosen"]
    assert min(chosen.values()) < 8 and all(info.result.plan[w].grid.bits == b for w, b in chosen.items())
    layers = [n for n, m in model.named_modules() if f"{n}.weight" in chosen]
    # of 8, 4 and 2 bits, in the order of the network
    assert info.mixed_precision_cfg == [(8, 4, 2).index(chosen[f"{n}.weight"]) for n in layers] != [0] * len(layers)
    takes, default = info.final_resource_utilization, core.pytorch_resource_utilization_data(model, data)
    assert takes.activation_memory == default.activation_memory and takes.bops < default.bops
    assert takes.total_memory == takes.weights_memory + takes.activation_memory < default.total_memory
    for limit in ({"activation_memory": 10}, {"total_memory": 10}):
        with pytest.raises(PlanError, match=next(iter(limit)).partition("_")[0]):
            chipfit.pytorch_post_training_quantization(model, data, core.ResourceUtilization(**limit))
    for option in ({"configuration_overwrite": [1]}, {"compute_distance_fn": max}):
        given = core.CoreConfig(mixed_precision_config=core.MixedPrecisionQuantizationConfig(**option))
        with pytest.raises(UnsupportedError, match=next(iter(option))):
            chipfit.pytorch_post_training_quantization(model, data, core_config=given)


def test_candidates_are_pairs_of_a_layers_weight_and_result_widest_first():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()
    result = chipfit.quantize(model, [torch.randn(8, 4)], "mqbench_academic", progress=False)
    (x,), (a, relu, _) = result.graph.inputs, (n.output for n in result.graph.nodes)
    widths = {"0.weight": (2, 4, 8), a: (4, 8), relu: (8,), x: (4, 8, 16), "2.weight": (2, 4)}
    chosen = {"0.weight": 4, a: 4, relu: 8, x: 8, "2.weight": 4}
    plan = replace(result.plan, provenance={"widths": widths, "chosen": chosen})
    # x: 16, 8, 4; the first layer: 8/8, 8/4, 4/8, 4/4, 2/8, 2/4; the activation has no choice; the last layer: 4, 2
    assert ptq.UserInformation(replace(result, plan=plan)).mixed_precision_cfg == [1, 3, 0]


def test_options_of_the_search_have_the_order_and_defaults_of_mct():
    assert list(vars(core.MixedPrecisionQuantizationConfig()).items()) == [
        ("compute_distance_fn", None),
        ("distance_weighting_method", core.MpDistanceWeighting.AVG),
        ("num_of_images", 32),
        ("configuration_overwrite", None),
        ("num_interest_points_factor", 1.0),
        ("use_hessian_based_scores", False),
        ("norm_scores", True),
        ("refine_mp_solution", True),
        ("metric_normalization_threshold", 1e10),
    ]
    for bad in ({"num_interest_points_factor": 0}, {"distance_weighting_method": "AVG"}, {"compute_distance_fn": 3}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            core.MixedPrecisionQuantizationConfig(**bad)


def test_arguments_of_the_wrong_kind_are_refused(net):
    model, _, data = net
    with pytest.raises(ConfigError, match="CoreConfig"):
        chipfit.pytorch_post_training_quantization(model, data, core_config=QuantizationConfig())
    with pytest.raises(ConfigError, match="ResourceUtilization"):
        chipfit.pytorch_post_training_quantization(model, data, 1000)
    with pytest.raises(PlatformError, match="platform is not understood"):
        chipfit.pytorch_post_training_quantization(model, data, target_platform_capabilities=8)
    with pytest.raises(UnknownNameError, match="imx500"):
        chipfit.pytorch_post_training_quantization(model, data, target_platform_capabilities="imx50")
    with pytest.raises(ConfigError, match="EditRule"):
        chipfit.pytorch_post_training_quantization(
            model, data, core_config=CoreConfig(debug_config=DebugConfig(network_editor=["conv"]))
        )
    with pytest.raises(ConfigError, match="network_editor"):
        DebugConfig(network_editor="conv")
