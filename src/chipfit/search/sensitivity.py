"""Sensitivity: the loss that each tensor adds, as it is stored and at other bits, and advice on the worst ones."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chipfit.calibration.data import Batch
from chipfit.decision import Decision, plan_of, redecide
from chipfit.errors import ChipfitError
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.rounding.compare import Reference, count_samples
from chipfit.rounding.fisher import first_samples
from chipfit.screen import Summary, SummaryRepr
from chipfit.screen.figures import BLUE, bars, drawn
from chipfit.search.candidates import activation_choices, kernel_widths, own_errors, weight_widths
from chipfit.search.losses import NEAREST, Losses, RoundingModel, losses
from chipfit.search.resources import resources

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: number of changes that are tried, and the share of the loss that one must recover to be advised
TRIALS, GAIN = 2, 0.1
#: share of float's gain that more bits must reach to be advised instead of float
ENOUGH = 0.75


@dataclass(frozen=True, repr=False)
class Sensitivity(SummaryRepr):
    """The predicted loss of every tensor alone, in nats of KL divergence for class scores."""

    losses: Losses  #: tensor -> width in bits -> loss
    bits: dict[str, int]  #: tensor -> present bits
    layers: dict[str, str]  #: the user's layer that owns or makes it
    tried: tuple[str, ...] = ()  #: advice: overrides that were tried and help, each with its gain and cost

    def ranked(self) -> list[tuple[str, float]]:
        """Return tensors with the loss that float would recover, the largest first."""
        return sorted(((t, row[self.bits[t]]) for t, row in self.losses.items()), key=lambda x: -x[1])

    def rows(self) -> list[dict[str, Any]]:
        """Return one row a tensor: layer, bits, loss, loss as a share of the greatest, and losses at other bits."""
        most = max((v for _, v in self.ranked() if math.isfinite(v)), default=0.0)
        return [
            {
                "tensor": t,
                "layer": self.layers[t] or t,
                "bits": self.bits[t],
                "loss": v,
                "share": min(v / most, 1.0) if most and not math.isnan(v) else 0.0,
                "others": {b: x for b, x in sorted(self.losses[t].items()) if b != self.bits[t]},
            }
            for t, v in self.ranked()
        ]

    def plot(self, path: str | Path | None = None, count: int = 32) -> "Figure":
        """Return a matplotlib figure of the most sensitive tensors: a bar as they are, a dot at each other width.

        Args:
            path: file to write as well, in a format that matplotlib writes.
            count: number of tensors.

        Raises:
            ExportError: matplotlib is not installed, or the file cannot be written.
        """
        rows = self.rows()[: max(count, 0)]
        named = [(f"{r['tensor']}, {r['bits']} bits", r["loss"], BLUE) for r in rows]
        left = len(self.losses) - len(rows)
        title = "Loss that each tensor alone adds" + (f"; {left} more add less" if left else "")
        figure, axes = bars(named, "predicted loss", title)
        for bits in sorted({b for r in rows for b in r["others"]}):
            places = [(r["others"][bits], k) for k, r in enumerate(rows) if bits in r["others"]]
            axes.plot(*zip(*places, strict=True), "o", markersize=4, label=f"{bits} bits")
        if axes.get_legend_handles_labels()[1]:
            axes.legend(title="at other widths", loc="lower right")
        return drawn(figure, path)

    def _summary(self) -> Summary:
        others = (", ".join(f"{b}: {x:.2g}" for b, x in r["others"].items()) for r in self.rows())
        rows = [
            (r["layer"], r["tensor"], r["bits"], r["loss"], "#" * round(12 * r["share"]), more)
            for r, more in zip(self.rows(), others, strict=True)
        ]
        return Summary(
            f"Predicted loss {sum(v for _, v in self.ranked()):.3g}, of {len(rows)} tensors one at a time",
            {
                "unit": "KL divergence to the float model for class scores, else share of the outputs' energy",
                "try": " ".join(self.tried),
            },
            ("layer", "tensor", "bits", "loss", "", "at other widths"),
            rows,
            "sensitivity.losses",
        )


def sensitivity(d: Decision, plan: Plan, batches: Iterable[Batch], rounding: RoundingModel = NEAREST) -> Sensitivity:
    """Return the losses of all quantized weights of linear operators and of all quantized activations.

    Args:
        d: the decision that the plan follows; without its statistics only the present bits of activations are tried.
        plan: how tensors are stored before corrections.
        batches: of graph inputs.
        rounding: how tensors are rounded.

    Raises:
        DataError: there is no batch.
    """
    images = list(first_samples(batches))
    found = _losses_at(d, plan, images, weight_widths(d.graph, kernel_widths(d, plan)), rounding)
    return replace(found, tried=_advice(found, d, plan, images))


def activation_losses(d: Decision, plan: Plan, batches: Iterable[Batch]) -> Sensitivity:
    """Return the losses of all quantized activations, without advice; see `sensitivity`."""
    return _losses_at(d, plan, batches, {})


def _losses_at(
    d: Decision,
    plan: Plan,
    batches: Iterable[Batch],
    of_weights: Mapping[str, Collection[int]],
    rounding: RoundingModel = NEAREST,
) -> Sensitivity:
    """Return the losses of weights at these widths, and of activations at theirs."""
    widths = dict(of_weights)
    for t, p in own_errors(d.graph, plan, activation_choices(d, plan, {})).items():
        widths[t] = p.widths if t in d.stats else (plan[t].grid.bits,)
    found = losses(replace(d, seed=0), plan, batches, widths, rounding)
    layers = {name: plan.tensors[name].layer for name in widths}
    return Sensitivity(found, {name: plan[name].grid.bits for name in widths}, layers)


class Suggestion(NamedTuple):
    """Overrides that may help for a sensitive tensor."""

    tensor: str
    overrides: dict[str, Any]
    bits: int | None  #: of the tensor; None: float

    def __str__(self) -> str:
        """Return the layers, and what becomes of them."""
        first, left = list(self.overrides)[:4], len(self.overrides) - 4
        names = "', '".join(first) + (f"' and {left} more" if left > 0 else "'")
        return f"'{names} in float" if self.bits is None else f"'{names} at {self.bits} bits"


def suggestions(found: Sensitivity, graph: Graph) -> Iterator[Suggestion]:
    """Yield more bits, or float where these gain little, for the most sensitive tensors."""
    total = sum(v for _, v in found.ranked())
    for tensor, loss in [(t, v) for t, v in found.ranked() if v > GAIN * total][:TRIALS]:
        gains = {b: loss - x for b, x in found.losses[tensor].items() if b > found.bits[tensor]}
        bits = min((b for b, gain in gains.items() if gain >= ENOUGH * loss), default=None)
        layers, choice = _layers_around(graph, tensor), "bits" if tensor in graph.weights else "activation_bits"
        yield Suggestion(tensor, dict.fromkeys(layers, "float") if bits is None else {layers[0]: {choice: bits}}, bits)


def _advice(found: Sensitivity, d: Decision, plan: Plan, images: Sequence[Batch]) -> tuple[str, ...]:
    """Return a sentence for each suggestion that the platform allows and that improves the outputs on these images."""
    reference, size, out = Reference(d.graph, images), resources(d.graph, plan).weights, []
    before, total = reference.loss(d.graph, plan), sum(v for _, v in found.ranked())
    samples = count_samples(images)
    for s in suggestions(found, d.graph):
        try:
            other = redecide(d.with_overrides(s.overrides), plan)
        except ChipfitError:  # the platform does not allow it
            continue
        changed = other.graph, plan_of(other)
        after = reference.loss(*changed)
        if before and after <= (1 - GAIN) * before:
            row = found.losses[s.tensor]
            gain, predicted = 1 - after / before, (row[found.bits[s.tensor]] - row.get(s.bits or 0, 0.0)) / total
            price = resources(*changed).weights / size - 1
            out.append(
                f"keep {s}: overrides={s.overrides} takes the loss from "
                f"{before:.3g} to {after:.3g} ({-100 * gain:+.0f} %, predicted {-100 * predicted:+.0f} %) for "
                f"{100 * price:+.1f} % of the weights' memory (tried on {samples} samples, rounded to the nearest)."
            )
    return tuple(out)


def _layers_around(graph: Graph, tensor: str) -> list[str]:
    """Return the layers that must run in float for a tensor to be float: those that read it, and first its producer."""
    maker = graph.producers().get(tensor)
    around = [*([maker] if maker is not None else []), *graph.users().get(tensor, [])]
    return list(dict.fromkeys(n.display_name for n in around))
