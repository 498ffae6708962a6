"""The Report: how well it went, as data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chipfit.files import write_atomically
from chipfit.graph.ir import Graph, Node
from chipfit.graph.ops import OPS
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.quantizers.grids import fake_quantize
from chipfit.simulate.integer import kernels_of

if TYPE_CHECKING:
    from chipfit.calibration.collect import TensorStats
    from chipfit.verify import Verification

#: most bars of a histogram in the report
BARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """One operator of the model, or one of its inputs."""

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
    clipped: float | None  #: share of the calibration values outside that range
    sqnr_db: float | None  #: of its result on the device; None before `verify`
    differing: int | None  #: integers that differ between simulator and device
    why: str  #: why it runs in float
    origin: str = ""  #: where the range came from
    weight_format: str = ""  #: "" without quantized weights
    weight_sqnr_db: float | None = None  #: of its stored weights; needs no data
    bars: tuple[float, ...] = ()  #: share of calibration values in equal bins over [bars_low, bars_high)
    bars_low: float = 0.0
    bars_high: float = 0.0

    @property
    def name(self) -> str:
        """What a person calls it."""
        return self.layer or self.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a person asks after quantizing a model."""

    platform: str
    title: str
    deploy: tuple[str, ...]
    float_bytes: int
    quantized_bytes: int
    padded_bytes: (
        int  #: with output channels padded to the width of the chip's instructions, where the platform tells it
    )
    parameters: int
    quantized_tensors: int
    float_tensors: int
    layers: tuple[LayerRow, ...]  #: in execution order
    timings: Mapping[str, float]
    notes: tuple[str, ...]
    simulated: bool = False  #: the platform's integer arithmetic is known, so that `verify` has something to compare
    inputs: tuple[LayerRow, ...] = ()  #: how the model's own inputs are stored
    verification: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def floats(self) -> dict[str, list[str]]:
        """Reason -> layers that stay in float for it."""
        out: dict[str, list[str]] = {}
        for r in self.layers:
            if r.exec == "float":
                out.setdefault(r.why or "not said", []).append(r.name)
        return out

    @property
    def kernels(self) -> list[tuple[LayerRow, ...]]:
        """Operators that the chip runs as one, together; a kernel stands where its last operator does."""
        parts: dict[str, list[LayerRow]] = {}
        for r in self.layers:
            parts.setdefault(r.group or r.node, []).append(r)
        return [tuple(parts[r.node]) for r in self.layers if r.node in parts]

    @property
    def integer_share(self) -> float:
        """Share of operators that run in integers or move codes."""
        return sum(r.exec != "float" for r in self.layers) / max(1, len(self.layers))

    @property
    def verdict(self) -> str:
        """What `verify` found, in a word.

        "unverified"; "exact": not one integer differs; "sound": integers differ, yet every operator computes the
        device's integers from the device's inputs; "departs": one does not; "unpromised": one does not, on a runtime
        whose arithmetic is not this platform's.
        """
        v = self.verification
        if v is None:
            return "unverified"
        return "exact" if v["exact"] else "sound" if v["sound"] else "departs" if v["promised"] else "unpromised"

    @property
    def first_departure(self) -> Mapping[str, Any] | None:
        """The first tensor, in execution order, whose integers differ: a row of `verification`."""
        rows = self.verification["rows"] if self.verification else ()
        return next((r for r in rows if r["differing"]), None)

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
    graph: Graph,
    plan: Plan,
    platform: Platform,
    *,
    stats: Mapping[str, TensorStats] | None = None,
    timings: Mapping[str, float] | None = None,
    verification: Verification | None = None,
) -> Report:
    """Gather a Report from what the other steps left behind."""
    stats = stats or {}
    checked = {r.tensor: r for r in verification.rows} if verification else {}
    inner = {name for g in plan.groups for name in g[:-1]}

    def row(node: Node, decided: NodePlan) -> LayerRow:
        t, seen, found = plan.tensors.get(node.output), stats.get(node.output), checked.get(node.output)
        if node.name in inner:  # its result never leaves the kernel
            t = seen = None
        clip_low, clip_high = _clip(t)
        bars, bars_low, bars_high = _bars(seen)
        weight_format, weight_sqnr = _weights(graph, plan, node)
        one = t if t is not None and t.scale is not None and t.zero_point is not None and t.scale.dim() == 0 else None
        return LayerRow(
            node=node.name,
            layer=node.layer,
            op=node.op,
            exec=decided.exec,
            group=decided.group,
            why=decided.why,
            format=t.format if t is not None and t.quantized else "inside a kernel" if node.name in inner else "float",
            scale=float(one.scale) if one is not None else None,  # type: ignore[arg-type]  # `one` has both
            zero_point=int(one.zero_point) if one is not None else None,  # type: ignore[arg-type]
            low=t.low if t is not None else None,
            high=t.high if t is not None else None,
            origin=t.origin if t is not None else "",
            clip_low=clip_low,
            clip_high=clip_high,
            clipped=_clipped(seen, one),
            sqnr_db=_finite(found.sqnr_db) if found is not None and found.elements else None,
            differing=found.differing if found is not None else None,
            weight_format=weight_format,
            weight_sqnr_db=weight_sqnr,
            bars=bars,
            bars_low=bars_low,
            bars_high=bars_high,
        )

    nodes = [row(n, plan.nodes.get(n.name) or NodePlan(name=n.name, op=n.op)) for n in graph.nodes]
    inputs = [row(Node(v, "Input", (), (v,)), NodePlan(name=v, op="Input", exec="follow")) for v in graph.inputs]
    float_bytes, quantized_bytes, padded_bytes, parameters = _sizes(graph, plan)
    return Report(
        platform=platform.name,
        title=platform.title,
        deploy=platform.deploy,
        float_bytes=float_bytes,
        quantized_bytes=quantized_bytes,
        padded_bytes=padded_bytes,
        parameters=parameters,
        quantized_tensors=sum(t.quantized for t in plan.tensors.values()),
        float_tensors=sum(not t.quantized for t in plan.tensors.values()),
        layers=tuple(nodes),
        inputs=tuple(inputs),
        timings=dict(timings or {}),
        notes=plan.rewrites,
        simulated=kernels_of(platform) is not None,
        provenance=plan.provenance,
        verification={**verification.to_dict(), "summary": verification.summary()} if verification else None,
    )


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _clip(t: TensorPlan | None) -> tuple[float | None, float | None]:
    if t is None or t.grid is None or t.scale is None or t.zero_point is None or t.scale.dim():
        return None, None
    return float((t.grid.qmin - t.zero_point) * t.scale), float((t.grid.qmax - t.zero_point) * t.scale)


