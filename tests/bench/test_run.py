"""One experiment from its file to its stored outcome, interrupted and repeated."""

import resource
import signal
from pathlib import Path

import pytest
import torch
import yaml

from chipfit.bench.board import find, json_without_times, row
from chipfit.bench.config import of
from chipfit.bench.run import Busy, Outcome, run, source_hash
from chipfit.bench.store import Store
from chipfit.bench.train import Curves
from chipfit.errors import ConfigError, ExportError, UnknownNameError
from chipfit.files import lock_folder
from tests.bench.tiny import config, image_folder, quiet, without_training
from tests.build import command
from tests.processes import python

ROOT = Path(__file__).parents[2]
NO_STEPS = {"kwargs": {"base_lr": 0.01, "max_iter": 0}}


def without_seconds(outcome):
    return {k: v for k, v in outcome.record.items() if k not in ("seconds", "cpu_seconds", "memory")}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def trained(home):
    return run(of(config()), home, quiet)


def test_a_trained_network_is_deployed_and_its_integers_are_compared(trained):
    assert trained.float_top1 > 50 and trained.top1 > 50 and trained.tested == 100
    (deployed,) = [d for d in trained.deployed if d.platform == "ort_cpu"]
    assert (deployed.runtime, deployed.differing, deployed.exact, deployed.why) == ("onnxruntime", 0, True, "")
    assert deployed.integers > 100_000
    assert deployed.top1 == pytest.approx(trained.top1, abs=2.0)  # what training did not round, the platform does
    assert [step for step, _ in trained.curves.loss] == list(range(1, 13))
    assert [step for step, _ in trained.curves.top1] == [4, 8, 12] and trained.curves.top1[-1][1] == trained.top1
    assert trained.size == 3 * 8 * 9 + 8 * 8 * 9 + 512 * 10  # weights of 8 bits
    assert trained.device in ("cpu", f"{torch.accelerator.current_accelerator()}:0")
    assert trained.key == of(config()).key and trained.versions["torch"] and trained.data and trained.code


KILLED = """
import os, signal, sys
from pathlib import Path
from chipfit.bench.config import of
from chipfit.bench.run import run
from tests.bench.tiny import config

run(of(config()), Path(sys.argv[1]), lambda text: text.startswith("step 8:") and os.kill(os.getpid(), signal.SIGKILL))
"""


def test_an_experiment_whose_process_is_killed_resumes_to_the_same_outcome(trained, tmp_path):
    assert python(KILLED, tmp_path).returncode == -signal.SIGKILL
    messages = []
    resumed = run(of(config()), tmp_path, messages.append)
    assert "resumes at step 4" in messages and without_seconds(resumed) == without_seconds(trained)


def test_an_academic_setting_is_deployed_where_weights_have_scales_per_channel(home):
    out = run(of(config(backend="academic", lr_scheduler=NO_STEPS)), home, quiet)
    assert "ort_cpu" in {d.platform for d in out.deployed if d.exact}
    assert out.curves.loss == [] and "bnfold has no effect" in out.notes[0]


def test_a_requested_platform_that_does_not_fit_the_setting_is_explained(home):
    (found,) = run(of(config(deploy=["tflite_int8"], backend="tvm", lr_scheduler=NO_STEPS)), home, quiet).deployed
    assert found.top1 is None and found.why


def test_without_training_a_platform_quantizes(home):
    ptq = {"platform": "ort_cpu", "rule": "mse", "settings": {"correct_bias": True}}
    out = run(of(without_training(ptq=ptq)), home, quiet)
    assert out.float_top1 - 3 <= out.top1 and out.deployed[0].exact and out.deployed[0].top1 == out.top1
    assert out.name.endswith("mse_defaultbit_ort_cpu") and out.size == 3 * 8 * 9 + 8 * 8 * 9 + 512 * 10


@pytest.mark.parametrize("device", ["cpu:1", "cuda:999", "hpu", "gpu"])
def test_a_device_that_this_machine_lacks_is_refused_before_any_work(tmp_path, device):
    with pytest.raises(ConfigError, match=f"no device '{device}' here.*[Aa]llowed: cpu"):
        run(of(config(device=device)), tmp_path, quiet)
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix in (".pt", ".safetensors")]


