"""GPTQ: scales, quantized values and biases of weights in closed form, so that each operator keeps its float outputs.

The steps are those of `rounding.sequential_reconstruction`; before them, activations of few bits and class scores get
ranges by the effect of their errors on the network's outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from chipfit.calibration.data import Batch
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.registry import option, register
from chipfit.rounding.activation_ranges import with_weighted_ranges
from chipfit.rounding.compare import count_samples, split_holdout
from chipfit.rounding.method import RoundingContext, RoundingResult, keep_better
from chipfit.rounding.sequential_reconstruction import GptqSettings, Reconstructed, reconstruct
from chipfit.rounding.time_budget import fit_to_time


@register("rounding", "gptq", fits=True, default_below=6, evens_channels=True)
@dataclass(frozen=True, kw_only=True)
class Gptq(GptqSettings):
    """Rounding column by column, where the error of each column moves to the columns that are still to be rounded.

    Source: Frantar et al. 2022, arXiv:2210.17323; see `rounding.gptq`.
    """

    images: float | None = option("rounding_images", None, "images that are used, the first ones; None: all")
    seconds: float | None = option("seconds", None, "time for rounding, from which `samples` and `images` follow")
    scores: bool = option("score_ranges", True, "class scores below 8 bits: ranges that keep their probabilities")
    effect: bool = option("effect_ranges", True, "activations of at most 6 bits: ranges by what errors do to outputs")
    guard: bool = option("rounding_guard", True, "an eighth of the images decides whether the plain plan is better")

    def __call__(self, graph: Graph, plan: Plan, context: RoundingContext) -> RoundingResult:
        method, notes = self, list[str]()
        if self.seconds is not None:
            method, note = self._within(self.seconds, graph, plan, count_samples(context.batches))
            plan, notes = _with_amounts(plan, method), [note]
        batches, held_out = split_holdout(limit_samples(context.batches, method.images), self.guard)
        done, new = method._fit(graph, plan, batches, context)
        weights, fitted = [name for name, t in done.tensors.items() if t.role == "weight"], Plan(tensors=done.tensors)
        moved = [name for name in weights if not torch.equal(new[name].scale, fitted[name].scale)]
        why = "moved to satisfy the platform's rules after it was rounded"
        notes += [*done.notes, *(f"warning: the scale of '{name}' {why}" for name in moved)]
        result = RoundingResult(done.graph, new, notes)
        accepted, rejected = f"{len(weights)} weights are rounded by {self.name}", "weights are rounded to the nearest"
        return keep_better(result, (graph, plan), context.original, held_out, accepted, f"{rejected} codes after all")

    def _fit(
        self, graph: Graph, plan: Plan, batches: Sequence[Batch], context: RoundingContext
    ) -> tuple[Reconstructed, Plan]:
        """Return what the reconstruction has decided, and the plan with these tensors and all others chosen again."""
        by_error, placed = context.rule == "mse", plan  # any other rule was the user's choice
        if self.effect and by_error:
            placed = with_weighted_ranges(graph, plan, context.stats, batches, context.seed)
        searched = context.stats if self.scores and by_error else ()
        done = reconstruct(graph, placed, batches, self, searched, seed=context.seed)
        known = {k: t for k, t in placed.tensors.items() if t.role == "activation" and t.quantized} | done.tensors
        return done, replace(plan, tensors=context.choose(done.graph, known=known))

    def _within(self, seconds: float, graph: Graph, plan: Plan, images: int) -> tuple[Gptq, str]:
        """Return the method with as many images and positions as the time allows, and a note."""
        most, samples, expected = fit_to_time(graph, plan, images, seconds)
        note = (
            f"rounding is expected to take {expected:.2g} s of {seconds:g} with {most} images and {samples} positions"
        )
        return replace(self, images=most, samples=samples), note if expected <= seconds else f"warning: {note}"


def _with_amounts(plan: Plan, method: Gptq) -> Plan:
    """Record the amounts that a time has led to in place of the time, so that the plan can be made again anywhere."""
    settings = plan.provenance.get("settings", {})
    steps = {k: v for k, v in settings.get("steps", {}).items() if k != "seconds"}
    steps |= {"rounding_images": method.images, "rounding_samples": method.samples}
    return replace(plan, provenance={**plan.provenance, "settings": {**settings, "steps": steps}})


def limit_samples(batches: list[Batch], most: float | None) -> list[Batch]:
    """Return the batches that hold the first samples; the last is cut where its tensors agree on their size."""
    left, out = math.inf if most is None else most, list[Batch]()
    for batch in batches:
        if left <= 0:
            break
        cut = left < count_samples([batch]) and all(x.dim() and len(x) == len(batch[0]) for x in batch)
        out.append([x[: int(left)] for x in batch] if cut else batch)
        left -= count_samples([batch])
    return out
