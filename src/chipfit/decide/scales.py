"""Choose scales from statistics: ranges by rule, ties and dictated scales by the platform, then one legal projection.

A bias has input scale x weight scale if the chip adds it in the accumulator, else a range of its own.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.constraints import (
    Constraint,
    FixedQParams,
    bounded,
    copies,
    dictated_qparams,
    hard_rules,
    tie_groups,
)
from chipfit.decide.legality import ProductBound, product_bounds, project
from chipfit.decide.statistics import DEFAULT_RULES, RangeRules, without
from chipfit.errors import DataError, PlanError, UnsupportedError
from chipfit.graph.extremes import is_finite
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import OPS
from chipfit.plan.record import Plan, Role, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.scale_bounds import clip_to_bounds, code_sums, scale_growth
from chipfit.quantizers.stored import Stored, scales_per_output
from chipfit.ranges import Rule, name_of, needs_histogram, statistic_of
from chipfit.ranges import choose as choose_qparams
from chipfit.ranges.qparams import GREATEST_SCALE, QParams, from_min_max

#: an int32 bias leaves this share of the accumulator to the products
_SHARE = 0.5
#: tensors that the origin of a tied scale names
_NAMED = 8
#: origin of numbers that the platform's rules determine
_FIXED, _MOVED, _ENLARGED = (
    "fixed by the platform",
    ", moved to satisfy the platform's rules",
    ", enlarged to store the bias",
)
#: how a tensor is stored, and the origin of its numbers
WithOrigin = tuple[Stored, str]


def choose(
    graph: Graph,
    assignment: Assignment,
    stats: Mapping[str, TensorStats],
    rules: RangeRules = DEFAULT_RULES,
    known: Mapping[str, TensorPlan] | None = None,
) -> dict[str, TensorPlan]:
    """Choose scale and zero point of every tensor.

    Ranges are searched per tensor; tied tensors get the union of theirs, so that no member clips; scales that the
    chip dictates are set; the rest is projected onto the platform's rules; biases follow from their inputs.

    Args:
        known: earlier decisions; a tensor whose format is the same keeps its numbers.

    Raises:
        PlanError: an activation has neither statistics nor an earlier decision.
        DataError: the numbers of a tensor are too large for kernels.
        UnsupportedError: the rules of the platform contradict each other for this model.
    """
    groups, dictated = tie_groups(assignment.constraints), dictated_qparams(assignment.constraints)
    grids = _grids(graph, assignment, stats, groups)
    sources = QParamsSource(graph, stats, dictated, known or {}, rules)
    found = {s.name: sources.qparams_of(s, grids[s.name]) for s in assignment.tensors.values() if s.role != "bias"}
    saturated, copied = bounded(graph, groups), copies(graph, *groups)
    for group in groups:
        members = {name: found[name] for name in group if name in found}
        chosen = {name for name in members if _is_overridden(assignment.tensors[name])}
        zeros = {name for name in members if assignment.tensors[name].range is None and _is_zero(name, graph, stats)}
        found |= _share_qparams(members, dictated.keys(), zeros | (copied - chosen if chosen else saturated))
    wanted = limit_weight_sums(graph, assignment.constraints, {name: stored for name, (stored, _) in found.items()})
    legal = project(wanted, assignment.constraints)
    _check_moderate(legal)
    limit_weight_sums(graph, assignment.constraints, legal, final=True)

    nodes = {n.name: n for n in graph.nodes}
    out = {}
    for name, (stored, origin) in found.items():
        spec, moved = assignment.tensors[name], not legal[name].same_numbers(stored)
        origin += _MOVED if moved else ""
        seen = stats.get(name) if spec.role == "activation" else None
        out[name] = tensor_plan(spec, nodes.get(spec.node), legal[name], origin, seen)
    out = with_biases(graph, assignment, grids, out)
    return out | _float_entries(graph, {name: why for name, why in assignment.floats.items() if name not in out})


def is_ruled(t: TensorPlan) -> bool:
    """Check whether the platform's rules, and not the range of a tensor, have determined its scale."""
    return any(how in t.origin for how in (_FIXED, _MOVED, _ENLARGED))


