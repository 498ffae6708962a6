"""The report on a terminal."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chipfit.report.rows import Report


def size(count: float) -> str:
    """Bytes for people.

    >>> size(2_400_000)
    '2.40 MB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def agreement(report: Report) -> Text:
    """One line: does the device compute what was simulated?"""
    v = report.verification
    if v is None:
        return Text("not verified yet: result.verify(data)", style="yellow")
    if v["exact"]:
        return Text(f"0 of {v['integers']:,} integers differ from {v['runtime']}", style="bold green")
    style = "yellow" if v["sound"] else "bold red"
    return Text(f"{v['differing']:,} of {v['integers']:,} integers differ from {v['runtime']}", style=style)


def render(report: Report) -> Group:
    """Summary, one line per operator, what stays float."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim")
    head.add_column()
    head.add_row("platform", f"{report.platform}  {report.title}")
    head.add_row("weights", f"{size(report.float_bytes)} -> {size(report.quantized_bytes)}  ({report.parameters:,} numbers)")
    head.add_row("operators", f"{100 * report.integer_share:.0f} % of {len(report.layers)} run in integers")
    if report.timings:
        head.add_row("time", ", ".join(f"{k} {v:.2f} s" for k, v in report.timings.items()))
    head.add_row("device", agreement(report))
    v = report.verification
    if v and v["accuracy"]:
        head.add_row("top-1", ", ".join(f"{k} {100 * a:.2f} %" for k, a in v["accuracy"].items()))

    table = Table(show_edge=False, header_style="bold", pad_edge=False)
    for name, align in (
        ("layer", "left"),
        ("operator", "left"),
        ("runs in", "left"),
        ("format", "left"),
        ("range", "right"),
        ("SQNR", "right"),
    ):
        table.add_column(name, justify=align)  # type: ignore[arg-type]  # the two words are valid
    for r in report.layers:
        reach = "" if r.clip_low is None or r.clip_high is None else f"{r.clip_low:.4g} .. {r.clip_high:.4g}"
        runs = {"float": "[yellow]float[/]", "int": "integers", "follow": "moves codes", "table": "table"}[r.exec]
        noise = "" if r.sqnr_db is None else f"{r.sqnr_db:.1f} dB"
        table.add_row(r.layer or r.node, r.op, runs, r.format, reach, noise)

    parts: list[object] = [Panel(head, title="chipfit", border_style="cyan"), table]
    if report.floats:
        why = Table.grid(padding=(0, 2))
        for reason, layers in report.floats.items():
            names = ", ".join(layers[:5]) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")
            why.add_row(f"[yellow]{len(layers)}[/]", names, f"[dim]{reason}[/]")
        parts.append(Panel(why, title="stays in float, and why", border_style="yellow"))
    return Group(*parts)  # type: ignore[arg-type]  # all of them are renderable


def show(report: Report, console: Console | None = None) -> None:
    """Print a report."""
    (console or Console()).print(render(report))
