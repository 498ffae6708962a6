"""Pictures of the docs, as SVG text."""

from __future__ import annotations

from html import escape

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
