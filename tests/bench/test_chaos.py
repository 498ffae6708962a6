"""Sweeps whose driver and workers are killed at random instants end with what an undisturbed sweep gives."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.test_sweep import matrix

ROOT = Path(__file__).parents[2]
#: many checkpoints, so that many kills are followed by training that goes on
LONG = {
    "deploy": ["ort_cpu@VNNI"],
    "lr_scheduler": {"kwargs": {"base_lr": 0.01, "warmup_steps": 2, "max_iter": 40}},
    "saver": {"print_freq": 1, "val_freq": 2, "pretrain": {"epochs": 2, "lr": 0.1}},
}


@pytest.mark.slow
@pytest.mark.parametrize("kills, how", [(5, ["--forked", "--control"]), (12, [])])
def test_kills_change_nothing_and_checkpoints_that_forget_the_optimizer_would_be_noticed(tmp_path, kills, how):
    path = matrix(tmp_path, **LONG)
    command = [sys.executable, "benchmarks/chaos.py", str(path), "--kills", str(kills), *how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kills} kills" in done.stdout and "0 with another table" in done.stdout
    assert "--control" not in how or "forget the optimizer: noticed" in done.stdout
