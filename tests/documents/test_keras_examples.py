"""Documents 000 and 002: their examples with layers and functions of TensorFlow."""

from pathlib import Path

import pytest

from tests.frameworks.keras.test_backends import run_tests


def test_the_examples_run_on_tensorflow(tmp_path):
    pytest.importorskip("tensorflow")
    run_tests("tensorflow", [str(Path(__file__).with_name("keras_examples.py"))], "not slow", tmp_path, 1200)
