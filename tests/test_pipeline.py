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


@pytest.mark.parametrize(
    "call",
    [
        lambda r: chipfit.quantize(network(), DATA, "ort_cpu", "mse"),
        lambda r: r.export("m.onnx", "int8"),
        lambda r: r.verify(DATA, "onnxruntime"),
    ],
)
def test_options_are_given_by_name(result, call):
    with pytest.raises(TypeError, match="positional argument"):
        call(result)


# ---------------------------------------------------------------- what a result says of itself


class Halves(nn.Module):
    """Two results of one operator, and one operator that the chip leaves in float."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 4)

    def forward(self, x):
        one, two = self.a(x).chunk(2, -1)
        return torch.erf(one) + two


def test_a_result_shows_what_stays_float_first_and_how_each_result_is_stored():
    result = fit(Halves().eval(), platform="tflite_int8")
    screen = result._summary()
    nodes = result.plan.nodes.values()
    integers = sum(n.exec != "float" for n in nodes)
    assert 0 < integers < len(nodes)
    assert screen.title == f"Result for tflite_int8: {integers} of {len(nodes)} operators in integers"
    runs = [row[2] for row in screen.rows]
    assert runs == sorted(runs, key=lambda r: r != "float") and runs.count("float") == len(nodes) - integers
    for who, op, run, stored, why in screen.rows:
        (node,) = (n for n in result.graph.nodes if (n.who, n.op) == (who, op))
        tensor = result.plan.tensors.get(node.outputs[0])
        assert stored == ("" if tensor is None else tensor.format) and bool(why) is (run == "float")
    split = next(n for n in result.graph.nodes if len(n.outputs) > 1)
    assert result.plan.tensors[split.outputs[0]].quantized
    stored = sum(t.quantized for t in result.plan.tensors.values())
    assert screen.facts["tensors"] == f"{stored} of {len(result.plan.tensors)} stored in codes"
    assert screen.facts["verified"] == "not yet: result.verify(data)"
    assert screen.facts["time"] == ", ".join(f"{k} {s:.2f} s" for k, s in result.timings.items())


def test_a_result_shows_the_first_line_of_its_verification(result):
    verified = replace(result, verification=SimpleNamespace(summary=lambda: "exact\nof many\nwords"))
    assert verified._summary().facts["verified"] == "exact"


def test_lint_shows_how_many_operators_run_in_integers():
    lint = chipfit.lint(Halves().eval(), DATA[0], "tflite_int8")
    screen = lint._summary()
    runs = [n.exec for n in lint.rows]
    assert [row[1] for row in screen.rows] == [n.op for n in lint.graph.nodes]
    assert screen.title == f"{len(runs) - runs.count('float')} of {len(runs)} operators run in integers on tflite_int8"
    assert [(row[2], bool(row[3])) for row in screen.rows] == [(r, r == "float") for r in runs]
    assert screen.facts["notes"] == "; ".join(lint.notes)


def test_lint_notes_what_the_rewrites_and_the_formats_say():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    noted, plan = chipfit.lint(model, x, "tflite_int8").notes, fit(model, [x], "tflite_int8").plan
    assert set(noted) == {n for n in plan.rewrites if not n.startswith("warning: ")}


# ---------------------------------------------------------------- the model and its training


def test_the_model_is_made_once(result):
    assert result.model is result.model


@pytest.mark.parametrize("by", [-2.0, -0.5, 0.25, 0.5, 1.0, 3.0])
def test_a_model_that_has_changed_is_not_exported_verified_or_saved_by_mistake(by, tmp_path):
    result = fit()
    assert result.export(tmp_path / "before.onnx").exists()
    with torch.no_grad():
        next(p for p in result.model.parameters() if p.dim() > 1).add_(by)
    calls = (
        lambda: result.export(tmp_path / "after.onnx"),
        lambda: result.verify(DATA),
        lambda: result.save(tmp_path / "saved"),
        lambda: result.edit({"2": "float"}),
        lambda: result.trains("lsq"),
        lambda: result.device_model,
    )
    for call in calls:
        with pytest.raises(PlanError, match="`model` has changed since it was made"):
            call()
    assert [p.name for p in tmp_path.iterdir()] == ["before.onnx"]
    fresh = result.as_calibrated()
    assert torch.equal(fresh.model(DATA[0]), fit().model(DATA[0])) and fresh.verification is None


def test_what_trains_is_chosen_afterwards_as_well_as_before(result):
    assert result.training is None
    later = result.trains("lsq")
    assert later.training == fit(training="lsq").training and later.training.method == "lsq"
    assert result.training is None and later.model is not result.model
    assert later.trains(None).training is None
    assert later.edit({"2": {"rule": "no_clipping"}}).training == later.training
    assert result.edit({"2": {"rule": "no_clipping"}}).training is None


def test_training_on_folded_batch_norms_keeps_the_weights_from_being_rounded_to_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    few, data = {"overrides": {"0": {"bits": 4}}, "platform": "imx500"}, [torch.randn(8, 3, 6, 6)]
    steps = {}
    for bn_fold in (0, 4):
        plan = fit(model, data, training={"method": "lsq", "bn_fold": bn_fold}, **few).plan
        steps[bn_fold] = plan.provenance["settings"].get("steps"), plan.provenance.get("corrected")
    assert steps[4] == ({"rounding": "off"}, None)
    assert steps[0][0] is None and "rounding" in steps[0][1]
    asked = Settings(rounding="off", collapse_linear=True)
    plan = fit(model, data, training={"method": "lsq", "bn_fold": 4}, settings=asked, **few).plan
    assert plan.provenance["settings"]["steps"] == {"collapse_linear": True, "rounding": "off"}


# ---------------------------------------------------------------- edits

EDITS = [
    {"1": {"rule": "no_clipping"}},
    {"1": {"rule": "mae"}},
    {"0": {"weight_rule": "no_clipping", "per": "tensor"}},
    {"1": {"rule": "hmse"}},
    {"0": {"weight_rule": "hmse"}},
    {"0": {"range": (0.0, 2.0)}},
    {"1": {"z_threshold": 1.0}},
]


@pytest.mark.parametrize("overrides", EDITS, ids=str)
def test_an_edit_decides_as_quantizing_with_it_would(result, overrides):
    edited, again = result.edit(overrides), fit(overrides=overrides)
    assert scales(edited.plan) == scales(again.plan)
    assert {t.name: t.origin for t in edited.plan.tensors.values()} == {
        t.name: t.origin for t in again.plan.tensors.values()
    }
    assert edited.plan.rewrites == again.plan.rewrites
    assert edited.plan.provenance["edited"] == again.plan.provenance["settings"]["overrides"]


def test_a_loaded_result_is_edited_by_the_ranges_that_the_plan_remembers(result, tmp_path):
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert str(loaded.plan) == str(result.plan) and loaded.platform == result.platform
    edited = loaded.edit({"1": {"rule": "no_clipping"}}).plan
    name = next(n.output for n in result.graph.nodes if n.op == "Relu")
    seen = result.plan.tensors[name]
    assert float(edited.tensors[name].scale) == pytest.approx(seen.high / 255, rel=1e-6)
    assert edited.tensors[name].origin == "no_clipping over 1 batches"
    changed = {k for k, s in scales(edited).items() if s != scales(result.plan)[k]}
    assert changed == {name, "2.bias"}  # a bias follows from what is read


def test_without_data_every_error_counts_alike(result, tmp_path):
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    edited = loaded.edit({"0": {"weight_rule": "hmse"}}).plan
    (note,) = [n for n in edited.rewrites if n not in result.plan.rewrites]
    assert note == "no importance is known of '0.weight': their range rules ran without it"
    again = replace(loaded, plan=edited).edit({"0": {"weight_rule": "hmse"}}).plan
    assert again.rewrites.count(note) == 1


@pytest.mark.parametrize("settings", [Settings(centre="always"), Settings(rounding="gptq")], ids=str)
def test_a_loaded_result_whose_rewrites_read_the_data_is_not_edited(settings, tmp_path):
    first = fit(settings=settings)
    assert first.edit({"2": "float"}).plan.nodes
    with pytest.raises(PlanError, match="calibration data are not here.*quantize again with these overrides"):
        chipfit.load(first.save(tmp_path / "saved")).edit({"2": "float"})


def test_few_bits_of_a_loaded_result_take_their_nearest_codes_and_that_is_said(tmp_path):
    first = fit(platform="imx500")
    assert not any("reads the data twice" in n for n in first.edit({"0": {"bits": 4}}).plan.rewrites)
    edited = chipfit.load(first.save(tmp_path / "saved")).edit({"0": {"bits": 4}}).plan
    assert any(n.startswith("warning: rounding=") and "reads the data twice" in n for n in edited.rewrites)
    assert edited.tensors["0.weight"].grid.bits == 4 and "corrected" not in edited.provenance


# ---------------------------------------------------------------- what hurts, and what limits cost


def test_a_report_has_sensitivities_and_a_curve_once_they_are_found(tmp_path):
    torch.manual_seed(0)
    result = fit(platform="imx500", overrides={"2": "float"})
    assert result.report.sensitivity == () and result.report.pareto == ()
    found = result.sensitivity(DATA)
    assert {"0.weight"} <= found.losses.keys() and "2.weight" not in found.losses
    assert result.report.sensitivity == tuple(found.rows()) and result.report.pareto == ()
    curve = result.pareto(DATA, shares=(100, 60))
    assert result.report.pareto == curve.points and len(curve.points) > 0
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert "2.weight" not in loaded.sensitivity(DATA).losses


@pytest.mark.parametrize("over", ["loss", "weight", ""])
def test_a_curve_is_over_what_limits_limit(result, over):
    with pytest.raises(UnknownNameError, match=f"no limit named '{over}'"):
        result.pareto(DATA, over=over)


# ---------------------------------------------------------------- nothing to quantize


def test_a_model_of_which_nothing_can_be_quantized_names_eight_reasons_once_each():
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
        fit(twice, data, "tflite_int8")
    assert str(e.value).count("Erf '0': ") == 1


# ---------------------------------------------------------------- overrides that were given


def test_more_overrides_stand_behind_those_that_were_given(tmp_path):
    first = fit(overrides={"2": "float"})
    more = {"0": {"rule": "mae"}}
    assert first.decision.with_overrides(more).overrides == [("2", "float"), ("0", {"rule": "mae"})]
    assert (
        chipfit.load(first.save(tmp_path / "saved")).decision.with_overrides(more).overrides
        == first.decision.with_overrides(more).overrides
    )
    edited = first.edit({"2": "float", "0": {"weight_rule": "mae"}})
    assert edited.decision.all_overrides == [("2", "float"), ("0", {"weight_rule": "mae"})]
    assert chipfit.load(edited.save(tmp_path / "edited")).decision.all_overrides == edited.decision.all_overrides
    assert fit().decision.all_overrides == []


def test_widths_that_a_search_chose_are_overrides_until_an_edit_replaces_them():
    searched = fit(platform="imx500", limits=Limits(weights="60%"), settings=Settings(rounding="off"))
    chosen, record = searched.plan.provenance["chosen"], searched.plan.provenance
    assert chosen and all(searched.plan[t].grid.bits == bits for t, bits in chosen.items())
    assert record["limits"] == {"weights": "60%"} and record["widths"].keys() == chosen.keys()
    asked = [k for _, table in searched.decision.all_overrides for k in table]
    assert asked and set(asked) <= {"bits", "activation_bits"}
    assert searched.edit({"1": {"rule": "mae"}}).decision.all_overrides == [("1", {"rule": "mae"})]
    assert "search" in searched.timings and "correct" not in searched.timings


def test_a_result_with_limits_is_loaded_with_the_bits_that_were_chosen(tmp_path):
    searched = fit(platform="imx500", limits=Limits(weights="60%"))
    loaded = chipfit.load(searched.save(tmp_path / "saved"))
    assert str(loaded.plan) == str(searched.plan)
    assert loaded.decision.all_overrides == searched.decision.all_overrides
