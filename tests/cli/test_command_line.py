"""The command line: every command on real input, and one mistake of each kind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from chipfit.cli import app as command_line
from chipfit.cli.app import app
from chipfit.errors import ChipfitError, DataError
from chipfit.platform.load import names

MODULE = """\
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), *head)

def data():
    return [torch.randn(4, 3, 8, 8) for _ in range(2)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"mod_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(20, 3, 8, 8)).astype("float32"), y=rng.integers(0, 3, 20))
    return tmp_path, name


def run(*args: str):
    return CliRunner().invoke(app, list(args), catch_exceptions=True, env={"COLUMNS": "200"})


def test_quantize_verify_and_explain(folder):
    path, name = folder
    done = run("quantize", f"{name}:net", "--data", "d.npz", "--out", "out")
    assert done.exit_code == 0, done.output
    assert "0 of" in done.output and {p.name for p in (path / "out").iterdir()} == {
        *"model.onnx plan report.html manifest.json".split()
    }
    done = run("verify", "out", "--data", "d.npz", "--file", "out/model.onnx")
    assert done.exit_code == 0 and "0 of" in done.output and "top-1" in done.output
    assert "Predicted loss" in run("explain", "out", "--data", "d.npz").output
    assert "best choices by weights" in run("explain", "out", "--data", "d.npz", "--curve", "weights").output
    done = run("explain", "out", "0")
    assert (
        "Conv2D '0': runs in int" in done.output
        and "scale" in done.output
        and "input scale x weight scale" in done.output
    )


def test_ctrl_c_while_weights_are_rounded_writes_what_was_decided(folder, monkeypatch):
    from chipfit.rounding import sequential_reconstruction

    path, name = folder

    def pressed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sequential_reconstruction.SequentialReconstruction, "fit", pressed)
    done = run("quantize", f"{name}:net", "--data", "d.npz", "--out", "out", "--rounding", "gptq")
    assert done.exit_code == 130 and "what was decided until then is written" in done.output
    assert "and what follows it take their nearest codes" in (path / "out" / "report.html").read_text()
    assert run("verify", "out", "--data", "d.npz", "--file", "out/model.onnx").exit_code == 0


def test_a_folder_of_something_else_is_refused_before_the_work(folder):
    path, _ = folder
    (path / "notes").mkdir()
    (path / "notes" / "thesis.txt").write_text("mine")
    done = run("quantize", "nothing:there", "--data", "nothing.npz", "--out", "notes")
    assert isinstance(done.exception, ChipfitError) and "is not the output of `chipfit quantize`" in str(done.exception)
    assert (path / "notes" / "thesis.txt").read_text() == "mine"


def test_a_report_of_an_unknown_form_is_refused_before_the_work(folder):
    done = run("verify", "nothing", "--data", "nothing.npz", "--report", "found.pdf")
    assert isinstance(done.exception, ChipfitError) and "The form of the report" in str(done.exception)


def test_a_quantize_that_fails_leaves_the_earlier_output(folder, monkeypatch):
    path, name = folder
    run("quantize", f"{name}:net", "--data", "d.npz", "--out", "out", "--no-verify")
    before = {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and "out" in p.parts}
    monkeypatch.setattr("chipfit.report.html.page", lambda report: 1 / 0)
    done = run("quantize", f"{name}:net", "--data", "d.npz", "--out", "out", "--no-verify", "--float", "0")
    assert isinstance(done.exception, ZeroDivisionError)
    assert {p: p.read_bytes() for p in path.rglob("*") if p.is_file() and "out" in p.parts} == before
    assert not list(path.glob(".chipfit-*"))


def test_a_pt2_file_and_an_iterable(folder):
    path, name = folder
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU()).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.export.save(program, path / "m.pt2")
    done = run("quantize", "m.pt2", "--data", f"{name}:data", "--out", "o2")
    assert done.exit_code == 0, (done.output, done.exception)


def test_a_folder_of_images(folder):
    from PIL import Image

    path, name = folder
    (path / "images").mkdir()
    for k in range(3):
        Image.fromarray(np.full((10, 12, 3), 40 * k, np.uint8)).save(path / "images" / f"{k}.png")
    done = run("quantize", f"{name}:net", "--data", "images", "--input-size", "8", "--out", "o3", "--float", "0")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "overrides keep '0' in float" in done.output


