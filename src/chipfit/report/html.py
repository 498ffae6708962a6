"""The report as one self-contained page."""

from __future__ import annotations

import json
from importlib import resources

from jinja2 import Environment, StrictUndefined

from chipfit.report.rows import Report
from chipfit.report.terminal import agreement, size


def page(report: Report) -> str:
    """HTML with styles, drawings and script inside; it loads nothing from anywhere."""
    text = (resources.files("chipfit.report") / "page.html.j2").read_text()
    env = Environment(autoescape=True, undefined=StrictUndefined)
    rows = [
        {
            "name": r.layer or r.node, "node": r.node, "op": r.op, "exec": r.exec, "format": r.format, "sqnr": r.sqnr_db, "why": r.why,
            "low": r.low, "high": r.high, "clip": [r.clip_low, r.clip_high], "bars": r.bars, "reach": r.reach, "differing": r.differing,
        }
        for r in report.layers
    ]  # fmt: skip
    data = json.dumps(rows).replace("</", "<\\/")
    v = report.verification
    return env.from_string(text).render(
        r=report, v=v, size=size, agreement=agreement(report).plain, data=data,
        shrink=report.float_bytes / max(1, report.quantized_bytes), total=sum(report.timings.values()) or 1.0,
    )  # fmt: skip
