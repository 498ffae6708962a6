"""`import chipfit` is a small door: few names, and nothing heavy behind it until one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import chipfit


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
