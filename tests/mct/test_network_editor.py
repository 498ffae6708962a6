"""The network editor: filters of layers, actions on them and their errors; bit widths by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit import target_platform as tp
from chipfit.core import BitWidthConfig, CoreConfig, DebugConfig, QuantizationConfig, QuantizationErrorMethod
from chipfit.core import network_editor as ne
from chipfit.errors import ConfigError, ModelingError, PlanError, UnknownNameError, UnsupportedError
from chipfit.trainable_infrastructure import pytorch_inferable_quantizers as iq
from tests.build import model_of, sequential
from tests.zoo import make

BY_NAME = ne.NodeNameFilter, ne.NodeNameScopeFilter
CONV, LINEAR = ne.NodeTypeFilter(nn.Conv2d), ne.NodeTypeFilter(nn.Linear)
POT, UNIFORM = tp.QuantizationMethod.POWER_OF_TWO, tp.QuantizationMethod.UNIFORM
LUT = tp.QuantizationMethod.LUT_POT_QUANTIZER
KINDS = {LUT: iq.WeightsLUTPOTInferableQuantizer, UNIFORM: iq.WeightsUniformInferableQuantizer}
METHOD = QuantizationErrorMethod
FEW = ne.ChangeCandidatesWeightsQuantConfigAttr(weights_n_bits=2)


@pytest.fixture(scope="module")
def net():
    return make("residual")


@pytest.fixture(scope="module")
def plain(net):
    return fit(net)


def rule(where, action, **attributes):
    """Return a rule about a layer of a name, or about those of a filter, with an action or the class of one."""
    chosen = ne.NodeNameFilter(where) if isinstance(where, str) else where
    return ne.EditRule(chosen, action(**attributes) if isinstance(action, type) else action)


def weights(where, **attributes):
    return rule(where, ne.ChangeCandidatesWeightsQuantConfigAttr, **attributes)


def results(where, **attributes):
    return rule(where, ne.ChangeCandidatesActivationQuantConfigAttr, **attributes)


def fit(net, *rules, platform=None, widths=None):
    """Return the result of the facade under these rules."""
    model, batch = net
    debug = DebugConfig(network_editor=list(rules))
    config = CoreConfig(QuantizationConfig(weights_bias_correction=False), debug_config=debug)
    config.bit_width_config = widths or BitWidthConfig()
    options = {"core_config": config, "target_platform_capabilities": platform}
    return chipfit.pytorch_post_training_quantization(model, lambda: iter([[batch]]), **options)[1].result


def differences(a, b):
    """Return the names of tensors that two results store differently."""

    def same(s, t):
        alike = (s.format, s.grid, s.axis) == (t.format, t.grid, t.axis)
        return alike and (s.grid is None or torch.equal(s.scale, t.scale))

    return {n for n in {*a.plan.tensors, *b.plan.tensors} if not same(a.plan.tensors[n], b.plan.tensors[n])}


def bits(result):
    return {n: t.grid.bits for n, t in result.plan.tensors.items() if t.role == "weight" and t.quantized}


# ---------------------------------------------------------------- filters

CONVS = {"stem.0", "a.0", "b.0"}


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        (ne.NodeTypeFilter(nn.Conv2d), CONVS),
        (ne.NodeTypeFilter(F.conv2d), CONVS),
        (ne.NodeTypeFilter("Conv2D"), CONVS),
        (ne.NodeTypeFilter(tp.LayerFilterParams(nn.Conv2d, in_channels=3)), {"stem.0"}),
        (ne.NodeNameFilter("a.0"), {"a.0"}),
        (ne.NodeNameFilter("a_0"), {"a.0"}),
        (ne.NodeNameFilter("linear"), {"head"}),
        (ne.NodeNameScopeFilter("stem"), {"stem.0", "stem.2"}),
        (ne.NodeTypeFilter(nn.Conv2d) & ne.NodeNameScopeFilter("a."), {"a.0"}),
        (ne.NodeTypeFilter(nn.Conv2d) & ~ne.NodeNameFilter("a.0"), {"stem.0", "b.0"}),
        (ne.NodeNameFilter("a.0") | ne.NodeNameFilter("b.0") | ne.NodeNameFilter("head"), {"a.0", "b.0", "head"}),
        ((ne.NodeNameFilter("a.0") | ne.NodeTypeFilter(nn.Linear)) & ~ne.NodeNameFilter("head"), {"a.0"}),
    ],
    ids=range(12),  # the text of sets and functions differs from process to process
)
def test_a_filter_selects_layers(plain, wanted, layers):
    assert {n.layer for n in plain.graph.nodes if wanted.match(n)} == layers


@pytest.mark.parametrize(
    "wrong", [*(kind("haed") for kind in BY_NAME), ne.NodeTypeFilter(nn.GELU), CONV & ne.NodeTypeFilter(nn.ReLU)]
)
def test_a_filter_without_layers_lists_similar_names(net, wrong):
    with pytest.raises(UnknownNameError) as e:
        fit(net, weights(wrong, weights_n_bits=4))
    assert "haed" not in str(wrong) or "'head'" in str(e.value)


def test_filters_are_validated_on_construction():
    for wrong in (None, "", 3):
        for kind in BY_NAME:
            with pytest.raises(ConfigError, match="name"):
                kind(wrong)
    with pytest.raises(ModelingError):
        ne.NodeTypeFilter(len)
    with pytest.raises(TypeError):
        ne.NodeNameFilter("a") & "b"


# ---------------------------------------------------------------- actions


def test_disabled_weights_stay_in_float(net, plain):
    result = fit(net, weights("a.0", enable_weights_quantization=False))
    assert differences(plain, result) == {"a.0.weight"} and not result.plan.tensors["a.0.weight"].quantized
    assert "float" in result.plan.tensors["a.0.weight"].why


WEIGHTS = ne.ChangeCandidatesWeightsQuantConfigAttr, ne.ChangeFinalWeightsQuantConfigAttr
RESULTS = ne.ChangeCandidatesActivationQuantConfigAttr, ne.ChangeFinalActivationQuantConfigAttr
METHODS_OF_WEIGHTS = ne.ChangeCandidatesWeightsQuantizationMethod, ne.ChangeFinalWeightsQuantizationMethod
METHODS_OF_RESULTS = ne.ChangeCandidatesActivationQuantizationMethod, ne.ChangeFinalActivationQuantizationMethod


@pytest.mark.parametrize(
    ("actions", "attributes", "choices"),
    [
        (WEIGHTS, {"weights_n_bits": 4}, {"bits": 4}),
        (WEIGHTS, {"enable_weights_quantization": False}, {"bits": "float"}),
        (WEIGHTS, {"enable_weights_quantization": True}, {"bits": None}),
        (WEIGHTS, {"weights_per_channel_threshold": False}, {"per": "tensor"}),
        (WEIGHTS, {"weights_per_channel_threshold": True}, {"per": "channel"}),
        (WEIGHTS, {"weights_error_method": METHOD.LP, "l_p_value": 3}, {"weight_rule": "lp(p=3)"}),
        (RESULTS, {"activation_n_bits": 16}, {"activation_bits": 16}),
        (RESULTS, {"enable_activation_quantization": False}, {"activation_bits": "float"}),
        (RESULTS, {"activation_quantization_method": UNIFORM}, {"method": "uniform"}),
        (RESULTS, {"activation_error_method": METHOD.MAE}, {"rule": "mae"}),
        (RESULTS, {"z_threshold": 4.0}, {"z_threshold": 4.0}),
        (RESULTS, {"signedness": tp.Signedness.SIGNED}, {"signed": True}),
        (RESULTS, {"signedness": tp.Signedness.UNSIGNED}, {"signed": False}),
        (METHODS_OF_WEIGHTS, {"weights_quantization_method": POT}, {"weight_method": "power_of_two"}),
        (METHODS_OF_RESULTS, {"activation_quantization_method": POT}, {"method": "power_of_two"}),
    ],
    ids=range(15),
)
def test_an_action_is_a_table_of_overrides(actions, attributes, choices):
    candidates, final = (action(**attributes) for action in actions)
    assert candidates.choices == final.choices == choices
    assert final.final and not candidates.final


def test_a_changed_grid_stays_exact(net):
    method = rule(LINEAR, ne.ChangeFinalActivationQuantizationMethod(POT))
    result = fit(net, method, weights("b.0", weights_per_channel_threshold=False), platform="ort_cpu")
    t, w = result.plan.tensors["linear"], result.plan.tensors["b.0.weight"]
    assert int(t.zero_point) in (0, 128) and t.grid.pot and w.axis is None and result.verify([net[1]]).exact


def test_error_methods_of_single_layers(net):
    lp = {"weights_error_method": METHOD.LP, "l_p_value": 3}
    add = results(ne.NodeTypeFilter(torch.add), activation_error_method=METHOD.NOCLIPPING)
    result = fit(net, weights("a.0", weights_error_method=METHOD.NOCLIPPING), weights("head", **lp), add)
    t = result.plan.tensors
    w = result.graph.weights["a.0.weight"].detach().flatten(1)
    torch.testing.assert_close(t["a.0.weight"].scale, w.abs().amax(1) / 128)
    assert t["head.weight"].origin == "lp(p=3) over the weights"
    assert sorted(n for n, x in t.items() if x.origin.startswith("no_clipping(expand=False) over 1")) == ["relu_"]


def test_outliers_of_one_layer(net):
    spiked = net[1].clone()
    spiked[0, 0, 0, 0] = 500.0
    rules = results("stem.2", activation_error_method=METHOD.NOCLIPPING), results("stem.2", z_threshold=4.0)
    kept, dropped = (float(fit((net[0], spiked), *rules[:n]).plan.tensors["relu"].scale) for n in (1, 2))
    assert dropped < kept / 4


def ranges(where, *functions, **more):
    return rule(where, ne.ChangeQuantizationParamFunction(*functions, **more))


def test_a_function_of_the_user_computes_ranges(net):
    calls = []

    def twice(sample, grid):
        calls.append((sample.low.shape, grid.bits))
        return {"threshold": 2 * sample.high}

    result = fit(net, ranges("a.0", weights_quantization_params_fn=twice))
    w = result.graph.weights["a.0.weight"].detach().flatten(1)
    torch.testing.assert_close(result.plan.tensors["a.0.weight"].scale, 2 * w.amax(1) / 128)
    assert calls == [((8,), 8)] and result.plan.tensors["a.0.weight"].origin == "twice over the weights"
    pair = lambda sample, grid: {"range_min": -1.0, "range_max": 3.0}
    result = fit(net, ranges(LINEAR, None, pair), platform="ort_cpu")
    t = result.plan.tensors["linear"]
    assert float(t.scale) == pytest.approx(4 / 255) and int(t.zero_point) == 64
    assert result.verify([net[1]]).exact
    named = fit(net, ranges(LINEAR, activation_quantization_params_fn="percentile"))
    assert named.plan.tensors["linear"].origin.startswith("percentile")


@pytest.mark.parametrize("wrong", [None, {"thresh": 1.0}, {"threshold": float("nan")}, {"range_min": 0.0}])
def test_a_function_must_return_a_range(net, wrong):
    with pytest.raises(ConfigError, match="must return a range"):
        fit(net, ranges("head", weights_quantization_params_fn=lambda s, g: wrong))


def test_final_rules_take_precedence_and_among_equals_the_last_one(net):
    final = rule("a.0", ne.ChangeFinalWeightsQuantConfigAttr, weights_n_bits=2)
    result = fit(net, final, weights(CONV | LINEAR, weights_n_bits=8), weights(CONV, weights_n_bits=4))
    assert bits(result) == {"stem.0.weight": 4, "a.0.weight": 2, "b.0.weight": 4, "head.weight": 8}
    widths = BitWidthConfig()
    widths.set_manual_weights_bit_width(CONV | LINEAR, 2)
    result = fit(net, weights("head", weights_n_bits=4), widths=widths)
    assert bits(result) == {"stem.0.weight": 2, "a.0.weight": 2, "b.0.weight": 2, "head.weight": 4}


def test_rules_edit_a_result_as_well(plain):
    four = ne.to_overrides([rule("a.0", ne.ChangeFinalWeightsQuantConfigAttr, weights_n_bits=4)])
    for overrides in (four, [(ne.NodeNameFilter("a.0"), {"weight_rule": "no_clipping"})]):
        assert differences(plain, plain.edit(overrides)) == {"a.0.weight"}


def test_a_layer_is_replaced_before_calibration(net):
    def halved(weights, **attributes):
        assert attributes["in_features"] == 8 and attributes["bias"] is True
        return {k: v.numpy() / 2 for k, v in weights.items()}, attributes

    whole = fit(net, platform="tflite_int8")
    result = fit(net, rule(LINEAR, ne.ReplaceLayer(nn.Linear, halved)), platform="tflite_int8")
    torch.testing.assert_close(result.graph.weights["head.weight"], net[0].head.weight.detach() / 2)
    torch.testing.assert_close(result.plan.tensors["linear"].scale, whole.plan.tensors["linear"].scale / 2)
    assert result.verify([net[1]]).exact
    removed = ne.ReplaceLayer(nn.Identity, lambda weights, **attributes: ({}, {}))
    result = fit(net, rule(ne.NodeNameScopeFilter("a."), removed))
    assert [n.layer for n in result.graph.nodes if n.op == "Conv2D"] == ["stem.0", "b.0"]


def unchanged(weights, **attributes):
    return weights, attributes


@pytest.mark.parametrize(
    ("where", "action", "error", "says"),
    [
        ("heda", ne.ReplaceLayer(nn.Identity, unchanged), UnknownNameError, "'head'"),
        ("head", ne.ReplaceLayer(nn.Conv2d, unchanged), ConfigError, "'head' cannot become a Conv2d"),
        ("head", ne.ReplaceLayer(nn.Linear, lambda weights, **_: None), ConfigError, "'head' cannot become"),
    ],
)
def test_an_impossible_replacement_is_explained(net, where, action, error, says):
    with pytest.raises(error, match=says):
        fit(net, rule(where, action))


# ---------------------------------------------------------------- errors of actions


@pytest.mark.parametrize("action", [a for a in ne.ACTIONS if a.__name__.endswith("Attr")], ids=lambda a: a.__name__)
def test_unknown_attributes_are_refused_with_the_allowed_ones(action):
    with pytest.raises(UnknownNameError, match="n_bits|error_method|quantization_method"):
        action(n_bitz=4)
    with pytest.raises(ConfigError, match="n_bits"):
        action()


@pytest.mark.parametrize(
    ("attribute", "values"),
    [
        ("weights_n_bits", ["4", 0, True]),
        ("enable_weights_quantization", ["no"]),
        ("weights_quantization_method", ["POWER_OF_TWO"]),
        ("weights_error_method", ["MSE"]),
        ("weights_per_channel_threshold", [1]),
        ("activation_n_bits", [None]),
        ("enable_activation_quantization", [0]),
        ("activation_quantization_method", [3]),
        ("activation_error_method", [1]),
        ("signedness", ["SIGNED"]),
        ("z_threshold", ["3", -1.0]),
    ],
)
def test_values_of_the_wrong_type_are_refused(attribute, values):
    of_weights = "weights" in attribute
    action = ne.ChangeCandidatesWeightsQuantConfigAttr if of_weights else ne.ChangeCandidatesActivationQuantConfigAttr
    for value in values:
        with pytest.raises((ConfigError, PlanError), match=f"'{attribute}' (must be|of the overr|.*is not allowed)"):
            action(**{attribute: value})


FOUR_BITS = ne.ChangeFinalWeightsQuantConfigAttr(weights_n_bits=4)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: weights("a", l_p_value=3, weights_error_method=METHOD.MSE), ConfigError, "LP"),
        (lambda: ne.ChangeCandidatesWeightsQuantConfigAttr("bias", weights_n_bits=4), ConfigError, "kernel"),
        (lambda: ne.ChangeQuantizationParamFunction(), ConfigError, "function"),
        (lambda: ne.ChangeQuantizationParamFunction(activation_quantization_params_fn=3), ConfigError, "function"),
        (lambda: ne.ChangeQuantizationParamFunction(None, "percntile"), UnknownNameError, "percentile"),
        (lambda: ne.ReplaceLayer(nn.Identity, None), ConfigError, "ReplaceLayer"),
        (lambda: ne.ReplaceLayer("Identity", unchanged), ConfigError, "ReplaceLayer"),
        (lambda: ne.EditRule("conv", FOUR_BITS), ConfigError, "filter"),
        (lambda: ne.EditRule(ne.NodeNameFilter("conv"), "4 bits"), ConfigError, "ChangeFinalWeightsQuantConfigAttr"),
    ],
)
def test_invalid_rules_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize(
    ("wrong", "platform", "error", "says"),
    [
        (weights("head", weights_quantization_method=UNIFORM), "ort_cpu", UnsupportedError, "symmetric, "),
        (weights("head", weights_n_bits=9), "ort_cpu", UnsupportedError, "Allowed: 8 bits"),
        (weights("head", weights_per_channel_threshold=True), "qnnpack", UnsupportedError, "tensor"),
        (weights(ne.NodeTypeFilter(nn.ReLU), weights_n_bits=4), None, PlanError, "no weights"),
    ],
    ids=range(4),
)
def test_an_option_that_the_chip_lacks_is_refused_with_its_options(net, wrong, platform, error, says):
    with pytest.raises(error, match=says):
        fit(net, wrong, platform=platform)


def test_rules_give_widths_that_a_chip_without_a_runtime_has_not_for_a_study(net, plain):
    with pytest.warns(UserWarning, match="'head' cannot have 9-bit weights on 'imx500_v1'; the network editor"):
        found = fit(net, weights("head", weights_n_bits=9), results("head", activation_n_bits=7))
    assert bits(found) == {**bits(plain), "head.weight": 9}
    assert found.plan["head.weight"].grid.qmax == 2**8 - 1


@pytest.mark.parametrize("method", [LUT, UNIFORM])
def test_rules_give_methods_that_a_chip_without_a_runtime_has_not_for_a_study(net, plain, method):
    rules = weights("head", weights_quantization_method=method), weights("head", weights_n_bits=4)
    with pytest.warns(UserWarning, match="'head' cannot have this method; the network editor sets it"):
        found = fit(net, *rules)
    quantizer = found.model.head.weights_quantizers["weight"]
    assert isinstance(quantizer, KINDS[method]) and differences(plain, found) == {"head.weight"}
    values = quantizer(found.model.head.weight)
    assert all(len(row.unique()) <= 16 for row in values)
    if method is LUT:  # entries are eighths of bits of a power of two
        codes = values / torch.tensor(quantizer.threshold)[:, None] * 128
        assert torch.equal(codes, codes.round()) and set(codes.unique().tolist()) == set(quantizer.lut_values)


def test_a_layer_without_a_bias_gets_none_where_it_is_left_out_of_bias_correction(tmp_path):
    torch.manual_seed(0)
    layers = {"a": nn.Conv2d(3, 4, 1, bias=False), "b": nn.Conv2d(4, 4, 1, bias=False)}
    model, data = model_of(lambda m, x: m.b(torch.relu(m.a(x))), **layers), torch.randn(8, 3, 6, 6)
    debug = DebugConfig(network_editor=[weights("b", weights_bias_correction=False)])
    found = chipfit.pytorch_post_training_quantization(
        model, lambda: iter([[data]]), core_config=CoreConfig(debug_config=debug)
    )
    assert found[0].a.bias is not None and "b.bias" not in found[0].state_dict()
    assert not any("b.bias" in n.inputs for n in found[1].result.graph.nodes)
    assert (found[0](data) - model(data)).abs().mean() < 0.02
    found[1].result.save(tmp_path / "saved")
    assert torch.equal(chipfit.load(tmp_path / "saved").model(data), found[0](data))


def test_a_layer_is_left_out_of_bias_correction(net):
    """The mean of its outputs then differs from that of the float layer, as its weights are rounded to 2 bits."""
    model, batch = net

    def biases(*rules):
        few = ne.EditRule(CONV | LINEAR, FEW)
        config = CoreConfig(debug_config=DebugConfig(network_editor=[few, *rules]))
        found = chipfit.pytorch_post_training_quantization(model, lambda: iter([[batch]]), core_config=config)[1].result
        names = {n.bias for n in found.graph.nodes if n.bias}
        return {n: found.graph.weights[n] for n in names}, [n for n in found.plan.rewrites if "bias of 'head'" in n]

    (usual, corrected), (other, note) = biases(), biases(weights("head", weights_bias_correction=False))
    assert torch.equal(other["head.bias"], model.head.bias) and not torch.equal(usual["head.bias"], model.head.bias)
    assert [n for n in usual if not torch.equal(usual[n], other[n])] == ["head.bias"]
    assert corrected[0].startswith("corrected") and note == [
        "the bias of 'head' is not corrected: a rule of the network editor"
    ]
    with pytest.raises(UnknownNameError, match="'haed'"):
        biases(weights("haed", weights_bias_correction=False))


# ---------------------------------------------------------------- bit widths


def widths_of(kind, *choices):
    """Return a configuration of bit widths of "weights" or "activation"s."""
    out = BitWidthConfig()
    for choice in choices:
        getattr(out, f"set_manual_{kind}_bit_width")(*choice)
    return out


def test_bit_widths_of_weights_by_hand(net):
    folded = ne.NodeNameFilter("a_0_bn")
    widths = widths_of("weights", ([CONV, ne.NodeNameFilter("head")], [4, 2]), (folded, 8, "kernel"))
    assert bits(fit(net, widths=widths)) == {"stem.0.weight": 4, "a.0.weight": 8, "b.0.weight": 4, "head.weight": 2}


def test_bit_widths_of_results_by_hand(net):
    chip = tp.get_target_platform_capabilities("pytorch", "imx500", "v4")
    result = fit(net, platform=chip, widths=widths_of("activation", (ne.NodeTypeFilter(torch.add), 16)))
    assert result.plan.tensors["relu_"].grid.bits == 16  # the addition and its ReLU are one kernel
    assert result.plan.tensors["relu_1"].grid.bits == 8


@pytest.mark.parametrize(
    ("kind", "bits", "allowed"), [("weights", 3, "2, 4, 8"), ("weights", 16, "2, 4, 8"), ("activation", 16, "8")]
)
def test_a_width_that_is_no_candidate_is_refused_with_the_candidates(net, kind, bits, allowed):
    with pytest.raises(UnsupportedError, match=f"{allowed} bits"):
        fit(net, widths=widths_of(kind, (ne.NodeNameFilter("a.0"), bits)))


def test_a_width_that_another_operator_of_the_chip_has_is_no_candidate():
    chip = chipfit.load_platform("ethos_u")  # 4-bit weights in convolutions, not in fully connected layers
    net = sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2)), torch.randn(4, 3, 2, 2)
    with pytest.raises(UnsupportedError, match="8 bits"):
        fit(net, platform=chip, widths=widths_of("weights", (LINEAR, 4)))


def test_invalid_bit_widths_are_refused(net):
    widths, head = BitWidthConfig(), ne.NodeNameFilter("head")
    wrong = [([CONV, head], [4, 4, 8]), ([], 4), ("conv", 4), (CONV, "4"), (CONV, 0), (CONV, True), (CONV, [])]
    for set_width in (widths.set_manual_weights_bit_width, widths.set_manual_activation_bit_width):
        for given in wrong:
            with pytest.raises(ConfigError):
                set_width(*given)
    with pytest.raises(ConfigError, match="kernel"):
        widths.set_manual_weights_bit_width(CONV, 4, "bias")
    with pytest.raises(ConfigError, match="attributes"):
        widths.set_manual_weights_bit_width([CONV, head, CONV], 4, ["kernel", "kernel"])
    assert widths.choices == []
    with pytest.raises(UnknownNameError, match="'head'"):
        fit(net, widths=widths_of("weights", (ne.NodeNameFilter("haed"), 4)))


def test_only_the_last_node_of_a_fused_group_has_a_quantizer(plain):
    inner = {n for group in plain.plan.groups for n in group[:-1]}
    outputs = {n.name: n.output for n in plain.graph.nodes}
    assert inner and not any(plain.plan.quantized(outputs[n]) for n in inner)
    assert all(plain.plan.quantized(outputs[group[-1]]) for group in plain.plan.groups)


def test_a_consumer_of_8_bits_leaves_no_16_bit_candidates_to_its_producer():
    """The chip's convolutions prefer 16 bits; before a layer that reads 8 bits they write 8."""
    base = tp.get_target_platform_capabilities("pytorch", "imx500").tp_model.default_qco
    wide = base.base_config.clone_and_edit(activation_n_bits=16)
    with tp.TargetPlatformModel(base, name="mixed") as chip:
        tp.OperatorsSet("Conv", tp.QuantizationConfigOptions([wide, base.base_config], wide))
        tp.OperatorsSet("FullyConnected", base.clone_and_edit(supported_input_activation_n_bits=8))
        tp.OperatorsSet("Relu", base.clone_and_edit(supported_input_activation_n_bits=(8, 16)))
    x, conv = torch.randn(4, 3, 2, 2), nn.Conv2d(3, 4, 2)
    relu, linear = sequential(conv, nn.ReLU()), sequential(conv, nn.Flatten(), nn.Linear(4, 2))
    assert fit((relu, x), platform=chip).plan.tensors["conv2d"].grid.bits == 16
    assert fit((linear, x), platform=chip).plan.tensors["conv2d"].grid.bits == 8
    with pytest.raises(UnsupportedError, match="8 bits"):
        fit((linear, x), platform=chip, widths=widths_of("activation", (CONV, 16)))


def test_arguments_have_the_order_of_mct():
    by_name = ne.ChangeFinalWeightsQuantizationMethod("kernel", POT)
    assert by_name.choices == ne.ChangeFinalWeightsQuantizationMethod(POT).choices
    assert ne.ChangeQuantizationParamFunction("kernel", weights_quantization_params_fn="mse").choices["weight_rule"]
    with pytest.raises(ConfigError, match="kernels"):
        ne.ChangeCandidatesWeightsQuantizationMethod("bias", POT)


def test_attributes_of_all_layers_together_have_no_effect_on_one(net):
    with pytest.warns(
        UserWarning, match="without effect on single layers: min_threshold, shift_negative_ratio"
    ) as found:
        action = ne.ChangeCandidatesActivationQuantConfigAttr(min_threshold=0.1, shift_negative_ratio=0.2)
    assert action.choices == {} and found[0].filename == __file__
    with pytest.warns(UserWarning, match="simd_size"):
        assert ne.ChangeFinalWeightsQuantConfigAttr("kernel", simd_size=16, weights_n_bits=4).choices == {"bits": 4}
