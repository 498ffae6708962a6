"""The Report: how well it went, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.export.files import write_atomically
from chipfit.graph.ir import Graph
from chipfit.plan import Plan, TensorPlan
from chipfit.platform.schema import Platform

if TYPE_CHECKING:
    from chipfit.calibration.collect import TensorStats
    from chipfit.verify import Verification

#: bars of a histogram in the report
BARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One operator of the model."""

    node: str
    layer: str
    op: str
    exec: str  #: "int", "float", "follow" or "table"
    group: str
    format: str  #: of its result; "float" when it is not stored in codes
    scale: float | None
    zero_point: int | None
    low: float | None  #: range seen in calibration
    high: float | None
    clip_low: float | None  #: range that the grid holds
    clip_high: float | None
    sqnr_db: float | None  #: of its result on the device; None before `verify`
    differing: int | None  #: integers that differ between simulator and device
    why: str  #: why it runs in float
    bars: tuple[float, ...] = ()  #: share of values in equal bins over [-reach, reach)
    reach: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a person asks after quantizing a model."""

    platform: str
    title: str
    deploy: tuple[str, ...]
    float_bytes: int
    quantized_bytes: int
    parameters: int
    quantized_tensors: int
    float_tensors: int
    layers: tuple[LayerRow, ...]
    timings: Mapping[str, float]
    notes: tuple[str, ...]
    verification: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def floats(self) -> dict[str, list[str]]:
        """Reason -> layers that stay in float for it."""
        out: dict[str, list[str]] = {}
        for r in self.layers:
            if r.exec == "float":
                out.setdefault(r.why or "not said", []).append(r.layer or r.node)
        return out

    @property
    def integer_share(self) -> float:
        """Share of operators that run in integers or move codes."""
        return sum(r.exec != "float" for r in self.layers) / max(1, len(self.layers))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def save(self, path: str | Path) -> Path:
        """Write the report: a self-contained page for `.html`, data for `.json`.

        Raises:
            ExportError: the file cannot be written; nothing is left behind.
        """
        path = Path(path)
        if path.suffix == ".json":
            return write_atomically(path, json.dumps(self.to_dict(), indent=1, default=str).encode())
        from chipfit.report.html import page

        return write_atomically(path, page(self).encode())

    def show(self) -> None:
        """Print the report to the terminal."""
        from chipfit.report.terminal import show

        show(self)


def build(
    graph: Graph, plan: Plan, platform: Platform, *, stats: Mapping[str, TensorStats] | None = None,
    timings: Mapping[str, float] | None = None, verification: Verification | None = None,
) -> Report:  # fmt: skip
    """Gather a Report from what the other steps left behind."""
    stats = stats or {}
    checked = {r.tensor: r for r in verification.rows} if verification else {}
    inner = {g_node for g in plan.groups for g_node in g[:-1]}
    rows = []
    for n in graph.nodes:
        decided = plan.nodes.get(n.name)
        t = plan.tensors.get(n.output)
        seen, row = stats.get(n.output), checked.get(n.output)
        clip = _clip(t)
        bars, reach = _bars(seen) if n.name not in inner else ((), 0.0)
        sqnr = row.sqnr_db if row is not None and row.elements and math.isfinite(row.sqnr_db) else None
        rows.append(
            LayerRow(
                node=n.name,
                layer=n.layer,
                op=n.op,
                exec=decided.exec if decided else "float",
                group=decided.group if decided else "",
                format=t.format if t is not None and t.quantized else ("inside a kernel" if n.name in inner else "float"),
                scale=float(t.scale) if t is not None and t.scale is not None and t.scale.dim() == 0 else None,
                zero_point=int(t.zero_point) if t is not None and t.zero_point is not None and t.zero_point.dim() == 0 else None,
                low=t.low if t is not None else None,
                high=t.high if t is not None else None,
                clip_low=clip[0],
                clip_high=clip[1],
                sqnr_db=sqnr,
                differing=row.differing if row is not None else None,
                why=decided.why if decided else "",
                bars=bars,
                reach=reach,
            )
        )
    float_bytes, quantized_bytes, parameters = _sizes(graph, plan)
    return Report(
        platform=platform.name, title=platform.title, deploy=platform.deploy, float_bytes=float_bytes, quantized_bytes=quantized_bytes,
        parameters=parameters, quantized_tensors=sum(t.quantized for t in plan.tensors.values()),
        float_tensors=sum(not t.quantized for t in plan.tensors.values()), layers=tuple(rows), timings=dict(timings or {}), notes=plan.rewrites,
        verification={**verification.to_dict(), "summary": verification.summary()} if verification else None, provenance=plan.provenance,
    )  # fmt: skip


def _clip(t: TensorPlan | None) -> tuple[float | None, float | None]:
    if t is None or t.grid is None or t.scale is None or t.zero_point is None or t.scale.dim():
        return None, None
    return float((t.grid.qmin - t.zero_point) * t.scale), float((t.grid.qmax - t.zero_point) * t.scale)


def _bars(stats: TensorStats | None) -> tuple[tuple[float, ...], float]:
    if stats is None or stats.histogram is None:
        return (), 0.0
    counts = stats.histogram.counts.view(BARS, -1).sum(1)
    return tuple((counts / counts.sum().clamp_min(1)).tolist()), stats.histogram.reach


def _sizes(graph: Graph, plan: Plan) -> tuple[int, int, int]:
    """Bytes of the weights that the network reads: in float32, as stored; and their number."""
    read = {i for n in graph.nodes for i in n.inputs if i is not None and i in graph.weights}
    before = after = count = 0
    for name in read:
        elements = graph.weights[name].numel()
        t = plan.tensors.get(name)
        count += elements
        before += elements * 4
        after += (elements * t.grid.bits + 7) // 8 if t is not None and t.grid is not None else elements * 4
    return before, after, count
