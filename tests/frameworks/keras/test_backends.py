"""The tests of this folder again on the other backends of Keras, one process each: a process has one backend."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OTHERS = {"jax", "tensorflow", "torch"} - {os.environ["KERAS_BACKEND"]}


@pytest.mark.skipif("CHIPFIT_ONE_BACKEND" in os.environ, reason="this is such a process")
@pytest.mark.parametrize("backend", sorted(OTHERS))
def test_everything_holds_on(backend):
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    environment = {**os.environ, "KERAS_BACKEND": backend, "CHIPFIT_ONE_BACKEND": "1"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(HERE)]
    done = subprocess.run(command, cwd=HERE.parents[2], env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"on {backend}:\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
