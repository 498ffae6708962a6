"""Scale and zero point of one tensor by itself: decided earlier, dictated, of a known range, or by a range rule."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import TensorSpec
from chipfit.decide.constraints import FixedQParams
from chipfit.decide.statistics import without
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.ranges import Rule, choose, name_of, needs_histogram, statistic_of
from chipfit.ranges.qparams import QParams


def entry(
    slot: TensorSpec, node: Node | None, stored: Stored, origin: str, seen: TensorStats | None = None
) -> TensorPlan:
    """A quantized tensor of the plan; node: that makes or reads it, None for an input of the model."""
    layer, op = (node.layer, node.op) if node else ("", "Input")
    low, high = (seen.low, seen.high) if seen else (None, None)
    return TensorPlan(
        name=slot.name, role=slot.role, layer=layer, op=op, stored=stored, origin=origin, low=low, high=high
    )


def stored_as(slot: TensorSpec, grid: Grid, q: QParams) -> Stored:
    """A tensor on its grid, with the table that was fitted to it, if one was."""
    grid = grid if q.table is None else replace(grid, table=q.table)
    return Stored(format=slot.format_name, grid=grid, scale=q.scale, zero_point=q.zero_point, axis=slot.axis)


@dataclass(frozen=True, slots=True)
class QParamsSource:
    """Where the numbers of tensors come from."""

    graph: Graph
    stats: Mapping[str, TensorStats]
    dictated: Mapping[str, FixedQParams]  #: by the platform
    known: Mapping[str, TensorPlan]  #: earlier decisions
    rule: Rule  #: of activations
    weight_rule: Rule
    z_threshold: float | None

    def qparams_of(self, s: TensorSpec, grid: Grid) -> tuple[Stored, str]:
        """How a tensor is stored by itself, and where that comes from."""
        earlier = self.known.get(s.name)
        if earlier is not None and earlier.stored is not None and _fits(earlier.stored, s, grid):
            return earlier.stored, earlier.origin.partition(", tied")[0]
        q, origin = self._new(s, grid)
        return stored_as(s, grid, q), origin

    def _new(self, s: TensorSpec, grid: Grid) -> tuple[QParams, str]:
        if s.name in self.dictated:
            scale, zero = self.dictated[s.name]
            numbers = torch.tensor(scale, dtype=torch.float32), torch.tensor(zero, dtype=torch.int32)
            return QParams(*numbers), "fixed by the platform"
        if s.role == "weight":
            rule = s.rule or (self.weight_rule if s.axis is not None or grid.symmetric else "no_clipping")
            w = self.graph.weights[s.name].detach()
            q = choose(w, grid, rule=rule, axis=s.axis, block=s.block, extras=self._extras(s.name))
            found = "look-up table fitted to the weights" if grid.kind == "lut" else f"{name_of(rule)} over the weights"
            return q, found + self._missing(s, rule)
        if s.range is not None:
            given = TensorStats(s.name, low=float(s.range[0]), high=float(s.range[1]), batches=1)
            return choose(given, grid, rule="no_clipping", expand=False), "known beforehand"
        if s.name not in self.stats:
            hint = "quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`"
            raise PlanError(f"Tensor '{s.name}' was not calibrated as a quantized one", hint=hint)
        rule, z, seen = s.rule or self.rule, s.z_threshold or self.z_threshold, self.stats[s.name]
        if not needs_histogram(rule) and not z:
            seen = replace(seen, histogram=None)  # which may be of a part of the values
        q = choose(seen, grid, rule=rule, z_threshold=z)
        return q, f"{name_of(rule)} over {seen.batches} batches" + self._missing(s, rule)

    def _extras(self, name: str) -> Mapping[str, Any]:
        return self.stats[name].extras if name in self.stats else {}

    def _missing(self, s: TensorSpec, rule: Rule) -> str:
        statistic = statistic_of(rule)
        return without(statistic) if statistic and statistic not in self._extras(s.name) else ""


def _fits(earlier: Stored, s: TensorSpec, grid: Grid) -> bool:
    """An earlier decision still holds: the user asks nothing else of the tensor, and at most a fitted table differs."""
    same = (earlier.format, earlier.axis, replace(earlier.grid, table=grid.table)) == (s.format_name, s.axis, grid)
    return same and (s.rule, s.z_threshold, s.range) == (None, None, None)
