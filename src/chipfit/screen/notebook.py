"""Bars of progress in notebooks, without widgets: HTML that is replaced in place."""

import sys
import time
from html import escape
from typing import Any

#: shortest time between two updates [s]
PAUSE = 0.1


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows HTML."""
    shell = sys.modules.get("IPython")
    running = shell.get_ipython() if shell is not None else None
    return running is not None and getattr(running, "kernel", None) is not None


class Bar:
    """A bar of progress in the output of a notebook's cell.

    Args:
        name: stage that it shows.
        total: number of steps; None if it is not known.
    """

    def __init__(self, name: str, total: int | None) -> None:
        from IPython import display

        self.name, self.total, self.done, self._display = name, total, 0, display
        self._start = self._shown = time.perf_counter()
        self._handle: Any = display.display(display.HTML(self._bar()), display_id=True)

    def advance(self) -> None:
        """Count a step, and show it unless the last update was a moment ago."""
        self.done += 1
        now = time.perf_counter()
        if now - self._shown >= PAUSE or self.done == self.total:
            self._shown = now
            self._handle.update(self._display.HTML(self._bar()))

    def end(self, text: str) -> None:
        """Replace the bar by a line of text."""
        self._handle.update(self._display.HTML(f"<small>{escape(text)}</small>"))

    def _bar(self) -> str:
        took = time.perf_counter() - self._start
        if self.total is None:
            inside, what = "", f"{self.done} batches" if self.done else ""
        else:
            inside = f' max="{self.total}" value="{self.done}"'
            left = took / self.done * (self.total - self.done) if self.done else None
            what = f"{self.done} of {self.total}" + ("" if left is None else f", {left:.0f} s left")
        return f"<small>{escape(self.name)} <progress{inside}></progress> {what}</small>"