def test_unreadable_images_are_counted_also_after_an_interruption(tmp_path):
    data = image_folder(tmp_path, "train/a/03.png", "val/b/07.png")
    data |= {"batch_size": 10, "corrupted": 0.1, "train": {"transforms": {"type": "STANDARD"}}}
    saver = {"val_freq": 4, "pretrain": {"epochs": 1, "lr": 0.01}}
    asked = of(config(data=data, deploy=["ort_cpu"], saver=saver))
    whole = run(asked, tmp_path / "whole", quiet)
    assert whole.notes == ["1 training images could not be read", "1 test images could not be read"]

    def dies(text):
        if text.startswith("step 8:"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(asked, tmp_path / "home", dies)
    again = run(asked, tmp_path / "home", quiet)
    assert again.notes == whole.notes and again.curves == whole.curves
    nowhere = of(config(data=data, deploy=[], saver=saver))
    assert run(nowhere, tmp_path / "home", quiet).notes == whole.notes  # tests are read by the simulation, too
    plain = without_training(data={**data, "calibration": 40}, ptq={"platform": "ort_cpu"})
    assert set(whole.notes) <= set(run(of(plain), tmp_path / "home", quiet).notes)


@pytest.mark.slow
def test_an_experiment_resumes_after_a_full_disk_to_the_same_numbers(home, trained):
    """The system refuses files above a few kilobytes, as a full disk would."""
    asked = of(config(seed=1))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
    try:
        with pytest.raises(ExportError, match="cannot be written.*Try: raise the limit"):
            run(asked, home, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    again, fresh = run(asked, home, quiet), run(of(config(seed=1)), home.parent / "fresh", quiet)
    assert again.curves == fresh.curves and again.top1 == fresh.top1


def test_an_experiment_runs_in_one_process_only(tmp_path):
    asked = of(config())
    with lock_folder(tmp_path / "runs" / asked.key, wait=False) as held:
        assert held
        with pytest.raises(Busy, match="Another process"):
            run(asked, tmp_path, quiet)
    with lock_folder(tmp_path / "runs" / asked.key, wait=False) as held:  # what one has left is free
        assert held


def bench(*words, home):
    """Return what a command of `chipfit bench` prints on 80 columns."""
    done = command("bench", *map(str, words), "--home", str(home), columns=80)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def test_the_command_line_stores_and_shows_an_outcome(home, trained, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config()))
    assert "deployed on ort_cpu" in bench("run", tmp_path / "config.yaml", home=home)
    assert "done before" in bench("run", tmp_path / "config.yaml", home=home)
    (kept,) = [r for r in Store(home / "runs.sqlite").rows() if r["key"] == trained.key]
    assert row(kept)["top1"] == trained.top1 and row(kept)["method"] == "lsq" and row(kept)["status"] == "done"
    assert row(kept)["device"] == trained.device
    assert kept["key"] in json_without_times([kept]) and '"seconds"' not in json_without_times([kept])
    with pytest.raises(UnknownNameError):
        find([kept], "other")
    for words in (["compare", kept["key"][:6], kept["name"]], ["board", tmp_path / "b.md"]):
        bench(*words, home=home)
    assert kept["name"] in (tmp_path / "b.md").read_text()
    table = bench("table", home=home)
    assert max(map(len, table.splitlines())) <= 80 and f"{trained.top1:.2f}" in table


@pytest.fixture
def mine(tmp_path, monkeypatch, drop_ins):
    """A folder with the algorithm that docs/extending.md shows, from which commands are given."""
    page = (ROOT / "docs/extending.md").read_text()
    (tmp_path / "leaky.py").write_text(page.partition('title="leaky.py"\n')[2].partition("```")[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_algorithm_in_a_file_and_a_backend_in_an_entry_run_from_a_config(home, mine):
    """By the two how-to sections of document 004."""
    entry = {"name": "mine", "ada_sign": False, "symmetry": True, "per_channel": True, "pot_scale": False}
    method = {"w_method": "leaky:Leaky", "a_method": "leaky:Leaky", "bit": 8}
    (mine / "config.yaml").write_text(yaml.safe_dump(config(qparams=method, backend=entry)))
    assert "deployed on ort_cpu" in bench("run", "config.yaml", home=home)
    (kept,) = [r for r in Store(home / "runs.sqlite").rows() if "leaky" in r["name"]]
    told = kept["outcome"]
    assert (told["setting"], told["deployed"][0]["exact"], told["deployed"][0]["differing"]) == ("mine", True, 0)
    asked = of(config(qparams=method, backend=entry))
    assert told["code"] == source_hash(asked) != source_hash(of(config()))
    with (mine / "leaky.py").open("a") as f:
        f.write("# another version\n")
    assert told["code"] != source_hash(asked)


def test_a_run_below_the_median_of_its_study_stops_early_on_request(home, tmp_path):
    slow = config(lr_scheduler={"kwargs": {"base_lr": 1e-6, "max_iter": 12}}, study="race", bnfold=1, deploy=[])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(slow))
    store = Store(tmp_path / "runs.sqlite")

    def outcome(others, *options):
        """Run behind three other experiments with these accuracies at steps 4, 8 and 12."""
        for k in range(3):
            curves = Curves(top1=[(4 * n, a) for n, a in enumerate(others, 1)])
            store.put(
                f"other{k}", "other", "race", Outcome(f"other{k}", "other", of(slow).resolved, curves=curves).record
            )
        said = bench("run", tmp_path / "config.yaml", "--stop-early", *options, home=tmp_path)
        return said, next(r for r in store.rows() if r["key"] == of(slow).key)

    said, found = outcome([0.0, 100.0, 100.0])
    assert "stopped early: accuracy is below the median" in said and row(found)["status"] == "stopped early"
    told = found["outcome"]
    assert told["stopped"] == 8 and told["curves"]["top1"][-1][0] == 8  # at 4 it was not behind
    assert told["notes"] == ["stopped early, at step 8 of 12"]
    said, found = outcome([0.0, 0.0, 0.0], "--again")  # the control: others that are no better
    assert "stopped" not in said and found["outcome"]["stopped"] == 0 and row(found)["status"] == "done"


def test_the_documents_command_reads_an_experiment(home, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config(backend="tensort")))
    said = python("-m chipfit.bench.solver.cls_quant_solver", "--config", "config.yaml", cwd=tmp_path)
    assert said.returncode == 2 and "tensorrt" in said.stderr  # it has read the file, and names what is near
