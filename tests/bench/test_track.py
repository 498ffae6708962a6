"""Runs in TensorBoard and MLflow, read back by their own readers."""

import os
import sys

import pytest

from chipfit.bench.board import track
from chipfit.errors import ConfigError, RuntimeUnavailable
from tests.bench.test_board import runs


def test_tensorboard_reads_the_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert track(runs(), str(tmp_path)) == 5  # one of the six has failed
    (folder,) = tmp_path.glob("run1-*")
    found = EventAccumulator(str(folder)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("top1")] == [(1, 50.0), (2, 79.0)]
    (told,) = found.Tensors("result/text_summary")
    assert b"| run1 | s | resnet20 | dorefa / pact | 4 |" in told.tensor_proto.string_val[0]


def test_mlflow_has_a_run_for_each(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder in the place of a server, where there is none
    address = os.environ.get("CHIPFIT_TEST_MLFLOW") or (tmp_path / "tracked").as_uri()
    assert track(runs(), f"mlflow:{address}") == 5
    track(runs(), f"mlflow:{address}")  # a second time
    client = mlflow.MlflowClient(address)
    at = client.get_experiment_by_name("s").experiment_id
    found = {r.info.run_name: r for r in client.search_runs([at])}
    assert sorted(r.info.run_name for r in client.search_runs([at])) == [f"run{k}" for k in range(5)]
    assert found["run1"].info.status == "FINISHED"
    assert found["run1"].data.params["setting"] == "snpe" and found["run1"].data.params["top1"] == "79.0"
    assert [(m.step, m.value) for m in client.get_metric_history(found["run1"].info.run_id, "top1")] == [
        (1, 50),
        (2, 79),
    ]
    with pytest.raises(ConfigError, match="MLflow failed"):
        track(runs(), "mlflow:no-such-scheme://somewhere")


@pytest.mark.parametrize(
    "module, to, error, package",
    [
        ("torch.utils.tensorboard", "folder", RuntimeUnavailable, "tensorboard"),
        ("mlflow", "mlflow:folder", ConfigError, "mlflow-skinny"),
    ],
)
def test_a_missing_library_is_named_with_its_installation(tmp_path, monkeypatch, module, to, error, package):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=f"Try: pip install {package}"):
        track(runs(), to)
