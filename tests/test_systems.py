"""The package on other systems than Linux: Windows, macOS, and consoles without UTF-8."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import chipfit
from chipfit import files
from chipfit.bench.run import peak_memory
from chipfit.calibration.source import MemoryLimit
from chipfit.cli.inputs import load_data, load_model
from chipfit.errors import CaptureError, DataError
from tests.build import images, sequential
from tests.processes import python
from tests.windows import POSIX_MODULES, POSIX_NAMES, windows  # noqa: F401 -- a fixture


def test_files_and_folders_are_written_and_replaced_on_windows(windows, tmp_path):  # noqa: F811
    for text in ("1", "2"):
        files.write_atomically(tmp_path / "f", text.encode())
        with files.replace_folder(tmp_path / "out", "a test") as new:
            (new / "a.txt").write_text(text)
            (new / files.MANIFEST).write_text('{"chipfit": "1", "files": {"a.txt": {}}}')
        assert ((tmp_path / "f").read_text(), (tmp_path / "out" / "a.txt").read_text()) == (text, text)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "out"]


def test_one_process_holds_a_folder_on_windows(windows, tmp_path):  # noqa: F811
    with files.lock_folder(tmp_path, wait=False) as first, files.lock_folder(tmp_path, wait=False) as second:
        assert (first, second) == (True, False)
    with files.lock_folder(tmp_path, wait=True) as again:
        assert again


@pytest.mark.parametrize("platform, suffix", [("ort_cpu", ".onnx"), ("tflite_int8", ".tflite")])
def test_a_network_is_quantized_saved_exported_and_proven_on_windows(windows, tmp_path, platform, suffix):  # noqa: F811
    result = chipfit.quantize(sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), [images()], platform=platform)
    for _ in range(2):  # the second time files and folders are there
        result.save(tmp_path / "saved")
        result.export(tmp_path / f"net{suffix}")
        result.report.save(tmp_path / "report.html")
    again = chipfit.load(tmp_path / "saved")
    assert again.verify([images()], path=tmp_path / f"net{suffix}").exact
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"net{suffix}", "report.html", "saved"]
    again.save(tmp_path / "saved")  # onto the folder that it was loaded from


def test_calibration_data_beyond_the_limit_stay_in_memory_on_windows(windows):  # noqa: F811
    x = torch.arange(1024.0)
    kept = MemoryLimit(most=16).keep(x)
    assert torch.equal(kept, x)


IMPORTS = """
import importlib, mmap, os, pkgutil, signal, sys
import torch, numpy, scipy, rich, typer, subprocess, multiprocessing, tempfile, shutil, pathlib
for name in {modules}:
    sys.modules[name] = None
for module, names in ((os, {os}), (signal, {signal}), (mmap, {mmap})):
    for name in names:
        vars(module).pop(name, None)
import chipfit
for found in pkgutil.walk_packages(chipfit.__path__, "chipfit."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
"""


def test_every_module_is_imported_without_the_modules_of_posix():
    names = {module.__name__: found for module, found in POSIX_NAMES.items()}
    script = IMPORTS.format(modules=POSIX_MODULES, **names)
    done = python(script)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_peak_of_memory_is_in_bytes_on_macos_too(monkeypatch):
    here = peak_memory()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory() * 1024 == pytest.approx(here, rel=0.2)  # macOS counts bytes, Linux KiB


def test_the_peak_of_memory_is_unknown_on_windows(windows):  # noqa: F811
    assert peak_memory() is None


def test_a_path_that_begins_with_a_drive_is_a_path():
    with pytest.raises(CaptureError, match=r"it does not exist\. Where: C:\\models\\net\.onnx"):
        load_model(r"C:\models\net.onnx")
    with pytest.raises(DataError, match="a file, a folder or module:iterable"):
        load_data(r"D:\images")
    with pytest.raises(CaptureError, match="Try: sub:build, as in `import sub`"):
        load_model(r"C:\nets\sub.py:build")
    with pytest.raises(CaptureError, match="Try: nets.sub:build, as in `import nets.sub`"):
        load_model(r"nets\sub:build")


CONSOLE = """
import sys
from chipfit.cli import main
sys.argv[1:] = {words}
main()
"""


@pytest.mark.thinned(3)
@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii"])
def test_a_console_without_unicode_shows_what_it_can(encoding, tmp_path):
    environment = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "LC_ALL": "C", "HOME": str(tmp_path)}
    for words in (["platforms", "show", "ort_cpu"], ["explain", str(tmp_path / "na\u00efve\u25b6")]):
        script = CONSOLE.format(words=ascii(words))
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, env=os.environ | environment, check=False
        )
        assert done.returncode == (0 if words[0] == "platforms" else 2), done.stderr.decode(errors="replace")[-2000:]
