"""Repairs without training, tried where the outputs lose more than the bits explain; they stay where samples gain."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from chipfit import steps
from chipfit.adaptation import choose_ranges, statistics_needed, trial_settings, with_statistics
from chipfit.calibration.source import CalibrationData
from chipfit.calibration.spread_samples import SpreadSamples
from chipfit.correction.measured_bias import MeanReference, MeasuredBiases, Samples, measure_biases
from chipfit.decision import Decision, choose_scales, decide, plan_of, redecide, scales_of
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph
from chipfit.graph.linear import multiplications
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan
from chipfit.ranges import name_of
from chipfit.registry import OFF, ordered
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
from chipfit.rounding.method import default_method
from chipfit.rounding.outputs import OutputErrors
from chipfit.search.sensitivity import Suggestion, activation_losses, suggestions
from chipfit.settings import Settings

#: samples of a trial: it calibrates on most of them and compares on those that are held out
SAMPLES = 64
#: a repair is taken if it lifts the outputs by this, and other ranges if they do [dB]
GAIN_DB, RANGE_GAIN_DB = 1.0, 0.5
#: a warning is given where the outputs are worse than expected by this [dB]
DOUBT_DB = 3.0
#: numbers of all values in the samples of one measurement, and multiplications that take as long as two of them
_NUMBERS, _PRODUCTS = 1 << 23, 128
#: least and greatest number of samples of one measurement
_LEAST, _MOST = 2, 128
#: layers are made more precise so many times, and with so great a share of all multiplications
_ROUNDS, _CHEAP = 4, 0.05
#: the first layers are made more precise together if they have at most this share
_FRONT = 0.1
#: weights are fitted to their inputs unless the loss falls by this with activations in float [dB]
_FITTED_DB = 10.0
#: stages of repairs, in the order in which they are tried
_STAGES = ("adapt", "rewrite")


@dataclass(frozen=True)
class Merit:
    """The loss of a quantized network at its outputs, on a few samples of the calibration data."""

    sqnr_db: float  #: signal over quantization noise, see `rounding.outputs`
    expected_db: float  #: the ratio that the bits explain
    samples: int

    @classmethod
    def of(cls, reference: Reference, plan: Plan, errors: OutputErrors) -> "Merit":
        """Return the merit of a network as a plan quantizes it, from its errors."""
        return cls(errors.sqnr_db, expected_sqnr_db(reference.graph, plan), count_samples(reference.batches))

    @property
    def explained(self) -> bool:
        """True where rounding to the plan's bits explains the loss."""
        return self.sqnr_db >= self.expected_db

    @property
    def doubtful(self) -> bool:
        """True where the loss is so much greater than rounding explains that a warning is given."""
        return self.sqnr_db < self.expected_db - DOUBT_DB

    def to_record(self) -> dict[str, Any]:
        """Return the merit as JSON data; None stands for no loss."""
        sqnr, expected = (round(x, 1) if math.isfinite(x) else None for x in (self.sqnr_db, self.expected_db))
        return {"sqnr_db": sqnr, "expected_db": expected, "samples": self.samples}


def merit_of(d: Decision, graph: Graph, plan: Plan) -> dict[str, Any]:
    """Return the merit of the network of a decision as another graph and plan quantize it, as part of a provenance."""
    if d.samples is None:
        return {}
    batches = [inputs_on(d.graph.device, batch) for part in d.samples for batch in part]
    reference = Reference(d.graph, batches)
    return {"merit": Merit.of(reference, plan, reference.errors(graph, plan)).to_record()}


def few_samples(d: Decision, seen: SpreadSamples) -> Samples | None:
    """Return samples for measurements, the fewer the more work one of them is; their number depends on the model alone.

    Sizes that are open count as much as they do in the inputs.
    """
    first, graph = seen.take(1), d.captured or d.graph
    if not first:
        return None
    given = sum(x.numel() for x in first[0]) / max(1, sum(_numbers(graph, i) for i in graph.inputs))
    numbers = given * sum(_numbers(graph, o) for n in graph.nodes for o in n.outputs if o in graph.values)
    work = max(numbers, given * sum(multiplications(graph, n) for n in graph.nodes) / _PRODUCTS, 1.0)
    return Samples.of(seen.take(min(_MOST, max(_LEAST, int(_NUMBERS / work)))))


