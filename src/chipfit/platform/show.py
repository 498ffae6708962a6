"""Tables of a platform for the terminal: every fact with its source and confidence."""

import re
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Column, Table

from chipfit.platform.load import load, names
from chipfit.platform.schema import Platform
from chipfit.platform.support import file_suffixes, unsupported_features

CONFIDENCE = {"V": "verified in source", "D": "documented", "I": "inferred"}


def _table(*headings: str, show_lines: bool = False) -> Table:
    """Return a table that folds its text if the terminal is narrow."""
    columns = (Column(h, overflow="fold") for h in headings)
    return Table(*columns, show_edge=False, header_style="bold", show_lines=show_lines)


def show(platform: Platform) -> Group:
    """Return tables of everything that a platform file contains."""
    title = f"[bold]{escape(platform.name)}[/]  {escape(platform.title)}"
    parts: list[RenderableType] = [Panel(title, border_style="cyan")]
    formats = _table("format", "what it is")
    for name, f in platform.formats.items():
        formats.add_row(escape(name), escape(str(f)))
    ops = _table("operators", "formats, best first", "rules", "runs in", "source", show_lines=True)
    for o in platform.ops:
        where = "".join(f"\n[dim]where {k}: {escape(str(v))}[/]" for k, v in {**o.where, **o.when}.items())
        ops.add_row(
            escape(", ".join(o.match)) + where,
            escape("\n".join(map(str, o.use))) + _note(o.note),
            escape("\n".join(map(str, o.rules))),
            o.how,
            f"{escape(', '.join(o.src))}\n[dim]{CONFIDENCE[o.confidence]}[/]",
        )
    parts += [formats, ops]
    if platform.fuse:
        fuse = _table("runs as one kernel", "source")
        for kernel in platform.fuse:
            text = " -> ".join(" | ".join(step) for step in kernel.chain) if kernel.chain else str(kernel.graph)
            source = f"{escape(', '.join(kernel.src))}  [dim]{CONFIDENCE[kernel.confidence]}[/]"
            fuse.add_row(escape(text) + _note(kernel.note), source)
        parts.append(fuse)
    rest = Table.grid(padding=(0, 2))
    rest.add_column(style="dim")
    rest.add_column(overflow="fold")
    for label, fact in _facts(platform):
        rest.add_row(escape(label), fact if label == "revisions" else escape(fact))
    return Group(*parts, rest)


def _note(text: str) -> str:
    return f"\n[dim]{escape(text)}[/]" if text else ""


def _facts(p: Platform) -> Iterator[tuple[str, str]]:
    """Yield the facts about the whole chip, each with its label."""
    yield "other operators", p.unlisted
    yield "quantizers at", p.place.at
    if p.arch:
        yield "revisions", ", ".join(f"[bold]{escape(a)}[/]" if a == p.arch_selected else escape(a) for a in p.arch)
    known = {"rounding": p.math.q_round, "requantize": p.math.requant}
    arithmetic = ", ".join(f"{k} {v}" for k, v in known.items() if v)
    yield "arithmetic", arithmetic or "not known: exactness is not claimed"
    yield from (("deploys as", d) for d in p.deploy)
    yield from ((f"source {key}", text) for key, text in p.sources.items())
    yield from (("not known", gap) for gap in p.gaps)
    yield from (("not modelled", words) for words in unsupported_features(p))


def first_choice(p: Platform) -> str:
    """Return the formats that its first operators with weights prefer; "" without any."""
    return str(next((u for o in p.ops for u in o.use if u.w), ""))


def overview() -> Table:
    """Return a table with one row for each built-in platform."""
    columns = (Column("platform", no_wrap=True), Column("device", overflow="fold", ratio=1))
    files = (Column("chipfit writes", no_wrap=True), Column("proven by", no_wrap=True))
    table = Table(*columns, *files, show_edge=False, box=None, header_style="bold", expand=True)
    for p in map(load, names()):
        table.add_row(
            p.name,
            escape(re.split(r" \(|, | via | through ", p.title)[0]),
            " ".join(file_suffixes(p)) or "-",
            p.runtimes[0] if p.runtimes else "-",
        )
    return table
