"""Checks of the numbers of each training step, and bounds on scales, with at most one wait for the device."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.frameworks.training import ScaleBounds, check_numbers
from chipfit.plan.record import Plan
from chipfit.plan.sharing import QuantizerSharing
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.scale_bounds import SLACK, clip_to_bounds, growth, sums_of


@dataclass
class _Answer:
    """The numbers of one step in one vector on the CPU, which a device may still have to fill."""

    step: int
    numbers: torch.Tensor  #: scales of all tensors, greatest magnitudes of all weights, further numbers
    scales: dict[str, int]  #: number of scales by tensor
    weights: Sequence[str]
    written: torch.Event | None  #: after it the vector is complete; None: it is complete

    def check(self, layer_of: Callable[[str], str]) -> tuple[dict[str, torch.Tensor], list[float]]:
        """Return scales by tensor, float64 on the CPU, and the further numbers; raise for invalid ones."""
        while self.written is not None and not self.written.query():  # only where the host is a whole step ahead
            time.sleep(1e-4)
        numbers = self.numbers.double()
        count = sum(self.scales.values())
        scales = dict(zip(self.scales, numbers[:count].split([*self.scales.values()]), strict=True))
        if not (bool(numbers.isfinite().all()) and bool((numbers[:count] > 0).all())):
            weights = dict(zip(self.weights, numbers[count:]))
            check_numbers(self.step, weights, scales, layer_of)
        return scales, numbers[count + len(self.weights) :].tolist()


class StepCheck:
    """A check that the weights and scales of each training step are valid numbers.

    All of them come from the device with one copy. Where nothing else depends on them, an accelerator is not awaited:
    they are read in the next step, and the error names the step that they belong to.

    Args:
        layer_of: function from the name of a scale to its layer, for messages.
    """

    def __init__(self, layer_of: Callable[[str], str]) -> None:
        self._layer_of = layer_of
        self._earlier: _Answer | None = None

    def __getstate__(self) -> dict[str, Any]:  # events are neither copied nor saved
        return {**self.__dict__, "_earlier": None}

    @torch.no_grad()
    def __call__(
        self,
        step: int,
        weights: Mapping[str, torch.Tensor],
        scales: Mapping[str, torch.Tensor],
        further: Sequence[torch.Tensor] = (),
        later: bool = False,
    ) -> tuple[dict[str, torch.Tensor], list[float]] | None:
        """Check the numbers of a step.

        Args:
            step: number of the step, for messages.
            weights: the parameters that train beside scales, by name.
            scales: the current scales by tensor, [] or [C].
            further: numbers [] that come with the same copy.
            later: read them in the next call if they are on an accelerator.

        Returns:
            Scales by tensor, float64 on the CPU, and the further numbers; None if they are read later.

        Raises:
            TrainingError: A number is not finite, or a scale is not positive; names layer and step.
        """
        earlier, self._earlier = self._earlier, None
        if earlier is not None:
            earlier.check(self._layer_of)
        parts = [s.reshape(-1) for s in scales.values()]
        if weights:
            norms = torch.stack(torch._foreach_norm([*weights.values()], math.inf))
            parts.append(norms.full_tensor() if hasattr(norms, "full_tensor") else norms)  # of sharded weights
        if not parts or any(p.is_meta for p in parts):
            return None
        where = parts[-1].device
        vector = torch.cat([p.to(where) for p in [*parts, *(n.reshape(1) for n in further)]])
        sizes, later = {t: s.numel() for t, s in scales.items()}, later and where.type != "cpu"
        numbers = vector.to("cpu", non_blocking=later)
        written = torch.Event(where) if later else None
        answer = _Answer(step, numbers, sizes, [*weights], written)
        if written is None:
            return answer.check(self._layer_of)
        written.record()
        self._earlier = answer
        return None


class TorchScaleBounds(ScaleBounds):
    """The bounds of one model, checked at once for all of its quantizers."""

    def __init__(self, sharing: QuantizerSharing, plan: Plan, quantizers: Mapping[str, FakeQuantizer]) -> None:
        layers = {t: plan.layer_of(t) for t in quantizers}
        super().__init__(
            quantizers, sharing.limits, layers, {t for t in quantizers if plan.tensors[t].role == "weight"}
        )
        self.plan, self.sums = plan, sharing.sums
        self.steps = 0  #: steps of training so far
        self.settled = False  #: all numbers have been checked since the step of the optimizer
        self._check = StepCheck(layers.__getitem__)
        sizes = {t: q.scale.numel() for t, q in quantizers.items()}
        start = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        rows = []  # for each channel of each bound: indices of its scales, their exponents, low, high, bound
        width = max((len(x.terms) for x in self.bounds), default=0)
        for k, x in enumerate(self.bounds):
            for c in range(max(sizes[t] for t, _ in x.terms)):
                at = [start[t] + (c if sizes[t] > 1 else 0) for t, _ in x.terms]
                pad = [0] * (width - len(at))
                rows.append((at + pad, [float(e) for _, e in x.terms] + [0.0] * len(pad), x.low, x.high, k))
        indices, exponents, low, high, which = zip(*rows, strict=True) if rows else ((),) * 5
        self._table = (
            torch.tensor(indices, dtype=torch.long),
            *(torch.tensor(v, dtype=torch.float64) for v in (exponents, low, high)),
            torch.tensor(which, dtype=torch.long),
        )

    @torch.no_grad()
    def enforce(
        self, weights: Mapping[str, torch.Tensor], rounded: Callable[[str], torch.Tensor], begins: bool = False
    ) -> None:
        """Check all numbers, and project scales into the platform's bounds.

        Args:
            weights: the parameters that train beside scales, by name.
            rounded: function from the name of a weight to the weight that is rounded.
            begins: whether a training step begins. On an accelerator it is then awaited only if training can violate a
                bound; otherwise the numbers are checked in the next step.

        Raises:
            TrainingError: A number is not finite, or a scale is not positive; names layer and step.
        """
        settled, self.settled = self.settled, False
        if begins and settled:
            return
        later = begins and not (self.sums or (self.bounds and self.moves()))
        scales = {t: q.numbers()[0] for t, q in self.quantizers.items()}
        over = [(self._sums(name, rounded) > int(most)).any().to(torch.float32) for name, most in self.sums.items()]
        found = self._check(self.steps, weights, scales, over, later)
        if found is None:
            return
        moved = bool(self._violated(found[0]).any())
        if moved:
            self._project(found[0])
        for name, too_large in zip(self.sums, found[1], strict=True):
            if moved or too_large:
                self._grow(name, rounded)

    def _sums(self, name: str, rounded: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the sum of |quantized weight| of each channel, integers [C]."""
        q = self.quantizers[name]
        return sums_of(q.quantize(rounded(name)), q.axis or 0)

    def _grow(self, name: str, rounded: Callable[[str], torch.Tensor]) -> None:
        """Enlarge the scale of a weight until its sums satisfy their bound."""
        q = self.quantizers[name]
        while (
            factor := growth(self._sums(name, rounded).cpu(), self.sums[name], q.grid.pot, q.numbers()[0].dim() > 0)
        ) is not None:
            q.rescale(factor)

    def _project(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Move scales into the bounds.

        Args:
            scales: the current scales by tensor, float64 on the CPU, [C].
        """
        moves = self.moves()
        for order in (moves, moves[::-1]):  # backwards, if an algorithm could not reach its scale
            log = {t: s.log2().reshape(self.quantizers[t].numbers()[0].shape) for t, s in scales.items()}
            for t, new in clip_to_bounds(TorchOps, self.bounds, log, order, self.pot).items():
                if not torch.equal(new, log[t]):
                    self.quantizers[t].rescale(torch.exp2(new - log[t]))
            now = {t: q.numbers()[0] for t, q in self.quantizers.items()}
            numbers = torch.cat([s.reshape(-1) for s in now.values()]).cpu().double()
            scales = dict(zip(now, numbers.split([s.numel() for s in now.values()]), strict=True))
            violated = self._violated(scales)
            if not bool(violated.any()):
                return
        raise self.unsatisfied(self.bounds[int(self._table[-1][int(violated.nonzero()[0])])], self.steps)

    def _violated(self, scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return which rows of the table are violated."""
        indices, exponents, low, high, _ = self._table
        total = (torch.cat([*scales.values()]).log2()[indices] * exponents).sum(-1)
        return (total < low - SLACK) | (total > high + SLACK)
