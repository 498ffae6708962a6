"""Leaderboards of experiments: tables, differences, plots, an HTML page, and export to TensorBoard and MLflow."""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NotRequired

from pydantic import ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from chipfit.errors import ConfigError, UnknownNameError, import_optional, short_message
from chipfit.files import package_data, write_atomically
from chipfit.report.html import render
from chipfit.validation import check_value

_LAYOUT = package_data("chipfit.bench", "columns.yaml")
COLUMNS: dict[str, str] = _LAYOUT["columns"]  #: column -> its heading, in order
#: modules of MLflow; filter of completed runs; greatest number of metrics in one request
_MODULES, _FINISHED, _BATCH = ("mlflow", "mlflow.entities"), " and attributes.status = 'FINISHED'", 1000
_list: Any = list  # mypy cannot check types that are built from data
_Number = int | float
#: points of a curve: [step, value]
_Curve = list[Annotated[list[_Number], Field(min_length=2, max_length=2)]]


def _table(**wanted: Any) -> Any:
    """Return the type of a table with these keys; other keys may stand beside them."""
    make: Any = TypedDict
    return with_config(ConfigDict(extra="allow"))(make("Table", wanted))


#: the parts of an outcome that tables, plots and pages show; tables are read without curves
_OUTCOME: TypeAdapter[Any] = TypeAdapter(
    _table(
        config=_table(
            model=_table(type=str),
            qparams=_table(w_method=str, a_method=str, bit=_Number) | None,
            ptq=_table(weight_rule=str, rule=str, bit=_Number) | None,
            seed=int,
            unified=bool,
        ),
        deployed=_list[_table(top1=_Number | None, differing=_Number)],
        curves=NotRequired[_table(top1=_Curve, loss=_Curve)],
        device=NotRequired[str],
        setting=str,
        **dict.fromkeys("top1 float_top1 seconds size".split(), _Number),
    )
)