def test_lint_says_what_fuses_before_any_data(folder):
    done = run("lint", f"{folder[1]}:net", "--input-shape", "1,3,8,8", "--platform", "xnnpack")
    assert done.exit_code == 0, (done.output, done.exception)
    assert "operators run in integers on xnnpack" in done.output and "Relu '1'" in done.output


@pytest.mark.parametrize("args", [["platforms"], ["platforms", "list"], ["platforms", "show", "ort_cpu"]])
def test_platforms(args):
    done = run(*args)
    assert done.exit_code == 0 and "ort_cpu" in done.output


def test_platforms_check_accepts_a_good_file_and_names_the_line_of_a_bad_one(folder):
    (folder[0] / "p.yaml").write_text("name: p\nextends: ort_cpu\n")
    assert "no problem found" in run("platforms", "check", "p.yaml").output
    (folder[0] / "q.yaml").write_text("name: q\nformatz: {}\n")
    assert "q.yaml:2, key formatz" in str(run("platforms", "check", "q.yaml").exception)


def test_platforms_check_shows_every_problem_of_a_file(folder):
    (folder[0] / "p.yaml").write_text("name: p\nformatz: {}\nextends: ort_cpu\nplatz: {}\n")
    done = subprocess.run(
        [sys.executable, "-m", "chipfit.cli", "platforms", "check", "p.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("PlatformError") == 2
    assert "p.yaml:2, key formatz" in done.stderr and "p.yaml:4, key platz" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["quantize", "nothing.pt2", "--data", "d.npz"], "does not exist"),
        (["quantize", "nomodule:net", "--data", "d.npz"], "cannot be imported"),
        (["quantize", "what", "--data", "d.npz"], "module:factory"),
        (["quantize", "MOD:net", "--data", "missing.npz"], "cannot be read"),
        (["quantize", "MOD:net", "--data", "d.npz", "--platform", "ort"], "There is no platform"),
        (["quantize", "MOD:net", "--data", "d.npz", "--bits", "0:4"], "LAYER=BITS"),
        (["lint", "MOD:net", "--input-shape", "1,x"], "positive integers"),
        (["verify", "nowhere", "--data", "d.npz"], "nowhere"),
    ],
)
def test_a_mistake_is_a_typed_error(folder, args, words):
    done = run(*[a.replace("MOD", folder[1]) for a in args])
    assert isinstance(done.exception, ChipfitError) and words in str(done.exception)


def test_the_program_prints_one_panel_and_exits_with_2(folder):
    done = subprocess.run(
        [sys.executable, "-m", "chipfit.cli", "quantize", "x.pt2", "--data", "d.npz"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "CaptureError" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("platform", "suffix"),
    [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite"), ("edgetpu", ".tflite"), ("hailo", ".onnx")],
)
def test_the_format_is_the_one_that_the_platform_deploys(platform, suffix):
    from chipfit.cli.app import _suffix
    from chipfit.platform.load import load

    assert _suffix(load(platform), None) == suffix
    assert _suffix(load(platform), "onnx") == ".onnx"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("tflite", "'ort_cpu' has no use for a .tflite file"), ("onxn", "no file format named '.onxn'")],
)
def test_a_format_that_cannot_be_is_refused_before_the_model_is_read(wanted, message):
    done = run("quantize", "no_such_module:model", "--data", "none.npz", "--format", wanted)
    assert done.exit_code != 0 and message in str(done.exception)


