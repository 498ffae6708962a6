"""Fold the scale and shift of a norm in parts into the linear layers that read it: W (g n + b) + c."""

import math
from collections.abc import Sequence

import torch

from chipfit.calibration.collect import Channels
from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import facts_of
from chipfit.passes.fold_affine import Affine, affine, can_fold, fold_into, without_steps
from chipfit.passes.rewriting import Adapted, Readers, Stats
from chipfit.passes.smooth import PredictedError
from chipfit.registry import register

#: least bits of weights; with fewer, weights that differ more may lose more than channels of one deviation gain
_BITS = 8
#: largest number behind a norm, in deviations, where that decides
_PEAK = 4.0
#: largest ratio of the scales of two channels
_SPREAD = 256.0


@register("pass", "fold_norm_scale", stage="adapt")
def fold_norm_scale(graph: Graph, assignment: Assignment, stats: Stats) -> Adapted:
    """Fold scale and shift of norms that are computed in parts into the linear layers, where only these read them.

    W' = W g and c' = c + W b for each input channel. The channels that the layers read then have one deviation, so that
    one grid suits them all, and there are two kernels and two roundings fewer. A shift may be large: without it, what
    the layers read is centred. Weights of few bits take them only where less error is predicted so.

    Args:
        graph: before its tensors are planned.
        assignment: the formats of the layers' weights.
        stats: of its values; those between norm and layer are left out.

    Returns:
        The graph, the statistics, and one note for each norm.
    """
    graph, stats, notes = graph.copy(), dict(stats), list[str]()
    for last in [n for n in graph.nodes if facts_of(n.composite_op, {}).norm == "vectors" and n.name == n.composite]:
        readers = Readers(graph)
        found = readers.linear_behind(last.output, lambda n: n.facts.identity)
        steps, (scale, shift) = _steps(readers, last)
        if not steps or found.refusal or readers.why_fixed(*found.ends):
            continue
        if not all(can_fold(n, scale, shift, _SPREAD, math.inf) for n in found.ends):
            continue
        if not _gains(assignment, graph, last.output, found.ends, scale, shift):
            continue
        for layer in found.ends:
            fold_into(graph, layer, scale, shift)
        graph = without_steps(graph, steps)
        for n in steps:
            stats.pop(n.output, None)
        names = ", ".join(f"'{n.display_name}'" for n in found.ends)
        notes.append(f"folded scale and shift of '{last.display_name}' into {names}")
    return Adapted(graph, stats, notes)


def _steps(readers: Readers, last: Node) -> tuple[list[Node], Affine]:
    """Return the parts at the end of a norm that scale and shift its channels, the last one first, and k and c."""
    graph, makers, value, steps = readers.graph, readers.graph.producers(), last.output, list[Node]()
    axis = len(graph.shape(value)) - 1
    channels = {axis: torch.arange(graph.shape(value)[axis] or 0)}
    k, c = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    while (n := makers[value]).composite == last.composite and (n.name == last.name or readers.only(value)):
        step = affine(graph, n, channels)
        if step is None:
            break
        k, c = k * step[0], k * step[1] + c
        steps.append(n)
        (value,) = graph.activations(n)
    return steps, (k, c)


def _gains(
    assignment: Assignment, graph: Graph, value: str, layers: Sequence[Node], scale: torch.Tensor, shift: torch.Tensor
) -> bool:
    """Return whether linear layers lose less, as far as it is predicted, with scale and shift [C] in their weights."""
    slots = [assignment.tensors.get(n.weight) for n in layers]
    if value not in assignment.tensors or any(n.facts.kind != "linear" for n in layers) or None in slots:
        return False
    if all(slot is not None and slot.format.bits >= _BITS for slot in slots):
        return True
    weights = [graph.weights[n.weight].detach().double() for n in layers]
    k, c = (v.expand(weights[0].shape[1]) for v in (scale.abs(), shift))

    def error(c: torch.Tensor, s: torch.Tensor) -> float:
        behind_norm = Channels(c, c - _PEAK * k, c + _PEAK * k, k.square() + c.square())
        return PredictedError(assignment, value, layers, weights, len(c), behind_norm)(s)

    return error(torch.zeros_like(c), k) < error(c, torch.ones_like(k))
