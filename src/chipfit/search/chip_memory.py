"""Limits on the memories of a chip: the whole file and its arena, kept by bits where the network does not fit.

The search knows tensors, and a file holds more: scales, names and records, gaps between tensors. It is made and
measured after each choice, and what it takes too much is taken from the budget of the tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from chipfit.calibration.data import Batch
from chipfit.decide.overrides import to_record
from chipfit.decision import Decision, choose_scales, decide, plan_of
from chipfit.errors import PlanError
from chipfit.graph.ir import Graph
from chipfit.graph.linear import is_linear
from chipfit.plan.record import Plan
from chipfit.search.choose import ChosenWidths, SearchSpace, search_space, search_widths, with_choice
from chipfit.search.limits import OF_FILE, Amount, Limits
from chipfit.search.losses import RoundingModel
from chipfit.search.resources import resources

_ROUNDS = 4  #: choices that are measured
_ANY_LOSS = 1e30


@dataclass(frozen=True)
class Footprint:
    """The memory of a chip that a file takes, for one sample [byte]."""

    ram: int  #: arena that TensorFlow Lite Micro needs
    flash: int  #: the file
    ram_layer: str  #: at which most is alive
    ram_alive: int  #: tensors and scratch buffers that are alive there
    flash_layer: str  #: with the largest weights
    flash_weights: int  #: its weights

    def over(self, most: Mapping[str, float]) -> dict[str, float]:
        """Return what it takes too much, by the name of the limit."""
        return {k: getattr(self, k) - v for k, v in most.items() if getattr(self, k) > v}


Measure = Callable[[Graph, Plan], Footprint]


def fit_widths(
    d: Decision, limits: Limits, read: Callable[[], Iterable[Batch]], rounding: RoundingModel, measure: Measure
) -> Decision:
    """Return the decision with which the file fits; as it is, apart from other limits, if it fits already.

    First the weights of fully connected layers get one scale each, then weights or activations get fewer bits.

    Args:
        d, limits, read, rounding: see `chipfit.search.choose.search_widths`.
        measure: what a file takes.

    Raises:
        PlanError: it does not fit; names the layer that needs most.
        DataError: there is no batch.
    """
    record, most = limits.to_record(), limits.of_file()
    rest = {k: v for k, v in record.items() if k not in most}
    now = search_widths(d, _limits(rest, limits), read, rounding) if rest else d
    now = replace(now, provenance={**now.provenance, "limits": record})
    found = measure(now.graph, plan_of(now))
    if not found.over(most):
        return now
    if (coarser := with_one_scale(now)) is not None:
        d = now = coarser
        found = measure(now.graph, plan_of(now))
    if not (over := found.over(most)):
        return now
    tensors = {OF_FILE[k]: getattr(resources(now.graph, plan_of(now)), OF_FILE[k]) for k in over}
    space = search_space(d, plan_of(d), {*rest, *tensors}, read(), rounding)
    tried = [found]
    for more in _budgets(space, tensors, rest, limits, lambda: over):
        now = with_choice(d, more, record)
        tried.append(measure(now.graph, plan_of(now)))
        if not (over := tried[-1].over(most)):
            return now
    raise too_large(min(tried, key=lambda f: max(getattr(f, k) / v for k, v in most.items())), most)


def with_one_scale(d: Decision) -> Decision | None:
    """Return the decision in which the weights of each fully connected layer share one scale; None if they do already.

    A file stores every scale and zero point, also of the bias, and TensorFlow Lite Micro keeps a multiplier and a shift
    for each in its arena; those of convolutions it keeps anyway.
    """
    plan = plan_of(d)
    layers = [n for n in d.graph.nodes if n.facts.kind == "linear" and is_linear(d.graph, n)]
    found = [n.name for n in layers if (t := plan.stored(n.weight)) is not None and t.scale.numel() > 1]
    if not found:
        return None
    overrides: list[tuple[Any, Any]] = [("Linear", {"per": "tensor"}), *d.all_overrides]
    other = choose_scales(decide(replace(d, overrides=overrides, widths=())))
    note = f"the weights of {len(found)} fully connected layers share one scale each, to keep the limits"
    provenance = {**other.provenance, "edited": to_record(overrides)}
    return replace(other, notes=(*other.notes, note), provenance=provenance)


def _budgets(
    space: SearchSpace,
    tensors: Mapping[str, float],
    rest: Mapping[str, Amount],
    limits: Limits,
    over: Callable[[], Mapping[str, float]],
) -> Iterator[ChosenWidths]:
    """Yield choices with ever less memory, and at last the one with the smallest weights.

    Args:
        tensors: limit on tensors -> what they take now.
        rest: other limits.
        over: returns what the last choice took too much, by the name of the limit on the file.
    """
    budgets = dict(tensors)
    for _ in range(_ROUNDS):
        excess = {OF_FILE[k]: v for k, v in over().items()}
        budgets = {k: v - excess.get(k, 0.0) for k, v in budgets.items()}
        if min(budgets.values()) <= 0:
            break
        try:
            yield space.choose(_limits({**rest, **budgets}, limits))
        except PlanError:
            break
    if "weights" in budgets:
        yield space.choose(_limits({**rest, "loss": _ANY_LOSS}, limits))


def check_memory(limits: Limits | None, graph: Graph, plan: Plan, measure: Measure) -> None:
    """Check that a file keeps the limits on the chip's memory, after corrections too.

    Raises:
        PlanError: it does not.
    """
    most = limits.of_file() if limits is not None else {}
    if most and (found := measure(graph, plan)).over(most):
        raise too_large(found, most)


def too_large(found: Footprint, most: Mapping[str, float]) -> PlanError:
    """Return the error for a file that does not keep its limits, with the layer that needs most."""
    name = max(over := found.over(most), key=lambda k: over[k] / most[k])
    reasons = {
        "ram": ("arena", f"'{found.ram_layer}' needs most: {found.ram_alive:,} bytes are alive while it runs"),
        "flash": ("file", f"'{found.flash_layer}' needs most: {found.flash_weights:,} bytes of weights"),
    }
    part, why = reasons[name]
    return PlanError(
        f"The {part} does not keep the limit on {name}",
        got=f"{getattr(found, name):,} bytes, the least of all choices that were tried",
        allowed=f"{most[name]:,.0f} bytes",
        hint=f"{why}; smaller inputs or fewer channels (`chipfit.prune`) need less",
    )


def _limits(record: Mapping[str, Amount], like: Limits) -> Limits:
    return Limits(**dict[str, Any](record), largest_value=like.largest_value, sole_readers=like.sole_readers)
