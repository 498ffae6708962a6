"""Plots as matplotlib figures."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.errors import ExportError, import_optional, short_message
from chipfit.files import path_of, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: colours that are also distinct for colour-blind people and in grey
BLUE, ORANGE, RED, GREY = "#1c7ed6", "#e8890c", "#c3252b", "#868e96"


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure.

    Args:
        width, height: in inches.

    Raises:
        ExportError: matplotlib is not installed.
    """
    import_optional("matplotlib.figure", "A plot", ExportError, extra="plots")
    from chipfit.screen.notebook_figure import NotebookFigure

    return NotebookFigure((width, height), layout="constrained")


def bars(rows: Sequence[tuple[str, float, str]], label: str, title: str = "") -> tuple["Figure", Any]:
    """Return a figure of horizontal bars, the first at the top, and its axes.

    Args:
        rows: name, length and colour of each bar; a bar of infinite or unknown (NaN) length is left out.
        label: quantity and unit of the length.

    Raises:
        ExportError: matplotlib is not installed.
    """
    figure = new_figure(8, 1 + 0.25 * len(rows))
    axes = figure.subplots()
    lengths = [length if math.isfinite(length) else math.nan for _, length, _ in rows]
    axes.barh(range(len(rows)), lengths, color=[color for *_, color in rows])
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def drawn(figure: "Figure", path: str | Path | None) -> "Figure":
    """Return a figure, and write it to a file if a path is given; its suffix chooses the format.

    Raises:
        ExportError: the file cannot be written, or matplotlib has no such format; nothing is left behind.
    """
    if path is None:
        return figure
    path, content = path_of(path, ExportError), io.BytesIO()
    kind = path.suffix.removeprefix(".")
    try:
        figure.savefig(content, format=kind, metadata={"Date": None} if kind == "svg" else None)
    except ValueError as e:  # of matplotlib: it lists the formats
        raise ExportError(f"The plot cannot be written: {short_message(e)}", got=str(path)) from e
    write_atomically(path, content.getvalue())
    return figure
