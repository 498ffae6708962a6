"""Biases that follow measured mean errors by default, where the outputs of held-out samples gain by it."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Settings
from tests.build import model_of, quantized, randn, sequential, sqnr_db

DATA = list((randn(64, 3, 12, 12, seed=1) + 0.5).split(16))
NEW = randn(64, 3, 12, 12, seed=2) + 0.5
OFF = Settings(repairs="off")


def separable(seed=0):
    """A trained-like stack of depthwise and pointwise convolutions with folded batch norms, whose errors add up."""
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16), nn.ReLU()]
        layers += [nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6)).train()
    with torch.no_grad():
        for _ in range(20):
            model(torch.cat(DATA))
    return model.eval()


@torch.no_grad()
def result_sqnr_db(result, model, x=NEW):
    """Return signal over noise of the simulation's outputs on new samples."""
    return sqnr_db(model(x), result.model.eval()(x))


def biases(result):
    """Return the biases of the network by name."""
    return {n.bias: result.graph.weights[n.bias] for n in result.graph.nodes if n.bias in result.graph.weights}


def equal(a, b):
    a, b = biases(a), biases(b)
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def noted(result):
    return [n for n in result.plan.rewrites if "biases corrected by the measured mean errors of their layers" in n]


@pytest.mark.parametrize("platform", ["ort_cpu", "tflite_int8", "vitis_dpu", "ort_dynamic"])
def test_new_samples_lose_less_by_default_and_the_plan_has_a_note(platform):
    model = separable()
    result, left = quantized(model, DATA, platform), quantized(model, DATA, platform, settings=OFF)
    if platform != "ort_dynamic":  # errors of inputs have no mean there
        assert result_sqnr_db(result, model) > result_sqnr_db(left, model) + 1
        (note,) = noted(result)
        assert " on 21 held-out samples outputs have " in note and not noted(left)
    assert result_sqnr_db(result, model) > result_sqnr_db(left, model) - 0.1
    assert platform == "vitis_dpu" or result.verify(NEW[:8]).exact  # no runtime of that chip is here


def test_mean_outputs_of_the_first_layer_are_those_in_float_on_the_samples_that_biases_follow():
    torch.manual_seed(0)
    model = sequential(nn.Linear(40, 4))
    x = torch.rand(64, 40) * torch.rand(40)
    result = quantized(model, x, settings=Settings(correct_bias=None))
    ((fit,),), _ = result.decision.samples
    codes = result.plan["0.weight"].round(model[0].weight.detach())
    seen = result.plan["x"].round(fit) if result.plan.quantized("x") else fit
    wanted, got = (model(fit).mean(0), (seen @ codes.T).mean(0) + result.graph.weights["0.bias"])
    before = ((seen @ codes.T).mean(0) + model[0].bias - wanted).abs().max()
    assert noted(result) and (got - wanted).abs().max() < 0.2 * before  # what chance explains is left


@pytest.mark.parametrize("kind, options", [(nn.ConvTranspose2d, {"stride": 2}), (nn.Conv2d, {"padding": 1})])
def test_grouped_and_transposed_layers_get_their_means_back(kind, options):
    torch.manual_seed(2)
    chip = "openvino_cpu"  # all layers have integers there
    first, layer, last = nn.Conv2d(3, 8, 3), kind(8, 6, 3, groups=2, **options), nn.Conv2d(6, 4, 1)
    model = sequential(first, nn.ReLU(), layer, nn.ReLU(), last)
    result, left = quantized(model, DATA, chip), quantized(model, DATA, chip, settings=OFF)
    assert noted(result)[0].startswith("3 biases ") and result_sqnr_db(result, model) > result_sqnr_db(left, model)


@pytest.mark.parametrize("settings", [OFF, Settings(correct_bias=False)])
def test_settings_switch_it_off(settings):
    result = quantized(separable(), DATA, settings=settings)
    assert not noted(result) and result.graph is result.decision.graph and not result.corrections


def test_a_correction_that_the_user_asks_for_takes_its_place():
    result = quantized(separable(), DATA, settings=Settings(correct_bias=True))
    assert not noted(result) and result.corrections == ("bias",)


def test_biases_stay_where_there_is_no_sample_to_hold_out():
    assert not noted(quantized(separable(), DATA[0][:1]))


def test_an_edit_gives_the_biases_of_a_call_with_the_same_override():
    model = separable()
    overrides = {"9": "float"}
    edited = quantized(model, DATA, rule="mse").edit(overrides)
    called = quantized(model, DATA, rule="mse", overrides=overrides)
    assert equal(edited, called) and noted(edited) == noted(called)
    one, other = ({"3": "float"}, {"3": "float", "6": "float"})
    edited, called = (
        quantized(model, iter(DATA), rule="mse").edit(one).edit(other),
        quantized(model, DATA, rule="mse", overrides=other),
    )
    assert noted(called) and equal(edited, called) and noted(edited) == noted(called)


def test_the_merit_is_that_of_the_corrected_network():
    model = separable()
    result = quantized(model, DATA)
    assert result.plan.provenance["merit"]["sqnr_db"] == pytest.approx(
        result_sqnr_db(result, model, torch.cat(DATA)), abs=0.1
    )


def test_a_loaded_result_keeps_its_biases_and_an_edit_of_it_warns(tmp_path):
    result = quantized(separable(), DATA)
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert equal(loaded, result) and loaded.corrections == ("measured_bias",)
    edited = loaded.edit({"9": "float"})
    assert equal(edited, result)
    assert any(n.startswith("warning: biases keep their correction") for n in edited.plan.rewrites)


def test_training_starts_from_the_corrected_biases_and_moves_them_on():
    result = quantized(separable(), DATA, training="lsq")
    model = result.model.train()
    start = {k: v.detach().clone() for k, v in model.named_parameters() if k.endswith("bias")}
    assert noted(result) and any(torch.equal(b, v) for b in biases(result).values() for v in start.values())
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model(DATA[0]).square().sum().backward()
    optimizer.step()
    trained = result.trained()
    assert not equal(trained, result)
    kept = trained.edit({"9": "float"})
    assert equal(kept, trained) and not any(n.startswith("warning: biases stay") for n in kept.plan.rewrites)


def test_a_layer_whose_results_have_no_samples_counts_as_one():
    def forward(m, x):
        y = m.conv(x)
        return nn.functional.conv2d(y, m.kernel(y.mean((0, 2, 3))).view(4, 8, 1, 1))

    model = model_of(forward, conv=nn.Conv2d(3, 8, 3), kernel=nn.Linear(8, 32))
    result = quantized(model, list(NEW[:48].split(8)))  # 32 samples and 32 results
    assert result.verify([NEW[:8]]).exact
