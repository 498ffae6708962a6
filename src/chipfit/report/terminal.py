"""The report on a terminal."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from chipfit.graph.ir import OPAQUE
from chipfit.report.advice import advice
from chipfit.report.record import Kernel, ReportData
from chipfit.screen.breakable import Breakable

#: kernels that are printed: all of them, or the weakest
MOST_KERNELS = 40
MOST_SENSITIVE = 12  #: tensors that are printed
RUNS = {"int": "integers", "follow": "moves integers", "table": "table", "float": "float"}


def size(count: float) -> str:
    """Return a number of bytes in a readable unit.

    >>> size(2_400_000)
    '2.40 MB'
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def agreement(report: ReportData) -> Text:
    """Return whether the device computes what was simulated, and the first tensor for which it does not."""
    v, first = report.verification, report.first_departure
    if v is None:
        unproven = "arithmetic not simulated, exactness not claimed"
        return Text("not verified yet: result.verify(data)" if report.simulated else unproven, style="yellow")
    style = {"exact": "bold green", "departs": "bold red"}.get(report.verdict, "yellow")
    text = Text(f"{v['differing']:,} of {v['among']:,} integers differ from {v['runtime']}", style=style)
    text.append(
        f" on the first {v['end_to_end_samples']} of {v['samples']} samples" if v["among"] < v["integers"] else ""
    )
    text.append(f"\n{v['coverage']}", style="dim")
    if v["departures"]:
        text.append(f"\ndeparts: {v['departures'][0]}")
        text.append(f"; and {len(v['departures']) - 1} more" if v["departures"][1:] else "")
    if first is not None:
        most = max(first["largest"], first["op_largest"])
        text.append(f"\nfirst in {first['op']} '{first['layer'] or first['tensor']}', by at most {most}")
        text.append(", computed in float by the runtime" if first["in_float"] else "")
    if report.verdict == "sound":
        text.append("\nevery operator by itself computes the device's integers")
    if not v["promised"]:
        text.append(f"\n{v['runtime']} is not '{report.platform}': the chip itself was not run", style="dim")
    return text


def accuracies(report: ReportData) -> dict[str, float]:
    """Return top-1 of float, simulated, integer and device, in this order, as far as they were measured."""
    found = report.verification["accuracy"] if report.verification else {}
    return {k: found[k] for k in ("float", "simulated", "integer", "device") if k in found}


def accuracy_samples(report: ReportData) -> str:
    """Return what accuracies were measured on: "top-1 of 450 samples, 128 of the 500 verified are calibration data"."""
    v: Mapping[str, Any] = report.verification or {}
    seen = f", {v['calibrated']} of the {v['samples']} verified are calibration data" if v.get("calibrated") else ""
    return f"top-1 of {v.get('labelled', 0)} samples{seen}"


def render(report: ReportData) -> Group:
    """Return the report: a summary, a line per kernel, what stays in float, what to try next."""
    why = Table.grid(padding=(0, 2))
    for reason, layers in report.floats.items():
        different = list(dict.fromkeys(layers))
        names = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if len(different) > 5 else "")
        why.add_row(f"[yellow]{len(layers)}[/]", Breakable(names), f"[dim]{escape(reason)}[/]")
    todo = Table.grid(padding=(0, 1))
    for line in advice(report):
        todo.add_row("[cyan]>[/]", escape(line))
    warnings, words = escape("\n".join(report.warnings)), Text("\n".join(report.not_modelled), style="dim")
    return Group(
        *_panel_if(report.warnings, warnings, "read this first", "red"),
        Panel(_summary(report), title="chipfit", border_style="cyan"),
        _kernel_table(report.kernels),
        *_panel_if(report.sensitivity, _sensitivity_table(report), "which tensors hurt"),
        *_panel_if(report.pareto, _pareto_table(report), "size and loss of the best widths"),
        *_panel_if(report.floats, why, "stays in float, and why", "yellow"),
        *_panel_if(report.not_modelled, words, "stated by the platform, not modelled", "yellow"),
        Panel(todo, title="what to try next", border_style="cyan"),
    )


def _panel_if(wanted: Any, content: RenderableType, title: str, style: str = "cyan") -> list[Panel]:
    return [Panel(content, title=title, border_style=style)] if wanted else []


def facts(report: ReportData) -> dict[str, str]:
    """Return facts about the whole model, by label."""
    weights = f"{size(report.float_bytes)} -> {size(report.quantized_bytes)}, {report.shrink:.1f} x smaller"
    if report.padded_bytes != report.quantized_bytes:
        weights += f" ({size(report.padded_bytes)} padded to the chip's SIMD width)"
    share, count = 100 * report.integer_share, len(report.layers)
    out = {"platform": f"{report.platform}  {report.title}", "weights": weights}
    counted = "known" if any(r.op == OPAQUE for r in report.layers) else "all"
    out["integers"] = f"{share:.0f} % of {counted} multiplications; {report.integers} of {count} operators"
    out["kernels"] = str(len(report.kernels))
    if report.merit is not None:
        out["outputs"] = loss_at_outputs(report.merit)
    if report.speed is not None:
        s = report.speed
        both = f"{s['float_ms']:.3g} ms float, {s['quantized_ms']:.3g} ms quantized ({s['ratio']:.2f}x)"
        out["speed"] = f"{both} of processor time on {s['runtime']}, {s['batch']} samples a call"
    out |= chip_memory(report)
    if report.timings:
        out["time"] = ", ".join(f"{k} {v:.2f} s" for k, v in report.timings.items())
    return out


