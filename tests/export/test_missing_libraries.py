"""Every format and runtime asks for its own libraries only, and names the extra that installs a missing one."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch import nn

from chipfit.errors import ExportError, RuntimeUnavailable
from tests.build import quantized, sequential


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
    "library, extra", [("onnxruntime", "onnx"), ("openvino", "openvino"), ("ai_edge_litert", "litert")]
)
def test_verification_without_its_runtime_names_the_extra(results, without, library, extra):
    fit, batch = results
    without(library)
    runtime = "litert" if library == "ai_edge_litert" else library
    result = fit["tflite_int8" if runtime == "litert" else "ort_cpu"]
    with pytest.raises(RuntimeUnavailable, match=rf"needs {library}, which is not installed.*'chipfit\[{extra}\]'"):
        result.verify([batch], runtime=runtime)
