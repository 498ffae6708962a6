"""`quantize`: its options, what is refused before data are read, and what the plan tells of the call."""

import logging
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit import Limits, Settings, steps
from chipfit.errors import ConfigError, NothingQuantizedError, UnknownNameError
from chipfit.platform.load import load_platform
from tests.build import graph_of, mlp, quantized

DATA = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).split(8))
NORM = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)).eval()


def fit(model=None, data=DATA, platform="ort_cpu", **options):
    return quantized(model or mlp(3, 4, 2), data, platform, **options)


@pytest.fixture(scope="module")
def result():
    return fit(rule="mse")


def scales(plan):
    return {t.name: t.scale.tolist() for t in plan.tensors.values() if t.quantized}


@pytest.mark.parametrize(
    "options",
    [
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"seed": np.int16(3)},
        {"z_threshold": None},
        {"z_threshold": 0.5},
        {"limits": None},
        {"limits": Limits(weights="50%")},
        {"settings": Settings()},
    ],
    ids=str,
)
def test_options_of_the_right_kind_are_accepted(options):
    with pytest.raises(UnknownNameError, match="no_such_chip"):  # which is looked at behind them
        chipfit.quantize(None, None, "no_such_chip", **options)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"seed": -(2**63) - 1}, "an integer of 64 bits"),
        ({"seed": 2**63}, "an integer of 64 bits"),
        ({"seed": 1.0}, "an integer of 64 bits"),
        ({"seed": None}, "an integer of 64 bits"),
        ({"z_threshold": 0}, "None, or above 0"),
        ({"z_threshold": -1.0}, "None, or above 0"),
        ({"z_threshold": "3"}, "None, or above 0"),
        ({"limits": {"weights": "50%"}}, r"None, or chipfit.Limits\(...\)"),
        ({"settings": None}, r"chipfit.Settings\(...\)"),
        ({"settings": {}}, r"chipfit.Settings\(...\)"),
    ],
    ids=str,
)
def test_options_of_the_wrong_kind_are_refused_before_anything_is_read(options, allowed):
    with pytest.raises(ConfigError, match=f"Value of option '{next(iter(options))}' is not allowed.*{allowed}"):
        chipfit.quantize(None, None, "no_such_chip", **options)


def test_a_long_option_is_shown_by_its_first_120_characters():
    with pytest.raises(ConfigError) as e:
        chipfit.quantize(None, None, seed="x" * 200)
    assert "'" + "x" * 119 in str(e.value) and "x" * 120 not in str(e.value)


class Unread:
    def __iter__(self):
        raise AssertionError("the data were read")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rule": "maximum"}, UnknownNameError),
        ({"weight_rule": "maximum"}, UnknownNameError),
        ({"platform": "no_such_chip"}, UnknownNameError),
        ({"settings": Settings(rounding="gptq", correct_bias=True)}, ConfigError),
        ({"training": "no_such_training"}, UnknownNameError),
    ],
    ids=str,
)
def test_impossible_options_are_refused_before_data_are_read(options, error):
    with pytest.raises(error):
        fit(data=Unread(), **options)


def test_the_plan_records_the_options_of_the_call(result):
    assert result.plan.provenance["settings"] == {"seed": 0, "rule": "mse", "weight_rule": "mse"}
    how = {"rule": "no_clipping", "weight_rule": "lp(p=3)", "z_threshold": 4.0, "overrides": {"2": {"bits": 8}}}
    told = fit(**how, settings=Settings(correct_bias=True, repairs="off"), seed=np.int64(7)).plan.provenance["settings"]
    assert told == how | {"seed": 7, "steps": {"correct_bias": True, "repairs": "off"}} and type(told["seed"]) is int


def test_the_plan_records_a_digest_of_every_sample(result):
    digests = result.plan.provenance["samples"]
    assert digests == sorted(set(digests)) and len(digests) == 16
    assert fit(data=[torch.cat([DATA[0], DATA[0]])]).plan.provenance["samples"] == sorted(
        fit(data=DATA[:1]).plan.provenance["samples"]
    )


def test_a_result_has_the_seconds_of_each_stage():
    left = fit(settings=Settings(repairs="off"))
    assert set(left.timings) == {"capture", "assign", "calibrate", "ranges", "repairs"}
    assert set(fit(settings=Settings(correct_bias=True)).timings) == {
        "capture",
        "assign",
        "calibrate",
        "ranges",
        "repairs",
        "correct",
    }


def test_stages_are_shown_unless_progress_is_false(capfd):
    chipfit.quantize(mlp(3, 4, 2), DATA)
    shown = capfd.readouterr().err
    assert all(f"chipfit {stage}: " in shown for stage in ("capture", "calibrate", "ranges"))
    chipfit.quantize(mlp(3, 4, 2), DATA, progress=False)
    assert capfd.readouterr().err == ""


