"""The report as matplotlib figures."""

from typing import TYPE_CHECKING

from chipfit.errors import PlanError, UnknownNameError
from chipfit.report.record import ReportData
from chipfit.screen.figures import BLUE, ORANGE, RED, bars

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: below these the noise of a result is shown as weak, and as bad [dB]; as in the HTML page
WEAK, BAD = 25.0, 15.0
MEASURES = "results", "weights"


def noise_of_kernels(report: ReportData, measure: str | None, count: int) -> "Figure":
    """Return a figure of the noise of each kernel; see `Report.plot`."""
    if measure not in (None, *MEASURES):
        raise UnknownNameError("measure", measure, MEASURES)
    found = {
        "results": [(k.name, k[-1].sqnr_db) for k in report.kernels if k[-1].sqnr_db is not None],
        "weights": [(k.name, k.weight_sqnr_db) for k in report.kernels if k.weight_sqnr_db is not None],
    }
    what = measure or ("results" if found["results"] else "weights")
    rows = [(name, db) for name, db in found[what] if db is not None]
    if not rows:
        raise PlanError(f"The noise of {what} is not known", hint="run result.verify(data) first")
    limit = sorted(db for _, db in rows)[: max(count, 1)][-1]
    shown = [(name, db, RED if db < BAD else ORANGE if db < WEAK else BLUE) for name, db in rows if db <= limit]
    left = f", the weakest {len(shown)} of {len(rows)} kernels" if len(shown) < len(rows) else ""
    of = "results on the device" if what == "results" else "stored weights"
    return bars(shown, "signal over quantization noise [dB]", f"{report.platform}: {of}{left}")[0]
