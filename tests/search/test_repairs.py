"""Repairs without training inside `quantize`: tried where the outputs lose more than the bits explain, and named."""

import math
import re

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from chipfit.errors import UnsupportedError
from chipfit.rounding.expected import expected_sqnr_db
from tests.accelerators import moved
from tests.build import graph_of, mlp, model_of, plan_of, quantized, randn, sequential, set_layer, sqnr_db, stored

DATA = list(randn(64, 4, 8, 8, seed=1).split(16))
NEW = randn(128, 4, 8, 8, seed=2)
OFF = Settings(repairs="off")


def unequal(act=nn.ReLU, seed=0):
    """An inverted residual without the residual; inner channels differ by up to a factor of 1000, its function not."""
    torch.manual_seed(seed)
    wide, filters, narrow = nn.Conv2d(4, 24, 1), nn.Conv2d(24, 24, 3, groups=24), nn.Conv2d(24, 8, 1)
    with torch.no_grad():
        for first, after in ((wide, filters), (filters, narrow)):
            s = 10 ** (-3 * torch.rand(24))
            first.weight.mul_(s.view(-1, 1, 1, 1))
            first.bias.mul_(s)
            after.weight.div_(s.view(-1, 1, 1, 1) if after.groups > 1 else s.view(1, -1, 1, 1))
    return sequential(wide, act(), filters, act(), narrow, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def unequal_mlp(act=nn.ReLU, seed=0):
    """Linear layers around hidden features of very unlike ranges."""
    torch.manual_seed(seed)
    first, after, s = nn.Linear(8, 32), nn.Linear(32, 4), 10 ** (-3 * torch.rand(32))
    with torch.no_grad():
        first.weight.mul_(s.view(-1, 1))
        first.bias.mul_(s)
        after.weight.div_(s)
    return sequential(first, act(), after)


@torch.no_grad()
def result_sqnr_db(result, model, x=NEW):
    """Return signal over noise of the simulation's outputs on new samples."""
    return sqnr_db(model(x), moved(result.model.eval(), "cpu")(x))


def said(result):
    return [n for n in result.plan.rewrites if "held-out samples" in n]


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "vitis_dpu"])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6])
def test_unequal_channels_are_equalized_by_default(act, platform):
    model = unequal(act)
    result, left = quantized(model, DATA, platform), quantized(model, DATA, platform, settings=OFF)
    assert result_sqnr_db(result, model) > max(23, result_sqnr_db(left, model) + 6)
    assert any(
        n.startswith("equalize_groups='always' taken: on 8 held-out samples outputs have ") for n in said(result)
    )
    assert not said(left)
    assert platform == "vitis_dpu" or result.verify(NEW[:8]).exact  # no runtime of that chip is here


@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6])
def test_hidden_features_of_an_mlp_are_repaired_too(act):
    model, data, new = unequal_mlp(act), list(randn(64, 8, seed=1).split(16)), randn(128, 8, seed=2)
    result, left = quantized(model, data, "tflite_int8"), quantized(model, data, "tflite_int8", settings=OFF)
    assert result_sqnr_db(result, model, new) > result_sqnr_db(left, model, new) + 10
    assert any(" taken: " in n for n in said(result))


def test_nothing_is_tried_where_the_bits_explain_the_loss():
    torch.manual_seed(0)
    net = sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    result = quantized(net, DATA, settings=Settings(correct_bias=False))
    merit = result.plan.provenance["merit"]
    assert not said(result) and merit["samples"] == 64 and merit["sqnr_db"] >= merit["expected_db"]


def test_the_merit_is_the_signal_to_noise_ratio_of_the_simulation_on_the_data():
    torch.manual_seed(0)
    model = sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    for settings in (Settings(), OFF, Settings(correct_bias=True)):
        result = quantized(model, DATA, settings=settings)
        merit = result.plan.provenance["merit"]
        assert merit["sqnr_db"] == pytest.approx(result_sqnr_db(result, model, torch.cat(DATA)), abs=0.1)


def test_the_merit_counts_what_dynamic_quantization_loses():
    scales = torch.tensor([1.0, 1.0, 1.0, 300.0])
    model = set_layer(nn.Linear(4, 3), torch.randn(3, 4, generator=torch.Generator().manual_seed(0)) / scales)
    x = randn(64, 4) * scales
    result = quantized(model, x, "ort_dynamic")
    merit, measured = result.plan.provenance["merit"]["sqnr_db"], result_sqnr_db(result, model, x)
    assert merit == pytest.approx(measured, abs=2) and merit < 20


def test_data_that_are_read_once_are_measured_and_a_note_says_why_nothing_was_tried():
    result = quantized(unequal(), iter(DATA), settings=Settings(correct_bias=False))
    assert "no repair was tried: the data cannot be read again; give a list, or a function that returns them" in (
        result.plan.rewrites
    )
    assert any(n.startswith("warning: rounding loses more than the bits explain: ") for n in result.plan.rewrites)
    assert result.plan.provenance["merit"]["samples"] == 64


