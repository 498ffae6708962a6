"""Everything that consoles and notebooks show: summaries, figures, and bars of progress."""

from chipfit.screen.summary import CHARACTERS, COLUMNS, LINES, MANY, Cell, Summary, SummaryRepr, joined, shorten

__all__ = ["CHARACTERS", "COLUMNS", "LINES", "MANY", "Cell", "Summary", "SummaryRepr", "joined", "shorten"]
