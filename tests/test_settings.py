"""Every option of a configuration changes what it says, through the facade, and results stay exact with each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.core import BitWidthConfig, CoreConfig, QuantizationConfig, QuantizationErrorMethod
from chipfit.core.network_editor import NodeTypeFilter
from chipfit.errors import PlanError
from chipfit.registry import STAGES, ordered
from chipfit.settings import Settings, known_settings

OFF = {
    "weights_bias_correction": False,
    "linear_collapsing": False,
    "residual_collapsing": False,
    "shift_negative_activation_correction": False,
}


def fit(model, x, platform=None, bits=None, **options):
    """The chipfit result of the facade, with these options on and all others off."""
    config = CoreConfig(QuantizationConfig(**{**OFF, **options}))
    if bits is not None:
        config.bit_width_config = BitWidthConfig()
        config.bit_width_config.set_manual_weights_bit_width(
            NodeTypeFilter(nn.Conv2d) | NodeTypeFilter(nn.Linear), bits
        )
    data = lambda: iter([[part] for part in x.split(max(1, len(x) // 2))])
    _, info = chipfit.pytorch_post_training_quantization(
        model.eval(), data, core_config=config, target_platform_capabilities=platform
    )
    return info.result


def weight_codes(result):
    return {t.name: t for t in result.plan.tensors.values() if t.role == "weight" and t.quantized}


def means(model, x):
    with torch.no_grad():
        y = model(x)
    return y.mean([k for k in range(y.dim()) if k != 1])


# ---------------------------------------------------------------- range rules

HEAVY = torch.randn(4000, 4, generator=torch.Generator().manual_seed(0)).pow(3)


@pytest.mark.parametrize("side", ["activation", "weights"])
def test_the_error_method_decides_how_much_of_a_heavy_tail_is_kept(side):
    """The larger the exponent of the error, the more of the tail; the whole of it without clipping."""
    model = nn.Linear(4, 4000, bias=False)
    with torch.no_grad():
        model.weight.copy_(HEAVY)
    steps = []
    for method in (
        QuantizationErrorMethod.MAE,
        QuantizationErrorMethod.MSE,
        QuantizationErrorMethod.LP,
        QuantizationErrorMethod.NOCLIPPING,
    ):
        result = fit(model, HEAVY, "qnnpack", **{f"{side}_error_method": method, "l_p_value": 3})
        t = result.plan.tensors["weight" if side == "weights" else result.graph.inputs[0]]
        assert method.rule(3).partition("(")[0] in t.origin
        steps.append(float(t.scale))
    assert steps == sorted(steps) and len(set(steps[:3])) == 3  # at 8 bit the exponent 3 may keep all of it
    assert fit(model, HEAVY, "qnnpack", **{f"{side}_error_method": QuantizationErrorMethod.KL}).plan


def test_the_exponents_1_and_2_are_the_absolute_and_the_squared_error():
    def step(method, p=2.0):
        result = fit(nn.Linear(4, 2), HEAVY, "qnnpack", activation_error_method=method, l_p_value=p)
        return float(result.plan.tensors[result.graph.inputs[0]].scale)

    assert step(QuantizationErrorMethod.LP, 1) == step(QuantizationErrorMethod.MAE)
    assert step(QuantizationErrorMethod.LP, 2) == step(QuantizationErrorMethod.MSE)


def test_39_thresholds_without_clipping_are_powers_of_two_above_all_values():
    x = torch.randn(500, 4)
    result = fit(nn.Linear(4, 2), x, activation_error_method=QuantizationErrorMethod.NOCLIPPING)
    t = result.plan.tensors[result.graph.inputs[0]]
    threshold = float(t.scale) * 128
    assert threshold > float(x.abs().max()) and math.log2(threshold) == round(math.log2(threshold))


@pytest.mark.parametrize("method", QuantizationErrorMethod)
def test_39_symmetric_weight_thresholds_are_no_powers_of_two(method):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3))
    for conv in model[::2]:
        nn.init.uniform_(conv.weight)
    for t in weight_codes(fit(model, torch.randn(4, 3, 8, 8), weights_error_method=method)).values():
        log = torch.log2(t.scale * 128)
        assert not torch.equal(log, log.round())


def test_40_outliers_are_cut_by_their_z_score():
    x = torch.randn(4000, 4)
    x[7, 1] = 1000.0
    kept, cut = (
        fit(nn.Linear(4, 2), x, activation_error_method=QuantizationErrorMethod.NOCLIPPING, z_threshold=z)
        for z in (math.inf, 5.0)
    )
    name = kept.graph.inputs[0]
    assert float(kept.plan.tensors[name].scale) * 128 == 1024 and float(cut.plan.tensors[name].scale) * 128 <= 8


# ---------------------------------------------------------------- rewrites


class Everything(nn.Module):
    """Something for every rewrite."""

    def __init__(self):
        super().__init__()
        self.wide, self.point = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 1, bias=False)
        self.skip, self.bounded, self.after = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 6, 3)
        self.a, self.b, self.head = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.point(self.wide(x))
        x = F.silu(self.skip(x) + x)
        x = F.relu(self.after(F.relu6(self.bounded(x))))
        return self.head(torch.cat([self.a(x), self.b(x) * 3], 1).mean((2, 3))).softmax(-1)


@pytest.fixture(scope="module")
def everything():
    torch.manual_seed(0)
    return Everything().eval(), torch.randn(16, 3, 10, 10)


def ops(result):
    return [n.op for n in result.graph.nodes]


def test_linear_collapsing_makes_one_convolution_of_two(everything):
    plain, on = fit(*everything), fit(*everything, linear_collapsing=True)
    assert ops(on).count("Conv2D") == ops(plain).count("Conv2D") - 1
    assert on.graph.weights["wide.weight"].shape == (8, 3, 3, 3) and "point.weight" not in weight_codes(on)


def test_residual_collapsing_takes_the_addition_into_the_kernel(everything):
    plain, on = fit(*everything), fit(*everything, residual_collapsing=True)
    assert ops(plain).count("Add") == 1 and ops(on).count("Add") == 0
    moved = on.graph.weights["skip.weight"] - plain.graph.weights["skip.weight"]
    torch.testing.assert_close(moved[:, :, 1, 1], torch.eye(8))


def test_clipped_activations_end_at_a_power_of_two(everything):
    model, x = everything
    on = fit(model, x * 20, relu_bound_to_power_of_2=True)
    assert "Relu6" not in ops(on)
    clip = next(n for n in on.graph.nodes if n.op == "Clamp")
    assert clip.attrs == {"min": 0.0, "max": 8.0}
    assert float(on.plan.tensors[clip.output].scale) * 256 == 8
    torch.testing.assert_close(
        on.graph.weights["bounded.weight"], fit(model, x).graph.weights["bounded.weight"] * 8 / 6
    )


def test_equalization_saves_channels_of_unequal_range():
    """Weights per tensor, channels whose ranges differ a thousandfold: most small codes are 0 without it."""
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4))
    with torch.no_grad():
        factor = torch.logspace(-1.5, 1.5, 64)
        model[0].weight.mul_(factor[:, None])
        model[0].bias.mul_(factor)
        model[2].weight.div_(factor)
    x = torch.randn(200, 6)

    def error(result):
        with torch.no_grad():
            return float((result.model(x) - model(x)).square().mean())

    plain, on = (fit(model, x, "qnnpack", activation_channel_equalization=e) for e in (False, True))
    assert error(on) < error(plain) / 10


def silu_net():
    torch.manual_seed(3)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))
    with torch.no_grad():
        net[0].weight.mul_(6)
    return net, torch.randn(16, 3, 8, 8)


def test_shifting_negative_activations_halves_their_step():
    net, x = silu_net()
    plain, on = (fit(net, x, shift_negative_activation_correction=s) for s in (False, True))
    name = next(n.output for n in plain.graph.nodes if n.op == "Swish")
    shifted = next(n.output for n in on.graph.nodes if n.op == "Add")
    assert plain.plan.tensors[name].grid.signed and not on.plan.tensors[shifted].grid.signed
    assert float(on.plan.tensors[shifted].scale) == float(plain.plan.tensors[name].scale) / 2
    assert name not in on.plan.tensors or not on.plan.tensors[name].quantized
    assert next(n for n in on.plan.groups if len(n) > 1)[-1] == "silu_shift" and len(on.plan.groups) == 1
    with torch.no_grad():
        error = [float((r.model(x) - net(x)).square().mean()) for r in (plain, on)]
    assert error[1] < error[0] * 0.8


def test_the_ratio_limits_how_long_a_tail_is_shifted():
    net, x = silu_net()
    result = fit(net, x, shift_negative_activation_correction=True, shift_negative_ratio=0.001)
    assert "Add" not in ops(result) and any("more than 0.001" in n for n in result.plan.rewrites)


def test_logits_move_to_the_middle_of_their_range():
    net = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    x = torch.linspace(-1, 14.8, 1600).view(400, 4)[:, torch.tensor([2, 0, 3, 1])]
    plain, on = (
        fit(net, x, softmax_shift=s, activation_error_method=QuantizationErrorMethod.NOCLIPPING) for s in (False, True)
    )
    torch.testing.assert_close(on.graph.weights["0.bias"], torch.full((4,), -6.9))
    logits = plain.graph.nodes[0].output
    assert float(on.plan.tensors[logits].scale) == float(plain.plan.tensors[logits].scale) / 2


def test_what_a_concatenation_joins_shares_its_threshold(everything):
    plain, on = fit(*everything), fit(*everything, concat_threshold_update=True)

    def scales(result):
        concat = next(n for n in result.graph.nodes if n.op == "Concat")
        return {float(result.plan.tensors[v].scale) for v in (*concat.inputs, concat.output)}

    assert len(scales(plain)) > 1 and len(scales(on)) == 1


# ---------------------------------------------------------------- corrections


def deep():
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4, bias=False), nn.ReLU(), nn.Conv2d(16, 8, 1)
    )
    return net.eval(), torch.randn(32, 3, 10, 10) + 0.5


def test_bias_correction_gives_back_the_means_that_rounded_weights_take():
    net, x = deep()
    plain, on = (fit(net, x, bits=2, weights_bias_correction=c) for c in (False, True))
    assert all(torch.equal(a.scale, on.plan.tensors[n].scale) for n, a in weight_codes(plain).items())
    error = [float((means(r.model, x) - means(net, x)).abs().mean()) for r in (plain, on)]
    assert error[1] < error[0] / 2
    assert sum("corrected the bias" in n for n in on.plan.rewrites) == 3  # the one without a bias got one


def test_second_moment_correction_gives_back_the_spread_of_every_channel():
    net, x = deep()

    def spread(model):
        with torch.no_grad():
            return model(x).transpose(0, 1).flatten(1).std(1)

    plain, on = (fit(net, x, bits=2, weights_second_moment_correction=c) for c in (False, True))
    error = [float((spread(r.model) / spread(net)).log().abs().mean()) for r in (plain, on)]
    assert error[1] < error[0] / 2
    error = [float((means(r.model, x) - means(net, x)).abs().mean()) for r in (plain, on)]
    assert error[1] < error[0] / 2


def test_the_second_moment_has_the_means_in_it_already():
    net, x = deep()
    alone, both = (
        fit(net, x, bits=2, weights_second_moment_correction=True, weights_bias_correction=c) for c in (False, True)
    )
    assert all(torch.equal(w, both.graph.weights[n]) for n, w in alone.graph.weights.items())


def test_activation_bias_correction_takes_off_what_rounding_inputs_adds():
    """Inputs of 0.7 steps on a coarse grid all round up."""
    net = nn.Linear(2, 2)
    x = torch.cat([torch.full((63, 2), 0.7 / 16), torch.full((1, 2), 7.9)])
    none = QuantizationErrorMethod.NOCLIPPING
    plain, on, high = (
        fit(net, x, activation_error_method=none, **more)
        for more in (
            {},
            {"activation_bias_correction": True},
            {"activation_bias_correction": True, "activation_bias_correction_threshold": 1e4},
        )
    )
    step = float(plain.plan.tensors[plain.graph.inputs[0]].scale)
    assert step == 8 / 256
    shift = float((torch.round(x / step) * step - x).mean())
    moved = on.graph.weights["bias"] - plain.graph.weights["bias"]
    torch.testing.assert_close(moved, -shift * net.weight.detach().sum(1), rtol=0.2, atol=1e-4)
    assert torch.equal(high.graph.weights["bias"], plain.graph.weights["bias"])


# ---------------------------------------------------------------- with each of them

ONE_BY_ONE = {
    "linear_collapsing": True,
    "residual_collapsing": True,
    "relu_bound_to_power_of_2": True,
    "activation_channel_equalization": True,
    "shift_negative_activation_correction": True,
    "softmax_shift": True,
    "concat_threshold_update": True,
    "weights_bias_correction": True,
    "weights_second_moment_correction": True,
    "activation_bias_correction": True,
}


@pytest.mark.parametrize("option", [*ONE_BY_ONE, "all"])
def test_no_integer_differs_on_onnx_runtime_and_the_file_is_written(option, everything, tmp_path):
    model, x = everything
    result = fit(model, x, "ort_cpu", **(ONE_BY_ONE if option == "all" else {option: True}))
    found = result.verify([x])
    assert found.exact and sum(r.differing or 0 for r in found.rows) == 0
    assert result.export(tmp_path / "m.onnx").stat().st_size > 0


@pytest.mark.parametrize("option", [*ONE_BY_ONE, "all"])
def test_no_rewrite_changes_the_float_network(option, everything):
    from chipfit.engine.run import run

    model, x = everything
    options = {
        k: v
        for k, v in (ONE_BY_ONE if option == "all" else {option: True}).items()
        if "correction" not in k or "shift" in k
    }
    result = fit(model, x, **options)
    with torch.no_grad():
        torch.testing.assert_close(run(result.graph, [x])[result.graph.outputs[0]], model(x), rtol=1e-4, atol=1e-5)


def test_an_edited_result_is_corrected_anew(everything):
    model, x = everything
    result = fit(model, x, "ort_cpu", weights_bias_correction=True)
    edited = result.edit({"skip": "float"})
    again = chipfit.quantize(
        model, [x[:8], x[8:]], overrides={"skip": "float"}, settings=Settings(correct_bias=True), progress=False
    )
    assert torch.equal(edited.graph.weights["skip.bias"], model.skip.bias)  # what stays in float needs no correction
    for name, w in again.graph.weights.items():
        assert torch.equal(w, edited.graph.weights[name])
    assert edited.verify([x]).exact


def test_a_saved_correction_is_not_taken_for_one_of_another_rounding(everything, tmp_path):
    result = fit(*everything, "ort_cpu", weights_bias_correction=True)
    with pytest.raises(PlanError, match="quantize again"):
        chipfit.load(result.save(tmp_path / "saved")).edit({"skip": "float"})


def test_data_that_can_be_read_once_serve_what_reads_them_twice(everything):
    model, x = everything
    how = {"settings": Settings(correct_second_moment=True), "progress": False}
    once, again = (chipfit.quantize(model, data, **how) for data in (iter([x]), [x]))
    assert str(once.plan) == str(again.plan) and "second_moment" in once.plan.provenance["corrected"]


@pytest.mark.parametrize(
    "wrong",
    [{"correct_bias": 1}, {"shift_negative": -1.0}, {"shift_negative": True}, {"correct_activation_bias": math.nan}],
)
def test_settings_refuse_what_they_do_not_understand(wrong):
    with pytest.raises(PlanError, match=next(iter(wrong))):
        Settings(**wrong)


def test_settings_are_told_by_the_plan(everything):
    result = fit(*everything, weights_bias_correction=True, shift_negative_activation_correction=True)
    steps = result.plan.provenance["settings"]["steps"]
    assert steps == {"correct_bias": True, "shift_negative": 0.05, "rounding": "off"}  # the facade's fields say all
    assert Settings.from_record(steps) == Settings(correct_bias=True, shift_negative=0.05, rounding="off")


def test_the_pages_about_settings_name_every_one_of_them():
    from pathlib import Path

    from chipfit.decide.overrides import CHOICES

    docs = Path(__file__).parents[1] / "docs"
    page = (docs / "settings.md").read_text() + (docs / "few-bits.md").read_text()
    named = [*known_settings(), *CHOICES, *vars(QuantizationConfig())]
    assert [n for n in named if f"`{n}`" not in page] == []


def test_every_setting_is_off_unless_asked_for():
    steps = [step.declares for stage in STAGES for step in ordered(stage)]
    assert {s.setting.default for s in steps if s.setting is not None} <= {False, None}
    assert Settings() == Settings(collapse_linear=False) and Settings().to_record() == {}


def test_numbers_that_nobody_chose_are_those_of_the_documentation():
    from chipfit.settings import known_settings

    numbers = {k: s.default for k, s in known_settings().items() if type(s.default) in (int, float)}
    assert numbers == {
        "rounding_samples": 4096,
        "correct_weights": 0.1,
        "reconstruct_steps": 1000,
        "reconstruct_rate": 0.2,
        "reconstruct_float": 0.0,
        "reconstruct_pull": 1.0,
    }
