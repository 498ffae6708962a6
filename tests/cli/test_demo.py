"""The demo goes the whole way: it learns, loses nothing, and proves it."""

from __future__ import annotations

import chipfit
from chipfit.cli.demo import run


def test_the_network_learns_and_its_integers_are_exact_and_saved(tmp_path):
    result = run(tmp_path, epochs=4)
    found = result.verification.accuracy
    assert found["float"] > 0.9  # guessing gives 0.1
    assert abs(found["device"] - found["float"]) <= 0.01
    assert result.verification.exact and found["integer"] == found["device"]
    assert result.report.integer_share == 1 and result.report.floats == {}
    assert "DepthwiseConv2D" in {r.op for r in result.report.layers}
    assert {p.name for p in tmp_path.iterdir()} == {"digits.onnx", "plan", "report.html"}
    again = chipfit.load(tmp_path / "plan")
    assert again.plan.platform == "ort_cpu" and again.graph.inputs == result.graph.inputs
