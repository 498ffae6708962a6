"""What holds in each step of training: numbers that are numbers, of this plan, and the platform's bounds on scales."""

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from chipfit.errors import PlanError, TrainingError
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.plan.record import Plan
from chipfit.plan.sharing import QuantizerSharing, with_trained_numbers
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.scale_bounds import SLACK, clip_to_bounds, enlargement


class Checkpointed(nn.Module):
    """A model that takes numbers from no other plan's checkpoint."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """See `nn.Module`.

        Raises:
            PlanError: it is of a model with other tensors, shapes or grids.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as e:
            got = " ".join(line.strip() for line in str(e).splitlines()[1:4])[:400]
            hint = "load it into the model of the result that it was saved from; "
            hint += "names that begin with 'module.' come from DistributedDataParallel"
            raise PlanError("This checkpoint is of another plan", got=got, hint=hint) from e


class ScaleBounds:
    """The bounds of one model, checked at once for all of its quantizers.

    Args:
        quantizers: those with a scale of their own, by the tensor that owns them.
    """

    def __init__(self, found: QuantizerSharing, plan: Plan, quantizers: Mapping[str, FakeQuantizer]) -> None:
        self.plan, self.quantizers, self.sums = plan, quantizers, found.sums
        self.limits = [x for x in found.limits if all(t in quantizers for t, _ in x.terms)]
        self.steps = 0  #: of training so far
        self._pot = {t for t, q in quantizers.items() if q.grid.pot}
        sizes = {t: q.scale.numel() for t, q in quantizers.items()}
        start = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        rows = []  # one for each channel of each limit: places of the scales, exponents, ends, and which limit
        most = max((len(x.terms) for x in self.limits), default=0)
        for k, x in enumerate(self.limits):
            for c in range(max(sizes[t] for t, _ in x.terms)):
                at = [start[t] + (c if sizes[t] > 1 else 0) for t, _ in x.terms]
                pad = [0] * (most - len(at))
                rows.append((at + pad, [float(e) for _, e in x.terms] + [0.0] * len(pad), x.low, x.high, k))
        places, exponents, low, high, which = zip(*rows, strict=True) if rows else ((),) * 5
        self._table = (
            torch.tensor(places, dtype=torch.long),
            *(torch.tensor(v, dtype=torch.float64) for v in (exponents, low, high)),
            torch.tensor(which, dtype=torch.long),
        )

    @torch.no_grad()
    def hold(self, weights: Mapping[str, torch.Tensor], rounded: Callable[[str], torch.Tensor]) -> None:
        """Raise where a number is none, and bring scales back to where the platform's rules hold.

        Args:
            weights: what trains beside scales, by name.
            rounded: the weight that is rounded, by name.

        Raises:
            TrainingError: naming layer and step.
        """
        scales = self._scales()
        if scales.is_meta:
            return
        norm = torch.nn.utils.get_total_norm(list(weights.values()), math.inf)
        broken = self._broken(scales)
        fine = [torch.isfinite(norm).to(scales.device), ((scales > 0) & (scales < math.inf)).all(), ~broken.any()]
        finite, positive, inside = torch.stack(fine).tolist()
        if not (positive and finite):
            check_numbers(
                self.steps, weights, {t: q.numbers()[0] for t, q in self.quantizers.items()}, self.plan.layer_of
            )
        if not inside:
            self._project()
        for name, most in self.sums.items():
            t, q = self.plan.tensors[name], self.quantizers[name]
            while True:
                stored = with_trained_numbers(t, *q.numbers(), q.learned()).stored
                factor = enlargement(stored, rounded(name), most) if stored is not None else None
                if factor is None:
                    break
                q.rescale(factor.to(q.scale.device))

    def _project(self) -> None:
        moves = [t for t, q in self.quantizers.items() if q.trained()]
        moves.sort(key=lambda t: (not self.quantizers[t].scale.dim(), self.plan.tensors[t].role != "weight"))
        for order in (moves, moves[::-1]):  # back, where an algorithm could not follow all the way
            log = {t: q.numbers()[0].double().log2() for t, q in self.quantizers.items()}
            for t, new in clip_to_bounds(TorchOps, self.limits, log, order, self._pot).items():
                if not torch.equal(new, log[t]):
                    self.quantizers[t].rescale(torch.exp2(new - log[t]))
            broken = self._broken(self._scales())
            if not bool(broken.any()):
                return
        limit = self.limits[int(self._table[-1][int(broken.nonzero()[0])])]
        layer = next((self.plan.tensors[t].layer for t, _ in limit.terms if t in moves), "") or limit.terms[0][0]
        raise _error(self.steps, f"the scales that train cannot satisfy the platform's rule {limit}", layer)

    def _scales(self) -> torch.Tensor:
        """All of them, one after the other, float64."""
        return torch.cat([q.numbers()[0].reshape(-1) for q in self.quantizers.values()]).double()

    def _broken(self, scales: torch.Tensor) -> torch.Tensor:
        """Which rows of the table are."""
        if self._table[0].device != scales.device:
            self._table = tuple(t.to(scales.device) for t in self._table)
        places, exponents, low, high, _ = self._table
        total = (scales.log2()[places] * exponents).sum(-1)
        return (total < low - SLACK) | (total > high + SLACK)


@torch.no_grad()
def check_numbers(
    step: int, weights: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor], layer_of: Callable[[str], str]
) -> None:
    """Raise where a scale is not positive or a weight is not finite.

    Args:
        layer_of: the layer of a scale by its name; a weight says it.

    Raises:
        TrainingError: naming layer and step.
    """
    for name, s in scales.items():
        if (wrong := s[~((s > 0) & (s < math.inf))].reshape(-1)).numel():
            raise _error(step, f"the scale of '{name}' is {float(wrong[0]):g}", layer_of(name))
    for name, w in weights.items():
        if not bool(w.isfinite().all()):
            raise _error(step, f"'{name}' holds NaN or infinite numbers", name.rpartition(".")[0])


def _error(step: int, what: str, layer: str) -> TrainingError:
    hint = "lower the learning rate, or look at the loss and the data of the step before"
    return TrainingError(f"In step {step} of training, {what}", where=layer, hint=hint)
