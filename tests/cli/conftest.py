"""What tests of commands share."""

import numpy as np
import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with images and labels in d.npz."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(20, 3, 8, 8)).astype("float32"), y=rng.integers(0, 3, 20))
    return tmp_path
