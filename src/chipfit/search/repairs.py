"""Repairs without training, tried where the outputs lose more than the bits explain; they stay where samples gain."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from chipfit import steps
from chipfit.adaptation import choose_ranges, statistics_needed, trial_settings, with_statistics
from chipfit.calibration.data import Batch
from chipfit.calibration.source import CalibrationData
from chipfit.calibration.spread_samples import SpreadSamples
from chipfit.decision import Decision, choose_scales, decide, plan_of, scales_of
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph
from chipfit.graph.linear import products
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan
from chipfit.registry import ordered
from chipfit.rounding.compare import (
    Planned,
    Reference,
    RoundedWeights,
    count_samples,
    limit_samples,
    split_holdout,
    without_weight_rounding,
)
from chipfit.rounding.expected import expected_sqnr_db
from chipfit.settings import Settings

#: samples of a trial: it calibrates on most of them and compares on those that are held out
SAMPLES = 64
#: a repair is taken if it lifts the outputs by this, and other ranges if they do [dB]
GAIN_DB, RANGE_GAIN_DB = 1.0, 0.5
#: a warning is given where the outputs are worse than expected by this [dB]
DOUBT_DB = 3.0
#: numbers of all activations in the samples of one measurement, and multiplications that take as long as one of them
_NUMBERS, _PRODUCTS = 1 << 24, 256
#: least and greatest number of samples of one measurement
_LEAST, _MOST = 2, 128
#: stages of repairs, in the order in which they are tried
_STAGES = ("adapt", "rewrite", "correct")


@dataclass(frozen=True)
class Merit:
    """The loss of a quantized network at its outputs, on a few samples of the calibration data."""

    sqnr_db: float  #: signal over quantization noise, see `rounding.outputs`
    expected_db: float  #: the ratio that the bits explain
    samples: int

    @classmethod
    def of(cls, reference: Reference, graph: Graph, plan: Plan, rounded: RoundedWeights | None = None) -> "Merit":
        """Return the merit of a network as a plan quantizes it; `rounded` as in `Reference.errors`."""
        expected = expected_sqnr_db(graph, plan)
        return cls(reference.errors(graph, plan, rounded).sqnr_db, expected, count_samples(reference.batches))

    @property
    def explained(self) -> bool:
        """True where rounding to the plan's bits explains the loss."""
        return self.sqnr_db >= self.expected_db

    def to_record(self) -> dict[str, Any]:
        """Return the merit as JSON data; None stands for no loss."""
        sqnr, expected = (round(x, 1) if math.isfinite(x) else None for x in (self.sqnr_db, self.expected_db))
        return {"sqnr_db": sqnr, "expected_db": expected, "samples": self.samples}


