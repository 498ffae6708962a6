"""What a console and a notebook show of chipfit's objects: a screenful, whatever the size of the model."""

import io
import re

import pytest
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import chipfit
from chipfit.plan.diff import diff
from chipfit.platform.load import load, names
from chipfit.platform.show import overview, show
from chipfit.report.terminal import render
from chipfit.screen import CHARACTERS, COLUMNS, LINES, Summary
from chipfit.screen.breakable import Breakable
from tests.build import model_of, quantized, sequential


def block(channels) -> nn.Module:
    def residual(m, x):
        return m.act(m.norm(m.convolution_with_a_rather_long_name(x)) + x)

    conv = nn.Conv2d(channels, channels, 3, padding=1)
    parts = {"norm": nn.BatchNorm2d(channels), "act": nn.ReLU()}
    return model_of(residual, convolution_with_a_rather_long_name=conv, **parts)


@pytest.fixture(scope="module")
def result():
    torch.manual_seed(0)
    blocks = [block(8) for _ in range(15)]
    net = sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Flatten(), nn.Linear(8 * 36, 10), nn.Softmax(1))
    made = quantized(net, torch.randn(8, 3, 8, 8), overrides={"3": "float"})
    made.verify([torch.randn(4, 3, 8, 8)])
    return made


@pytest.mark.parametrize("name", ["result", "plan", "report", "verification", "platform", "lint"])
def test_a_console_and_a_notebook_show_a_screenful(name, result):
    lint = chipfit.lint(sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), torch.randn(1, 3, 8, 8))
    shown = {"result": result, "lint": lint}.get(name) or getattr(result, name)
    lines = repr(shown).splitlines()
    assert 4 < len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert str(shown) == repr(shown)
    page = shown._repr_html_()
    assert len(page) <= CHARACTERS
    assert len(re.findall("<tr>", page)) <= LINES
    assert page.count("<table>") == page.count("</table>") >= 1


def test_screens_say_what_matters(result):
    assert "48 of 50" not in repr(result)  # three operators of block 3 stay float
    floats = [n for n in result.plan.nodes.values() if n.exec == "float"]
    assert f"{len(result.plan.nodes) - len(floats)} of {len(result.plan.nodes)} operators in integers" in repr(result)
    assert repr(result).index(floats[0].why[:20]) < repr(result).index("  int ")  # what stays float comes first
    assert f"{result.verification.differing} of {result.verification.integers}" in repr(result.verification)
    t = result.plan.tensors["0.weight"]
    assert repr(t) == (
        f"weight 0.weight: wp8, codes -127..127, scale {float(t.scale.min()):.3g}..{float(t.scale.max()):.3g}, "
        "one per channel, zero point 0; mse over the weights"
    )
    lines = repr(result.plan).splitlines()
    left = len(result.plan.tensors) - sum(any(f" {r} " in x for r in ("activation", "weight", "bias")) for x in lines)
    assert lines[-1] == f"… and {left} more: plan.tensors"


@pytest.mark.parametrize("width", [1, 7, 40, 48])
def test_a_notebook_shows_as_many_rows_as_fit(width):
    def shown(count, total=500):
        return Summary("t", {"k": "v"}, ("name", "why"), [("a" * width, "b" * 40)] * total, "plan").html()

    page = shown(500)
    rows = page.count("<td>a")
    assert rows == LINES // 2 or len(page) <= CHARACTERS < len(page) + len(page) // (rows + 1)
    assert f"… and {500 - rows} more: plan" in page and "more" not in shown(3, 3)


def test_text_of_others_is_no_markup():
    page = Summary("<b>", {"<i>": "<script>"}, ("<u>",), [("<script>",)]).html()
    assert "<script>" not in page and "<i>" not in page and "&lt;script&gt;" in page


def test_numbers_are_whole_and_shortened_text_shows_it():
    rows = [("a" * 200, 0.123456, 10**9, "b" * 100)]
    text = Summary("t", header=("name", "scale", "count", "why"), rows=rows).text()
    assert "0.1235" in text and "1000000000" in text
    assert text.count("…") == 2 and max(map(len, text.splitlines())) <= COLUMNS


# ---------------------------------------------------------------- tables on a terminal of 80 columns


def at_80(thing, width=80):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(thing)
    return out.getvalue()


def test_a_report_fits_80_columns_with_every_figure(result):
    text = at_80(render(result.report))
    assert max(map(len, text.splitlines())) <= 80
    measured = [f"{r.sqnr_db:.1f} dB" for k in result.report.kernels if (r := k[-1]).sqnr_db is not None]
    assert len(measured) > 15 and all(m in text for m in measured)
    ranges = re.findall(r"\S+\.\.\S+", at_80(render(result.report), 400))
    assert len(ranges) > 15 and [r for r in ranges if r not in text] == []


def test_a_long_layer_name_breaks_behind_its_dots_and_keeps_its_end():
    name = "distilbert.transformer.layer.0.attention.output.dense"
    table = Table.grid(padding=(0, 2))
    table.add_row(Breakable(name), "a sentence that needs most of the width of a terminal, so that the name gives way")
    lines = [line.split(" ")[0] for line in at_80(table, 60).splitlines()]
    assert "".join(lines) == name and all(line.endswith(".") for line in lines[:-1] if line)
    cut = Summary("t", header=("layer", "why"), rows=[(name, "why " * 20), (name[:-5] + "query", "")]).text()
    assert ".output.dense" in cut and ".output.query" in cut


@pytest.mark.parametrize("name", ["ort_cpu", "tflite_int8", "qnn_htp", "imx500"])
def test_a_platform_fits_80_columns(name):
    text = at_80(show(load(name)))
    assert max(map(len, text.splitlines())) <= 80
    for f in load(name).formats:
        assert re.search(rf"^ ?{re.escape(f)} ", text, re.MULTILINE), f


def test_the_list_of_platforms_fits_80_columns_and_names_them_all():
    text = at_80(overview())
    assert max(map(len, text.splitlines())) <= 80
    assert [n for n in names() if n not in text] == []


def test_a_difference_between_plans_fits_80_columns(result):
    found = diff(result.plan, result.edit({"0": "float"}).plan)
    lines = repr(found).splitlines()
    assert 5 < len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert len(found._repr_html_()) <= CHARACTERS
    assert repr(diff(result.plan, result.plan)) == "The plans are equal"


def test_a_graph_and_a_decision_fit_a_screen_whatever_their_weights(result):
    assert f"Graph of torch: {len(result.graph.nodes)} operators" in repr(result.graph)
    assert "torch.Size" not in repr(result.graph)
    for shown in (result.graph, result.decision):
        assert len(repr(shown).splitlines()) <= LINES and len(shown._repr_html_()) <= CHARACTERS
    assert "3" in repr(result.decision) and "Decision for ort_cpu" in repr(result.decision)


def test_a_result_of_a_measurement_is_a_screen_and_not_its_fields(result):
    timing = result.time([torch.randn(4, 3, 8, 8)], seconds=0)
    assert not repr(timing).startswith("Timing(") and repr(timing) == str(timing)


def test_every_class_with_a_screen_prints_it():
    """A dataclass with a `__repr__` of its own hides that of its base."""
    import chipfit.verify.npu
    import chipfit.verify.timing  # noqa: F401
    from chipfit.screen import SummaryRepr

    found, left = set(), [SummaryRepr]
    while left:
        found |= set(more := left.pop().__subclasses__())
        left += more
    assert len(found) >= 12 and {c.__name__ for c in found if c.__repr__ is not SummaryRepr.__repr__} == set()
