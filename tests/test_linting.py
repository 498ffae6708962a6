"""`lint`: which operators would run in integers, before any data."""

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import UnsupportedError
from chipfit.report.terminal import RUNS
from tests.build import halves, mlp, model_of, quantized

DATA = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).split(8))


def fit(model=None, data=DATA, platform="ort_cpu", **options):
    return quantized(model or mlp(3, 4, 2), data, platform, **options)


def test_lint_shows_how_many_operators_run_in_integers():
    lint = chipfit.lint(halves(), DATA[0], "tflite_int8")
    screen = lint._summary()
    runs = [n.exec for n in lint.rows]
    assert [row[1] for row in screen.rows] == [n.op for n in lint.graph.nodes]
    count = f"{len(runs) - runs.count('float')} of {len(runs)}"
    assert screen.title == f"{count} operators can run in integers on tflite_int8"
    assert [(row[2], bool(row[3])) for row in screen.rows] == [(RUNS[r], r == "float") for r in runs]
    assert screen.facts["notes"] == "; ".join(lint.notes)


def test_lint_has_the_notes_of_the_plan():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    noted, plan = chipfit.lint(model, x, "tflite_int8").notes, fit(model, [x], "tflite_int8").plan
    assert set(noted) == {n for n in plan.rewrites if not n.startswith("warning: ")}


def test_of_many_operators_those_of_a_layer_stand_in_one_row_and_floats_come_first():
    layers = {"first": nn.Linear(4, 4), "rnn": nn.GRU(4, 3, batch_first=True), "head": nn.Linear(3, 2)}
    net = model_of(lambda m, x: m.head(m.rnn(m.first(x))[0][:, -1]), **layers)
    lint = chipfit.lint(net, torch.randn(2, 9, 4), "tflite_int8", overrides={"head": "float"})
    rows = lint._summary().rows
    assert [row[0] for row in rows] == ["head", "first", "rnn"]
    inside = [n.op for n in lint.rows if n.layer == "rnn"]
    assert rows[2][1].startswith(f"{len(inside)}: ") and len(inside) > 90 and rows[2][2] == "integers"


def test_notes_name_batch_norms_as_the_model_does():
    model = nn.Sequential()
    model.add_module("act", nn.Tanh())
    model.add_module("norm", nn.BatchNorm2d(3))
    notes = chipfit.lint(model.eval(), torch.randn(2, 3, 4, 4), "tflite_int8").notes
    assert "batch norm 'norm' does not fold backwards: it follows Tanh, which has no weights" in notes


def test_an_operator_without_a_form_in_the_only_file_of_a_platform_is_named_before_calibration(tmp_path):
    model, x = model_of(lambda m, x: m.c(x).tan(), c=nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    notes = [chipfit.lint(model, x, p).notes for p in ("tflite_int8", "ort_cpu")]
    assert [any("aten.tan.default 'tan' has no form" in n for n in found) for found in notes] == [True, False]
    fit(model, [x], "ort_cpu").export(tmp_path / "m.onnx")
    with pytest.raises(UnsupportedError, match="aten.tan.default 'tan'"):
        fit(model, [x], "tflite_int8").export(tmp_path / "m.tflite")
