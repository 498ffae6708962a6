"""Experiments and the command line on a device, beside the CPU."""

import json

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import chipfit
from chipfit import frameworks
from chipfit.bench.board import row
from chipfit.bench.config import of
from chipfit.bench.run import run
from chipfit.bench.store import Store
from tests.bench.tiny import config, quiet, without_training
from tests.build import command, model_of

MINE = "tests.cli.mine"
STEPS = {"kwargs": {"base_lr": 0.01, "max_iter": 4}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder whose experiments share one float network."""
    return tmp_path_factory.mktemp("bench")


@pytest.mark.parametrize(
    "asked",
    [without_training(ptq={"platform": "ort_cpu"}), config(lr_scheduler=STEPS, deploy=["ort_cpu@VNNI"])],
    ids=["ptq", "training"],
)
def test_an_experiment_gives_the_numbers_of_the_cpu(accelerator, home, asked):
    there, here = (run(of({**asked, "device": str(d)}), home, quiet) for d in (accelerator, "cpu"))
    assert (there.device, here.device) == (str(accelerator), "cpu") and there.key != here.key
    assert abs(there.float_top1 - here.float_top1) <= 1 and abs(there.top1 - here.top1) <= 2  # 1 image is 1 %
    assert np.allclose(there.curves.loss, here.curves.loss, rtol=0.02)
    assert [d.differing for d in there.deployed] == [0] and there.deployed[0].exact


def test_a_network_from_a_file_is_moved_to_the_device(accelerator, home, tmp_path):
    file = next(home.glob("float/*.safetensors"))
    saver = {"pretrain": {"path": str(file)}}
    out = run(of(without_training(ptq={"platform": "ort_cpu"}, saver=saver, device=str(accelerator))), tmp_path, quiet)
    assert out.device == str(accelerator) and out.float_top1 > 50 and out.top1 > 50


def test_the_command_line_chooses_the_device_and_the_leaderboard_shows_it(accelerator, home, tmp_path):
    asked = without_training(ptq={"platform": "ort_cpu"})
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asked))
    words = ["bench", "run", str(tmp_path / "config.yaml"), "--home", str(home), "--again"]
    done = command(*words, "--device", str(accelerator))
    assert done.exit_code == 0, (done.output, done.exception)
    assert str(accelerator) in {row(r)["device"] for r in Store(home / "runs.sqlite").rows()}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Return a folder with labelled images, which is the current one."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 3, 8, 8)).astype("float32"), rng.integers(0, 3, 64)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_quantize_train_and_explain_run_on_the_device_of_the_command(accelerator, files):
    device = ["--device", str(accelerator)]
    for words in (
        ["quantize", f"{MINE}:net", "--data", "d.npz", "--out", "there", *device],
        ["quantize", f"{MINE}:net", "--data", "d.npz", "--out", "here"],
        ["train", "there", "--data", "d.npz", "--out", "trained", *device],
        ["train", f"{MINE}:net", "--data", "d.npz", "--out", "trained_too", *device],
        ["explain", "trained", "--data", "d.npz", *device],
    ):
        done = command(*words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    one, other = (chipfit.load(files / name / "plan").plan.tensors for name in ("there", "here"))
    for name, t in one.items():
        if t.stored is not None:
            torch.testing.assert_close(other[name].stored.scale, t.stored.scale, rtol=1e-4, atol=0)
    assert str(accelerator) not in json.dumps([p.name for p in files.rglob("*")])


def test_a_program_from_a_file_runs_on_the_device(accelerator, tmp_path):
    def forward(m, x):
        x = m.conv(x)
        return x + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype)  # a tensor that is made when it runs

    torch.manual_seed(0)
    model, x = model_of(forward, conv=nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "m.pt2")
    program = frameworks.load_torch(str(tmp_path / "m.pt2")).to(accelerator)
    torch.testing.assert_close(program(x.to(accelerator)).cpu(), model(x))
    result = chipfit.quantize(program, [x], platform="ort_cpu", progress=False)
    assert result.model(x.to(accelerator)).device == accelerator
