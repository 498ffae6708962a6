"""`import chipfit` is a small door: few names, and nothing heavy behind it until one is used."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import chipfit
from chipfit._version import PYTHON, TORCH
from tests.processes import python

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", chipfit.__all__)
def test_every_public_name_is_there(name):
    assert getattr(chipfit, name) is not None and name in dir(chipfit)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        chipfit.quantise


@pytest.mark.parametrize("arguments", [[], ["--help"], ["quantize", "--help"], ["platforms", "--help"], ["--version"]])
def test_neither_the_import_nor_help_loads_torch(arguments):
    probe = f"import chipfit, sys; sys.argv = ['chipfit', *{arguments}]\n" + (
        "from chipfit.cli.app import app\ntry: app()\nexcept SystemExit: pass\n" if arguments else ""
    )
    heavy = {"torch", "numpy", "scipy", "jinja2", "onnx", "keras", "tensorflow"}
    probe += f"print('LOADED', sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("LOADED []")


def imported(change: str) -> subprocess.CompletedProcess[str]:
    """Import chipfit twice after a change of the interpreter."""
    code = f"import sys\n{change}\nimport chipfit\nimport chipfit.errors"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_the_import_refuses_a_python_that_is_too_old():
    done = imported("sys.version_info = (3, 10, 4, 'final', 0)")
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: chipfit needs Python 3.11 or newer (this is Python 3.10.4)\n")


def test_the_import_names_a_torch_that_is_too_old_once(tmp_path):
    def with_torch(version):
        (tmp_path / version / f"torch-{version}.dist-info").mkdir(parents=True)
        return imported(f"sys.path.insert(0, {str(tmp_path / version)!r})")

    done = with_torch("2.8.1+cpu")
    assert done.returncode == 0 and done.stderr.count("chipfit needs torch 2.9 or newer (torch 2.8.1+cpu") == 1
    assert "pip install 'torch>=2.9'" in done.stderr and "<string>:3: RuntimeWarning" in done.stderr
    for version in ("2.9.0", "2.13.0+cpu", "3.0.0a1"):
        assert with_torch(version).stderr == ""


def test_the_oldest_versions_are_those_of_the_package():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    assert project["requires-python"] == f">={'.'.join(map(str, PYTHON))}"
    assert re.search(r"torch>=([\d.]+)", text)[1] == ".".join(map(str, TORCH))


def test_names_load_with_garbage_collection_paused():
    probe = (
        "import gc, torch, chipfit\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(phase))\n"
        "chipfit.quantize\n"
        "print(seen.count('start') < 3, gc.isenabled())"  # one may follow at once
    )
    assert python(probe).stdout == "True True\n"
