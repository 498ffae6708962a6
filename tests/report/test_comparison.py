"""Two quantized networks beside each other."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import chipfit
from chipfit.errors import ConfigError, ExportError, PlanError
from chipfit.report.comparison import compare_reports
from chipfit.report.html import comparison_page
from tests.build import quantized, sequential

DATA = [torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(k)) for k in range(4)]


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))


@pytest.fixture(scope="module")
def result(net):
    made = quantized(net, torch.cat(DATA))
    made.verify(DATA[:1])
    return made


def test_a_result_is_equal_to_itself(result):
    found = chipfit.compare(result, result)
    assert found.equal and "equal" in repr(found) and found.plans == []
    assert all(p.alike for p in found.pairs) and len(found.pairs) == len(result.report.layers)
    assert all(a == b for a, b in found.facts.values())


def test_a_layer_kept_in_float_is_the_one_that_differs(result):
    found = chipfit.compare(result, result.edit({"3": "float"}), names=("all", "most"))
    other = {p.layer: p.differs for p in found.pairs if p.differs}
    assert other["3"]["runs in"] == ("int", "float") and set(other) == {"3"}
    assert found.facts["weights [bytes]"] == (
        3 * 9 * 8 + 8 * 4 + 288 * 5 + 5 * 4,
        3 * 9 * 8 + 8 * 4 + 4 * (288 * 5 + 5),
    )
    assert not found.equal and found.plans and "all | most: 1 of 4 operators differ" in repr(found)


def test_noise_is_measured_on_the_data_of_the_user(result):
    other = result.edit({"0": "float"})
    found = chipfit.compare(result, other, DATA[:2])
    outputs = [next(iter(r.similarity(DATA[:2]).outputs.values()))["sqnr_db"] for r in (result, other)]
    assert found.facts["output 'output' [dB]"] == pytest.approx(outputs)
    relu = next(p for p in found.pairs if p.op == "Relu")
    assert relu.a.sqnr_db == pytest.approx(result.similarity(DATA[:2]).layers["0"]["sqnr_db"])


def test_folders_files_and_reports_are_read(result, tmp_path):
    folder, report = result.save(tmp_path / "saved"), result.report.save(tmp_path / "r.json")
    for other in (folder, str(folder), report, result.report):
        found = chipfit.compare(result, other)
        assert all(p.alike for p in found.pairs), other
    assert chipfit.compare(result, report).plans is None and chipfit.compare(result, folder).plans == []
    assert chipfit.compare(folder, report).facts["device"][0].startswith("exact: 0 of ")


def test_operators_of_a_file_with_other_names_are_matched_by_their_order(net, tmp_path):
    litert = quantized(net, torch.cat(DATA), "tflite_int8")
    file = litert.export(tmp_path / "m.tflite", keep_layout=True)
    found = chipfit.compare(litert, file)
    matched = {p.op: (p.a.name, p.b.name) for p in found.pairs if p.a and p.b}
    assert {"Conv2D", "Relu", "Linear"} <= set(matched) and matched["Conv2D"][0] == "0"
    scales = [(p.a.scale, p.b.scale) for p in found.pairs if p.op == "Relu"]
    assert scales[0][0] == pytest.approx(scales[0][1])
    assert found.facts["model file [bytes]"] == (None, file.stat().st_size)


def test_an_operator_of_one_side_alone_is_named(result):
    fewer = replace(result.report, layers=result.report.layers[:-1])
    found = compare_reports(result.report, fewer, ("a", "b"))
    assert [p.layer for p in found.pairs if p.b is None] == ["3"] and "1 only in the first" in repr(found)
    assert [p.layer for p in compare_reports(fewer, result.report, ("a", "b")).pairs if p.a is None] == ["3"]


def test_the_comparison_is_data_a_page_and_a_figure(result, tmp_path):
    found = chipfit.compare(result, result.edit({"3": "float"}))
    data = json.loads(found.save(tmp_path / "c.json").read_text())
    assert data["equal"] is False and [r["layer"] for r in data["layers"] if r["differs"]] == ["3"]
    page = found.save(tmp_path / "c.html").read_text()
    assert "default-src 'none'" in page and "1 of 4 operators differ" in page
    with pytest.raises(ExportError, match="cannot have this suffix"):
        found.save(tmp_path / "c.txt")
    drawn = [list(line.get_xdata()) for line in found.plot().axes[0].get_lines()]
    known = [(p.a.sqnr_db, p.b.sqnr_db) for p in found.pairs if None not in (p.a.sqnr_db, p.b.sqnr_db)]
    assert all(a in drawn[0] and b in drawn[1] for a, b in known)


@pytest.mark.chromium
def test_a_browser_filters_the_comparison(result, browse):
    found = chipfit.compare(result, result.edit({"3": "float"}), names=("<b>a", "b"))
    script = 'document.getElementById("different").click()'
    dom, console = browse(comparison_page(found).replace("</body>", f"<script>{script}</script></body>"))
    assert console == [] and '<tr data-alike="1" hidden' not in dom and "4 of 4" in dom and "&lt;b&gt;a" in dom
    dom, _ = browse(comparison_page(found))
    assert dom.count('<tr data-alike="1" hidden') == 3 and "1 of 4" in dom


@pytest.mark.parametrize(
    ("other", "error", "words"),
    [
        (3, ConfigError, "does not accept.*int.*saved folder"),
        ("missing.json", PlanError, "missing.json"),
        ("nowhere", PlanError, "not a saved result"),
    ],
)
def test_what_cannot_be_compared_is_refused(result, other, error, words):
    with pytest.raises(error, match=words):
        chipfit.compare(result, other)


def test_a_report_of_other_contents_is_refused(result, tmp_path):
    (tmp_path / "r.json").write_text('{"platform": 3}')
    with pytest.raises(PlanError, match=r"platform"):
        chipfit.compare(result, tmp_path / "r.json")
    with pytest.raises(PlanError, match="contain the float network"):
        chipfit.compare(result, result.report, DATA)
    with pytest.raises(ConfigError, match="Two names"):
        chipfit.compare(result, result, names=("a",))
