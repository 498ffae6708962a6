"""Rounding of weights by what the calibration images make of it, in closed form; see `chipfit.rounding`."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.errors import interruption_note
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan, TensorPlan
from chipfit.registry import OFF, Setting, register
from chipfit.rounding import activation_ranges
from chipfit.rounding.compare import compare_plans, count_samples, split_holdout
from chipfit.rounding.sequential_reconstruction import GptqSettings, reconstruct
from chipfit.rounding.time_budget import fit_to_time

#: bits from which on the nearest codes are good enough
FEW = 6
_DOES = (
    "scales, codes and biases follow from what each operator reads; reads the data twice. None: 'gptq' where weights "
    "have fewer than 6 bits"
)
GUARD = Setting("rounding_guard", True, "the plain plan is kept where it is better on an eighth of the images", "guard")


@register(
    "correction",
    "rounding",
    stage="correct",
    needs=("stats", "batches", "choose"),
    excludes=("bias", "activation_bias", "second_moment"),
    decides=True,
    # nearest codes lose much; a range rule beside the default one was the user's choice
    asks=lambda bits, rule: "gptq" if min(bits, default=FEW) < FEW and rule == "mse" else None,
    setting=Setting("rounding", None, _DOES, "rounding", ("gptq", "nearest", OFF)),
    options=(
        Setting("rounding_samples", 4096, "output positions that each operator is fitted to", "samples"),
        Setting("rounding_images", None, "images that are used, the first ones; None: all", "most"),
        Setting("seconds", None, "time for all this, from which the two numbers before follow", "seconds"),
        Setting(
            "correct_weights", 0.1, "before they are rounded, weights move to what repairs their inputs; ridge", "ridge"
        ),
        Setting(
            "repair_residual", True, "operators before an addition repair what the other operand has lost", "residual"
        ),
        Setting("score_ranges", True, "class scores get the grid that keeps their probabilities", "scores"),
        Setting("effect_ranges", True, "activations of at most 6 bits: grids by what errors do to outputs", "effect"),
        GUARD,
    ),
)
def round_weights(
    graph: Graph,
    plan: Plan,
    *,
    stats: Mapping[str, TensorStats],
    batches: Iterable[Sequence[Tensor]],
    choose: Callable[..., dict[str, TensorPlan]],
    rounding: str = "gptq",
    samples: float = 4096,
    most: float | None = None,
    seconds: float | None = None,
    ridge: float | None = 0.1,
    residual: bool = True,
    scores: bool = True,
    effect: bool = True,
    guard: bool = True,
) -> tuple[Graph, Plan, list[str]]:
    """The graph with weights that lie on their grids and biases to match, the plan with their scales, and notes.

    Raises:
        DataError: no batch at all.
    """
    held: list[Sequence[Tensor]] = []
    images, chosen, notes = list(batches), plan.provenance.get("settings", {}), []
    if seconds is not None:
        most, samples, expected = fit_to_time(graph, plan, count_samples(images), seconds)
        notes.append(
            f"{'' if expected <= seconds else 'warning: '}rounding is expected to take {expected:.2g} s of {seconds:g} "
            f"with {most} images and {samples} positions"
        )
        amount = {"rounding_images": most, "rounding_samples": samples}
        steps = {k: v for k, v in chosen.get("steps", {}).items() if k != "seconds"} | amount
        plan = replace(plan, provenance={**plan.provenance, "settings": {**chosen, "steps": steps}})
    images = _first(images, most)
    if guard:
        images, held = split_holdout(images)
    how = GptqSettings(
        gptq=rounding == "gptq", samples=int(samples), seed=chosen.get("seed", 0), ridge=ridge, residual=residual
    )
    by_error = chosen.get("rule", "mse") == "mse"  # any other rule was the user's choice
    placed = (
        activation_ranges.with_weighted_ranges(graph, plan, stats, images, how.seed) if effect and by_error else plan
    )
    done = reconstruct(graph, placed, images, how, stats if scores and by_error else ())
    known = {k: t for k, t in placed.tensors.items() if t.role == "activation" and t.quantized} | done.tensors
    better_plan = replace(plan, tensors=choose(done.graph, known=known))
    notes += done.notes
    for name, t in done.tensors.items():
        if t.role == "weight" and t.scale is not None and not torch.equal(better_plan[name].scale, t.scale):
            notes.append(f"warning: the scale of '{name}' moved to satisfy the platform's rules after it was rounded")
    if held and not interruption_note(notes):
        fits, said = compare_plans(graph, held, (graph, plan), (done.graph, better_plan))
        if not fits:
            return graph, plan, [*notes, f"warning: weights are rounded to the nearest codes after all: {said}"]
        weights = sum(t.role == "weight" for t in done.tensors.values())
        notes.append(f"{weights} weights are rounded by {rounding}: {said}")
    return done.graph, better_plan, notes


def _first(batches: list[Sequence[Tensor]], most: float | None) -> list[Sequence[Tensor]]:
    """The batches that hold the first images; the last is cut where its tensors agree on their size."""
    left, out = math.inf if most is None else most, list[Sequence[Tensor]]()
    for batch in batches:
        if left <= 0:
            break
        cut = left < count_samples([batch]) and all(x.dim() and len(x) == len(batch[0]) for x in batch)
        out.append([x[: int(left)] for x in batch] if cut else batch)
        left -= count_samples([batch])
    return out
