"""What to try next, from what the report holds."""

from chipfit.report.record import ReportData
from chipfit.report.trials import WEAK_DB

LOST = 0.01  #: a loss of top-1 accuracy worth acting on


def advice(report: ReportData) -> list[str]:
    """One sentence for each thing that is worth doing, most urgent first; never empty."""
    out = []
    v, first = report.verification, report.first_departure
    if report.verdict == "departs" and v is not None and first is not None:
        out.append(
            f"{v['runtime']} departs from the simulation: please report it, with this page; the first tensor is "
            f"'{first['tensor']}' ({first['op']} '{first['layer'] or first['tensor']}')."
        )
    if not report.simulated:
        out.append(
            f"Test on the device: the arithmetic of '{report.platform}' is not simulated, so exactness is not claimed."
        )
    elif v is None:
        out.append(
            "Prove it: result.verify(data) runs the exported file beside the simulation and compares every integer."
        )
    lost = v["accuracy"]["float"] - v["accuracy"]["device"] if v and {"float", "device"} <= set(v["accuracy"]) else 0.0
    if lost > LOST:
        out.append(
            f"{100 * lost:.1f} points of accuracy are lost: result.model trains as any model of its framework, "
            "result.trained() exports what it learned."
        )
    weak = sorted((r.sqnr_db, r.name) for r in report.layers if r.sqnr_db is not None and r.sqnr_db < WEAK_DB)
    if weak:
        worst, name = weak[0]
        more = f", and {len(weak) - 1} more are below {WEAK_DB:g} dB" if len(weak) > 1 else ""
        out.append(f"Weakest result: '{name}' with {worst:.1f} dB{more}.")
    out += report.tried
    if report.floats:
        reason, layers = max(report.floats.items(), key=lambda item: len(item[1]))
        out.append(
            f"{sum(map(len, report.floats.values()))} of {len(report.layers)} operators stay in float, most often "
            f"because {reason} ({len(layers)}); `chipfit platforms show {report.platform}` lists what runs in integers."
        )
    return out or [
        "Nothing to repair: deploy the file, or try fewer bits with overrides={'<layer>': {'bits': 4}} "
        "where the chip has them."
    ]
