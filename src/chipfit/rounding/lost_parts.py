"""Warn of values that vanish on a grid that is made for larger neighbours: parts of a concatenation, and tied tensors.

A value may keep few levels and matter little, or all of an answer may be in it. The loss that its rounding alone
causes at the network's outputs decides.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import as_batch
from chipfit.decide.assignment import Assignment
from chipfit.decide.part_noise import parts_on_grid
from chipfit.graph.ir import Graph
from chipfit.graph.joins import makes_parts
from chipfit.graph.placement import inputs_on
from chipfit.plan.record import Plan, TensorPlan
from chipfit.ranges.qparams import QParams
from chipfit.rounding.compare import Reference, limit_samples

#: levels that a value must keep, or this share of its grid's if that has few
LEVELS, SHARE = 16, 1 / 16
#: loss at the outputs, by the rounding of one value, that is worth a warning: noise at 20 dB
LOSS = 0.01
#: samples on which it is measured
_SAMPLES = 8


def lost_part_warnings(graph: Graph, plan: Plan, assignment: Assignment, stats: Mapping[str, TensorStats]) -> list[str]:
    """Return a warning for each tensor whose grid leaves a part of it, or all of it, next to no levels.

    Args:
        graph: with an example, on which the loss is measured; without one there are no warnings.
    """
    suspects = dict(_suspects(graph, plan, assignment, stats)) if graph.example else {}
    few = limit_samples([as_batch(graph, inputs_on(graph.device, graph.example))], _SAMPLES) if suspects else []
    reference = Reference(graph, few) if suspects else None
    out, said = list[str](), set[str]()
    for name, (part, levels) in suspects.items():
        if part == name and name in said:
            continue
        alone = {k: t if k == name else t.with_(stored=None) for k, t in plan.tensors.items()}
        loss = reference.loss(graph, replace(plan, tensors=alone)) if reference is not None else 0.0
        if loss > LOSS:
            said.update(t for group in plan.ties if name in group for t in group)
            grid = "the grid that it shares with larger values" if part == name else f"the grid of '{name}'"
            out.append(
                f"warning: '{part}' keeps {levels:.2g} of {plan[name].grid.levels} levels on {grid}: this alone costs "
                f"{loss:.2g} of the outputs' power, each part by itself; keep what joins them in float, or return the "
                "parts apart"
            )
    return out


def _suspects(
    graph: Graph, plan: Plan, assignment: Assignment, stats: Mapping[str, TensorStats]
) -> Iterator[tuple[str, tuple[str, float]]]:
    """Yield tensors, joined ones first, each with its part of fewest levels, and these levels, if they are few."""
    producers = graph.producers()
    joins = (n for n in graph.nodes if makes_parts(graph, n, producers))
    joined = {n.output for n in joins if plan.nodes[n.name].exec != "float"}
    tied = {name for group in plan.ties for name in group}
    for name in sorted(tied | joined, key=lambda name: name not in joined):
        t = plan.tensors.get(name)
        if t is None or t.role != "activation" or t.stored is None or t.stored.scale.dim():
            continue
        enough = min(LEVELS, SHARE * t.stored.grid.levels)
        found = [(_levels(t), name)] if name in tied else []
        if name in joined:
            q = QParams(t.stored.scale, t.stored.zero_point)
            found += [(p.levels, p.name) for p in parts_on_grid(graph, assignment, stats, name, q, t.stored.grid)]
        levels, part = min(found, default=(math.inf, name))
        if levels < enough:
            yield name, (part, levels)


def _levels(t: TensorPlan) -> float:
    """Return the levels between the least and the greatest number that calibration has seen; infinite for no spread."""
    spread = (t.high or 0.0) - (t.low or 0.0)
    return spread / float(t.stored.scale) if t.stored is not None and spread > 0 else math.inf
