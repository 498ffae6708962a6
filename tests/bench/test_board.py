"""The leaderboard: its numbers, its files, its page in a browser."""

import csv
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys

import pytest

from chipfit.bench.board import as_csv, as_markdown, as_text, differences, page, plot, readable, row, track, write
from chipfit.bench.store import Store
from chipfit.errors import ConfigError, RuntimeUnavailable


def runs(count=6):
    """Runs whose k-th is k points below float, at 4 or 8 bits; the last one failed."""
    out = []
    for k in range(count - 1):
        qparams = {"w_method": "dorefa", "a_method": "pact", "bit": 4 if k % 2 else 8}
        config = {"model": {"type": "resnet20"}, "qparams": qparams, "ptq": None, "seed": k, "unified": k != 1}
        deployed = [
            {"platform": "ort_cpu", "top1": 79.0 - k, "differing": 0, "integers": 9, "why": ""},
            {"platform": "imx500", "top1": None, "differing": 0, "integers": 0, "why": "wants powers of two"},
        ]
        told = {"config": config, "setting": "snpe", "float_top1": 80.0, "top1": 80.0 - k, "deployed": deployed}
        told |= {"seconds": 1.5, "size": 1000 * (9 - k), "curves": {"loss": [], "top1": [[1, 50.0], [2, 80.0 - k]]}}
        names = {"key": f"{k:016x}", "name": f"run{k}", "study": "s", "status": "done"}
        out.append({**names, "ended": 1.5e9 + k, "outcome": told, "error": None})
    lost = {"key": "f" * 16, "name": "lost", "study": "s", "status": "failed", "outcome": None}
    return [*out, {**lost, "error": "</script><b>no memory"}]


def test_a_row_has_the_best_deployment_and_marks_other_training_settings():
    found = row(runs()[1])
    assert (found["method"], found["bit"], found["below"], found["deployed"]) == ("dorefa / pact", 4, 1.0, 78.0)
    assert (found["unified"], row(runs()[0])["unified"]) == ("not unified", "")
    assert row(runs()[-1])["status"] == "failed" and row(runs()[-1])["top1"] is None
    ended = runs()[0]
    assert row(ended)["status"] == "done"
    ended["outcome"]["stopped"] = 4
    assert row(ended)["status"] == "stopped early"


def test_tables_for_other_tools_have_a_line_for_each_run(tmp_path):
    rows = [row(r) for r in runs()]
    table = as_csv(rows)
    assert len(table.splitlines()) == 7 and "run1,s,resnet20,dorefa / pact,4,snpe,80.0,79.0,1.0,78.0,0" in table
    assert "| run1 | s | resnet20 | dorefa / pact | 4 | snpe | 80.00 | 79.00 | 1.00 | 78.00 | 0 |" in as_markdown(rows)
    with pytest.raises(ConfigError, match=r"\.html, \.csv"):
        write(runs(), tmp_path / "board.txt")


def test_a_text_table_has_the_columns_that_fit_and_names_the_others():
    rows = [row(r) for r in runs()]
    assert as_text(rows, 45).splitlines()[:4] == [
        "                   below",
        "experiment  top-1  float  deployed  status",
        "run0        80.00   0.00     79.00    done",
        "run1        79.00   1.00     78.00    done",
    ]
    said = as_text(rows, 60)
    assert "run0        80.00  80.00   0.00     79.00          0    done\n" in said and "lost" in said
    assert "not shown here: study, model, method" in said and max(map(len, said.splitlines())) <= 60
    whole = as_text(rows, 1000).splitlines()
    assert len(whole) == 8 and "dorefa / pact" in whole[3] and "not unified" in whole[3]
    assert as_text(rows, 3).splitlines()[1:3] == ["experiment", "run0"]  # what it is remains


def test_differences_of_two_runs_name_every_changed_value():
    one, other = runs()[:2]
    changed = "config.qparams.bit config.seed config.unified deployed size top1"
    assert {k for k, *_ in differences(one, other)} == set(changed.split())
    assert differences(one, one) == []


