"""The report: readable on a terminal, and one page that stands by itself."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess

import pytest
from rich.console import Console
from tests.zoo import make

import chipfit
from chipfit.report.terminal import render


@pytest.fixture(scope="module")
def result():
    model, batch = make("residual_silu")
    result = chipfit.quantize(model, [batch], platform="ort_cpu", progress=False)
    result.verify([batch])
    return result


def test_the_terminal_report_says_what_a_person_asks(result):
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(result.report))
    text = console.export_text()
    assert "a.2" in text and "Swish" in text and "lists no rule for Swish" in text
    assert re.search(r"of [\d,]+ integers differ", text)


def test_the_page_loads_nothing_from_anywhere(result, tmp_path):
    page = result.report.save(tmp_path / "r.html").read_text()
    assert not re.findall(r'(?:src|href)\s*=\s*["\']', page) and "@import" not in page and "url(" not in page


def test_the_report_is_data(result, tmp_path):
    data = json.loads(result.report.save(tmp_path / "r.json").read_text())
    assert data["platform"] == "ort_cpu"
    assert {r["op"] for r in data["layers"]} >= {"Conv2D", "Swish", "Linear"}
    assert data["quantized_bytes"] < 0.4 * data["float_bytes"]


def test_weights_of_the_report_are_those_of_the_file(result, tmp_path):
    assert result.export(tmp_path / "m.onnx").stat().st_size > result.report.quantized_bytes


@pytest.mark.chromium
def test_a_browser_shows_every_layer_without_an_error(result, tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed")
    page = result.report.save(tmp_path / "r.html")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        "--v=0",
    ]
    done = subprocess.run(
        [browser, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert f'data-ready="{len(result.report.layers)}"' in done.stdout  # the script ran to its end
    assert done.stdout.count("<rect") > 10
    for name in ("stem.0", "a.2", "head"):
        assert name in done.stdout
    assert "CONSOLE" not in done.stderr or "Uncaught" not in done.stderr
