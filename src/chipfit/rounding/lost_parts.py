"""Warnings about tensors that share a grid with much larger ones: parts of a concatenation, and tied tensors.

Few levels alone do no harm if the outputs hardly depend on the tensor. The loss that its rounding alone causes at the
network's outputs decides.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import as_batch
from chipfit.decide.assignment import Assignment
from chipfit.decide.part_noise import parts_on_grid
from chipfit.graph.ir import Graph
from chipfit.graph.joins import Joins
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan, TensorPlan
from chipfit.ranges.qparams import QParams
from chipfit.rounding.compare import Reference, limit_samples

#: levels that are enough for a tensor: 16, or a sixteenth of its grid's if that has few
LEVELS, SHARE = 16, 1 / 16
#: loss at the outputs, by the rounding of one tensor, that is worth a warning: noise at 20 dB
LOSS = 0.01
#: number of samples on which the loss is measured
_SAMPLES = 8


def lost_part_warnings(graph: Graph, plan: Plan, assignment: Assignment, stats: Mapping[str, TensorStats]) -> list[str]:
    """Return a warning for each tensor whose grid leaves a part of it, or all of it, next to no levels.

    Args:
        graph: with an example, on which the loss is measured; without one there are no warnings.
    """
    suspects = _suspects(graph, plan, assignment, stats) if graph.example else []
    if not suspects:
        return []
    samples = limit_samples([as_batch(graph, inputs_on(graph.device, graph.example))], _SAMPLES)
    reference, warnings, reported = Reference(graph, samples), list[str](), set[str]()
    floats = {k: t.with_(stored=None) for k, t in plan.tensors.items()}
    left = [suspects]
    while left:
        group = [s for s in left.pop() if s[0] != s[1] or s[0] not in reported]
        if not group:
            continue
        tensors = {**floats, **{name: plan.tensors[name] for name, _, _ in group}}
        loss = reference.loss(graph, replace(plan, tensors=tensors))
        if loss > LOSS and len(group) > 1:  # otherwise no part does harm
            left += [group[len(group) // 2 :], group[: len(group) // 2]]
        elif loss > LOSS:
            ((name, part, levels),) = group
            reported.update(t for tie in plan.ties if name in tie for t in tie)
            grid = "the grid that it shares with larger values" if part == name else f"the grid of '{name}'"
            warnings.append(
                f"warning: '{part}' keeps {levels:.2g} of {plan[name].grid.levels} levels on {grid}: this alone costs "
                f"{loss:.2g} of the outputs' power, each part by itself; keep what joins them in float, or return the "
                "parts apart"
            )
    return warnings


def _suspects(
    graph: Graph, plan: Plan, assignment: Assignment, stats: Mapping[str, TensorStats]
) -> list[tuple[str, str, float]]:
    """Return (tensor, its part with the fewest levels, these levels) where they are few; concatenations come first.

    The part of a tensor that shares its grid by a tie is the tensor itself.
    """
    suspects = list[tuple[str, str, float]]()
    joins = Joins(graph)
    joined = {n.output for n in graph.nodes if joins.makes_parts(n) and plan.nodes[n.name].exec != "float"}
    tied = {name for group in plan.ties for name in group}
    for name in sorted(tied | joined, key=lambda name: name not in joined):
        t = plan.tensors.get(name)
        if t is None or t.role != "activation" or t.stored is None or t.stored.scale.dim():
            continue
        enough = min(LEVELS, SHARE * t.stored.grid.levels)
        found = [(_levels(t), name)] if name in tied else []
        if name in joined:
            q = QParams(t.stored.scale, t.stored.zero_point)
            found += [(p.levels, p.name) for p in parts_on_grid(joins, assignment, stats, name, q, t.stored.grid)]
        levels, part = min(found, default=(math.inf, name))
        if levels < enough:
            suspects.append((name, part, levels))
    return suspects


def _levels(t: TensorPlan) -> float:
    """Return the levels between the least and the greatest value in calibration; infinite if the value is constant."""
    spread = (t.high or 0.0) - (t.low or 0.0)
    return spread / float(t.stored.scale) if t.stored is not None and spread > 0 else math.inf
