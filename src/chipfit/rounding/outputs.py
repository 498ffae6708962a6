"""The loss in a network's outputs: each part of an output is weighed by its own power, whatever its neighbours are.

Class scores lose KL(softmax(float) || softmax(other)) in nats, other parts the energy of what differs, as a share of
their own. Every choice by the loss at the outputs is made with these functions.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Generator, Tensor, multinomial, randn

from chipfit.calibration.collect import ValidTokens, without_padding
from chipfit.engine.parts import part_labels
from chipfit.graph.ir import Graph
from chipfit.graph.joins import Joins
from chipfit.quantizers.noise import decibels

#: least and greatest standard deviation of the scores of one sample over its classes, of the median sample
_SPREAD = 0.25, 20.0
#: the probabilities of all classes sum up to 1 but for this
_SUM_ERROR = 1e-2


def parts_of(graph: Graph, values: Mapping[str, Any], valid: ValidTokens | None = None) -> dict[str, Tensor]:
    """Return the parts of the float outputs, by name.

    An output is one part; one that joins values, as a concatenation of boxes and scores does, has a part for each of
    them, [N, 1, numbers].

    Args:
        values: outputs by name.
        valid: positions that are not padding, as of `valid_tokens`.
    """
    joins, out = Joins(graph), dict[str, Tensor]()
    for name in (o for o in dict.fromkeys(graph.outputs) if graph.is_float(o)):
        y = without_padding(values[name], valid)
        labels = output_labels(joins, name, y) if y.shape == values[name].shape else None
        if labels is None:
            out[name] = y
        else:
            places = ((part, (labels == k).flatten()) for k, part in enumerate(joins.parts(name)))
            out |= {f"{part} in {name}": y.flatten(1)[:, here].unsqueeze(1) for part, here in places if here.any()}
    return out


def output_labels(joins: Joins, output: str, y: Tensor) -> Tensor | None:
    """Return `engine.parts.part_labels` of one sample of an output, [*y.shape[1:]]; None where sizes are not known."""
    labels = part_labels(joins, output)
    try:
        return None if labels is None else labels.expand(1, *y.shape[1:])[0]
    except RuntimeError:  # axes that have taken the batch's place
        return None


def is_scores(y: Tensor) -> bool:
    """Return whether a part of the float network is compared as class scores: [N, C] whose softmax chooses a class.

    The softmax of numbers that hardly differ is even, and that of coordinates in pixels has one class for all samples:
    what rounding does to them does not show in it. Probabilities have had their softmax.
    """
    if y.dim() != 2 or y.shape[1] < 2 or not len(y):
        return False
    y, (least, most) = y.detach().float(), _SPREAD
    spread = y.std(1, correction=0).median()
    probable = (y >= 0).all() & ((y.sum(1) - 1).abs() < _SUM_ERROR).all()
    return bool((spread >= least) & (spread <= most) & ~probable)


@dataclass
class OutputErrors:
    """The errors of parts, added up over batches."""

    #: part -> [loss, quantity of which it is a share, energy of the errors, energy of the part]
    sums: dict[str, list[float]] = field(default_factory=dict)

    def add(self, wanted: Mapping[str, Tensor], got: Mapping[str, Tensor], scores: Container[str] = ()) -> None:
        """Add the parts of one batch, of the float network and of another, on the CPU; `scores` are class scores."""
        for name, want in wanted.items():
            y, x = want.double(), got[name].double()
            noise, signal = float((x - y).square().sum()), float(y.square().sum())
            loss, whole = noise, signal
            if name in scores:
                p, q = y.log_softmax(1), x.log_softmax(1)
                loss, whole = float((p.exp() * (p - q)).sum()), float(len(y))
            sums = self.sums.setdefault(name, [0.0] * 4)
            sums[:] = (a + b for a, b in zip(sums, (loss, whole, noise, signal), strict=True))

    @classmethod
    def merged(cls, several: Iterable[OutputErrors]) -> OutputErrors:
        """Return the sums of the errors of several batches."""
        out = cls()
        for errors in several:
            for name, new in errors.sums.items():
                sums = out.sums.setdefault(name, [0.0] * 4)
                sums[:] = (a + b for a, b in zip(sums, new, strict=True))
        return out

    @property
    def loss(self) -> float:
        """The sum of the parts' losses; 0 if all parts are equal."""
        return sum(loss / whole if whole else loss for loss, whole, _, _ in self.sums.values())

    @property
    def sqnr_db(self) -> float:
        """Signal over noise [dB] of the mean part, each part's noise as a share of its own signal."""
        shares = [noise / signal for _, _, noise, signal in self.sums.values() if signal]
        return decibels(1.0, sum(shares) / max(1, len(shares)))


def sampled_loss(y: Tensor, random: Generator) -> Tensor:
    """Return a loss whose gradient has the Fisher information F of a part as its second moment.

    d' F d / 2 is then the KL divergence of class scores, or the energy of d as a share of the energy of the part.

    Args:
        random: of the CPU, so that labels do not depend on the device.
    """
    if is_scores(y):
        labels = multinomial(y.detach().softmax(1).cpu(), 1, generator=random)[:, 0].to(y.device)
        return F.cross_entropy(y, labels, reduction="sum")
    energy = y.detach().square().sum() / max(len(y) if y.dim() else 1, 1)
    noise = randn(y.shape, generator=random).to(y.device) * (2 / energy.clamp_min(1e-24)).sqrt()
    return (y * noise).sum()