def test_curves_are_plotted(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot(runs(), tmp_path / "b.svg").read_text().startswith("<?xml")
    with pytest.raises(ConfigError, match="plot cannot be written"):
        plot(runs(), tmp_path / "b.doc")


@pytest.mark.chromium
def test_the_page_filters_sorts_and_shows_a_run_in_a_browser(tmp_path):
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium is installed")

    def text(do: str) -> str:
        """Return the page's content after a script."""
        (tmp_path / "b.html").write_text(page(runs()).replace("</body>", f"<script>{do}</script></body>"))
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --dump-dom"
        command = [browser, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "b.html").as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout

    def names(dom: str) -> list[str]:
        return re.findall(r'<td><a href="#[0-9a-f]+">(\w+)</a>', dom)

    dom = text("")
    assert 'data-ready="6"' in dom and names(dom) == ["run0", "run1", "run2", "run3", "run4", "lost"]
    assert dom.count('class="front"') == 5 and "<b>no memory" not in dom
    four = "const s = document.getElementById('filter-bit'); s.value = '4'; s.onchange();"
    assert names(text(four)) == ["run1", "run3"]
    back = "document.querySelector('th[data-key=top1] button').click();"
    assert names(text(back))[:2] == ["run4", "run3"]
    assert "wants powers of two" in text("location.hash = '#' + '0'.repeat(16); window.onhashchange();")


def test_texts_of_runs_cannot_leave_the_data_of_the_page():
    data = re.search(r'id="data">(.*?)</script>', page(runs()), re.DOTALL)[1]
    assert json.loads(data)["runs"][-1]["error"] == "</script><b>no memory"


# ---------------------------------------------------------------- other tools, read by their own readers


def test_tensorboard_reads_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert track(runs(), str(tmp_path)) == 5  # one of the six has failed
    (folder,) = tmp_path.glob("run1-*")
    found = EventAccumulator(str(folder)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("top1")] == [(1, 50.0), (2, 79.0)]
    (told,) = found.Tensors("result/text_summary")
    assert b"| run1 | s | resnet20 | dorefa / pact | 4 |" in told.tensor_proto.string_val[0]


def test_mlflow_has_a_run_for_each(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder in the place of a server, where there is none
    address = os.environ.get("CHIPFIT_TEST_MLFLOW") or (tmp_path / "tracked").as_uri()
    assert track(runs(), f"mlflow:{address}") == 5
    track(runs(), f"mlflow:{address}")  # a second time
    client = mlflow.MlflowClient(address)
    at = client.get_experiment_by_name("s").experiment_id
    found = {r.info.run_name: r for r in client.search_runs([at])}
    assert sorted(r.info.run_name for r in client.search_runs([at])) == [f"run{k}" for k in range(5)]
    assert found["run1"].info.status == "FINISHED"
    assert found["run1"].data.params["setting"] == "snpe" and found["run1"].data.params["top1"] == "79.0"
    history = client.get_metric_history(found["run1"].info.run_id, "top1")
    assert [(m.step, m.value) for m in history] == [(1, 50), (2, 79)]
    with pytest.raises(ConfigError, match="MLflow failed"):
        track(runs(), "mlflow:no-such-scheme://somewhere")


@pytest.mark.parametrize(
    "module, to, error",
    [("torch.utils.tensorboard", "folder", RuntimeUnavailable), ("mlflow", "mlflow:folder", ConfigError)],
)
def test_a_missing_library_is_named_with_its_installation(tmp_path, monkeypatch, module, to, error):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=r"Try: pip install 'chipfit\[track\]'"):
        track(runs(), to)


@pytest.mark.parametrize("name", ['=HYPERLINK("http://x","y")', "+1", "-2+3", "@SUM(1)", "\t=1", "\r\n=1", "＝1"])
def test_no_name_is_a_formula_in_a_spreadsheet(name):
    run = runs(2)[0] | {"name": name, "study": name}
    (cells,) = list(csv.DictReader(io.StringIO(as_csv([row(run)]))))
    assert cells["name"] == cells["study"] == "'" + name.strip() and cells["float"] == "80.0"


def test_negative_numbers_stay_numbers_in_a_spreadsheet():
    run = runs(2)[0]
    run["outcome"]["top1"] = 81.5
    (cells,) = list(csv.DictReader(io.StringIO(as_csv([row(run)]))))
    assert float(cells["below"]) == -1.5


@pytest.mark.parametrize(
    "name, shown",
    [
        ("a\nb", "a b"),
        ("a\r\n\u2028b", "a b"),
        ("a|b", "a\\|b"),
        ("<img src=x>", "&lt;img src=x&gt;"),
        ("![x](http://y)", "!\\[x\\](http://y)"),
        ("\x1b[31mred", "\\[31mred"),
    ],
)
def test_a_name_is_text_on_one_line_of_markdown(name, shown):
    lines = as_markdown([row(runs(2)[0] | {"name": name})]).splitlines()
    assert len(lines) == 3 and lines[2].startswith(f"| {shown} |")


@pytest.mark.parametrize("damage", ["not json", "{}", "[1]", '{"config": {}}', "null", "NaN"])
def test_a_damaged_outcome_is_one_line_of_every_table(tmp_path, damage):
    store = Store(tmp_path / "runs.sqlite")
    for run in runs(2)[:1]:
        for key in ("a", "b"):
            store.put(key, f"run {key}", "s", run["outcome"])
    with sqlite3.connect(tmp_path / "runs.sqlite") as db:
        db.execute("UPDATE runs SET outcome = ? WHERE key = 'a'", (damage,))
    for curves in (True, False):
        bad, good = readable(store.rows(curves=curves), curves=curves)
        assert (good["status"], row(good)["top1"]) == ("done", 80.0) and row(bad)["top1"] is None
        assert bad["status"] == ("done" if damage == "null" else "unreadable")
    for name in ("b.html", "b.csv", "b.md", "b.json"):
        write(readable(store.rows()), tmp_path / name)