def _clipped(stats: TensorStats | None, t: TensorPlan | None) -> float | None:
    """Share of the values seen that are more than half a step outside the grid, to the resolution of the histogram."""
    low, high = _clip(t)
    if stats is None or stats.histogram is None or t is None or t.scale is None or low is None or high is None:
        return None
    counts, reach, slack = stats.histogram.counts, stats.histogram.reach, float(t.scale) / 2
    centers = (torch.arange(counts.numel()) + 0.5) * (2 * reach / counts.numel()) - reach
    return float(counts[(centers < low - slack) | (centers > high + slack)].sum() / counts.sum().clamp_min(1))


def _bars(stats: TensorStats | None) -> tuple[tuple[float, ...], float, float]:
    """The histogram over the values seen, in at most BARS bins: shares, left end, right end."""
    if stats is None or stats.histogram is None or not stats.histogram.counts.any():
        return (), 0.0, 0.0
    counts, reach = stats.histogram.counts, stats.histogram.reach
    step = 2 * reach / counts.numel()
    used = counts.nonzero().view(-1)
    first, width = int(used[0]), int(used[-1] - used[0]) // BARS + 1
    bars = torch.stack([c.sum() for c in counts[first : int(used[-1]) + 1].split(width)]) / counts.sum()
    left = first * step - reach
    return tuple(bars.tolist()), left, left + len(bars) * width * step


def _weights(graph: Graph, plan: Plan, node: Node) -> tuple[str, float | None]:
    """Format of a node's weights, and their signal-to-quantization-noise ratio [dB]."""
    text, signal, noise = "", 0.0, 0.0
    for name in node.inputs:
        t = plan.tensors.get(name or "")
        if (
            name not in graph.weights
            or t is None
            or t.role != "weight"
            or t.grid is None
            or t.scale is None
            or t.zero_point is None
        ):
            continue
        text = t.format
        if t.grid.kind == "int":
            w = graph.weights[name].detach().float()
            signal += float(w.square().sum())
            noise += float((w - fake_quantize(w, t.scale, t.zero_point, t.grid, t.axis)).square().sum())
    return text, 10 * math.log10(signal / noise) if signal and noise else None


def _sizes(graph: Graph, plan: Plan) -> tuple[int, int, int, int]:
    """Bytes of the weights that the network reads: in float32, as stored, as stored and padded; and their number."""
    axes = {
        n.inputs[1]: (OPS[n.op].weight_axis if n.op in OPS else 0, n.name) for n in graph.nodes if len(n.inputs) > 1
    }
    read = {i for n in graph.nodes for i in n.inputs if i is not None and i in graph.weights}
    before = after = padded = count = 0
    for name in read:
        w, t = graph.weights[name], plan.tensors.get(name)
        bits = t.grid.bits if t is not None and t.grid is not None else 32
        axis, node = axes.get(name, (0, ""))
        simd = plan.nodes[node].simd if node in plan.nodes and bits < 32 and w.dim() else None
        count += w.numel()
        before += w.numel() * 4
        after += (w.numel() * bits + 7) // 8
        channels = w.shape[axis] if w.dim() else 1
        padded += (w.numel() // max(channels, 1) * -(-channels // (simd or 1)) * (simd or 1) * bits + 7) // 8
    return before, after, padded, count