def _grids(
    graph: Graph, assignment: Assignment, stats: Mapping[str, TensorStats], groups: Sequence[Sequence[str]]
) -> dict[str, Grid]:
    """Return the quantization grids, with signs decided from the data; of tensors of one type all are signed or none.

    Raises:
        UnsupportedError: the platform requires one storage type of tensors whose formats have different ones.
    """
    specs = assignment.tensors
    grids = {s.name: _grid(s, stats.get(s.name), graph) for s in specs.values()}
    same_type = [(c, [t for t in names if t in grids]) for c in assignment.constraints for names in c.same_type]
    of_one_sign = [[t for t in group if t in grids] for group in groups] + [names for _, names in same_type]
    unsigned = {name for name, s in specs.items() if s.format.signed == "auto" and not grids[name].signed}
    while more := {t for g in of_one_sign if any(grids[t].signed for t in g) for t in g if t in unsigned}:
        grids |= {t: specs[t].grid(signed=True) for t in more}
        unsigned -= more
    for c, names in same_type:
        types = {t: f"{'s' if grids[t].signed else 'u'}{grids[t].bits}" for t in names}
        if len(set(types.values())) > 1:
            got = ", ".join(f"'{t}' {kind}" for t, kind in types.items())
            hint = "give them the same bits with overrides, or keep the operator in float"
            raise UnsupportedError(f"{c.op} stores these tensors in one type on this platform", got=got, hint=hint)
    return grids


def _grid(spec: TensorSpec, stats: TensorStats | None, graph: Graph) -> Grid:
    if spec.format.signed != "auto":
        return spec.grid()
    if spec.range is not None:
        low = spec.range[0]
    elif spec.name in graph.weights:
        low = float(graph.weights[spec.name].min())
    elif stats is not None:
        low = stats.low
    else:
        raise PlanError(f"Tensor '{spec.name}' was not calibrated", hint="quantize again with these overrides")
    return spec.grid(signed=low < 0)


def _is_zero(name: str, graph: Graph, stats: Mapping[str, TensorStats]) -> bool:
    """Return whether a tensor is 0 throughout, so that the range found for it means nothing."""
    if name in graph.weights:
        return not graph.weights[name].any()
    return name in stats and stats[name].low == stats[name].high == 0


def limit_weight_sums(
    graph: Graph, constraints: Iterable[Constraint], stored: Mapping[str, Stored], *, final: bool = False
) -> dict[str, Stored]:
    """Return all tensors; weights whose sum of |quantized value| in a channel exceeds `wsum_max` get larger scales.

    Raises:
        UnsupportedError: a sum is too large and scales are `final`: other rules have made it so again.
    """
    out = dict(stored)
    rules = [(c.op, r.wsum_max, c.of("w")) for c, r in hard_rules(constraints) if r.wsum_max]
    for op, most, name in [(op, most, t) for op, most, names in rules for t in names if t in stored]:
        axis, values = OPS[op].weight_axis, graph.weights[name]
        while (factor := scale_growth(out[name], values, most, axis)) is not None:
            if final:
                what = f"The quantized values of '{name}' sum to more than {most:g}"
                what += ", and other rules forbid a larger scale"
                raise UnsupportedError(what, got=f"{float(code_sums(out[name], values, axis).max()):g}")
            out[name] = out[name].with_(scale=(out[name].scale * factor).to(out[name].scale.dtype))
    return out


def _check_moderate(scales: Mapping[str, Stored]) -> None:
    """Raise a DataError if numbers are so large that kernels, which multiply scales as float32, would overflow."""
    for name, stored in scales.items():
        if float(stored.scale.max()) > GREATEST_SCALE:
            got = f"up to about {stored.grid.levels * float(stored.scale.max()):.1e}"
            allowed = f"a scale of at most {GREATEST_SCALE:.1e}"
            hint = "are the data scaled as in training? Numbers like 1e35 often mean bytes read as the wrong type"
            what = f"The numbers of '{name}' are too large for any kernel"
            raise DataError(what, got=got, allowed=allowed, hint=hint)