def _numbers(graph: Graph, value: str) -> int:
    """Return the numbers of one sample of a value; open sizes count once."""
    return math.prod(d or 1 for d in graph.shape(value)[1:])


def judged(d: Decision) -> Planned:
    """Return the network and the plan by which a decision is judged; weights that are fitted later are in float."""
    resolved, _ = trial_settings(d)
    if any(s.name == "rounding" for s in steps.enabled(resolved, "correct")):
        return d.graph, without_weight_rounding(plan_of(d))
    return d.graph, plan_of(d)


def measured(
    d: Decision, reference: MeanReference, rounded: RoundedWeights, before: Sequence[OutputErrors] | None = None
) -> MeasuredBiases:
    """Return the errors of a decision, with biases that may follow them; `before` as in `measure_biases`."""
    resolved, _ = trial_settings(d)
    return measure_biases(reference, *judged(d), rounded, before=before, move=biases_move(resolved))


def biases_move(settings: Settings) -> bool:
    """Return whether biases follow mean errors that samples show: nothing else corrects them, and nobody objects."""
    return settings.correct_bias is None and settings.repairs != OFF and not steps.enabled(settings, "correct")


def improved(d: Decision, data: CalibrationData, *, tries: bool, open_rule: bool) -> Decision:
    """Return the decision with its merit in the provenance, and with what makes the outputs lose less.

    Args:
        data: after the first pass over them.
        tries: repairs are tried where rounding does not explain the loss, and a warning is given where none helps.
        open_rule: the user names no range rule: ranges without clipping and more precise layers are tried, too.
    """
    samples = few_samples(d, data.samples)
    if samples is None:
        return _without_captured(d)
    d = replace(d, samples=samples)
    reference, rounded = MeanReference(d.graph, samples), RoundedWeights()
    found = measured(d, reference, rounded)
    merit = Merit.of(reference, plan_of(d), OutputErrors.merged(found.before))  # biases do not make up for all
    if tries and not merit.explained:
        rounded.clear()
        if data.read_once:
            why = "no repair was tried: the data cannot be read again; give a list, or a function that returns them"
            d = replace(d, rewrites=(*d.rewrites, why))
        else:
            d = repaired(d, data.batches(d.graph))
            reference = MeanReference(d.graph, samples)
            found = measured(d, reference, rounded)
    if tries and open_rule:
        d, found = with_best_ranges(d, found, rounded)
        d, found = with_precise_layers(d, found, rounded)
    merit = Merit.of(reference, plan_of(d), found.errors)
    if tries and merit.doubtful:
        d = _doubted(d, merit, found, data, rounded)
    return replace(_without_captured(d), provenance={**d.provenance, "merit": merit.to_record()}, measured=found)


def _doubted(
    d: Decision, merit: Merit, found: MeasuredBiases, data: CalibrationData, rounded: RoundedWeights
) -> Decision:
    """Return a decision that loses more than rounding explains with weights that are fitted, or with a warning."""
    in_float = _with_either_in_float(d, found.reference, rounded)
    if in_float["activations"] < merit.sqnr_db + _FITTED_DB and not data.read_once:
        d, fitted = with_fitted_weights(d, found, data.batches(d.graph))
        merit = fitted or merit
    if not merit.doubtful:
        return d
    ratios = f"the outputs have {merit.sqnr_db:.1f} dB, {merit.expected_db:.1f} dB are expected"
    doubt = f"warning: rounding loses more than the bits explain: {ratios}{_where_lost(d, in_float)}"
    return replace(d, rewrites=(*d.rewrites, doubt))


def _with_either_in_float(d: Decision, reference: MeanReference, rounded: RoundedWeights) -> dict[str, float]:
    """Return the signal over noise of the outputs [dB] with activations in float, and with weights in float."""
    graph, plan = judged(d)
    weights = without_weight_rounding(plan)
    of_weights = {k: t.with_(stored=None) if t.role == "activation" else t for k, t in plan.tensors.items()}
    only = {"activations": replace(plan, tensors=of_weights), "weights": weights}
    move = biases_move(trial_settings(d)[0])
    return {k: measure_biases(reference, graph, p, rounded, move=move).errors.sqnr_db for k, p in only.items()}


