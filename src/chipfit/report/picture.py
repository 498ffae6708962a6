"""The network of a report as a picture: one box a kernel, its colour the error, its border how it runs."""

from collections.abc import Iterator, Sequence
from html import escape

from markupsafe import Markup

from chipfit.report.layout import Layout, place
from chipfit.report.plots import BAD, WEAK
from chipfit.report.record import Kernel, ReportData
from chipfit.screen import shorten

#: of a box, in pixels; and the characters of a line in it
WIDTH, TITLE, LINE, CHARACTERS = 184.0, 24.0, 15.0, 23
MOST = 1200  #: number of kernels that are drawn


def picture(report: ReportData) -> Markup | None:
    """Return the network as SVG; None where the report does not know what reads what, or it is too large.

    Each box `<g id="g3" class="k float" data-sqnr="weak" data-wsqnr="good">` is a kernel, by its position in
    `report.kernels`, or an input of the model, `id="i0"`.
    """
    kernels, inputs = report.kernels, [Kernel((r,)) for r in report.inputs]
    boxes = [*inputs, *kernels]
    edges = list(_edges(boxes))
    if not kernels or len(kernels) > MOST or (len(kernels) > 1 and not edges):
        return None
    sizes = [(WIDTH, TITLE + LINE * (0 if k in inputs else len(k)) + 6) for k in boxes]
    found = place(sizes, edges)
    parts = [_line(edge, found, boxes, len(inputs)) for edge in found.lines]
    parts += [_box(k, _name(n, len(inputs)), *found.boxes[n], *sizes[n]) for n, k in enumerate(boxes)]
    w, h = (round(x + 4) for x in (found.width, found.height))
    return Markup(
        f'<svg id="net" viewBox="-2 -2 {w} {h}" width="{w}" height="{h}" role="group" '
        f'aria-label="The network, {len(kernels)} kernels">{"".join(parts)}</svg>'
    )


def _edges(boxes: Sequence[Kernel]) -> Iterator[tuple[int, int]]:
    """Yield (source, target) of each value that a kernel reads from another or from an input."""
    owner = {r.node: n for n, k in enumerate(boxes) for r in k}
    for n, k in enumerate(boxes):
        for source in dict.fromkeys(owner[name] for r in k for name in r.reads if name in owner):
            if source != n:
                yield source, n


def _name(n: int, inputs: int) -> str:
    return f"i{n}" if n < inputs else f"g{n - inputs}"


def _box(kernel: Kernel, name: str, x: float, y: float, width: float, height: float) -> str:
    """Return a box with the layer and the operators of a kernel."""
    noise = f'data-sqnr="{quality(kernel[-1].sqnr_db)}" data-wsqnr="{quality(kernel.weight_sqnr_db)}"'
    kind = "input" if name[0] == "i" else f"k {kernel.exec}"
    lines = (
        [shorten(kernel.name, CHARACTERS)] if len(kernel.name) <= CHARACTERS else ["…" + kernel.name[1 - CHARACTERS :]]
    )
    lines += [] if kind == "input" else [shorten(r.op, CHARACTERS + 4) for r in kernel]
    text = "".join(
        f'<text class="{"s" if n else "t"}" x="9" y="{17 + LINE * n + 3 * (n > 0):g}">{escape(line)}</text>'
        for n, line in enumerate(lines)
    )
    return (
        f'<g id="{name}" class="{kind}" {noise} transform="translate({x:.1f} {y:.1f})" tabindex="0" role="button">'
        f'<rect width="{width:g}" height="{height:g}" rx="7"/>{text}</g>'
    )


def _line(edge: tuple[int, int], found: Layout, boxes: Sequence[Kernel], inputs: int) -> str:
    """Return the curve from a box to another that reads its result; dashed where floats pass."""
    points = found.lines[edge]
    path, (x, y) = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"], points[0]
    for n, (u, v) in enumerate(points[1:]):
        middle = (y + v) / 2
        straight = n % 2 == 1 or abs(u - x) < 0.5
        path.append(f"V{v:.1f}" if straight else f"C{x:.1f} {middle:.1f} {u:.1f} {middle:.1f} {u:.1f} {v:.1f}")
        x, y = u, v
    floats = ' class="f"' if boxes[edge[0]][-1].format == "float" else ""
    a, b = (_name(n, inputs) for n in edge)
    return f'<path data-from="{a}" data-to="{b}"{floats} d="{"".join(path)}"/>'


def quality(db: float | None) -> str:
    """Return the class of a signal-to-noise ratio: good, weak, bad or none."""
    return "none" if db is None else "bad" if db < BAD else "weak" if db < WEAK else "good"