def _share_qparams(
    members: Mapping[str, WithOrigin], dictated: Collection[str], ignored: set[str]
) -> dict[str, WithOrigin]:
    """Return tied tensors with one scale and zero point: the dictated ones, or those that cover the range of each.

    Args:
        dictated: tensors whose numbers the platform dictates.
        ignored: members whose ranges do not count, unless all are ignored.
    """
    if len(members) < 2:
        return {}
    stored = {name: s for name, (s, _) in members.items()}
    anchor = next((s for name, s in stored.items() if name in dictated), None)
    ranges = [s for name, s in stored.items() if name not in ignored] or list(stored.values())
    first = anchor or ranges[0]
    scale, zero_point = first.scale, first.zero_point
    if anchor is None and not all(_equal(s, first) for s in ranges):
        grid = next((s.grid for s in stored.values() if s.grid.pot), first.grid)
        bounds = [QParams(s.scale, s.zero_point).bounds(s.grid) for s in ranges]
        lows, highs = zip(*bounds, strict=True)
        q = from_min_max(min(lows), max(highs), grid)
        scale, zero_point = q.scale, q.zero_point
    out = {}
    for name, (s, origin) in members.items():
        if name not in dictated:
            origin += f", tied with {_other_members(name, members)}"
        out[name] = s.with_(scale=scale, zero_point=zero_point), origin
    return out


def _other_members(name: str, members: Mapping[str, Any]) -> str:
    """Return the first other members of a tie, and the number of those that are not named."""
    first = [repr(m) for m in itertools.islice(members, _NAMED + 1) if m != name][:_NAMED]
    more = len(members) - 1 - len(first)
    return ", ".join(first) + (f" and {more:,} more" if more else "")


def _equal(a: Stored, b: Stored) -> bool:
    return torch.equal(a.scale, b.scale) and torch.equal(a.zero_point, b.zero_point)


def _float_entries(graph: Graph, reasons: Mapping[str, str]) -> dict[str, TensorPlan]:
    """Return the plan's entries of float tensors, each under the first node that reads or writes it."""
    first: dict[str | None, Node] = {}
    for n in graph.nodes:
        for name in (*n.inputs, *n.outputs):
            first.setdefault(name, n)
    out = {}
    for name, why in reasons.items():
        node = first.get(name)
        role: Role = "weight" if graph.is_weight(name) else "activation"
        layer, op = (node.display_name, node.op) if node else ("", "")
        out[name] = TensorPlan(name=name, role=role, why=why, layer=layer, op=op)
    return out


def tensor_plan(
    spec: TensorSpec, node: Node | None, stored: Stored, origin: str, seen: TensorStats | None = None
) -> TensorPlan:
    """Return the plan's entry of a quantized tensor.

    Args:
        node: the one that computes or reads the tensor; None for an input of the model.
        seen: statistics of an activation.
    """
    layer, op = (node.display_name, node.op) if node else ("", "Input")
    low, high = (seen.low, seen.high) if seen else (None, None)
    return TensorPlan(
        name=spec.name, role=spec.role, layer=layer, op=op, stored=stored, origin=origin, low=low, high=high
    )


def as_stored(spec: TensorSpec, grid: Grid, q: QParams) -> Stored:
    """Return a tensor on its grid, with the table that was fitted to it, if one was."""
    grid = grid if q.table is None else replace(grid, table=q.table)
    return Stored(format=spec.format_name, grid=grid, scale=q.scale, zero_point=q.zero_point, axis=spec.axis)


