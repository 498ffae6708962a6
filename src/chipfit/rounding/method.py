"""The protocol of rounding methods: what they are given, what they return, and how texts name them."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import Batch
from chipfit.errors import interruption_note
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.registry import create, entries, entries_in, options_of, parse_sum
from chipfit.rounding.compare import Planned, compare_plans

#: declaration of a correction that runs rounding methods
STEP: dict[str, Any] = {
    "stage": "correct",
    "chooses_scales": True,
    "needs": ("original", "batches", "stats", "choose", "settings"),
}


@dataclass(frozen=True, kw_only=True)
class RoundingContext:
    """The data and statistics that a rounding method may use."""

    original: Graph  #: the float network before all corrections
    batches: list[Batch]  #: calibration samples, as graph inputs
    stats: Mapping[str, TensorStats] = field(default_factory=dict)  #: activation -> its statistics in float
    #: (graph, known=tensors) -> the plans of all tensors of a graph; known ones keep theirs
    choose: Callable[..., dict[str, TensorPlan]]
    seed: int = 0
    rule: str = "mse"  #: range rule of activations


@dataclass(frozen=True)
class RoundingResult:
    """A graph with weights on their quantization grids, the plan that stores them, and one note per decision."""

    graph: Graph
    plan: Plan
    notes: list[str]


class RoundingMethod(Protocol):
    """A frozen dataclass whose fields are the options of the method."""

    def __call__(self, graph: Graph, plan: Plan, context: RoundingContext) -> RoundingResult:
        """Round the weights of `graph` that `plan` quantizes; both stay as they are."""


def apply_methods(
    text: str, graph: Graph, plan: Plan, *, batches: Iterable[Batch], settings: Any, **given: Any
) -> tuple[Graph, Plan, list[str]]:
    """Run the methods that a text names, one after another.

    Args:
        text: names of methods, such as "gptq" or "gptq + learned(scope='block')".
        settings: `chipfit.Settings`; those that a method declares as its options replace the options in the text.
        given: the other fields of `RoundingContext`.

    Returns:
        The graph, the plan, and the notes of all methods.

    Raises:
        DataError: there is no calibration data.
    """
    chosen, notes = plan.provenance.get("settings", {}), list[str]()
    named = {key: chosen[key] for key in ("seed", "rule") if key in chosen}
    context = RoundingContext(batches=list(batches), **named, **given)
    for method in create_methods(text, settings.to_record()):
        result = method(graph, plan, context)
        graph, plan, notes = result.graph, result.plan, notes + result.notes
        if interruption_note(notes):
            break
    return graph, plan, notes


def create_methods(text: str, settings: Mapping[str, Any]) -> list[RoundingMethod]:
    """Return the methods that a text names, with the options that these settings give them.

    Raises:
        UnknownNameError: no such method, or no such option of it.
        ConfigError: an option out of bounds.
    """
    methods = []
    for part, e in zip(parse_sum(text), entries_in("rounding", text), strict=True):
        method = create("rounding", part)
        given = {field: settings[o.name] for field, o in options_of(e).items() if o.name in settings}
        whole = {k: int(v) for k, v in given.items() if type(getattr(method, k)) is int}
        methods.append(replace(method, **given | whole))
    return methods


def fits_weights(text: str | None) -> bool:
    """Return whether a method that `Settings(rounding=text)` names declares that it fits weights to data."""
    return any(e.declares.fits for e in entries_in("rounding", text))


def default_method(bits: Collection[int], rule: str) -> str | None:
    """Return the method that declares itself the default for such weights.

    Args:
        bits: of each weight.
        rule: range rule of weights; a rule other than the default is the user's choice of how to round.
    """
    fewest = min(bits, default=math.inf)
    names = (name for name, e in entries("rounding").items() if fewest < e.declares.default_below)
    return next(names, None) if rule == "mse" else None


def keep_better(
    after: RoundingResult, before: Planned, original: Graph, held_out: Sequence[Batch], accepted: str, rejected: str
) -> RoundingResult:
    """Return `after`, or `before` where that loses less on held-out samples, with a note of both losses.

    Args:
        original: the float network.
        held_out: samples that rounding has not used; without any, and after an interruption, `after` is returned.
        accepted, rejected: the beginning of the note.
    """
    if not held_out or interruption_note(after.notes):
        return after
    better, losses = compare_plans(original, held_out, before, (after.graph, after.plan))
    if better:
        return replace(after, notes=[*after.notes, f"{accepted}: {losses}"])
    return RoundingResult(*before, [*after.notes, f"warning: {rejected}: {losses}"])
