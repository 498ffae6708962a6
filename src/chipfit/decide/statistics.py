"""The range rules of tensors, and the statistics that calibration has to collect for them."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from chipfit.calibration.collect import Need
from chipfit.decide.assignment import Assignment
from chipfit.decide.constraints import dictated_qparams
from chipfit.plan.record import TensorPlan
from chipfit.ranges import Rule, needs_histogram, statistic_of


@dataclass(frozen=True, kw_only=True)
class RangeRules:
    """The range rules of tensors without a rule of their own among the overrides."""

    rule: Rule = "mse"  #: range rule of activations
    weight_rule: Rule = "mse"  #: range rule of weights
    z_threshold: float | None = None  #: outliers that ranges of activations ignore [standard deviations]


DEFAULT_RULES = RangeRules()


def needs(assignment: Assignment, rules: RangeRules = DEFAULT_RULES) -> dict[str, Need]:
    """Return what to collect of each activation; a histogram only if its rule or the removal of outliers reads one.

    A dictated scale needs none, unless the kernel may run in float for it.
    """
    dictated = dictated_qparams(assignment.constraints).keys() - {*assignment.joins.values()}
    out = {}
    for s in assignment.tensors.values():
        if s.role == "activation" and s.range is None:
            searched = needs_histogram(s.rule or rules.rule) or bool(s.z_threshold or rules.z_threshold)
            out[s.name] = Need(histogram=searched and s.name not in dictated, bits=s.format.bits)
    return out


def declared(assignment: Assignment, rules: RangeRules) -> dict[str, set[str]]:
    """Return the registered statistics that range rules declare, each with the tensors whose rule does."""
    out = defaultdict[str, set[str]](set)
    defaults = {"weight": rules.weight_rule, "activation": rules.rule}
    for s in assignment.tensors.values():
        if s.role in defaults and s.range is None and (statistic := statistic_of(s.rule or defaults[s.role])):
            out[statistic].add(s.name)
    return dict(out)


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