@dataclass(frozen=True, slots=True)
class QParamsSource:
    """The sources of scales and zero points, in the order in which they are tried."""

    graph: Graph
    stats: Mapping[str, TensorStats]
    dictated: Mapping[str, FixedQParams]  #: by the platform
    known: Mapping[str, TensorPlan]  #: earlier decisions
    rules: RangeRules  #: of tensors without one of their own

    def qparams_of(self, s: TensorSpec, grid: Grid) -> tuple[Stored, str]:
        """Return how a tensor is stored before other tensors are considered, and the origin of its numbers."""
        earlier = self.known.get(s.name)
        if earlier is not None and earlier.stored is not None and _keeps_numbers(earlier.stored, s, grid):
            return earlier.stored, earlier.origin.partition(", tied")[0]
        q, origin = self._choose(s, grid)
        return as_stored(s, grid, q), origin

    def _choose(self, s: TensorSpec, grid: Grid) -> tuple[QParams, str]:
        """Return scale and zero point of a tensor without an earlier decision, and their origin."""
        if s.name in self.dictated:
            scale, zero = self.dictated[s.name]
            numbers = torch.tensor(scale, dtype=torch.float32), torch.tensor(zero, dtype=torch.int32)
            return QParams(*numbers), _FIXED
        if s.role == "weight":
            rule = s.rule or (self.rules.weight_rule if s.axis is not None or grid.symmetric else "no_clipping")
            w = self._without_infinity(s.name, self.graph.weights[s.name].detach())
            parts = w if s.gates is None else w.reshape(s.gates, -1)
            q = choose_qparams(parts, grid, rule=rule, axis=s.axis, block=s.block, extras=self._extras(s.name))
            if s.gates is not None:
                size = len(w) // s.gates
                q = QParams(q.scale.repeat_interleave(size), q.zero_point.repeat_interleave(size))
            how = "look-up table fitted to" if grid.kind == "lut" else f"{name_of(rule)} over"
            return q, f"{how} the weights" + self._missing(s, rule)
        if s.range is not None:
            return qparams_of_range(s.range, grid), "known beforehand"
        if s.name not in self.stats:
            hint = "quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`"
            raise PlanError(f"Tensor '{s.name}' was not calibrated as a quantized one", hint=hint)
        rule, z, seen = s.rule or self.rules.rule, s.z_threshold or self.rules.z_threshold, self.stats[s.name]
        if not needs_histogram(rule) and not z:
            seen = replace(seen, histogram=None)  # it may hold only a part of the values
        q = choose_qparams(seen, grid, rule=rule, z_threshold=z)
        return q, f"{name_of(rule)} over {seen.batches} batches" + self._missing(s, rule)

    def _without_infinity(self, name: str, w: torch.Tensor) -> torch.Tensor:
        """Return a constant whose infinite bounds (of a Max or Min) are the extremes of the value that it bounds."""
        if is_finite(w):
            return w
        bounded = [self.stats[i] for n in self.graph.users()[name] for i in n.inputs if i and i in self.stats]
        low, high = min((b.low for b in bounded), default=0.0), max((b.high for b in bounded), default=0.0)
        return w.nan_to_num(math.nan, posinf=high, neginf=low)

    def _extras(self, name: str) -> Mapping[str, Any]:
        """Return the statistics of a weight that its range rule needs, such as the importance of each number."""
        return self.stats[name].extras if name in self.stats else {}

    def _missing(self, s: TensorSpec, rule: Rule) -> str:
        """Return the end of an origin, which says that a statistic of the rule was not there."""
        statistic = statistic_of(rule)
        return without(statistic) if statistic and statistic not in self._extras(s.name) else ""


def qparams_of_range(ends: tuple[float, float], grid: Grid) -> QParams:
    """Return the parameters of a grid for a range that an override gives; a symmetric threshold is its larger end."""
    given = TensorStats("", low=float(ends[0]), high=float(ends[1]), batches=1)
    return choose_qparams(given, grid, rule="no_clipping", expand=False)


def _keeps_numbers(earlier: Stored, s: TensorSpec, grid: Grid) -> bool:
    """Check whether an earlier decision has this format, but for a fitted table, and no override changes it."""
    same = (earlier.format, earlier.axis, replace(earlier.grid, table=grid.table)) == (s.format_name, s.axis, grid)
    return same and not _is_overridden(s)


def _is_overridden(s: TensorSpec) -> bool:
    """Check whether an override gives the range of a tensor, or the rule for it."""
    return (s.rule, s.z_threshold, s.range) != (None, None, None)


