"""Experiments under torchrun: two processes share every batch, and train what one would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from chipfit.bench.store import Store
from tests.bench.tiny import config, image_folder

ROOT = Path(__file__).parents[2]
SOLVER = ["-m", "chipfit.bench.solver.cls_quant_solver", "--config", "config.yaml"]


def trained(folder: Path, batch: int, processes: int, **over):
    """Outcome of an experiment whose processes take `batch` images each, and the weights of its float network."""
    folder.mkdir()
    data = {**config()["data"], "batch_size": batch}
    asked = config(**{"model": {"type": "tests.bench.tiny:plain"}, "data": data, "deploy": ["ort_cpu@VNNI"], **over})
    (folder / "config.yaml").write_text(yaml.safe_dump(asked))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(torchrun if processes > 1 else []), *SOLVER]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = Store(folder / "bench_runs/runs.sqlite").rows()
    (weights,) = (folder / "bench_runs/float").glob("*.safetensors")
    return found, load_file(weights), done.stdout


@pytest.mark.slow
def test_two_processes_train_what_one_does_on_batches_twice_as_large(tmp_path):
    """Gradients are means over the same images, added in another order: 24 steps of float32 at rates up to 0.1."""
    (one, alone, _), (two, shared, said) = trained(tmp_path / "one", 50, 1), trained(tmp_path / "two", 25, 2)
    assert two["tries"] == 1 and two["outcome"]["hardware"].startswith("2 x ")  # one of the two files it
    assert said.count("deployed on ort_cpu") == 1
    assert all(torch.allclose(alone[k], shared[k], atol=1e-5) for k in alone)
    assert two["outcome"]["float_top1"] == one["outcome"]["float_top1"] > 80
    assert two["outcome"]["top1"] == pytest.approx(one["outcome"]["top1"], abs=2.0)
    (deployed,) = two["outcome"]["deployed"]
    assert deployed["exact"] and deployed["differing"] == 0
    _, smaller, _ = trained(tmp_path / "smaller", 25, 1)  # the control: other batches give other weights
    assert not all(torch.allclose(alone[k], smaller[k], atol=1e-2) for k in alone)


@pytest.mark.slow
def test_images_that_any_process_cannot_read_are_counted(tmp_path):
    bad = [f"val/a/{j:02}.png" for j in (1, 3, 5)]  # the second process reads all of these
    data = image_folder(tmp_path, *bad, "train/b/02.png", "train/b/09.png") | {"batch_size": 5, "corrupted": 0.2}
    found, _, _ = trained(tmp_path / "two", 5, 2, data=data, deploy=[])
    assert found["outcome"]["notes"] == ["2 training images could not be read", "3 test images could not be read"]
