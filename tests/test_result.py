"""A result: how it shows itself, its model, edits of it, which tensors hurt, and its overrides."""

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import chipfit
from chipfit import Limits, Settings
from chipfit.errors import PlanError, UnknownNameError
from chipfit.plan.training import Training
from chipfit.quantizers.algorithms.lsq import LSQ
from tests.build import NEAREST, halves, mlp, quantized, sequential

DATA = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).split(8))


def fit(model=None, data=DATA, platform="ort_cpu", **options):
    return quantized(model or mlp(3, 4, 2), data, platform, **options)


@pytest.fixture(scope="module")
def result():
    return fit(rule="mse")  # of open rules, the one with the better outputs is taken


def scales(plan):
    return {t.name: t.scale.tolist() for t in plan.tensors.values() if t.quantized}


def test_a_result_shows_float_operators_first_and_the_format_of_each_output():
    result = fit(halves(), platform="tflite_int8", overrides={"Erf": "float"})
    screen = result._summary()
    nodes = result.plan.nodes.values()
    integers = sum(n.exec != "float" for n in nodes)
    assert 0 < integers < len(nodes)
    assert screen.title == f"Result for tflite_int8: {integers} of {len(nodes)} operators in integers"
    runs = [row[2] for row in screen.rows]
    assert runs == sorted(runs, key=lambda r: r != "float") and runs.count("float") == len(nodes) - integers
    for who, op, run, stored, why in screen.rows:
        (node,) = (n for n in result.graph.nodes if (n.display_name, n.op) == (who, op))
        tensor = result.plan.tensors.get(node.outputs[0])
        assert stored == ("" if tensor is None else tensor.format) and bool(why) is (run == "float")
    split = next(n for n in result.graph.nodes if len(n.outputs) > 1)
    assert result.plan.tensors[split.outputs[0]].quantized
    stored = sum(t.quantized for t in result.plan.tensors.values())
    assert screen.facts["tensors"] == f"{stored} of {len(result.plan.tensors)} quantized"
    assert screen.facts["verified"] == "not yet: result.verify(data)"
    assert screen.facts["time"] == ", ".join(f"{k} {s:.2f} s" for k, s in result.timings.items())


def test_a_result_shows_the_first_line_of_its_verification(result):
    verified = replace(result, verification=SimpleNamespace(summary=lambda: "exact\nof many\nwords"))
    assert verified._summary().facts["verified"] == "exact"


# ---------------------------------------------------------------- the model and its training


def test_the_model_is_built_once(result):
    assert result.model is result.model


@pytest.mark.parametrize(
    "first", [lambda r: r.verify([(DATA[0], torch.zeros(8, dtype=torch.long))]), lambda r: r.model]
)
def test_a_model_that_an_evaluation_is_the_first_to_use_can_train(first):
    """Labels need the model's outputs; tensors that are made in inference mode have no gradients."""
    result = fit()
    with torch.inference_mode():
        first(result)
    result.model(DATA[0]).sum().backward()
    assert all(p.grad is not None for n, p in result.model.named_parameters() if n.endswith("weight"))


@pytest.mark.parametrize(
    "drawing, use",
    [
        ("chipfit.result.lower", lambda r, folder: r.model),
        ("chipfit.export.export", lambda r, folder: r.export(folder / "m.onnx")),
        ("chipfit.verify.verify", lambda r, folder: r.verify(DATA)),
        ("chipfit.result.sensitivity", lambda r, folder: r.sensitivity(DATA)),
        ("chipfit.result.pareto", lambda r, folder: r.pareto(DATA, shares=(100,))),
    ],
)
def test_the_random_numbers_of_the_user_go_on_as_if_nothing_had_been_drawn(drawing, use, tmp_path, monkeypatch):
    module, _, name = drawing.rpartition(".")
    original, drawn = getattr(importlib.import_module(module), name), []

    def draws(*args, **kwargs):
        drawn.append(torch.rand(1))
        return original(*args, **kwargs)

    result = fit()
    monkeypatch.setattr(drawing, draws)
    torch.manual_seed(5)
    use(result, tmp_path)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert drawn and after == torch.rand(1)


@pytest.mark.parametrize("by", [-2.0, -0.5, 0.25, 0.5, 1.0, 3.0])
def test_a_result_whose_model_was_trained_is_not_exported_verified_or_saved(by, tmp_path):
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


def test_training_can_be_chosen_after_quantization(result):
    assert result.training is None
    later = result.trains("lsq")
    assert later.training == fit(training="lsq").training and later.training.method == "lsq"
    assert result.training is None and later.model is not result.model
    assert later.trains(None).training is None
    assert later.edit({"2": {"rule": "no_clipping"}}).training == later.training
    assert result.edit({"2": {"rule": "no_clipping"}}).training is None


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
def test_an_edit_gives_the_scales_of_a_call_with_these_overrides(overrides):
    off = chipfit.Settings(repairs="off")
    edited, again = fit(settings=off).edit(overrides), fit(overrides=overrides, settings=off)
    assert scales(edited.plan) == scales(again.plan)
    assert {t.name: t.origin for t in edited.plan.tensors.values()} == {
        t.name: t.origin for t in again.plan.tensors.values()
    }
    assert edited.plan.rewrites == again.plan.rewrites
    assert edited.plan.provenance["edited"] == again.plan.provenance["settings"]["overrides"]


