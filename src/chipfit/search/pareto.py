"""Size against loss: the best widths for several budgets of one limit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chipfit.calibration.data import Batch
from chipfit.decision import Decision, plan_of, redecide
from chipfit.errors import PlanError, check_known
from chipfit.plan.record import Plan
from chipfit.rounding.compare import Reference
from chipfit.rounding.fisher import first_samples
from chipfit.screen import Summary, SummaryRepr
from chipfit.screen.figures import BLUE, GREY, drawn, new_figure
from chipfit.search.choose import count_widths, search_space
from chipfit.search.limits import OF_FILE, Limits
from chipfit.search.losses import RoundingModel
from chipfit.search.solve import LOSS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: of what the limited tensors take in 8 bits [%]
SHARES = (15, 20, 25, 30, 35, 40, 50, 60, 75, 100, 150, 200)


@dataclass(frozen=True, repr=False)
class Pareto(SummaryRepr):
    """The best choices of widths for rising budgets, each with what it takes and what it loses."""

    over: str  #: the limit
    #: size, share (of 8 bits), predicted, measured, bits (by tensor), height (0 to 1, of the logarithm of the loss)
    points: tuple[Mapping[str, Any], ...]

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Return a matplotlib figure of the loss over the size, predicted and measured.

        Args:
            path: file to write as well, in a format that matplotlib writes.

        Raises:
            ExportError: matplotlib is not installed, or the file cannot be written.
        """
        figure = new_figure(7, 4)
        axes = figure.subplots()
        for key, color in (("predicted", GREY), ("measured", BLUE)):
            axes.plot([100 * p["share"] for p in self.points], [p[key] for p in self.points], "o-", c=color, label=key)
        axes.set(xlabel=f"{self.over}, of what 8 bits take [%]", ylabel="loss", title="Best widths for each size")
        if all(p[key] > 0 for p in self.points for key in ("predicted", "measured")):
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
        return drawn(figure, path)

    def _summary(self) -> Summary:
        bars = ("#" * round(12 * p["height"]) for p in self.points)
        rows = [
            (f"{100 * p['share']:.0f} %", p["size"], p["predicted"], p["measured"], bar, count_widths(p["bits"]))
            for p, bar in zip(self.points, bars, strict=True)
        ]
        unit = "KL divergence to the float model for class scores, else share of the outputs' energy"
        known = {"loss": unit, "size": f"limit '{self.over}', and its share of 8 bits; rounded to the nearest"}
        header = ("share", "size", "predicted", "measured", "", "widths")
        return Summary(f"{len(rows)} best choices by {self.over}", known, header, rows, "pareto.points")


def pareto(
    d: Decision, plan: Plan, batches: Iterable[Batch], over: str, shares: Sequence[float], rounding: RoundingModel
) -> Pareto:
    """Return one point for each budget that can be kept; equal choices count once.

    Args:
        d: the decision that the plan follows.
        plan: how tensors are stored before corrections.
        batches: of graph inputs.
        over: name of the limit.
        shares: budgets, of what the tensors take in 8 bits [%].
        rounding: how tensors are rounded where losses are predicted.

    Raises:
        UnknownNameError: there is no such limit.
        PlanError: no budget can be kept.
        DataError: there is no batch.
    """
    limits = [f.name for f in fields(Limits) if f.name not in (LOSS, *OF_FILE)]
    check_known("limit", over, limits)
    images = list(first_samples(batches))
    reference, choices = Reference(d.graph, images), search_space(d, plan, [over], images, rounding)

    def loss(bits: Mapping[str, int]) -> float:
        other = redecide(d.with_bits(bits), plan)
        return reference.loss(other.graph, plan_of(other))

    found: dict[tuple[int, ...], dict[str, Any]] = {}
    refused = None
    for share in sorted(shares):
        try:
            limit: dict[str, Any] = {over: f"{share}%"}
            c = choices.choose(Limits(**limit))
        except PlanError as e:
            refused = e
            continue
        size, whole = c.used[over], c.most[over] / share * 100
        point = {"size": size, "share": size / whole, "predicted": c.predicted, "bits": c.bits}
        found.setdefault(tuple(c.bits.values()), point)
    if refused is not None and not found:
        raise refused
    points = [{**p, "measured": loss(p["bits"])} for p in found.values()]
    logs = [math.log(max(p["measured"], 1e-12)) for p in points]
    reach = max(logs) - min(logs) or 1.0
    return Pareto(over, tuple({**p, "height": (v - min(logs)) / reach} for p, v in zip(points, logs, strict=True)))
