"""Choice of units to remove: again and again those that lose least for what they save, until all budgets are kept."""

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from chipfit.channel_pruning.budget import Budget, counts_of, taken_by
from chipfit.channel_pruning.channels import Channels
from chipfit.channel_pruning.labels import FIXED
from chipfit.channel_pruning.resize import Axis
from chipfit.errors import PruningError
from chipfit.search.solve import format_amount


@dataclass
class Layers:
    """Linear operators whose output channels are the same units."""

    nodes: list[str]
    units: list[int]
    step: int  #: units that are removed at a time
    least: int  #: units that stay


def layers_of(channels: Channels, simd: Mapping[str, int], keep: Collection[str] = ()) -> list[Layers]:
    """Return the operators that lose channels together.

    Args:
        simd: operator -> channels of one instruction; of those that lose channels together, the largest counts.
        keep: operators that keep all channels.
    """
    of_unit: dict[int, Layers] = {}
    widths: dict[int, int] = {}
    for node, axis in channels.producers.items():
        counts = Counter(channels.units[axis].tolist())
        units = [u for u in counts if u != FIXED]
        merged = {id(of_unit[u]): of_unit[u] for u in units if u in of_unit}
        mine = Layers([node], units, 1, 1)
        own = math.ceil(simd.get(node, 1) / max(counts[u] for u in units))
        for other in merged.values():
            mine.nodes[:0], mine.units = other.nodes, sorted({*mine.units, *other.units})
            own = max(own, widths[id(other)])
        widths[id(mine)] = mine.step = mine.least = own
        of_unit.update(dict.fromkeys(mine.units, mine))
    found = {id(x): x for x in of_unit.values()}
    return [x for x in found.values() if not set(x.nodes) & set(keep)]


@dataclass
class Selection:
    """The search for units to remove.

    Args:
        importance: unit -> loss of the outputs without it.
    """

    channels: Channels
    layers: Sequence[Layers]
    budgets: Sequence[Budget]
    importance: Mapping[int, float]
    counts: dict[Axis, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = counts_of(self.channels)
        self.taken = taken_by(self.channels)
        self.left = [sorted(x.units, key=lambda u: -self.importance.get(u, 0.0)) for x in self.layers]
        self.readers: dict[Axis, list[tuple[int, int, int]]] = {}
        for b, budget in enumerate(self.budgets):
            for s, terms in enumerate(budget.sums):
                for t, term in enumerate(terms):
                    for axis in set(term.axes):
                        self.readers.setdefault(axis, []).append((b, s, t))
        self.sums = [[sum(t(self.counts) for t in terms) for terms in b.sums] for b in self.budgets]

    def removed(self) -> set[int]:
        """Return the units to remove so that all budgets are kept.

        Raises:
            PruningError: some budget cannot be kept.
        """
        out: list[tuple[int, list[int]]] = []
        queue = [(self._price(k), k) for k in range(len(self.layers))]
        heapq.heapify(queue)
        while any(max(sums) > b.limit for sums, b in zip(self.sums, self.budgets, strict=True)):
            price, k = heapq.heappop(queue) if queue else (math.inf, -1)
            if math.isinf(price):
                queue = [(self._price(k), k) for k in range(len(self.layers))]
                heapq.heapify(queue)
                if not queue or math.isinf(queue[0][0]):
                    raise self._unreachable()
                continue
            now = self._price(k)  # it depends on what was removed since
            if queue and now > queue[0][0]:
                heapq.heappush(queue, (now, k))
                continue
            group = self._next(k)
            del self.left[k][-len(group) :]
            out.append((k, group))
            self._apply(self._change(group))
            heapq.heappush(queue, (self._price(k), k))
        return {unit for _, group in self._needed(out) for unit in group}

    def _needed(self, removed: list[tuple[int, list[int]]]) -> list[tuple[int, list[int]]]:
        """Return the groups without those that may come back, the most important first, within the budgets."""
        out, closed = list(removed), set[int]()
        while True:
            last = {k: group for k, group in out if k not in closed}  # the others of a layer matter less
            if not last:
                return out
            k = max(last, key=lambda k: sum(self.importance.get(u, 0.0) for u in last[k]))
            back = self._change(last[k], back=True)
            deltas = self._deltas(back)
            sums = [[x - deltas.get((b, s), 0.0) for s, x in enumerate(xs)] for b, xs in enumerate(self.sums)]
            if any(max(xs) > b.limit for xs, b in zip(sums, self.budgets, strict=True)):
                closed.add(k)
                continue
            self._apply(back)
            out.remove((k, last[k]))

    def _next(self, k: int) -> list[int]:
        """Return the units that layers lose next: those beyond a whole number of steps first; [] if none can go."""
        layers, left = self.layers[k], self.left[k]
        size = len(left) % layers.step or layers.step
        return left[-size:] if len(left) - size >= layers.least else []

    def _change(self, group: Sequence[int], back: bool = False) -> dict[Axis, int]:
        fewer = Counter[Axis]()
        for unit in group:
            fewer.update(self.taken[unit])
        return {axis: self.counts[axis] + (n if back else -n) for axis, n in fewer.items()}

    def _deltas(self, after: Mapping[Axis, int]) -> dict[tuple[int, int], float]:
        places = {place for axis in after for place in self.readers.get(axis, ())}
        out: dict[tuple[int, int], float] = {}
        for b, s, t in places:
            term = self.budgets[b].sums[s][t]
            new = term.factor * math.prod(after.get(a, self.counts[a]) for a in term.axes)
            out[b, s] = out.get((b, s), 0.0) + term(self.counts) - new
        return out

    def _price(self, k: int) -> float:
        """Return the loss of the next removal over the share of violated budgets that it saves."""
        group = self._next(k)
        if not group:
            return math.inf
        deltas, saved = self._deltas(self._change(group)), 0.0
        for b, (sums, budget) in enumerate(zip(self.sums, self.budgets, strict=True)):
            most = max(sums)
            if most > budget.limit:
                after = max(x - deltas.get((b, s), 0.0) for s, x in enumerate(sums))
                saved += max(0.0, most - after) / budget.limit
        return sum(self.importance.get(u, 0.0) for u in group) / saved if saved > 0 else math.inf

    def _apply(self, after: Mapping[Axis, int]) -> None:
        for (b, s), delta in self._deltas(after).items():
            self.sums[b][s] -= delta
        self.counts.update(after)

    def _unreachable(self) -> PruningError:
        over = [(max(sums), b) for sums, b in zip(self.sums, self.budgets, strict=True) if max(sums) > b.limit]
        least, budget = max(over, key=lambda x: x[0] / x[1].limit)
        names = {n.name: n.display_name for n in self.channels.graph.nodes}
        fixed = [f"'{names[n]}' ({why})" for n, why in self.channels.fixed.items()]
        tight = [x for k, x in enumerate(self.layers) if len(x.units) == len(self.left[k])]
        small = [f"'{names[x.nodes[0]]}' ({len(x.units)} channels in groups of {x.step})" for x in tight]
        fixed, small = list(dict.fromkeys(fixed)), list(dict.fromkeys(small))
        hint = "".join(
            f"{word} {', '.join(found[:3])}{f' and {len(found) - 3} more' if len(found) > 3 else ''}; "
            for word, found in (("channels must stay in", fixed), ("layers cannot shrink:", small))
            if found
        )
        return PruningError(
            f"The limit on {budget.name} cannot be kept without removing whole layers",
            got=format_amount(budget.limit),
            allowed=f"{format_amount(least)} at least",
            hint=f"{hint}raise the limit",
        )
