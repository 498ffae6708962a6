"""What every test gets: one seed, and as many threads as tests beside each other can share."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")  # a process has one backend; tests/frameworks/keras runs on each
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Networks that a test module makes when it is imported have the same weights whichever modules came before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
