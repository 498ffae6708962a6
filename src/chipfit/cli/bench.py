"""`chipfit bench`: experiments."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from chipfit.cli.output import OUTPUT, command, print_document

if TYPE_CHECKING:
    from chipfit.bench.train import Curves

_ABOUT = "Experiments: algorithms x hardware x models, from files."
bench = typer.Typer(name="bench", help=_ABOUT, no_args_is_help=True)

Home = Annotated[Path, Option("--home", help="folder for results, float networks and checkpoints")]
HOME = Path("bench_runs")
Matrix = Annotated[Path, Argument(help="a matrix file")]
StudyName = Annotated[str | None, Option("--study", help="one study of the matrix; all when omitted")]
Tracker = Annotated[str, Argument(help="folder for TensorBoard, or mlflow:ADDRESS")]
Device = Annotated[str | None, Option("--device", help="cpu, cuda, cuda:1 ..., or auto; by default the file's")]
OfStudy = Annotated[str | None, Option("--study", help="select runs of this study")]


@command(bench)
def run(
    config: Annotated[Path, Argument(help="an experiment, as YAML")],
    home: Home = HOME,
    again: Annotated[bool, Option("--again", help="run it even if it has an outcome")] = False,
    stop_early: Annotated[bool, Option("--stop-early", help="stop it below the median of its study")] = False,
    device: Device = None,
) -> None:
    """Run one experiment, or resume an interrupted one. Exit status 75 if another process runs it."""
    from chipfit.bench import config as configs
    from chipfit.bench.run import Busy, remove_checkpoint
    from chipfit.bench.run import run as run_one
    from chipfit.bench.store import Store
    from chipfit.bench.sweep import BUSY

    experiment = configs.load(config).on(device)
    store = Store(home / "runs.sqlite")
    if not again and store.done([experiment.key]):
        if OUTPUT.json:
            return print_document({"name": experiment.name, "key": experiment.key, "state": "done before"})
        typer.echo(f"{experiment.name}: done before; use --again to run it once more")
        return
    should_stop = _median_stop_rule(store, experiment) if stop_early else None
    try:
        say = (lambda text: None) if OUTPUT.quiet or OUTPUT.json else typer.echo
        outcome = run_one(experiment, home, say, should_stop)
    except Busy as e:
        typer.echo(str(e), err=True)
        raise typer.Exit(BUSY) from None
    if outcome is not None:
        store.put(experiment.key, experiment.name, experiment.study, outcome.record)
        remove_checkpoint(experiment, home)
        if OUTPUT.json:
            done = {"name": experiment.name, "key": experiment.key, "state": "done"}
            return print_document({**done, "top1": outcome.top1, "float_top1": outcome.float_top1})
        for d in outcome.deployed:
            found = f"{d.top1:.2f} %, {d.differing} of {d.integers} integers differ" if d.top1 is not None else d.why
            typer.echo(f"deployed on {d.platform}, {d.runtime}: {found}")
        typer.echo(f"{experiment.name}: {outcome.top1:.2f} %, float {outcome.float_top1:.2f} %")


def _median_stop_rule(store: Any, experiment: Any) -> Any:
    """Return a rule that stops a run if its accuracy is below the median of its study at the same step.

    Source: Golovin et al. 2017, Google Vizier, section 3.2.2.
    """
    from statistics import median

    from chipfit.bench.board import readable

    runs = readable(store.rows(experiment.study))
    others = [dict(map(tuple, r["outcome"]["curves"]["top1"])) for r in runs if r["outcome"]]

    def should_stop(curves: Curves) -> bool:
        step, reached = curves.top1[-1]
        there = [o[step] for o in others if step in o]
        return len(there) >= 3 and reached < median(there)

    return should_stop


@command(bench)
def generate(matrix: Matrix, study: StudyName = None) -> None:
    """Write the files of all experiments of a matrix."""
    from chipfit.bench.matrix import generate as write

    count = len(write(matrix, study)) // 2
    if OUTPUT.json:
        return print_document({"experiments": count, "folder": str(matrix.parent)})
    typer.echo(f"{count} experiments below {matrix.parent}")


@command(bench)
def sweep(
    matrix: Matrix,
    study: StudyName = None,
    home: Home = HOME,
    workers: Annotated[int, Option("--workers", min=1, help="number of concurrent experiments on this machine")] = 1,
    ray: Annotated[str | None, Option("--ray", help='"local", or the address of a Ray cluster')] = None,
    cpus: Annotated[float, Option("--cpus", min=0, help="processor cores of one experiment, on Ray")] = 1,
    gpus: Annotated[float | None, Option("--gpus", min=0, help="GPUs of one experiment, on Ray")] = None,
    memory: Annotated[int | None, Option("--memory", min=1, help="memory of one experiment, on Ray [byte]")] = None,
    retries: Annotated[int, Option("--retries", min=0, help="retries of an experiment that fails")] = 2,
    stop_early: Annotated[bool, Option("--stop-early", help="stop those below the median of a study")] = False,
    device: Device = None,
) -> None:
    """Run all experiments of a matrix without an outcome. Exit status 1 if one failed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from chipfit.bench.matrix import configs
    from chipfit.bench.sweep import sweep as run_all

    experiments, ended = {name: c.on(device) for name, c in configs(matrix, study).items()}, set[str]()
    options: dict[str, Any] = {"workers": workers, "ray": ray, "retries": retries, "stop_early": stop_early}
    options |= {"cpus": cpus, "gpus": gpus, "memory": memory}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True, disable=OUTPUT.quiet or OUTPUT.json) as progress:
        bar = progress.add_task("", total=len(experiments))

        def report(name: str, what: str) -> None:
            ended.update({name} if what in ("done", "done before", "done elsewhere", "failed") else ())
            progress.update(bar, completed=len(ended))
            if not (OUTPUT.quiet or OUTPUT.json):
                progress.console.print(f"{name}: {what}", markup=False, highlight=False, soft_wrap=True)

        failed = run_all(experiments, matrix, home, report=report, **options)
    store = home / "runs.sqlite"
    if OUTPUT.json:
        print_document({"experiments": len(experiments), "failed": sorted(failed), "store": str(store)})
    else:
        typer.echo(f"{len(experiments) - len(failed)} of {len(experiments)} experiments have an outcome in {store}")
    raise typer.Exit(int(bool(failed)))


