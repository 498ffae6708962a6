"""`lint`: which operators would run in integers, before any data."""

from __future__ import annotations

import torch
from torch import nn

import chipfit
from tests.build import halves, mlp, quantized

DATA = list(torch.randn(16, 3, generator=torch.Generator().manual_seed(3)).split(8))


def fit(model=None, data=DATA, platform="ort_cpu", **options):
    return quantized(model or mlp(3, 4, 2), data, platform, **options)


def test_lint_shows_how_many_operators_run_in_integers():
    lint = chipfit.lint(halves(), DATA[0], "tflite_int8")
    screen = lint._summary()
    runs = [n.exec for n in lint.rows]
    assert [row[1] for row in screen.rows] == [n.op for n in lint.graph.nodes]
    assert screen.title == f"{len(runs) - runs.count('float')} of {len(runs)} operators run in integers on tflite_int8"
    assert [(row[2], bool(row[3])) for row in screen.rows] == [(r, r == "float") for r in runs]
    assert screen.facts["notes"] == "; ".join(lint.notes)


def test_lint_has_the_notes_of_the_plan():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    noted, plan = chipfit.lint(model, x, "tflite_int8").notes, fit(model, [x], "tflite_int8").plan
    assert set(noted) == {n for n in plan.rewrites if not n.startswith("warning: ")}
