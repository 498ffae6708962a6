"""GPTQ: scales, quantized values and biases of weights in closed form, so that each operator keeps its float outputs.

The steps are those of `rounding.sequential_reconstruction`; before them, activations of few bits and class scores get
ranges by the effect of their errors on the network's outputs.
"""

import math
import timeit
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from chipfit.calibration.collect import TensorStats
from chipfit.calibration.data import Batch
from chipfit.decide.assignment import FEW_BITS
from chipfit.graph.ir import CPU, Graph, Node
from chipfit.graph.linear import is_linear, multiplications, places
from chipfit.plan.record import Plan
from chipfit.ranges.search import Sample, search
from chipfit.registry import option, register
from chipfit.rounding.compare import count_samples, limit_samples, split_holdout
from chipfit.rounding.fisher import IMAGES, importance
from chipfit.rounding.gptq_solver import CANDIDATES, CANDIDATES_OF_LONG_ROWS, LONG_ROW, scale_bounds, scale_is_allowed
from chipfit.rounding.method import RoundingContext, RoundingResult, keep_better
from chipfit.rounding.moments import as_rows
from chipfit.rounding.sequential_reconstruction import GptqSettings, SequentialReconstruction, first_names

#: (samples, output positions per operator), best first: positions above 2,048 matter less than samples, and samples
#: above 128 less than positions
LADDER = (
    *((None, positions) for positions in (65536, 32768, 16384, 8192, 4096, 2048)),
    *((256, 2048), (128, 2048), (128, 1024), (64, 1024), (64, 512), (32, 512), (16, 256)),
)
#: share of the speed of a matrix product that convolutions, gathers and rounding reach together
EFFICIENCY = 0.25


@register("rounding", "gptq", fits=True, default_below=6, evens_channels=True)
@dataclass(frozen=True, kw_only=True)
class Gptq(GptqSettings):
    """Rounding column by column, where the error of each column moves to the columns that are still to be rounded.

    Source: Frantar et al. 2022, arXiv:2210.17323; see `rounding.gptq_solver`.
    """

    images: float | None = option("rounding_images", None, "images that are used, the first ones; None: all")
    seconds: float | None = option("seconds", None, "time for rounding, from which `samples` and `images` follow")
    scores: bool = option("score_ranges", True, "class scores below 8 bits: ranges that keep their probabilities")
    effect: bool = option("effect_ranges", True, "activations of at most 6 bits: ranges by what errors do to outputs")
    guard: bool = option("rounding_guard", True, "an eighth of the images decides whether the plain plan is better")

    def __call__(self, graph: Graph, plan: Plan, context: RoundingContext) -> RoundingResult:
        method, notes = self, list[str]()
        if self.seconds is not None:
            images, samples, expected = fit_to_time(graph, plan, count_samples(context.batches), self.seconds)
            method, plan = replace(self, images=images, samples=samples), _with_amounts(plan, images, samples)
            amounts = f"with {images} images and {samples} positions"
            note = f"rounding is expected to take {expected:.2g} s of {self.seconds:g} {amounts}"
            notes = [note if expected <= self.seconds else f"warning: {note}"]
        batches, held_out = split_holdout(limit_samples(context.batches, method.images or math.inf), self.guard)
        done, new = method._fit(graph, plan, batches, context)
        weights = [name for name, t in done.tensors.items() if t.role == "weight"]
        moved = [name for name in weights if not torch.equal(new[name].scale, done.plan[name].scale)]
        why = "scales moved to satisfy the platform's rules after weights were rounded"
        notes += [*done.notes, *([f"warning: {why}: {first_names(moved)}"] if moved else [])]
        result = RoundingResult(done.graph, new, notes)
        accepted, rejected = f"{len(weights)} weights are rounded by {self.name}", "weights are rounded to the nearest"
        return keep_better(result, (graph, plan), context.original, held_out, accepted, f"{rejected} codes after all")

    def _fit(
        self, graph: Graph, plan: Plan, batches: Sequence[Batch], context: RoundingContext
    ) -> tuple[SequentialReconstruction, Plan]:
        """Return what the reconstruction has decided, and the plan with these tensors and all others chosen again."""
        by_error, placed = context.rule == "mse", plan  # any other rule was the user's choice
        if self.effect and by_error:
            placed = with_weighted_ranges(graph, plan, context.stats, batches, context.seed)
        searched = context.stats if self.scores and by_error else ()
        done = SequentialReconstruction(graph, placed, self, searched, context.seed).run(batches)
        known = {k: t for k, t in placed.tensors.items() if t.role == "activation" and t.quantized} | done.tensors
        return done, replace(plan, tensors=context.choose(done.graph, known=known))


