"""Equalization of activations: bring channels to similar magnitudes, over groups of tensors that share channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from chipfit.calibration.collect import Need, with_channel_stats
from chipfit.decide.assignment import FEW_BITS, Assignment
from chipfit.decide.constraints import connected_components
from chipfit.graph.ir import Graph, Node
from chipfit.graph.linear import is_depthwise, is_linear
from chipfit.operators.table import OPS
from chipfit.passes.rewriting import (
    Adapted,
    Readers,
    Stats,
    adds_equal_shapes,
    channel_constants,
    scale_between,
    scales_by_channel,
)
from chipfit.registry import OFF, Repair, Setting, entries_in, register

_DOES = "channels that share a grid get magnitudes alike. None: where few bits gain by it"
_SETTING = Setting("equalize_groups", None, _DOES, choices=("always", OFF))
#: exponents of the magnitudes: for groups that only depthwise convolutions read, at no cost to weights, and for others
_DEPTHWISE, _DENSE = 1.0, 0.75
#: least magnitude that a channel is assumed to have, relative to the largest
_FLOOR = 0.01


@dataclass(slots=True)
class Group:
    """Values with the same channels on axis 1, and the operators around them whose constants scale these."""

    values: list[str] = field(default_factory=list)
    producers: list[Node] = field(default_factory=list)
    readers: list[Node] = field(default_factory=list)
    clips: list[tuple[str, float]] = field(default_factory=list)  #: values clipped from above, with the bound
    refusal: str = ""  #: why its channels cannot be scaled


def with_channels(graph: Graph, needs: Mapping[str, Need]) -> dict[str, Need]:
    """Add the channel statistics of every tensor that may be scaled to `needs`."""
    found = [g for g in groups(graph) if not g.refusal]
    used = {*needs, *(n.data for g in found for n in g.readers), *(v for g in found for v, _ in g.clips)}
    return with_channel_stats(needs, {v: 1 for g in found for v in g.values if v in used})


def worth_a_trial(settings: Any, graph: Graph, assignment: Assignment) -> str | None:
    """Return "always" if a rewrite for few bits is tried, else None.

    It is tried where weights are reconstructed, in a network with depthwise operators whose weights have a scale for
    each channel: equalization then costs their weights nothing.
    """
    slots = assignment.tensors.values()
    few = any(s.role == "activation" and s.format.bits <= FEW_BITS for s in slots)
    fits = few and all(s.axis is not None for s in slots if s.role == "weight")
    evens = any(e.declares.evens_channels for e in entries_in("rounding", settings.rounding))
    fitted = evens and settings.rounding_guard and settings.seconds is None
    return "always" if fitted and fits and any(is_depthwise(graph, n) for n in graph.nodes) else None


@register(
    "pass",
    "equalize_groups",
    stage="adapt",
    after=("centre",),
    setting=_SETTING,
    collects=with_channels,
    recalibrates=True,
    trial_value=worth_a_trial,
    repair=Repair("always"),
)
def equalize_groups(graph: Graph, assignment: Assignment, stats: Stats) -> Adapted:
    """Divide channel c of every value of a group by s_c = (t_c / max t)^alpha, without changing the network.

    t_c is the largest magnitude of the channel in the values that the group's readers read, at least 0.01 max t;
    producers, which are linear operators, norms, factors and addends of channels, get W' = W / s, b' = b / s, readers
    W' = W s. alpha is 1 where only depthwise convolutions read, which
    then have in effect a scale for each channel, and 0.75 elsewhere. A channel that is always 0 keeps its scale.

    A clip at b, like that of ReLU6, stays at b and thus clips channel c of the original value at b s_c: s_c is raised
    until that is at least the largest value of calibration. Beyond b the grid of the clipped value ends as well; a
    group whose clipped value is stored on no grid is not changed.

    Args:
        graph: before its tensors are planned.
        assignment: the values that are stored on grids.
        stats: with the channels that `with_channels` adds; not modified.

    Returns:
        The graph, the statistics without the histograms of scaled values, and one note per group or refusal.
    """
    graph, stats, notes = graph.copy(), dict(stats), list[str]()
    for group in groups(graph):
        why, read = group.refusal, [n.data for n in group.readers]
        seen = {v: c for v in group.values if v in stats and (c := stats[v].channels) is not None}
        for v, bound in group.clips:
            if v not in assignment.tensors:
                why = why or f"'{v}' is clipped at {bound:g} and stored on no grid"
        if not why and not {*read, *(v for v, _ in group.clips)} <= set(seen):
            why = "its channels were not collected"
        producers = ", ".join(dict.fromkeys(repr(n.display_name) for n in group.producers))
        if why:
            notes.append(f"the channels of {producers} keep their magnitudes: {why}")
            continue
        t = torch.stack([seen[v].peak for v in read]).amax(0)
        alpha = _DEPTHWISE if all(is_depthwise(graph, n) for n in group.readers) else _DENSE
        s = torch.where(t > 0, (t / t.max()).clamp_min(_FLOOR) ** alpha, 1.0)
        for v, bound in group.clips:
            s = torch.maximum(s, seen[v].high / bound)
        scale_between(graph, group.producers, group.readers, s)
        for v in (v for v in group.values if v in stats):
            stats[v] = stats[v].by_channel(0.0, 1 / s)
        notes.append(f"the channels of {producers} grow by up to {float(1 / s.min()):.3g}")
    return Adapted(graph, stats, notes)


def groups(graph: Graph) -> list[Group]:
    """Return every group that operators with constants of channels compute and linear operators read."""
    joined = ([n.output, *graph.activations(n)] for n in graph.nodes if keeps_channels(graph, n))
    parts = connected_components([*joined, *([v] for v in graph.values)])
    of = {v: group for part in parts for group in [Group()] for v in part}
    for v in graph.values:
        of[v].values.append(v)

    def refuse(v: str, why: str) -> None:
        of[v].refusal = of[v].refusal or why

    readers = Readers(graph)
    for n in graph.nodes:
        if is_linear(graph, n):
            of[n.output].producers.append(n)
            of[n.data].readers.append(n)
            if why := readers.why_channels_fixed(n):
                refuse(n.data, why)
                refuse(n.output, why)
        elif constants := channel_constants(graph, n):
            of[n.output].producers.append(n)
            if why := readers.why_shared(*constants):
                refuse(n.output, why)
            if n.op != "Add":
                refuse(graph.activations(n)[0], f"{n.op} '{n.display_name}' reads it")
        elif not keeps_channels(graph, n):
            for v in graph.activations(n):
                refuse(v, f"{n.op} '{n.display_name}' reads it")
            for v in n.outputs:
                refuse(v, f"{n.op} '{n.display_name}' makes it")
        elif n.clip_range is not None and n.clip_range[1] is not None:
            of[n.output].clips.append((n.output, n.clip_range[1]))
    for v in graph.inputs:
        refuse(v, f"'{v}' is an input of the model")
    for v in graph.outputs:
        if v in of:
            refuse(v, f"'{v}' is an output of the model")
    return [g for v in graph.values if (g := of[v]).values[0] == v and g.producers and g.readers]


def keeps_channels(graph: Graph, node: Node) -> bool:
    """Check whether inputs and result of a node have the same channels on axis 1, and f(x / s) = f(x) / s.

    An upper bound of f is allowed."""
    if len(node.outputs) != 1 or node.op not in OPS or is_linear(graph, node):
        return False
    low, high = node.clip_range or (None, None)
    clips_above = high is not None and high > 0 and low in (0, None)
    if clips_above or scales_by_channel(node) or adds_equal_shapes(graph, node):
        return True
    if node.op == "Add" and channel_constants(graph, node):
        return True
    before, after, row = graph.shape(node.data), graph.shape(node.output), OPS[node.op]
    if row.layout == "reduce":
        return row.homogeneous and all(a % len(before) > 1 for a in node.attrs["axes"])
    moved = row.layout in ("reshape", "squeeze") and len(before) > 1 and before[:2] == after[:2]
    return moved and all(size == 1 for size in (*before[2:], *after[2:]))