def merit_of(d: Decision, seen: SpreadSamples, graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return the merit of the network of a decision as another graph and plan quantize it, as part of a provenance."""
    few = few_samples(d, seen)
    return {"merit": Merit.of(Reference(d.graph, few), graph, plan).to_record()} if few else {}


def few_samples(d: Decision, seen: SpreadSamples) -> list[Batch]:
    """Return samples for one measurement on the device of the network, the fewer the more work one of them is."""
    numbers = sum(s.count for s in d.stats.values()) / max(1, seen.count)
    work = max(numbers, sum(products(d.graph, n) for n in d.graph.nodes) / _PRODUCTS, 1.0)
    found = seen.take(min(_MOST, max(_LEAST, int(_NUMBERS / work))))
    return [inputs_on(d.graph.device, batch) for batch in found]


def judged(d: Decision, read: steps.Batches = (), corrections: Mapping[str, Any] | None = None) -> Planned:
    """Return the network and the plan by which a decision is judged.

    Weights are in float where another method will round them. Bias and weights are corrected as `corrections` ask.
    """
    resolved, _ = trial_settings(d)
    if any(s.name == "rounding" for s in steps.enabled(resolved, "correct")):
        return d.graph, without_weight_rounding(plan_of(d))
    if not corrections:
        return d.graph, plan_of(d)
    graph, plan, _ = steps.correct(d.graph, plan_of(d), d.stats, read, partial(scales_of, d), Settings(**corrections))
    return graph, plan


def improved(d: Decision, data: CalibrationData, *, tries: bool, open_rule: bool) -> Decision:
    """Return the decision with its merit in the provenance, and with what makes the outputs lose less.

    Args:
        data: after the first pass over them.
        tries: repairs are tried where rounding does not explain the loss, and a warning is given where none helps.
        open_rule: ranges without clipping are tried too.
    """
    few = few_samples(d, data.few)
    if not few:
        return _remembered(d)
    reference, rounded = Reference(d.graph, few), RoundedWeights()
    merit = Merit.of(reference, *judged(d), rounded)
    if tries and not merit.explained:
        rounded.clear()
        if data.read_once:
            why = "no repair was tried: the data cannot be read again; give a list, or a function that returns them"
            d = replace(d, rewrites=(*d.rewrites, why))
        else:
            d = repaired(d, data.batches(d.graph))
            merit = Merit.of(reference, *judged(d), rounded)
    if tries and open_rule:
        d, merit = with_best_ranges(d, reference, merit, rounded)
    if tries and merit.sqnr_db < merit.expected_db - DOUBT_DB:
        told = f"the outputs have {merit.sqnr_db:.1f} dB, {merit.expected_db:.1f} dB are expected"
        d = replace(d, rewrites=(*d.rewrites, f"warning: rounding loses more than the bits explain: {told}"))
    return replace(_remembered(d), provenance={**d.provenance, "merit": merit.to_record()})


def _remembered(d: Decision) -> Decision:
    """Return the decision without the captured network; edits start from its rules and its provenance."""
    start = d.calibrated
    if start is not None:
        start = replace(start, captured=None, rules=d.rules, provenance=d.provenance)
    return replace(d, captured=None, calibrated=start)


def with_best_ranges(
    d: Decision, reference: Reference, before: Merit, rounded: RoundedWeights
) -> tuple[Decision, Merit]:
    """Return the decision, with activations that are not clipped where the outputs then lose less, and its merit."""
    weights = {k: t for k, t in d.tensors.items() if t.role == "weight" and t.quantized}
    other = choose_scales(replace(d, rules=replace(d.rules, rule="no_clipping")), keep=weights)
    after = Merit.of(reference, *judged(other), rounded)
    if not after.sqnr_db >= before.sqnr_db + RANGE_GAIN_DB:
        return d, before
    why = f"on {after.samples} samples the outputs have {after.sqnr_db:.1f} dB, {before.sqnr_db:.1f} dB without"
    settings = {**d.provenance.get("settings", {}), "rule": "no_clipping"}
    notes, origin = (*d.rewrites, f"ranges without clipping taken: {why}"), {**d.provenance, "settings": settings}
    return replace(other, rewrites=notes, provenance=origin), after


# ---------------------------------------------------------------- repairs


def repaired(d: Decision, read: steps.Batches) -> Decision:
    """Return the decision with the repairs that gain on held-out samples, one after the other; noted.

    No further repair is tried once rounding explains the loss.

    Args:
        read: batches of graph inputs, which can be read again.
    """
    fit, held = split_holdout(limit_samples(read, SAMPLES))
    if not held:
        return replace(d, rewrites=(*d.rewrites, "no repair was tried: there are too few samples to hold some out"))
    reference, notes, taken = Reference(d.graph, held), list[str](), dict[str, Any]()
    network, best = d.graph, Merit.of(reference, *judged(d))
    for name, value, stage in open_repairs(d):
        changes = {**taken, name: value}
        if stage == "rewrite" and _same_weights(rewritten(d, changes).graph, rewritten(d, taken).graph):
            continue
        try:
            trial = attempt(d, changes, fit)
        except ChipfitError:  # the platform, or a setting of the user, excludes it
            continue
        if stage != "correct" and _same_weights(trial.graph, network):
            continue
        merit = Merit.of(reference, *judged(trial, fit, changes if stage == "correct" else None))
        gains = merit.sqnr_db >= best.sqnr_db + GAIN_DB
        told = f"on {merit.samples} held-out samples outputs have {merit.sqnr_db:.1f} dB, {best.sqnr_db:.1f} dB without"
        notes.append(f"{name}={value!r} {'taken' if gains else 'not taken'}: {told}")
        if gains:
            taken, network, best = changes, trial.graph, merit
        if best.explained:
            break
    if taken:
        d = attempt(d, taken, read)
        settings = {**d.provenance.get("settings", {}), "steps": d.settings.to_record()}
        d = replace(d, provenance={**d.provenance, "settings": settings})
    return replace(d, rewrites=(*d.rewrites, *notes))


def open_repairs(d: Decision) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings that may be tried: name, value and stage."""
    resolved, on_trial = trial_settings(d)
    corrected = bool(steps.enabled(resolved, "correct"))
    for stage in _STAGES if not corrected else _STAGES[:-1]:
        for says in (e.declares for e in ordered(stage) if e.declares.repair is not None):
            applies = says.repair.applies is None or says.repair.applies(d.graph, d.assignment)
            applies = applies and (says.collects is None or bool(says.collects(d.graph, {})))
            if applies and getattr(on_trial, says.setting.name) == says.setting.default:
                yield says.setting.name, says.repair.value, stage


def rewritten(d: Decision, changes: Mapping[str, Any]) -> Decision:
    """Return the decision to be made anew from the captured network, with other settings."""
    assert d.captured is not None, "it is kept while repairs are tried"
    settings = Settings(**{**d.settings.to_record(), **changes})
    graph, rewrites = steps.rewrite(d.captured, d.platform, settings)
    return replace(d, graph=graph, settings=settings, rewrites=tuple(rewrites), notes=(), execution={}, stats={})


def attempt(d: Decision, changes: Mapping[str, Any], batches: steps.Batches) -> Decision:
    """Decide anew from the captured network, with other settings.

    Raises:
        ChipfitError: the platform does not allow it, or settings exclude each other.
    """
    d = decide(rewritten(d, changes))
    needed, _ = statistics_needed(d)
    return choose_ranges(with_statistics(d, batches, needed), batches)


def _same_weights(a: Graph, b: Graph) -> bool:
    return a.weights.keys() == b.weights.keys() and all(torch.equal(w, b.weights[k]) for k, w in a.weights.items())
