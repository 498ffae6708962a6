"""Progress of a long call: a bar with the time left on a terminal and in a notebook, elsewhere one line a stage."""

import logging
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from chipfit.screen.notebook import Bar, in_notebook


class Progress:
    """The stages of a long call, shown on stderr, or in the output of a notebook's cell.

    Args:
        wanted: whether to show them at all.
    """

    def __init__(self, wanted: bool) -> None:
        self._notebook = wanted and in_notebook()
        self.wanted, self._live = wanted, wanted and not self._notebook and sys.stderr.isatty()
        self.seconds: dict[str, float] = {}  #: of each stage

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the time of a stage without showing it."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def warn(self, notes: Iterable[str]) -> None:
        """Log the warnings among the notes of a plan."""
        for note in notes:
            if self.wanted and note.startswith("warning: "):
                logging.getLogger("chipfit").warning(note)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show a stage of unknown length."""
        with self._bar(name, None, lambda: f"{name}: {self.seconds[name]:.1f} s"), self.timed(name):
            yield

    def count(self, name: str, batches: Iterable[Any], total: int | None) -> Generator[Any]:
        """Yield the batches and show percent and time left if their number is known, else their rate."""
        seen = 0

        def ended() -> str:
            took = self.seconds[name]
            return f"{name}: {seen} batches in {took:.1f} s, {seen / max(took, 1e-9):.1f} batches/s"

        with self._bar(name, total, ended) as advance, self.timed(name):
            for batch in batches:
                yield batch
                seen += 1
                advance()

    @contextmanager
    def _bar(self, name: str, total: int | None, ended: Callable[[], str]) -> Iterator[Callable[[], None]]:
        """Show a bar while the block runs and yield what advances it; afterwards show the text of `ended`."""
        if self._notebook:
            bar = Bar(name, total)
            yield bar.advance
            bar.end(f"chipfit {ended()}")
        elif self._live:
            with _terminal_bar(name, total) as advance:
                yield advance
        else:
            yield lambda: None
            if self.wanted:
                print(f"chipfit {ended()}", file=sys.stderr, flush=True)


@contextmanager
def _terminal_bar(name: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show a bar on the terminal while the block runs, and yield what advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Live

    known = (BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    open_end = (SpinnerColumn(), TextColumn("{task.fields[rate]}"), TimeElapsedColumn())
    columns = known if total else open_end
    start = time.perf_counter()
    with Live(TextColumn(name), *columns, console=Console(stderr=True), transient=True) as live:
        task = live.add_task(name, total=total, rate="")

        def advance() -> None:
            done = live.tasks[0].completed + 1
            rate = f"{done:.0f} batches, {done / (time.perf_counter() - start):.1f} batches/s"
            live.update(task, advance=1, rate=rate)

        yield advance
