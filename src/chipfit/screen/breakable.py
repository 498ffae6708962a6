"""Text of a table in a terminal whose lines end behind dots as well as blanks, so that long paths stay readable."""

import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

LEAST = 20  #: columns that a long path keeps beside others


class Breakable:
    """A text, and the lines into which a table's column of any width breaks it.

    >>> list(Breakable("encoder.layer.1.attention.query").lines(16))
    ['encoder.layer.1.', 'attention.query']
    """

    def __init__(self, text: str, style: str = "") -> None:
        self.text, self.style = text, style

    def lines(self, width: int) -> Iterator[str]:
        """Yield lines of at most `width` characters."""
        line = ""
        for piece in re.findall(r"[^. ]*[. ]?", self.text):
            if line and len(line) + len(piece.rstrip()) > width:
                yield line.rstrip()
                line = ""
            line += piece
            while len(line.rstrip()) > width:  # a word that no line can hold
                yield line[:width]
                line = line[width:]
        if line:
            yield line.rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines for a column."""
        style = Style.parse(self.style)
        for line in self.lines(options.max_width):
            yield Segment(line, style)
            yield Segment.line()

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the greatest useful width."""
        whole = min(len(self.text), options.max_width)
        return Measurement(min(LEAST, whole), whole)
