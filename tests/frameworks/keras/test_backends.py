"""Run tests of this folder on the other backends of Keras, in one process each: a process has one backend."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.keras.test_lower import flat, quantized
from tests.frameworks.keras.test_training_alike import CASES, prepare

HERE = Path(__file__).parent
OTHERS = [b for b in ("tensorflow", "jax", "torch") if b != os.environ["KERAS_BACKEND"] and find_spec(b) is not None]
#: one of each: reading, types, saving, lowering, a step of training, training on, bounds in a file, export
SELECTION = (
    "test_capture.py::test_the_graph_computes_what_the_model_computes[nested]",
    "test_inference.py::test_what_a_model_computes_in_float64_is_read_in_float32[array]",
    "test_lower.py::test_a_file_that_another_backend_saved_computes_the_same",
    "test_lower.py::test_it_computes_what_the_engine_computes[nested]",
    "test_lower.py::test_one_step_of_training_is_the_step_that_the_engine_takes",
    "test_training_alike.py::test_it_trains_as_on_another_backend[ste]",
    "test_training_limits.py::test_keras_training_ends_where_a_number_is_none[from a file]",
    "test_whole.py::test_the_file_computes_the_simulated_integers",
)
#: examples of documents 000 and 002 with layers and functions of a backend
EXAMPLES = {
    "tensorflow": [str(HERE.parents[1] / "documents/keras_examples.py"), str(HERE / "test_tensorflow_functions.py")]
}


def save(folder, cases):
    """Save models on the backend of this process, what they compute and how they train, for the others to load."""
    for name in ("mobilenet", "shared"):
        result, batch = quantized(name)
        result.model.save(folder / f"{name}.keras")
        np.save(folder / f"{name}.npy", result.model.run_flat(flat(batch))[0].numpy())
    prepare(folder, cases)


def run_tests(backend, tests, marked, folder, timeout):
    """Run tests on another backend, and fail with what they print if they do."""
    environment = {**os.environ, "KERAS_BACKEND": backend, "CHIPFIT_ONE_BACKEND": "1", "CHIPFIT_SAVED": str(folder)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *tests]
    log, where = folder / "log.txt", {"env": environment, "cwd": HERE.parents[2], "timeout": timeout}
    with log.open("wb") as out:  # not a pipe, which children may keep open behind a process that is killed
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, **where).returncode
    assert code == 0, f"on {backend}, exit code {code}:\n{log.read_text(errors='replace')[-6000:]}"


one_backend = pytest.mark.skipif("CHIPFIT_ONE_BACKEND" in os.environ, reason="this is such a process")


@pytest.mark.thinned(2)
@one_backend
@pytest.mark.parametrize("backend", OTHERS)
def test_another_backend_reads_trains_exports_and_saves(backend, tmp_path):
    save(tmp_path, ["ste"])
    tests = [*(str(HERE / test) for test in SELECTION), *EXAMPLES.get(backend, ())]
    run_tests(backend, tests, "not slow", tmp_path, 1200)


@one_backend
@pytest.mark.slow
@pytest.mark.parametrize("marked", ["not slow", "slow"])
@pytest.mark.parametrize("backend", OTHERS)
def test_everything_holds_on_every_backend(backend, marked, tmp_path):
    save(tmp_path, CASES)
    run_tests(backend, [str(HERE)], marked, tmp_path, 3600)
