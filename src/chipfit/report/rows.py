"""Build a Report from graph, plan, statistics and verification."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from chipfit.graph.hidden_scores import is_visible
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import multiplications
from chipfit.plan.record import NodePlan, Plan, TensorPlan
from chipfit.platform.schema import Platform
from chipfit.platform.support import features_with_other_results, simulates_arithmetic
from chipfit.quantizers.noise import decibels
from chipfit.quantizers.stored import Stored
from chipfit.report.record import LayerRow
from chipfit.report.report import Report

if TYPE_CHECKING:
    from chipfit.calibration.collect import TensorStats
    from chipfit.calibration.histogram import Histogram
    from chipfit.verify import Verification

#: largest number of bars of a histogram in the report
BARS = 64


def build(
    graph: Graph,
    plan: Plan,
    platform: Platform,
    *,
    stats: Mapping[str, TensorStats] | None = None,
    timings: Mapping[str, float] | None = None,
    verification: Verification | None = None,
) -> Report:
    """Return the Report of a plan, with what is known about calibration, time and verification."""
    rows = _Rows(graph, plan, stats or {}, verification)
    nodes = [rows.of(n, plan.nodes.get(n.name) or NodePlan(name=n.name, op=n.op)) for n in graph.nodes]
    inputs = [rows.of(Node(v, "Input", (), (v,)), NodePlan(name=v, op="Input", exec="follow")) for v in graph.inputs]
    quantized = sum(t.quantized for t in plan.tensors.values())
    return Report(
        platform=platform.name,
        title=platform.title,
        deploy=platform.deploy,
        **_sizes(graph, plan, platform.simd_padding),
        quantized_tensors=quantized,
        float_tensors=len(plan.tensors) - quantized,
        layers=tuple(nodes),
        inputs=tuple(inputs),
        timings=dict(timings or {}),
        notes=plan.rewrites,
        simulated=simulates_arithmetic(platform),
        not_modelled=features_with_other_results(platform),
        provenance=plan.published_provenance,
        verification={**verification.to_dict(), "summary": verification.summary()} if verification else None,
    )


class _Rows:
    """The rows of layers, from graph, plan, statistics and verification."""

    def __init__(
        self, graph: Graph, plan: Plan, stats: Mapping[str, TensorStats], verification: Verification | None
    ) -> None:
        self.graph, self.plan, self.stats, self.makers = graph, plan, stats, graph.producers()
        self.checked = {r.tensor: r for r in verification.rows} if verification else {}
        self.inner = {name for g in plan.groups for name in g[:-1]}  #: nodes whose results stay inside a kernel

    def of(self, node: Node, decided: NodePlan) -> LayerRow:
        """Return the row of a node: how it runs, its result, and its weights."""
        data, makers = self.graph.activations(node), self.makers
        return LayerRow(
            node=node.name,
            layer=node.display_name,
            op=node.op,
            exec=decided.exec,
            group=decided.group,
            why=decided.why,
            simd=decided.simd,
            reads=tuple(dict.fromkeys(makers[v].name if v in makers else v for v in data)),
            products=0.0 if node.op == "Input" else multiplications(self.graph, node),
            **self._result(node),
            **self._verified(node.output),
            **_weights(self.graph, self.plan, node),
        )

    def _result(self, node: Node) -> dict[str, Any]:
        """Return the format, range and histogram of a result; one inside a kernel has none."""
        inside, value = node.name in self.inner, node.output
        t = (None if inside else self.plan.tensors.get(value)) or TensorPlan(name=value, role="activation")
        histogram = None if inside or value not in self.stats else self.stats[value].histogram
        stored = t.stored if t.stored is not None and t.stored.scale.dim() == 0 else None  # with one scale
        clip_low, clip_high = _ends_of_grid(stored)
        return {
            "format": "inside a kernel" if inside else t.format,
            "scale": float(stored.scale) if stored else None,
            "zero_point": int(stored.zero_point) if stored else None,
            "low": t.low,
            "high": t.high,
            "origin": t.origin,
            "clip_low": clip_low,
            "clip_high": clip_high,
            "clipped": _clipped(histogram, stored),
            **_bars(histogram),
        }

    def _verified(self, value: str) -> dict[str, Any]:
        """Return the noise of a value [dB] and the number of integers that differ, if it was verified."""
        found = self.checked.get(value)
        known = found is not None and found.end_to_end_elements and math.isfinite(found.sqnr_db)
        differing = max(found.differing, found.op_differing) if found and not found.why else None
        return {"sqnr_db": found.sqnr_db if found and known else None, "differing": differing}


def _ends_of_grid(stored: Stored | None) -> tuple[float | None, float | None]:
    """Return the smallest and largest float value that the grid of a tensor with one scale represents."""
    if stored is None:
        return None, None
    low, high = ((end - stored.zero_point) * stored.scale for end in (stored.grid.qmin, stored.grid.qmax))
    return float(low), float(high)


def _clipped(histogram: Histogram | None, stored: Stored | None) -> float | None:
    """Return the share of calibration values more than half a step outside the grid, to the histogram's resolution."""
    low, high = _ends_of_grid(stored)
    if histogram is None or stored is None or low is None or high is None:
        return None
    slack, counts, reach = float(stored.scale) / 2, histogram.counts, histogram.reach
    centers = (torch.arange(counts.numel()) + 0.5) * (2 * reach / counts.numel()) - reach
    outside = (centers < low - slack) | (centers > high + slack)
    return float(counts[outside].sum() / counts.sum().clamp_min(1))


