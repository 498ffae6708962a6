"""Statistics that calibration has to collect: those that the range rules of the assignment declare."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from chipfit.calibration.collect import Need, TensorStats
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.constraints import dictated_qparams
from chipfit.graph.ir import Graph
from chipfit.plan.record import TensorPlan
from chipfit.ranges import Rule, needs_histogram, statistic_of
from chipfit.registry import lookup


def needs(assignment: Assignment, rule: Rule, z_threshold: float | None = None) -> dict[str, Need]:
    """Return what to collect of each activation; a histogram only if its rule or the removal of outliers reads one."""
    dictated = dictated_qparams(assignment.constraints)

    def searched(s: TensorSpec) -> bool:
        return needs_histogram(s.rule or rule) or bool(s.z_threshold or z_threshold)

    return {
        s.name: Need(histogram=searched(s) and s.name not in dictated)
        for s in assignment.tensors.values()
        if s.role == "activation" and s.range is None
    }


def declared(assignment: Assignment, rule: Rule, weight_rule: Rule) -> dict[str, set[str]]:
    """Return the registered statistics that range rules declare, each with the tensors whose rule does."""
    out = defaultdict[str, set[str]](set)
    defaults = {"weight": weight_rule, "activation": rule}
    for s in assignment.tensors.values():
        if s.role in defaults and s.range is None and (statistic := statistic_of(s.rule or defaults[s.role])):
            out[statistic].add(s.name)
    return dict(out)


def with_declared(
    graph: Graph,
    assignment: Assignment,
    stats: Mapping[str, TensorStats],
    batches: Iterable[Sequence[Tensor]],
    *,
    rule: Rule = "mse",
    weight_rule: Rule = "mse",
    seed: int = 0,
) -> dict[str, TensorStats]:
    """Return the statistics with the values that range rules declare, of the tensors that do not have theirs yet.

    Weights get an entry of their own.

    Args:
        batches: of graph inputs; read only where a rule declares a statistic.
    """
    out = dict(stats)
    for statistic, names in declared(assignment, rule, weight_rule).items():
        if lacking := {n for n in names if n not in stats or statistic not in stats[n].extras}:
            collect = lookup("statistic", statistic)
            for name, value in collect(graph, assignment.float_edges, lacking, stats, batches, seed).items():
                own = out.get(name) or TensorStats(name)
                out[name] = replace(own, extras={**own.extras, statistic: value})
    return out


def without(statistic: str) -> str:
    """Return what the origin of a tensor ends with if the statistic of its range rule is not known."""
    return f", without {statistic}"


def notes_of_missing(tensors: Mapping[str, TensorPlan]) -> list[str]:
    """Return one note for each statistic that range rules declare and that is not known of some tensors."""
    missing = defaultdict[str, list[str]](list)
    for t in tensors.values():
        if found := re.search(without(r"(\w+)"), t.origin):
            missing[found[1]].append(f"'{t.name}'")
    return [
        f"no {statistic} is known of {', '.join(names)}: their range rules ran without it"
        for statistic, names in missing.items()
    ]
