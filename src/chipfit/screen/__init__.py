"""Everything that consoles and notebooks show: summaries, figures, and bars of progress."""

from chipfit.screen.summary import (
    CHARACTERS,
    COLUMNS,
    LINES,
    MOST_ROWS,
    Cell,
    Summary,
    SummaryRepr,
    join_rows,
    shorten,
)

__all__ = [
    "CHARACTERS",
    "COLUMNS",
    "LINES",
    "MOST_ROWS",
    "Cell",
    "Summary",
    "SummaryRepr",
    "join_rows",
    "shorten",
]
