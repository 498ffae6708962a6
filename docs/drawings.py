"""Pictures of the docs, as SVG text."""

from __future__ import annotations

import json
import math
import re
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 900, 250
STYLE = """
  .box { fill: #f6f8ff; stroke: #3f51b5; stroke-width: 1.5 }
  .same { fill: #e8f5e9; stroke: #2e7d32; stroke-width: 1.5 }
  text { font-family: system-ui, sans-serif; fill: #1a1c2c; text-anchor: middle }
  .title { font-size: 17px; font-weight: 600 }
  .what { font-size: 13px }
  .number { font-family: monospace; font-size: 19px }
  .arrow { stroke: #3f51b5; stroke-width: 2; fill: none; marker-end: url(#tip) }
"""


def forms() -> str:
    """The four forms of one network, with one number of it in each: float, simulation, integers, device."""
    value, scale, zero = 0.7312, 1 / 128, -3  # an activation of 8 bits
    code = round(value / scale) + zero
    boxes = (
        ("float", "the trained network", f"{value:.4f}", "box"),
        ("simulation", "result.model, which trains", f"{(code - zero) * scale:.4f}", "box"),
        ("integers", "computed by chipfit", f"{code}", "same"),
        ("device", "read from the runtime", f"{code}", "same"),
    )
    side, gap = 190, 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>One number of a network in its four forms</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#3f51b5"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>',
    ]
    steps = ("plan", "the same plan", "compared")
    for k, (title, what, number, kind) in enumerate(boxes):
        x = 1 + k * (side + gap)
        middle = x + side / 2
        parts += [
            f'<rect class="{kind}" x="{x}" y="55" width="{side}" height="125" rx="10"/>',
            f'<text class="title" x="{middle}" y="85">{title}</text>',
            f'<text class="what" x="{middle}" y="108">{escape(what)}</text>',
            f'<text class="number" x="{middle}" y="150">{number}</text>',
        ]
        if k < len(steps):
            parts += [
                f'<path class="arrow" d="M{x + side + 4},118 L{x + side + gap - 6},118"/>',
                f'<text class="what" x="{x + side + gap / 2}" y="{40 if k % 2 == 0 else 205}">{steps[k]}</text>',
            ]
    note = f"scale 1/128, zero point {zero}: {code} stands for ({code} + {-zero}) / 128. No integer may differ."
    parts.append(f'<text class="what" x="{WIDTH / 2}" y="235">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


# ---------------------------------------------------------------- plots of benchmarks

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OURS, OTHER = "#1c7ed6", "#b0b8c1"
PLOT_STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1a1c2c; font-size: 13px }
  .title { font-size: 16px; font-weight: 600 }
  .soft { fill: #566675; font-size: 12px }
  .end { text-anchor: end }
  .middle { text-anchor: middle }
  line { stroke: #e2e8ef }
"""


def _plot(title: str, note: str, height: int, parts: list[str], legend: tuple[str, str]) -> str:
    """Return a plot with a title, a note below it, and a legend of two colours."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{PLOT_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#ffffff"/>',
        f'<text class="title" x="24" y="34">{escape(title)}</text>',
    ]
    for k, (color, name) in enumerate(zip((OURS, OTHER), legend, strict=True)):
        head.append(f'<circle cx="{30 + 190 * k}" cy="56" r="6" fill="{color}"/>')
        head.append(f'<text x="{42 + 190 * k}" y="60">{escape(name)}</text>')
    return (
        "\n".join([*head, *parts, f'<text class="soft" x="24" y="{height - 14}">{escape(note)}</text>', "</svg>"])
        + "\n"
    )


def _bars(title: str, note: str, rows: list[tuple[str, float, float]], unit: str, legend: tuple[str, str]) -> str:
    """Return pairs of bars: label, ours, the other."""
    most, parts = max(max(a, b) for _, a, b in rows), list[str]()
    for k, (label, *pair) in enumerate(rows):
        y = 80 + 46 * k
        parts.append(f'<text class="end" x="250" y="{y + 21}">{escape(label)}</text>')
        for n, (value, color) in enumerate(zip(pair, (OURS, OTHER), strict=True)):
            wide, top = max(value, 0.0) / most * (WIDTH - 360), y + 17 * n
            parts.append(f'<rect x="260" y="{top}" width="{max(wide, 1.5):.1f}" height="14" rx="3" fill="{color}"/>')
            parts.append(f'<text class="soft" x="{268 + wide:.1f}" y="{top + 12}">{value:.2f}{unit}</text>')
    return _plot(title, note, 80 + 46 * len(rows) + 40, parts, legend)


def _table(heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of the benchmarks' page, without its head."""
    part = (BENCHMARKS / "README.md").read_text().split(f"### {heading}\n", 1)[1]
    rows = [line for line in part.split("\n### ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip().replace("**", "") for cell in row.strip("|").split("|")] for row in rows[2:]]


def few_bits() -> str:
    """The loss of accuracy over bits, fitted and rounded to the nearest value."""
    rows, network = list[tuple[str, float, float]](), ""
    for name, width, _, plain, ours, *_ in _table("Few bits without training"):
        network = name or network
        if re.fullmatch(r"W\dA8", width):
            rows.append((f"{network}, {width[1]} bits", float(ours), float(plain)))
    note = "points of top-1 below float; weights as named, activations in 8 bits, no training; benchmarks/accuracy.py"
    return _bars("Accuracy lost in few bits", note, rows, "", ("chipfit", "rounded to the nearest"))


def time() -> str:
    """The time of quantization beside the best other tool."""
    rows = []
    for name, _, _, first, _, peer, *_ in _table("Time and memory of `chipfit.quantize`, 128 images of 224x224"):
        if peer != "none":
            rows.append((name, *(float(re.match(r"[\d.]+", x)[0]) for x in (first, peer))))
    note = "one float pass over 128 images of 224x224 is 1; the first call of a process; benchmarks/ptq_speed.py"
    return _bars("Time to quantize", note, rows, "x", ("chipfit", "the fastest other tool"))


def beside_tools() -> str:
    """The noise of sixty networks beside the runtimes' own tools."""
    found = json.loads((BENCHMARKS / "converters/results.json").read_text()).values()
    pairs = [(r["chipfit"].get("decibels"), r["tool"].get("decibels")) for r in found]
    known = sorted(((a, b) for a, b in pairs if a is not None and b is not None), key=lambda p: p[1])
    most = 10 * math.ceil(max(max(p) for p in known) / 10)
    low = min(0, 10 * math.floor(min(min(p) for p in known) / 10))
    x = lambda k: 60 + k * (WIDTH - 90) / max(len(known) - 1, 1)  # noqa: E731
    y = lambda db: 330 - (db - low) / (most - low) * 250  # noqa: E731
    parts = [f'<line x1="50" x2="{WIDTH - 20}" y1="{y(t):.1f}" y2="{y(t):.1f}"/>' for t in range(low, most + 1, 10)]
    parts += [f'<text class="soft end" x="44" y="{y(t) + 4:.1f}">{t}</text>' for t in range(low, most + 1, 10)]
    for k, (ours, tool) in enumerate(known):
        parts.append(f'<line x1="{x(k):.1f}" x2="{x(k):.1f}" y1="{y(ours):.1f}" y2="{y(tool):.1f}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x(k):.1f}" cy="{y(v):.1f}" r="4" fill="{c}"/>' for v, c in ((tool, OTHER), (ours, OURS))
        ]
    note = (
        f"signal over noise of the outputs [dB], {len(known)} small networks in 8 bits; benchmarks/beside_converters.py"
    )
    return _plot(
        "Noise beside the runtimes' own tools", note, 380, parts, ("chipfit", "ONNX Runtime's tool, TFLiteConverter")
    )
