"""Summaries that objects show in a console and in notebooks: facts and a table on one screen."""

import html
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LINES, COLUMNS = 40, 80  #: of a terminal: nothing is longer or wider
MOST_ROWS = 32  #: rows of a table that fit together with the facts above it
CHARACTERS = 4000  #: of a page: nothing is longer
Cell = str | int | float | None
#: notebooks align cells to the right, which is for numbers
STYLE = "<style>.chipfit td, .chipfit th {text-align: left}</style>"


def shorten(text: str, width: int) -> str:
    """Return a text of at most `width` characters, with an ellipsis in place of the rest.

    >>> shorten("features.12.conv", 9)
    'features…'
    """
    text = " ".join(text.split())
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def shorten_cell(text: str, width: int) -> str:
    """Return a cell of at most `width` characters: of a name the end, in which layers differ, of a sentence the start.

    >>> shorten_cell("encoder.layer.1.attention", 20)
    '…layer.1.attention'
    """
    if len(text) <= width or " " in text or width < 2:
        return shorten(text, width)
    end = text[1 - width :]
    at_a_dot = end.partition(".")[2]
    return "…" + (at_a_dot if 2 * len(at_a_dot) > width else end)


@dataclass(frozen=True, slots=True)
class Summary:
    """A title, facts by label, and the first rows of a table."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)  #: empty ones are left out
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()  #: text, which may be shortened, and numbers, which never are
    rest: str = ""  #: where to find the rows that do not fit

    def text(self) -> str:
        """Return at most `LINES` lines of at most `COLUMNS` characters."""
        lines = [shorten(self.title, COLUMNS)]
        label_width = max(map(len, self.facts), default=0) + 2
        for label, fact in self.facts.items():
            first, *more = textwrap.wrap(fact, COLUMNS - label_width, max_lines=4, placeholder=" …") or [""]
            lines += [label.ljust(label_width) + first, *(" " * label_width + m for m in more)] if fact else []
        room = LINES - len(lines) - 3
        if self.rows and room > 0:
            shown = [list(map(_cell, r)) for r in self.rows[:room]]
            lines += ["", *_aligned(self.header, shown, _number_columns(self.rows))]
            left = len(self.rows) - room
            lines += [shorten(f"… and {left} more: {self.rest}", COLUMNS)] if left > 0 else []
        return "\n".join(lines)

    def html(self) -> str:
        """Return the summary as HTML of at most `CHARACTERS`."""

        def row(cells: Sequence[Cell], tag: str = "td") -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(shorten_cell(_cell(c), 48))}</{tag}>' for c in cells)}</tr>"

        known = {html.escape(k): html.escape(shorten(v, 160)) for k, v in [*self.facts.items()][:9] if v}
        table = "".join(f"<tr><th>{k}</th><td>{v}</td></tr>" for k, v in known.items())
        head = f"<div class='chipfit'>{STYLE}<b>{html.escape(shorten(self.title, 160))}</b><table>{table}</table>"
        rows = [row(self.header, "th"), *map(row, self.rows[: LINES // 2])] if self.rows else []

        def page(count: int) -> str:
            left = len(self.rows) - count
            more = f"… and {left} more: {html.escape(self.rest)}" if left > 0 else ""
            return f"{head}<table>{''.join(rows[: 1 + count])}</table>{more}</div>"

        fitting = (k for k in range(len(rows) - 1, 0, -1) if len(page(k)) <= CHARACTERS)
        return page(next(fitting, 0)) if rows else f"{head}</div>"


def join_rows(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return one row a layer in place of its operators, if there are more than `MOST_ROWS`.

    Rows are joined that follow each other and differ in the operator alone. An operator that takes over the scale of
    its input ("follow") is joined with those in integers ("int").

    Args:
        rows: (layer, operator, "int", "float" or "follow", further cells).

    >>> join_rows([("gru", f"Op{k}", "int") for k in range(40)])
    [('gru', '40: Op0, Op1, Op2, …', 'int')]
    """
    if len(rows) <= MOST_ROWS:
        return list(rows)
    runs = (list(run) for _, run in itertools.groupby(rows, key=lambda r: (r[0], r[2] == "float", *r[3:])))
    return [_row_of_layer(run) for run in runs]


def _row_of_layer(run: Sequence[Sequence[str]]) -> Sequence[str]:
    layer, _, *rest = next((r for r in run if r[2] != "follow"), run[0])
    return layer, _operators([r[1] for r in run]), *rest


def _operators(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    distinct = [*dict.fromkeys(names)]
    return f"{len(names)}: {', '.join(distinct[:3])}{', …' if distinct[3:] else ''}"


class SummaryRepr:
    """The base of objects that a console and a notebook show as a `Summary`."""

    __slots__ = ()

    def _summary(self) -> Summary:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._summary().text()

    def __str__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()


def _cell(value: Cell) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _number_columns(rows: Sequence[Sequence[Cell]]) -> list[bool]:
    """Return for each column whether it holds only numbers."""
    return [not any(isinstance(c, str) for c in column) for column in zip(*rows, strict=True)]


def _aligned(header: Sequence[str], rows: list[list[str]], numbers: Sequence[bool]) -> list[str]:
    """Return lines of columns with two blanks between them; the widest text columns are shortened to fit."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > COLUMNS:
        widths[max((k for k in range(len(widths)) if not numbers[k]), key=widths.__getitem__)] -= 1
    align = [str.rjust if n else str.ljust for n in numbers]
    cells = ([shorten_cell(c, w) for c, w in zip(r, widths, strict=True)] for r in (header, *rows))
    return ["  ".join(f(c, w) for f, c, w in zip(align, r, widths, strict=True)).rstrip() for r in cells]
