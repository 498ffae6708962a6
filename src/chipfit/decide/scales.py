"""From statistics to scales: ranges by rule, ties and fixed outputs by the platform, then one legal projection."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.decide import legality
from chipfit.decide.assignment import Assignment, Slot
from chipfit.decide.biases import with_biases
from chipfit.decide.found import Found, Ranges
from chipfit.decide.ties import Numbers, fixed, tie_groups
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.ranges import Rule
from chipfit.ranges.qparams import QParams, from_min_max


def needs(assignment: Assignment, rule: Rule, z_threshold: float | None = None) -> dict[str, Need]:
    """What calibration has to collect: a histogram only where a range will be searched, or outliers found, in it."""
    dictated = fixed(assignment.bindings)
    return {
        s.name: Need(
            histogram=((s.rule or rule) != "no_clipping" or bool(s.z_threshold or z_threshold))
            and s.name not in dictated
        )
        for s in assignment.slots.values()
        if s.role == "activation" and s.range is None
    }


def choose(
    graph: Graph,
    assignment: Assignment,
    stats: Mapping[str, TensorStats],
    *,
    rule: Rule = "mse",
    weight_rule: Rule = "mse",
    z_threshold: float | None = None,
    known: Mapping[str, TensorPlan] | None = None,
) -> dict[str, TensorPlan]:
    """Scale and zero point of every tensor.

    Ranges are searched per tensor; tied tensors take the union of theirs, so that no member clips; outputs that
    the chip fixes are set; the rest is projected onto the platform's rules; biases follow from their inputs.

    Args:
        known: earlier decisions; a tensor whose format is the same keeps its numbers.

    Raises:
        PlanError: an activation has neither statistics nor an earlier decision.
        UnsupportedError: the rules of the platform contradict each other for this model.
    """
    groups = tie_groups(assignment.bindings)
    ranges = Ranges(graph, stats, rule, weight_rule, z_threshold, known or {}, fixed(assignment.bindings))
    grids = _grids(graph, assignment, stats, groups)
    found = {s.name: ranges.of(s, grids[s.name]) for s in assignment.slots.values() if s.role != "bias"}
    for group in groups:
        found |= _tied({name: found[name] for name in group if name in found}, ranges.dictated)
    found = _projected(found, assignment)

    maker = {n.name: n for n in graph.nodes}
    out = {name: f.plan(maker.get(f.slot.node), stats.get(name)) for name, f in found.items()}
    out = with_biases(graph, assignment, grids, out)
    return out | _floats(graph, {name: why for name, why in assignment.floats.items() if name not in out})


def _grids(
    graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats], groups: tuple[tuple[str, ...], ...]
) -> dict[str, Grid]:
    """The formats with their signedness decided from the data; tied tensors are signed as soon as one of them is."""
    grids = {s.name: _grid(s, stats.get(s.name), graph) for s in assignment.slots.values()}
    for group in groups:
        members = [name for name in group if name in grids]
        if any(grids[name].signed for name in members):
            grids |= {name: assignment.slots[name].format.grid(signed=True) for name in members}
    return grids


def _grid(slot: Slot, stats: TensorStats | None, graph: Graph) -> Grid:
    if slot.format.signed != "auto":
        return slot.format.grid()
    if slot.range is not None:
        low = slot.range[0]
    elif stats is not None:
        low = stats.low
    elif slot.name in graph.weights:
        low = float(graph.weights[slot.name].min())
    else:
        raise PlanError(f"Tensor '{slot.name}' was not calibrated", hint="quantize again with these overrides")
    return slot.format.grid(signed=low < 0)


def _tied(members: Mapping[str, Found], dictated: Mapping[str, Numbers]) -> dict[str, Found]:
    """The members with one scale and zero point, that covers the range of each; a dictated one is everybody's."""
    if len(members) < 2:
        return {}
    first = next(iter(members.values()))
    anchor = next((f for name, f in members.items() if name in dictated), None)
    if anchor is not None:
        shared = anchor.q
    elif all(_same(f.q, first.q) for f in members.values()):
        shared = first.q
    else:
        grid = next((f.grid for f in members.values() if f.grid.pot), first.grid)
        bounds = [f.q.bounds(f.full_grid) for f in members.values()]
        shared = from_min_max(min(low for low, _ in bounds), max(high for _, high in bounds), grid)
    names = {name: repr(name) for name in members}
    out = {}
    for name, f in members.items():
        others = ", ".join(text for other, text in names.items() if other != name)
        why = "" if name in dictated else f", tied with {others}"
        out[name] = f.moved(shared.scale, shared.zero_point, why)
    return out


def _same(a: QParams, b: QParams) -> bool:
    return torch.equal(a.scale, b.scale) and torch.equal(a.zero_point, b.zero_point)


def _projected(found: dict[str, Found], assignment: Assignment) -> dict[str, Found]:
    """Scales moved the least that makes every rule of the platform hold."""
    wanted = {
        name: legality.Var(scale=f.q.scale, zero_point=f.q.zero_point, grid=f.full_grid) for name, f in found.items()
    }
    legal = legality.project(wanted, assignment.bindings)
    return {
        name: f
        if _same(f.q, QParams(legal[name].scale, legal[name].zero_point))
        else f.moved(legal[name].scale, legal[name].zero_point, ", moved to satisfy the platform's rules")
        for name, f in found.items()
    }


def _floats(graph: Graph, reasons: Mapping[str, str]) -> dict[str, TensorPlan]:
    """Float tensors under the first node that reads or writes them."""
    first: dict[str, Node] = {}
    for n in graph.nodes:
        for name in (*n.inputs, *n.outputs):
            if name is not None:
                first.setdefault(name, n)
    out = {}
    for name, why in reasons.items():
        node, role = first.get(name), "weight" if graph.is_weight(name) else "activation"
        layer, op = (node.layer, node.op) if node else ("", "")
        out[name] = TensorPlan(name=name, role=role, why=why, layer=layer, op=op)
    return out
