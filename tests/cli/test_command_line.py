"""The command line: every command on real input, one mistake of each kind, and exit statuses."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

import chipfit
from chipfit.cli import app as command_line
from chipfit.cli import demo
from chipfit.errors import ChipfitError, DataError
from chipfit.platform.load import names
from tests.build import command
from tests.processes import python

MINE = "tests.cli.mine"
MISTAKES = Path(__file__).with_name("mistakes.yaml")


def succeed(*args: str) -> str:
    done = command(*args)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def fail(*args: str) -> str:
    done = command(*args)
    assert isinstance(done.exception, ChipfitError), (done.output, done.exception)
    return str(done.exception)


def test_quantize_verify_and_explain(folder):
    assert "0 of" in succeed("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out")
    assert {p.name for p in (folder / "out").iterdir()} == set("model.onnx plan report.html manifest.json".split())
    verified = succeed("verify", "out", "--data", "d.npz", "--file", "out/model.onnx")
    assert "0 of" in verified and "top-1" in verified
    assert "Predicted loss" in succeed("explain", "out", "--data", "d.npz")
    assert "best choices by weights" in succeed("explain", "out", "--data", "d.npz", "--curve", "weights")
    explained = succeed("explain", "out", "0")
    assert all(text in explained for text in ("Conv2D '0': runs in integers, ", "scale", "input scale x weight scale"))


def test_prune_writes_a_smaller_model_that_quantize_loads(folder):
    shown = succeed("prune", f"{MINE}:net", "--data", "d.npz", "--limit", "bops=70%", "--out", "small.pt2")
    assert "layers have fewer channels" in shown and "small.pt2" in shown
    assert "0 of" in succeed("quantize", "small.pt2", "--data", "d.npz", "--out", "out")
    assert "whole layers" in fail("prune", f"{MINE}:net", "--data", "d.npz", "--limit", "bops=0.001%")


def test_quantize_needs_no_data_where_the_network_has_batch_norms(folder):
    done = succeed("quantize", f"{MINE}:normed", "--data", "generated:20", "--input-size", "8", "--out", "out")
    assert "0 of" in done
    assert "20 inputs generated from 1 batch norm (" in (folder / "out" / "report.html").read_text()
    assert "at least one BatchNorm" in fail("quantize", f"{MINE}:net", "--data", "generated", "--input-size", "8")
    shaped = ("quantize", f"{MINE}:normed", "--input-shape", "2,3,8,8", "--data")
    succeed(*shaped, "generated:20", "--out", "shaped")
    assert "for generated data" in fail(*shaped, "d.npz")


def test_a_recurrent_network_is_quantized_as_one_step(folder):
    pytest.importorskip("ai_edge_litert")
    np.savez("s.npz", x=np.random.default_rng(0).normal(size=(8, 5, 3)).astype("float32"))
    given = ("--data", "s.npz", "--platform", "tflite_int8", "--stream", "--out")
    assert "0 of" in succeed("quantize", f"{MINE}:spotter", *given, "out")
    graph = chipfit.load(folder / "out" / "plan").graph
    assert [graph.shape(i) for i in graph.inputs] == [(None, 3), (None, 4)]
    np.savez("s.npz", x=np.ones((8, 5, 2), "float32"))
    assert "no recurrent layer" in fail("quantize", f"{MINE}:ready", *given, "none")


def test_a_tflite_file_is_quantized_explained_and_verified(folder):
    pytest.importorskip("ai_edge_litert")
    np.savez(folder / "nhwc.npz", x=np.load("d.npz")["x"].transpose(0, 2, 3, 1))
    both = ("--platform", "tflite_int8")
    succeed("quantize", f"{MINE}:net", "--data", "d.npz", *both, "--out", "first")
    assert "int8" in succeed("explain", "first/model.tflite")
    layer = succeed("explain", "first/model.tflite", "Conv2D")
    assert layer.startswith("Conv2D 'relu': runs in integers") and "weight 0.weight" in layer and "Linear" not in layer
    assert "Try: 'Conv2D'" in fail("explain", "first/model.tflite", "Conv2")
    assert "0 of" in succeed("verify", "first/model.tflite", "--data", "nhwc.npz")
    again = ("quantize", "first/model.tflite", "--data", "nhwc.npz", *both, "--out", "second")
    assert "quantized already" in fail(*again)
    assert "0 of" in succeed(*again, "--requantize")
    assert "Conv2D" in succeed("lint", "first/model.tflite", *both, "--requantize")


def test_ctrl_c_while_weights_are_rounded_writes_the_results_so_far(folder, monkeypatch):
    from chipfit.rounding import sequential_reconstruction

    def press(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sequential_reconstruction.SequentialReconstruction, "fit", press)
    done = command("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out", "--rounding", "gptq")
    assert done.exit_code == 130 and "writing the results so far" in done.output
    assert "and what follows it take their nearest codes" in (folder / "out" / "report.html").read_text()
    succeed("verify", "out", "--data", "d.npz", "--file", "out/model.onnx")


def test_a_folder_of_other_files_is_not_overwritten(folder):
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.txt").write_text("mine")
    said = fail("quantize", "nothing:there", "--data", "d.npz", "--out", "notes")
    assert "is not the output of `chipfit quantize`" in said
    assert (folder / "notes" / "thesis.txt").read_text() == "mine"


def test_a_quantize_that_fails_leaves_the_earlier_output(folder, monkeypatch):
    output = lambda: {p: p.read_bytes() for p in (folder / "out").rglob("*") if p.is_file()}
    words = "quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out", "--no-verify"
    succeed(*words)
    before = output()
    monkeypatch.setattr("chipfit.report.html.page", lambda report: 1 / 0)
    assert isinstance(command(*words, "--float", "0").exception, ZeroDivisionError)
    assert output() == before and not list(folder.glob(".chipfit-*"))


def test_models_and_data_come_from_files_modules_and_folders(folder):
    from PIL import Image

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.ReLU()).eval()
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    torch.export.save(program, folder / "m.pt2")
    succeed("quantize", "m.pt2", "--data", f"{MINE}:data", "--out", "from_file")
    (folder / "images").mkdir()
    for k in range(3):
        Image.fromarray(np.full((10, 12, 3), 40 * k, np.uint8)).save(folder / "images" / f"{k}.png")
    words = "quantize", f"{MINE}:net", "--data", "images", "--input-size", "8", "--out", "from_images", "--float", "0"
    assert "overrides keep '0' in float" in succeed(*words)


def test_lint_shows_fusions_without_data(folder):
    shown = succeed("lint", f"{MINE}:net", "--input-shape", "1,3,8,8", "--platform", "xnnpack")
    assert "operators can run in integers on xnnpack" in shown and "Relu '1'" in shown


def test_platforms_are_listed_and_shown():
    for args in ("platforms", "platforms list", "platforms show ort_cpu"):
        assert "ort_cpu" in succeed(*args.split())


def test_platforms_check_reports_every_problem_with_its_line(folder, panels):
    (folder / "good.yaml").write_text("name: p\nextends: ort_cpu\n")
    assert "no problems found" in succeed("platforms", "check", "good.yaml")
    (folder / "bad.yaml").write_text("name: q\nformatz: {}\nextends: ort_cpu\nplatz: {}\n")
    status, shown = panels("platforms", "check", "bad.yaml")
    assert status == 2 and shown.count("PlatformError") == 2
    assert "bad.yaml:2, key formatz" in shown and "bad.yaml:4, key platz" in shown


@pytest.mark.parametrize(("args", "words"), yaml.safe_load(MISTAKES.read_text()).items())
def test_a_mistake_is_a_typed_error(folder, args, words):
    assert words in fail(*args.replace("MOD", MINE).split())


@pytest.mark.parametrize(
    ("platform", "suffix"),
    [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite"), ("edgetpu", ".tflite"), ("hailo", ".onnx")],
)
def test_the_format_is_that_of_the_platform_unless_another_is_chosen(platform, suffix, folder):
    for chosen, written in (((), suffix), (("--format", "onnx"), ".onnx")):
        words = "quantize", f"{MINE}:net", "--data", "d.npz", "--platform", platform, "--out", "out"
        succeed(*words, "--no-verify", *chosen)
        assert (folder / f"out/model{written}").is_file()


def test_a_named_format_is_written_with_the_suffix_of_the_platform_or_its_own(folder):
    words = "quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out", "--no-verify"
    for chosen, written in (("int8", "model.onnx"), ("fake.pt2", "model.pt2"), ("fake", "model.onnx")):
        succeed(*words, "--format", chosen)
        assert (folder / "out" / written).is_file()
    assert "int8.onnx, int8.tflite" in fail(*words, "--format", "int8.pt2")


def test_the_layout_of_the_model_is_kept_on_demand(folder):
    from ai_edge_litert.interpreter import Interpreter

    for chosen, shape in (((), [1, 8, 8, 3]), (("--keep-layout",), [1, 3, 8, 8])):
        succeed("quantize", f"{MINE}:net", "--data", "d.npz", "-p", "tflite_int8", "--out", "out", *chosen)
        assert Interpreter("out/model.tflite").get_input_details()[0]["shape"].tolist() == shape


def test_every_screen_fits_80_columns_without_cutting_text(folder):
    (folder / "p.yaml").write_text("name: p\nextends: tensorrt\n")
    (folder / "q.yaml").write_text("name: q\nextends: ort_cpu\n" + f"{'z' * 90}: 1\n" + "platz: 2\n")
    model = (f"{MINE}:net", "--platform", "ort_cpu@AVX2")
    commands = [
        ("quantize", *model, "--data", "d.npz", "--out", "o", "--float", "0"),
        ("verify", "o", "--data", "d.npz"),
        ("explain", "o", "*"),
        ("lint", *model, "--input-shape", "1,3,8,8"),
        ("lint", f"{MINE}:net", "--input-shape", "1,3,8,8", "--platform", "tensorrt"),
        ("platforms",),
        ("platforms", "check", "p.yaml"),
        ("platforms", "check", "q.yaml"),
        ("platforms", "export", "tensorrt", "t.yaml"),
        *(("platforms", "show", p) for p in names()),
    ]
    for words in commands:
        done = command(*words, columns=80)
        assert done.exit_code == 0 or "q.yaml" in words, (words, done.output, done.exception)
        assert max((len(line) for line in done.output.splitlines()), default=0) <= 80, words
        assert "…" not in done.output, words
    wide = command("explain", "o", "*", columns=300).output
    assert max(map(len, wide.splitlines())) > 100  # a wide terminal is used


@pytest.mark.parametrize("words", ["quantize n.onnx --platform tflite_i", "platforms show tflite_i"])
def test_the_shell_completes_names_of_platforms(words):
    count = str(len(words.split()))
    env = {"_CHIPFIT_COMPLETE": "complete_bash", "COMP_WORDS": f"chipfit {words}", "COMP_CWORD": count}
    done = CliRunner().invoke(command_line.app, [], prog_name="chipfit", env=env)
    assert done.output.split() == ["tflite_int16x8", "tflite_int8"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_model_is_loaded(folder):
    (folder / "file").write_text("")
    assert "The folder cannot be written" in fail("quantize", "nomodule:net", "--data", "d.npz", "--out", "file/out")
    assert sorted(p.name for p in folder.iterdir()) == ["d.npz", "file"]


def test_without_a_terminal_lines_are_not_wrapped(folder, monkeypatch):
    succeed("quantize", f"{MINE}:net", "--data", "d.npz", "--out", "out", "--no-verify")
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: (_ for _ in ()).throw(OSError))
    lines = command("explain", "out", "0", columns=None).output.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) > 100


def test_the_network_learns_and_its_integers_are_exact_and_saved(tmp_path):
    result, _ = demo.run(tmp_path, epochs=4)
    found = result.verification.accuracy
    assert found["float"] > 0.9  # guessing gives 0.1
    assert abs(found["device"] - found["float"]) <= 0.01
    assert result.verification.exact and found["integer"] == found["device"]
    assert result.report.integer_share == 1 and result.report.floats == {}
    assert "DepthwiseConv2D" in {r.op for r in result.report.layers}
    assert {p.name for p in tmp_path.iterdir()} == {"digits.onnx", "plan", "report.html"}
    again = chipfit.load(tmp_path / "plan")
    assert again.plan.platform == "ort_cpu" and again.graph.inputs == result.graph.inputs


# ---------------------------------------------------------------- exit statuses and panels


@pytest.fixture
def panels(monkeypatch, capsys):
    """Returns a function that runs `chipfit`, perhaps raising an error, and returns exit status and standard error."""

    def answer(*words, raises=None):
        def error():
            raise raises

        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["chipfit", *words])
        if raises is not None:
            monkeypatch.setattr(command_line, "app", error)
        with pytest.raises(SystemExit) as e:
            command_line.main()
        return e.value.code, capsys.readouterr().err

    return answer


def test_an_unexpected_error_is_shown_as_a_bug_to_report(panels):
    status, err = panels("lint", "x", raises=ZeroDivisionError("unexpected"))
    assert status == 70 and "ZeroDivisionError: unexpected" in err and "Traceback" in err
    assert "bug of chipfit" in err and "report it" in err and "chipfit lint x" in err


ENDS = [(KeyboardInterrupt(), 130, ""), (MemoryError(), 2, "Not enough memory")]


@pytest.mark.parametrize("raised, status, words", [*ENDS, (DataError("No such thing", hint="try"), 2, "try")])
def test_every_end_of_a_command_has_its_own_status_and_no_traceback(panels, raised, status, words):
    code, err = panels("lint", "x", raises=raised)
    assert code == status and words in err and "Traceback" not in err


@pytest.mark.parametrize("words", ["quantize . --data . --input-size", "train . --data . --epochs"])
def test_a_number_above_64_bits_is_refused(panels, words):
    *_, option = words.split()
    code, err = panels(*words.split(), "9" * 20)
    assert code == 2 and f"Invalid value for '{option}'" in " ".join(err.split()) and "Traceback" not in err


@pytest.mark.parametrize("words", [":y", "x:", "../x:y", "a.b.c:d", "json:dumps", "json:loads", "latin_source:model"])
def test_a_module_without_a_model_is_refused(panels, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin_source.py").write_bytes("model = 'café'".encode("latin-1"))
    code, err = panels("lint", words, "--input-shape", "1,3")
    assert code == 2 and "Traceback" not in err
    assert "latin" not in words or ("cannot be imported" in err and "utf-8" in err)


def test_a_closed_pipe_ends_a_command_quietly():
    pipe = "import os, runpy; reading, writing = os.pipe(); os.close(reading); os.dup2(writing, 1)\n"
    done = python(pipe + "runpy.run_module('chipfit', run_name='__main__', alter_sys=True)", "platforms", "list")
    assert done.returncode == 1 and done.stderr == ""


@pytest.mark.parametrize("words, said", [((), "chipfit: loading PyTorch\n"), (("--quiet",), "")])
def test_a_command_says_at_once_that_it_loads_pytorch(words, said, tmp_path):
    run = [sys.executable, "-m", "chipfit", "lint", "nomodule:net", "--input-shape", "1,3", *words]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(said + "\u256d")  # then the error in its box


def test_ctrl_c_ends_a_process_with_130_and_no_traceback(tmp_path):
    press = "import os, signal\nprint('here', flush=True)\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / "slow.py").write_text(press)
    # a background process ignores SIGINT otherwise
    code = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "runpy.run_module('chipfit', run_name='__main__', alter_sys=True)"
    done = python(code, "platforms", "show", "slow:chip", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (130, "here\n") and "Traceback" not in done.stderr