def row(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run of a store as a row, column -> value, None if missing; the best of several deployments counts."""
    out = dict.fromkeys(COLUMNS) | {k: run[k] for k in ("key", "name", "study", "status")}
    outcome = run["outcome"]
    if outcome is None:
        return out | {"error": run["error"]}
    config, measured = outcome["config"], [d for d in outcome["deployed"] if d["top1"] is not None]
    best = max(measured, key=lambda d: d["top1"], default=None)
    training, ptq = config["qparams"], config["ptq"]
    methods = (training["w_method"], training["a_method"]) if training else (ptq["weight_rule"], ptq["rule"])
    out |= {k: outcome[k] for k in ("setting", "top1", "seconds", "size")}
    return out | {
        "model": config["model"]["type"],
        "method": " / ".join(dict.fromkeys(methods)),
        "bit": training["bit"] if training else ptq["bit"],
        "float": outcome["float_top1"],
        "below": outcome["float_top1"] - outcome["top1"],
        "deployed": None if best is None else best["top1"],
        "differing": None if best is None else best["differing"],
        "seed": config["seed"],
        "device": outcome.get("device"),
        "unified": "" if config["unified"] else "not unified",
        "status": "stopped early" if outcome.get("stopped") else run["status"],
    }


def readable(runs: Iterable[Mapping[str, Any]], *, curves: bool = True) -> list[dict[str, Any]]:
    """Return the runs of a store; one whose outcome is damaged has the status "unreadable", and says why.

    Args:
        curves: whether the outcomes must have curves.
    """
    out = []
    for run in map(dict, runs):
        if run["outcome"] is not None:
            try:
                found = check_value(_OUTCOME, run["outcome"], ConfigError, "the stored outcome", "")
                if not (found["config"]["qparams"] or found["config"]["ptq"]):
                    raise ConfigError("The stored outcome has neither 'qparams' nor 'ptq'")
                if curves and "curves" not in found:
                    raise ConfigError("The stored outcome has no curves")
            except ConfigError as e:
                hint = "run the experiment again with --again"
                run |= {"outcome": None, "status": "unreadable", "error": f"{short_message(e)}; {hint}"}
        out.append(run)
    return out


def text(value: Any) -> str:
    """Return the text of a cell on one line, without control characters."""
    if value is None or isinstance(value, float):
        return "" if value is None else f"{value:.2f}"
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def json_without_times(runs: Iterable[Mapping[str, Any]]) -> str:
    """Return the runs as JSON without times, so that equal sweeps give equal texts."""
    times = ("seconds", "cpu_seconds", "memory")
    plain = []
    for run in runs:
        outcome = run["outcome"] and {k: v for k, v in run["outcome"].items() if k not in times}
        plain.append({k: run[k] for k in ("key", "name", "study", "status")} | {"outcome": outcome})
    return json.dumps(plain, indent=1, sort_keys=True)


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV; the first line has the names of the columns, not their headings.

    A text that a spreadsheet would compute as a formula gets an apostrophe in front.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, list(COLUMNS), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({c: _plain(v) if isinstance(v, str) else v for c, v in r.items()} for r in rows)
    return out.getvalue()


def _plain(value: str) -> str:
    """Return a text that no spreadsheet computes. Source: OWASP, CSV Injection."""
    shown = text(value)
    return f"'{shown}" if shown.startswith(("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")) else shown


def as_text(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """Return a table of the non-empty columns that fit into `width` characters, and a note on hidden columns."""
    cells, room = {}, width  # column -> its two lines of heading, and its values
    for c in _nonempty_columns(rows):
        upper, _, lower = COLUMNS[c].rpartition(" ")
        cells[c] = [upper, lower, *(text(r[c]) for r in rows)]
    widths = {c: max(map(len, cells[c])) + 2 * (c != "name") for c in cells}
    for c in sorted(cells, key=_LAYOUT["narrow"].split().index):  # the columns that matter most come first
        room -= widths[c]
        if room < 0 and c != "name":
            room += widths.pop(c)
    lines = zip(*([f"{x:{'<' if c == 'name' else '>'}{n}}" for x in cells[c]] for c, n in widths.items()), strict=True)
    hidden = ", ".join(COLUMNS[c] for c in cells if c not in widths)
    note = f"not shown here: {hidden}; for all columns: chipfit bench board runs.csv"
    return "\n".join(["".join(line).rstrip() for line in lines] + ([fill(note, max(width, 40))] if hidden else []))


def _nonempty_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns with a value in any row."""
    return [c for c in COLUMNS if any(r[c] not in (None, "") for r in rows)]


def as_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table of the non-empty columns."""
    shown = _nonempty_columns(rows)
    lines = ["| " + " | ".join(COLUMNS[c] for c in shown) + " |", "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(_escaped(text(r[c])) for c in shown) + " |" for r in rows]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    """Return a text as Markdown that shows it: without tags, links, images, or an end of the cell."""
    return re.sub(r"[\\|\[\]`]", r"\\\g<0>", escape(value, quote=False))


def find(runs: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the run that has this name, or whose key begins with it.

    Raises:
        UnknownNameError: there is no such run.
        ConfigError: there are several.
    """
    found = [r for r in runs if r["name"] == name or r["key"].startswith(name)]
    if not found:
        raise UnknownNameError("run", name, [r["name"] for r in runs])
    if len(found) > 1:
        raise ConfigError(f"Several runs match '{name}'", got=", ".join(r["key"] for r in found), hint="pass a key")
    return found[0]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the dotted key and both values of all that differs in the outcomes of two runs, but for their curves."""
    a, b = (dict(_flat(r["outcome"] or {})) for r in (one, other))
    return [(k, text(a.get(k)), text(b.get(k))) for k in sorted(a.keys() | b.keys()) if a.get(k) != b.get(k)]


def _flat(value: Any, at: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of nested tables without the curves; lists become JSON."""
    if isinstance(value, Mapping) and not at.startswith("curves"):
        for k, v in value.items():
            yield from _flat(v, f"{at}.{k}" if at else k)
    elif not isinstance(value, Mapping):
        yield at, json.dumps(value) if isinstance(value, list) else value


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw accuracy over steps, and accuracy against the size of the weights; the suffix chooses the format.

    Raises:
        ConfigError: matplotlib is not installed, or does not support the format.
        ExportError: the file cannot be written.
    """
    drawing = import_optional("matplotlib.figure", "Drawing", ConfigError, extra="plots")
    figure = drawing.Figure(figsize=(11, 4.5), layout="constrained")
    curves, sizes = figure.subplots(1, 2)
    for run in runs:
        if outcome := run["outcome"]:
            if outcome["curves"]["top1"]:
                curves.plot(*zip(*outcome["curves"]["top1"], strict=True), marker=".", label=run["name"])
            sizes.scatter(outcome["size"] / 1e3, outcome["top1"], label=run["name"])
    for axes, x in ((curves, "step"), (sizes, "weights [kB]")):
        axes.set(xlabel=x, ylabel="top-1 [%]")
        axes.grid(alpha=0.3)
    if len(runs) <= 12:
        sizes.legend(fontsize="x-small")
    out, kind = io.BytesIO(), path.suffix.removeprefix(".") or "png"
    try:
        figure.savefig(out, format=kind, metadata={"Date": None} if kind == "svg" else None)
    except ValueError as e:
        raise ConfigError(f"The plot cannot be written: {e}", got=path.suffix, allowed=".png, .svg, .pdf") from e
    return write_atomically(path, out.getvalue())


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a self-contained HTML page: filters, a sortable table, accuracy against size, and details of each run."""
    rows = [{**row(r), "outcome": r["outcome"]} for r in runs]
    return render("chipfit.bench", "board", {"columns": COLUMNS, "runs": rows}, count=len(runs))


def write(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write the runs as a page, a table or data.

    Raises:
        ConfigError: the suffix is not .html, .csv, .md or .json.
        ExportError: the file cannot be written.
    """
    makers: dict[str, Any] = {
        ".html": lambda: page(runs),
        ".csv": lambda: as_csv([row(r) for r in runs]),
        ".md": lambda: as_markdown([row(r) for r in runs]),
        ".json": lambda: json_without_times(runs),
    }
    if path.suffix not in makers:
        raise ConfigError("Unknown leaderboard format", got=path.suffix, allowed=", ".join(makers))
    return write_atomically(path, makers[path.suffix]().encode())


# ---------------------------------------------------------------- other tools, by their own libraries


def track(runs: Sequence[Mapping[str, Any]], to: str) -> int:
    """Write curves and results of all completed runs; return their number.

    Args:
        to: a folder for TensorBoard, or "mlflow:ADDRESS" of a server or database.

    Raises:
        RuntimeUnavailable: the library is not installed.
        ConfigError: MLflow reports an error.
    """
    from chipfit.training.scalars import writer  # loads PyTorch

    ended = [r for r in runs if r["outcome"]]
    if to.startswith("mlflow:"):
        _mlflow(ended, to.removeprefix("mlflow:"))
        return len(ended)
    for run in ended:
        with writer(Path(to, f"{re.sub('[^a-zA-Z0-9_.-]', '_', run['name'])}-{run['key'][:6]}")) as board:
            for point in _points(run):
                board.add_scalar(*point)
            board.add_text("result", as_markdown([row(run)]))
    return len(ended)


def _mlflow(runs: Sequence[Mapping[str, Any]], uri: str) -> None:
    """Send runs to MLflow, where a study becomes an experiment; skip runs sent before."""
    library, entities = (import_optional(m, "Sending runs", ConfigError, extra="track") for m in _MODULES)
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
