"""What commands print with --json, --quiet and --verbose, and what they read from files of choices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import chipfit
from chipfit.cli import app as command_line
from chipfit.cli.documents import DOCUMENTS
from chipfit.errors import CaptureError, ConfigError, UnknownNameError
from tests.bench.test_sweep import matrix
from tests.build import command

pytestmark = pytest.mark.usefixtures("folder")
MINE = "tests.cli.mine"
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schema/command-line.schema.json").read_text())


def document(name: str, *words: str, status: int = 0) -> dict:
    """Run a command with --json; return its document, after comparing it with the published schema."""
    done = command(*name.split(), *words, "--json")
    assert done.exit_code == status, (done.output, done.exception)
    found = json.loads(done.stdout)
    closed = {k: {"unevaluatedProperties": False, **v} for k, v in SCHEMA["$defs"].items()}
    own = {**SCHEMA["commands"][name], "properties": SCHEMA["properties"], "unevaluatedProperties": False}
    own["$ref"] = own["$ref"]
    closed[own["$ref"].rpartition("/")[2]].pop("unevaluatedProperties")
    jsonschema.Draft202012Validator({"$defs": closed, **own}).validate(found)
    assert found["chipfit"] == chipfit.__version__
    return found


def commands(app, before=""):
    """Yield the words of every command."""
    for c in app.registered_commands:
        yield before + (c.name or c.callback.__name__.removeprefix("_"))
    for group in app.registered_groups:
        yield from commands(group.typer_instance, f"{before}{group.name or group.typer_instance.info.name} ")


def test_every_command_has_a_document_in_the_schema():
    assert set(commands(command_line.app)) == set(DOCUMENTS) == set(SCHEMA["commands"]) - {"error"}


def test_a_result_is_quantized_verified_and_explained_as_json():
    made = document("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out")
    assert made["platform"] == "ort_cpu" and os.path.isfile(made["files"]["model"])
    assert made["operators"] == 4 and made["operators_in_float"] == 0 and made["sqnr_db"] > 20
    assert made["quantized_bytes"] < made["float_bytes"]
    assert made["verification"]["verdict"] == "exact" and made["verification"]["differing"] == 0
    found = document("verify", "out", "--data", "d.npz", "--report", "page.json")
    assert found["verdict"] == "exact" and found["samples"] == 20 and set(found["accuracy"]) >= {"float", "device"}
    assert os.path.isfile(found["report"])
    timed = document("time", "out", "--data", "d.npz", "--seconds", "0")
    assert timed["pairs"] >= 10 and timed["operators"][0]["products"] == 4 * 27 * 64
    (layer,) = document("explain", "out", "0")["layers"]
    assert (layer["name"], layer["operator"], layer["runs"]) == ("0", "Conv2D", "int")
    assert [t.split()[0] for t in layer["tensors"]] == ["activation", "weight", "bias"]
    ranked = document("explain", "out", "--data", "d.npz")["sensitivity"]
    assert ranked[0]["share"] == 1 and {"tensor", "layer", "bits", "loss"} <= set(ranked[0])
    assert document("explain", "out", "--data", "d.npz", "--curve", "weights")["pareto"]


def test_two_results_are_compared_layer_by_layer():
    document("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out")
    document("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "mixed", "--float", "0")
    found = document("compare", "out", "mixed", "--data", "d.npz", "--report", "both.html")
    assert (found["a"], found["b"], found["equal"]) == ("out", "mixed", False) and os.path.isfile(found["report"])
    assert next(r["layer"] for r in found["layers"] if "runs in" in r["differs"]) == "0" and found["plan"]
    facts = {f["what"]: (f["a"], f["b"]) for f in found["facts"]}
    assert facts["weights [bytes]"][0] < facts["weights [bytes]"][1]
    assert all(x.startswith("exact") for x in facts["device"])  # a saved result knows its verification
    assert document("compare", "out", "out")["equal"] is True


def test_other_commands_have_documents_too():
    lint = document("lint", f"{MINE}:net", "--input-shape", "1,3,8,8")
    assert lint["in_integers"] == len(lint["layers"]) == 4
    small = document("prune", f"{MINE}:net", "--data", "d.npz", "--limit", "bops=70%", "--out", "small.pt2")
    assert small["layers"][0]["channels"][1] < small["layers"][0]["channels"][0] == 4
    rows = {r["name"]: r for r in document("platforms list")["platforms"]}
    assert rows["ort_cpu"]["writes"] == [".onnx"] and rows["ort_cpu"]["proven_by"] == ["onnxruntime"]
    assert document("platforms show", "ort_cpu")["platform"]["name"] == "ort_cpu"
    assert document("platforms export", "tensorrt", "t.yaml")["file"] == "t.yaml"
    assert document("platforms check", "t.yaml")["problems"] == []


def test_problems_of_a_platform_file_are_listed(folder):
    (folder / "q.yaml").write_text("name: q\nextends: ort_cpu\nplatz: 2\nops: 3\n")
    found = document("platforms check", "q.yaml", status=2)["problems"]
    assert len(found) == 2 and all(p["type"] == "PlatformError" for p in found)


def test_a_trained_result_and_experiments_have_documents(folder):
    trained = document("train", f"{MINE}:net", "--data", "d.npz", "--batch-size", "10")
    assert trained["verification"]["verdict"] == "exact"
    path, home = str(matrix(folder, (8,))), ("--home", "home")
    assert document("bench generate", path)["experiments"] == 1
    assert document("bench run", str(next(folder.glob("*/*/config.yaml"))), *home)["state"] == "done"
    assert document("bench sweep", path, *home)["failed"] == []
    (run,) = document("bench table", *home)["runs"]
    again = document("bench run", str(next(folder.glob("*/*/config.yaml"))), *home)
    assert again["state"] == "done before" and run
    assert document("bench compare", again["key"], again["key"], *home)["differences"] == []
    assert document("bench board", "board.md", *home)["file"] == "board.md"
    assert document("bench track", "events", *home)["runs"] == 1


def test_doctor_says_what_is_here(monkeypatch):
    found = document("doctor")
    assert found["versions"]["chipfit"] == chipfit.__version__ and found["versions"]["torch"]
    runtimes = {r["name"]: r for r in found["runtimes"]}
    assert runtimes["onnxruntime"]["installed"] and "ort_cpu" in runtimes["onnxruntime"]["proves"]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else find(name))
    (lost,) = [r for r in document("doctor")["runtimes"] if r["name"] == "onnxruntime"]
    assert not lost["installed"] and lost["install"] == "pip install 'chipfit[onnx]'"
    shown = command("doctor", columns=80).output
    assert "chipfit[onnx]" in shown and "processor" in shown


@pytest.mark.parametrize(
    ("words", "kind", "facts"),
    [
        ("quantize gone.pt2 --data d.npz", "CaptureError", {"where": "gone.pt2"}),
        ("verify out --data dd.npz", "DataError", {"where": "dd.npz", "try": "d.npz"}),
        ("lint x --platform ort_cpuu", "UnknownNameError", {}),
        ("verify out --dta d.npz", "ConfigError", {}),
        ("verifi out", "ConfigError", {}),
        ("quantize x --data d.npz --seed one", "ConfigError", {}),
    ],
)
def test_an_error_is_a_document_with_its_type_and_facts(monkeypatch, capsys, words, kind, facts):
    monkeypatch.setattr(sys, "argv", ["chipfit", *words.split(), "--json"])
    monkeypatch.setattr(command_line.OUTPUT, "json", False)  # as in a process of its own
    with pytest.raises(SystemExit) as e:
        command_line.main()
    out, err = capsys.readouterr()
    found = json.loads(out)["error"]
    assert e.value.code == 2 and err == "" and found["type"] == kind and found["what"]
    assert facts.items() <= found.items()


def test_quiet_prints_paths_only_and_verbose_prints_all_notes(capfd):
    words = ("quantize", f"{MINE}:net", "--data", "d.npz", "--no-verify")
    quiet = command(*words, "--out", "a", "--quiet")
    assert [line.split()[0] for line in quiet.stdout.splitlines()] == ["model", "plan", "report"]
    assert "chipfit" not in quiet.stderr + capfd.readouterr().err
    notes = json.loads(command(*words, "--out", "b", "--json").stdout)["notes"]
    told = command(*words, "--out", "c", "--verbose").stdout
    assert notes and told.count("note    ") == len(notes)


def test_settings_come_from_a_file_and_from_options(folder):
    words = ("quantize", f"{MINE}:net", "--data", "d.npz", "--no-verify", "--quiet")
    (folder / "fit.yaml").write_text("rule: minmax\noverrides: {'0': float}\nsettings: {rounding: nearest}\nseed: 3\n")
    command(*words, "--out", "a", "--config", "fit.yaml")
    plan = chipfit.load("a/plan").plan
    (conv, *_) = plan.nodes.values()
    fixed = {"overrides": {"0": "float"}, "weight_rule": "mse"}
    assert conv.exec == "float"
    assert plan.provenance["settings"] == {**fixed, "seed": 3, "rule": "minmax", "steps": {"rounding": "nearest"}}
    own = ("--rule", "mse", "--set", "rounding=gptq", "--seed", "4")
    assert command(*words, "--out", "b", "--config", "fit.yaml", *own).exit_code == 0
    changed = {**fixed, "seed": 4, "rule": "mse", "steps": {"rounding": "gptq"}}
    assert chipfit.load("b/plan").plan.provenance["settings"] == changed


@pytest.mark.parametrize(
    ("text", "option", "error", "said"),
    [
        ("rool: mse", "--config", ConfigError, "'rule'"),
        ("settings: {equalise: true}", "--config", UnknownNameError, "'equalize'"),
        ("equalise=true", "--set", UnknownNameError, "'equalize'"),
        ("equalize=[", "--set", ConfigError, "NAME=VALUE"),
    ],
)
def test_a_wrong_choice_is_named_before_any_work(folder, text, option, error, said):
    (folder / "fit.yaml").write_text(text)
    value = "fit.yaml" if option == "--config" else text
    done = command("quantize", f"{MINE}:broken", "--data", "d.npz", option, value)
    assert isinstance(done.exception, error) and said in str(done.exception)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("mk.py:build", "mk:build"),
        ("./nets/mk.py:build", "nets.mk:build"),
        ("mk:biuld", "mk:build"),
        ("mkk:build", "mk:build"),
    ],
)
def test_a_mistyped_factory_is_suggested(folder, text, hint):
    (folder / "mk.py").write_text("def build():\n    return None\n")
    done = command("lint", text, "--input-shape", "1,3")
    assert isinstance(done.exception, CaptureError) and f"Try: {hint}" in str(done.exception)


def test_a_missing_file_is_refused_before_torch_is_imported(folder):
    for words, near in (("quantize n.onnx --data d.npz", "check the path"), ("verify . --data e.npz", "d.npz")):
        code = "import sys; from chipfit.cli.app import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
        done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=300)
        assert done.returncode == 2 and near in done.stderr, done.stderr


def test_an_interrupted_command_leaves_no_half_written_folder(folder, monkeypatch):
    def stop(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("chipfit.report.report.Report.save", stop)
    monkeypatch.setattr(sys, "argv", ["chipfit", "quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out"])
    with pytest.raises(SystemExit) as e:
        command_line.main()
    assert e.value.code == 130 and {p.name for p in folder.iterdir()} == {"d.npz"}