def _runs(home: Path, study: str | None = None, *, curves: bool = True) -> list[dict[str, Any]]:
    """Return the runs in the store of a folder.

    Raises:
        ConfigError: there is no store.
    """
    from chipfit.bench.board import readable
    from chipfit.bench.store import Store
    from chipfit.errors import ConfigError

    file = home / "runs.sqlite"
    if not file.is_file():
        raise ConfigError("No runs found", where=str(file), hint="chipfit bench run, or --home FOLDER")
    gc.disable()  # garbage collection would take most of the time with thousands of runs
    return readable(Store(file).rows(study, curves=curves), curves=curves)


@command(bench)
def table(home: Home = HOME, study: OfStudy = None) -> None:
    """Show all runs, best first, with the columns that fit the terminal."""
    from chipfit.bench.board import as_text, row

    rows = sorted((row(r) for r in _runs(home, study, curves=False)), key=lambda r: (r["below"] is None, r["below"]))
    if OUTPUT.json:
        return print_document({"runs": rows})
    typer.echo(as_text(rows, shutil.get_terminal_size((1 << 16, 0)).columns))


@command(bench)
def compare(
    one: Annotated[str, Argument(help="name, or beginning of a key")],
    other: Annotated[str, Argument(help="name, or the beginning of a key")],
    home: Home = HOME,
) -> None:
    """Show the differences of two runs: settings, versions, results."""
    from chipfit.bench.board import differences, find

    runs = _runs(home)
    a, b = find(runs, one), find(runs, other)
    found = list(differences(a, b))
    if OUTPUT.json:
        both_keys = [{"name": r["name"], "key": r["key"]} for r in (a, b)]
        return print_document({"runs": both_keys, "differences": [{"what": k, "values": v} for k, *v in found]})
    typer.echo(f"- {a['name']} {a['key'][:6]}\n+ {b['name']} {b['key'][:6]}")
    for key, *both in found:
        typer.echo(f"{key}\n  - {both[0]}\n  + {both[1]}")


@command(bench)
def plot(
    path: Annotated[Path, Argument(help=".png, .svg or .pdf")] = Path("bench.png"),
    home: Home = HOME,
    study: OfStudy = None,
) -> None:
    """Plot accuracy over steps, and over the size of the weights."""
    from chipfit.bench.board import plot as draw

    _show_file("plot", draw(_runs(home, study), path))


@command(bench)
def track(to: Tracker, home: Home = HOME, study: OfStudy = None) -> None:
    """Export curves and results to TensorBoard or MLflow."""
    from chipfit.bench.board import track as write

    count = write(_runs(home, study), to)
    if OUTPUT.json:
        return print_document({"runs": count, "to": to})
    typer.echo(f"{count} runs  {to}")


@command(bench)
def board(
    path: Annotated[Path, Argument(help=".html, .csv, .md, or .json")] = Path("leaderboard.html"),
    home: Home = HOME,
    study: OfStudy = None,
) -> None:
    """Write the leaderboard as a page, a table, or data."""
    from chipfit.bench.board import write

    _show_file("board", write(_runs(home, study), path))


def _show_file(what: str, file: Path) -> None:
    """Print the path of a file that was written."""
    if OUTPUT.json:
        return print_document({"file": str(file)})
    typer.echo(f"{what}  {file}")
