"""The search of bits under limits: the possible choices, their costs, and the choice with the least loss."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from operator import itemgetter

from chipfit.calibration.data import Batch
from chipfit.decide.overrides import resolve_overrides
from chipfit.decision import Decision, choose_scales, decide, plan_of
from chipfit.graph.ir import Graph
from chipfit.graph.linear import multiplications
from chipfit.plan.record import Plan
from chipfit.rounding.compare import Reference
from chipfit.rounding.fisher import IMAGES, first_samples
from chipfit.search import candidates
from chipfit.search.limits import Amount, Limits, parse_amount
from chipfit.search.losses import NEAREST, Losses, RoundingModel, losses
from chipfit.search.resources import bits_of, counted_values, peak_bytes, sole_readers, value_bytes
from chipfit.search.solve import LOSS, Choice, format_amount, limit_of, solutions

#: limits that depend on the bits of weights, and of activations
_OF_WEIGHTS, _OF_ACTIVATIONS = {"weights", "total", "bops", LOSS}, {"activations", "total", "bops"}


#: number of choices whose losses are measured, and the multiplications that measuring may take
TRIES, WORK = 8, 2e9


def count_widths(bits: Mapping[str, int]) -> str:
    """Return the number of tensors with each width, such as "2 of 4 bits, 5 of 8 bits"."""
    return ", ".join(f"{n} of {b} bits" for b, n in sorted(Counter(bits.values()).items()))


@dataclass(frozen=True)
class ChosenWidths:
    """The outcome of a search."""

    weights: dict[str, int]  #: weight -> bits
    activations: dict[str, int]  #: activation -> bits, of those whose bits were searched
    predicted: float  #: predicted loss of this choice [nat for class scores]
    used: dict[str, float]  #: limit -> amount that the choice uses
    most: dict[str, float]  #: limit -> amount that is allowed
    widths: dict[str, tuple[int, ...]]  #: tensor -> bits to choose from, ascending
    measured: float | None = None  #: measured loss, if it decided
    tries: int = 0  #: number of choices whose loss was measured

    @property
    def bits(self) -> dict[str, int]:
        return {**self.weights, **self.activations}

    def has_no_more_bits(self, than: "ChosenWidths") -> bool:
        """Return whether no tensor has more bits than in another choice."""
        return all(bits <= than.bits[name] for name, bits in self.bits.items())

    def __str__(self) -> str:
        """Return a line: the number of tensors with each width, the amounts used, and the loss."""

        more = f"; of activations: {count_widths(self.activations)}" if self.activations else ""
        amounts = ((name, format_amount(self.used[name]), format_amount(most)) for name, most in self.most.items())
        takes = ", ".join(f"{name} {used} of {most}" for name, used, most in amounts)
        loss = f"predicted loss {self.predicted:.3g}"
        if self.measured is not None:
            loss += f", measured {self.measured:.3g}, the least of {self.tries} choices"
        return f"widths of weights chosen: {count_widths(self.weights)}{more}; {takes}; {loss}"


@dataclass(frozen=True)
class SearchSpace:
    """All choices of bits in one network, and the loss of each."""

    graph: Graph
    plan: Plan
    parts: Sequence[candidates.TiedChoice]  #: activations whose bits are chosen
    pairs: Mapping[str, Sequence[tuple[int, int]]]  #: linear operator -> (weight bits, input bits)
    weights: dict[str, tuple[int, ...]]  #: weight -> bits, ascending
    losses: Losses

    def choose(self, limits: Limits, measure: Callable[[Mapping[str, int]], float] | None = None) -> ChosenWidths:
        """Return the choice with the least loss inside the limits; if the loss is limited, the smallest weights.

        Args:
            measure: the loss of the network with these widths. Of a small network it decides among the choices with the
                least predicted losses: few bits in several tensors lose more, or less, than each of them alone. Bits
                that no limit asks for are not taken away: what a narrower choice gains so is chance.

        Raises:
            PlanError: there is none.
        """
        found = self._choices(limits)
        work = IMAGES * sum(multiplications(self.graph, n) for n in self.graph.nodes)
        tries = int(min(TRIES, WORK / max(work, 1.0)))
        if measure is None or limits.loss is not None or tries < 2:
            return next(found)
        tried = list[ChosenWidths]()
        for c in islice(found, tries):
            if not any(c.has_no_more_bits(than=other) for other in tried):
                tried.append(c)
        measured = [(measure(c.bits), -sum(c.bits.values()), c) for c in tried]
        loss, _, best = min(measured, key=itemgetter(0, 1))
        return replace(best, measured=loss, tries=len(measured))

    def _choices(self, limits: Limits) -> Iterator[ChosenWidths]:
        """Yield the choices inside the limits, the best first."""
        largest = limits.largest_value
        counted = self.pairs.keys() & sole_readers(self.graph) if limits.sole_readers else self.pairs.keys()
        most = {k: parse_amount(v, self._whole(k, counted, largest), k) for k, v in limits.to_record().items()}
        moments = counted_values(self.graph, self.plan, largest)
        budgets = {k: v for k, v in most.items() if k in ("weights", "bops", LOSS)}
        during = {f"{k} while '{name}' runs": at for k in ("activations", "total") if k in most for name, at in moments}
        budgets |= {name: most[limit_of(name)] for name in during}
        units = self._units(during, counted if "bops" in most else ())
        for picks in solutions(units, budgets, least="weights" if LOSS in most else LOSS):
            yield self._choice(units, picks, budgets, most)

    def _choice(
        self, units: Sequence[Choice], picks: Sequence[int], budgets: Mapping[str, float], most: dict[str, float]
    ) -> ChosenWidths:
        chosen = {u.name: k for u, k in zip(units, picks, strict=True)}
        taken = {r: sum(u.cost(r)[k] for u, k in zip(units, picks, strict=True)) for r in budgets}
        used = {k: max(v for r, v in taken.items() if limit_of(r) == k) for k in most}
        values = {t: p for p in self.parts for t in p.tensors}
        weights = {name: wide[chosen[name]] for name, wide in self.weights.items()}
        activations = {t: p.widths[chosen[p.name]] for t, p in values.items()}
        predicted = sum(u.losses[k] for u, k in zip(units, picks, strict=True))
        widths = self.weights | {t: p.widths for t, p in values.items()}
        return ChosenWidths(weights, activations, predicted, used, most, widths)

    def _whole(self, name: str, counted: Collection[str], largest: bool) -> float:
        """Return the amount that the tensors of a limit use in 8 bits, for limits given as a share."""
        searched = {t for p in self.parts for t in p.tensors}
        readers = [n for n in self.graph.nodes if n.name in counted]
        if name == "bops":
            wide = {n.data: 8 if n.data in searched else bits_of(self.plan, n.data) for n in readers}
            return sum(multiplications(self.graph, n) * 8 * wide[n.data] for n in readers)
        weights = sum(float(self.graph.weights[w].numel()) for w in self.weights)
        values = 0.0 if name == "weights" else peak_bytes(self.graph, self.plan, 8.0, largest)
        return values + (0.0 if name == "activations" else weights)

    def _units(self, during: Mapping[str, frozenset[str]], counted: Collection[str]) -> list[Choice]:
        """Return the choices of weights, tied activations, fixed values, and kernels that restrict pairs of bits."""
        out, wide = [], self.weights
        total = [r for r in during if limit_of(r) == "total"]
        for name, bits in wide.items():
            takes = tuple(self.graph.weights[name].numel() * b / 8 for b in bits)
            lost = tuple(self.losses[name][b] for b in bits)
            out.append(Choice(name, lost, {"weights": takes, **dict.fromkeys(total, takes)}))
        part = {t: p for p in self.parts for t in p.tensors}
        for p in self.parts:
            bytes_of = {t: value_bytes(self.graph, self.plan, t, 8.0) for t in p.tensors}
            at_8_bits = {r: sum(bytes_of[t] for t in at & bytes_of.keys()) for r, at in during.items()}
            cost = {r: tuple(v * b / 8 for b in p.widths) for r, v in at_8_bits.items() if v}
            lost = tuple(sum(self.losses[t][b] for t in p.tensors if t in self.losses) for b in p.widths)
            out.append(Choice(p.name, lost, cost))
        for name in sorted({t for at in during.values() for t in at if t not in part}):
            takes = (value_bytes(self.graph, self.plan, name),)
            out.append(Choice(name, (0.0,), {r: takes for r, at in during.items() if name in at}))
        for n in (n for n in self.graph.nodes if n.name in self.pairs):
            own = part.get(n.data)
            pairs = [(b, a) for b, a in self.pairs[n.name] if b in wide[n.weight]]
            if n.name not in counted and (own is None or len(pairs) == len(wide[n.weight]) * len(own.widths)):
                continue
            implies = {n.weight: tuple(wide[n.weight].index(b) for b, _ in pairs)}
            implies |= {own.name: tuple(own.widths.index(a) for _, a in pairs)} if own else {}
            times = multiplications(self.graph, n)
            costs = {"bops": tuple(times * b * (a or 32.0) for b, a in pairs)} if n.name in counted else {}
            out.append(Choice(f"kernel {n.name}", (0.0,) * len(pairs), costs, implies))
        return out


def search_space(
    d: Decision, plan: Plan, limited: Collection[str], batches: Iterable[Batch], rounding: RoundingModel = NEAREST
) -> SearchSpace:
    """Return what may be chosen where some resources are limited, and what each choice loses.

    Args:
        d: the decision that the plan follows; bits that its overrides give stay.
        plan: how tensors are stored now.
        limited: names of `Limits`; only the tensors that these limits are about get other bits.
        batches: of graph inputs.
        rounding: how tensors will be rounded.

    Raises:
        DataError: there is no batch.
    """
    by_hand = resolve_overrides(d.graph, d.overrides)
    known = d.stats.keys() | {t.name for t in d.assignment.tensors.values() if t.range is not None}
    parts: list[candidates.TiedChoice] = []
    if _OF_ACTIVATIONS.intersection(limited):
        found = (p for p in candidates.activation_choices(d, plan, by_hand) if len(p.widths) > 1)
        parts = [p for p in found if known >= set(p.tensors)]  # whose ranges at other widths are known
        parts = [p for p in candidates.keep_available(d, plan, parts) if len(p.widths) > 1]
    stay = {name for name, c in by_hand.items() if c.get("bits") is not None}
    stay |= set() if _OF_WEIGHTS.intersection(limited) else {n.name for n in d.graph.nodes}
    pairs = candidates.kernel_widths(d, plan, parts, stay)
    weights = candidates.weight_widths(d.graph, pairs)
    widths = {**weights, **{t: p.widths for t, p in candidates.own_errors(d.graph, plan, parts).items()}}
    return SearchSpace(d.graph, plan, parts, pairs, weights, losses(d, plan, batches, widths, rounding))


def search_widths(
    d: Decision, limits: Limits, read: Callable[[], Iterable[Batch]], rounding: RoundingModel = NEAREST
) -> Decision:
    """Return the decision with the bits that lose least inside the limits, and with the scales that go with them.

    Args:
        d: a decision whose scales are chosen.
        read: returns the calibration batches.
        rounding: how tensors will be rounded.

    Raises:
        PlanError: the limits cannot be kept.
        DataError: there is no batch.
    """
    reference = cache(lambda: Reference(d.graph, first_samples(read())))

    def loss(bits: Mapping[str, int]) -> float:
        other = choose_scales(decide(d.with_bits(bits)))
        return reference().loss(other.graph, plan_of(other))

    limited = limits.to_record()
    choice = search_space(d, plan_of(d), limited, read(), rounding).choose(limits, None if rounding.fitted else loss)
    return with_choice(d, choice, limited)


def with_choice(d: Decision, choice: ChosenWidths, limited: Mapping[str, Amount]) -> Decision:
    """Return the decision with the bits of a choice, the scales that go with them, and a note."""
    chosen = choose_scales(decide(d.with_bits(choice.bits)))
    widths = {tensor: list(bits) for tensor, bits in choice.widths.items()}
    provenance = {**d.provenance, "limits": limited, "chosen": choice.bits, "widths": widths}
    return replace(chosen, notes=(*chosen.notes, str(choice)), provenance=provenance)
