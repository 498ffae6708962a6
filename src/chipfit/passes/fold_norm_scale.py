"""Fold the scale and shift of a norm in parts into the linear layers that read it: W (g n + b) + c."""

import math

import torch

from chipfit.decide.assignment import Assignment
from chipfit.graph.ir import Graph, Node
from chipfit.operators.table import facts_of
from chipfit.passes.fold_affine import Affine, affine, can_fold, fold_into, without_steps
from chipfit.passes.rewriting import Adapted, Readers, Stats
from chipfit.registry import register

#: least bits of weights; with fewer, channels of one deviation gain less than weights lose that differ more
_BITS = 8
#: largest ratio of the scales of two channels
_SPREAD = 256.0


@register("pass", "fold_norm_scale", stage="adapt")
def fold_norm_scale(graph: Graph, assignment: Assignment, stats: Stats) -> Adapted:
    """Fold scale and shift of norms that are computed in parts into the linear layers, where only these read them.

    W' = W g and c' = c + W b for each input channel. The channels that the layers read then have one deviation, so that
    one grid suits them all, and there are two kernels and two roundings fewer. A shift may be large: without it, what
    the layers read is centred.

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
        if not all(_takes(assignment, n) and can_fold(n, scale, shift, _SPREAD, math.inf) for n in found.ends):
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


def _takes(assignment: Assignment, layer: Node) -> bool:
    """Return whether a layer is a linear one whose weights have enough bits."""
    stored = assignment.tensors.get(layer.weight)
    return layer.facts.kind == "linear" and stored is not None and stored.format.bits >= _BITS