def with_biases(
    graph: Graph, assignment: Assignment, grids: Mapping[str, Grid], tensors: Mapping[str, TensorPlan]
) -> dict[str, TensorPlan]:
    """Return all tensors with their biases, and with weight scales that leave room for them.

    A bias b at the scale s_in s_w is stored as b / (s_in s_w), which its format holds up to qmax. If that is too
    small for a channel, its weight scale grows: s_w >= |b| / (s_in qmax / 2). Every weight scale is final before any
    bias is stored, because operators with biases of their own may share a weight. Weights in blocks have no single
    scale: their sums are added up block by block, and the bias, with a range of its own, to the total.

    Args:
        tensors: activations and weights.
    """
    plan = Plan(tensors=dict(tensors))
    nodes = {n.name: n for n in graph.nodes}
    biases = [(c, name, _has_product_scale(c, plan, grids[name])) for c in assignment.constraints for name in c.of("b")]
    for c, name, accumulated in biases:
        if accumulated:
            [w] = c.of("w")
            _make_room(plan, c, graph.weights[name].detach(), grids[name], assignment.tensors[w].gates)
    for c, name, accumulated in biases:
        spec, values = assignment.tensors[name], graph.weights[name].detach()
        if accumulated:
            [x], [w] = c.of("in0"), c.of("w")
            scale = (plan[x].scale * plan[w].scale).to(torch.float32)
            if spec.axis is not None or scale.dim():
                scale = scales_per_output(scale.reshape(-1), values.numel())
            q, origin = QParams(scale, torch.zeros_like(scale, dtype=torch.int32)), "input scale x weight scale"
        else:
            q = choose_qparams(values, grids[name], rule="no_clipping", axis=spec.axis)
            bounds = product_bounds([c for c, other, _ in biases if other == name], grids)
            bounds = [b for b in bounds if name in dict(b.terms)]
            q = replace(q, scale=_in_bounds(name, q.scale, grids[name], bounds, plan))
            origin = "no_clipping over the bias"
        plan.tensors[name] = tensor_plan(spec, nodes.get(spec.node), as_stored(spec, grids[name], q), origin)
    return plan.tensors


def _has_product_scale(constraint: Constraint, plan: Plan, grid: Grid) -> bool:
    """Check whether a bias has the scale of the products, input scale x weight scale.

    Either a rule of the platform requires it, or there is no rule and the bias is wide enough for the accumulator.
    """
    if not {"in0", "w"} <= set(constraint.slots) or any(plan[w].grid.per == "block" for w in constraint.of("w")):
        return False
    products = [r for r in constraint.rules if r.scale_product is not None and "b" in r.scale_product and r.hard]
    return any(r.eq is not None for r in products) or (not products and grid.bits >= 16)


def _in_bounds(name: str, scale: torch.Tensor, grid: Grid, bounds: Sequence[ProductBound], plan: Plan) -> torch.Tensor:
    """Return the scale of a bias that the platform's bounds allow, nearest to the wanted one."""
    log = {t: plan[t].scale.double().log2() for b in bounds for t, _ in b.terms if t != name}
    log[name] = scale.double().log2()
    moved = clip_to_bounds(torch, bounds, log, [name], {name} if grid.pot else ())[name]
    return scale if moved.equal(log[name]) else moved.exp2().to(scale)


def _make_room(plan: Plan, constraint: Constraint, bias: torch.Tensor, grid: Grid, gates: int | None) -> None:
    """Enlarge the weight scales of the channels whose bias would not fit its format, and of the rest of a gate."""
    [x], [name] = constraint.of("in0"), constraint.of("w")
    s_in, w = plan[x].scale, plan[name]
    least = bias.abs() / (s_in * grid.qmax * _SHARE)  # [C_out]
    least = least.view(-1, w.scale.numel()).amax(0).view(w.scale.shape)
    if gates is not None:
        least = least.view(gates, -1).amax(1).repeat_interleave(len(least) // gates)
    if w.grid.pot:
        least = torch.exp2(torch.ceil(torch.log2(least)))
    if bool((w.scale < least).any()):
        old = plan.tensors[name]
        scale = torch.maximum(w.scale, least.to(torch.float32))
        plan.tensors[name] = old.with_(scale=scale, origin=old.origin + _ENLARGED)
