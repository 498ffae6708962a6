"""Export of runs to TensorBoard and MLflow by their own libraries."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chipfit.bench.board import as_markdown, row
from chipfit.errors import ConfigError, import_optional, short_message
from chipfit.training.scalars import writer

#: modules of MLflow; filter of completed runs; greatest number of metrics in one request
_MODULES, _FINISHED, _BATCH = ("mlflow", "mlflow.entities"), " and attributes.status = 'FINISHED'", 1000


def track(runs: Sequence[Mapping[str, Any]], to: str) -> int:
    """Write curves and results of all completed runs; return their number.

    Args:
        to: a folder for TensorBoard, or "mlflow:ADDRESS" of a server or database.

    Raises:
        RuntimeUnavailable: the library is not installed.
        ConfigError: MLflow reports an error.
    """
    ended = [r for r in runs if r["outcome"]]
    if to.startswith("mlflow:"):
        _mlflow(ended, to.removeprefix("mlflow:"))
        return len(ended)
    for run in ended:
        with writer(Path(to, f"{run['name'].replace(':', '_')}-{run['key'][:6]}")) as board:
            for point in _points(run):
                board.add_scalar(*point)
            board.add_text("result", as_markdown([row(run)]))
    return len(ended)


def _mlflow(runs: Sequence[Mapping[str, Any]], uri: str) -> None:
    """Send runs to MLflow, where a study becomes an experiment; skip runs sent before."""
    library, entities = (import_optional(m, "Sending runs", ConfigError, "mlflow-skinny") for m in _MODULES)
    try:
        client = library.MlflowClient(uri)
        for run in runs:
            study = run["study"] or "chipfit"
            known = client.get_experiment_by_name(study)
            at = client.create_experiment(study) if known is None else known.experiment_id
            tags = {"chipfit.key": run["key"], "chipfit.ended": str(run["ended"])}
            if client.search_runs([at], " and ".join(f"tags.`{k}` = '{v}'" for k, v in tags.items()) + _FINISHED):
                continue
            made = client.create_run(at, run_name=run["name"], tags=tags).info.run_id
            points = [entities.Metric(c, v, int(1000 * run["ended"]), step) for c, v, step in _points(run)]
            for k in range(0, len(points), _BATCH):
                client.log_batch(made, metrics=points[k : k + _BATCH])
            client.log_batch(made, params=[entities.Param(k, str(v)) for k, v in row(run).items()])
            client.set_terminated(made)
    except library.exceptions.MlflowException as e:
        raise ConfigError(f"MLflow failed: {short_message(e)}", where=uri) from e


def _points(run: Mapping[str, Any]) -> list[tuple[str, float, int]]:
    """Return (curve, value, step) of all points."""
    return [(c, value, step) for c in ("loss", "top1") for step, value in run["outcome"]["curves"][c]]
