"""Wrapping of generated pages."""

import textwrap


def wrapped(page: str) -> str:
    """Return a page of Markdown with its prose in at most 120 columns; tables stay as they are."""
    return "".join(f"{line}\n" if line.startswith("|") else _lines(line) for line in page.splitlines())


def _lines(line: str) -> str:
    indent = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"
