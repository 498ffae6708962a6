"""The tests of this folder again on the other backends of Keras, one process each: a process has one backend."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
OTHERS = {"jax", "tensorflow", "torch"} - {os.environ["KERAS_BACKEND"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Models saved on the backend of this process, what they compute and how they train, for the others to load."""
    from tests.frameworks.keras.test_lower import flat, quantized
    from tests.frameworks.keras.test_training_alike import prepare

    folder = tmp_path_factory.mktemp("saved")
    for name in ("mobilenet", "shared"):
        result, batch = quantized(name)
        result.model.save(folder / f"{name}.keras")
        np.save(folder / f"{name}.npy", result.model.run_flat(flat(batch))[0].numpy())
    prepare(folder)
    return folder


@pytest.mark.skipif("CHIPFIT_ONE_BACKEND" in os.environ, reason="this is such a process")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_everything_holds_on_every_backend(which, saved):
    running = {}
    for backend in sorted(b for b in OTHERS if find_spec(b) is not None):
        environment = {**os.environ, "KERAS_BACKEND": backend, "CHIPFIT_ONE_BACKEND": "1", "CHIPFIT_SAVED": str(saved)}
        environment.pop("XLA_FLAGS", None)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(HERE)]
        running[backend] = subprocess.Popen(
            command, cwd=HERE.parents[2], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    try:
        said = {backend: process.communicate(timeout=900)[0] for backend, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
    failed = [f"on {backend}:\n{said[backend][-6000:]}" for backend, process in running.items() if process.returncode]
    assert not failed, "\n".join(failed)