def _where_lost(d: Decision, found: Mapping[str, float]) -> str:
    """Return what the outputs would have with either of activations and weights in float, and what helps."""
    most = max(found, key=lambda k: found[k])
    helps = "train `result.model`, or let rounding follow the data: Settings(rounding='learned')"
    if most == "activations":
        helps = "take a platform with more bits for them" + f", '{d.platform.wider}'" * bool(d.platform.wider)
        if not d.platform.wider and d.platform.float_unit:
            helps = "keep those in float that `result.sensitivity(data)` lists first"
    said = ", ".join(f"{x:.1f} dB with {k} in float" for k, x in found.items())
    return f" ({said}); most is lost in {most}: {helps}"


def _without_captured(d: Decision) -> Decision:
    """Return the decision without the captured network; edits start from its rules and its provenance."""
    start = d.calibrated
    if start is not None:
        start = replace(
            start, captured=None, rules=d.rules, precise=d.precise, provenance=d.provenance, samples=d.samples
        )
    return replace(d, captured=None, calibrated=start)


def with_best_ranges(d: Decision, before: MeasuredBiases, rounded: RoundedWeights) -> tuple[Decision, MeasuredBiases]:
    """Return the decision, with activations that are not clipped where the outputs then lose less, and its errors."""
    weights = {k: t for k, t in d.tensors.items() if t.role == "weight" and t.quantized}
    other = choose_scales(replace(d, rules=replace(d.rules, rule="no_clipping")), keep=weights)
    plain = before.reference.errors_of_batches(*judged(other), rounded)
    if OutputErrors.merged(plain).sqnr_db <= OutputErrors.merged(before.before).sqnr_db:
        return d, before  # biases make up for clipping, not for coarser steps
    after = measured(other, before.reference, rounded, plain)  # each with biases where these gain
    was, now = before.errors.sqnr_db, after.errors.sqnr_db
    if not now >= was + RANGE_GAIN_DB:
        return d, before
    samples = count_samples(before.reference.batches)
    why = f"on {samples} samples the outputs have {now:.1f} dB, {was:.1f} dB without"
    settings = {**d.provenance.get("settings", {}), "rule": "no_clipping"}
    notes, origin = (*d.rewrites, f"ranges without clipping taken: {why}"), {**d.provenance, "settings": settings}
    return replace(other, rewrites=notes, provenance=origin), after


def with_precise_layers(
    d: Decision, before: MeasuredBiases, rounded: RoundedWeights
) -> tuple[Decision, MeasuredBiases]:
    """Return the decision with the layers around the most sensitive tensors in float or at more bits, and its errors.

    Layers with few multiplications are tried one after the other while the loss is doubtful, then the first layers
    together: a logarithm behind a spectrum makes each error as large as all of them.
    """
    reference, whole = before.reference, sum(multiplications(d.graph, n) for n in d.graph.nodes)
    costs: dict[str, float] = {}  # layer -> its share of all multiplications
    for n in d.graph.nodes if whole else ():
        costs[n.display_name] = costs.get(n.display_name, 0.0) + multiplications(d.graph, n) / whole
    first = [name for name, share in zip(costs, accumulate(costs.values()), strict=True) if share <= _FRONT]
    front = Suggestion("", dict.fromkeys(first, "float"), None)
    for _ in range(_ROUNDS if whole else 0):
        plan, was = plan_of(d), before.errors.sqnr_db
        if not Merit.of(reference, plan, before.errors).doubtful:
            break
        for suggestion in (*suggestions(activation_losses(d, plan, reference.batches), d.graph), front):
            if all(item in d.precise for item in suggestion.overrides.items()):
                continue  # it is taken, or names no layer
            least = DOUBT_DB if suggestion == front else GAIN_DB
            if suggestion != front and sum(costs.get(name, 0.0) for name in suggestion.overrides) > _CHEAP:
                continue
            try:
                other = redecide(replace(d, precise=(*d.precise, *suggestion.overrides.items())), plan).checked()
            except ChipfitError:  # the platform, or an override of the user, excludes it
                continue
            trial = plan_of(other)
            if any(plan.quantized(o) and not trial.quantized(o) for o in d.graph.outputs):
                continue  # other readers of the file may count on integers
            after = measured(other, reference, rounded)
            if (now := after.errors.sqnr_db) >= was + least:
                samples = count_samples(reference.batches)
                note = f"{suggestion}: on {samples} samples the outputs have {now:.1f} dB, {was:.1f} dB without"
                d, before = replace(other, rewrites=(*d.rewrites, note)), after
                break
        else:
            break
    return d, before


