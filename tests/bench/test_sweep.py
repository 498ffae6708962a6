"""Sweeps: every experiment once, retries, failures, and concurrent drivers."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from chipfit.bench import sweep as sweeps
from chipfit.bench.board import json_without_times
from chipfit.bench.config import of
from chipfit.bench.matrix import configs, generate
from chipfit.bench.store import Store
from chipfit.bench.sweep import BUSY, sweep
from chipfit.errors import ConfigError, RuntimeUnavailable
from tests.bench.tiny import config

ROOT = Path(__file__).parents[2]


def matrix(folder, bits=(4, 8), **over):
    """One experiment for each width."""
    axes = {"bit": {f"b{b}": {"qparams": {"bit": b}} for b in bits}, "seed": {"s0": {"seed": 0}}}
    study = {"of": ["bit", "seed"], "folder": "{bit}/{seed}", "config": config(**over)}
    (folder / "matrix.yaml").write_text(yaml.safe_dump({"axes": axes, "studies": {"s": study}}))
    generate(folder / "matrix.yaml")
    return folder / "matrix.yaml"


def stores(folder):
    """Store an outcome of the experiment of 8 bits."""
    asked = of(config(study="s", seed=0))
    Store(folder / "home/runs.sqlite").put(asked.key, asked.name, "s", {"top1": 1.0})


def test_an_experiment_of_another_process_is_waited_for(tmp_path, monkeypatch):
    path = matrix(tmp_path, (8,))
    calls = []

    def attempt(*given):
        calls.append(given)
        if len(calls) == 2:  # the other process ends meanwhile
            stores(tmp_path)
        return BUSY, ""

    monkeypatch.setattr(sweeps, "run_in_process", attempt)
    monkeypatch.setattr(sweeps, "RETRY_PAUSE", 0.0)
    told = []
    assert sweep(configs(path), path, tmp_path / "home", report=lambda *what: told.append(what[1])) == []
    assert told == ["runs", "another process is at it"] * 2 + ["done elsewhere"]


def test_an_experiment_is_started_with_the_device_that_it_names(tmp_path, monkeypatch):
    path, started = matrix(tmp_path, (8,), device="auto"), []
    monkeypatch.setattr(sweeps, "run_in_process", lambda *given: (started.append(given[3]), (0, ""))[1])
    assert sweep({k: c.on("cpu") for k, c in configs(path).items()}, path, tmp_path / "home") == []
    assert started == ["cpu"]


def test_devices_that_a_sweep_cannot_have_are_refused_before_any_work(tmp_path, monkeypatch):
    path = matrix(tmp_path, (8,), device="cuda:999")
    monkeypatch.setattr(sweeps, "run_in_process", None)
    with pytest.raises(ConfigError, match="no device 'cuda:999'"):
        sweep(configs(path), path, tmp_path / "home")
    with pytest.raises(ConfigError, match="Ray chooses the devices.*device: cuda"):
        sweep(configs(path), path, tmp_path / "home", ray="local")


def test_a_worker_killed_after_storing_its_outcome_has_not_failed(tmp_path, monkeypatch):
    path = matrix(tmp_path, (8,))

    def attempt(*given):
        stores(tmp_path)
        return -9, ""

    monkeypatch.setattr(sweeps, "run_in_process", attempt)
    assert sweep(configs(path), path, tmp_path / "home", retries=0) == []
    assert [r["status"] for r in Store(tmp_path / "home/runs.sqlite").rows()] == ["done"]


def test_a_worker_killed_for_lack_of_memory_is_reported_and_others_continue(tmp_path, monkeypatch):
    """Linux ends a process for which no memory is left with SIGKILL."""
    path = matrix(tmp_path)
    run = subprocess.run

    def started(command, **how):  # the process is a real one, which ends so in place of training
        died = "import os, signal; print('step 3'); os.kill(os.getpid(), signal.SIGKILL)"
        return run([sys.executable, "-c", died if "b4" in command[5] else "pass"], **how)

    monkeypatch.setattr(subprocess, "run", started)
    told = []
    assert sweep(configs(path), path, tmp_path / "home", retries=1, report=lambda *what: told.append(what)) == ["b4/s0"]
    assert ("b8/s0", "done") in told and told.count(("b4/s0", "failed: tries again")) == 1
    (lost,) = Store(tmp_path / "home/runs.sqlite").rows()
    assert "ended by SIGKILL, perhaps for lack of memory" in lost["error"]


@pytest.mark.slow
@pytest.mark.parametrize("ray", [None, "local"])
def test_a_sweep_gives_the_outcomes_of_single_runs_and_a_second_one_does_nothing(tmp_path, ray):
    if ray is not None:
        pytest.importorskip("ray")
    path = matrix(tmp_path)
    tables = []
    for home in ("one", "other"):
        told = []
        where = {"ray": ray, "workers": 2} if home == "one" else {"workers": 1}
        assert sweep(configs(path), path, tmp_path / home, report=lambda *w: told.append(w), **where) == []  # noqa: B023
        tables.append(json_without_times(Store(tmp_path / home / "runs.sqlite").rows()))
    assert tables[0] == tables[1]
    told = []
    sweep(configs(path), path, tmp_path / "one", report=lambda *w: told.append(w[1]))
    assert told == ["done before", "done before"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "wants, error, words",
    [
        ({"ray": "hello"}, RuntimeUnavailable, "Ray cannot be reached.*hello.*ray start --head"),
        ({"ray": "local", "gpus": 99}, ConfigError, "No experiment fits on this machine.*GPU 99 of"),
        ({"ray": "local", "workers": 1, "cpus": 2}, ConfigError, "CPU 2 of 1"),
    ],
)
def test_resources_that_ray_lacks_are_refused(tmp_path, wants, error, words):
    pytest.importorskip("ray")
    path = matrix(tmp_path)
    with pytest.raises(error, match=words):
        sweep(configs(path), path, tmp_path / "home", **wants)


@pytest.mark.slow
def test_two_drivers_on_one_store_share_the_work(tmp_path):
    path = matrix(tmp_path, (4, 6, 8), deploy=[])
    command = [sys.executable, "-m", "chipfit", "bench", "sweep", str(path), "--home", str(tmp_path / "home")]
    drivers = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for driver in drivers:
        said, _ = driver.communicate()
        assert driver.returncode == 0 and "3 of 3 experiments have an outcome" in said
    found = Store(tmp_path / "home/runs.sqlite").rows()
    assert [(r["status"], r["tries"]) for r in found] == [("done", 1)] * 3


@pytest.mark.slow
def test_a_tenth_of_the_small_matrix_runs_as_make_bench_small_does(tmp_path):
    """Four experiments on two workers, by the command line, and their page."""
    line = next(x for x in (ROOT / "Makefile").read_text().splitlines() if "--study tenth" in x)
    words = line.strip().replace("$(WORKERS)", "2").partition("chipfit ")[2].split()
    for given in (words, ["bench", "board", str(tmp_path / "page.html")]):
        command = [sys.executable, "-m", "chipfit", *given, "--home", str(tmp_path / "home")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    found = Store(tmp_path / "home/runs.sqlite").rows()
    assert [(r["status"], r["study"], r["outcome"]["tested"]) for r in found] == [("done", "tenth", 200)] * 4
    assert len({r["outcome"]["float_top1"] for r in found}) == 1  # one float network, trained once
    assert all(r["outcome"]["config"]["unified"] for r in found)
    assert all(r["name"] in (tmp_path / "page.html").read_text() for r in found)
