"""Scale and zero point of single tensors: from an earlier plan, dictated, from a known range or from a range rule.

A bias has input scale x weight scale if the chip adds it in the accumulator, else a range of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Assignment, TensorSpec
from chipfit.decide.constraints import Constraint, FixedQParams
from chipfit.decide.statistics import without
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import Plan, TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored, scales_per_output
from chipfit.ranges import Rule, choose, name_of, needs_histogram, statistic_of
from chipfit.ranges.qparams import QParams

#: an int32 bias leaves this share of the accumulator to the products
_SHARE = 0.5


def tensor_plan(
    spec: TensorSpec, node: Node | None, stored: Stored, origin: str, seen: TensorStats | None = None
) -> TensorPlan:
    """Return the plan's entry of a quantized tensor.

    Args:
        node: that makes or reads the tensor; None for an input of the model.
        seen: statistics of an activation.
    """
    layer, op = (node.layer, node.op) if node else ("", "Input")
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
    rule: Rule  #: of activations
    weight_rule: Rule
    z_threshold: float | None

    def qparams_of(self, s: TensorSpec, grid: Grid) -> tuple[Stored, str]:
        """Return how a tensor is stored if no other tensor counts, and the origin of its numbers."""
        earlier = self.known.get(s.name)
        if earlier is not None and earlier.stored is not None and _still_holds(earlier.stored, s, grid):
            return earlier.stored, earlier.origin.partition(", tied")[0]
        q, origin = self._new(s, grid)
        return as_stored(s, grid, q), origin

    def _new(self, s: TensorSpec, grid: Grid) -> tuple[QParams, str]:
        if s.name in self.dictated:
            scale, zero = self.dictated[s.name]
            numbers = torch.tensor(scale, dtype=torch.float32), torch.tensor(zero, dtype=torch.int32)
            return QParams(*numbers), "fixed by the platform"
        if s.role == "weight":
            rule = s.rule or (self.weight_rule if s.axis is not None or grid.symmetric else "no_clipping")
            w = self.graph.weights[s.name].detach()
            q = choose(w, grid, rule=rule, axis=s.axis, block=s.block, extras=self._extras(s.name))
            origin = (
                "look-up table fitted to the weights" if grid.kind == "lut" else f"{name_of(rule)} over the weights"
            )
            return q, origin + self._missing(s, rule)
        if s.range is not None:
            given = TensorStats(s.name, low=float(s.range[0]), high=float(s.range[1]), batches=1)
            return choose(given, grid, rule="no_clipping", expand=False), "known beforehand"
        if s.name not in self.stats:
            hint = "quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`"
            raise PlanError(f"Tensor '{s.name}' was not calibrated as a quantized one", hint=hint)
        rule, z, seen = s.rule or self.rule, s.z_threshold or self.z_threshold, self.stats[s.name]
        if not needs_histogram(rule) and not z:
            seen = replace(seen, histogram=None)  # it may hold only a part of the values
        q = choose(seen, grid, rule=rule, z_threshold=z)
        return q, f"{name_of(rule)} over {seen.batches} batches" + self._missing(s, rule)

    def _extras(self, name: str) -> Mapping[str, Any]:
        return self.stats[name].extras if name in self.stats else {}

    def _missing(self, s: TensorSpec, rule: Rule) -> str:
        statistic = statistic_of(rule)
        return without(statistic) if statistic and statistic not in self._extras(s.name) else ""


def _still_holds(earlier: Stored, s: TensorSpec, grid: Grid) -> bool:
    """Return whether an earlier decision has this format, but for a fitted table, and no override changes it."""
    same = (earlier.format, earlier.axis, replace(earlier.grid, table=grid.table)) == (s.format_name, s.axis, grid)
    return same and (s.rule, s.z_threshold, s.range) == (None, None, None)


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
    biases = [(c, name, _in_accumulator(c, plan, grids[name])) for c in assignment.constraints for name in c.of("b")]
    for c, name, accumulated in biases:
        if accumulated:
            _make_room(plan, c, graph.weights[name].detach(), grids[name])
    for c, name, accumulated in biases:
        spec, values = assignment.tensors[name], graph.weights[name].detach()
        if accumulated:
            [x], [w] = c.of("in0"), c.of("w")
            scale = (plan[x].scale * plan[w].scale).to(torch.float32)
            if spec.axis is not None or scale.dim():
                scale = scales_per_output(scale.reshape(-1), values.numel())
            q, origin = QParams(scale, torch.zeros_like(scale, dtype=torch.int32)), "input scale x weight scale"
        else:
            q, origin = choose(values, grids[name], rule="no_clipping", axis=spec.axis), "no_clipping over the bias"
        plan.tensors[name] = tensor_plan(spec, nodes.get(spec.node), as_stored(spec, grids[name], q), origin)
    return plan.tensors


def _in_accumulator(constraint: Constraint, plan: Plan, grid: Grid) -> bool:
    """Return whether a bias has the scale of the products.

    The platform has a rule that says so, or no rule for it and the bias is wide enough to be added to the products.
    """
    if not {"in0", "w"} <= set(constraint.slots) or any(plan[w].grid.per == "block" for w in constraint.of("w")):
        return False
    products = [r for r in constraint.rules if r.scale_product is not None and "b" in r.scale_product and r.hard]
    return any(r.eq is not None for r in products) or (not products and grid.bits >= 16)


def _make_room(plan: Plan, constraint: Constraint, bias: torch.Tensor, grid: Grid) -> None:
    """Enlarge the weight scales of the channels whose bias would not fit its format."""
    [x], [name] = constraint.of("in0"), constraint.of("w")
    s_in, w = plan[x].scale, plan[name]
    least = bias.abs() / (s_in * grid.qmax * _SHARE)  # [C_out]
    least = least.view(-1, w.scale.numel()).amax(0).view(w.scale.shape)
    if w.grid.pot:
        least = torch.exp2(torch.ceil(torch.log2(least)))
    if bool((w.scale < least).any()):
        old = plan.tensors[name]
        scale = torch.maximum(w.scale, least.to(torch.float32))
        plan.tensors[name] = old.with_(scale=scale, origin=old.origin + ", enlarged to store the bias")
