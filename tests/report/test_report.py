"""The report: the numbers are right, the terminal answers a person's questions, and the page stands by itself."""

import io
import json
import math
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import chipfit
from chipfit.bench import board
from chipfit.report.advice import advice
from chipfit.report.html import comparison_page, page
from chipfit.report.terminal import render
from tests.bench.test_board import runs
from tests.build import model_of, quantized, randn, sequential
from tests.zoo import make


@pytest.fixture(scope="module")
def line():
    """One linear layer whose numbers are worked out on paper."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data = torch.tensor([[127.0, 0.4]])
    x = torch.cat([torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.full((98, 2), 0.5)])
    return quantized(model, x, weight_rule="no_clipping")


def text_of(report):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(report))
    return console.export_text()


# ---------------------------------------------------------------- numbers


def test_sizes_are_four_bytes_a_weight_before_and_one_after(line):
    assert (line.report.parameters, line.report.float_bytes, line.report.quantized_bytes) == (2, 8, 2)


def test_the_noise_of_stored_weights_is_worked_out_without_data(line):
    (row,) = line.report.layers  # step 1: codes 127 and 0, signal 127^2 + 0.4^2, noise 0.4^2
    assert row.weight_sqnr_db == pytest.approx(10 * math.log10((127**2 + 0.16) / 0.16), abs=1e-3)


def test_a_histogram_spans_what_was_seen_and_its_shares_add_up(line):
    (seen,) = line.report.inputs
    assert sum(seen.bars) == pytest.approx(1)
    assert seen.bars_low <= 0 and seen.bars_high >= 1 and seen.bars_high - seen.bars_low < 1.1
    assert max(seen.bars) == pytest.approx(0.98)  # 98 of 100 rows are 0.5


def test_clipping_is_the_share_of_values_outside_the_grid(line):
    (name,) = line.graph.inputs
    zero = torch.tensor(0, dtype=torch.int32)
    narrow = line.plan.tensors[name].with_(scale=torch.tensor(0.7 / 255), zero_point=zero)  # 0 .. 0.7
    plan = replace(line.plan, tensors={**line.plan.tensors, name: narrow})
    (seen,) = replace(line, plan=plan, _model=None).report.inputs
    assert seen.clipped == pytest.approx(0.01)  # the row of ones


def test_operators_that_run_as_one_are_one_kernel(result):
    fused = [tuple(r.op for r in k) for k in result.report.kernels if len(k) > 1]
    assert fused == [("Conv2D", "Relu"), ("Add", "Relu")]
    assert sum(len(k) for k in result.report.kernels) == len(result.report.layers)


def test_the_report_is_data(result, tmp_path):
    data = json.loads(result.report.save(tmp_path / "r.json").read_text())
    assert data["platform"] == "ort_cpu"
    assert {r["op"] for r in data["layers"]} >= {"Conv2D", "Gelu", "Linear"}
    assert data["quantized_bytes"] < 0.4 * data["float_bytes"]


# ---------------------------------------------------------------- words


def test_hidden_scores_do_not_count_as_signal_or_noise():
    """A report is JSON, which has no infinite numbers."""

    def forward(m, x):
        q, k, v = m.first(x).chunk(3, -1)
        hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
        return m.last((q @ k.transpose(1, 2) / 3).masked_fill(hidden, -torch.inf).softmax(-1) @ v)

    model, x = model_of(forward, first=nn.Linear(8, 24), last=nn.Linear(8, 3)), randn(8, 6, 8)
    result = quantized(model, x, "tflite_int8")
    assert result.verify([x]).exact
    json.dumps(result.report.to_dict(), allow_nan=False)


def test_the_terminal_report_says_what_a_person_asks(result):
    text = text_of(result.report)
    assert "a.2" in text and "Gelu" in text and "lists no rule for Gelu" in text
    assert re.search(r"0 of [\d,]+ integers differ", text)
    assert "what to try next" in text


def verified(report, **changes):
    return replace(report, verification={**report.verification, **changes})


def test_a_departure_names_the_first_operator_and_what_to_try(result):
    rows = [dict(r) for r in result.report.verification["rows"]]
    rows[3].update(differing=5, largest=2)
    report = verified(result.report, rows=rows, differing=5, verdict="departs")
    row = report.first_departure
    assert report.verdict == "departs"
    assert f"first in {row['op']} '{row['layer']}', by at most 2" in text_of(report)
    assert f"overrides={{'{row['layer']}': 'float'}}" in advice(report)[0] and repr(row["tensor"]) in advice(report)[0]


def test_integers_that_differ_behind_the_first_samples_alone_are_shown(result):
    """A tensor with no difference on own results, on the first samples, and one given the device's inputs."""
    v = result.report.verification
    rows = [row | {"end_to_end_elements": row["elements"] // 2} for row in v["rows"]]
    at = next(k for k, row in enumerate(rows) if not row["differing"] and not row["why"])
    rows[at] |= {"layer": "behind", "op_differing": 7, "op_largest": 1}
    differing, elements = (sum(r[k] for r in rows) for k in ("differing", "end_to_end_elements"))
    few = {
        "samples": 8,
        "end_to_end_samples": 4,
        "among": elements,
        "integers": 2 * elements,
        "rows": rows,
        "verdict": "sound",
    }
    report = verified(result.report, **few)
    assert report.first_departure["layer"] == "behind" or report.first_departure["differing"]
    said = f"{differing:,} of {elements:,} integers differ from onnxruntime on the first 4 of 8 samples"
    assert said in " ".join(text_of(report).split())
    alone = verified(report, rows=[rows[at]])
    assert "first in" in text_of(alone) and "'behind', by at most 1" in text_of(alone)
    assert '<td class="name">behind</td>' in page(alone) and '<td class="n">7</td>' in page(alone)


def test_another_chips_runtime_proves_nothing_about_this_chip():
    model, batch = make("residual_gelu")
    fitted = quantized(model, batch, "tflite_int8")
    assert not fitted.verify([batch], runtime="onnxruntime").promised
    assert fitted.report.verdict in ("exact", "sound", "unpromised")
    assert "onnxruntime is not 'tflite_int8': the chip itself was not run" in text_of(fitted.report)


def test_lost_accuracy_is_to_be_trained_back(result):
    report = verified(result.report, accuracy={"float": 0.9, "device": 0.85})
    assert "5.0 points" in advice(report)[0] and "result.trained()" in advice(report)[0]


def test_the_cause_of_float_operators_is_not_that_they_move_floats(result):
    moved = [replace(r, exec="float", why="it moves values that are not quantized") for r in result.report.layers[:3]]
    kept = replace(result.report.layers[3], exec="float", why="'ort_cpu' lists no rule for Gelu")
    found = next(a for a in advice(replace(result.report, layers=(*moved, kept))) if "stay in float" in a)
    assert found.startswith("4 of 4 operators") and "cause (1): 'ort_cpu' lists no rule for Gelu" in found


def test_of_a_long_network_the_terminal_shows_the_weakest_kernels(result):
    r = result.report.layers[-1]
    many = [replace(r, node=f"n{i}", layer=f"layer{i}", group="", sqnr_db=float(i)) for i in range(100)]
    text = text_of(replace(result.report, layers=tuple(many)))
    assert "layer39 " in text and "layer41 " not in text and "the weakest 40 of 100" in text


# ---------------------------------------------------------------- the page


def test_the_page_loads_nothing_from_anywhere(result, tmp_path):
    text = result.report.save(tmp_path / "r.html").read_text()
    assert "default-src 'none'" in text
    assert not re.findall(r'(?:src|href)\s*=\s*["\']', text) and "@import" not in text and "url(" not in text


@pytest.mark.chromium
def test_a_browser_shows_every_layer_without_a_word_on_the_console(result, browse):
    dom, console = browse(page(result.report))
    assert console == []
    assert f'data-ready="{len(result.report.kernels)}"' in dom  # the script ran to its end
    for name in ("stem.0", "a.2"):
        assert re.search(rf'<rect[^>]*aria-label="{name}\n', dom), name  # a bar that a screen reader can name
        assert re.search(rf'<h3 title="{name}">', dom), name  # a histogram


@pytest.mark.chromium
def test_nothing_on_a_page_is_pale_or_cut_off_on_a_desktop_and_a_phone(result, tmp_path):
    """The report with a box of every colour, a comparison, and the leaderboard, in light and dark."""
    browser = runpy.run_path(str(Path(__file__).parents[2] / "docs/browser.py"))
    browser["find"]() or pytest.skip("no chromium is installed")
    noise = {"a.0": 30.0, "a.2": 14.9, "b.0": 5.0}
    layers = tuple(replace(r, sqnr_db=noise.get(r.name, r.sqnr_db)) for r in result.report.layers)
    pages = {"report": page(replace(result.report, layers=layers)), "board": board.page(runs())}
    pages["comparison"] = comparison_page(chipfit.compare(result, result.edit({"a.0": "float"})))
    for name, text in pages.items():
        (tmp_path / f"{name}.html").write_text(text)
    counts, found = browser["check"](sorted(tmp_path.iterdir()))
    assert found == [] and counts["texts"] > 1000


@pytest.mark.chromium
def test_a_browser_draws_what_hurts_and_the_curve_of_size_and_loss(result, browse):
    hurts = {"tensor": "stem.0.weight", "layer": "stem.0", "bits": 4, "loss": 0.25, "share": 1.0, "others": {8: 1e-3}}
    loss = {k: {"predicted": 10.0**-k, "measured": 2 * 10.0**-k} for k in (1, 2, 4)}
    points = [{"size": 100.0 * k, "share": k / 4, "height": 1, "bits": {}, **loss[k]} for k in loss]
    dom, console = browse(page(replace(result.report, sensitivity=(hurts,), pareto=tuple(points))))
    assert console == []
    assert "stem.0.weight, 4 bits" in dom and "8: 0.001" in dom and 'style="width:100.0%"' in dom
    assert len(re.findall("<circle ", dom)) == 6 and len(re.findall("<polyline ", dom)) == 2
    assert 'aria-label="25 % of 8 bits (100)\nmeasured loss 0.2"' in dom
    assert "<circle" not in page(result.report) and 'id="curve"' not in page(result.report)


@pytest.mark.chromium
def test_the_chart_sorts_the_table_filters_and_the_theme_turns(result, browse):
    script = """
      document.querySelector("[data-order=worst]").click();
      const first = document.querySelector("#sqnr rect").getAttribute("aria-label").split("\\n")[0];
      const f = document.getElementById("filter"); f.value = "gelu"; f.dispatchEvent(new Event("input"));
      const rows = [...document.querySelectorAll("#kernels tbody tr")].filter(r => !r.hidden).length;
      document.getElementById("theme").click();
      return [first, rows, document.documentElement.dataset.theme].join("|");
    """
    run = f"<script>document.documentElement.dataset.probe = (() => {{ {script} }})()</script>"
    dom, console = browse(page(result.report).replace("</body>", f"{run}</body>"))
    weakest = min((k for k in result.report.kernels if k[-1].sqnr_db is not None), key=lambda k: k[-1].sqnr_db)
    assert console == [] and f'data-probe="{weakest[0].name}|1|dark"' in dom


@pytest.mark.chromium
def test_a_long_layer_name_stays_inside_its_card(result, browse):
    rows = [
        r | {"layer": "distilbert.transformer.layer.0.output_layer_norm"} for r in result.report.verification["rows"]
    ]
    report = verified(result.report, rows=[rows[3] | {"differing": 5, "largest": 2}], differing=5, verdict="departs")
    kernels = [replace(r, layer=f"a_long_name_of_a_backbone_block.{r.layer}") for r in report.layers * 4]
    report = replace(report, layers=tuple(kernels))
    script = """[...document.querySelectorAll('.card, .todo, .mini h3')]
        .filter(c => c.scrollWidth > c.clientWidth).length
      + [...document.querySelectorAll('#sqnr text')].filter(t => t.getBoundingClientRect().left
        < t.ownerSVGElement.getBoundingClientRect().left).length"""
    probe = f"<script>document.documentElement.dataset.wide = {script}</script>"
    dom, _ = browse(page(report).replace("</body>", f"{probe}</body>"))
    assert dom.count("output_layer_norm") >= 2 and 'data-wide="0"' in dom


@pytest.mark.chromium
def test_a_layer_name_cannot_become_markup(result, browse):
    evil = "</script><script>document.documentElement.dataset.evil = 1</script><b>"
    layers = [replace(r, layer=evil, why=evil) for r in result.report.layers]
    dom, console = browse(page(replace(result.report, layers=tuple(layers), notes=(evil,))))
    assert console == [] and "data-evil" not in dom.split(">", 2)[1] and "data-ready" in dom


@pytest.mark.chromium
def test_a_result_that_was_only_loaded_has_a_page_too(result, browse, tmp_path):
    loaded = chipfit.load(result.save(tmp_path / "saved"))  # neither statistics nor timings nor verification
    dom, console = browse(page(loaded.report))
    assert console == [] and "not verified" in dom and "No histograms: a saved" in dom


def test_a_report_of_an_unknown_form_is_refused(tmp_path):
    from chipfit.errors import ExportError
    from chipfit.report.report import check_suffix

    for name in ("report", "report.htm", "report.HTML"):
        with pytest.raises(ExportError, match=r"cannot have this suffix.*Allowed: \.html or \.json"):
            check_suffix(tmp_path / name)


def test_the_share_in_integers_counts_multiplications():
    """3 x 3 x 3 x 8 weights at 16 places, and 128 x 5: 3,456 of 4,096; rectifier and reshape have none."""
    net = sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    report = quantized(net, torch.randn(4, 3, 4, 4), overrides={"3": "float"}).report
    assert report.integer_share == 3456 / 4096 and report.integers == 3
    assert "84 % of all multiplications; 3 of 4 operators" in str(report)
    net = model_of(lambda m, x: m.c(x).tan(), c=nn.Conv2d(3, 8, 3))
    assert "100 % of known multiplications" in str(quantized(net, torch.randn(4, 3, 4, 4)).report)
