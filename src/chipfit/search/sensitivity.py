"""Which tensors hurt: the loss that each adds, as it is stored and at other widths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from chipfit.calibration.collect import TensorStats
from chipfit.graph.ir import Graph
from chipfit.plan.record import Plan
from chipfit.platform.schema import Platform
from chipfit.screen import Screen, Shown
from chipfit.search.limits import candidates
from chipfit.search.losses import Losses, losses


@dataclass(frozen=True, repr=False)
class Sensitivity(Shown):
    """The predicted loss of every tensor alone, in nats of KL divergence for class scores."""

    losses: Losses  #: tensor -> width in bits -> loss
    bits: dict[str, int]  #: the width that each has
    layers: dict[str, str]  #: the user's layer that owns or makes it

    def ranked(self) -> list[tuple[str, float]]:
        """Tensors and what keeping each in float would give back, most first."""
        return sorted(((t, row[self.bits[t]]) for t, row in self.losses.items()), key=lambda x: -x[1])

    def _screen(self) -> Screen:
        ranked = self.ranked()
        total, most = sum(v for _, v in ranked), max((v for _, v in ranked), default=0.0)
        rows = [
            (
                self.layers[t] or t,
                t,
                self.bits[t],
                v,
                "#" * round(12 * v / most) if most else "",
                ", ".join(f"{b}: {x:.2g}" for b, x in sorted(self.losses[t].items()) if b != self.bits[t]),
            )
            for t, v in ranked
        ]
        return Screen(
            f"Predicted loss {total:.3g}, of {len(rows)} tensors one at a time",
            {"unit": "KL divergence to the float model for class scores, else share of the outputs' energy"},
            ("layer", "tensor", "bits", "loss", "", "at other widths"),
            rows,
            "sensitivity.losses",
        )


def sensitivity(
    graph: Graph,
    plan: Plan,
    platform: Platform,
    batches: Iterable[Sequence[Tensor]],
    stats: Mapping[str, TensorStats],
) -> Sensitivity:
    """The losses of all weights of linear operators and of all activations that are stored in codes.

    Args:
        batches: of graph inputs.
        stats: of activations, for their ranges at other widths; without them only the present width is tried.

    Raises:
        DataError: no batch at all.
    """
    widths: dict[str, tuple[int, ...]] = dict(candidates(graph, platform, plan))
    for name, t in plan.tensors.items():
        if t.role == "activation" and t.stored is not None and name not in widths:
            widths[name] = (t.stored.grid.bits,)
    now = {name: plan[name].grid.bits for name in widths}
    found = losses(graph, plan, batches, widths, stats)
    return Sensitivity(found, now, {name: plan.tensors[name].layer for name in widths})
