"""Memory and operations of a network as sums of products of channel counts, and budgets for them.

Sizes are those of a network of which every tensor has 8 bits, as shares in `Limits` are.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from chipfit.channel_pruning.channels import Channels
from chipfit.channel_pruning.resize import Axis
from chipfit.errors import ConfigError
from chipfit.graph.linear import is_linear, places
from chipfit.plan.record import Plan
from chipfit.search.limits import Limits, parse_amount
from chipfit.search.resources import live_values, sole_readers

#: bits of each number in sizes
BITS = 8
#: channels by axis
Counts = Mapping[Axis, int]


@dataclass(frozen=True)
class Term:
    """A constant times the channel counts of some axes."""

    factor: float
    axes: tuple[Axis, ...]

    def __call__(self, counts: Counts) -> float:
        return self.factor * math.prod(counts[a] for a in self.axes)


@dataclass(frozen=True)
class Budget:
    """A limit on a sum of terms, or on the largest of several sums."""

    name: str  #: of the limit
    sums: tuple[tuple[Term, ...], ...]
    limit: float

    def used(self, counts: Counts) -> float:
        """Return what a network with these channels takes."""
        return max((sum(t(counts) for t in terms) for terms in self.sums), default=0.0)


def budgets_of(channels: Channels, limits: Limits) -> list[Budget]:
    """Return the budgets that limits set; a share is one of the network as it is."""
    alive = tuple(_alive(channels, limits.largest_value))
    found = {
        "weights": lambda: (tuple(weight_terms(channels)),),
        "activations": lambda: alive,
        "total": lambda: tuple((*weight_terms(channels), *terms) for terms in alive),
        "bops": lambda: (tuple(operation_terms(channels, limits.sole_readers)),),
    }
    counts, out = counts_of(channels), list[Budget]()
    for name, value in limits.to_record().items():
        sums = found[name]()
        whole = Budget(name, sums, 0.0).used(counts)
        limit = parse_amount(value, whole, name)
        if limit > whole and str(value).strip().endswith("%"):
            what = f"The limit on {name} is more than the network takes"
            raise ConfigError(what, got=value, allowed="a share of the network, at most 100%")
        out.append(Budget(name, sums, limit))
    return out


def counts_of(channels: Channels) -> dict[Axis, int]:
    """Return the number of channels along each axis."""
    return {axis: len(units) for axis, units in channels.units.items()}


def parameters(channels: Channels, limit: float) -> Budget:
    """Return a budget for the number of parameters and statistics of all layers."""
    read = {i for n in channels.graph.nodes for i in n.inputs if i in channels.graph.weights}
    own = (i for i in read if i is not None and channels.graph.is_float(i))
    return Budget("parameters", (tuple(_size(channels, name) for name in sorted(own)),), limit)


def weight_terms(channels: Channels) -> Iterable[Term]:
    """Return the bytes of the weights of linear operators."""
    graph = channels.graph
    names = dict.fromkeys(n.weight for n in graph.nodes if is_linear(graph, n))
    return (_size(channels, name, BITS / 8) for name in names)


def operation_terms(channels: Channels, sole: bool = False) -> Iterable[Term]:
    """Return the bit operations of each linear operator; `sole`: of those whose input no other operator reads."""
    graph = channels.graph
    counted = sole_readers(graph) if sole else {n.name for n in graph.nodes if is_linear(graph, n)}
    for n in graph.nodes:
        if n.name in counted:
            value = graph.values[n.data if n.op.startswith("Transpose") else n.output]
            yield _size(channels, n.weight, BITS * BITS * places(n, value.shape))


def _size(channels: Channels, name: str, factor: float = 1.0) -> Term:
    """Return the numbers of a tensor, open sizes counted once, times a factor."""
    shape = channels.graph.shape(name)
    axes = tuple((name, k) for k in range(len(shape)) if (name, k) in channels.units)
    return Term(factor * math.prod(d or 1 for k, d in enumerate(shape) if (name, k) not in axes), axes)


def _alive(channels: Channels, largest: bool) -> Iterable[tuple[Term, ...]]:
    moments = [names for _, names in live_values(channels.graph, Plan())]
    if largest:
        moments = [frozenset([name]) for name in sorted(set[str]().union(*moments))]
    for names in moments:
        yield tuple(_size(channels, name, BITS / 8) for name in sorted(names))


def taken_by(channels: Channels) -> dict[int, Counter[Axis]]:
    """Return for each unit the channels that it takes along each axis."""
    out = {unit: Counter[Axis]() for unit in channels.removable}
    for axis, units in channels.units.items():
        found, counts = units.unique(return_counts=True)
        for unit, count in zip(found.tolist(), counts.tolist(), strict=True):
            if unit in out:
                out[unit][axis] += count
    return out
