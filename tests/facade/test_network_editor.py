"""Rules about single layers: what filters mean, what actions change, what neither may say; bit widths by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.core import BitWidthConfig, CoreConfig, DebugConfig, QuantizationConfig, QuantizationErrorMethod
from chipfit.core.network_editor import (
    ACTIONS,
    ChangeCandidatesActivationQuantConfigAttr,
    ChangeCandidatesActivationQuantizationMethod,
    ChangeCandidatesWeightsQuantConfigAttr,
    ChangeCandidatesWeightsQuantizationMethod,
    ChangeFinalActivationQuantConfigAttr,
    ChangeFinalActivationQuantizationMethod,
    ChangeFinalWeightsQuantConfigAttr,
    ChangeFinalWeightsQuantizationMethod,
    ChangeQuantizationParamFunction,
    EditRule,
    NodeNameFilter,
    NodeNameScopeFilter,
    NodeTypeFilter,
    ReplaceLayer,
)
from chipfit.errors import ConfigError, ModelingError, PlanError, UnknownNameError, UnsupportedError
from chipfit.target_platform import (
    LayerFilterParams,
    OperatorsSet,
    QuantizationConfigOptions,
    QuantizationMethod,
    Signedness,
    TargetPlatformModel,
    get_target_platform_capabilities,
)
from tests.zoo import make

ALL = NodeTypeFilter(nn.Conv2d) | NodeTypeFilter(nn.Linear)  # every layer with weights


@pytest.fixture(scope="module")
def net():
    return make("residual")


def fit(net, *rules, platform=None, widths=None):
    """The chipfit result of the facade under these rules."""
    model, batch = net
    config = CoreConfig(
        QuantizationConfig(weights_bias_correction=False), debug_config=DebugConfig(network_editor=list(rules))
    )
    config.bit_width_config = widths or BitWidthConfig()
    _, info = chipfit.pytorch_post_training_quantization(
        model, lambda: iter([[batch]]), core_config=config, target_platform_capabilities=platform
    )
    return info.result


def differences(a, b):
    """Tensors that two results store differently."""
    same = lambda s, t: (
        (s.format, s.grid, s.axis) == (t.format, t.grid, t.axis) and (s.grid is None or torch.equal(s.scale, t.scale))
    )
    return {n for n in {*a.plan.tensors, *b.plan.tensors} if not same(a.plan.tensors[n], b.plan.tensors[n])}


# ---------------------------------------------------------------- filters

CONVS = {"stem.0", "a.0", "b.0"}


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        (NodeTypeFilter(nn.Conv2d), CONVS),
        (NodeTypeFilter(F.conv2d), CONVS),
        (NodeTypeFilter("Conv2D"), CONVS),
        (NodeTypeFilter(LayerFilterParams(nn.Conv2d, in_channels=3)), {"stem.0"}),
        (NodeNameFilter("a.0"), {"a.0"}),
        (NodeNameFilter("a_0"), {"a.0"}),
        (NodeNameFilter("linear"), {"head"}),
        (NodeNameScopeFilter("stem"), {"stem.0", "stem.2"}),
        (NodeTypeFilter(nn.Conv2d) & NodeNameScopeFilter("a."), {"a.0"}),
        (NodeTypeFilter(nn.Conv2d) & ~NodeNameFilter("a.0"), {"stem.0", "b.0"}),
        (NodeNameFilter("a.0") | NodeNameFilter("b.0") | NodeNameFilter("head"), {"a.0", "b.0", "head"}),
        ((NodeNameFilter("a.0") | NodeTypeFilter(nn.Linear)) & ~NodeNameFilter("head"), {"a.0"}),
    ],
    ids=range(12),  # the text of sets and functions differs from process to process
)
def test_a_filter_means_these_layers(net, wanted, layers):
    model, batch = net
    graph = chipfit.lint(model, batch).graph
    assert {n.layer for n in graph.nodes if wanted.match(n)} == layers


def test_a_filter_of_an_operator_that_no_module_has(net):
    model, batch = net
    graph = chipfit.lint(model, batch).graph
    assert [n.op for n in graph.nodes if NodeTypeFilter(torch.add).match(n)] == ["Add"]


@pytest.mark.parametrize(
    "wrong",
    [
        NodeNameFilter("haed"),
        NodeNameScopeFilter("haed"),
        NodeTypeFilter(nn.GELU),
        NodeTypeFilter(nn.Conv2d) & NodeTypeFilter(nn.ReLU),
    ],
)
def test_a_filter_that_means_nothing_lists_near_names(net, wrong):
    with pytest.raises(UnknownNameError) as e:
        fit(net, EditRule(wrong, ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=4)))
    if "haed" in str(wrong):
        assert "'head'" in str(e.value)


def test_filters_are_checked_when_they_are_made():
    for wrong in (None, "", 3):
        with pytest.raises(ConfigError, match="name"):
            NodeNameFilter(wrong)
        with pytest.raises(ConfigError, match="name"):
            NodeNameScopeFilter(wrong)
    with pytest.raises(ModelingError):
        NodeTypeFilter(len)
    with pytest.raises(TypeError):
        NodeNameFilter("a") & "b"


# ---------------------------------------------------------------- actions


def test_bits_of_weights(net):
    plain = fit(net)
    result = fit(net, EditRule(NodeNameFilter("a.0"), ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=4)))
    assert differences(plain, result) == {"a.0.weight"} and result.plan.tensors["a.0.weight"].grid.bits == 4


def test_weights_left_in_float(net):
    plain = fit(net)
    result = fit(
        net, EditRule(NodeNameFilter("a.0"), ChangeCandidatesWeightsQuantConfigAttr(enable_weights_quantization=False))
    )
    assert differences(plain, result) == {"a.0.weight"} and not result.plan.tensors["a.0.weight"].quantized
    assert "float" in result.plan.tensors["a.0.weight"].why


def test_results_left_in_float(net):
    plain = fit(net)
    result = fit(
        net,
        EditRule(NodeTypeFilter(nn.Linear), ChangeFinalActivationQuantConfigAttr(enable_activation_quantization=False)),
    )
    assert differences(plain, result) == {"linear"}
    inner = fit(
        net, EditRule(NodeNameFilter("a.2"), ChangeFinalActivationQuantConfigAttr(enable_activation_quantization=False))
    )
    assert differences(plain, inner) == {"relu_1"}
    with torch.no_grad():
        assert inner.model(net[1]).isfinite().all()


@pytest.mark.parametrize(
    "action",
    [
        ChangeCandidatesWeightsQuantConfigAttr(weights_quantization_method=QuantizationMethod.POWER_OF_TWO),
        ChangeCandidatesWeightsQuantizationMethod(QuantizationMethod.POWER_OF_TWO),
        ChangeFinalWeightsQuantizationMethod(QuantizationMethod.POWER_OF_TWO),
    ],
    ids=lambda a: type(a).__name__,
)
def test_power_of_two_thresholds_for_weights(net, action):
    t = fit(net, EditRule(NodeNameFilter("head"), action)).plan.tensors["head.weight"]
    assert torch.equal(torch.log2(t.scale), torch.log2(t.scale).round()) and t.axis == 0


@pytest.mark.parametrize(
    "action", [ChangeCandidatesActivationQuantizationMethod, ChangeFinalActivationQuantizationMethod]
)
@pytest.mark.parametrize("method", [QuantizationMethod.SYMMETRIC, QuantizationMethod.POWER_OF_TWO])
def test_an_affine_grid_may_be_narrowed_to_a_symmetric_one_and_stays_exact(net, action, method):
    result = fit(net, EditRule(NodeTypeFilter(nn.Linear), action(method)), platform="ort_cpu")
    t = result.plan.tensors["linear"]
    assert int(t.zero_point) in (0, 128) and t.grid.pot == (method is QuantizationMethod.POWER_OF_TWO)
    assert int(fit(net, platform="ort_cpu").plan.tensors["linear"].zero_point) not in (0, 128)
    assert result.verify([net[1]]).exact


def test_one_threshold_for_all_channels(net):
    result = fit(
        net,
        EditRule(NodeNameFilter("b.0"), ChangeCandidatesWeightsQuantConfigAttr(weights_per_channel_threshold=False)),
        platform="ort_cpu",
    )
    t = result.plan.tensors["b.0.weight"]
    assert t.axis is None and t.scale.dim() == 0
    assert result.verify([net[1]]).exact


def test_error_methods_of_one_layer(net):
    none = QuantizationErrorMethod.NOCLIPPING
    result = fit(
        net,
        EditRule(NodeNameFilter("a.0"), ChangeCandidatesWeightsQuantConfigAttr(weights_error_method=none)),
        EditRule(
            NodeNameFilter("head"),
            ChangeCandidatesWeightsQuantConfigAttr(weights_error_method=QuantizationErrorMethod.LP, l_p_value=3),
        ),
        EditRule(NodeTypeFilter(torch.add), ChangeCandidatesActivationQuantConfigAttr(activation_error_method=none)),
    )
    t = result.plan.tensors
    w = result.graph.weights["a.0.weight"].detach().flatten(1)
    needed = torch.maximum(-w.amin(1) / 128, w.amax(1) / 127)
    torch.testing.assert_close(t["a.0.weight"].scale, needed)
    assert t["head.weight"].origin == "lp(p=3) over the weights"
    assert sorted(n for n, x in t.items() if x.origin.startswith("no_clipping over 1")) == ["relu_"]


def test_41_signedness_is_overridden(net):
    plain = fit(net).plan.tensors["relu_1"]
    result = fit(
        net, EditRule(NodeNameFilter("a.2"), ChangeFinalActivationQuantConfigAttr(signedness=Signedness.SIGNED))
    )
    assert not plain.grid.signed and result.plan.tensors["relu_1"].grid.signed


def test_outliers_of_one_layer(net):
    model, batch = net
    spiked = batch.clone()
    spiked[0, 0, 0, 0] = 500.0
    none = ChangeCandidatesActivationQuantConfigAttr(activation_error_method=QuantizationErrorMethod.NOCLIPPING)
    cut = ChangeCandidatesActivationQuantConfigAttr(z_threshold=4.0)
    where = NodeNameFilter("stem.2")
    kept, dropped = (
        fit((model, spiked), EditRule(where, none)),
        fit((model, spiked), EditRule(where, none), EditRule(where, cut)),
    )
    assert float(dropped.plan.tensors["relu"].scale) < float(kept.plan.tensors["relu"].scale) / 4


def test_ranges_by_a_function_of_the_users_own(net):
    seen = []

    def twice(sample, grid):
        seen.append((sample.low.shape, grid.bits))
        return {"threshold": 2 * sample.high}

    rule = EditRule(NodeNameFilter("a.0"), ChangeQuantizationParamFunction(weights_quantization_params_fn=twice))
    result = fit(net, rule)
    w = result.graph.weights["a.0.weight"].detach().flatten(1)
    torch.testing.assert_close(result.plan.tensors["a.0.weight"].scale, 2 * w.amax(1) / 128)
    assert seen == [((8,), 8)] and result.plan.tensors["a.0.weight"].origin == "twice over the weights"
    pair = lambda sample, grid: {"range_min": -1.0, "range_max": 3.0}
    result = fit(net, EditRule(NodeTypeFilter(nn.Linear), ChangeQuantizationParamFunction(pair)), platform="ort_cpu")
    assert (
        float(result.plan.tensors["linear"].scale) == pytest.approx(4 / 255)
        and int(result.plan.tensors["linear"].zero_point) == 64
    )
    assert result.verify([net[1]]).exact
    named = fit(net, EditRule(NodeTypeFilter(nn.Linear), ChangeQuantizationParamFunction("percentile")))
    assert named.plan.tensors["linear"].origin.startswith("percentile")


def test_a_function_that_returns_no_range_is_told_so(net):
    for wrong in (
        lambda s, g: None,
        lambda s, g: {"thresh": 1.0},
        lambda s, g: {"threshold": float("nan")},
        lambda s, g: {"range_min": 0.0},
    ):
        with pytest.raises(ConfigError, match="must return a range"):
            fit(
                net,
                EditRule(NodeNameFilter("head"), ChangeQuantizationParamFunction(weights_quantization_params_fn=wrong)),
            )


def test_final_rules_win_and_among_equals_the_later_one(net):
    bits = lambda result: {n: t.grid.bits for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}
    result = fit(
        net,
        EditRule(NodeNameFilter("a.0"), ChangeFinalWeightsQuantConfigAttr(weights_n_bits=2)),
        EditRule(ALL, ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=8)),
        EditRule(NodeTypeFilter(nn.Conv2d), ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=4)),
    )
    assert bits(result) == {"stem.0.weight": 4, "a.0.weight": 2, "b.0.weight": 4, "head.weight": 8}
    widths = BitWidthConfig()
    widths.set_manual_weights_bit_width(ALL, 2)
    result = fit(
        net, EditRule(NodeNameFilter("head"), ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=4)), widths=widths
    )
    assert bits(result) == {"stem.0.weight": 2, "a.0.weight": 2, "b.0.weight": 2, "head.weight": 4}


def test_rules_edit_a_result_as_well(net):
    from chipfit.core.network_editor import to_overrides

    plain = fit(net)
    edited = plain.edit(
        to_overrides([EditRule(NodeNameFilter("a.0"), ChangeFinalWeightsQuantConfigAttr(weights_n_bits=4))])
    )
    assert differences(plain, edited) == {"a.0.weight"}
    again = plain.edit([(NodeNameFilter("a.0"), {"weight_rule": "no_clipping"})])
    assert differences(plain, again) == {"a.0.weight"}


def test_a_layer_is_replaced_by_another_and_calibrated_as_that(net):
    model, batch = net

    def halved(weights, **attributes):
        assert attributes["in_features"] == 8 and attributes["bias"] is True
        return {k: v.numpy() / 2 for k, v in weights.items()}, attributes

    plain = fit(net, platform="ort_cpu")
    result = fit(net, EditRule(NodeTypeFilter(nn.Linear), ReplaceLayer(nn.Linear, halved)), platform="ort_cpu")
    torch.testing.assert_close(result.graph.weights["head.weight"], model.head.weight.detach() / 2)
    torch.testing.assert_close(result.plan.tensors["linear"].scale, plain.plan.tensors["linear"].scale / 2)
    assert result.verify([batch]).exact
    result = fit(
        net, EditRule(NodeNameScopeFilter("a."), ReplaceLayer(nn.Identity, lambda weights, **attributes: ({}, {})))
    )
    assert [n.layer for n in result.graph.nodes if n.op == "Conv2D"] == ["stem.0", "b.0"]


def test_what_cannot_be_replaced_says_why(net):
    as_it_is = lambda weights, **attributes: (weights, attributes)
    with pytest.raises(UnknownNameError, match="'head'"):
        fit(net, EditRule(NodeNameFilter("heda"), ReplaceLayer(nn.Identity, as_it_is)))
    with pytest.raises(ConfigError, match="'head' cannot become a Conv2d"):
        fit(net, EditRule(NodeNameFilter("head"), ReplaceLayer(nn.Conv2d, as_it_is)))
    with pytest.raises(ConfigError, match="'head' cannot become"):
        fit(net, EditRule(NodeNameFilter("head"), ReplaceLayer(nn.Linear, lambda weights, **attributes: None)))


# ---------------------------------------------------------------- what actions may not say


@pytest.mark.parametrize("action", [a for a in ACTIONS if a.__name__.endswith("Attr")], ids=lambda a: a.__name__)
def test_unknown_attributes_are_refused_with_the_allowed_ones(action):
    with pytest.raises(UnknownNameError, match="n_bits|error_method|quantization_method"):
        action(n_bitz=4)
    with pytest.raises(ConfigError, match="n_bits"):
        action()


@pytest.mark.parametrize(
    ("attribute", "value"),
    [
        ("weights_n_bits", "4"),
        ("weights_n_bits", 0),
        ("weights_n_bits", True),
        ("enable_weights_quantization", "no"),
        ("weights_quantization_method", "POWER_OF_TWO"),
        ("weights_error_method", "MSE"),
        ("weights_per_channel_threshold", 1),
        ("activation_n_bits", None),
        ("enable_activation_quantization", 0),
        ("activation_quantization_method", 3),
        ("activation_error_method", 1),
        ("signedness", "SIGNED"),
        ("z_threshold", "3"),
        ("z_threshold", -1.0),
    ],
)
def test_values_of_the_wrong_kind_are_refused(attribute, value):
    action = (
        ChangeCandidatesWeightsQuantConfigAttr if "weights" in attribute else ChangeCandidatesActivationQuantConfigAttr
    )
    with pytest.raises((ConfigError, PlanError), match="Allowed"):
        action(**{attribute: value})


def test_other_mistakes_of_rules():
    with pytest.raises(ConfigError, match="LP"):
        ChangeCandidatesWeightsQuantConfigAttr(l_p_value=3, weights_error_method=QuantizationErrorMethod.MSE)
    with pytest.raises(ConfigError, match="kernel"):
        ChangeCandidatesWeightsQuantConfigAttr("bias", weights_n_bits=4)
    for wrong in ({}, {"activation_quantization_params_fn": 3}):
        with pytest.raises(ConfigError, match="function"):
            ChangeQuantizationParamFunction(**wrong)
    with pytest.raises(UnknownNameError, match="percentile"):
        ChangeQuantizationParamFunction("percntile")
    for wrong in ((nn.Identity, None), ("Identity", lambda weights, **attributes: (weights, attributes))):
        with pytest.raises(ConfigError, match="ReplaceLayer"):
            ReplaceLayer(*wrong)
    with pytest.raises(ConfigError, match="filter"):
        EditRule("conv", ChangeFinalWeightsQuantConfigAttr(weights_n_bits=4))
    with pytest.raises(ConfigError, match="ChangeFinalWeightsQuantConfigAttr"):
        EditRule(NodeNameFilter("conv"), "4 bits")


def test_what_a_chip_cannot_hold_is_refused_with_what_it_can(net):
    wider = ChangeCandidatesWeightsQuantizationMethod(QuantizationMethod.UNIFORM)
    with pytest.raises(UnsupportedError, match="symmetric, power_of_two"):
        fit(net, EditRule(NodeNameFilter("head"), wider))
    with pytest.raises(UnsupportedError, match="2, 4, 8 bits"):
        fit(net, EditRule(NodeNameFilter("head"), ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=9)))
    with pytest.raises(UnsupportedError, match="tensor"):
        fit(
            net,
            EditRule(
                NodeNameFilter("head"), ChangeCandidatesWeightsQuantConfigAttr(weights_per_channel_threshold=True)
            ),
            platform="qnnpack",
        )
    with pytest.raises(PlanError, match="no weights"):
        fit(net, EditRule(NodeTypeFilter(nn.ReLU), ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=4)))


# ---------------------------------------------------------------- bit widths


def test_bit_widths_by_hand(net):
    widths = BitWidthConfig()
    widths.set_manual_weights_bit_width([NodeTypeFilter(nn.Conv2d), NodeNameFilter("head")], [4, 2])
    widths.set_manual_weights_bit_width(NodeNameFilter("a.0"), 8, "kernel")
    result = fit(net, widths=widths)
    bits = {n: t.grid.bits for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}
    assert bits == {"stem.0.weight": 4, "a.0.weight": 8, "b.0.weight": 4, "head.weight": 2}


def test_bit_widths_of_results_by_hand(net):
    chip = get_target_platform_capabilities("pytorch", "imx500", "v4")
    widths = BitWidthConfig()
    widths.set_manual_activation_bit_width(NodeTypeFilter(torch.add), 16)
    result = fit(net, platform=chip, widths=widths)
    assert result.plan.tensors["relu_"].grid.bits == 16  # the addition and its ReLU are one kernel
    assert result.plan.tensors["relu_1"].grid.bits == 8


@pytest.mark.parametrize(
    ("kind", "bits", "allowed"), [("weights", 3, "2, 4, 8"), ("weights", 16, "2, 4, 8"), ("activation", 16, "8")]
)
def test_a_width_that_is_no_candidate_is_refused_with_the_candidates(net, kind, bits, allowed):
    widths = BitWidthConfig()
    getattr(widths, f"set_manual_{kind}_bit_width")(NodeNameFilter("a.0"), bits)
    with pytest.raises(UnsupportedError, match=f"{allowed} bits"):
        fit(net, widths=widths)


def test_a_width_that_another_operator_of_the_chip_has_is_no_candidate():
    chip = chipfit.load_platform("ethos_u")  # convolutions take 4-bit weights, fully connected layers do not
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2)).eval(), torch.randn(4, 3, 2, 2)
    widths = BitWidthConfig()
    widths.set_manual_weights_bit_width(NodeTypeFilter(nn.Linear), 4)
    with pytest.raises(UnsupportedError, match="8 bits"):
        fit(net, platform=chip, widths=widths)


def test_mistakes_about_widths_are_refused_where_they_are_made(net):
    widths, conv, head = BitWidthConfig(), NodeTypeFilter(nn.Conv2d), NodeNameFilter("head")
    for set_width in (widths.set_manual_weights_bit_width, widths.set_manual_activation_bit_width):
        for filters, bits in (
            ([conv, head], [4, 4, 8]),
            ([], 4),
            ("conv", 4),
            (conv, "4"),
            (conv, 0),
            (conv, True),
            (conv, []),
        ):
            with pytest.raises(ConfigError):
                set_width(filters, bits)
    with pytest.raises(ConfigError, match="kernel"):
        widths.set_manual_weights_bit_width(conv, 4, "bias")
    with pytest.raises(ConfigError, match="attributes"):
        widths.set_manual_weights_bit_width([conv, head, conv], 4, ["kernel", "kernel"])
    assert widths.choices == []
    widths.set_manual_weights_bit_width(NodeNameFilter("haed"), 4)
    with pytest.raises(UnknownNameError, match="'head'"):
        fit(net, widths=widths)


# ---------------------------------------------------------------- what users of MCT count on


def test_47_only_the_last_node_of_a_fused_group_has_a_quantizer(net):
    result = fit(net)
    inner = {n for group in result.plan.groups for n in group[:-1]}
    made = {n.name: n.output for n in result.graph.nodes}
    assert inner and not any(result.plan.quantized(made[n]) for n in inner)
    assert all(result.plan.quantized(made[group[-1]]) for group in result.plan.groups)


def test_47_a_reader_that_takes_8_bit_leaves_no_16_bit_candidates_to_its_producer():
    """The chip's convolutions would rather write 16 bit; where a layer that reads 8 bit follows, they write 8."""
    base = get_target_platform_capabilities("pytorch", "imx500").tp_model.default_qco
    wide = base.base_config.clone_and_edit(activation_n_bits=16)
    with TargetPlatformModel(base, name="mixed") as chip:
        OperatorsSet("Conv", QuantizationConfigOptions([wide, base.base_config], wide))
        OperatorsSet("FullyConnected", base.clone_and_edit(supported_input_activation_n_bits=8))
        OperatorsSet("Relu", base.clone_and_edit(supported_input_activation_n_bits=(8, 16)))
    x = torch.randn(4, 3, 2, 2)
    relu, linear = (
        nn.Sequential(nn.Conv2d(3, 4, 2), *more).eval() for more in ((nn.ReLU(),), (nn.Flatten(), nn.Linear(4, 2)))
    )
    assert fit((relu, x), platform=chip).plan.tensors["conv2d"].grid.bits == 16
    assert fit((linear, x), platform=chip).plan.tensors["conv2d"].grid.bits == 8
    widths = BitWidthConfig()
    widths.set_manual_activation_bit_width(NodeTypeFilter(nn.Conv2d), 16)
    with pytest.raises(UnsupportedError, match="8 bits"):
        fit((linear, x), platform=chip, widths=widths)
