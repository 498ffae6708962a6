"""Conditions on training: finite numbers, checkpoints of this plan, and the platform's bounds on scales."""

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from chipfit.errors import PlanError
from chipfit.frameworks.torch.modules import FakeQuantizer
from chipfit.frameworks.training import training_error
from chipfit.plan.record import Plan
from chipfit.plan.sharing import QuantizerSharing, with_trained_numbers
from chipfit.quantizers.ops import TorchOps
from chipfit.quantizers.scale_bounds import SLACK, clip_to_bounds, scale_growth


class Checkpointed(nn.Module):
    """A model that refuses checkpoints of other plans."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a checkpoint, as `nn.Module` does.

        Raises:
            PlanError: The checkpoint is of a model with other tensors, shapes or grids.
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
        quantizers: the quantizers with a scale of their own, by the tensor that owns them.
    """

    def __init__(self, sharing: QuantizerSharing, plan: Plan, quantizers: Mapping[str, FakeQuantizer]) -> None:
        self.plan, self.quantizers, self.sums = plan, quantizers, sharing.sums
        self.bounds = [x for x in sharing.limits if all(t in quantizers for t, _ in x.terms)]
        self.steps = 0  #: steps of training so far
        self._pot = {t for t, q in quantizers.items() if q.grid.pot}
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
    def enforce(self, weights: Mapping[str, torch.Tensor], rounded: Callable[[str], torch.Tensor]) -> None:
        """Check all numbers, and project scales into the platform's bounds.

        Args:
            weights: the parameters that train beside scales, by name.
            rounded: function from the name of a weight to the weight that is rounded.

        Raises:
            TrainingError: A number is not finite, or a scale is not positive; names layer and step.
        """
        scales = self._scales()
        if scales.is_meta:
            return
        norm = torch.nn.utils.get_total_norm(list(weights.values()), math.inf)
        violated = self._violated(scales)
        fine = [torch.isfinite(norm).to(scales.device), ((scales > 0) & (scales < math.inf)).all(), ~violated.any()]
        finite, positive, inside = torch.stack(fine).tolist()
        if not (positive and finite):
            now = {t: q.numbers()[0] for t, q in self.quantizers.items()}
            check_numbers(self.steps, weights, now, self.plan.layer_of)
        if not inside:
            self._project()
        for name, most in self.sums.items():
            t, q = self.plan.tensors[name], self.quantizers[name]
            while True:
                stored = with_trained_numbers(t, *q.numbers(), q.trained_grid()).stored
                factor = scale_growth(stored, rounded(name), most) if stored is not None else None
                if factor is None:
                    break
                q.rescale(factor.to(q.scale.device))

    def _project(self) -> None:
        moves = [t for t, q in self.quantizers.items() if q.trainable_parameters()]
        moves.sort(key=lambda t: (not self.quantizers[t].scale.dim(), self.plan.tensors[t].role != "weight"))
        for order in (moves, moves[::-1]):  # backwards, if an algorithm could not reach its scale
            log = {t: q.numbers()[0].double().log2() for t, q in self.quantizers.items()}
            for t, new in clip_to_bounds(TorchOps, self.bounds, log, order, self._pot).items():
                if not torch.equal(new, log[t]):
                    self.quantizers[t].rescale(torch.exp2(new - log[t]))
            violated = self._violated(self._scales())
            if not bool(violated.any()):
                return
        bound = self.bounds[int(self._table[-1][int(violated.nonzero()[0])])]
        layer = next((self.plan.tensors[t].layer for t, _ in bound.terms if t in moves), "") or bound.terms[0][0]
        raise training_error(f"the scales that train cannot satisfy the platform's rule {bound}", layer, self.steps)

    def _scales(self) -> torch.Tensor:
        """Return all scales in one float64 vector."""
        return torch.cat([q.numbers()[0].reshape(-1) for q in self.quantizers.values()]).double()

    def _violated(self, scales: torch.Tensor) -> torch.Tensor:
        """Return which rows of the table are violated."""
        if self._table[0].device != scales.device:
            self._table = tuple(t.to(scales.device) for t in self._table)
        indices, exponents, low, high, _ = self._table
        total = (scales.log2()[indices] * exponents).sum(-1)
        return (total < low - SLACK) | (total > high + SLACK)


@torch.no_grad()
def check_numbers(
    step: int, weights: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor], layer_of: Callable[[str], str]
) -> None:
    """Check that scales are positive and weights are finite.

    Args:
        layer_of: function from the name of a scale to its layer; the name of a weight contains its layer.

    Raises:
        TrainingError: They are not; names layer and step.
    """
    for name, s in scales.items():
        if (wrong := s[~((s > 0) & (s < math.inf))].reshape(-1)).numel():
            raise training_error(f"the scale of '{name}' is {float(wrong[0]):g}", layer_of(name), step)
    for name, w in weights.items():
        if not bool(w.isfinite().all()):
            raise training_error(f"'{name}' holds NaN or infinite numbers", name.rpartition(".")[0], step)