@pytest.mark.parametrize("most, helps", [("activations", "'tflite_int16x8'"), ("weights", "rounding='learned')")])
def test_a_doubt_names_what_costs_most_and_what_helps(most, helps):
    torch.manual_seed(0)
    wide, filters, s = (
        nn.Conv2d(4, 24, 1),
        nn.Conv2d(24, 24, 3, groups=24),
        10 ** (-3 * torch.rand(24)).view(-1, 1, 1, 1),
    )
    with torch.no_grad():
        wide.weight.mul_(s)
        wide.bias.mul_(s.flatten())
        filters.weight.div_(s)
    net = sequential(wide, nn.ReLU6(), filters, nn.Sigmoid()) if most == "activations" else unequal()
    settings = Settings(correct_bias=False)
    (doubt,) = quantized(net, iter(DATA), "tflite_int8", settings=settings).report.warnings
    assert f"most is lost in {most}: " in doubt and doubt.endswith(helps)
    both, *found = (float(x) for x in re.findall(r"([0-9.]+) dB (?:are|with)", doubt.partition("have ")[2]))
    better = max(found)
    if most == "activations":
        (doubt,) = quantized(net, iter(DATA), settings=settings).report.warnings
        assert doubt.endswith("`result.sensitivity(data)` lists first")
        wider = quantized(net, DATA, "tflite_int16x8", settings=settings).plan.provenance["merit"]["sqnr_db"]
        assert better > both and wider == pytest.approx(better, abs=3)


def cancelling(seed=0):
    """Return a linear layer whose large weights cancel on its inputs, and these inputs, [N, 64] of rank 4."""
    torch.manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(64, 64)).Q
    layer = set_layer(nn.Linear(64, 4), torch.randn(4, 4) @ basis[:4] + 20 * torch.randn(4, 60) @ basis[4:])
    return sequential(layer, nn.Sigmoid()), randn(512, 4) @ basis[:4]


def test_weights_of_8_bits_are_fitted_to_their_inputs_where_rounding_loses_most_in_them():
    model, x = cancelling()
    data, new = list(x[:256].split(32)), x[256:]
    result, left = (quantized(model, data, "tflite_int16x8", settings=s) for s in (Settings(), OFF))
    assert any(n.startswith("rounding='gptq' taken: on 8 held-out samples") for n in said(result))
    assert not any("rounding loses more" in n for n in result.report.warnings)
    before, after = (result_sqnr_db(r, model, new) for r in (left, result))
    assert after > before + 6
    assert result.plan.provenance["merit"]["sqnr_db"] == pytest.approx(after, abs=2)
    assert result.plan.provenance["settings"]["steps"]["rounding"] == "gptq"
    assert result_sqnr_db(result.edit({"1": "float"}), model, new) > before + 6
    for settings in (Settings(rounding="off"), Settings(correct_bias=False), Settings(correct_bias=True)):
        assert not any("gptq" in n for n in quantized(model, data, "tflite_int16x8", settings=settings).plan.rewrites)


def test_what_the_user_decides_is_not_tried():
    result = quantized(unequal(), DATA, settings=Settings(equalize_groups="off", centre="off"))
    assert not any(n.startswith(("equalize_groups", "centre")) for n in said(result))
    assert any(n.startswith("equalize=True taken") for n in said(result))


def test_a_repaired_result_is_saved_loaded_and_edited_with_its_repairs(tmp_path):
    model = unequal()
    result = quantized(model, DATA)
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert loaded.decision.settings == result.decision.settings != Settings()
    edited = result.edit({"7": "float"})
    assert "merit" not in edited.plan.provenance and result_sqnr_db(edited, model) > 20


def normalized(net, x):
    """The network behind a normalization of columns of very different scale."""
    return net.layers((x - 3 * SCALES) / SCALES)


def time_step(net, t):
    """The network behind sines and cosines of a time step, whose arguments turn many times."""
    x = t[:, None].float() * torch.exp(-torch.arange(4.0))
    return net.layers(torch.cat([x.sin(), x.cos()], 1)[:, ::2])


def log_spectrum(net, x):
    """The network behind the logarithm of a spectrum, whose layers have 6 % of the multiplications."""
    waves = torch.outer(torch.arange(20.0), torch.arange(1.0, 5.0)) * 2 * torch.pi / 20
    return net.layers(((x @ waves.cos()).square() + (x @ waves.sin()).square() + 1e-6).log() / 8)


SCALES = torch.tensor([0.1, 1.0, 30.0, 1000.0])
QUIET = randn(128, 20) * 10 ** -(3 * torch.arange(128.0)[:, None] / 128)


