"""Rewrites that follow the statistics; those that are on trial stay only where held-out samples lose less."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from chipfit import steps
from chipfit.calibration.collect import Need, TensorStats, collect, padding_mask
from chipfit.decide.insertions import without_insertions
from chipfit.decide.overrides import Overrides
from chipfit.decide.statistics import needs
from chipfit.decision import (
    Decision,
    choose_scales,
    decide,
    plan_of,
    refuse_all_float,
    with_declared_statistics,
    with_whole,
)
from chipfit.graph.check import check
from chipfit.graph.ir import Graph
from chipfit.graph.removed import remember_removed
from chipfit.passes.composites import close_composites, composites_in, note_of_opened
from chipfit.passes.whole_composites import exact_kernels, whole_composites
from chipfit.plan.record import Plan
from chipfit.platform.match import dictated_scale
from chipfit.ranges import name_of
from chipfit.registry import ordered
from chipfit.rounding.compare import compare_plans, split_holdout, without_weight_rounding
from chipfit.rounding.fisher import first_samples
from chipfit.settings import Settings


def trial_settings(d: Decision, *others: Decision) -> tuple[Settings, Settings]:
    """Return the settings with the corrections that few bits require, and these settings with the rewrites to try.

    Args:
        others: decisions that may follow, any of which may call for a rewrite.
    """
    bits = [s.format.bits for s in d.assignment.tensors.values() if s.role == "weight"]
    resolved, _ = steps.resolve_defaults(d.settings, bits, name_of(d.rules.weight_rule), True)
    more = dict[str, Any]()
    for declared in (e.declares for e in ordered("adapt")):
        if declared.trial_value is not None and getattr(resolved, declared.setting.name) is None:
            values = [declared.trial_value(resolved, form.graph, form.assignment) for form in (d, *others)]
            more[declared.setting.name] = next((v for v in values if v is not None), None)
    return resolved, Settings(**resolved.to_record(), **{k: v for k, v in more.items() if v is not None})


def statistics_needed(d: Decision) -> tuple[dict[str, Need], Settings]:
    """Return what ranges, rewrites and corrections need, and the settings with the rewrites to try.

    Composites are opened now, and may be whole later: both forms count.
    """
    others = [with_whole(d, d.composites)] if d.composites else []
    _, on_trial = trial_settings(d, *others)
    needed = dict[str, Need]()
    for form in (*others, d):
        needed |= needs(form.assignment, d.rules)
    for form in (d, *others):
        needed = steps.statistics_needed(form.graph, needed, on_trial)
    return needed, on_trial


def with_statistics(d: Decision, batches: steps.Batches, needed: Mapping[str, Need]) -> Decision:
    """Run the float network over the data, and collect what is needed, see `statistics_needed`."""
    stats, mask = collect(d.graph, batches, tensors=needed), padding_mask(d.graph)
    padding = [f"calibration leaves out what '{mask}' says is padding"] if mask is not None else []
    return replace(d, stats=stats, rewrites=(*d.rewrites, *padding))


def choose_ranges(d: Decision, batches: steps.Batches) -> Decision:
    """Return a calibrated decision with rewrites and scales; it remembers what it starts from."""
    out = replace(adapt_and_scale(d, batches), calibrated=d)
    return replace(out, provenance={**out.provenance, "results": out.execution}) if out.execution else out


def decide_again(calibrated: Decision, overrides: Overrides | None, batches: steps.Batches | None) -> Decision | None:
    """Return what `quantize` decides with other overrides, from the statistics at hand; None if batches are missing.

    Args:
        calibrated: the decision with its statistics, before the rewrites that follow them.
        batches: of graph inputs, for further statistics and for comparisons on held-out samples, if they are here.

    Raises:
        NothingQuantizedError, PlanError, UnknownNameError, UnsupportedError, DataError: see `quantize`.
    """
    # overrides decide anew which composites stay whole
    graph = close_composites(without_insertions(calibrated.graph), calibrated.composites)
    d = replace(calibrated, graph=graph, composites={}, overrides=overrides, widths=(), stats={})
    d = refuse_all_float(decide(d))
    needed, on_trial = statistics_needed(d)
    have = {n: s for n, s in calibrated.stats.items() if n in needed and _provides(s, needed[n])}
    lacking = {n: need for n, need in needed.items() if n not in have}
    if batches is None and (lacking or steps.rereads_data(on_trial)):
        return None
    read = () if batches is None else batches
    have |= collect(d.graph, read, tensors=lacking) if lacking else {}
    stats = {n: have[n] if need.histogram else replace(have[n], histogram=None) for n, need in needed.items()}
    return choose_ranges(replace(d, stats=stats), read)


def _provides(seen: TensorStats, need: Need) -> bool:
    """Check whether statistics that were collected earlier include the needed ones."""
    channels = seen.channels is not None and not (need.squares and seen.channels.squares is None)
    return (seen.histogram is not None or not need.histogram) and (channels or need.channel_axis is None)


def adapt_and_scale(d: Decision, batches: steps.Batches) -> Decision:
    """Apply the rewrites that follow the statistics and choose scales; keep rewrites on trial only where they help."""
    d = _with_whole_composites(d)
    resolved, on_trial = trial_settings(d)
    untried = _adapted(d, d.settings, batches)
    if on_trial == resolved:
        return untried
    names = [k for k in on_trial.to_record() if k not in resolved.to_record()]
    rounded_later = any(s.name == "rounding" for s in steps.enabled(resolved, "correct"))
    return _better_on_held_out(d.graph, untried, _adapted(d, on_trial, batches), batches, names, rounded_later)


def _adapted(d: Decision, settings: Settings, batches: steps.Batches) -> Decision:
    """Apply the rewrites that some settings ask for, decide on formats again and choose scales."""
    start, notes = d, list[str]()
    d = replace(d, settings=settings)
    if steps.enabled(settings, "adapt"):
        d, notes = _rewritten(d, batches)
        d = decide(d)
    d, why = _with_execution(d)
    d = choose_scales(with_declared_statistics(d, batches))
    return replace(d, settings=start.settings, rewrites=(*d.rewrites, *notes, *why))


def _rewritten(d: Decision, batches: steps.Batches) -> tuple[Decision, list[str]]:
    """Apply the rewrites that follow the statistics; return their notes besides.

    Histograms that a rewrite makes stale are collected again from the first samples.
    """
    graph, stats, notes = d.graph, d.stats, list[str]()
    before = {n for n, s in stats.items() if s.histogram is None}
    for step in steps.enabled(d.settings, "adapt"):
        rewritten, stats, more = steps.take(step, d.settings, graph, d.assignment, stats, platform=d.platform)
        check(rewritten, blame=step.name)
        graph = remember_removed(graph, rewritten)
        notes += more
    if stale := {n: Need(weights=s.error_weights) for n, s in stats.items() if s.histogram is None and n not in before}:
        seen = collect(graph, first_samples(batches), tensors=stale)
        stats = {n: replace(s, histogram=seen[n].histogram) if n in stale else s for n, s in stats.items()}
    return replace(d, graph=graph, stats=stats), notes


def _with_whole_composites(d: Decision) -> Decision:
    """Close the opened composites that stay in float, by overrides or by cost, or have a kernel that is more exact.

    Notes are added about those that stay open and those in float.
    """
    if not d.composites:
        return d
    found = composites_in(d.graph)
    kept = {name for name in d.composites if not all(map(d.assignment.in_integers, found[name]))}  # by overrides
    given = d.graph, d.assignment, d.stats, d.settings.results
    scales = {name: dictated_scale(d.platform, d.graph, whole.node) for name, whole in d.composites.items()}
    dictated = {name: scale for name, scale in scales.items() if scale is not None and name not in kept}
    kept |= exact_kernels(*given, dictated)
    undecided = [] if d.integers_only else [name for name in d.composites if name not in kept | dictated.keys()]
    in_float = whole_composites(*given, undecided)
    notes = note_of_opened(d.graph, d.composites.keys() - kept - in_float) + [
        f"{n.op} '{n.display_name}' stays whole, in float: its parts would round away more than integers save"
        for name, (n, _) in d.composites.items()
        if name in in_float
    ]
    execution = {**d.execution, **dict.fromkeys(in_float, "whole")}
    d = replace(d, rewrites=(*d.rewrites, *notes), execution=execution)
    return decide(with_whole(d, kept | in_float)) if kept | in_float else d


def _with_execution(d: Decision) -> tuple[Decision, list[str]]:
    """Choose what kernels that can run in several ways do, and decide again; return the notes besides."""
    execution, why = dict[str, str](), list[str]()
    for step in steps.enabled(d.settings, "results") if d.assignment.modes or d.assignment.joins else ():
        more, notes = steps.take(step, d.settings, d.graph, d.assignment, d.stats, platform=d.platform)
        execution, why = execution | more, why + notes
    if not execution:
        return d, []
    other = decide(replace(d, execution={**d.execution, **execution}))
    stored = {name for name, s in other.assignment.tensors.items() if s.role == "activation"}
    if new := sorted(stored - {*d.stats, *d.assignment.tensors}):
        return d, [f"kernels output quantized values: float outputs would need statistics of '{new[0]}'"]
    return other, why


def _better_on_held_out(
    graph: Graph, before: Decision, after: Decision, batches: steps.Batches, names: Sequence[str], rounded_later: bool
) -> Decision:
    """Return the later of two decisions if its outputs on held-out samples are nearer to those of `graph`, with a note.

    Args:
        names: settings on trial.
        rounded_later: weights will be rounded by another method later, so that they are compared in float.
    """

    def plan(d: Decision) -> Plan:
        return without_weight_rounding(plan_of(d)) if rounded_later else plan_of(d)

    if all(after.graph.weights.get(k) is w for k, w in before.graph.weights.items()):
        return before
    held_out = split_holdout(list(batches))[1]
    fits, losses = False, "there are too few images to hold some out"
    if held_out:
        fits, losses = compare_plans(graph, held_out, (before.graph, plan(before)), (after.graph, plan(after)))
        losses += ", by rounded activations alone" if rounded_later else ""
    chosen, verdict = (after, "taken") if fits else (before, "not taken")
    return replace(chosen, rewrites=(*chosen.rewrites, f"{' and '.join(names)} {verdict}: {losses}"))
