"""Platforms on a terminal: every fact with its source and confidence."""

from __future__ import annotations

from rich.console import Group
from rich.panel import Panel
from rich.table import Table

from chipfit.platform.load import load, names
from chipfit.platform.schema import Option, Platform, Rule

CONFIDENCE = {"V": "verified in source", "D": "documented", "I": "inferred"}


def option_text(o: Option) -> str:
    """One joint choice in a line: "u8 x w8 + b32 -> u8"."""
    ins = " , ".join(o.in_) if isinstance(o.in_, tuple) else o.in_ or "-"
    gate = f"  (where {', '.join(f'{k} {v}' for k, v in o.when.items())})" if o.when else ""
    return ins + (f" x {o.w}" if o.w else "") + (f" + {o.b}" if o.b else "") + (f" -> {o.out}" if o.out else "") + gate


def rule_text(r: Rule) -> str:
    """One constraint in a line: "b = in0 * w"."""
    soft = "" if r.hard else "  (preferred)"
    if r.tie:
        return f"{', '.join(r.tie)} share scale and zero point{soft}"
    if r.dtype:
        return f"{', '.join(r.dtype)} share the storage type{soft}"
    if r.fix:
        return f"{r.fix}: scale {r.scale:g}, zero point {r.zp}{soft}"
    if r.mono:
        product = " * ".join(s if e == 1 else f"{s}^{e}" for s, e in r.mono.items())
        bounds = [f"{w} {v:g}" for w, v in (("=", r.eq), (">=", r.min), ("<=", r.max), ("<", r.lt)) if v is not None]
        return f"{product}{f' * {r.times}' if r.times else ''} {' and '.join(bounds)} (scales){soft}"
    if r.zero:
        return f"zero point of {r.zero} is {r.eq}{soft}"
    return f"sum |w| <= {r.wsum_max:g} codes per output channel{soft}"


def show(platform: Platform) -> Group:
    """Everything that a platform says."""
    formats = Table("format", "what it is", show_edge=False, header_style="bold")
    for name, f in platform.formats.items():
        formats.add_row(name, str(f))
    ops = Table(
        "operators",
        "formats, best first",
        "rules",
        "runs in",
        "source",
        show_edge=False,
        header_style="bold",
        show_lines=True,
    )
    for o in platform.ops:
        where = "\n".join(f"[dim]where {k}: {v}[/]" for k, v in {**o.where, **o.when}.items())
        note = f"\n[dim]{o.note}[/]" if o.note else ""
        ops.add_row(
            ", ".join(o.match) + ("\n" + where if where else ""),
            "\n".join(option_text(u) for u in o.use) + note,
            "\n".join(rule_text(r) for r in o.rules),
            o.how,
            f"{', '.join(o.src)}\n[dim]{CONFIDENCE[o.conf]}[/]",
        )
    parts: list[object] = [Panel(f"[bold]{platform.name}[/]  {platform.title}", border_style="cyan"), formats, ops]
    if platform.fuse:
        fuse = Table("runs as one kernel", "source", show_edge=False, header_style="bold")
        for kernel in platform.fuse:
            text = " -> ".join(" | ".join(step) for step in kernel.chain) if kernel.chain else str(kernel.graph)
            note = f"\n[dim]{kernel.note}[/]" if kernel.note else ""
            fuse.add_row(text + note, f"{', '.join(kernel.src)}  [dim]{CONFIDENCE[kernel.conf]}[/]")
        parts.append(fuse)
    rest = Table.grid(padding=(0, 2))
    rest.add_column(style="dim")
    rest.add_row("other operators", platform.unlisted)
    rest.add_row("quantizers at", platform.place.at)
    if platform.arch:
        rest.add_row(
            "revisions", ", ".join(f"[bold]{a}[/]" if a == platform.arch_selected else a for a in platform.arch)
        )
    m = platform.math
    rest.add_row(
        "arithmetic",
        ", ".join(f"{k} {v}" for k, v in (("rounding", m.q_round), ("requantize", m.requant)) if v)
        or "not known: exactness is not claimed",
    )
    for d in platform.deploy:
        rest.add_row("deploys as", d)
    for key, text in platform.sources.items():
        rest.add_row(f"source {key}", text)
    for gap in platform.gaps:
        rest.add_row("not known", gap)
    return Group(*parts, rest)  # type: ignore[arg-type]  # all of them are renderable


def overview() -> Table:
    """One line per built-in platform."""
    table = Table("platform", "device", "weights x activations", "deploys as", show_edge=False, header_style="bold")
    for name in names():
        p = load(name)
        first = next((u for o in p.ops for u in o.use if u.w), None)
        table.add_row(name, p.title, option_text(first) if first else "", p.deploy[0] if p.deploy else "")
    return table