def chip_memory(report: ReportData) -> dict[str, str]:
    """Return the memories of the chip that the file takes, beside their limits."""
    if (m := report.memory) is None:
        return {}
    kept = {k: f" of {v:,.0f}" if (v := m["limits"].get(k)) else "" for k in ("ram", "flash")}
    most = f"most while '{m['ram_layer']}' runs, {m['ram_alive']:,} bytes of tensors and scratch buffers"
    arena = f"{m['ram']:,}{kept['ram']} bytes of arena in TensorFlow Lite Micro; {most}"
    weights = f"the largest weights are those of '{m['flash_layer']}', {m['flash_weights']:,} bytes"
    return {"ram": arena, "flash": f"{m['flash']:,}{kept['flash']} bytes; {weights}"}


def loss_at_outputs(merit: Mapping[str, Any]) -> str:
    """Return the loss at the outputs in words; a figure of None stands for no noise, or no bits that explain any."""
    sqnr, expected = merit["sqnr_db"], merit["expected_db"]
    noise = "no quantization noise" if sqnr is None else f"{sqnr:.1f} dB over quantization noise"
    bits = "" if expected is None else f"; the bits explain {expected:.1f} dB"
    return f"{noise} on {merit['samples']} calibration samples{bits}"


def _summary(report: ReportData) -> Table:
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim")
    head.add_column()
    for label, fact in facts(report).items():
        head.add_row(label, escape(fact))
    head.add_row("device", agreement(report))
    if found := accuracies(report):
        shown = ", ".join(f"{k} [bold]{100 * a:.2f} %[/]" for k, a in found.items())
        head.add_row("top-1", f"{shown} ({accuracy_samples(report).removeprefix('top-1 ')})")
    return head


def _kernel_table(kernels: list[Kernel]) -> Table:
    shown, caption = kernels, None
    if len(kernels) > MOST_KERNELS:
        measured = [k for k in kernels if k[-1].sqnr_db is not None] or kernels
        weakest = {id(k) for k in sorted(measured, key=lambda k: k[-1].sqnr_db or 0.0)[:MOST_KERNELS]}
        shown = [k for k in kernels if id(k) in weakest]
        which = "the weakest" if measured is not kernels else "the first"
        caption = f"{which} {len(shown)} of {len(kernels)} kernels; report.html and report.json hold all of them"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="bold", pad_edge=False, caption=caption)
    for words in ("kernel", "operators", "runs in", "format"):  # these give way on a narrow terminal
        table.add_column(words, overflow="fold")
    for figures in ("range", "SQNR"):
        table.add_column(figures, justify="right", no_wrap=True)
    for kernel in shown:
        r = kernel[-1]
        reach = "" if r.clip_low is None or r.clip_high is None else f"{r.clip_low:.3g}..{r.clip_high:.3g}"
        runs = f"[yellow]{RUNS[kernel.exec]}[/]" if kernel.exec == "float" else RUNS[kernel.exec]
        noise = "" if r.sqnr_db is None else f"{r.sqnr_db:.1f} dB"
        table.add_row(Breakable(kernel.name), escape(kernel.ops), runs, kernel.formats, reach, noise)
    return table


def _sensitivity_table(report: ReportData) -> Table:
    """Return the most sensitive tensors, with bars."""
    table = Table.grid(padding=(0, 2))
    for r in report.sensitivity[:MOST_SENSITIVE]:
        bar = f"[yellow]{'█' * round(24 * r['share'])}[/]"
        table.add_row(escape(r["tensor"]), f"{r['bits']} bits", f"{r['loss']:.2g}", bar)
    left = len(report.sensitivity) - MOST_SENSITIVE
    if left > 0:
        table.add_row(f"[dim]and {left} more[/]")
    return table


def _pareto_table(report: ReportData) -> Table:
    """Return the loss for each budget, with bars on a logarithmic scale."""
    table = Table("of 8 bits", "takes", "predicted loss", "measured loss", "", show_edge=False, header_style="bold")
    for p in report.pareto:
        losses = f"{p['predicted']:.2g}", f"{p['measured']:.2g}"
        bar = f"[yellow]{'█' * round(24 * p['height'])}[/]"
        table.add_row(f"{100 * p['share']:.0f} %", f"{p['size']:,.0f}", *losses, bar)
    return table
