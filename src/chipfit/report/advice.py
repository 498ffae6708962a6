"""Advice on the next step, and trials of overrides on calibration samples before they are advised."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from chipfit.decide.overrides import MOVES_FLOATS
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.quantizers.noise import decibels
from chipfit.report.record import ReportData
from chipfit.rounding.compare import Reference

WEAK_DB = 20.0  #: a result below this has noise of more than a tenth of its signal
LOST = 0.01  #: a loss of top-1 accuracy worth acting on
CLIPPED = 0.01  #: share of clipped values worth a trial
GAIN_DB = 1.0  #: an override is advised if it improves the model's outputs by this


def advice(report: ReportData) -> list[str]:
    """Return one sentence for each thing that is worth doing, most urgent first; never empty."""
    out = [*_on_proof(report), *_on_accuracy(report)]
    if report.unexplained and report.merit is not None:
        out.append(_on_repairs(report))
    out += [*_on_weakest_result(report), *report.tried, *_on_float_operators(report)]
    return out or [
        "Nothing to repair: deploy the file, or try fewer bits where the chip has them, with "
        "overrides={'<layer>': {'bits': 4}} or --bits '<layer>=4'."
    ]


def _on_proof(report: ReportData) -> Iterator[str]:
    """Yield what to do until the device is known to compute what the simulation computes."""
    v, first = report.verification, report.first_departure
    if report.verdict == "departs" and v is not None and first is not None:
        layer = first["layer"] or first["tensor"]
        yield (
            f"{v['runtime']} departs from the simulation, first at '{first['tensor']}' ({first['op']} '{layer}'): try "
            f"another version of the runtime, or keep the layer in float with overrides={{'{layer}': 'float'}}."
        )
    if not report.simulated:
        yield f"Test on the device: the arithmetic of '{report.platform}' is not simulated, and exactness not claimed."
    elif v is None:
        yield "Prove it: result.verify(data) runs the exported file beside the simulation and compares every integer."


def _on_accuracy(report: ReportData) -> Iterator[str]:
    """Yield what to do about accuracy that the device loses."""
    v = report.verification
    lost = v["accuracy"]["float"] - v["accuracy"]["device"] if v and {"float", "device"} <= set(v["accuracy"]) else 0.0
    if lost > LOST:
        yield (
            f"The device loses {100 * lost:.1f} points of accuracy: train result.model like a model of its framework, "
            "then export result.trained()."
        )


def _on_weakest_result(report: ReportData) -> Iterator[str]:
    """Yield the layer whose result has the most noise, if it is much."""
    weak = sorted((r.sqnr_db, r.name) for r in report.layers if r.sqnr_db is not None and r.sqnr_db < WEAK_DB)
    if weak:
        worst, name = weak[0]
        more = f", and {len(weak) - 1} more are below {WEAK_DB:g} dB" if len(weak) > 1 else ""
        yield f"Weakest result: '{name}' with {worst:.1f} dB{more}."


def _on_float_operators(report: ReportData) -> Iterator[str]:
    """Yield the most frequent cause of operators that stay in float."""
    if report.floats:
        causes = {why: names for why, names in report.floats.items() if why != MOVES_FLOATS} or report.floats
        reason, layers = max(causes.items(), key=lambda item: len(item[1]))
        yield (
            f"{sum(map(len, report.floats.values()))} of {len(report.layers)} operators stay in float. The most "
            f"frequent cause ({len(layers)}): {reason}. `chipfit platforms show {report.platform}` lists what runs in "
            "integers."
        )


def _on_repairs(report: ReportData) -> str:
    """Return what to do about outputs that lose more than the bits explain, before layers are kept in float."""
    known = report.merit or {}
    lost = f"The outputs have {known['sqnr_db']:.1f} dB, less than the {known['expected_db']:.1f} dB of the bits: "
    tried_ = [n for n in report.notes if "held-out samples" in n]
    taken = [n.partition(" taken: ")[0] for n in tried_ if " not taken: " not in n and " taken: " in n]
    if taken:
        return lost + f"{' and '.join(taken)} helped, but not enough; result.sensitivity(data) shows what is left."
    if tried_:
        return lost + f"none of {len(tried_)} repairs helped; result.sensitivity(data) shows where the loss is made."
    return lost + (
        "quantize again so that repairs are tried (data that can be read again, repairs not off), or ask for one: "
        "Settings(equalize_groups='always')."
    )


# ---------------------------------------------------------------- trials


def most_added_noise(report: ReportData, graph: Graph) -> tuple[float, float, str]:
    """Return the layer that adds the most noise to that of its inputs: its result's SQNR, that of its input, its name.

    Noise is a share of the power of the tensor, from `verify`. A result whose noise is not known has that of its
    inputs. An infinite SQNR stands for no noise.
    """
    known = {r.node: 10 ** (-r.sqnr_db / 10) for r in report.layers if r.sqnr_db is not None}
    names, shares, worst = {r.node: r.name for r in report.layers}, dict[str, float](), (0.0, 0.0, 0.0, "")
    for n in graph.nodes:
        before = max((shares.get(i, 0.0) for i in graph.activations(n)), default=0.0)
        after = known.get(n.name, before)
        shares |= dict.fromkeys(n.outputs, after)
        worst = max(worst, (after - before, after, before, names.get(n.name, n.name)))
    _, after, before, name = worst
    return decibels(1.0, after), decibels(1.0, before), name


def candidates(report: ReportData, graph: Graph) -> list[tuple[dict[str, Any], str]]:
    """Return at most two overrides that may help, each with its reason."""
    after, before, maker = most_added_noise(report, graph)
    clipped, name = max(((r.clipped, r.name) for r in report.layers if r.clipped is not None), default=(0.0, ""))
    out: list[tuple[dict[str, Any], str]] = []
    if after < WEAK_DB:
        of = "" if math.isinf(before) else f" of inputs with {before:.1f} dB"
        out.append(({maker: "float"}, f"'{maker}' makes results with {after:.1f} dB{of}"))
    if clipped > CLIPPED:
        out.append(({name: {"rule": "no_clipping"}}, f"'{name}' clips {100 * clipped:.1f} % of calibration values"))
    return out


def tried(
    report: ReportData, graph: Graph, plan: Plan, edit: Callable[[dict[str, Any]], tuple[Graph, Plan]]
) -> tuple[str, ...]:
    """Return a sentence for each candidate that improves the model's outputs, with the measured gain.

    Nothing is tried if the graph has no example inputs.

    Args:
        edit: decides again with more overrides.
    """
    hopes = candidates(report, graph) if graph.example else []
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
    """Return signal over quantization noise of the model's float outputs, on its example inputs [dB]."""
    return Reference(graph, [graph.example]).errors(graph, plan).sqnr_db
