"""Every format and runtime asks for its own libraries only, and names the extra that installs a missing one."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from chipfit.errors import ExportError, RuntimeUnavailable
from tests.build import command, quantized, sequential


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    model, batch = sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(2, 3, 6, 6)
    return {p: quantized(model, batch, p) for p in ("ort_cpu", "tflite_int8")}, batch


@pytest.fixture
def without(monkeypatch):
    """Libraries that are not installed."""

    def hide(*libraries):
        found = importlib.util.find_spec
        finds = lambda name, *of: None if name in libraries else found(name, *of)
        monkeypatch.setattr(importlib.util, "find_spec", finds)
        writers = "chipfit.export.onnx."
        for name in [m for m in sys.modules if m.partition(".")[0] in libraries or m.startswith(writers)]:
            monkeypatch.delitem(sys.modules, name)
        for name in libraries:
            monkeypatch.setitem(sys.modules, name, None)  # importing it fails

    return hide


def test_tflite_files_need_no_onnx(results, without, tmp_path):
    pytest.importorskip("flatbuffers")
    without("onnx", "onnxruntime", "onnxscript")
    assert results[0]["tflite_int8"].export(tmp_path / "m.tflite").stat().st_size > 0


@pytest.mark.parametrize("suffix", [".onnx", ".json"])
def test_onnx_files_without_onnx_name_the_extra(results, without, tmp_path, suffix):
    without("onnx")
    with pytest.raises(ExportError, match=r"needs onnx, which is not installed.*'chipfit\[onnx\]'"):
        results[0]["ort_cpu"].export(tmp_path / f"m{suffix}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "library, extra",
    [("onnxruntime", "onnx"), ("openvino", "openvino"), ("ai_edge_litert", "litert"), ("onnxruntime_qnn", "qnn")],
)
def test_verification_without_its_runtime_names_the_extra(results, without, library, extra):
    fit, batch = results
    without(library)
    runtime = {"ai_edge_litert": "litert", "onnxruntime_qnn": "qnn"}.get(library, library)
    result = fit["tflite_int8" if runtime == "litert" else "ort_cpu"]
    with pytest.raises(RuntimeUnavailable, match=rf"needs {library}, which is not installed.*'chipfit\[{extra}\]'"):
        result.verify([batch], runtime=runtime)


def test_the_demo_names_all_that_is_missing_before_it_trains(without, tmp_path, monkeypatch):
    from chipfit.cli import demo

    without("sklearn", "onnx", "onnxruntime")
    monkeypatch.setattr(demo, "train", None)
    message = r"'chipfit demo' needs sklearn, onnx, onnxruntime, which are not installed.*'chipfit\[demo\]'"
    with pytest.raises(RuntimeUnavailable, match=message):
        demo.run(tmp_path)


@pytest.mark.parametrize("args", [("quantize", "no:such"), ("train", "no:such")])
def test_a_command_names_all_that_is_missing_before_any_work(without, tmp_path, args):
    (tmp_path / "images").mkdir()
    without("onnx", "onnxruntime", "PIL")
    done = command(*args, "--data", str(tmp_path / "images"), "--out", str(tmp_path / "out"))
    assert isinstance(done.exception, RuntimeUnavailable)
    message = str(done.exception)
    assert "onnx, onnxruntime, PIL, which are not installed" in message and "'chipfit[onnx,images]'" in message


def test_the_demo_extra_installs_what_the_demo_needs():
    """The extras of the wheel, as pip reads them."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    demo = tomllib.loads(text)["project"]["optional-dependencies"]["demo"]
    assert {re.split("[<>=]", d)[0] for d in demo} == {"scikit-learn", "onnx", "onnxruntime"}