def _with_amounts(plan: Plan, images: int, samples: int) -> Plan:
    """Record the amounts that a time has led to in place of the time, so that the plan can be made again anywhere."""
    settings = plan.provenance.get("settings", {})
    steps = {k: v for k, v in settings.get("steps", {}).items() if k != "seconds"}
    steps |= {"rounding_images": images, "rounding_samples": samples}
    return replace(plan, provenance={**plan.provenance, "settings": {**settings, "steps": steps}})


# ---------------------------------------------------------------- ranges of activations of few bits


def free_low_bit_activations(plan: Plan) -> list[str]:
    """Return the activations of few bits whose range the platform leaves free."""
    found = (t.name for t in plan.tensors.values() if t.role == "activation" and t.stored is not None)
    few = (n for n in found if plan[n].grid.bits <= FEW_BITS and plan[n].grid.nearest and not plan[n].scale.dim())
    return [n for n in few if n not in plan.zeros and scale_bounds(plan, n) is not None]


def with_weighted_ranges(
    graph: Graph, plan: Plan, stats: Mapping[str, TensorStats], batches: Iterable[Batch], seed: int
) -> Plan:
    """Return the plan with ranges of the least sum of (g^2 + 0.3 mean g^2) (Q(x) - x)^2 for activations of few bits.

    g is the gradient of the loss at labels drawn from the float network's own outputs; its square is the cost of an
    error to second order. The second term keeps the few samples from deciding alone.

    Args:
        stats: of the float network; activations that are not among them stay as they are.
        batches: of graph inputs, of which the first `fisher.IMAGES` samples are taken.
    """
    names = [n for n in free_low_bit_activations(plan) if n in stats and stats[n].low < stats[n].high]
    if not names:
        return plan
    for n, weighed in importance(graph, plan.float_edges, names, stats, batches, seed).items():
        assert isinstance(weighed, Sample)  # of an activation
        q = search(weighed, plan[n].grid, p=2.0)
        if scale_is_allowed(plan, n, q.scale[0]):
            origin = "least squared error weighed by squared gradients"
            new = plan.tensors[n].with_(scale=q.scale[0], zero_point=q.zero_point[0], origin=origin)
            plan = replace(plan, tensors={**plan.tensors, n: new})
    return plan


# ---------------------------------------------------------------- time


def multiplications_per_second(device: torch.device = CPU) -> float:
    """Return the multiplications per second of a matrix product on a device; on the CPU with all its threads."""
    size = 384 if device == CPU else 2048  # large enough that starting it takes no time
    a = torch.ones(size, size, device=device)
    seconds = timeit.repeat(lambda: (a @ a)[0, 0].item(), number=1, repeat=5)
    return float(size**3 / min(seconds))


def count_multiplications(graph: Graph, plan: Plan, images: int, positions: int) -> float:
    """Return the number of multiplications of a reconstruction."""
    linear = [n for n in graph.nodes if is_linear(graph, n)]
    passes = 2 * images + (3 * min(images, IMAGES) if free_low_bit_activations(plan) else 0)
    streams = passes * sum(multiplications(graph, n) for n in linear)
    fitted = [n for n in linear if plan.quantized(n.weight) and not graph.is_weight(n.data)]
    return streams + sum(_count_of_fit(graph, n, images, positions) for n in fitted)


def fit_to_time(graph: Graph, plan: Plan, images: int, seconds: float) -> tuple[int, int, float]:
    """Return samples, positions and expected seconds within a time; the least amount if none fits."""
    rate = EFFICIENCY * multiplications_per_second(graph.device)
    for most, positions in LADDER:
        used = min(images, most or images)
        expected = count_multiplications(graph, plan, used, positions) / rate
        if expected <= seconds:
            break
    return used, positions, expected


def _count_of_fit(graph: Graph, node: Node, images: int, positions: int) -> float:
    """Return the multiplications for one operator: moments, two factorizations, and all columns at each tried scale."""
    g, o, k = as_rows(node, graph.weights[node.weight].detach()).shape
    read = min(max(positions, 2 * k), images * places(node, graph.values[node.output].shape))
    tries = len(CANDIDATES_OF_LONG_ROWS if k > LONG_ROW else CANDIDATES)
    return float(g * (read * k * (k + o) + k**3 + tries * o * k * k))
