"""Activation bias correction: the mean error of a quantized input is subtracted in the bias of its linear operator."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from chipfit.calibration.collect import Need, TensorStats
from chipfit.calibration.histogram import Histogram
from chipfit.correction.bias import mean_output, move_bias, quantized_linear, spatial
from chipfit.graph.ir import Graph
from chipfit.graph.linear import in_groups
from chipfit.plan.record import Plan
from chipfit.quantizers.grids import fake_quantize
from chipfit.quantizers.stored import Stored
from chipfit.registry import Setting, register


def with_histograms(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """Return `needs` with a histogram of every tensor."""
    return {name: replace(need, histogram=True) for name, need in needs.items()}


_DOES = "biases lose the mean error of rounded inputs, where it is this share of their mean or more"
_SETTING = Setting("correct_activation_bias", None, _DOES, "threshold")


@register(
    "correction",
    "activation_bias",
    stage="correct",
    after=("bias",),
    needs=("stats",),
    collects=with_histograms,
    setting=_SETTING,
)
def correct_activation_bias(
    graph: Graph, plan: Plan, stats: Mapping[str, TensorStats], *, threshold: float = 0.0
) -> tuple[Graph, list[str]]:
    """Compute b' = b - mean over positions of Q(W) * d, d = E[Q(x)] - E[x] from the histogram of the operator's input.

    Args:
        threshold: operators with |d| / |E[x]| below it stay as they are.

    Returns:
        The graph with new biases, and one note per correction or refusal. The plan stays valid.
    """
    graph, notes = graph.copy(), []
    for node, why in quantized_linear(graph, plan):
        seen, stored = stats.get(node.data), plan.stored(node.data)
        if stored is None or (node.data, node.name) in plan.float_edges:
            continue
        if why or seen is None or seen.histogram is None:
            why = why or "there is no histogram of its input"
            notes.append(f"the bias of '{node.display_name}' is not corrected: {why}")
            continue
        shift, mean = mean_shift(seen.histogram, stored)
        if abs(shift) < threshold * abs(mean) or shift == 0:
            continue
        w = plan[node.weight].round(graph.weights[node.weight].detach())
        groups, _, per_group = in_groups(node, w).shape[:3]
        shifts = torch.full((groups * per_group,), shift)
        notes.append(move_bias(graph, plan, node, -mean_output(node, w, shifts, spatial(graph, node))))
    return graph, notes


def mean_shift(seen: Histogram, stored: Stored) -> tuple[float, float]:
    """Return (E[Q(x)] - E[x], E[x]) over the bins, with every value at the middle of its bin and exact zeros at 0."""
    counts = seen.counts.clone()
    counts[len(counts) // 2] -= seen.zeros
    share = counts / seen.counts.sum()
    moved = fake_quantize(seen.centers, stored.scale.double(), stored.zero_point, stored.grid) - seen.centers
    return float((share * moved).sum()), float((share * seen.centers).sum())
