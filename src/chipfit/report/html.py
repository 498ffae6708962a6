"""The report as one self-contained page."""

import json
from collections import Counter
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from chipfit.report import terminal
from chipfit.report.advice import advice
from chipfit.report.pairs import DECIDED, ComparisonData, Pair, noise, shown
from chipfit.report.picture import MOST, picture
from chipfit.report.record import Kernel, ReportData


def page(report: ReportData) -> str:
    """Return HTML with styles, drawings and script inside; its content policy forbids to load anything else."""
    kernels = [_columns(k) for k in report.kernels]
    data: dict[str, Any] = {
        "inputs": [_columns(Kernel((r,))) for r in report.inputs],
        "kernels": kernels,
        "tensors": _tensors(report),
    }
    data["readers"] = _readers(report)
    data["curve"] = [dict(p) for p in report.pareto]
    count, every = Counter(r.exec for r in report.layers), max(1, len(report.layers))
    return render(
        "chipfit.report",
        "page",
        data,
        r=report,
        kernels=kernels,
        share={runs: count[key] / every for key, runs in terminal.RUNS.items() if count[key]},
        terminal=terminal,
        picture=picture(report),
        most=MOST,
        advice=advice(report),
    )


def comparison_page(c: ComparisonData) -> str:
    """Return two reports beside each other as HTML that loads nothing."""

    def cells(p: Pair) -> list[tuple[str, str]]:
        return [(shown(getattr(p.a, f, None)), shown(getattr(p.b, f, None))) for f in DECIDED]

    most = max((x for p in c.pairs for x in noise(p) if x is not None), default=1.0)
    here = {"cells": cells, "noise": noise, "shown": shown, "columns": DECIDED.values(), "most": max(most, 1e-9)}
    return render("chipfit.report", "comparison", None, c=c, **here)


def render(package: str, name: str, data: Any, **values: Any) -> str:
    """Return the page NAME.html.j2 of a package with its script NAME.js, its data, and the styles of reports."""
    places = (package, f"{name}.html.j2"), (package, f"{name}.js"), ("chipfit.report", "page.css")
    text, js, css = ((resources.files(where) / file).read_text(encoding="utf-8") for where, file in places)
    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    values |= {"css": Markup(css), "js": Markup(js)}
    values["data"] = Markup(json.dumps(data).replace("<", "\\u003c"))  # no tag can start inside the script element
    return env.from_string(text).render(**values)


def _readers(report: ReportData) -> list[list[int]]:
    """Return for each kernel the kernels that read its results, by position."""
    owner = {r.node: n for n, k in enumerate(report.kernels) for r in k}
    out: list[list[int]] = [[] for _ in report.kernels]
    for n, k in enumerate(report.kernels):
        for source in sorted({owner[name] for r in k for name in r.reads if name in owner} - {n}):
            out[source].append(n)
    return out


def _columns(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel's row of the table, as the page's script reads it."""
    r = kernel[-1]
    names = {"name": kernel.name, "ops": kernel.ops, "exec": kernel.exec}
    noise = {"format": kernel.formats, "sqnr": r.sqnr_db, "wsqnr": kernel.weight_sqnr_db}
    ends = {"clip": [r.clip_low, r.clip_high], "zero": r.zero_point, "ends": [r.bars_low, r.bars_high]}
    same = "why origin low high clipped scale bars differing".split()
    return {**names, **noise, **ends, **{field: getattr(r, field) for field in same}}


def _tensors(report: ReportData) -> list[dict[str, Any]]:
    """Return, for each tensor, how many integers differ and by how much."""
    keys = "tensor layer op elements end_to_end_elements differing largest op_differing op_largest in_float why fault"
    return [{k: row[k] for k in keys.split()} for row in report.verification["rows"]] if report.verification else []
