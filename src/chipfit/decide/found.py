"""Scale and zero point of one tensor by itself: an earlier decision, dictated numbers, a known range, or a range rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.decide.assignment import Slot
from chipfit.decide.ties import Numbers
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph, Node
from chipfit.plan.record import TensorPlan
from chipfit.quantizers.grids import Grid
from chipfit.quantizers.stored import Stored
from chipfit.ranges import Rule, choose, name_of
from chipfit.ranges.qparams import QParams


@dataclass(frozen=True, slots=True)
class Found:
    """Where the grid of one tensor lies, and where that came from."""

    slot: Slot
    grid: Grid
    q: QParams
    origin: str

    @property
    def full_grid(self) -> Grid:
        """The grid with the table that was fitted to the tensor, if one was."""
        return self.grid if self.q.table is None else replace(self.grid, table=self.q.table)

    def moved(self, scale: torch.Tensor, zero_point: torch.Tensor, why: str) -> Found:
        """The same grid elsewhere."""
        return replace(self, q=replace(self.q, scale=scale, zero_point=zero_point), origin=self.origin + why)

    def plan(self, node: Node | None, seen: TensorStats | None) -> TensorPlan:
        s, q = self.slot, self.q
        return TensorPlan(
            name=s.name,
            role=s.role,
            layer=node.layer if node else "",
            op=node.op if node else "Input",
            stored=Stored(
                format=s.format_name, grid=self.full_grid, scale=q.scale, zero_point=q.zero_point, axis=s.axis
            ),
            origin=self.origin,
            low=seen.low if seen else None,
            high=seen.high if seen else None,
        )


@dataclass(frozen=True, slots=True)
class Ranges:
    """Where the numbers of single tensors come from."""

    graph: Graph
    stats: Mapping[str, TensorStats]
    rule: Rule
    weight_rule: Rule
    z_threshold: float | None
    known: Mapping[str, TensorPlan]
    dictated: Mapping[str, Numbers]

    def of(self, s: Slot, grid: Grid) -> Found:
        """One tensor by itself: an earlier decision, a dictated grid, a known range, or one that a rule finds."""
        return self._earlier(s, grid) or Found(s, grid, *self._new(s, grid))

    def _earlier(self, s: Slot, grid: Grid) -> Found | None:
        """An earlier decision, where it still fits; only a fitted table may differ."""
        kept = self.known.get(s.name)
        if kept is None or kept.stored is None or (s.rule, s.z_threshold, s.range) != (None, None, None):
            return None
        old = kept.stored
        if (old.format, old.axis, replace(old.grid, table=grid.table)) != (s.format_name, s.axis, grid):
            return None
        table = old.grid.table if old.grid.kind == "lut" else None
        return Found(s, grid, QParams(old.scale, old.zero_point, table), kept.origin.partition(", tied")[0])

    def _new(self, s: Slot, grid: Grid) -> tuple[QParams, str]:
        """Numbers and where they come from."""
        if s.name in self.dictated:
            scale, zero = self.dictated[s.name]
            numbers = torch.tensor(scale, dtype=torch.float32), torch.tensor(zero, dtype=torch.int32)
            return QParams(*numbers), "fixed by the platform"
        if s.role == "weight":
            rule = s.rule or (self.weight_rule if s.axis is not None or grid.symmetric else "no_clipping")
            q = choose(self.graph.weights[s.name].detach(), grid, rule=rule, axis=s.axis)
            lut = grid.kind == "lut"
            return q, "look-up table fitted to the weights" if lut else f"{name_of(rule)} over the weights"
        if s.range is not None:
            given = TensorStats(s.name, low=float(s.range[0]), high=float(s.range[1]), batches=1)
            return choose(given, grid, rule="no_clipping", expand=False), "known beforehand"
        if s.name not in self.stats:
            raise PlanError(
                f"Tensor '{s.name}' was not calibrated as a quantized one",
                hint="quantize again with these overrides: `chipfit.quantize(model, data, overrides=...)`",
            )
        rule, z, seen = s.rule or self.rule, s.z_threshold or self.z_threshold, self.stats[s.name]
        if rule == "no_clipping" and not z:
            seen = replace(seen, histogram=None)  # which may be of a part of the values
        return choose(seen, grid, rule=rule, z_threshold=z), f"{name_of(rule)} over {seen.batches} batches"
