"""Shift-negative correction: lift a short negative tail above zero, so that an unsigned grid holds all values."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.graph.edit import insert_behind, new_name, replace_node
from chipfit.graph.ir import Graph, Node, Value
from chipfit.graph.linear import bias_or_zero, in_groups, with_bias
from chipfit.passes.rewriting import Adapted, LinearReaders, Readers, Stats
from chipfit.ranges.qparams import from_min_max
from chipfit.registry import Repair, Setting, register

if TYPE_CHECKING:
    from chipfit.decide.assignment import Assignment
    from chipfit.platform.schema import Format

#: `Node.layer_type` of the additions that this rewrite inserts
SHIFT = "ShiftNegative"

_DOES = "lift short negative tails above zero, up to this share of the threshold"
_SETTING = Setting("shift_negative", None, _DOES, "ratio")


def _follows_signs(graph: Graph, assignment: Assignment) -> bool:
    return any(s.format.signed == "auto" for s in assignment.tensors.values() if s.role == "activation")


_REPAIR = Repair(0.05, _follows_signs)


@register("pass", "shift_negative", stage="adapt", setting=_SETTING, repair=_REPAIR)
def shift_negative(graph: Graph, assignment: Assignment, stats: Stats, *, ratio: float = 0.05) -> Adapted:
    """Lift activations with |min| / threshold <= `ratio` by a constant c >= |min|, if that makes their scale smaller.

    f(x) becomes f(x) + c; every linear operator behind it gets b' = b - sum(W) c, and pads with c instead of 0. The
    network computes the same function. c is a multiple of the new scale, so that c itself is on the grid.

    Args:
        graph: before its tensors are planned.
        assignment: the format of each activation; only formats whose sign follows the data can gain.
        stats: of the same graph; not modified.
        ratio: |least value| over the threshold, the half range of the signed grid; above it nothing is shifted. With a
            ratio above 1 every tail is shifted, also where its scale does not fall.

    Returns:
        The graph, the statistics with those of shifted values, and one note per shift or refusal. Fusions must be found
        again, with `fuse_shifts` at their end.
    """
    graph, stats, notes = graph.copy(), dict(stats), list[str]()
    for act in list(graph.nodes):
        slot = assignment.tensors.get(act.output) if act.facts.negative_tail else None
        seen = stats.get(act.output)
        if slot is None or seen is None or slot.format.signed != "auto" or seen.low >= 0:
            continue
        readers = Readers(graph)
        found = readers.linear_behind(act.output, lambda n: n.facts.shifts)
        c, why = shift_constant(slot.format, seen, ratio)
        why = why or found.refusal or _why_shift_stays(found.ends)
        if why:
            notes.append(f"'{act.display_name}' is not shifted: {why}")
            continue
        shifted = _shift(graph, act, found, c)
        stats[shifted] = replace(seen.shifted(c), name=shifted)
        for o in (o for n in found.crossed for o in n.outputs if o in stats):
            stats[o] = stats[o].shifted(c)
        for n in graph.nodes:  # the new pads hold the values that they read, and c
            if n.op == "Pad" and n.output not in stats and n.data in stats:
                stats[n.output] = replace(stats[n.data], name=n.output)
        ends = ", ".join(repr(end.display_name) for end in found.ends)
        notes.append(f"shifted '{act.display_name}' by {c:g}, now unsigned, before {ends}")
    return Adapted(graph, stats, notes)


def fuse_shifts(graph: Graph, groups: tuple[tuple[str, ...], ...]) -> tuple[tuple[str, ...], ...]:
    """Add each shift to the kernel of its non-linearity, whose own result is then never stored."""
    out = {g[-1]: g for g in groups}
    producers = graph.producers()
    for n in graph.nodes:
        if n.op == "Add" and n.layer_type == SHIFT:
            act = producers[n.data].name
            out[n.name] = (*out.pop(act, (act,)), n.name)
    order = {n.name: k for k, n in enumerate(graph.nodes)}
    return tuple(sorted(out.values(), key=lambda g: order[g[0]]))


def step(fmt: Format, low: float, high: float) -> float:
    """Return the scale of the grid that holds [low, high] without clipping, in the tensor's unit."""
    return float(from_min_max(low, high, fmt.grid(signed=low < 0)).scale)


def shift_constant(fmt: Format, seen: TensorStats, ratio: float) -> tuple[float, str]:
    """Return the constant c, or 0 and the reason why no constant helps."""
    before = step(fmt, seen.low, seen.high)
    threshold = before * 2.0 ** (fmt.bits - 1)
    if -seen.low > ratio * threshold:
        return 0.0, f"its least value {seen.low:.3g} is more than {ratio:g} of the threshold {threshold:.3g}"
    after = step(fmt, 0.0, seen.high - seen.low)
    after = step(fmt, 0.0, seen.high + after * math.ceil(-seen.low / after))
    if ratio <= 1 and after > before * (1 - 1e-6):
        return 0.0, f"its step of {before:.3g} would not fall"
    return after * math.ceil(-seen.low / after), ""


def _why_shift_stays(ends: list[Node]) -> str:
    """Return why the bias of some linear operator cannot take the shift back; "" if all can."""
    for end in ends:
        if end.facts.kind not in ("conv", "linear"):
            return f"{end.op} '{end.display_name}' would need another bias at every position"
    return ""


def _shift(graph: Graph, act: Node, found: LinearReaders, c: float) -> str:
    """Add c to the result of `act` and correct the linear operators behind it; return the shifted value."""
    readers, names = graph.users()[act.output], (f"{act.output}_shifted", f"{act.name}.shift", f"{act.name}_shift")
    origin = {"layer": act.layer, "layer_type": SHIFT, "source": act.source}
    shifted = insert_behind(graph, act.output, "Add", torch.tensor(c), readers, names=names, **origin)
    for n in found.crossed:
        if n.op == "Pad" and n.attrs["mode"] == "constant":
            here = graph.node(n.name)
            replace_node(graph, here, here.with_(attrs={**n.attrs, "value": n.attrs["value"] + c}))
    for n in found.ends:
        end = graph.node(n.name)
        w = in_groups(end, graph.weights[end.weight].detach().double())
        corrected = with_bias(graph, end, bias_or_zero(graph, end) - c * w.flatten(2).sum(2).flatten())
        replace_node(graph, end, *with_pad_operator(graph, corrected, c))
    return shifted


def with_pad_operator(graph: Graph, conv: Node, c: float) -> tuple[Node, ...]:
    """Return the convolution, behind a Pad with `c` if it has padding of its own."""
    padding = conv.attrs.get("padding", ())
    if not any(p for pair in padding for p in pair):
        return (conv,)
    x = conv.data
    shape = graph.values[x].shape
    sizes = [None if s is None else s + low + high for s, (low, high) in zip(shape[2:], padding, strict=True)]
    name = new_name(graph, f"{conv.name}_pad")
    graph.values[name] = Value(name, (*shape[:2], *sizes), graph.values[x].dtype)
    attrs = {"padding": ((0, 0), (0, 0), *padding), "mode": "constant", "value": c}
    pad = Node(name, "Pad", (x,), (name,), attrs, conv.layer, "Pad", conv.source)
    none = tuple((0, 0) for _ in padding)
    return pad, conv.with_(inputs=(name, *conv.inputs[1:]), attrs={**conv.attrs, "padding": none})
