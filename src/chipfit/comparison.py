"""Two results, reports or quantized files beside each other."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from chipfit.errors import ConfigError, PlanError
from chipfit.files import path_of
from chipfit.plan.diff import diff
from chipfit.plan.record import Plan
from chipfit.report.comparison import Comparison, compare_reports
from chipfit.report.record import ReportData
from chipfit.report.report import Report
from chipfit.report.rows import build
from chipfit.result import Result, load
from chipfit.verify.file import is_file, read_quantized


class _Side(NamedTuple):
    report: ReportData
    plan: Plan | None = None
    result: Result | None = None
    file_bytes: int | None = None  #: size of the model file


def compare(a: Any, b: Any, data: Any = None, *, names: Sequence[str] = ()) -> Comparison:
    """Return two quantized networks beside each other: formats, scales, noise of each layer, size, time.

    Args:
        a, b: each a `Result`, a `Report`, a folder that `Result.save` or `chipfit quantize` wrote, a report in JSON, or
            a quantized `.tflite` or `.onnx` file of any tool.
        data: batches on which the noise of every kernel is measured in both, if both are results.
        names: two names to show; by default the paths, or "a" and "b".

    Raises:
        ConfigError: `a` or `b` is none of these, or `names` are not two.
        PlanError: a folder or report cannot be read, or `data` are given and `a` or `b` is not a result.
        CaptureError: a file cannot be read, or is not quantized.
        DataError: see `quantize`.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> other = result.edit({"0": {"weight_rule": "no_clipping"}})
        >>> chipfit.compare(result, other).equal
        False
    """
    given = [a, b]
    if names and len(names) != 2:
        raise ConfigError("Two names are needed", got=", ".join(names))
    labels = names or _names(given)
    sides, outputs = [_side_of(x) for x in given], dict[str, Any]()
    if data is not None:
        measured = [_measured(side, data) for side in sides]
        sides = [side for side, _ in measured]
        found = [noise for _, noise in measured]
        outputs = {what: (found[0].get(what), found[1].get(what)) for what in {**found[0], **found[1]}}
    sizes = sides[0].file_bytes, sides[1].file_bytes
    more = {**({} if sizes == (None, None) else {"model file [bytes]": sizes}), **outputs}
    plans = [side.plan for side in sides]
    both = diff(plans[0], plans[1]) if plans[0] is not None and plans[1] is not None else None
    return compare_reports(sides[0].report, sides[1].report, (labels[0], labels[1]), both, more)


def _names(given: Sequence[Any]) -> list[str]:
    """Return the names of two paths, as short as they differ, or letters."""
    paths = [Path(x) if isinstance(x, (str, Path)) else Path(letter) for x, letter in zip(given, "ab", strict=True)]
    short = [p.name or str(p) for p in paths]
    return short if short[0] != short[1] else [str(p) for p in paths]


def _side_of(thing: Any) -> _Side:
    """Return one side of a comparison, read if it is a path."""
    if isinstance(thing, Result):
        return _Side(thing.report, thing.plan, thing)
    if isinstance(thing, ReportData):
        return _Side(thing)
    if not isinstance(thing, (str, Path)):
        allowed = "a Result, a Report, a saved folder, a report in JSON, or a quantized file"
        raise ConfigError("`compare` does not accept an object of this type", got=type(thing).__name__, allowed=allowed)
    path = path_of(thing, PlanError)
    folder = os.path.isdir(path)  # False for a path that cannot exist
    if path.suffix == ".json" and not folder:
        return _Side(Report.load(path))
    if is_file(path) and not folder:
        found, platform = read_quantized(path)
        return _Side(build(found.graph, found.plan, platform), found.plan, file_bytes=path.stat().st_size)
    return _saved(path)


def _saved(folder: Path) -> _Side:
    """Return a saved result with the report that was saved with it, which knows times and verification."""
    plan = folder / "plan" if os.path.isdir(folder / "plan") else folder
    result = load(plan)
    report = plan / "report.json"
    known = Report.load(report) if report.is_file() else result.report
    models = sorted(folder.glob("model.*"))
    return _Side(known, result.plan, result, models[0].stat().st_size if len(models) == 1 else None)


def _measured(side: _Side, data: Any) -> tuple[_Side, dict[str, float]]:
    """Return a side with the noise of each kernel on data, and that of the model's outputs by label [dB]."""
    if side.result is None:
        hint = "quantize with chipfit, or leave the data out"
        raise PlanError("Noise can be measured only for results, which contain the float network", hint=hint)
    found = side.result.similarity(data)
    made = side.result.graph.producers()
    noise = {made[v].name: found.layers[k]["sqnr_db"] for k, v in found.values.items() if v in made}
    finite = {k: x for k, x in noise.items() if abs(x) < float("inf")}
    layers = tuple(replace(r, sqnr_db=finite.get(r.node)) for r in side.report.layers)
    outputs = {f"output '{name}' [dB]": row["sqnr_db"] for name, row in found.outputs.items()}
    return side._replace(report=replace(side.report, layers=layers)), outputs
