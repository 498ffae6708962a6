"""The bits that a search may choose for weights, and for activations that must have equal bits."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chipfit.decide.constraints import connected_components, copies
from chipfit.decide.groups import NO_FORMAT, FusedGroup, find_groups, format_of
from chipfit.decide.overrides import NodeOverrides
from chipfit.decision import Decision, decide
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph
from chipfit.graph.joins import is_join
from chipfit.graph.linear import is_linear
from chipfit.plan.record import Plan
from chipfit.platform.match import as_tuple, resolve_node
from chipfit.platform.schema import WIDEST, Platform

#: widths that are tried where a format leaves them free
FREE = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class TiedChoice:
    """Activations of equal bits, because a kernel reads one and writes the other, or because they share a scale."""

    tensors: tuple[str, ...]
    widths: tuple[int, ...]  #: ascending

    @property
    def name(self) -> str:
        return self.tensors[0]


def activation_choices(d: Decision, plan: Plan, by_hand: NodeOverrides) -> list[TiedChoice]:
    """Return all quantized activations, with the bits that every kernel around them supports.

    Activations keep their bits if the user chose them, the hardware dictates them, or no kernel names bits for them.
    """
    groups = find_groups(d.graph, d.platform, plan.groups, by_hand)
    operands = [_quantized_operands(plan, g) for g in groups]
    tied = [own for g, own in zip(groups, operands, strict=True) if not g.reads_anything]
    supported = _supported_bits(d, plan, by_hand)
    stored = {t.name for t in plan.tensors.values() if t.role == "activation" and t.stored is not None}
    out = []
    for part in connected_components([*tied, *plan.ties, *([t] for t in stored)]):
        tensors, together = tuple(t for t in part if t in stored), set(part)
        kernels = [g for g, own in zip(groups, operands, strict=True) if not g.is_pass_through and together & {*own}]
        bits = {plan[t].grid.bits for t in tensors}
        free = all(plan[t].grid.kind == "int" for t in tensors) and together.isdisjoint(plan.fixed)
        if kernels and free and all(g.choices.get("activation_bits") is None for g in kernels):
            around = [w for g in kernels for w in _around(d, g, together, supported[g.head.name])]
            possible = bits.union(set.intersection(*around)) if around else bits
        else:
            possible = bits
        if len(bits) == 1:
            out.append(TiedChoice(tensors, tuple(sorted(possible))))
    return out


def _around(d: Decision, group: FusedGroup, tensors: set[str], supported: set[int]) -> Iterator[set[int]]:
    """Yield the bits that a group of operators supports for these tensors, some of its operands.

    A kernel that reads whatever is written supports other bits for its data than for its result.
    """
    if not group.reads_anything or tensors.intersection(group.tail.outputs):
        yield supported
    if group.reads_anything and tensors.intersection(group.data):
        widths = [b for o in group.resolved.options for b in o.in_bits or ()]
        yield set(range(1, max(widths) + 1)) if widths else set(range(1, WIDEST + 1))
        if tensors.intersection(d.graph.inputs):  # nothing writes an input: the platform has its formats
            formats = (d.platform.formats.get(name) for name in d.platform.place.io_in)
            yield {f.bits for f in formats if f is not None}


def _supported_bits(d: Decision, plan: Plan, by_hand: NodeOverrides) -> dict[str, set[int]]:
    """Return the bits of activations that each group of operators supports, by its first node."""
    formats, out = d.platform.formats.values(), defaultdict[str, set[int]](set)
    every = {f.bits for f in formats if f.kind == "int" and f.bits <= WIDEST}
    every |= set(FREE) if any(f.free for f in formats) else set()
    for bits in every:
        wanted = {n.name: {**by_hand.get(n.name, {}), "activation_bits": bits} for n in d.graph.nodes}
        for g in find_groups(d.graph, d.platform, plan.groups, wanted):
            if any(_supports_width(d.platform, g, o, bits) for o in g.resolved.options):
                out[g.head.name].add(bits)
    return out


def _quantized_operands(plan: Plan, group: FusedGroup) -> tuple[str, ...]:
    """Return the activations that a group of operators reads or writes quantized."""
    if plan.nodes[group.tail.name].exec == "float":
        return ()
    reads = [r.tensor for r in group.operands if r.is_data and (r.tensor, r.node.name) not in plan.float_edges]
    writes = group.is_pass_through or any(o.out not in NO_FORMAT for o in group.resolved.options)
    return tuple(t for t in (*reads, *(group.tail.outputs if writes else ())) if plan.quantized(t))


def _supports_width(platform: Platform, group: FusedGroup, option: Any, bits: int) -> bool:
    """Return whether a kernel with this option reads and writes so many bits, with the weights that the user chose."""
    words, weight_bits = [*as_tuple(option.in_), option.out], group.choices.get("bits")
    if isinstance(weight_bits, int) and not accepts_width(platform, option.w, weight_bits):
        return False
    return any(w in platform.formats for w in words) and all(accepts_width(platform, w, bits) for w in words)


def accepts_width(platform: Platform, word: Any, bits: int) -> bool:
    """Return whether a word of an option allows so many bits: it names no format, or one of these or any bits."""
    fmt = platform.formats.get(word) if isinstance(word, str) else None
    return fmt is None or fmt.free or fmt.bits == bits


def keep_available(d: Decision, plan: Plan, parts: Sequence[TiedChoice]) -> list[TiedChoice]:
    """Return the choices without the bits that the platform does not give when they are asked for."""
    start = {p.name: plan[p.name].grid.bits for p in parts}
    good = {name: {bits} for name, bits in start.items()}
    for bits in sorted({b for p in parts for b in p.widths}):
        wanted = [p for p in parts if bits in p.widths and bits != start[p.name]]
        try:
            other = decide(d.with_bits({t: bits for p in wanted for t in p.tensors})) if wanted else d
        except ChipfitError:
            continue
        for p in wanted:
            slots = [other.assignment.tensors.get(t) for t in p.tensors]
            if all(s is not None and s.format.bits == bits for s in slots):
                good[p.name].add(bits)
    return [replace(p, widths=tuple(sorted(good[p.name]))) for p in parts]


def kernel_widths(
    d: Decision, plan: Plan, parts: Sequence[TiedChoice] = (), decided: Collection[str] = ()
) -> dict[str, list[tuple[int, int]]]:
    """Return the pairs of bits, of weight and data, that a kernel supports for each linear operator; 0: data in float.

    Args:
        parts: the activations whose bits are chosen as well.
        decided: nodes whose weights keep their bits.
    """
    reach = {t: p.widths for p in parts for t in p.tensors}
    out: dict[str, list[tuple[int, int]]] = {}
    graph, platform = d.graph, d.platform
    for n in graph.nodes:
        now = plan.stored(n.weight) if is_linear(graph, n) and (n.weight, n.name) not in plan.float_edges else None
        if now is None:
            continue
        stored, stays = plan.stored(n.data), n.name in decided or now.grid.table is not None
        data = 0 if stored is None else stored.grid.bits
        found = {(now.grid.bits, data)}
        for a in reach.get(n.data, (data,)):
            for o in resolve_node(platform, graph, n, bits=a or 8).options:
                w = platform.formats.get(o.w) if isinstance(o.w, str) else None
                if w is None or not (stays or w.kind == "int"):
                    continue
                if a and not (o.input_mode == "codes" and accepts_width(platform, format_of(o, "in0"), a)):
                    continue
                bits = set(FREE) if w.free else {w.bits}
                if stays:
                    bits = {now.grid.bits} if w.free else bits & {now.grid.bits}
                found |= {(b, a) for b in bits}
        out[n.name] = sorted(found)
    return out


def weight_widths(graph: Graph, pairs: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, tuple[int, ...]]:
    """Return the bits of each weight that all of its readers support."""
    out: dict[str, set[int]] = {}
    for n in graph.nodes:
        if n.name in pairs:
            wide = {b for b, _ in pairs[n.name]}
            out[n.weight] = wide & out.get(n.weight, wide)
    return {name: tuple(sorted(wide)) for name, wide in out.items()}


def own_errors(graph: Graph, plan: Plan, parts: Iterable[TiedChoice]) -> dict[str, TiedChoice]:
    """Return the activations with an error of their own: all but rearranged values of others on the same grid."""
    copied = copies(graph, {name for name in plan.tensors if plan.quantized(name)})
    for n in (n for n in graph.nodes if is_join(n) and n.output in copied):
        data = [i for i in n.inputs if i is not None and graph.is_float(i)]
        if not all(plan[i].same_numbers(plan[n.output]) for i in data):
            copied.remove(n.output)
    return {t: p for p in parts for t in p.tensors if t not in copied}
