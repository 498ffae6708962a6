"""From statistics to scales: ranges by rule, ties and fixed outputs by the platform, then one legal projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.decide import legality
from chipfit.decide.formats import Assignment, Slot
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.ranges import Rule, name_of
from chipfit.ranges import choose as choose_range
from chipfit.ranges.qparams import QParams, from_min_max

#: least scale ever given: a constant or dead tensor still gets a legal grid
TINY = 2.0**-24
#: an int32 bias leaves this much of the accumulator to the products
_BIAS_SHARE = 0.5


def needs(assignment: Assignment, rule: Rule, z_threshold: float | None = None) -> dict[str, Need]:
    """What calibration has to collect: a histogram only where a range will be searched, or outliers found, in it."""
    fixed = legality.fixed(assignment.bindings)
    return {
        s.name: Need(
            histogram=((s.rule or rule) != "no_clipping" or bool(s.z_threshold or z_threshold)) and s.name not in fixed
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
    layers = {n.name: n for n in graph.nodes}
    fixed = legality.fixed(assignment.bindings)
    grids = {s.name: _grid(s, stats.get(s.name), graph) for s in assignment.slots.values()}
    for members in legality.tie_groups(assignment.bindings):  # one storage type: signed as soon as one of them is
        if any(grids[m].signed for m in members if m in grids):
            grids.update({m: assignment.slots[m].format.grid(signed=True) for m in members if m in grids})
    found: dict[str, QParams] = {}
    origin: dict[str, str] = {}

    for s in assignment.slots.values():
        if s.role == "bias":
            continue
        kept = (known or {}).get(s.name) if (s.rule, s.z_threshold, s.range) == (None, None, None) else None
        if kept is not None and kept.grid is not None and _same(kept, s, grids[s.name]):
            assert kept.scale is not None and kept.zero_point is not None  # it has a grid
            table = kept.grid.table if kept.grid.kind == "lut" else None
            found[s.name], origin[s.name] = (
                QParams(kept.scale, kept.zero_point, table),
                kept.origin.partition(", tied")[0],
            )
        elif s.name in fixed:
            scale, zero = fixed[s.name]
            found[s.name] = QParams(torch.tensor(scale, dtype=torch.float32), torch.tensor(zero, dtype=torch.int32))
            origin[s.name] = "fixed by the platform"
        elif s.role == "weight":
            w = graph.weights[s.name].detach()
            wanted = s.rule or (weight_rule if s.axis is not None or grids[s.name].symmetric else "no_clipping")
            found[s.name] = choose_range(w, grids[s.name], rule=wanted, axis=s.axis)
            origin[s.name] = f"{name_of(wanted)} over the weights"
            if grids[s.name].kind == "lut":
                origin[s.name] = "look-up table fitted to the weights"
        elif s.range is not None:
            known_range = TensorStats(s.name, low=float(s.range[0]), high=float(s.range[1]), batches=1)
            found[s.name], origin[s.name] = (
                choose_range(known_range, grids[s.name], rule="no_clipping", expand=False),
                "known beforehand",
            )
        elif s.name not in stats:
            raise PlanError(
                f"Tensor '{s.name}' was not calibrated as a quantized one",
                hint="quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`",
            )
        else:
            wanted, z = s.rule or rule, s.z_threshold or z_threshold
            seen = (
                stats[s.name] if wanted != "no_clipping" or z else replace(stats[s.name], histogram=None)
            )  # which may be of a part
            found[s.name] = choose_range(seen, grids[s.name], rule=wanted, z_threshold=z)
            origin[s.name] = f"{name_of(wanted)} over {stats[s.name].batches} batches"

    grids.update({name: replace(grids[name], table=q.table) for name, q in found.items() if q.table is not None})
    for members in legality.tie_groups(assignment.bindings):
        _tie(sorted(m for m in members if m in found), found, grids, fixed, origin)
    _project(assignment, grids, found, origin)

    out: dict[str, TensorPlan] = {}
    for s in assignment.slots.values():
        if s.role != "bias":
            out[s.name] = _entry(graph, layers, s, grids[s.name], found[s.name], origin[s.name], stats.get(s.name))
    _biases(graph, assignment, grids, out, layers)
    for name, why in assignment.floats.items():
        if name not in out:
            node = next((n for n in graph.nodes if name in n.outputs or name in n.inputs), None)
            role = "weight" if graph.is_weight(name) else "activation"
            out[name] = TensorPlan(
                name=name, role=role, why=why, layer=node.layer if node else "", op=node.op if node else ""
            )
    return out


def _same(kept: TensorPlan, slot: Slot, grid: Grid) -> bool:
    """An earlier decision still fits: only a fitted table may differ."""
    assert kept.grid is not None  # asked for quantized tensors only
    return (kept.format, kept.axis, replace(kept.grid, table=grid.table)) == (slot.format_name, slot.axis, grid)


def _grid(slot: Slot, stats: TensorStats | None, graph: Graph) -> Grid:
    """The format with its signedness decided from the data."""
    if slot.format.signed != "auto":
        return slot.format.grid()
    if slot.range is not None:
        return slot.format.grid(signed=slot.range[0] < 0)
    if stats is None and slot.name not in graph.weights:
        raise PlanError(f"Tensor '{slot.name}' was not calibrated", hint="quantize again with these overrides")
    low = stats.low if stats is not None else float(graph.weights[slot.name].min())
    return slot.format.grid(signed=low < 0)


def _tie(
    members: list[str],
    found: dict[str, QParams],
    grids: Mapping[str, Grid],
    fixed: Mapping[str, Any],
    origin: dict[str, str],
) -> None:
    """Give all members one scale and zero point that covers the range of each."""
    if len(members) < 2:
        return
    anchor = next((m for m in members if m in fixed), None)
    if anchor is not None:
        shared = found[anchor]
    else:
        grid = next((grids[m] for m in members if grids[m].pot), grids[members[0]])
        bounds = [found[m].bounds(grids[m]) for m in members]
        low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
        same = all(
            torch.equal(found[m].scale, found[members[0]].scale)
            and torch.equal(found[m].zero_point, found[members[0]].zero_point)
            for m in members
        )
        shared = found[members[0]] if same else from_min_max(low, high, grid)
    for m in members:
        if m not in fixed:
            origin[m] += f", tied with {', '.join(repr(o) for o in members if o != m)}"
        found[m] = shared


def _project(
    assignment: Assignment, grids: Mapping[str, Grid], found: dict[str, QParams], origin: dict[str, str]
) -> None:
    """Move scales the least that makes every rule of the platform hold."""
    solution = legality.project(
        {name: legality.Var(scale=q.scale, zero_point=q.zero_point, grid=grids[name]) for name, q in found.items()},
        assignment.bindings,
    )
    for name, moved in solution.items():
        if not torch.equal(moved.scale, found[name].scale) or not torch.equal(moved.zero_point, found[name].zero_point):
            found[name] = QParams(moved.scale, moved.zero_point)
            origin[name] += ", moved to satisfy the platform's rules"


def _entry(
    graph: Graph, layers: Mapping[str, Any], slot: Slot, grid: Grid, q: QParams, origin: str, stats: TensorStats | None
) -> TensorPlan:
    node = layers.get(slot.node)
    return TensorPlan(
        name=slot.name,
        role=slot.role,
        layer=node.layer if node else "",
        op=node.op if node else "Input",
        stored=Stored(format=slot.format_name, grid=grid, scale=q.scale, zero_point=q.zero_point, axis=slot.axis),
        origin=origin,
        low=stats.low if stats is not None else None,
        high=stats.high if stats is not None else None,
    )


def _biases(
    graph: Graph,
    assignment: Assignment,
    grids: Mapping[str, Grid],
    out: dict[str, TensorPlan],
    layers: Mapping[str, Any],
) -> None:
    """Biases at s_in * s_w where the chip adds them in the accumulator, else on a range of their own.

    Where a bias would not fit at s_in * s_w, its channel's weight scale grows until it does.
    """
    stored = [(b, name) for b in assignment.bindings for name in b.slots.get("b", ())]
    accumulated = [(b, name) for b, name in stored if {"in0", "w"} <= set(b.slots) and _in_accumulator(b, grids[name])]
    for b, name in accumulated:
        w, s_in = out[b.slots["w"][0]], out[b.slots["in0"][0]].scale
        assert s_in is not None and w.scale is not None
        need = graph.weights[name].detach().abs() / (
            s_in * grids[name].qmax * _BIAS_SHARE
        )  # [C_out]: least weight scale that stores the bias
        need = need if w.scale.shape == need.shape else need.max()
        if w.grid is not None and w.grid.pot:
            need = torch.exp2(torch.ceil(torch.log2(need)))
        if bool((w.scale < need).any()):
            scale = torch.maximum(w.scale, need.to(torch.float32))
            out[w.name] = w.with_(scale=scale, origin=w.origin + ", enlarged to store the bias")
    added = {name for _, name in accumulated}
    for b, name in stored:  # after every weight scale is final: a tied weight may have grown for another reader's bias
        slot, grid = assignment.slots[name], grids[name]
        if name in added:
            s_in, s_w = out[b.slots["in0"][0]].scale, out[b.slots["w"][0]].scale
            assert s_in is not None and s_w is not None
            scale = (s_in * s_w).to(torch.float32)
            if slot.axis is not None and scale.dim() == 0:
                scale = scale.expand(graph.weights[name].numel()).contiguous()
            q, origin = QParams(scale, torch.zeros_like(scale, dtype=torch.int32)), "input scale x weight scale"
        else:
            q, origin = (
                choose_range(graph.weights[name].detach(), grid, rule="no_clipping", axis=slot.axis),
                "no_clipping over the bias",
            )
        out[name] = _entry(graph, layers, slot, grid, q, origin, None)


def _in_accumulator(binding: legality.Binding, grid: Grid) -> bool:
    """The bias has the scale of the products: the platform says so, or says nothing and the bias is wide enough to be added to them."""
    said = [r for r in binding.rules if r.mono is not None and "b" in r.mono and r.hard]
    return any(r.eq is not None for r in said) or (not said and grid.bits >= 16)
