"""The wheel: what is in it, and that it works where nothing else of the repository is."""

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from benchmarks.walk import build_wheel

from tests.processes import python

ROOT = Path(__file__).parents[1]
NETS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).eval()

def data():
    return iter([torch.randn(16, 8)])
"""
#: commands without the libraries that an extra installs -> the extra
LACKING = {
    "demo": "demo",
    "quantize nets:build --data nets:data": "onnx",
    "quantize nets:build --data nets:data --platform tflite_int8": "litert",
    "quantize nets:build --data nets:data --platform executorch_xnnpack": "executorch",
    "quantize nets:build --data . --platform tflite_int8": "litert,images",
    "quantize net.keras --data nets:data --no-verify": "onnx,keras",
    "quantize net.h5 --data nets:data --no-verify": "onnx,keras",
    "train nets:build --data nets:data": "onnx",
    "lint net.onnx": "onnx",
    "lint net.tflite": "litert",
    "verify net.onnx --data nets:data": "onnx",
    "explain net.tflite": "litert",
    "compare net.onnx net.tflite": "onnx",
    "check-npu net.tflite": "vela",
    "bench run config.yaml": "bench",
    "bench sweep matrix.yaml": "bench",
    "bench table --home .": "bench",
}
BLOCKED = """
import json
import sys
from typer.testing import CliRunner
from chipfit.cli.app import app
for name in {modules}:
    sys.modules[name] = None
for line in {lines}:
    print(json.dumps([line, str(CliRunner().invoke(app, line.split()).exception)]))
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without a network, with the files of the build outside the repository."""
    return build_wheel(tmp_path_factory.mktemp("dist"))


def test_the_wheel_holds_the_package_and_its_data_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    source = ROOT / "src"
    kinds = {".py", ".pyi", ".yaml", ".json", ".j2", ".css", ".js", ".md", ".typed", ""}
    files = (p for p in (source / "chipfit").rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    wanted = {str(p.relative_to(source)) for p in files if p.suffix in kinds}
    packed = {n for n in names if ".dist-info/" not in n}
    assert packed == wanted
    assert {n.rpartition("/")[2] for n in names - packed} >= {"METADATA", "LICENSE", "entry_points.txt"}


def test_the_installed_wheel_quantizes_and_verifies(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "nets.py").write_text(NETS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import chipfit.cli\n"
    code += f"assert chipfit.__file__.startswith({str(tmp_path)!r}); chipfit.cli.main()"
    done = python(code, *"quantize nets:build --data nets:data --quiet --json".split(), cwd=tmp_path)
    assert done.returncode == 0 and '"verdict": "exact"' in done.stdout, done.stdout + done.stderr


def test_the_page_about_installing_names_every_extra_and_library():
    rows = dict(
        re.findall(r"^\| `?(\w+|\(none\))`? \| .* \| (.*) \|$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    )
    wanted = {"(none)": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    wanted.pop("dev")
    named = {extra: re.findall(r"([\w-]+) \(", libraries) for extra, libraries in rows.items() if extra != "extra"}
    assert named == {extra: [re.match(r"[\w-]+", need)[0] for need in needs] for extra, needs in wanted.items()}


def test_a_command_without_the_libraries_of_an_extra_names_the_extra(tmp_path):
    """Imports are blocked in a process of its own, as where only `pip install chipfit` was run."""
    (tmp_path / "nets.py").write_text(NETS)
    for name in ("net.keras", "net.h5", "net.onnx", "net.tflite", "config.yaml", "matrix.yaml", "runs.sqlite"):
        (tmp_path / name).write_bytes(b"")
    modules = "onnx onnx_ir onnxruntime onnxscript keras h5py ai_edge_litert flatbuffers tflite_micro executorch PIL "
    modules += "sklearn ethosu sqlalchemy ray matplotlib tensorboard openvino"
    script = BLOCKED.format(modules=modules.split(), lines=list(LACKING))
    done = python(script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = dict(json.loads(line) for line in done.stdout.splitlines())
    named = {line: re.findall(r"pip install 'chipfit\[([\w,]+)\]'", text) for line, text in said.items()}
    assert named == {line: [extra] for line, extra in LACKING.items()}, said
