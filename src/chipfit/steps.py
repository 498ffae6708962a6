"""Run the registered steps of `quantize`, passes and corrections: those that the settings enable, in their order."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.decide.assignment import Assignment
from chipfit.errors import ConfigError, Interrupted, interruption_note
from chipfit.graph.check import check
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear
from chipfit.graph.removed import remember_removed
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.match import IntegerOperators, names_operator, runs_in_integers
from chipfit.platform.schema import Platform
from chipfit.registry import OFF, Entry, ordered
from chipfit.settings import Settings

Stats = Mapping[str, TensorStats]
Batches = Iterable[Sequence[torch.Tensor]]
#: chooses the scales of a graph; tensors given as `known` keep theirs
Choose = Callable[..., dict[str, TensorPlan]]


def enabled(settings: Settings, stage: str) -> list[Entry]:
    """Return the steps of a stage that the settings enable, in order.

    Raises:
        ConfigError: two of them exclude each other.
    """

    def wanted(e: Entry) -> bool:
        declared = e.declares
        if declared.if_any_in:
            return bool(enabled(settings, declared.if_any_in))
        value = True if declared.setting is None else getattr(settings, declared.setting.name)
        return value not in (None, OFF) and value is not False  # a ratio of 0 asks for the step

    out = [e for e in ordered(stage) if wanted(e)]
    for e in out:
        if other := next((o for o in out if o.name in e.declares.excludes), None):
            names = [x.declares.setting.name for x in (e, other)]
            hint = f"leave '{names[1]}' out: '{names[0]}' does its work"
            raise ConfigError(f"The settings '{names[0]}' and '{names[1]}' cannot be combined", hint=hint)
    return out


def resolve_defaults(settings: Settings, bits: Collection[int], rule: str, again: bool) -> tuple[Settings, list[str]]:
    """Return the settings with the corrections that weights of few bits need, and notes.

    Args:
        settings: a correction that they turn on or off stays so.
        bits: bits of each weight.
        rule: range rule of weights.
        again: the data can be read again.
    """
    notes: list[str] = []
    for step in ordered("correct"):
        declared = step.declares
        is_open = declared.default_value is not None and getattr(settings, declared.setting.name) is None
        value = declared.default_value(bits, rule) if is_open else None
        if value is None or any(other.name in declared.excludes for other in enabled(settings, "correct")):
            continue
        if "batches" in declared.needs and not again:
            what = f"warning: {declared.setting.name}='{value}' would keep more accuracy, but reads the data twice: "
            notes.append(what + "quantize again with these overrides")
        else:
            settings = Settings(**settings.to_record(), **{declared.setting.name: value})
    return settings, notes


def take(step: Entry, settings: Settings, /, *given: Any, **context: Any) -> Any:
    """Call a step with the arguments of its stage, the context that it needs, and the values of its settings."""
    declared = step.declares
    keywords = {name: context[name] for name in declared.needs}
    for setting in (declared.setting, *declared.options):
        if setting is not None and setting.argument:
            keywords[setting.argument] = getattr(settings, setting.name)
    return step.thing(*given, **keywords)


def rewrite(graph: Graph, platform: Platform, settings: Settings) -> tuple[Graph, list[str]]:
    """Apply the rewrites that need no data.

    Returns:
        The graph, which shares no weights with the user's model, and one note per rewrite or refusal.
    """
    captured, notes = graph, list(graph.notes)
    tests = {"listed": partial(names_operator, platform), "in_integers": partial(runs_in_integers, platform)}
    context = {"platform": platform, "integer_operators": IntegerOperators(platform), **tests}
    for step in enabled(settings, "rewrite"):
        rewritten, more = take(step, settings, graph, **context)
        check(rewritten, blame=step.name)
        graph = remember_removed(graph, rewritten)
        notes += more
    return _with_own_weights(graph, captured), notes


def _with_own_weights(graph: Graph, captured: Graph) -> Graph:
    """Return a graph with copies of all weights that share memory with a captured one; tied names stay tied.

    Later training of the user's model then does not change them.
    """
    graph, copies = graph.copy(), dict[int, torch.Tensor]()
    storages = {t.untyped_storage().data_ptr() for t in captured.weights.values()}
    for name, t in graph.weights.items():
        if t.untyped_storage().data_ptr() in storages:
            graph.weights[name] = copies.setdefault(id(t), t.detach().clone(memory_format=torch.preserve_format))
    return graph


def adjust_formats(
    graph: Graph, assignment: Assignment, platform: Platform, settings: Settings
) -> tuple[Assignment, list[str]]:
    """Let the steps of the stage "formats" change the assignment; return it with their notes."""
    notes: list[str] = []
    for step in enabled(settings, "formats"):
        assignment, more = take(step, settings, graph, assignment, platform=platform)
        notes += more
    return assignment, notes


def statistics_needed(graph: Graph, found: Mapping[str, Need], settings: Settings) -> dict[str, Need]:
    """Return what calibration has to collect: for ranges, and for the steps after it.

    Args:
        found: what ranges need.
    """
    out = dict(found)
    for stage in ("adapt", "results", "correct"):
        for step in enabled(settings, stage):
            out = step.declares.collects(graph, out) if step.declares.collects else out
    return out


def rereads_data(settings: Settings) -> bool:
    """Return whether an enabled step reads the data again."""
    asked = enabled(settings, "adapt") + enabled(settings, "correct")
    return any(s.declares.recalibrates or "batches" in s.declares.needs for s in asked)


def correct(
    graph: Graph, plan: Plan, stats: Stats, batches: Batches, choose: Choose, settings: Settings
) -> tuple[Graph, Plan, str]:
    """Round weights, and correct weights and biases for what rounding changes.

    Args:
        stats: of the float graph, with what `statistics_needed` lists.
        batches: of graph inputs, for steps that read them.
        choose: chooses the scales of changed weights.

    Returns:
        Graph, plan, and the note of a step that Ctrl-C has ended ("" where none was).
    """
    original = graph
    chosen = enabled(settings, "correct")
    for step in chosen:
        notes: list[str] = []
        linear = [n for n in graph.nodes if is_linear(graph, n)]
        changed = {n.name for n in linear if graph.weights[n.weight] is not original.weights[n.weight]}
        context = {"stats": stats, "batches": batches, "changed": changed, "choose": choose, "original": original}
        context["settings"] = settings
        try:
            if step.declares.chooses_scales:
                graph, plan, notes = take(step, settings, graph, plan, **context)
            else:
                new, notes = take(step, settings, graph, plan, **context)
                if any(new.weights[n.weight] is not graph.weights[n.weight] for n in new.nodes if is_linear(new, n)):
                    known = {k: t for k, t in plan.tensors.items() if t.role == "activation" and t.quantized}
                    plan = replace(plan, tensors=choose(new, known=known))
                graph = new
        except KeyboardInterrupt:
            left = ", ".join(s.name for s in chosen[chosen.index(step) :])
            notes = [f"{Interrupted.NOTE}: not done: {left}"]
        plan = replace(plan, rewrites=(*plan.rewrites, *notes))
        if interruption_note(notes):
            return graph, plan, interruption_note(notes)
    return graph, plan, ""
