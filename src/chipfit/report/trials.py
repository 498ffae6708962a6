"""Advice is tried before it is given: on the samples that the model was captured with, the first of calibration."""

import math
from collections.abc import Callable
from typing import Any

import torch

from chipfit.engine.run import run
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.report.record import ReportData
from chipfit.rounding.compare import run_quantized

WEAK_DB = 20.0  #: a result below this is worth a look: its noise is a tenth of its signal
CUT = 0.01  #: share of clipped values worth a try
GAIN_DB = 1.0  #: what an override must give the model's outputs to be advised


def candidates(report: ReportData) -> list[tuple[dict[str, Any], str]]:
    """At most two overrides that may help, each with what speaks for it."""
    weak = min(((r.sqnr_db, r.name) for r in report.layers if r.sqnr_db is not None), default=(WEAK_DB, ""))
    cut, name = max(((r.clipped, r.name) for r in report.layers if r.clipped is not None), default=(0.0, ""))
    out: list[tuple[dict[str, Any], str]] = []
    if weak[0] < WEAK_DB:
        out.append(({weak[1]: "float"}, f"'{weak[1]}' has {weak[0]:.1f} dB"))
    if cut > CUT:
        out.append(({name: {"rule": "no_clipping"}}, f"'{name}' clips {100 * cut:.1f} % of what calibration saw"))
    return out


def tried(
    report: ReportData, graph: Graph, plan: Plan, edit: Callable[[dict[str, Any]], tuple[Graph, Plan]]
) -> tuple[str, ...]:
    """A sentence for each candidate that makes the model's outputs better, with the gain that was measured.

    Nothing is tried where the samples are not there any more.

    Args:
        edit: decides again with more overrides.
    """
    hopes = candidates(report) if graph.example else []
    before, out = output_sqnr(graph, plan) if hopes else 0.0, []
    for overrides, why in hopes:
        try:
            after = output_sqnr(*edit(overrides))
        except ChipfitError:  # the platform does not allow it
            continue
        if after >= before + GAIN_DB:
            samples = len(graph.example[0]) if graph.example[0].dim() else 1
            out.append(
                f"{why}: overrides={overrides} lifts the outputs from {before:.1f} to {after:.1f} dB "
                f"(tried on {samples} calibration samples)."
            )
    return tuple(out)


def output_sqnr(graph: Graph, plan: Plan) -> float:
    """Signal over the noise of all stored tensors in the model's float outputs, on its example [dB]."""

    with torch.inference_mode():
        want, got = run(graph, graph.example), run_quantized(graph, plan, graph.example)
    floats = [o for o in set(graph.outputs) if graph.is_float(o)]
    signal = sum(float(want[o].double().square().sum()) for o in floats)
    noise = sum(float((got[o] - want[o]).double().square().sum()) for o in floats)
    return 10 * math.log10(signal / noise) if signal and noise else math.inf