def test_every_screen_fits_80_columns_and_loses_no_letter(folder):
    """Every command, as a terminal of 80 columns shows it; nothing is cut short."""
    path, name = folder
    (path / "p.yaml").write_text("name: p\nextends: tensorrt\n")
    (path / "q.yaml").write_text("name: q\nextends: ort_cpu\n" + f"{'z' * 90}: 1\n" + "platz: 2\n")
    model = (f"{name}:net", "--platform", "ort_cpu@AVX2")
    commands = [
        ("quantize", *model, "--data", "d.npz", "--out", "o", "--float", "0"),
        ("verify", "o", "--data", "d.npz"),
        ("explain", "o", "*"),
        ("lint", *model, "--input-shape", "1,3,8,8"),
        ("lint", f"{name}:net", "--input-shape", "1,3,8,8", "--platform", "tensorrt"),
        ("platforms",),
        ("platforms", "check", "p.yaml"),
        ("platforms", "check", "q.yaml"),
        ("platforms", "export", "tensorrt", "t.yaml"),
        *(("platforms", "show", p) for p in names()),
    ]
    for command in commands:
        done = CliRunner().invoke(app, list(command), env={"COLUMNS": "80"})
        assert done.exit_code == 0 or "q.yaml" in command, (command, done.output, done.exception)
        assert max((len(line) for line in done.output.splitlines()), default=0) <= 80, command
        assert "…" not in done.output, command
    wide = CliRunner().invoke(app, ["explain", "o", "*"], env={"COLUMNS": "300"}).output
    assert max(map(len, wide.splitlines())) > 100  # where there is room, it is used


def test_where_no_terminal_is_a_fact_is_a_line(folder):
    run("quantize", f"{folder[1]}:net", "--data", "d.npz", "--out", "out", "--no-verify")
    told = [sys.executable, "-m", "chipfit.cli", "explain", "out", "0"]
    environment = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    lines = subprocess.run(told, capture_output=True, text=True, env=environment, check=True).stdout.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) > 100


# ---------------------------------------------------------------- errors of every kind


@pytest.fixture
def typed(monkeypatch, capsys):
    """What the command line answers to some words: exit status and standard error."""

    def answer(*words, raises=None):
        def fail():
            raise raises

        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["chipfit", *words])
        if raises is not None:
            monkeypatch.setattr(command_line, "app", fail)
        with pytest.raises(SystemExit) as e:
            command_line.main()
        return e.value.code, capsys.readouterr().err

    return answer


def test_a_bug_is_said_to_be_one_with_how_to_report_it(typed):
    status, err = typed("lint", "x", raises=ZeroDivisionError("nobody foresaw this"))
    assert status == 70 and "ZeroDivisionError: nobody foresaw this" in err and "Traceback" in err
    assert "bug of chipfit" in err and "report it" in err and "chipfit lint x" in err


@pytest.mark.parametrize(
    "raised, status, words",
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, "not enough memory"),
        (DataError("No such thing", hint="look again"), 2, "look again"),
    ],
)
def test_what_ends_a_command_has_a_status_of_its_own_and_no_traceback(typed, raised, status, words):
    code, err = typed("lint", "x", raises=raised)
    assert code == status and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    "command, option",
    [
        ("quantize", "--input-size"),
        ("quantize", "--seed"),
        ("verify", "--input-size"),
        ("train", "--epochs"),
        ("train", "--batch-size"),
        ("train", "--seed"),
    ],
)
def test_a_number_that_no_machine_counts_to_is_refused(typed, command, option):
    code, err = typed(command, ".", "--data", "d.npz", option, "9" * 20)
    assert code == 2 and f"'{option}': Input should be less than or equal to" in err


@pytest.mark.parametrize("words", [":y", "x:", "../x:y", "a.b.c:d", "json:dumps", "json:loads"])
def test_a_module_that_gives_no_model_is_refused(typed, words):
    code, err = typed("lint", words, "--input-shape", "1,3")
    assert code == 2 and "Traceback" not in err


def test_a_source_that_is_not_utf8_is_refused(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin_source.py").write_bytes("model = 'café'".encode("latin-1"))
    code, err = typed("lint", "latin_source:model", "--input-shape", "1,3")
    assert code == 2 and "cannot be imported" in err and "utf-8" in err


def test_a_reader_that_goes_away_ends_a_command_quietly():
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "chipfit.cli", "platforms", "list"]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == 1 and done.stderr == b""


def test_ctrl_c_ends_a_command_with_130_and_no_traceback(tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    words = [sys.executable, "-m", "chipfit.cli", "platforms", "show", "slow:chip"]
    heard = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # what runs in the background ignores it, and so do its children
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, preexec_fn=heard)
    assert running.stdout.readline() == b"here\n"
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode == 130 and b"Traceback" not in err
