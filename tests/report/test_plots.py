"""Plots are matplotlib figures: their bars and points are the numbers of the object that draws them."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from chipfit import Report
from chipfit.errors import ExportError, PlanError, UnknownNameError
from chipfit.search.sensitivity import Sensitivity
from tests.build import quantized, sequential
from tests.processes import python


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    net = sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    made = quantized(net, torch.randn(32, 3, 8, 8))
    made.verify([torch.randn(4, 3, 8, 8)])
    return made


def lengths(figure):
    """Return the length of each bar by its name."""
    axes = figure.axes[0]
    names = [t.get_text() for t in axes.get_yticklabels()]
    return dict(zip(names, [p.get_width() for p in axes.patches], strict=True))


def test_a_report_draws_the_noise_of_each_kernel(result):
    measured = {k.name: k[-1].sqnr_db for k in result.report.kernels if k[-1].sqnr_db is not None}
    assert len(measured) >= 3 and lengths(result.report.plot()) == pytest.approx(measured)
    weights = {k.name: k[0].weight_sqnr_db for k in result.report.kernels if k[0].weight_sqnr_db is not None}
    assert len(weights) == 3 and lengths(result.report.plot(measure="weights")) == pytest.approx(weights)


def test_of_many_kernels_the_weakest_are_drawn_in_execution_order(result):
    r = result.report.layers[-1]
    noise = [5.0, 50.0, 20.0, 40.0]
    many = [replace(r, node=f"n{i}", layer=f"layer{i}", group="", sqnr_db=db) for i, db in enumerate(noise)]
    figure = replace(result.report, layers=tuple(many)).plot(count=2)
    assert lengths(figure) == {"layer0": 5.0, "layer2": 20.0}
    assert "weakest 2 of 4" in figure.axes[0].get_title()
    red, orange = (p.get_facecolor() for p in figure.axes[0].patches)
    assert red != orange


def test_a_report_without_measurements_says_what_to_run(result):
    bare = replace(result.report, layers=tuple(replace(r, sqnr_db=None) for r in result.report.layers))
    with pytest.raises(PlanError, match=r"results is not known.*verify"):
        bare.plot(measure="results")
    with pytest.raises(UnknownNameError, match="results"):
        bare.plot(measure="result")


def test_sensitivity_draws_its_losses_and_those_at_other_widths(result):
    found = result.sensitivity([torch.randn(16, 3, 8, 8)])
    drawn = lengths(found.plot())
    assert drawn == pytest.approx({f"{t}, {found.bits[t]} bits": v for t, v in found.ranked()})
    assert len(lengths(found.plot(count=2))) == 2 and "more add less" in found.plot(count=2).axes[0].get_title()
    others = {b for row in found.losses.values() for b in row} - set(found.bits.values())
    lines = found.plot().axes[0].get_lines()
    assert {int(line.get_label().split()[0]) for line in lines} >= others


def test_a_pareto_curve_draws_both_losses_over_size(result):
    chip = quantized(sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(32, 8), "imx500")
    found = chip.pareto([torch.randn(16, 8)], shares=(50, 100))
    predicted, measured = found.plot().axes[0].get_lines()
    for line, key in ((predicted, "predicted"), (measured, "measured")):
        assert line.get_label() == key
        assert list(line.get_ydata()) == [p[key] for p in found.points]
        assert list(line.get_xdata()) == pytest.approx([100 * p["share"] for p in found.points])


def test_a_notebook_shows_a_figure_and_no_window_is_left(result):
    assert result.report.plot()._repr_png_().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules or sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_a_figure_is_written_where_the_user_wants_it(result, tmp_path):
    figure = result.report.plot(tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    figure.savefig(tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ExportError, match="cannot be written"):
        result.report.plot(tmp_path / "a.text")
    assert not (tmp_path / "a.text").exists()


def test_without_matplotlib_the_command_that_installs_it_is_named(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ExportError, match=r"matplotlib.*pip install 'chipfit\[plots\]'"):
        result.report.plot()


def test_matplotlib_is_imported_by_the_first_plot_only():
    code = "import chipfit, sys; chipfit.quantize; chipfit.Report; assert 'matplotlib' not in sys.modules"
    assert python(code).returncode == 0


def test_a_report_that_was_saved_is_read_printed_and_drawn_again(result, tmp_path):
    again = Report.load(result.report.save(tmp_path / "r.json"))
    assert again.layers == result.report.layers and repr(again) == repr(result.report)
    assert lengths(again.plot()) == pytest.approx(lengths(result.report.plot()))
    (tmp_path / "r.json").write_text("[]")
    with pytest.raises(PlanError, match=r"r\.json"):
        Report.load(tmp_path / "r.json")


def test_a_sensitivity_without_tensors_is_an_empty_figure():
    assert lengths(Sensitivity({}, {}, {}).plot()) == {}


def test_losses_beyond_float_are_shown_without_a_share():
    found = Sensitivity(
        {"a": {8: math.nan}, "b": {8: 2.0}, "c": {8: math.inf}}, dict.fromkeys("abc", 8), dict.fromkeys("abc", "")
    )
    assert {r["tensor"]: r["share"] for r in found.rows()} == {"a": 0.0, "b": 1.0, "c": 1.0}
    assert "nan" in str(found) and found.plot()
