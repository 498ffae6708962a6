"""Options of MCT's configuration: each is a setting of chipfit, and results stay exact with each."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import chipfit
from chipfit.core import CoreConfig, QuantizationConfig, QuantizationErrorMethod
from chipfit.engine.run import run
from chipfit.settings import Settings
from tests.build import model_of, randn

ON = "weights_bias_correction linear_collapsing residual_collapsing shift_negative_activation_correction"
OFF = dict.fromkeys(ON.split(), False)  #: options that are on by default


def fit(model, x, platform=None, **options):
    """The chipfit result of the facade, with these options on and all others off."""
    config = CoreConfig(QuantizationConfig(**{**OFF, **options}))
    data = lambda: iter([[part] for part in x.split(max(1, len(x) // 2))])
    how = {"core_config": config, "target_platform_capabilities": platform}
    return chipfit.pytorch_post_training_quantization(model.eval(), data, **how)[1].result


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({}, {}),
        ({"linear_collapsing": True}, {"collapse_linear": True}),
        ({"residual_collapsing": True}, {"collapse_residual": True}),
        ({"relu_bound_to_power_of_2": True}, {"relu_bound": True}),
        ({"activation_channel_equalization": True}, {"equalize": True}),
        ({"shift_negative_activation_correction": True}, {"shift_negative": 0.05}),
        ({"shift_negative_activation_correction": True, "shift_negative_ratio": 0.001}, {"shift_negative": 0.001}),
        ({"softmax_shift": True}, {"softmax_shift": True}),
        ({"concat_threshold_update": True}, {"concat_ranges": True}),
        ({"weights_bias_correction": True}, {"correct_bias": True}),
        ({"weights_second_moment_correction": True}, {"correct_second_moment": True}),
        ({"activation_bias_correction": True}, {"correct_activation_bias": 0.0}),
        (
            {"activation_bias_correction": True, "activation_bias_correction_threshold": 5},
            {"correct_activation_bias": 0.05},
        ),
    ],
    ids=str,
)
def test_each_option_is_a_setting(options, settings):
    want = Settings(**{"correct_bias": False, **settings}, rounding="off", repairs="off")
    assert QuantizationConfig(**{**OFF, **options}).to_settings() == want


# ---------------------------------------------------------------- range rules

HEAVY = randn(4000, 4).pow(3)
METHODS = QuantizationErrorMethod


@pytest.mark.parametrize("side", ["activation", "weights"])
def test_the_error_method_decides_how_much_of_a_heavy_tail_is_kept(side):
    """The larger the exponent of the error, the more of the tail; the whole of it without clipping."""
    model = nn.Linear(4, 4000, bias=False)
    with torch.no_grad():
        model.weight.copy_(HEAVY)
    steps = []
    for method in (METHODS.MAE, METHODS.MSE, METHODS.LP, METHODS.NOCLIPPING):
        result = fit(model, HEAVY, "qnnpack", **{f"{side}_error_method": method, "l_p_value": 3})
        t = result.plan.tensors["weight" if side == "weights" else result.graph.inputs[0]]
        assert method.rule(3).partition("(")[0] in t.origin
        steps.append(float(t.scale))
    assert steps == sorted(steps) and len(set(steps[:3])) == 3  # at 8 bit the exponent 3 may keep all of it
    assert fit(model, HEAVY, "qnnpack", **{f"{side}_error_method": METHODS.KL}).plan


@pytest.mark.parametrize(
    "function, ends", [(torch.softmax, (0, 1)), (torch.sigmoid, (0, 1)), (torch.tanh, (-1, 1)), (F.hardsigmoid, (0, 1))]
)
def test_results_of_bounded_functions_have_their_known_range(function, ends):
    """As in MCT's default information about frameworks, in which the data of a calibration do not count."""
    given = {"dim": -1} if function is torch.softmax else {}
    result = fit(model_of(lambda m, x: function(x * 0.01, **given) * 2), randn(16, 4))
    (t,) = (t for t in result.plan.tensors.values() if t.origin == "known beforehand")
    assert float(t.scale) * (128 if ends[0] else 256) == 1.0 and t.grid.signed is (ends[0] < 0)