def with_fitted_weights(d: Decision, found: MeasuredBiases, read: steps.Batches) -> tuple[Decision, Merit | None]:
    """Return the decision with a rounding method that fits weights to their inputs, where held-out samples gain; noted.

    The method is that of weights of few bits; it rounds the weights of the plan later, with all samples.

    Args:
        found: errors and biases of weights that are rounded to the nearest quantized value.
        read: batches of graph inputs.

    Returns:
        The decision, and the merit on held-out samples if they gain.
    """
    resolved, _ = trial_settings(d)
    method = default_method([1], name_of(d.rules.weight_rule))
    if d.settings.rounding is not None or method is None or not biases_move(resolved):
        return d, None
    fit, held = split_holdout(limit_samples(read, SAMPLES))
    if not held:
        return d, None
    reference, plan = Reference(d.graph, held), plan_of(d)
    settings = Settings(**{**d.settings.to_record(), "rounding": method})
    try:
        graph, rounded, stopped = steps.correct(d.graph, plan, d.stats, fit, partial(scales_of, d), settings)
    except ChipfitError:  # a setting of the user excludes it
        return d, None
    if stopped:
        raise KeyboardInterrupt
    was = reference.errors(found.applied(d.graph) if found.improves else d.graph, plan).sqnr_db
    merit = Merit.of(reference, rounded, reference.errors(graph, rounded))
    gains, note = _gain("rounding", method, merit, was)
    d = replace(d, rewrites=(*d.rewrites, note))
    if not gains:
        return d, None
    start = replace(d.calibrated, settings=settings) if d.calibrated is not None else None  # edits follow it, too
    return _with_recorded_settings(replace(d, settings=settings, calibrated=start)), merit


def _gain(name: str, value: Any, merit: Merit, before_db: float) -> tuple[bool, str]:
    """Return whether outputs gain enough by a setting, and the note of its trial."""
    gains = merit.sqnr_db >= before_db + GAIN_DB
    ratios = f"outputs have {merit.sqnr_db:.1f} dB, {before_db:.1f} dB without"
    return gains, f"{name}={value!r} {'taken' if gains else 'not taken'}: on {merit.samples} held-out samples {ratios}"


def _with_recorded_settings(d: Decision) -> Decision:
    """Return the decision with its settings in the provenance."""
    settings = {**d.provenance.get("settings", {}), "steps": d.settings.to_record()}
    return replace(d, provenance={**d.provenance, "settings": settings})


def found_biases(d: Decision, plan: Plan) -> MeasuredBiases | None:
    """Return the biases that the samples of a decision suggest for a plan; None without samples."""
    if d.samples is None:
        return None
    if d.measured is not None and d.measured.is_valid_for(d.graph, plan):
        return d.measured
    return measure_biases(MeanReference(d.graph, d.samples), d.graph, plan)


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
    network, best = d.graph, _merit(reference, d)
    for name, value, stage in open_repairs(d):
        changes = {**taken, name: value}
        if stage == "rewrite" and _same_weights(rewritten(d, changes).graph, rewritten(d, taken).graph):
            continue
        try:
            trial = attempt(d, changes, fit)
        except ChipfitError:  # the platform, or a setting of the user, excludes it
            continue
        if _same_weights(trial.graph, network):
            continue
        merit = _merit(reference, trial)
        gains, note = _gain(name, value, merit, best.sqnr_db)
        notes.append(note)
        if gains:
            taken, network, best = changes, trial.graph, merit
        if best.explained:
            break
    if taken:
        d = _with_recorded_settings(attempt(d, taken, read))
    return replace(d, rewrites=(*d.rewrites, *notes))


def _merit(reference: Reference, d: Decision) -> Merit:
    graph, plan = judged(d)
    return Merit.of(reference, plan, reference.errors(graph, plan))


def open_repairs(d: Decision) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings that may be tried: name, value and stage."""
    _, on_trial = trial_settings(d)
    for stage in _STAGES:
        for declared in (e.declares for e in ordered(stage) if e.declares.repair is not None):
            applies = declared.repair.applies is None or declared.repair.applies(d.graph, d.assignment)
            applies = applies and (declared.collects is None or bool(declared.collects(d.graph, {})))
            if applies and getattr(on_trial, declared.setting.name) == declared.setting.default:
                yield declared.setting.name, declared.repair.value, stage


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