def test_edits_of_a_loaded_result_use_the_ranges_in_the_plan(result, tmp_path):
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    assert str(loaded.plan) == str(result.plan) and loaded.platform == result.platform
    edited = loaded.edit({"1": {"rule": "no_clipping"}}).plan
    name = next(n.output for n in result.graph.nodes if n.op == "Relu")
    seen = result.plan.tensors[name]
    assert float(edited.tensors[name].scale) == pytest.approx(seen.high / 255, rel=1e-6)
    assert edited.tensors[name].origin == "no_clipping over 1 batches"
    changed = {k for k, s in scales(edited).items() if s != scales(result.plan)[k]}
    assert changed == {name, "2.bias"}  # a bias follows from what is read


def test_without_data_a_range_rule_runs_without_its_statistic(result, tmp_path):
    loaded = chipfit.load(result.save(tmp_path / "saved"))
    edited = loaded.edit({"0": {"weight_rule": "hmse"}}).plan
    (note,) = [n for n in edited.rewrites if n not in result.plan.rewrites]
    assert note == "no importance is known of '0.weight': their range rules ran without it"
    again = replace(loaded, plan=edited).edit({"0": {"weight_rule": "hmse"}}).plan
    assert again.rewrites.count(note) == 1


@pytest.mark.parametrize("settings", [Settings(centre="always"), Settings(rounding="gptq")], ids=str)
def test_a_loaded_result_whose_settings_read_data_again_cannot_be_edited(settings, tmp_path):
    first = fit(settings=settings)
    assert first.edit({"2": "float"}).plan.nodes
    with pytest.raises(PlanError, match="needs the calibration data.*quantize again with these overrides"):
        chipfit.load(first.save(tmp_path / "saved")).edit({"2": "float"})


def test_an_edit_without_corrections_does_not_count_as_corrected(tmp_path):
    corrected = fit(platform="imx500", overrides={"0": {"bits": 4}})
    assert corrected.plan.provenance["corrected"] == ["rounding"]
    edited = corrected.edit({"1": {"rule": "mae"}})
    assert "corrected" not in edited.plan.provenance
    assert chipfit.load(edited.save(tmp_path / "saved")).edit({"2": "float"}).plan.nodes


def test_weights_of_few_bits_in_a_loaded_result_are_rounded_to_nearest_with_a_warning(tmp_path):
    first = fit(platform="imx500")
    assert not any("reads the data twice" in n for n in first.edit({"0": {"bits": 4}}).plan.rewrites)
    edited = chipfit.load(first.save(tmp_path / "saved")).edit({"0": {"bits": 4}}).plan
    assert any(n.startswith("warning: rounding=") and "reads the data twice" in n for n in edited.rewrites)
    assert edited.tensors["0.weight"].grid.bits == 4 and "corrected" not in edited.provenance


# ---------------------------------------------------------------- sensitivity and size against loss


def test_a_report_shows_sensitivities_and_the_pareto_curve_once_computed(tmp_path):
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
def test_a_pareto_curve_needs_the_name_of_a_limit(result, over):
    with pytest.raises(UnknownNameError, match=f"no limit named '{over}'"):
        result.pareto(DATA, over=over)


def test_a_loaded_result_keeps_its_outlier_threshold_in_edits(tmp_path):
    first = fit(z_threshold=1.0)
    loaded = chipfit.load(first.save(tmp_path / "saved"))
    assert loaded.plan.provenance["settings"]["z_threshold"] == 1.0
    finer = {"1": {"rule": "no_clipping"}}
    assert scales(first.edit(finer).plan) == scales(fit(z_threshold=1.0, overrides=finer).plan)
    assert scales(first.edit(finer).plan) != scales(fit(overrides=finer).plan)


def test_further_overrides_win_over_earlier_ones(tmp_path):
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


def test_bits_chosen_by_a_search_are_overrides_until_an_edit_replaces_them():
    searched = fit(platform="imx500", limits=Limits(weights="60%"), settings=NEAREST)
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


@pytest.mark.parametrize(
    "training", ["lsq", Training(weights=LSQ(use_grad_scaling=False), only={"2": None}, bn_momentum=0.2)]
)
def test_a_training_goes_on_in_another_process(training, tmp_path):
    torch.manual_seed(0)
    model, x = sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), torch.randn(4, 3, 6, 6)
    first = quantized(model, x, training=training)
    again = chipfit.load(first.save(tmp_path / "saved"))
    assert again.plan.provenance == first.plan.provenance
    for result in (first, again):
        optimizer = torch.optim.SGD(result.model.train().parameters(), 1e-6)
        result.model(x).square().sum().backward()
        optimizer.step()
    for (name, p), q in zip(first.model.named_parameters(), again.model.parameters(), strict=True):
        assert p.requires_grad == q.requires_grad and torch.equal(p, q), name
    assert torch.equal(first.trained().device_model(x), again.trained().device_model(x))
