"""The optional steps of `quantize`: rewrites before formats are decided, rewrites that follow the statistics, corrections of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.correction.activation_bias import correct_activation_bias
from chipfit.correction.bias import correct_bias, with_means
from chipfit.correction.give_biases import give_biases
from chipfit.correction.second_moment import correct_second_moment
from chipfit.decide import scales
from chipfit.decide.formats import Assignment
from chipfit.decide.legality import Binding
from chipfit.graph.check import check
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear
from chipfit.passes import Pass, run_passes
from chipfit.passes.channels_last import channels_last
from chipfit.passes.collapse_linear import collapse_linear
from chipfit.passes.collapse_residual import collapse_residual
from chipfit.passes.concat_groups import concat_groups
from chipfit.passes.equalize import equalize
from chipfit.passes.fold_batch_norm import fold_batch_norm
from chipfit.passes.own_weights import own_weights
from chipfit.passes.relu_bound import relu_bound_to_power_of_two
from chipfit.passes.shift_negative import shift_negative
from chipfit.passes.softmax_shift import softmax_shift
from chipfit.passes.unshare_biases import unshare_biases
from chipfit.plan.record import Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.platform.schema import Rule as PlatformRule
from chipfit.ranges import Rule
from chipfit.settings import Settings

Stats = dict[str, TensorStats]
#: makes the scales of a graph again; tensors given as known keep theirs
Choose = Callable[[Graph, Mapping[str, TensorPlan]], dict[str, TensorPlan]]


def rewrite(graph: Graph, platform: Platform, settings: Settings) -> tuple[Graph, list[str]]:
    """The rewrites that need no data; returns the graph and one note per rewrite or refusal."""

    def give_zero_biases(g: Graph) -> tuple[Graph, list[str]]:
        return give_biases(g, platform)

    optional: list[tuple[bool, Pass]] = [
        (settings.collapse_linear, collapse_linear),
        (settings.collapse_residual, collapse_residual),
        (settings.relu_bound, relu_bound_to_power_of_two),
        (settings.equalize, equalize),
        (settings.corrects, give_zero_biases),
    ]
    passes = [fold_batch_norm, unshare_biases, *(p for wanted, p in optional if wanted), channels_last]
    rewritten, notes = run_passes(graph, passes)
    return own_weights(rewritten, graph.weights), notes


def tie_concats(graph: Graph, assignment: Assignment) -> None:
    """Let every concatenation, its result and its inputs share one grid: it then moves codes and rounds nothing."""
    tie = (PlatformRule(tie=("ins", "out")),)
    for result, *inputs in concat_groups(graph, assignment):
        assignment.bindings.append(Binding(op="Concat", rules=tie, slots={"ins": tuple(inputs), "out": (result,)}))


def needs(
    graph: Graph, assignment: Assignment, settings: Settings, rule: Rule, z_threshold: float | None
) -> dict[str, Need]:
    """What calibration has to collect for ranges and corrections."""
    out = scales.needs(assignment, rule, z_threshold)
    if settings.correct_activation_bias is not None:
        out = {name: replace(n, histogram=True) for name, n in out.items()}
    return with_means(graph, out) if settings.correct_bias else out


def adapt(graph: Graph, assignment: Assignment, stats: Stats, settings: Settings) -> tuple[Graph, Stats, list[str]]:
    """The rewrites that follow the statistics; where the graph is another one afterwards, formats are to be decided again."""
    notes: list[str] = []
    before = graph
    if settings.shift_negative is not None:
        graph, stats, said = shift_negative(graph, assignment, stats, ratio=settings.shift_negative)
        notes += said
    if settings.softmax_shift:
        graph, stats, said = softmax_shift(graph, assignment, stats)
        notes += said
    if graph is not before:
        check(graph, blame="the rewrites that follow the statistics")
    return graph, stats, notes


def correct(
    graph: Graph,
    plan: Plan,
    stats: Stats,
    batches: Iterable[Sequence[torch.Tensor]],
    choose: Choose,
    settings: Settings,
) -> tuple[Graph, Plan]:
    """Give back in weights and biases what rounding took on average.

    Args:
        stats: of the float graph, with means where biases are corrected.
        batches: read again for the second moment only.
        choose: makes the scales of changed weights.
    """
    notes: list[str] = []
    uncorrected = graph
    if settings.correct_second_moment:
        graph, notes = correct_second_moment(graph, plan, batches)
        known = {k: t for k, t in plan.tensors.items() if t.role == "activation" and t.quantized}
        plan = replace(plan, tensors=choose(graph, known))
    if settings.correct_bias:  # the second moment has the means in it already
        done = {n.name for n in graph.nodes if is_linear(graph, n) and _other(graph, uncorrected, n.inputs[1] or "")}
        graph, said = correct_bias(graph, plan, stats, leave=done)
        notes += said
    if settings.correct_activation_bias is not None:
        graph, said = correct_activation_bias(graph, plan, stats, threshold=settings.correct_activation_bias)
        notes += said
    return graph, replace(plan, rewrites=(*plan.rewrites, *notes))


def _other(graph: Graph, before: Graph, name: str) -> bool:
    return graph.weights[name] is not before.weights[name]