def test_warnings_of_the_plan_are_logged_if_progress_is_shown(caplog):
    with caplog.at_level(logging.INFO, "chipfit"):
        plan = fit(data=[DATA[0][:1]], progress=True).plan
        first = [r.getMessage() for r in caplog.records if r.name == "chipfit"]
        fit(data=[DATA[0][:1]])
        assert [r.getMessage() for r in caplog.records if r.name == "chipfit"] == first
    assert first == [n for n in plan.rewrites if n.startswith("warning: ")] and "a single sample" in first[0]
    assert all(r.levelno == logging.WARNING for r in caplog.records if r.name == "chipfit")
    caplog.clear()
    noted = fit(progress=True, overrides=[("Linear", {"rule": "no_clipping"}), ("Relu", {"rule": "mse"})])
    assert noted.plan.rewrites and not [r for r in caplog.records if r.name == "chipfit"]


def test_the_scale_of_the_first_batch_is_checked_unless_there_is_an_example():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).eval(), 255 * DATA[0]
    assert any("as in training" in n for n in fit(model, [x]).plan.rewrites)
    assert not any("as in training" in n for n in fit(model, [x], example=DATA[0]).plan.rewrites)


@pytest.mark.parametrize(
    "options",
    [
        {"rule": "hmse"},
        {"weight_rule": "hmse"},
        {"settings": Settings(rounding="gptq")},
        {"overrides": {"0": {"bits": 4}}, "platform": "imx500"},
        {"limits": Limits(weights="60%"), "platform": "imx500"},
        {
            "model": nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)).eval(),
            "settings": Settings(rounding="off", smooth=0.5),
        },
    ],
    ids=str,
)
def test_batches_of_an_iterator_are_kept_if_they_are_read_twice(options):
    once, again = fit(data=iter(DATA), **options), fit(**options)
    assert scales(once.plan) == scales(again.plan) and once.plan.rewrites == again.plan.rewrites
    assert not any("reads the data twice" in n for n in once.plan.rewrites)


def test_batches_of_an_iterator_are_not_kept_if_they_are_read_once():
    kept = []

    def batches():
        for x in DATA:
            kept.append(weakref.ref(x := x.clone()))
            yield x

    once = fit(data=batches())
    assert scales(once.plan) == scales(fit().plan) and len(kept) == len(DATA)
    assert [x for x in kept[1:] if x() is not None] == []  # the first is the graph's example


@pytest.mark.parametrize("rule, wanted", [("no_clipping", False), ("mse", True)])
def test_after_a_rewrite_only_the_histograms_that_range_rules_read_are_collected_again(rule, wanted):
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval()
    result = fit(net, rule=rule, settings=Settings(centre="always"))
    (first,) = (n for n in result.plan.rewrites if n.startswith("centred the result of '0'"))
    seen = result.stats[result.graph.nodes[0].output]
    assert first and float(seen.mean.abs().max()) < 1e-6 and (seen.histogram is not None) is wanted


def test_weights_are_copies_of_the_models_and_tied_ones_stay_tied():
    w = torch.eye(4)
    graph = graph_of("a = Linear(x, v)", "b = Linear(a, w)", weights={"v": w, "w": w})
    new, _ = steps.rewrite(graph, load_platform("ort_cpu"), Settings())
    first, second = new.weights["v"], new.weights["w"]
    assert first is second and torch.equal(first, w) and first.data_ptr() != w.data_ptr()


def test_training_with_folded_batch_norms_turns_rounding_and_repairs_off():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    few, data = {"overrides": {"0": {"bits": 4}}, "platform": "imx500"}, [torch.randn(8, 3, 6, 6)]
    steps = {}
    for bn_fold in (0, 4):
        plan = fit(model, data, training={"method": "lsq", "bn_fold": bn_fold}, **few).plan
        steps[bn_fold] = plan.provenance["settings"].get("steps"), plan.provenance.get("corrected")
    assert steps[4] == ({"repairs": "off", "rounding": "off"}, None)
    assert steps[0][0] is None and "rounding" in steps[0][1]
    asked = Settings(rounding="off", collapse_linear=True)
    plan = fit(model, data, training={"method": "lsq", "bn_fold": 4}, settings=asked, **few).plan
    assert plan.provenance["settings"]["steps"] == {"collapse_linear": True, "repairs": "off", "rounding": "off"}


@pytest.mark.parametrize(
    "call",
    [
        lambda r: chipfit.quantize(mlp(3, 4, 2), DATA, "ort_cpu", "mse"),
        lambda r: r.export("m.onnx", "int8"),
        lambda r: r.verify(DATA, "onnxruntime"),
    ],
)
def test_options_must_be_given_by_name(result, call):
    with pytest.raises(TypeError, match="positional argument"):
        call(result)


def test_a_model_that_stays_in_float_is_refused_with_up_to_eight_reasons():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(10))).eval()
    data = [torch.randn(4, 2)]
    with pytest.raises(NothingQuantizedError) as e:
        fit(model, data, overrides={"*": "float"})
    said = str(e.value)
    assert said.startswith("Nothing in this model can be quantized on 'ort_cpu'")
    assert [f"Linear '{k}': " in said for k in range(10)] == [True] * 8 + [False] * 2
    assert "`chipfit platforms show ort_cpu`" in said

    class Erf(nn.Module):
        def forward(self, x):
            return torch.erf(x)

    twice = nn.Sequential(shared := Erf(), shared)
    with pytest.raises(NothingQuantizedError) as e:
        fit(twice, data, "ort_cpu")
    assert str(e.value).count("Erf '0': ") == 1