@pytest.mark.parametrize(
    ("forward", "x"), [(normalized, randn(128, 4) * SCALES), (time_step, torch.arange(128) * 7), (log_spectrum, QUIET)]
)
def test_cheap_layers_that_need_more_than_8_bits_stay_in_float(forward, x, tmp_path):
    model = model_of(forward, layers=mlp(4, 32, 64, 3))
    settings = Settings(equalize_groups="off"), OFF
    result, off = (quantized(model, x, "tflite_int8", settings=s) for s in settings)
    assert result_sqnr_db(result, model, x) > 25 > 15 > result_sqnr_db(off, model, x)
    assert any(" in float: on 128 samples the outputs have " in n for n in result.plan.rewrites)
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    floats = [{n for n, how in r.plan.nodes.items() if how.exec == "float"} for r in (result, loaded.edit({}))]
    assert floats[0] and floats[0] == floats[1] and result.verify([x]).exact
    if forward is normalized:
        with pytest.raises(UnsupportedError, match="'x' is not quantized.*repairs='off'"):
            result.export(tmp_path / "net.tflite", io="int8")


def test_the_same_call_repairs_in_the_same_way():
    first, again = (quantized(unequal(), DATA) for _ in range(2))
    assert first.plan.rewrites == again.plan.rewrites and first.plan.provenance == again.plan.provenance


# ---------------------------------------------------------------- ranges


def peaks(channels=1, seed=0):
    """A detector of rare peaks: it returns the mean of what exceeds the noise, which clipping makes smaller."""
    torch.manual_seed(seed)
    conv = nn.Conv1d(channels, 8, 5, padding=2)
    return sequential(conv, nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(8, 3))


def spikes(count, seed, channels=1):
    x = 0.3 * randn(count, channels, 256, seed=seed)
    at = torch.randint(256, (count, 1, 1), generator=torch.Generator().manual_seed(seed))
    return x.scatter_add(2, at.expand(-1, channels, -1), 6 + 3 * randn(count, channels, 1, seed=seed + 1).abs())


def walks(count, seed, shape=(64,)):
    return randn(count, 3, *shape, seed=seed).cumsum(2)


def conv_stack(conv, pool, seed=1):
    torch.manual_seed(seed)
    layers = [p for i, o, s in ((3, 16, 1), (16, 32, 2), (32, 32, 1)) for p in (conv(i, o, 3, s, 1), nn.ReLU())]
    return sequential(*layers, pool(1), nn.Flatten(), nn.Linear(32, 8))


CASES = [
    (peaks(), spikes(64, 1), spikes(256, 3)),
    (peaks(2, seed=1), spikes(64, 1, 2), spikes(256, 3, 2)),
    (conv_stack(nn.Conv1d, nn.AdaptiveAvgPool1d), walks(64, 1), walks(256, 2)),
    (conv_stack(nn.Conv2d, nn.AdaptiveAvgPool2d), walks(64, 1, (32, 8)), walks(256, 2, (32, 8))),
]


@pytest.mark.parametrize("model, data, new", CASES)
def test_ranges_clip_nothing_where_rare_peaks_carry_the_answer(model, data, new):
    batches = list(data.split(16))
    best, by_mse, whole = (quantized(model, batches, **r) for r in ({}, {"rule": "mse"}, {"rule": "no_clipping"}))
    by = [result_sqnr_db(r, model, new) for r in (best, by_mse, whole)]
    assert by[0] > max(by[1:]) - 1.5, by  # the choice is made on 64 other samples
    rule, settings = best.decision.rules.rule, best.plan.provenance["settings"]
    noted = [n for n in best.plan.rewrites if n.startswith("ranges without clipping taken: on 64 samples")]
    assert rule == settings["rule"] and bool(noted) == (rule == "no_clipping")


def test_some_network_needs_its_peaks():
    assert any(quantized(m, list(d.split(16))).decision.rules.rule == "no_clipping" for m, d, _ in CASES)


def test_a_rule_that_the_user_names_stays():
    model, data, _ = CASES[0]
    assert quantized(model, list(data.split(16)), rule="mse").decision.rules.rule == "mse"


# ---------------------------------------------------------------- what the bits explain


def test_shares_of_noise_add_up_along_the_longest_path():
    graph = graph_of("a = Linear(x, w)", "b = Relu(a)", "y = Add(b, x)", weights={"w": torch.eye(4)})
    eight = (8 / 256) ** 2 / 12  # +-4 standard deviations in 256 steps
    plan = plan_of(x=stored(0.1), w=stored(0.1), b=stored(0.1), y=stored(0.1, bits=4))
    want = -10 * math.log10(3 * eight + (8 / 16) ** 2 / 12)
    assert expected_sqnr_db(graph, plan) == pytest.approx(want)
    assert expected_sqnr_db(graph, plan_of(x=None)) == math.inf
