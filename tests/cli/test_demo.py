"""The demo goes the whole way: it learns, loses nothing, and proves it."""

from __future__ import annotations

import pytest

import chipfit
from chipfit.cli.demo import run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return run(folder, epochs=4), folder


def test_the_network_learns_and_integers_keep_it(demo):
    found = demo[0].verification.accuracy
    assert found["float"] > 0.9  # guessing gives 0.1
    assert abs(found["device"] - found["float"]) <= 0.01


def test_onnx_runtime_computes_the_simulated_integers(demo):
    assert demo[0].verification.exact
    assert demo[0].verification.accuracy["integer"] == demo[0].verification.accuracy["device"]


def test_every_operator_runs_in_integers(demo):
    assert demo[0].report.integer_share == 1 and demo[0].report.floats == {}
    assert "DepthwiseConv2D" in {r.op for r in demo[0].report.layers}


def test_it_leaves_a_model_a_plan_and_a_page(demo):
    assert {p.name for p in demo[1].iterdir()} == {"digits.onnx", "plan", "report.html"}
    assert chipfit.load(demo[1] / "plan").plan.platform == "ort_cpu"
    assert chipfit.load(demo[1] / "plan").graph.inputs == demo[0].graph.inputs
