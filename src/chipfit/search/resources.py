"""Memory and bit operations that a quantized model needs on the chip for one sample."""

import math
from dataclasses import dataclass

from chipfit.engine.run import done_after
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear, multiplications
from chipfit.plan.record import Plan


@dataclass(frozen=True)
class Resources:
    """The needs of one model."""

    weights: float  #: memory of the weights of linear operators [byte]
    activations: float  #: peak memory of values alive at one time [byte]
    bops: float  #: multiplications of linear operators x bits of weights x bits of their inputs
    bops_of_sole_readers: float  #: of those whose input no other operator reads
    largest: float  #: memory of the largest quantized value [byte]

    @property
    def total(self) -> float:
        return self.weights + self.activations


def resources(graph: Graph, plan: Plan) -> Resources:
    """Return the needs of linear operators and of the values between kernels; floats have 32 bits."""
    linear = [n for n in graph.nodes if is_linear(graph, n)]
    weights = sum(graph.weights[w].numel() * bits_of(plan, w) / 8 for w in dict.fromkeys(n.weight for n in linear))
    bops = {n.name: multiplications(graph, n) * bits_of(plan, n.data) * bits_of(plan, n.weight) for n in linear}
    sole = sole_readers(graph)
    return Resources(
        weights=weights,
        activations=peak_bytes(graph, plan),
        bops=sum(bops.values()),
        bops_of_sole_readers=sum(v for name, v in bops.items() if name in sole),
        largest=peak_bytes(graph, plan, largest=True),
    )


def sole_readers(graph: Graph) -> set[str]:
    """Return the linear operators whose input no other operator reads."""
    users = graph.users()
    return {n.name for n in graph.nodes if is_linear(graph, n) and len(users[n.data]) == 1}


def peak_bytes(graph: Graph, plan: Plan, bits: float | None = None, largest: bool = False) -> float:
    """Return the peak memory of values alive at one time, in the order of the graph [byte].

    Args:
        bits: of every quantized value, in place of the plan's.
        largest: see `counted_values`.
    """
    counted = counted_values(graph, plan, largest)
    return max((sum(value_bytes(graph, plan, name, bits) for name in names) for _, names in counted), default=0.0)


def counted_values(graph: Graph, plan: Plan, largest: bool) -> list[tuple[str, frozenset[str]]]:
    """Return operators with the values that count as memory of activations there.

    Args:
        largest: each quantized value alone counts, so that the peak is the largest of them.
    """
    moments = live_values(graph, plan)
    if not largest:
        return moments
    names = sorted({name for _, names in moments for name in names if plan.quantized(name)})
    return [(name, frozenset([name])) for name in names]


def live_values(graph: Graph, plan: Plan) -> list[tuple[str, frozenset[str]]]:
    """Return operators with the values alive at them, without those whose values are all alive at the next one too."""
    inner = {name for g in plan.groups for name in g[:-1]}
    now, late, out = frozenset(graph.inputs), set[str](), [("", frozenset(graph.inputs))]
    for n, done in zip(graph.nodes, done_after(graph), strict=True):
        late.update(done)
        if n.name in inner:  # inside a kernel, which still reads and does not write
            continue
        now |= set(n.outputs)
        if out[-1][1] <= now:
            out.pop()
        out += [(n.name, now)] if not out or not now <= out[-1][1] else []
        now -= late
        late.clear()
    return out


def value_bytes(graph: Graph, plan: Plan, name: str, bits: float | None = None) -> float:
    """Return the bytes of one sample of a value; an unknown size counts as 1."""
    wide = bits if bits is not None and plan.quantized(name) else bits_of(plan, name)
    return math.prod(int(d or 1) for d in graph.values[name].shape) * wide / 8


def bits_of(plan: Plan, name: str) -> float:
    """Return the bits of one number of a tensor."""
    stored = plan.stored(name)
    return float(stored.grid.bits) if stored is not None else 32.0
