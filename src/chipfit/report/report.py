"""The Report that users hold: the data, and the forms in which it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from chipfit.files import write_atomically
from chipfit.report.record import ReportData


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(ReportData):
    """Everything that a person asks after quantizing a model."""

    def save(self, path: str | Path) -> Path:
        """Write the report: a self-contained page for `.html`, data for `.json`.

        Raises:
            ExportError: the file cannot be written; nothing is left behind.
        """
        path = Path(path)
        if path.suffix == ".json":
            return write_atomically(path, json.dumps(self.to_dict(), indent=1, default=str).encode())
        from chipfit.report.html import page

        return write_atomically(path, page(self).encode())

    def show(self) -> None:
        """Print the report to the terminal."""
        from chipfit.report.terminal import show

        show(self)