def test_the_threshold_without_clipping_is_the_largest_number():
    """Powers of two: 2 is on no grid of threshold 2, and MCT takes it all the same."""
    x = torch.full((8, 4), 0.2)
    x[0, 0] = 2.0
    result = fit(nn.Linear(4, 2), x, activation_error_method=METHODS.NOCLIPPING)
    assert float(result.plan.tensors[result.graph.inputs[0]].scale) * 256 == 2.0


def test_outliers_are_cut_by_their_z_score_and_thresholds_are_powers_of_two_above_the_rest():
    x = randn(4000, 4)
    x[7, 1] = 1000.0
    kept, cut = (
        fit(nn.Linear(4, 2), x, activation_error_method=METHODS.NOCLIPPING, z_threshold=z) for z in (math.inf, 5.0)
    )
    threshold = [float(r.plan.tensors[r.graph.inputs[0]].scale) * 128 for r in (kept, cut)]
    assert threshold[0] == 1024 and threshold[1] in (4, 8)


# ---------------------------------------------------------------- with each of them


@pytest.fixture(scope="module")
def everything():
    """A network with something for every rewrite."""

    def forward(m, x):
        x = m.point(m.wide(x))
        x = F.silu(m.skip(x) + x)
        x = F.relu(m.after(F.relu6(m.bounded(x))))
        return m.head(torch.cat([m.a(x), m.b(x) * 3], 1).mean((2, 3))).softmax(-1)

    torch.manual_seed(0)
    parts = {"wide": nn.Conv2d(3, 8, 3, padding=1, bias=False), "point": nn.Conv2d(8, 8, 1, bias=False)}
    parts |= {"skip": nn.Conv2d(8, 8, 3, padding=1), "bounded": nn.Conv2d(8, 6, 1), "after": nn.Conv2d(6, 6, 3)}
    parts |= {"a": nn.Conv2d(6, 4, 1), "b": nn.Conv2d(6, 4, 1), "head": nn.Linear(8, 5)}
    return model_of(forward, **parts), randn(16, 3, 10, 10)


REWRITES = """linear_collapsing residual_collapsing relu_bound_to_power_of_2 activation_channel_equalization
    shift_negative_activation_correction softmax_shift concat_threshold_update""".split()
CORRECTIONS = ["weights_bias_correction", "weights_second_moment_correction", "activation_bias_correction"]
EVERY = [*REWRITES, *CORRECTIONS]


@pytest.mark.parametrize("option", [*EVERY, "all"])
def test_no_integer_differs_on_onnx_runtime_and_the_file_is_written(option, everything, tmp_path):
    model, x = everything
    result = fit(model, x, "ort_cpu", **dict.fromkeys(EVERY if option == "all" else [option], True))
    found = result.verify([x])
    assert found.exact and sum(r.differing or 0 for r in found.rows) == 0
    assert result.export(tmp_path / "m.onnx").stat().st_size > 0


@pytest.mark.parametrize("option", [*REWRITES, "all"])
def test_no_rewrite_changes_the_float_network(option, everything):
    model, x = everything
    graph = fit(model, x, **dict.fromkeys(REWRITES if option == "all" else [option], True)).graph
    with torch.no_grad():
        torch.testing.assert_close(run(graph, [x])[graph.outputs[0]], model(x), rtol=1e-4, atol=1e-5)


def test_the_second_moment_has_the_means_in_it_already(everything):
    both = {"weights_second_moment_correction": True}
    alone, both = (fit(*everything, weights_bias_correction=c, **both) for c in (False, True))
    assert all(torch.equal(w, both.graph.weights[n]) for n, w in alone.graph.weights.items())
