"""What `quantize`, its result, `lint` and `load` promise around the steps themselves."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import chipfit
from chipfit import Limits, Settings
from chipfit.errors import ConfigError, NothingQuantizedError, PlanError, UnknownNameError
from chipfit.platform.load import load_platform

DATA = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).split(8))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


def fit(model=None, data=DATA, platform="ort_cpu", progress=False, **options):
    return chipfit.quantize(model or network(), data, platform, progress=progress, **options)


@pytest.fixture(scope="module")
def result():
    return fit()


def scales(plan):
    return {t.name: t.scale.tolist() for t in plan.tensors.values() if t.quantized}


# ---------------------------------------------------------------- options


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
def test_an_option_of_its_kind_is_taken(options):
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
def test_an_option_of_another_kind_is_refused_before_anything_is_looked_at(options, allowed):
    with pytest.raises(ConfigError, match=f"'{next(iter(options))}' is not understood.*{allowed}"):
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
def test_what_cannot_be_is_refused_before_data_are_read(options, error):
    with pytest.raises(error):
        fit(data=Unread(), **options)


def test_the_plan_tells_what_it_was_made_with(result):
    assert result.plan.provenance["settings"] == {"seed": 0, "rule": "mse", "weight_rule": "mse"}
    how = {"rule": "no_clipping", "weight_rule": "lp(p=3)", "z_threshold": 4.0, "overrides": {"2": {"bits": 8}}}
    told = fit(**how, settings=Settings(correct_bias=True), seed=np.int64(7)).plan.provenance["settings"]
    assert told == how | {"seed": 7, "steps": {"correct_bias": True}} and type(told["seed"]) is int


def test_every_sample_is_remembered_by_a_digest_of_its_own(result):
    digests = result.plan.provenance["samples"]
    assert digests == sorted(set(digests)) and len(digests) == 16
    assert fit(data=[torch.cat([DATA[0], DATA[0]])]).plan.provenance["samples"] == sorted(
        fit(data=DATA[:1]).plan.provenance["samples"]
    )


def test_the_time_of_each_stage_is_told():
    assert set(fit().timings) == {"capture", "assign", "calibrate", "ranges"}
    assert set(fit(settings=Settings(correct_bias=True)).timings) == {
        "capture",
        "assign",
        "calibrate",
        "ranges",
        "correct",
    }


def test_stages_are_shown_unless_they_are_not_wanted(capfd):
    chipfit.quantize(network(), DATA)
    shown = capfd.readouterr().err
    assert all(f"chipfit {stage}: " in shown for stage in ("capture", "calibrate", "ranges"))
    chipfit.quantize(network(), DATA, progress=False)
    assert capfd.readouterr().err == ""


def test_warnings_of_the_plan_are_logged_where_progress_is_shown(caplog):
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


def test_an_example_is_not_doubted_and_the_first_batch_of_the_data_is():
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
    ],
    ids=str,
)
def test_what_reads_the_data_twice_keeps_those_of_an_iterator(options):
    once, again = fit(data=iter(DATA), **options), fit(**options)
    assert scales(once.plan) == scales(again.plan) and once.plan.rewrites == again.plan.rewrites
    assert not any("reads the data twice" in n for n in once.plan.rewrites)


def test_what_reads_the_data_once_keeps_nothing_of_an_iterator():
    kept = []

    def batches():
        for x in DATA:
            kept.append(weakref.ref(x := x.clone()))
            yield x

    once = fit(data=batches())
    assert scales(once.plan) == scales(fit().plan) and len(kept) == len(DATA)
    assert [x for x in kept[1:] if x() is not None] == []  # the first is the graph's example


def test_a_result_with_a_threshold_for_outliers_is_loaded_and_edited_with_it(tmp_path):
    first = fit(z_threshold=1.0)
    loaded = chipfit.load(first.save(tmp_path / "saved"))
    assert loaded.plan.provenance["settings"]["z_threshold"] == 1.0
    finer = {"1": {"rule": "no_clipping"}}
    assert scales(first.edit(finer).plan) == scales(fit(z_threshold=1.0, overrides=finer).plan)
    assert scales(first.edit(finer).plan) != scales(fit(overrides=finer).plan)
