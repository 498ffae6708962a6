"""Progress of a long call: a bar with percent and time left on a terminal, one line per stage elsewhere."""

import sys
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Progress:
    """The stages of a long call, shown on stderr.

    Args:
        wanted: whether to show them at all.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted, self._live = wanted, wanted and sys.stderr.isatty()
        self.seconds: dict[str, float] = {}  #: of each stage

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the time of a stage without showing it."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show a stage of unknown length."""
        with self.timed(name), self._bar(name, None):
            yield
        self._line(f"{name}: {self.seconds[name]:.1f} s")

    def count(self, name: str, batches: Iterable[Any], total: int | None) -> Generator[Any]:
        """Yield the batches and show percent and time left if their number is known, else their rate."""
        seen = 0
        with self.timed(name), self._bar(name, total) as advance:
            for batch in batches:
                yield batch
                seen += 1
                advance()
        took = self.seconds[name]
        self._line(f"{name}: {seen} batches in {took:.1f} s, {seen / max(took, 1e-9):.1f} batches/s")

    def _line(self, text: str) -> None:
        if self.wanted and not self._live:
            print(f"chipfit {text}", file=sys.stderr, flush=True)

    @contextmanager
    def _bar(self, name: str, total: int | None) -> Iterator[Any]:
        if not self._live:
            yield lambda: None
            return
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