def _bars(histogram: Histogram | None) -> dict[str, Any]:
    """Return the histogram of calibration values, in at most BARS bins."""
    if histogram is None or not histogram.counts.any():
        return {}
    counts, reach = histogram.counts, histogram.reach
    step = 2 * reach / counts.numel()
    used = counts.nonzero().view(-1)
    first, width = int(used[0]), int(used[-1] - used[0]) // BARS + 1
    bars = torch.stack([c.sum() for c in counts[first : int(used[-1]) + 1].split(width)]) / counts.sum()
    left = first * step - reach
    return {"bars": tuple(bars.tolist()), "bars_low": left, "bars_high": left + len(bars) * width * step}


def _weights(graph: Graph, plan: Plan, node: Node) -> dict[str, Any]:
    """Return the format of a node's weights, and their signal-to-quantization-noise ratio [dB]."""
    text, signal, noise = "", 0.0, 0.0
    for name in node.inputs:
        stored = plan.stored(name)
        if name not in graph.weights or stored is None or plan.tensors[name].role != "weight":
            continue
        text = stored.format
        if stored.grid.kind == "int":
            w = graph.weights[name].detach().float()
            shown = is_visible(w)
            signal += float(w[shown].square().sum())
            noise += float((w - stored.round(w))[shown].square().sum())
    return {"weight_format": text, "weight_sqnr_db": decibels(signal, noise) if signal and noise else None}


def _sizes(graph: Graph, plan: Plan, pads: bool) -> dict[str, Any]:
    """Return bytes of the weights in float32, as stored, and as stored and padded; and the number of parameters."""
    readers = {n.inputs[1]: n for n in graph.nodes if len(n.inputs) > 1}
    read = {i for n in graph.nodes for i in n.inputs if i is not None and i in graph.weights}
    parameters = quantized = padded = 0
    for name in read:
        w, stored, reader = graph.weights[name], plan.stored(name), readers.get(name)
        bits = stored.grid.bits if stored is not None else 32
        simd, channels = 1, 1
        if pads and reader is not None and reader.name in plan.nodes and bits < 32 and w.dim():
            simd = plan.nodes[reader.name].simd or 1
            channels = max(w.shape[reader.facts.weight_axis], 1)
        parameters += w.numel()
        quantized += _bytes(w.numel(), bits)
        padded += _bytes(w.numel() // channels * -(-channels // simd) * simd, bits)
    sizes = {"float_bytes": 4 * parameters, "quantized_bytes": quantized, "padded_bytes": padded}
    return {**sizes, "parameters": parameters}


def _bytes(count: int, bits: int) -> int:
    """Return the bytes of `count` integers packed without gaps."""
    return (count * bits + 7) // 8
