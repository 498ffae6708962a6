"""The Report that users hold: its data, and the forms in which it is shown."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.errors import ExportError, PlanError
from chipfit.files import path_of, read_json, write_atomically
from chipfit.report.record import ReportData
from chipfit.screen import Summary, SummaryRepr
from chipfit.screen.figures import drawn
from chipfit.validation import check_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = ".html", ".json"


def check_suffix(path: Path) -> None:
    """Raise an ExportError unless a report can be written to a file of this name."""
    if path.suffix not in SUFFIXES:
        raise ExportError("A report cannot have this suffix", got=str(path), allowed=" or ".join(SUFFIXES))


def write_shown(shown: Any, path: str | Path, page: Callable[[Any], str]) -> Path:
    """Write a report or a comparison: the page that `page` makes of it for `.html`, its data for `.json`.

    Raises:
        ExportError: the suffix is another, or the file cannot be written; nothing is left behind.
    """
    path = path_of(path, ExportError)
    check_suffix(path)
    as_data = path.suffix == ".json"
    text = json.dumps(shown.to_dict(), indent=1, default=str) if as_data else page(shown)
    return write_atomically(path, text.encode())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report(SummaryRepr, ReportData):
    """A report on how a quantized model runs, how large it is, and how accurate.

    Examples:
        >>> import chipfit, torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> data = [torch.rand(8, 3, 16, 16) for _ in range(4)]
        >>> result = chipfit.quantize(net, data, "tflite_int8", progress=False)
        >>> report = result.report
        >>> [(row.layer, row.exec) for row in report.layers]
        [('0', 'int'), ('1', 'int')]
        >>> report.quantized_bytes < report.float_bytes / 3
        True
    """

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Read a report that `save` wrote as JSON.

        Raises:
            PlanError: the file cannot be read, or is not a report.
        """
        file = path_of(path, PlanError)
        report: Report = check_value(cls, read_json(file, PlanError), PlanError, str(file), json=True)
        return report

    def save(self, path: str | Path) -> Path:
        """Write the report: a self-contained page for `.html`, data for `.json`.

        Raises:
            ExportError: the suffix is another, or the file cannot be written; nothing is left behind.
        """
        from chipfit.report.html import page

        return write_shown(self, path, page)

    def plot(self, path: str | Path | None = None, measure: str | None = None, count: int = 48) -> "Figure":
        """Return a matplotlib figure of the noise of the kernels, in execution order; weak ones are orange or red.

        Args:
            path: file to write as well, in a format that matplotlib writes.
            measure: "results" (measured by `verify`) or "weights" (as they are stored); results if they are known.
            count: number of kernels; of more, the weakest.

        Raises:
            UnknownNameError: `measure` is another.
            PlanError: nothing was measured.
            ExportError: matplotlib is not installed, or the file cannot be written.
        """
        from chipfit.report.plots import noise_of_kernels

        return drawn(noise_of_kernels(self, measure, count), path)

    def _summary(self) -> Summary:
        from chipfit.report.terminal import accuracies, agreement, facts

        known = {k: v for k, v in facts(self).items() if k != "platform"}
        known["device"] = "; ".join(agreement(self).plain.splitlines())
        known["top-1"] = ", ".join(f"{k} {100 * a:.2f} %" for k, a in accuracies(self).items())
        known["first"] = "; ".join(self.warnings)
        weakest = sorted(self.kernels, key=lambda k: (k[-1].sqnr_db is None, k[-1].sqnr_db or 0.0))
        rows = [(k.name, k.ops, k.exec, k.formats, k[-1].sqnr_db) for k in weakest]
        header = ("kernel", "operators", "runs", "format", "SQNR [dB]")
        return Summary(
            f"Report: {self.platform}  {self.title}", known, header, rows, "report.show(), report.save(path)"
        )

    def show(self) -> None:
        """Print the report to the terminal."""
        from rich.console import Console

        from chipfit.report.terminal import render

        Console().print(render(self))
